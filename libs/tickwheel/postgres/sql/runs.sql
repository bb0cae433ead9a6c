-- Runs as coordinators write and read them. "No timer row (kind 2) and no lease row" = the run is terminal.

-- name: insert_runs
-- Waiting runs and their timer rows, column by column: no work a row outside the server.
WITH b AS MATERIALIZED (
    SELECT * FROM unnest(%(id)s, %(shard)s, %(due)s, %(template)s, %(route)s, %(priority)s, %(flags)s, %(payload)s,
                         %(content_type)s, %(labels)s)
           AS b(id, shard, due_us, template_id, route_id, priority, flags, payload, content_type, labels)),
r AS (
    INSERT INTO run (id, schedule, replayed_from, template_id, version, schedule_us, create_us, due_us, tenant_id,
                     route_id, shard_id, cause, state, priority, attempt, payload, content_type, labels, traceparent)
    SELECT b.id, %(schedule)s::uuid, %(replayed_from)s::uuid, b.template_id, %(version)s::bigint, b.due_us,
           %(now)s::bigint, b.due_us, %(tenant)s::int, b.route_id, b.shard, %(cause)s::smallint, 1, b.priority, 0,
           b.payload, b.content_type, b.labels::jsonb, %(traceparent)s::text
      FROM b)
INSERT INTO timer (due_us, schedule_us, decided_us, version, trigger_id, template_id, ref, schedule, tenant_id,
                   route_id, flags, misfire_ms, countdown, shard_id, kind, priority, attempt)
SELECT b.due_us, b.due_us, %(now)s::bigint, %(version)s::bigint, 0, b.template_id, b.id, %(schedule)s::uuid,
       %(tenant)s::int, b.route_id, b.flags, 0, 0, b.shard, 2, b.priority, 0
  FROM b

-- name: details
-- Everything that is known of these runs, in one snapshot: row, lease, timer, in the order of the keys.
SELECT k.run, k.shard, r.tenant_id, r.schedule, r.replayed_from, r.template_id, r.version, r.schedule_us, r.create_us,
       r.due_us, r.lease_us, r.end_us, r.worker_no, r.cause, r.state, r.attempt, r.spent, r.payload, r.content_type,
       r.result, r.result_type, r.failure, r.progress, r.cancel_reason, r.labels, r.traceparent,
       l.tenant_id, l.schedule, l.template_id, l.version, l.schedule_us, l.create_us, l.due_us, l.lease_us, l.worker_no,
       l.flags, l.attempt, l.spent, l.cancel_us, l.cancel_reason, l.progress,
       t.due_us, t.decided_us, s.name, w.worker_id, w.host, v.payload, v.content_type
  FROM unnest(%(shard)s::smallint[], %(run)s::uuid[]) WITH ORDINALITY AS k(shard, run, ord)
  LEFT JOIN LATERAL (SELECT * FROM run WHERE shard_id = k.shard AND id = k.run LIMIT 1) r ON true
  LEFT JOIN LATERAL (SELECT * FROM lease WHERE shard_id = k.shard AND lease.run = k.run LIMIT 1) l ON true
  LEFT JOIN LATERAL (SELECT * FROM timer WHERE shard_id = k.shard AND ref = k.run LIMIT 1) t ON true
  LEFT JOIN LATERAL (SELECT name FROM schedule WHERE uid = coalesce(r.schedule, l.schedule) LIMIT 1) s ON true
  LEFT JOIN LATERAL (SELECT worker_id, host FROM worker_node
                      WHERE worker_no = coalesce(l.worker_no, r.worker_no) LIMIT 1) w ON true
  LEFT JOIN LATERAL (SELECT payload, content_type FROM schedule_revision
                      WHERE %(full)s AND uid = coalesce(r.schedule, l.schedule)
                        AND version = coalesce(r.version, l.version) AND r.payload IS NULL LIMIT 1) v ON true
 ORDER BY k.ord

-- name: list_rows
-- One page of a tenant's runs that have a row, newest first. The bound on the id leaves newer partitions out. At most
-- scan_max rows are looked at; with by_state each says whether it is leased now.
SELECT shard_id, id, create_us, state,
       %(by_state)s AND EXISTS (
           SELECT FROM lease l WHERE l.shard_id = r.shard_id AND l.run = r.id AND l.cancel_us = 0) AS runs,
       %(by_state)s AND EXISTS (
           SELECT FROM lease l WHERE l.shard_id = r.shard_id AND l.run = r.id AND l.cancel_us > 0) AS cancels
  FROM run r
 WHERE tenant_id = %(tenant)s AND (create_us, id) < (%(before_us)s, %(before_id)s) AND id < %(id_bound)s
 ORDER BY create_us DESC, id DESC LIMIT %(scan_max)s

-- name: list_rows_of_schedule
SELECT shard_id, id, create_us, state,
       %(by_state)s AND EXISTS (
           SELECT FROM lease l WHERE l.shard_id = r.shard_id AND l.run = r.id AND l.cancel_us = 0) AS runs,
       %(by_state)s AND EXISTS (
           SELECT FROM lease l WHERE l.shard_id = r.shard_id AND l.run = r.id AND l.cancel_us > 0) AS cancels
  FROM run r
 WHERE schedule = %(schedule)s AND (create_us, id) < (%(before_us)s, %(before_id)s) AND id < %(id_bound)s
 ORDER BY create_us DESC, id DESC LIMIT %(scan_max)s

-- name: list_leases
-- The newest of a tenant's live attempts whose runs have no row yet, or of all of them. There are never more leases than the
-- workers have room for.
SELECT shard_id, run, create_us, cancel_us
  FROM lease
 WHERE tenant_id = %(tenant)s AND (%(schedule)s::uuid IS NULL OR schedule = %(schedule)s::uuid)
   AND (%(with_row)s OR flags & 64 = 0) AND (create_us, run) < (%(before_us)s, %(before_id)s)
   AND (%(cancelled)s::boolean IS NULL OR (cancel_us > 0) = %(cancelled)s)
 ORDER BY create_us DESC, run DESC LIMIT %(page_max)s

-- name: take_waiting
-- CancelRun of what waits: its timer row goes.
DELETE FROM timer WHERE shard_id = %(shard)s AND ref = %(run)s AND kind = 2 RETURNING due_us

-- name: end_cancelled
-- ... and its row ends, in the same transaction.
UPDATE run SET state = 8, end_us = %(now)s, cancel_reason = %(reason)s
 WHERE shard_id = %(shard)s AND id = %(run)s AND state IN (1, 4)

-- name: mark_cancelled
-- CancelRun of what runs: the first word stands.
UPDATE lease SET cancel_us = %(now)s, cancel_until_us = %(until)s, cancel_reason = %(reason)s
 WHERE shard_id = %(shard)s AND run = %(run)s AND cancel_us = 0
RETURNING 1

-- name: standing
-- Whether a run is leased, and its row's state.
SELECT EXISTS (SELECT FROM lease WHERE shard_id = %(shard)s AND run = %(run)s),
       (SELECT state FROM run WHERE shard_id = %(shard)s AND id = %(run)s)

-- name: attempts
SELECT a.number, a.fence, a.lease_us, a.end_us, a.state, a.failure, w.worker_id, w.host
  FROM attempt a LEFT JOIN worker_node w ON w.worker_no = a.worker_no
 WHERE a.shard_id = %(shard)s AND a.run = %(run)s AND a.number > %(after)s
 ORDER BY a.number LIMIT %(page_max)s

-- name: last_attempt
-- The attempt that is on no list yet: a live one, or a first success, which is the run's row itself.
SELECT l.attempt, l.fence, l.lease_us, 0::bigint, 1::smallint, w.worker_id, w.host
  FROM lease l LEFT JOIN worker_node w ON w.worker_no = l.worker_no
 WHERE l.shard_id = %(shard)s AND l.run = %(run)s
UNION ALL
SELECT r.attempt, r.fence, r.lease_us, r.end_us, 2::smallint, w.worker_id, w.host
  FROM run r LEFT JOIN worker_node w ON w.worker_no = r.worker_no
 WHERE r.shard_id = %(shard)s AND r.id = %(run)s AND r.state = 5 AND r.attempt = 1

-- name: changed
-- For waiters: which of these runs are terminal (a row that has ended, and no lease).
SELECT k.ord
  FROM unnest(%(shard)s::smallint[], %(run)s::uuid[]) WITH ORDINALITY AS k(shard, run, ord)
  JOIN LATERAL (SELECT end_us FROM run WHERE shard_id = k.shard AND id = k.run LIMIT 1) r ON r.end_us > 0
