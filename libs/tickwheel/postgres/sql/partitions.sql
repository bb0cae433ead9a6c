-- Keeping partitions. Steps are bounded by rows_max; `{run}` and `{attempt}` are names of partitions.

-- name: is_attached
-- One row where the table is a partition of its parent; whether a detach of it was interrupted.
SELECT i.inhdetachpending
  FROM pg_inherits i
 WHERE i.inhparent = to_regclass(%(parent)s) AND i.inhrelid = to_regclass(%(name)s)

-- name: partition_tables
-- Ordinary tables of this schema whose names match, attached or not.
SELECT relname FROM pg_class
 WHERE relkind = 'r' AND relnamespace = current_schema()::regnamespace AND relname ~ %(pattern)s
 ORDER BY relname

-- name: grown
-- Of the named tables those whose statistics describe less than half of what stands in them.
SELECT s.relname
  FROM pg_stat_user_tables s JOIN pg_class c ON c.oid = s.relid
 WHERE s.schemaname = current_schema() AND s.relname = ANY (%(names)s) AND s.n_live_tup > 1000
   AND s.n_live_tup > 2 * greatest(c.reltuples, 0)

-- name: has_living
-- Whether anything in (low, high) still needs the partition: a run that waits or is held, one that is leased and has no
-- row yet, or a dead letter, which is replayed from its run.
SELECT EXISTS (SELECT FROM {run} WHERE state IN (1, 4))
    OR EXISTS (SELECT FROM lease WHERE run >= %(low)s AND run < %(high)s)
    OR EXISTS (SELECT FROM dead_letter WHERE run >= %(low)s AND run < %(high)s)

-- name: delete_ended_runs
-- Ended runs that nothing refers to any more.
DELETE FROM {run} WHERE ctid = ANY (ARRAY(
    SELECT r.ctid FROM {run} r
     WHERE r.state NOT IN (1, 4)
       AND NOT EXISTS (SELECT FROM dead_letter d WHERE d.run = r.id)
       AND NOT EXISTS (SELECT FROM lease l WHERE l.shard_id = r.shard_id AND l.run = r.id)
     LIMIT %(rows_max)s))

-- name: delete_orphaned_attempts
-- Attempts of runs that are gone and do not run.
DELETE FROM {attempt} WHERE ctid = ANY (ARRAY(
    SELECT a.ctid FROM {attempt} a
     WHERE NOT EXISTS (SELECT FROM {run} r WHERE r.shard_id = a.shard_id AND r.id = a.run)
       AND NOT EXISTS (SELECT FROM lease l WHERE l.shard_id = a.shard_id AND l.run = a.run)
     LIMIT %(rows_max)s))

-- name: delete_idempotency
DELETE FROM idempotency WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM idempotency WHERE create_us < %(before)s ORDER BY create_us LIMIT %(rows_max)s))

-- name: delete_dead_letters
DELETE FROM dead_letter WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM dead_letter WHERE create_us < %(before)s LIMIT %(rows_max)s))
