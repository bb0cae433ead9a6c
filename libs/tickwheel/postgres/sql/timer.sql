-- What a timer reads. Columns come back as arrays, binary, one array a column: numpy takes them as they are.

-- name: load_timers
-- The rows of each (shard, tenant) that are due in its window after its cursor, in due order, at most page_max of each.
SELECT array_agg(t.shard_id), array_agg(t.kind), array_agg(t.ref), array_agg(t.due_us), array_agg(t.version),
       array_agg(t.decided_us), array_agg(t.schedule_us), array_agg(t.trigger_id), array_agg(t.template_id),
       array_agg(coalesce(t.schedule, '00000000-0000-0000-0000-000000000000'::uuid)), array_agg(t.tenant_id),
       array_agg(t.route_id), array_agg(t.flags), array_agg(t.misfire_ms), array_agg(t.countdown),
       array_agg(t.priority), array_agg(t.attempt)
  FROM unnest(%(shard)s, %(tenant)s, %(after_due)s, %(after_ref)s, %(until_due)s)
       AS w(shard, tenant, after_due, after_ref, until_due),
       LATERAL (SELECT * FROM timer
                 WHERE shard_id = w.shard AND tenant_id = w.tenant
                   AND (due_us, ref) > (w.after_due, w.after_ref) AND due_us < w.until_due
                 ORDER BY due_us, ref LIMIT %(page_max)s) t

-- name: load_raised
-- As load_timers, of rows with raised priority alone: they are read past a tenant's share.
SELECT array_agg(t.shard_id), array_agg(t.kind), array_agg(t.ref), array_agg(t.due_us), array_agg(t.version),
       array_agg(t.decided_us), array_agg(t.schedule_us), array_agg(t.trigger_id), array_agg(t.template_id),
       array_agg(coalesce(t.schedule, '00000000-0000-0000-0000-000000000000'::uuid)), array_agg(t.tenant_id),
       array_agg(t.route_id), array_agg(t.flags), array_agg(t.misfire_ms), array_agg(t.countdown),
       array_agg(t.priority), array_agg(t.attempt)
  FROM unnest(%(shard)s, %(tenant)s, %(after_due)s, %(after_ref)s, %(until_due)s)
       AS w(shard, tenant, after_due, after_ref, until_due),
       LATERAL (SELECT * FROM timer
                 WHERE shard_id = w.shard AND tenant_id = w.tenant AND priority > 0
                   AND (due_us, ref) > (w.after_due, w.after_ref) AND due_us < w.until_due
                 ORDER BY due_us, ref LIMIT %(page_max)s) t

-- name: peek_timers
-- The rows by key: after a nudge, and to tell a stale row from a locked one.
SELECT array_agg(t.shard_id), array_agg(t.kind), array_agg(t.ref), array_agg(t.due_us), array_agg(t.version),
       array_agg(t.decided_us), array_agg(t.schedule_us), array_agg(t.trigger_id), array_agg(t.template_id),
       array_agg(coalesce(t.schedule, '00000000-0000-0000-0000-000000000000'::uuid)), array_agg(t.tenant_id),
       array_agg(t.route_id), array_agg(t.flags), array_agg(t.misfire_ms), array_agg(t.countdown),
       array_agg(t.priority), array_agg(t.attempt)
  FROM unnest(%(shard)s, %(ref)s) AS w(shard, ref)
  JOIN timer t ON t.shard_id = w.shard AND t.ref = w.ref

-- name: list_tenants
-- The tenants that have timers in each shard, by skipping through the index.
WITH RECURSIVE found AS (
    SELECT s AS shard, (SELECT min(tenant_id) FROM timer WHERE shard_id = s) AS tenant
      FROM unnest(%(shard)s) AS s
    UNION ALL
    SELECT f.shard, (SELECT min(tenant_id) FROM timer WHERE shard_id = f.shard AND tenant_id > f.tenant)
      FROM found f WHERE f.tenant IS NOT NULL)
SELECT array_agg(shard), array_agg(tenant) FROM found WHERE tenant IS NOT NULL

-- name: load_leases
-- The live attempts of shards: what a new owner reads after it has committed its epoch.
SELECT array_agg(shard_id), array_agg(run), array_agg(token), array_agg(fence), array_agg(attempt),
       array_agg(coalesce(schedule, '00000000-0000-0000-0000-000000000000'::uuid)), array_agg(version),
       array_agg(template_id), array_agg(tenant_id), array_agg(route_id), array_agg(flags), array_agg(lease_ms),
       array_agg(spent), array_agg(schedule_us), array_agg(due_us), array_agg(lease_us), array_agg(worker_no),
       array_agg(priority), array_agg(cancel_until_us)
  FROM lease WHERE shard_id = ANY (%(shard)s)

-- name: load_cancels
-- Live attempts that were asked to stop.
SELECT shard_id, run, token, cancel_until_us, coalesce(cancel_reason, '')
  FROM lease WHERE shard_id = ANY (%(shard)s) AND cancel_us > 0
 LIMIT 10000

-- name: load_definitions
-- Triggers and templates by id.
SELECT trigger_id AS id, body, 1 AS kind FROM trigger_def WHERE trigger_id = ANY (%(trigger)s)
UNION ALL
SELECT template_id, body, 2 FROM template_def WHERE template_id = ANY (%(template)s)

-- name: load_schedule_heads
-- The name and the payload of a schedule's version, and the trace in which the schedule was created.
SELECT r.uid, r.version, s.name, r.payload, r.content_type, coalesce(s.traceparent, '')
  FROM unnest(%(uid)s, %(version)s) AS w(uid, version)
  JOIN schedule_revision r ON r.uid = w.uid AND r.version = w.version
  JOIN schedule s ON s.uid = w.uid

-- name: load_run_details
-- What a grant of a run with a row of its own carries.
SELECT r.id, r.payload, r.content_type, r.failure, r.progress, r.traceparent
  FROM unnest(%(shard)s, %(run)s) AS w(shard, run)
  JOIN run r ON r.shard_id = w.shard AND r.id = w.run

-- name: load_tenants
SELECT tenant_id, name, weight FROM tenant WHERE tenant_id = ANY (%(tenant)s)

-- name: load_routes
SELECT route_id, queue, kind FROM route WHERE route_id > %(after)s ORDER BY route_id

-- name: outcome_state
-- Whether an outcome that finds no lease was recorded before: the fence tells that attempt from others (I6).
SELECT w.ord, coalesce(r.state, 0), coalesce(r.fence, 0), coalesce(a.fence, 0), l.token, coalesce(a.state, 0)
  FROM unnest(%(shard)s, %(run)s, %(attempt)s) WITH ORDINALITY AS w(shard, run, attempt, ord)
  LEFT JOIN run r ON r.shard_id = w.shard AND r.id = w.run
  LEFT JOIN attempt a ON a.shard_id = w.shard AND a.run = w.run AND a.number = w.attempt
  LEFT JOIN lease l ON l.shard_id = w.shard AND l.run = w.run

-- name: fence_blockers
-- Backends that hold the fence of these shards, shared and granted: what stands in a taker's way.
SELECT DISTINCT pid FROM pg_locks
 WHERE locktype = 'advisory' AND classid = 27767 AND objsubid = 2 AND objid = ANY (%(shard)s)
   AND mode = 'ShareLock' AND granted AND pid <> pg_backend_pid()
   AND database = (SELECT oid FROM pg_database WHERE datname = current_database())

-- name: register_worker
INSERT INTO worker_node (worker_id, pool, host, seen_us) VALUES (%(worker_id)s, %(pool)s, %(host)s, %(now)s)
ON CONFLICT (worker_id) DO UPDATE SET seen_us = excluded.seen_us
RETURNING worker_no

-- name: register_timer
INSERT INTO timer_node (timer_id, node_name, address, started_us, seen_us)
VALUES (%(timer_id)s, %(node_name)s, %(address)s, %(now)s, %(now)s)
ON CONFLICT (timer_id) DO UPDATE SET seen_us = excluded.seen_us

-- name: forget_timer
DELETE FROM timer_node WHERE timer_id = %(timer_id)s

-- name: take
SELECT taken, epochs FROM tw_take(%(shard)s, %(generation)s, %(owner)s, %(now)s)

-- name: clock
SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint + c.clock_offset_us FROM cluster c

-- name: cluster
SELECT cluster_id, shard_count, incarnation, clock_offset_us FROM cluster

-- name: load_misfire_rules
-- What a catch-up must know of a schedule's version, beside the columns of its timer row.
SELECT r.uid, r.version, r.spec -> 'misfire'
  FROM unnest(%(uid)s, %(version)s) AS w(uid, version)
  JOIN schedule_revision r ON r.uid = w.uid AND r.version = w.version

-- name: find_tenants
SELECT tenant_id, name, weight FROM tenant WHERE name = ANY (%(name)s)
