-- Calendars: named sets of dates that schedules share. `revision` is the etag's number too.
CREATE TABLE calendar (
    uid uuid PRIMARY KEY,
    tenant_id integer NOT NULL REFERENCES tenant,
    name text NOT NULL,
    revision bigint NOT NULL CHECK (revision >= 1),
    -- The last year for which the present revision's rules are worked out.
    effective_year smallint NOT NULL,
    create_us bigint NOT NULL,
    update_us bigint NOT NULL,
    delete_us bigint
);
CREATE UNIQUE INDEX calendar_name ON calendar (tenant_id, name) WHERE delete_us IS NULL;
CREATE INDEX calendar_list ON calendar (tenant_id, create_us, uid);

-- What each revision said, for ever.
CREATE TABLE calendar_revision (
    uid uuid NOT NULL,
    revision bigint NOT NULL,
    display_name text NOT NULL,
    labels jsonb NOT NULL,
    -- As they were given: {"dates": […], "rules": […]}.
    source jsonb NOT NULL,
    -- As schedules are computed with them: ISO dates, ascending.
    dates jsonb NOT NULL,
    effective_year smallint NOT NULL,
    principal text NOT NULL,
    create_us bigint NOT NULL,
    PRIMARY KEY (uid, revision)
);

-- Which live schedules name which calendars.
CREATE TABLE schedule_calendar (
    calendar uuid NOT NULL,
    schedule uuid NOT NULL,
    PRIMARY KEY (calendar, schedule)
);
CREATE INDEX schedule_calendar_schedule ON schedule_calendar (schedule);

-- Work that goes on in the background, in steps that survive any crash.
CREATE TABLE operation (
    operation_id uuid PRIMARY KEY,
    -- 0: the cluster's own.
    tenant_id integer NOT NULL,
    -- OperationKind and OperationState of domain/operation.py.
    kind smallint NOT NULL,
    state smallint NOT NULL CHECK (state BETWEEN 1 AND 4),
    resource text NOT NULL,
    -- What was asked for, frozen.
    request jsonb NOT NULL,
    principal text NOT NULL,
    create_us bigint NOT NULL,
    update_us bigint NOT NULL,
    end_us bigint NOT NULL DEFAULT 0,
    -- When it was asked to stop; 0: it was not.
    cancel_us bigint NOT NULL DEFAULT 0,
    CHECK ((state = 1) = (end_us = 0))
);
CREATE INDEX operation_open ON operation (create_us, operation_id) WHERE state = 1;
CREATE INDEX operation_list ON operation (tenant_id, create_us, operation_id);

CREATE TABLE operation_step (
    operation_id uuid NOT NULL,
    step smallint NOT NULL,
    -- As an operation's.
    state smallint NOT NULL CHECK (state BETWEEN 1 AND 4),
    -- How far it is; it moves in the transaction that does the work.
    cursor jsonb NOT NULL,
    -- Tries that failed since the last that did not.
    attempt_count integer NOT NULL DEFAULT 0,
    not_before_us bigint NOT NULL DEFAULT 0,
    examined_count bigint NOT NULL DEFAULT 0,
    changed_count bigint NOT NULL DEFAULT 0,
    skipped_count bigint NOT NULL DEFAULT 0,
    last_error text,
    PRIMARY KEY (operation_id, step)
);

-- Schedules whose next occurrence became another one: the first of each step.
CREATE TABLE operation_move (
    operation_id uuid NOT NULL,
    schedule uuid NOT NULL,
    before_us bigint NOT NULL,
    after_us bigint NOT NULL,
    PRIMARY KEY (operation_id, schedule)
);

-- I2: an occurrence is claimed by at most one backfill, ever. Not partitioned, so that the key is one for all time.
CREATE TABLE backfill_claim (
    schedule uuid NOT NULL,
    schedule_us bigint NOT NULL,
    run uuid NOT NULL,
    operation_id uuid NOT NULL,
    -- The run had not ended when it was last looked at.
    live boolean NOT NULL,
    PRIMARY KEY (schedule, schedule_us)
);
CREATE INDEX backfill_claim_live ON backfill_claim (operation_id) WHERE live;
