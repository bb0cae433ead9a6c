-- Schedules, and the timer rows in which they meet their shard's owner. Lock order everywhere: timer row, then schedule.

-- name: get
-- A live schedule by name, with its timer row and, where asked for, its payload.
SELECT s.uid, s.shard_id, s.name, s.version, s.revision, s.spec::text, s.trigger_id, s.template_id, s.labels, s.annotations,
       s.pause, s.quarantine_reason, s.create_us, s.update_us, s.delete_us, t.due_us, t.schedule_us, t.decided_us,
       t.version, t.countdown, v.payload, v.content_type, d.body
  FROM schedule s
  LEFT JOIN timer t ON t.shard_id = s.shard_id AND t.ref = s.uid
  LEFT JOIN trigger_def d ON d.trigger_id = s.trigger_id
  LEFT JOIN schedule_revision v ON %(full)s AND v.uid = s.uid AND v.version = s.version
 WHERE s.tenant_id = %(tenant)s AND s.name = %(name)s AND s.delete_us IS NULL

-- name: list
-- One page by (creation, uid). At most scan_max rows are looked at, whatever the filter leaves of them; the cursor of
-- the last one looked at comes back on each row, so that a page that filtered everything away still leads on.
WITH seen AS MATERIALIZED (
    SELECT * FROM schedule
     WHERE tenant_id = %(tenant)s AND (create_us, uid) > (%(after_us)s, %(after_uid)s)
     ORDER BY create_us, uid LIMIT %(scan_max)s),
found AS (
    SELECT s.*, t.due_us AS t_due, t.schedule_us AS t_schedule, t.decided_us AS t_decided, t.version AS t_version,
           t.countdown AS t_countdown
      FROM seen s LEFT JOIN timer t ON t.shard_id = s.shard_id AND t.ref = s.uid
     WHERE (%(deleted)s OR s.delete_us IS NULL)
       AND (%(labels)s::jsonb IS NULL OR s.labels @> %(labels)s::jsonb)
       AND (%(prefix)s::text IS NULL OR starts_with(s.name, %(prefix)s))
       AND (%(exact)s::text IS NULL OR s.name = %(exact)s)
       AND (%(queue)s::text IS NULL OR coalesce(nullif(s.spec #>> '{template,queue}', ''), 'default') = %(queue)s)
       AND (%(kind)s::text IS NULL OR s.spec #>> '{template,kind}' = %(kind)s)
       AND (%(state)s::int IS NULL OR %(state)s = CASE
            WHEN s.delete_us IS NOT NULL THEN 5 WHEN s.quarantine_reason IS NOT NULL THEN 4
            WHEN s.pause IS NOT NULL THEN 2
            WHEN t.due_us IS NULL OR t.due_us = 9223372036854775807 OR t.countdown = 0 THEN 3 ELSE 1 END)
     ORDER BY s.create_us, s.uid LIMIT %(page_max)s)
SELECT f.uid, f.shard_id, f.name, f.version, f.revision, f.spec::text, f.trigger_id, f.template_id, f.labels,
       f.annotations, f.pause, f.quarantine_reason, f.create_us, f.update_us, f.delete_us, f.t_due, f.t_schedule,
       f.t_decided, f.t_version, f.t_countdown, v.payload, v.content_type, d.body, e.seen_count, e.last_us, e.last_uid
  FROM (SELECT count(*) AS seen_count, (array_agg(create_us ORDER BY create_us DESC, uid DESC))[1] AS last_us,
               (array_agg(uid ORDER BY create_us DESC, uid DESC))[1] AS last_uid FROM seen) e
  LEFT JOIN found f ON true
  LEFT JOIN trigger_def d ON d.trigger_id = f.trigger_id
  LEFT JOIN schedule_revision v ON %(full)s AND v.uid = f.uid AND v.version = f.version
 ORDER BY f.create_us, f.uid

-- name: locate
SELECT uid, shard_id FROM schedule WHERE tenant_id = %(tenant)s AND name = %(name)s AND delete_us IS NULL

-- name: lock_timer
-- I2: whoever rewrites the row computes from the value that stands in it under this lock.
SELECT due_us FROM timer WHERE shard_id = %(shard)s AND ref = %(uid)s FOR UPDATE

-- name: lock_schedule
SELECT 1 FROM schedule WHERE uid = %(uid)s AND delete_us IS NULL FOR UPDATE

-- name: lock_placement
-- A tenant's spread does not change while a schedule is being placed by it.
SELECT spread FROM tenant WHERE tenant_id = %(tenant)s FOR SHARE

-- name: insert
-- A schedule, its first version and its timer row, in one.
WITH t AS (
    INSERT INTO trigger_def (trigger_id, body) VALUES (%(trigger)s, %(trigger_body)s) ON CONFLICT DO NOTHING),
j AS (
    INSERT INTO template_def (template_id, body) VALUES (%(template)s, %(template_body)s) ON CONFLICT DO NOTHING),
s AS (
    INSERT INTO schedule (uid, shard_id, tenant_id, name, version, revision, spec, trigger_id, template_id, labels,
                          annotations, create_us, update_us, traceparent)
    VALUES (%(uid)s, %(shard)s, %(tenant)s, %(name)s, 1, 1, %(spec)s::jsonb, %(trigger)s, %(template)s, %(labels)s::jsonb,
            %(annotations)s::jsonb, %(now)s, %(now)s, %(traceparent)s)),
v AS (
    INSERT INTO schedule_revision (uid, version, shard_id, spec, trigger_id, template_id, payload, content_type,
                                   principal, create_us)
    VALUES (%(uid)s, 1, %(shard)s, %(spec)s::jsonb, %(trigger)s, %(template)s, %(payload)s, %(content_type)s,
            %(principal)s, %(now)s))
INSERT INTO timer (due_us, schedule_us, decided_us, version, trigger_id, template_id, ref, tenant_id, route_id, flags,
                   misfire_ms, countdown, shard_id, kind, priority, attempt)
VALUES (%(due)s, %(schedule)s, %(decided)s, 1, %(trigger)s, %(template)s, %(uid)s, %(tenant)s, %(route)s, %(flags)s,
        %(misfire_ms)s, %(countdown)s, %(shard)s, 1, %(priority)s, 0)

-- name: insert_version
-- A further version of the spec.
WITH t AS (
    INSERT INTO trigger_def (trigger_id, body) VALUES (%(trigger)s, %(trigger_body)s) ON CONFLICT DO NOTHING),
j AS (
    INSERT INTO template_def (template_id, body) VALUES (%(template)s, %(template_body)s) ON CONFLICT DO NOTHING),
v AS (
    INSERT INTO schedule_revision (uid, version, shard_id, spec, trigger_id, template_id, payload, content_type,
                                   principal, create_us)
    VALUES (%(uid)s, %(version)s, %(shard)s, %(spec)s::jsonb, %(trigger)s, %(template)s, %(payload)s, %(content_type)s,
            %(principal)s, %(now)s))
UPDATE timer
   SET version = %(version)s, trigger_id = %(trigger)s, template_id = %(template)s, route_id = %(route)s,
       flags = %(flags)s, misfire_ms = %(misfire_ms)s, countdown = %(countdown)s, priority = %(priority)s
 WHERE shard_id = %(shard)s AND ref = %(uid)s

-- name: write
-- The schedule's own row after any mutation.
UPDATE schedule
   SET version = %(version)s, revision = revision + 1, spec = %(spec)s::jsonb, trigger_id = %(trigger)s,
       template_id = %(template)s, labels = %(labels)s::jsonb, annotations = %(annotations)s::jsonb,
       pause = %(pause)s::jsonb, quarantine_reason = %(quarantine_reason)s, update_us = %(now)s
 WHERE uid = %(uid)s

-- name: write_timer
-- When it is due next; the row is locked.
UPDATE timer SET due_us = %(due)s, schedule_us = %(schedule)s, decided_us = %(decided)s
 WHERE shard_id = %(shard)s AND ref = %(uid)s

-- name: delete_timer
DELETE FROM timer WHERE shard_id = %(shard)s AND ref = %(uid)s

-- name: delete
UPDATE schedule SET delete_us = %(now)s, update_us = %(now)s, revision = revision + 1 WHERE uid = %(uid)s

-- name: insert_decision
-- What did not become a run, and why.
INSERT INTO decision (schedule, from_us, until_us, decided_us, count, tenant_id, shard_id, reason, detail)
VALUES (%(uid)s, %(from_us)s, %(until_us)s, %(now)s, %(count)s, %(tenant)s, %(shard)s, %(reason)s, %(detail)s)
ON CONFLICT DO NOTHING

-- name: live_runs
-- Runs of the schedule that wait or run now: (shard, id), in lock order.
SELECT ref FROM timer WHERE shard_id = %(shard)s AND schedule = %(uid)s AND kind = 2
UNION ALL
SELECT run FROM lease WHERE shard_id = %(shard)s AND schedule = %(uid)s
 ORDER BY 1 LIMIT %(count_max)s

-- name: last_run
-- The newest run that has a row, and the newest that succeeded.
SELECT id, end_us FROM run WHERE schedule = %(uid)s ORDER BY create_us DESC, id DESC LIMIT 1

-- name: last_lease
SELECT run FROM lease WHERE shard_id = %(shard)s AND schedule = %(uid)s ORDER BY lease_us DESC LIMIT 1

-- name: last_success
-- Among the newest rows_max runs of the schedule.
SELECT max(end_us) FROM (
    SELECT end_us, state FROM run WHERE schedule = %(uid)s ORDER BY create_us DESC, id DESC LIMIT %(rows_max)s) r
 WHERE state = 5

-- name: due_resumes
-- Paused schedules whose time to resume has come, oldest first (index schedule_resume).
SELECT s.uid, n.name, s.name
  FROM schedule s JOIN tenant n ON n.tenant_id = s.tenant_id
 WHERE s.pause ->> 'resume_us' IS NOT NULL AND (s.pause ->> 'resume_us')::bigint <= %(now)s AND s.delete_us IS NULL
 ORDER BY (s.pause ->> 'resume_us')::bigint LIMIT %(count_max)s
