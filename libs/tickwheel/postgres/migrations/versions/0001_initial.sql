-- Times are bigint microseconds since 1970 (`_us`): a compare-and-set needs exact equality.
-- 9223372036854775807 in a due_us stands for "never".

CREATE TABLE cluster (
    singleton boolean PRIMARY KEY DEFAULT true CHECK (singleton),
    cluster_id uuid NOT NULL,
    shard_count integer NOT NULL CHECK (shard_count BETWEEN 1 AND 4096),
    incarnation integer NOT NULL DEFAULT 0 CHECK (incarnation BETWEEN 0 AND 1023),
    -- What the cluster clock adds to Postgres' own clock; it is raised or lowered only on purpose.
    clock_offset_us bigint NOT NULL DEFAULT 0,
    tzdata_version text NOT NULL DEFAULT ''
);

-- The fence. One row a shard; a timer's write is valid under the epoch that stands here and no other (I4).
CREATE TABLE shard (
    shard_id smallint PRIMARY KEY,
    epoch bigint NOT NULL,
    owner text NOT NULL DEFAULT '',
    generation bigint NOT NULL DEFAULT 0,
    taken_us bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 20);

CREATE TABLE shard_cursor (
    shard_id smallint PRIMARY KEY,
    -- Nothing due before this waits in Postgres without the owner's knowledge; sweeps start here.
    low_watermark_us bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 50);

CREATE TABLE timer_node (
    timer_id text PRIMARY KEY,
    node_name text NOT NULL,
    address text NOT NULL,
    started_us bigint NOT NULL,
    seen_us bigint NOT NULL
) WITH (fillfactor = 20);

CREATE TABLE worker_node (
    worker_no integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    worker_id text NOT NULL UNIQUE,
    pool text NOT NULL,
    host text NOT NULL,
    seen_us bigint NOT NULL
);

CREATE TABLE tenant (
    tenant_id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name text NOT NULL UNIQUE,
    -- Over how many shards its schedules hash. Creation locks the row, shared, so that it can be raised online.
    spread integer NOT NULL CHECK (spread >= 1),
    weight integer NOT NULL DEFAULT 1 CHECK (weight BETWEEN 1 AND 1000),
    create_us bigint NOT NULL
);

-- A queue's name with a kind: what a worker subscribes to.
CREATE TABLE route (
    route_id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    queue text NOT NULL,
    kind text NOT NULL,
    UNIQUE (queue, kind)
);

-- Content-addressed: the id is a hash of the body, so many schedules and runs share a row, and none ever changes.
CREATE TABLE trigger_def (
    trigger_id bigint PRIMARY KEY,
    body bytea NOT NULL
);
CREATE TABLE template_def (
    template_id bigint PRIMARY KEY,
    body bytea NOT NULL
);

-- The one due index. kind 1: a schedule's next occurrence; the row stands while the schedule does, with due_us "never"
-- when nothing is due. kind 2: a run that waits (delayed, retry, buffered, held).
CREATE TABLE timer (
    due_us bigint NOT NULL,
    -- kind 1: the nominal instant of the occurrence that due_us stands for. kind 2: the run's.
    schedule_us bigint NOT NULL,
    -- kind 1: the last schedule_us that was decided (I2). kind 2: when the run was created.
    decided_us bigint NOT NULL,
    -- Of the schedule: a fire is a compare-and-set on it too. 0 for a direct run.
    version bigint NOT NULL,
    -- kind 1 only, else 0.
    trigger_id bigint NOT NULL,
    template_id bigint NOT NULL,
    ref uuid NOT NULL,
    -- kind 2: the schedule that the run was born from.
    schedule uuid,
    tenant_id integer NOT NULL,
    route_id integer NOT NULL,
    -- libs/tickwheel/domain/flags.py says which bit is what.
    flags integer NOT NULL,
    -- How late an occurrence may be found before it is a misfire.
    misfire_ms integer NOT NULL,
    -- kind 1: occurrences that may still become runs, -1 for any number. kind 2: attempts spent.
    countdown integer NOT NULL,
    shard_id smallint NOT NULL,
    kind smallint NOT NULL CHECK (kind IN (1, 2)),
    priority smallint NOT NULL CHECK (priority BETWEEN 0 AND 9),
    -- kind 2: the number of the last attempt.
    attempt smallint NOT NULL,
    PRIMARY KEY (shard_id, ref),
    CHECK (kind = 2 OR schedule_us > decided_us OR due_us = 9223372036854775807)
) WITH (fillfactor = 70);
CREATE INDEX timer_due ON timer (shard_id, tenant_id, due_us, ref);
CREATE INDEX timer_raised ON timer (shard_id, tenant_id, due_us, ref) WHERE priority > 0;
-- The waiting runs of a schedule: what its overlap policy asks for.
CREATE INDEX timer_waiting ON timer (shard_id, schedule) WHERE schedule IS NOT NULL;

-- One row for each live attempt: inserted by the grant, deleted by the outcome or the expiry.
CREATE TABLE lease (
    run uuid NOT NULL,
    token uuid NOT NULL,
    schedule uuid,
    fence bigint NOT NULL,
    template_id bigint NOT NULL,
    version bigint NOT NULL,
    schedule_us bigint NOT NULL,
    due_us bigint NOT NULL,
    create_us bigint NOT NULL,
    lease_us bigint NOT NULL,
    -- When it was asked to stop, and until when it may; 0: it was not.
    cancel_us bigint NOT NULL DEFAULT 0,
    cancel_until_us bigint NOT NULL DEFAULT 0,
    cancel_reason text,
    tenant_id integer NOT NULL,
    route_id integer NOT NULL,
    flags integer NOT NULL,
    worker_no integer NOT NULL,
    lease_ms integer NOT NULL,
    spent integer NOT NULL,
    shard_id smallint NOT NULL,
    attempt smallint NOT NULL CHECK (attempt >= 1),
    priority smallint NOT NULL,
    progress bytea,
    PRIMARY KEY (shard_id, run)
) WITH (fillfactor = 90);
CREATE INDEX lease_cancel ON lease (shard_id) WHERE cancel_us > 0;

CREATE TABLE schedule (
    uid uuid PRIMARY KEY,
    shard_id smallint NOT NULL,
    tenant_id integer NOT NULL REFERENCES tenant,
    name text NOT NULL,
    -- Of the spec; `revision` counts every mutation and is the etag.
    version bigint NOT NULL CHECK (version >= 1),
    revision bigint NOT NULL CHECK (revision >= 1),
    -- The spec as the user typed it (tickwheel.v1.ScheduleSpec, without the payload).
    spec jsonb NOT NULL,
    trigger_id bigint NOT NULL,
    template_id bigint NOT NULL,
    labels jsonb NOT NULL DEFAULT '{}',
    annotations jsonb NOT NULL DEFAULT '{}',
    -- Set while it is paused: reason, principal, pause_us, resume_us.
    pause jsonb,
    quarantine_reason text,
    create_us bigint NOT NULL,
    update_us bigint NOT NULL,
    delete_us bigint,
    traceparent text
);
CREATE UNIQUE INDEX schedule_name ON schedule (tenant_id, name) WHERE delete_us IS NULL;
CREATE INDEX schedule_list ON schedule (tenant_id, create_us, uid);
CREATE INDEX schedule_shard ON schedule (shard_id, uid);
CREATE INDEX schedule_resume ON schedule (((pause ->> 'resume_us')::bigint)) WHERE pause ->> 'resume_us' IS NOT NULL;

-- Each version of a schedule's spec, for ever: a run keeps the payload of the version that it was born from.
CREATE TABLE schedule_revision (
    uid uuid NOT NULL,
    version bigint NOT NULL,
    shard_id smallint NOT NULL,
    spec jsonb NOT NULL,
    trigger_id bigint NOT NULL,
    template_id bigint NOT NULL,
    payload bytea NOT NULL,
    content_type text NOT NULL,
    principal text NOT NULL,
    create_us bigint NOT NULL,
    PRIMARY KEY (uid, version)
);
ALTER TABLE schedule_revision ALTER COLUMN payload SET STORAGE EXTERNAL;

-- Partitioned by retention class and UTC day of creation: the first 20 bits of the id.
CREATE TABLE run (
    id uuid NOT NULL,
    schedule uuid,
    replayed_from uuid,
    template_id bigint NOT NULL,
    version bigint NOT NULL,
    schedule_us bigint NOT NULL,
    create_us bigint NOT NULL,
    due_us bigint NOT NULL,
    lease_us bigint NOT NULL DEFAULT 0,
    end_us bigint NOT NULL DEFAULT 0,
    fence bigint NOT NULL DEFAULT 0,
    tenant_id integer NOT NULL,
    route_id integer NOT NULL,
    worker_no integer NOT NULL DEFAULT 0,
    spent integer NOT NULL DEFAULT 0,
    shard_id smallint NOT NULL,
    cause smallint NOT NULL,
    state smallint NOT NULL CHECK (state IN (1, 4, 5, 6, 7, 8, 9)),
    priority smallint NOT NULL,
    attempt smallint NOT NULL,
    -- The run's own payload; NULL where it is its schedule version's.
    payload bytea,
    content_type text,
    result bytea,
    result_type text,
    failure bytea,
    progress bytea,
    cancel_reason text,
    labels jsonb,
    traceparent text,
    CHECK ((state IN (1, 4)) = (end_us = 0)),
    PRIMARY KEY (shard_id, id)
) PARTITION BY RANGE (id);
-- The id breaks ties in the order of a page, and is sorted within equal create_us: a narrower key is cheaper to write.
CREATE INDEX run_list ON run (tenant_id, create_us);
CREATE INDEX run_of_schedule ON run (schedule, create_us) WHERE schedule IS NOT NULL;

-- Every attempt that ended otherwise than in a first success (that one is the run's row itself).
CREATE TABLE attempt (
    run uuid NOT NULL,
    fence bigint NOT NULL,
    lease_us bigint NOT NULL,
    end_us bigint NOT NULL,
    worker_no integer NOT NULL,
    shard_id smallint NOT NULL,
    number smallint NOT NULL,
    state smallint NOT NULL,
    failure bytea,
    PRIMARY KEY (shard_id, run, number)
) PARTITION BY RANGE (run);

-- For each occurrence that did not become a run on time, why: a range where many share a reason.
CREATE TABLE decision (
    schedule uuid NOT NULL,
    from_us bigint NOT NULL,
    until_us bigint NOT NULL,
    decided_us bigint NOT NULL,
    count bigint NOT NULL CHECK (count >= 1),
    tenant_id integer NOT NULL,
    shard_id smallint NOT NULL,
    reason smallint NOT NULL,
    detail text,
    CHECK (from_us <= until_us),
    PRIMARY KEY (schedule, from_us, until_us, decided_us)
);

CREATE TABLE dead_letter (
    run uuid PRIMARY KEY,
    shard_id smallint NOT NULL,
    tenant_id integer NOT NULL,
    route_id integer NOT NULL,
    schedule uuid,
    create_us bigint NOT NULL,
    spent integer NOT NULL,
    failure bytea,
    fingerprint text NOT NULL DEFAULT '',
    replayed_by uuid,
    replay_count integer NOT NULL DEFAULT 0
);
CREATE INDEX dead_letter_list ON dead_letter (tenant_id, create_us, run);

CREATE TABLE idempotency (
    tenant_id integer NOT NULL,
    request_id text NOT NULL,
    method text NOT NULL,
    request_hash bytea NOT NULL,
    response bytea NOT NULL,
    create_us bigint NOT NULL,
    PRIMARY KEY (tenant_id, request_id)
);
CREATE INDEX idempotency_age ON idempotency (create_us);

CREATE TABLE audit (
    at_us bigint NOT NULL,
    audit_id uuid NOT NULL DEFAULT gen_random_uuid(),
    tenant_id integer NOT NULL,
    principal text NOT NULL,
    method text NOT NULL,
    resource text NOT NULL,
    request_id text NOT NULL DEFAULT '',
    reason text NOT NULL DEFAULT '',
    etag_before text NOT NULL DEFAULT '',
    etag_after text NOT NULL DEFAULT '',
    changed text NOT NULL DEFAULT '',
    peer text NOT NULL DEFAULT '',
    PRIMARY KEY (at_us, audit_id)
) PARTITION BY RANGE (at_us);
CREATE INDEX audit_resource ON audit (resource, at_us);
