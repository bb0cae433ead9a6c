-- Operations: work in the background, in steps. A step's cursor moves in the transaction that does its work, under the
-- lock of the step's row: so two leaders, or one that was killed in between, do each item once.

-- name: insert
INSERT INTO operation (operation_id, tenant_id, kind, state, resource, request, principal, create_us, update_us)
VALUES (%(id)s, %(tenant)s, %(kind)s, 1, %(resource)s, %(request)s::jsonb, %(principal)s, %(now)s, %(now)s)

-- name: insert_steps
INSERT INTO operation_step (operation_id, step, state, cursor)
SELECT %(id)s, ord - 1, 1, cursor FROM unnest(%(cursors)s::jsonb[]) WITH ORDINALITY AS s(cursor, ord)

-- name: get
SELECT operation_id, tenant_id, kind, state, resource, request, principal, create_us, update_us, end_us, cancel_us
  FROM operation WHERE operation_id = %(id)s

-- name: list
-- One page by creation, newest first.
SELECT operation_id, tenant_id, kind, state, resource, request, principal, create_us, update_us, end_us, cancel_us
  FROM operation
 WHERE tenant_id = %(tenant)s AND (create_us, operation_id) < (%(before_us)s, %(before_id)s)
 ORDER BY create_us DESC, operation_id DESC LIMIT %(page_max)s

-- name: totals
SELECT count(*), count(*) FILTER (WHERE state = 2), coalesce(sum(examined_count), 0)::bigint,
       coalesce(sum(changed_count), 0)::bigint, coalesce(sum(skipped_count), 0)::bigint,
       coalesce(max(last_error), '')
  FROM operation_step WHERE operation_id = %(id)s

-- name: moves
SELECT n.name, s.name, m.before_us, m.after_us
  FROM operation_move m JOIN schedule s ON s.uid = m.schedule JOIN tenant n ON n.tenant_id = s.tenant_id
 WHERE m.operation_id = %(id)s ORDER BY m.schedule LIMIT %(count_max)s

-- name: open
-- Operations that are under way, oldest first (index operation_open), each with the first of its steps that can go on.
SELECT o.operation_id, o.tenant_id, o.kind, o.state, o.resource, o.request, o.principal, o.create_us, o.update_us,
       o.end_us, o.cancel_us, s.step, s.not_before_us
  FROM operation o
  LEFT JOIN LATERAL (
       SELECT step, not_before_us FROM operation_step
        WHERE operation_id = o.operation_id AND state = 1 ORDER BY step LIMIT 1) s ON true
 WHERE o.state = 1
 ORDER BY o.create_us, o.operation_id LIMIT %(count_max)s

-- name: open_of
-- Whether an operation of this kind is under way for this resource.
SELECT 1 FROM operation WHERE state = 1 AND kind = %(kind)s AND resource = %(resource)s LIMIT 1

-- name: lock_step
-- The operation's row, shared, says that it was neither ended nor cancelled; the step's row is the licence to act.
SELECT s.cursor, s.attempt_count
  FROM operation_step s
 WHERE s.operation_id = %(id)s AND s.step = %(step)s AND s.state = 1
   AND EXISTS (SELECT FROM operation o WHERE o.operation_id = s.operation_id AND o.state = 1 AND o.cancel_us = 0)
   FOR UPDATE OF s

-- name: advance
UPDATE operation_step
   SET cursor = %(cursor)s::jsonb, examined_count = examined_count + %(examined)s,
       changed_count = changed_count + %(changed)s, skipped_count = skipped_count + %(skipped)s,
       state = CASE WHEN %(done)s THEN 2 ELSE 1 END, attempt_count = 0, last_error = NULL,
       not_before_us = %(not_before)s
 WHERE operation_id = %(id)s AND step = %(step)s

-- name: touch
UPDATE operation SET update_us = %(now)s WHERE operation_id = %(id)s

-- name: fail_step
-- A try that failed: later again, or never, where it was the last.
UPDATE operation_step
   SET attempt_count = attempt_count + 1, last_error = %(error)s, not_before_us = %(not_before)s,
       state = CASE WHEN attempt_count + 1 >= %(attempts_max)s THEN 3 ELSE 1 END
 WHERE operation_id = %(id)s AND step = %(step)s AND state = 1

-- name: end
-- An operation none of whose steps is under way has ended; so has one that was asked to stop.
UPDATE operation o
   SET state = CASE WHEN o.cancel_us > 0 THEN 4
                    WHEN EXISTS (SELECT FROM operation_step s WHERE s.operation_id = o.operation_id AND s.state = 3) THEN 3
                    ELSE 2 END,
       end_us = %(now)s, update_us = %(now)s
 WHERE o.operation_id = %(id)s AND o.state = 1
   AND (o.cancel_us > 0
        OR NOT EXISTS (SELECT FROM operation_step s WHERE s.operation_id = o.operation_id AND s.state = 1))
RETURNING o.state

-- name: cancel
UPDATE operation SET cancel_us = %(now)s, update_us = %(now)s
 WHERE operation_id = %(id)s AND state = 1 AND cancel_us = 0

-- name: delete
DELETE FROM operation WHERE operation_id = %(id)s AND state <> 1

-- name: delete_parts
WITH m AS (DELETE FROM operation_move WHERE operation_id = %(id)s)
DELETE FROM operation_step WHERE operation_id = %(id)s

-- name: insert_move
-- The first count_max of an operation are kept.
INSERT INTO operation_move (operation_id, schedule, before_us, after_us)
SELECT %(id)s, %(schedule)s, %(before)s, %(after)s
 WHERE (SELECT count(*) FROM (SELECT 1 FROM operation_move WHERE operation_id = %(id)s LIMIT %(count_max)s) m)
       < %(count_max)s
ON CONFLICT DO NOTHING

-- name: dependents_page
-- Live schedules that name a calendar, by uid.
SELECT s.uid, n.name, s.name
  FROM schedule_calendar c
  JOIN schedule s ON s.uid = c.schedule AND s.delete_us IS NULL
  JOIN tenant n ON n.tenant_id = s.tenant_id
 WHERE c.calendar = %(calendar)s AND c.schedule > %(after)s
 ORDER BY c.schedule LIMIT %(page_max)s

-- name: shard_page
-- Schedules of a shard by uid (index schedule_shard), each with its timer row, where it has one, and the stored form of
-- its triggers. Not by the timer's own key: there a million waiting runs may lie between two schedules.
SELECT s.uid, t.due_us, t.schedule_us, t.decided_us, t.version, t.trigger_id, d.body
  FROM (SELECT uid FROM schedule WHERE shard_id = %(shard)s AND uid > %(after)s ORDER BY uid LIMIT %(page_max)s) s
  LEFT JOIN timer t ON t.shard_id = %(shard)s AND t.ref = s.uid
  LEFT JOIN trigger_def d ON d.trigger_id = t.trigger_id
 ORDER BY s.uid

-- name: move_timer
-- I2: a compare-and-set, as every fire is: who decided meanwhile has planned the next by itself.
UPDATE timer
   SET due_us = %(due)s, schedule_us = %(schedule)s, decided_us = %(decided)s
 WHERE shard_id = %(shard)s AND ref = %(uid)s AND due_us = %(old_due)s AND schedule_us = %(old_schedule)s
   AND decided_us = %(old_decided)s AND version = %(version)s AND kind = 1

-- name: recorded_tzdata
SELECT tzdata_version, shard_count, EXISTS (SELECT FROM schedule) FROM cluster

-- name: record_tzdata
UPDATE cluster SET tzdata_version = %(version)s WHERE tzdata_version <> %(version)s

-- name: lock_timer
-- I2: what a backfill may claim was decided in the row that stands under this lock.
SELECT decided_us, version, shard_id FROM timer WHERE shard_id = %(shard)s AND ref = %(uid)s AND kind = 1 FOR UPDATE

-- name: settle_claims
-- Claims whose runs have ended. In one snapshot: a run on its way from its timer row to its lease is in one of the two.
UPDATE backfill_claim c SET live = false
 WHERE c.operation_id = %(id)s AND c.live
   AND NOT EXISTS (SELECT FROM timer t WHERE t.shard_id = %(shard)s AND t.ref = c.run)
   AND NOT EXISTS (SELECT FROM lease l WHERE l.shard_id = %(shard)s AND l.run = c.run)

-- name: live_claims
SELECT count(*) FROM backfill_claim WHERE operation_id = %(id)s AND live

-- name: born_leased
-- Which of these occurrences have a run that lives in its first attempt (it may have no row yet). Asked before the rows:
-- what leaves here has a row by then. Causes 1 and 2: SCHEDULED and CATCH_UP; others are no occurrences.
SELECT schedule_us FROM lease
 WHERE shard_id = %(shard)s AND schedule = %(uid)s AND schedule_us = ANY (%(instants)s::bigint[])
   AND (flags >> 12) & 7 IN (1, 2)

-- name: born_rows
-- Which of these occurrences have a run with a row. None was created before its instant.
SELECT schedule_us FROM run
 WHERE schedule = %(uid)s AND create_us >= %(first)s AND schedule_us = ANY (%(instants)s::bigint[]) AND cause IN (1, 2)

-- name: claim
INSERT INTO backfill_claim (schedule, schedule_us, run, operation_id, live)
SELECT %(uid)s, instant, run, %(id)s, true
  FROM unnest(%(instants)s::bigint[], %(runs)s::uuid[]) AS c(instant, run)
ON CONFLICT DO NOTHING RETURNING schedule_us

-- name: insert_backfilled
-- Runs of a backfill, due now. Their timer rows name no schedule, so that its overlap policy does not count them: a
-- backfill has a concurrency of its own. So each carries the payload of its version.
WITH b AS MATERIALIZED (
    SELECT * FROM unnest(%(runs)s::uuid[], %(instants)s::bigint[]) AS b(id, schedule_us)),
r AS (
    INSERT INTO run (id, schedule, template_id, version, schedule_us, create_us, due_us, tenant_id, route_id, shard_id,
                     cause, state, priority, attempt, payload, content_type)
    SELECT b.id, %(uid)s, %(template)s, %(version)s, b.schedule_us, %(now)s, %(now)s, %(tenant)s, %(route)s, %(shard)s,
           %(cause)s, 1, %(priority)s, 0, %(payload)s, %(content_type)s
      FROM b)
INSERT INTO timer (due_us, schedule_us, decided_us, version, trigger_id, template_id, ref, schedule, tenant_id,
                   route_id, flags, misfire_ms, countdown, shard_id, kind, priority, attempt)
SELECT %(now)s, b.schedule_us, %(now)s, %(version)s, 0, %(template)s, b.id, NULL, %(tenant)s, %(route)s, %(flags)s, 0, 0,
       %(shard)s, 2, %(priority)s, 0
  FROM b
