-- Runs that have no attempts left.

-- name: get
SELECT d.run, d.create_us, d.spent, d.failure, d.replayed_by, d.replay_count, s.name, q.queue, q.kind,
       r.payload, r.content_type, v.payload, v.content_type, d.schedule, r.template_id, r.version, r.labels
  FROM dead_letter d
  LEFT JOIN run r ON r.shard_id = d.shard_id AND r.id = d.run
  LEFT JOIN schedule s ON s.uid = d.schedule
  LEFT JOIN route q ON q.route_id = d.route_id
  LEFT JOIN schedule_revision v ON v.uid = d.schedule AND v.version = r.version AND r.payload IS NULL
 WHERE d.run = %(run)s AND d.shard_id = %(shard)s AND d.tenant_id = %(tenant)s AND r.id = %(run)s

-- name: lock
SELECT replay_count FROM dead_letter WHERE run = %(run)s AND tenant_id = %(tenant)s FOR UPDATE

-- name: replayed
UPDATE dead_letter SET replayed_by = %(replayed_by)s, replay_count = replay_count + 1 WHERE run = %(run)s

-- name: list
-- Newest first. At most scan_max rows are looked at; the cursor of the last one comes back on each row.
WITH seen AS MATERIALIZED (
    SELECT * FROM dead_letter
     WHERE tenant_id = %(tenant)s AND (create_us, run) < (%(before_us)s, %(before_run)s)
     ORDER BY create_us DESC, run DESC LIMIT %(scan_max)s),
found AS (
    SELECT d.*, s.name, q.queue, q.kind
      FROM seen d LEFT JOIN schedule s ON s.uid = d.schedule LEFT JOIN route q ON q.route_id = d.route_id
     WHERE (%(schedule)s::text IS NULL OR s.name = %(schedule)s) AND (%(kind)s::text IS NULL OR q.kind = %(kind)s)
       AND (%(fingerprint)s::text IS NULL OR d.fingerprint = %(fingerprint)s)
     ORDER BY d.create_us DESC, d.run DESC LIMIT %(page_max)s)
SELECT f.run, f.create_us, f.spent, f.failure, f.replayed_by, f.replay_count, f.name, f.queue, f.kind, e.seen_count,
       e.last_us, e.last_run
  FROM (SELECT count(*) AS seen_count, (array_agg(create_us ORDER BY create_us, run))[1] AS last_us,
               (array_agg(run ORDER BY create_us, run))[1] AS last_run FROM seen) e
  LEFT JOIN found f ON true
 ORDER BY f.create_us DESC, f.run DESC
