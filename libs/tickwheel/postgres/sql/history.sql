-- Which history is this Postgres in, and how is another one accepted? (Design, section 6.)

-- name: facts
-- What tells one history from another: the cluster of files, the timeline of the write-ahead log, how far it has been
-- flushed, and the incarnation. The timeline is read from the log's own position: the control file lags a promotion.
SELECT (SELECT system_identifier FROM pg_control_system()),
       ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::integer,
       (pg_current_wal_flush_lsn() - '0/0'::pg_lsn)::bigint,
       (SELECT incarnation FROM cluster)

-- name: resume
-- Every epoch into the new incarnation, each shard's fence held alone: see tw_resume.
SELECT at_us FROM tw_resume(%(incarnation)s, %(principal)s, %(peer)s, %(reason)s)

-- name: lease_ms_max
-- The longest lease of which this history knows.
SELECT coalesce(max(lease_ms), 0) FROM lease

-- name: fence_holders
-- Backends that hold a fence, however: what stands in the way of the one who wants them all.
SELECT DISTINCT pid FROM pg_locks
 WHERE locktype = 'advisory' AND classid = 27767 AND objsubid = 2 AND objid < 4096 AND granted
   AND pid <> pg_backend_pid() AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
