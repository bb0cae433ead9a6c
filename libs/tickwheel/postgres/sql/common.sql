-- What every mutation shares.

-- name: now
-- The cluster clock.
SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint + clock_offset_us FROM cluster

-- name: begin_request
-- The first with a request_id goes on, and is told the cluster clock; whoever comes with it meanwhile waits here until the
-- first has committed.
INSERT INTO idempotency (tenant_id, request_id, method, request_hash, response, create_us)
SELECT %(tenant)s, %(request_id)s, %(method)s, %(hash)s, '',
       (extract(epoch FROM clock_timestamp()) * 1000000)::bigint + clock_offset_us FROM cluster
ON CONFLICT DO NOTHING RETURNING create_us

-- name: read_request
-- In a statement of its own: the one above does not see what it waited for.
SELECT method, request_hash, response FROM idempotency WHERE tenant_id = %(tenant)s AND request_id = %(request_id)s

-- name: finish
-- I9: one audit record a call, and the call's answer where it has a request_id.
WITH answer AS (
    UPDATE idempotency SET response = %(response)s
     WHERE %(remembers)s AND tenant_id = %(tenant)s AND request_id = %(request_id)s)
INSERT INTO audit (at_us, tenant_id, principal, method, resource, request_id, reason, etag_before, etag_after, changed, peer)
VALUES (%(now)s, %(tenant)s, %(principal)s, %(method)s, %(resource)s, %(request_id)s, %(reason)s, %(etag_before)s,
        %(etag_after)s, %(changed)s, %(peer)s)

-- name: tenant
SELECT tenant_id, spread FROM tenant WHERE name = %(name)s

-- name: tenants_by_id
SELECT tenant_id, name FROM tenant WHERE tenant_id = ANY (%(ids)s)

-- name: insert_route
INSERT INTO route (queue, kind) VALUES (%(queue)s, %(kind)s) ON CONFLICT DO NOTHING

-- name: route
SELECT route_id FROM route WHERE queue = %(queue)s AND kind = %(kind)s

-- name: routes_by_id
SELECT route_id, queue, kind FROM route WHERE route_id = ANY (%(ids)s)

-- name: insert_template
INSERT INTO template_def (template_id, body) VALUES (%(id)s, %(body)s) ON CONFLICT DO NOTHING

-- name: templates_by_id
SELECT template_id, body FROM template_def WHERE template_id = ANY (%(ids)s)

-- name: cluster
SELECT cluster_id, shard_count, incarnation FROM cluster

-- name: shards
SELECT shard_id, epoch, owner, generation FROM shard ORDER BY shard_id

-- name: generations
SELECT shard_id, generation FROM shard WHERE generation > 0

-- name: timer_nodes
SELECT timer_id, node_name, address, started_us, seen_us FROM timer_node ORDER BY timer_id

