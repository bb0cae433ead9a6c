-- The functions that timers call: each one call, one statement for the server, committed by itself (design, section 6).
-- `tickwheel migrate` puts them in place again whenever it runs. 27767 ('lw') is the class of the fence's advisory locks.


-- Locks the fences of the shards, shared, and *then* reads their epochs afresh: in a volatile function every statement
-- has a new snapshot, so an epoch that was raised before the lock was given is seen (I4).
-- Returns the shards whose epoch is not the caller's any more. The caller sends the shards sorted.
CREATE OR REPLACE FUNCTION tw_fence(p_shards smallint[], p_epochs bigint[]) RETURNS smallint[]
LANGUAGE plpgsql AS $$
DECLARE
    v_count integer;
BEGIN
    PERFORM pg_advisory_xact_lock_shared(27767, s) FROM unnest(p_shards) AS s;
    SELECT count(*) INTO v_count
      FROM unnest(p_shards, p_epochs) AS a(s, e) JOIN shard ON shard.shard_id = a.s AND shard.epoch = a.e;
    IF v_count = cardinality(p_shards) THEN
        RETURN '{}';
    END IF;
    RETURN ARRAY(
        SELECT a.s FROM unnest(p_shards, p_epochs) AS a(s, e)
        WHERE NOT EXISTS (SELECT FROM shard WHERE shard.shard_id = a.s AND shard.epoch = a.e));
END $$;


-- Rows of lost shards are pointed at shard -1, where nothing stands.
CREATE OR REPLACE FUNCTION tw_without(p_shards smallint[], p_lost smallint[]) RETURNS smallint[]
LANGUAGE sql IMMUTABLE AS $$
    SELECT coalesce(array_agg(CASE WHEN s = ANY (p_lost) THEN -1::smallint ELSE s END ORDER BY ord), '{}')
      FROM unnest(p_shards) WITH ORDINALITY AS a(s, ord)
$$;


-- Takes shards: the fence alone, then epoch + 1 where the assignment is newer than the last taking, or is the same and
-- the shard is the caller's own (a re-take). The caller has set a lock_timeout.
CREATE OR REPLACE FUNCTION tw_take(
    p_shards smallint[], p_generations bigint[], p_owner text, p_now_us bigint,
    OUT taken smallint[], OUT epochs bigint[])
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(27767, s) FROM unnest(p_shards) AS s;
    WITH t AS (
        UPDATE shard SET epoch = epoch + 1, owner = p_owner, generation = a.g, taken_us = p_now_us
          FROM unnest(p_shards, p_generations) AS a(s, g)
         WHERE shard.shard_id = a.s
           AND (shard.generation < a.g OR (shard.generation = a.g AND shard.owner = p_owner))
        RETURNING shard.shard_id, shard.epoch)
    SELECT coalesce(array_agg(shard_id), '{}'), coalesce(array_agg(epoch), '{}') INTO taken, epochs FROM t;
END $$;


-- One batch of a timer's writes. Each group of arrays has one element a row, sorted by (shard, key).
--   o  attempts that have ended: reported, lapsed or handed back
--   m  occurrences that are decided: the schedule's timer moves on, and m_action says what is born:
--      0 nothing, 1 a run that is leased at once, 2 a run that waits
--   w  further waiting runs of row w_m of m (a catch-up)
--   d  decisions of row d_m of m
--   r  waiting runs that are leased
-- Every group is locked first (FOR UPDATE SKIP LOCKED: no call waits for a coordinator), then deleted or updated by
-- its ctid, and all else follows from what that RETURNS. Not from what was locked: of a row that a coordinator has
-- changed since the statement's snapshot, the newest version is locked, and the ctid of that one is not visible to
-- the delete. (An outcome that met a cancel so was recorded and kept its lease: found by tests/chaos/rig.py.)
-- Returns the shards that were lost, and of each group the ordinals (from 1) of the rows that took effect. A row that
-- did not is stale, or locked by a coordinator at this moment: the caller reads it again (tw_peek) to tell which.
CREATE OR REPLACE FUNCTION tw_write(
    p_shards smallint[], p_epochs bigint[], p_timer_id text, p_now_us bigint, p_stamp boolean,
    o_shard smallint[], o_run uuid[], o_token uuid[], o_attempt_state smallint[], o_run_state smallint[],
    o_end_us bigint[], o_next_us bigint[], o_result bytea[], o_result_type text[], o_failure bytea[],
    o_fingerprint text[], o_row_exists boolean, o_row_missing boolean,
    m_shard smallint[], m_ref uuid[], m_due bigint[], m_version bigint[], m_decided bigint[],
    m_next_due bigint[], m_next_schedule bigint[], m_new_decided bigint[], m_run_count integer[],
    m_action smallint[], m_exclusive boolean[], m_run uuid[], m_fence bigint[], m_token uuid[],
    m_worker integer[], m_lease_ms integer[], m_flags integer[],
    w_m integer[], w_run uuid[], w_schedule_us bigint[], w_flags integer[],
    d_m integer[], d_from bigint[], d_until bigint[], d_count bigint[], d_reason smallint[],
    r_shard smallint[], r_ref uuid[], r_due bigint[], r_attempt smallint[], r_fence bigint[], r_token uuid[],
    r_worker integer[], r_lease_ms integer[],
    OUT lost smallint[], OUT o_done integer[], OUT m_done integer[], OUT m_busy integer[], OUT r_done integer[])
LANGUAGE plpgsql AS $$
DECLARE
    v_ok boolean[];
    v_ord integer;
BEGIN
    lost := tw_fence(p_shards, p_epochs);
    IF cardinality(lost) > 0 THEN
        o_shard := tw_without(o_shard, lost);
        m_shard := tw_without(m_shard, lost);
        r_shard := tw_without(r_shard, lost);
    END IF;

    -- I3, I6: an outcome takes effect where the lease row still carries its token, and removes that row: once.
    -- A run that was asked to stop is not tried again, whatever its attempt's end was.
    -- A run without a row is inserted. One that has a row is updated, and by an INSERT too: that looks into its own
    -- partition alone, where an UPDATE of run would open every day's in each call (+16 % of a small batch at 40 days).
    -- o_row_missing and o_row_exists say which there are in the batch; a row of a kind that was not announced stays.
    IF cardinality(o_shard) > 0 THEN
        WITH f AS MATERIALIZED (
            SELECT a.*, l.ctid AS tid
              FROM unnest(o_shard, o_run, o_token, o_attempt_state, o_run_state, o_end_us, o_next_us, o_result,
                          o_result_type, o_failure, o_fingerprint)
                   WITH ORDINALITY AS a(shard, run, token, attempt_state, run_state, end_us, next_us, result,
                                        result_type, failure, fingerprint, ord)
              JOIN lease l ON l.shard_id = a.shard AND l.run = a.run
             WHERE l.token = a.token AND (o_row_missing OR l.flags & 64 <> 0) AND (o_row_exists OR l.flags & 64 = 0)
               FOR UPDATE OF l SKIP LOCKED),
        o AS (
            DELETE FROM lease l USING f WHERE l.ctid = f.tid
            RETURNING f.ord, f.attempt_state, f.end_us, f.next_us, f.result, f.result_type, f.failure, f.fingerprint,
                l.run, l.schedule, l.fence, l.template_id, l.version, l.schedule_us, l.due_us, l.create_us, l.lease_us,
                l.tenant_id, l.route_id, l.flags, l.worker_no, l.shard_id, l.attempt, l.priority, l.progress,
                l.cancel_reason, l.flags & 64 <> 0 AS row_exists,
                CASE WHEN l.cancel_us > 0 AND f.run_state IN (1, 4, 6, 7) THEN 8 ELSE f.run_state END AS state,
                l.spent + (CASE WHEN f.attempt_state = 7 THEN 0 ELSE 1 END) AS spent_now),
        ended AS NOT MATERIALIZED (
            SELECT o.run, o.schedule, o.template_id, o.version, o.schedule_us, o.create_us, o.due_us, o.lease_us,
                   CASE WHEN o.state IN (1, 4) THEN 0 ELSE o.end_us END AS end_us, o.fence, o.tenant_id, o.route_id,
                   o.worker_no, o.spent_now, o.shard_id, (o.flags >> 12) & 7 AS cause, o.state, o.priority, o.attempt,
                   o.result, o.result_type, o.failure, o.progress, o.cancel_reason, o.row_exists
              FROM o),
        born AS (
            INSERT INTO run (id, schedule, template_id, version, schedule_us, create_us, due_us, lease_us, end_us,
                             fence, tenant_id, route_id, worker_no, spent, shard_id, cause, state, priority, attempt,
                             result, result_type, failure, progress, cancel_reason)
            SELECT run, schedule, template_id, version, schedule_us, create_us, due_us, lease_us, end_us, fence,
                   tenant_id, route_id, worker_no, spent_now, shard_id, cause, state, priority, attempt, result,
                   result_type, failure, progress, cancel_reason
              FROM ended WHERE o_row_missing AND NOT row_exists),
        moved AS (
            INSERT INTO run AS r (id, schedule, template_id, version, schedule_us, create_us, due_us, lease_us, end_us,
                                  fence, tenant_id, route_id, worker_no, spent, shard_id, cause, state, priority,
                                  attempt, result, result_type, failure, progress, cancel_reason)
            SELECT run, schedule, template_id, version, schedule_us, create_us, due_us, lease_us, end_us, fence,
                   tenant_id, route_id, worker_no, spent_now, shard_id, cause, state, priority, attempt, result,
                   result_type, failure, progress, cancel_reason
              FROM ended WHERE o_row_exists AND row_exists
            ON CONFLICT (shard_id, id) DO UPDATE
               SET state = excluded.state, end_us = excluded.end_us, fence = excluded.fence,
                   lease_us = excluded.lease_us, due_us = excluded.due_us, worker_no = excluded.worker_no,
                   spent = excluded.spent, attempt = excluded.attempt, result = excluded.result,
                   result_type = excluded.result_type, failure = coalesce(excluded.failure, r.failure),
                   progress = coalesce(excluded.progress, r.progress),
                   cancel_reason = coalesce(excluded.cancel_reason, r.cancel_reason)),
        history AS (
            INSERT INTO attempt (run, fence, lease_us, end_us, worker_no, shard_id, number, state, failure)
            SELECT o.run, o.fence, o.lease_us, o.end_us, o.worker_no, o.shard_id, o.attempt, o.attempt_state, o.failure
              FROM o WHERE NOT (o.attempt = 1 AND o.attempt_state = 2)),
        waiting AS (
            INSERT INTO timer (due_us, schedule_us, decided_us, version, trigger_id, template_id, ref, schedule,
                               tenant_id, route_id, flags, misfire_ms, countdown, shard_id, kind, priority, attempt)
            SELECT o.next_us, o.schedule_us, o.create_us, o.version, 0, o.template_id, o.run, o.schedule,
                   o.tenant_id, o.route_id, o.flags | 320, 0, o.spent_now, o.shard_id, 2, o.priority, o.attempt
              FROM o WHERE o.state IN (1, 4)),
        dead AS (
            INSERT INTO dead_letter (run, shard_id, tenant_id, route_id, schedule, create_us, spent, failure, fingerprint)
            SELECT o.run, o.shard_id, o.tenant_id, o.route_id, o.schedule, o.end_us, o.spent_now, o.failure,
                   coalesce(o.fingerprint, '')
              FROM o WHERE o.state = 7)
        SELECT array_agg(o.ord) INTO o_done FROM o;
    END IF;

    -- I2: the row still names this occurrence under this version, and nothing at or after it was decided.
    -- The overlap policy is judged here too: a run of the schedule that waits keeps an exclusive one back.
    IF cardinality(m_shard) > 0 THEN
        WITH f AS MATERIALIZED (
            SELECT a.*, t.ctid AS tid, t.schedule_us, t.template_id, t.tenant_id, t.route_id, t.priority,
                   a.exclusive AND a.action > 0 AND EXISTS (
                       SELECT FROM timer w WHERE w.shard_id = a.shard AND w.schedule = a.ref) AS busy
              FROM unnest(m_shard, m_ref, m_due, m_version, m_decided, m_next_due, m_next_schedule, m_new_decided,
                          m_run_count, m_action, m_exclusive, m_run, m_fence, m_token, m_worker, m_lease_ms, m_flags)
                   WITH ORDINALITY AS a(shard, ref, due, version, decided, next_due, next_schedule, new_decided,
                                        run_count, action, exclusive, run, fence, token, worker, lease_ms, flags, ord)
              JOIN timer t ON t.shard_id = a.shard AND t.ref = a.ref
             WHERE t.due_us = a.due AND t.version = a.version AND t.decided_us = a.decided AND t.kind = 1
               FOR UPDATE OF t SKIP LOCKED),
        m AS (
            UPDATE timer t
               SET due_us = f.next_due, schedule_us = f.next_schedule, decided_us = f.new_decided,
                   countdown = CASE WHEN t.countdown < 0 OR f.busy THEN t.countdown
                                    ELSE greatest(t.countdown - f.run_count, 0) END
              FROM f WHERE t.ctid = f.tid
            RETURNING f.*),
        leased AS (
            INSERT INTO lease (run, token, schedule, fence, template_id, version, schedule_us, due_us, create_us,
                               lease_us, tenant_id, route_id, flags, worker_no, lease_ms, spent, shard_id, attempt,
                               priority)
            SELECT m.run, m.token, m.ref, m.fence, m.template_id, m.version, m.schedule_us, m.due, p_now_us,
                   p_now_us, m.tenant_id, m.route_id, m.flags, m.worker, m.lease_ms, 0, m.shard, 1, m.priority
              FROM m WHERE m.action = 1 AND NOT m.busy),
        born AS (
            INSERT INTO run (id, schedule, template_id, version, schedule_us, create_us, due_us, tenant_id, route_id,
                             shard_id, cause, state, priority, attempt)
            SELECT m.run, m.ref, m.template_id, m.version, m.schedule_us, p_now_us, m.due, m.tenant_id, m.route_id,
                   m.shard, (m.flags >> 12) & 7, 1, m.priority, 0
              FROM m WHERE m.action = 2 AND NOT m.busy),
        waiting AS (
            INSERT INTO timer (due_us, schedule_us, decided_us, version, trigger_id, template_id, ref, schedule,
                               tenant_id, route_id, flags, misfire_ms, countdown, shard_id, kind, priority, attempt)
            SELECT m.due, m.schedule_us, p_now_us, m.version, 0, m.template_id, m.run, m.ref,
                   m.tenant_id, m.route_id, m.flags | 64, 0, 0, m.shard, 2, m.priority, 0
              FROM m WHERE m.action = 2 AND NOT m.busy),
        skipped AS (
            INSERT INTO decision (schedule, from_us, until_us, decided_us, count, tenant_id, shard_id, reason)
            SELECT m.ref, m.schedule_us, m.schedule_us, p_now_us, 1, m.tenant_id, m.shard, 1 FROM m WHERE m.busy
            ON CONFLICT DO NOTHING)
        SELECT array_agg(m.ord), array_agg(m.ord) FILTER (WHERE m.busy) INTO m_done, m_busy FROM m;

        IF cardinality(w_m) + cardinality(d_m) > 0 THEN
            v_ok := array_fill(false, ARRAY[cardinality(m_shard)]);
            FOREACH v_ord IN ARRAY coalesce(m_done, '{}') LOOP
                v_ok[v_ord] := true;
            END LOOP;
            WITH w AS MATERIALIZED (
                SELECT a.*, t.template_id, t.tenant_id, t.route_id, t.priority, t.version, m_shard[a.m] AS shard,
                       m_ref[a.m] AS schedule
                  FROM unnest(w_m, w_run, w_schedule_us, w_flags) AS a(m, run, schedule_us, flags)
                  JOIN timer t ON t.shard_id = m_shard[a.m] AND t.ref = m_ref[a.m]
                 WHERE v_ok[a.m]),
            born AS (
                INSERT INTO run (id, schedule, template_id, version, schedule_us, create_us, due_us, tenant_id,
                                 route_id, shard_id, cause, state, priority, attempt)
                SELECT w.run, w.schedule, w.template_id, w.version, w.schedule_us, p_now_us, p_now_us, w.tenant_id,
                       w.route_id, w.shard, (w.flags >> 12) & 7, 1, w.priority, 0
                  FROM w)
            INSERT INTO timer (due_us, schedule_us, decided_us, version, trigger_id, template_id, ref, schedule,
                               tenant_id, route_id, flags, misfire_ms, countdown, shard_id, kind, priority, attempt)
            SELECT p_now_us, w.schedule_us, p_now_us, w.version, 0, w.template_id, w.run, w.schedule, w.tenant_id,
                   w.route_id, w.flags | 64, 0, 0, w.shard, 2, w.priority, 0
              FROM w;
            INSERT INTO decision (schedule, from_us, until_us, decided_us, count, tenant_id, shard_id, reason)
            SELECT m_ref[a.m], a.from_us, a.until_us, p_now_us, a.n, t.tenant_id, m_shard[a.m], a.reason
              FROM unnest(d_m, d_from, d_until, d_count, d_reason) AS a(m, from_us, until_us, n, reason)
              JOIN timer t ON t.shard_id = m_shard[a.m] AND t.ref = m_ref[a.m]
             WHERE v_ok[a.m]
            ON CONFLICT DO NOTHING;
        END IF;
    END IF;

    -- I3: a waiting run becomes a leased one where its row still waits for this instant after this attempt.
    IF cardinality(r_shard) > 0 THEN
        WITH f AS MATERIALIZED (
            SELECT a.*, t.ctid AS tid
              FROM unnest(r_shard, r_ref, r_due, r_attempt, r_fence, r_token, r_worker, r_lease_ms)
                   WITH ORDINALITY AS a(shard, ref, due, attempt, fence, token, worker, lease_ms, ord)
              JOIN timer t ON t.shard_id = a.shard AND t.ref = a.ref
             WHERE t.due_us = a.due AND t.attempt = a.attempt AND t.kind = 2
               FOR UPDATE OF t SKIP LOCKED),
        r AS (
            DELETE FROM timer t USING f WHERE t.ctid = f.tid
            RETURNING f.*, t.schedule, t.template_id, t.version, t.schedule_us, t.decided_us, t.tenant_id, t.route_id,
                t.flags, t.countdown, t.priority),
        leased AS (
            INSERT INTO lease (run, token, schedule, fence, template_id, version, schedule_us, due_us, create_us,
                               lease_us, tenant_id, route_id, flags, worker_no, lease_ms, spent, shard_id, attempt,
                               priority)
            SELECT r.ref, r.token, r.schedule, r.fence, r.template_id, r.version, r.schedule_us, r.due, r.decided_us,
                   p_now_us, r.tenant_id, r.route_id, r.flags, r.worker, r.lease_ms, r.countdown, r.shard,
                   r.attempt + 1, r.priority
              FROM r)
        SELECT array_agg(r.ord) INTO r_done FROM r;
    END IF;

    IF p_stamp AND cardinality(lost) = 0 THEN
        UPDATE timer_node SET seen_us = p_now_us WHERE timer_id = p_timer_id;
    END IF;
    o_done := coalesce(o_done, '{}');
    m_done := coalesce(m_done, '{}');
    m_busy := coalesce(m_busy, '{}');
    r_done := coalesce(r_done, '{}');
END $$;


-- A row that cannot be computed is set aside: due never, with the reason where people look (I11).
CREATE OR REPLACE FUNCTION tw_quarantine(
    p_shards smallint[], p_epochs bigint[], p_now_us bigint,
    q_shard smallint[], q_ref uuid[], q_version bigint[], q_reason text[],
    OUT lost smallint[], OUT q_done integer[])
LANGUAGE plpgsql AS $$
BEGIN
    lost := tw_fence(p_shards, p_epochs);
    WITH f AS MATERIALIZED (
        SELECT a.*, t.ctid AS tid
          FROM unnest(tw_without(q_shard, lost), q_ref, q_version, q_reason) WITH ORDINALITY
               AS a(shard, ref, version, reason, ord)
          JOIN timer t ON t.shard_id = a.shard AND t.ref = a.ref
         WHERE t.version = a.version AND t.kind = 1
           FOR UPDATE OF t SKIP LOCKED),
    q AS (UPDATE timer t SET due_us = 9223372036854775807 FROM f WHERE t.ctid = f.tid RETURNING f.*),
    told AS (
        UPDATE schedule s SET quarantine_reason = q.reason, revision = s.revision + 1, update_us = p_now_us
          FROM q WHERE s.uid = q.ref AND s.version = q.version)
    SELECT coalesce(array_agg(q.ord), '{}') INTO q_done FROM q;
END $$;


-- A run that waits is set aside: HELD or ended, because it cannot be granted (I11) or its time to start is over.
CREATE OR REPLACE FUNCTION tw_end_waiting(
    p_shards smallint[], p_epochs bigint[], p_now_us bigint,
    e_shard smallint[], e_ref uuid[], e_due bigint[], e_attempt smallint[], e_state smallint[], e_failure bytea[],
    OUT lost smallint[], OUT e_done integer[])
LANGUAGE plpgsql AS $$
BEGIN
    lost := tw_fence(p_shards, p_epochs);
    WITH f AS MATERIALIZED (
        SELECT a.*, t.ctid AS tid
          FROM unnest(tw_without(e_shard, lost), e_ref, e_due, e_attempt, e_state, e_failure) WITH ORDINALITY
               AS a(shard, ref, due, attempt, state, failure, ord)
          JOIN timer t ON t.shard_id = a.shard AND t.ref = a.ref
         WHERE t.due_us = a.due AND t.attempt = a.attempt AND t.kind = 2
           FOR UPDATE OF t SKIP LOCKED),
    e AS (
        DELETE FROM timer t USING f WHERE t.ctid = f.tid
        RETURNING f.*, t.tenant_id, t.route_id, t.schedule, t.countdown),
    ended AS (
        UPDATE run r SET state = e.state, end_us = p_now_us, failure = coalesce(e.failure, r.failure)
          FROM e WHERE r.shard_id = e.shard AND r.id = e.ref),
    dead AS (
        INSERT INTO dead_letter (run, shard_id, tenant_id, route_id, schedule, create_us, spent, failure)
        SELECT e.ref, e.shard, e.tenant_id, e.route_id, e.schedule, p_now_us, e.countdown, e.failure
          FROM e WHERE e.state = 7)
    SELECT coalesce(array_agg(e.ord), '{}') INTO e_done FROM e;
END $$;


-- What live attempts said of themselves, at a bounded rate.
CREATE OR REPLACE FUNCTION tw_progress(
    p_shards smallint[], p_epochs bigint[], g_shard smallint[], g_run uuid[], g_token uuid[], g_progress bytea[],
    OUT lost smallint[])
LANGUAGE plpgsql AS $$
BEGIN
    lost := tw_fence(p_shards, p_epochs);
    WITH g AS MATERIALIZED (
        SELECT a.*, l.ctid AS tid
          FROM unnest(tw_without(g_shard, lost), g_run, g_token, g_progress) AS a(shard, run, token, progress)
          JOIN lease l ON l.shard_id = a.shard AND l.run = a.run
         WHERE l.token = a.token
           FOR UPDATE OF l SKIP LOCKED)
    UPDATE lease l SET progress = g.progress FROM g WHERE l.ctid = g.tid;
END $$;


-- Accepts this history as the cluster's (`tickwheel cluster resume`): every fence alone, then every epoch into the new
-- incarnation, so that whoever owned a shard in an earlier one, and never noticed, is fenced (I4). One call, as a
-- timer's writes are: a caller that freezes holds nothing. An incarnation that is not newer changes nothing, and gives
-- NULL. The caller has set a lock_timeout. It is audited here (I9); a backup that is older than its newest partition
-- has no place for that, which must not be what keeps the cluster from going on.
CREATE OR REPLACE FUNCTION tw_resume(
    p_incarnation integer, p_principal text, p_peer text, p_reason text, OUT at_us bigint)
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(27767, s) FROM (SELECT shard_id AS s FROM shard ORDER BY shard_id) AS shards;
    UPDATE cluster SET incarnation = p_incarnation WHERE incarnation < p_incarnation;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    -- 25: EPOCH_TAKING_BITS of domain/shard.py.
    UPDATE shard SET epoch = greatest(epoch, p_incarnation::bigint << 25);
    SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint + c.clock_offset_us INTO at_us FROM cluster c;
    BEGIN
        INSERT INTO audit (at_us, tenant_id, principal, method, resource, reason, changed, peer)
        VALUES (tw_resume.at_us, 0, p_principal, 'ResumeCluster', 'cluster', p_reason,
                'incarnation ' || p_incarnation, p_peer);
    EXCEPTION WHEN check_violation THEN
        RAISE WARNING 'there is no partition for the audit record of this resume';
    END;
END $$;
