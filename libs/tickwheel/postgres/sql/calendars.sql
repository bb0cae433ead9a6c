-- Calendars and who names them. Lock order: a schedule's timer row, its own row, then calendars: so a calendar's mutation,
-- which locks the calendar alone, waits for schedules that are being computed from it, and finds them afterwards.

-- name: get
SELECT c.uid, c.name, c.revision, c.create_us, c.update_us, c.delete_us, r.display_name, r.labels, r.source, r.dates,
       r.effective_year, r.create_us
  FROM calendar c
  JOIN calendar_revision r ON r.uid = c.uid AND r.revision = coalesce(nullif(%(revision)s::bigint, 0), c.revision)
 WHERE c.tenant_id = %(tenant)s AND c.name = %(name)s AND c.delete_us IS NULL

-- name: lock
SELECT uid FROM calendar WHERE tenant_id = %(tenant)s AND name = %(name)s AND delete_us IS NULL FOR UPDATE

-- name: list
SELECT c.uid, c.name, c.revision, c.create_us, c.update_us, c.delete_us, r.display_name, r.labels, r.source, r.dates,
       r.effective_year, r.create_us
  FROM calendar c JOIN calendar_revision r ON r.uid = c.uid AND r.revision = c.revision
 WHERE c.tenant_id = %(tenant)s AND c.delete_us IS NULL AND (c.create_us, c.uid) > (%(after_us)s, %(after_uid)s)
 ORDER BY c.create_us, c.uid LIMIT %(page_max)s

-- name: revisions
SELECT c.uid, c.name, r.revision, c.create_us, c.update_us, c.delete_us, r.display_name, r.labels, r.source, r.dates,
       r.effective_year, r.create_us
  FROM calendar c JOIN calendar_revision r ON r.uid = c.uid
 WHERE c.tenant_id = %(tenant)s AND c.name = %(name)s AND c.delete_us IS NULL AND r.revision < %(before)s
 ORDER BY r.revision DESC LIMIT %(page_max)s

-- name: insert
INSERT INTO calendar (uid, tenant_id, name, revision, effective_year, create_us, update_us)
VALUES (%(uid)s, %(tenant)s, %(name)s, 1, %(year)s, %(now)s, %(now)s)

-- name: write
UPDATE calendar SET revision = %(revision)s, effective_year = %(year)s, update_us = %(now)s WHERE uid = %(uid)s

-- name: insert_revision
INSERT INTO calendar_revision (uid, revision, display_name, labels, source, dates, effective_year, principal, create_us)
VALUES (%(uid)s, %(revision)s, %(display_name)s, %(labels)s::jsonb, %(source)s::jsonb, %(dates)s::jsonb, %(year)s,
        %(principal)s, %(now)s)

-- name: delete
UPDATE calendar SET delete_us = %(now)s, update_us = %(now)s, revision = revision + 1 WHERE uid = %(uid)s

-- name: share
-- None of these calendars changes before this transaction ends. Their dates are read in the next statement: this one
-- does not see the revision that it waited for, and a join to it would find none.
SELECT 1 FROM calendar
 WHERE tenant_id = %(tenant)s AND name = ANY (%(names)s) AND delete_us IS NULL
 ORDER BY uid FOR SHARE

-- name: read
-- The dates of these calendars as they stand.
SELECT c.name, c.uid, r.dates, r.display_name
  FROM calendar c JOIN calendar_revision r ON r.uid = c.uid AND r.revision = c.revision
 WHERE c.tenant_id = %(tenant)s AND c.name = ANY (%(names)s) AND c.delete_us IS NULL

-- name: unlink
DELETE FROM schedule_calendar WHERE schedule = %(schedule)s

-- name: link
INSERT INTO schedule_calendar (calendar, schedule) SELECT unnest(%(calendars)s::uuid[]), %(schedule)s ON CONFLICT DO NOTHING

-- name: dependents
SELECT s.uid, s.name
  FROM schedule_calendar c JOIN schedule s ON s.uid = c.schedule AND s.delete_us IS NULL
 WHERE c.calendar = %(calendar)s AND c.schedule > %(after)s
 ORDER BY c.schedule LIMIT %(page_max)s

-- name: outrun
-- Calendars with rules that were not worked out far enough ahead any more.
SELECT n.name, c.name
  FROM calendar c
  JOIN tenant n ON n.tenant_id = c.tenant_id
  JOIN calendar_revision r ON r.uid = c.uid AND r.revision = c.revision
 WHERE c.delete_us IS NULL AND c.effective_year < %(year)s AND jsonb_array_length(r.source -> 'rules') > 0
 ORDER BY c.uid LIMIT %(count_max)s
