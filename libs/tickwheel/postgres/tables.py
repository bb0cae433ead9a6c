"""The tables, for SQLAlchemy and Alembic: equal to what the migrations make (a test compares the two).

The hot path does not come here: it runs the named statements of `sql/`. What a column means stands in the
first migration, `migrations/versions/0001_initial.sql`. Partitions are not listed: `partitions.py` makes and
drops them.
"""

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    ForeignKey,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    SmallInteger,
    Table,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB, UUID

metadata = MetaData()

cluster = Table(
    "cluster",
    metadata,
    Column("singleton", Boolean, primary_key=True, server_default=text("true")),
    Column("cluster_id", UUID(as_uuid=True), nullable=False),
    Column("shard_count", Integer, nullable=False),
    Column("incarnation", Integer, nullable=False, server_default=text("0")),
    Column("clock_offset_us", BigInteger, nullable=False, server_default=text("0")),
    Column("tzdata_version", Text, nullable=False, server_default=text("''")),
    CheckConstraint("singleton"),
    CheckConstraint("shard_count BETWEEN 1 AND 4096"),
    CheckConstraint("incarnation BETWEEN 0 AND 1023"),
)

shard = Table(
    "shard",
    metadata,
    Column("shard_id", SmallInteger, primary_key=True),
    Column("epoch", BigInteger, nullable=False),
    Column("owner", Text, nullable=False, server_default=text("''")),
    Column("generation", BigInteger, nullable=False, server_default=text("0")),
    Column("taken_us", BigInteger, nullable=False, server_default=text("0")),
    postgresql_with={"fillfactor": 20},
)

shard_cursor = Table(
    "shard_cursor",
    metadata,
    Column("shard_id", SmallInteger, primary_key=True),
    Column("low_watermark_us", BigInteger, nullable=False, server_default=text("0")),
    postgresql_with={"fillfactor": 50},
)

timer_node = Table(
    "timer_node",
    metadata,
    Column("timer_id", Text, primary_key=True),
    Column("node_name", Text, nullable=False),
    Column("address", Text, nullable=False),
    Column("started_us", BigInteger, nullable=False),
    Column("seen_us", BigInteger, nullable=False),
    postgresql_with={"fillfactor": 20},
)

worker_node = Table(
    "worker_node",
    metadata,
    Column("worker_no", Integer, Identity(always=True), primary_key=True),
    Column("worker_id", Text, nullable=False, unique=True),
    Column("pool", Text, nullable=False),
    Column("host", Text, nullable=False),
    Column("seen_us", BigInteger, nullable=False),
)

tenant = Table(
    "tenant",
    metadata,
    Column("tenant_id", Integer, Identity(always=True), primary_key=True),
    Column("name", Text, nullable=False, unique=True),
    Column("spread", Integer, nullable=False),
    Column("weight", Integer, nullable=False, server_default=text("1")),
    Column("create_us", BigInteger, nullable=False),
    CheckConstraint("spread >= 1"),
    CheckConstraint("weight BETWEEN 1 AND 1000"),
)

route = Table(
    "route",
    metadata,
    Column("route_id", Integer, Identity(always=True), primary_key=True),
    Column("queue", Text, nullable=False),
    Column("kind", Text, nullable=False),
    UniqueConstraint("queue", "kind"),
)

trigger_def = Table(
    "trigger_def",
    metadata,
    Column("trigger_id", BigInteger, primary_key=True),
    Column("body", LargeBinary, nullable=False),
)

template_def = Table(
    "template_def",
    metadata,
    Column("template_id", BigInteger, primary_key=True),
    Column("body", LargeBinary, nullable=False),
)

timer = Table(
    "timer",
    metadata,
    Column("due_us", BigInteger, nullable=False),
    Column("schedule_us", BigInteger, nullable=False),
    Column("decided_us", BigInteger, nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("trigger_id", BigInteger, nullable=False),
    Column("template_id", BigInteger, nullable=False),
    Column("ref", UUID(as_uuid=True), nullable=False),
    Column("schedule", UUID(as_uuid=True)),
    Column("tenant_id", Integer, nullable=False),
    Column("route_id", Integer, nullable=False),
    Column("flags", Integer, nullable=False),
    Column("misfire_ms", Integer, nullable=False),
    Column("countdown", Integer, nullable=False),
    Column("shard_id", SmallInteger, nullable=False),
    Column("kind", SmallInteger, nullable=False),
    Column("priority", SmallInteger, nullable=False),
    Column("attempt", SmallInteger, nullable=False),
    PrimaryKeyConstraint("shard_id", "ref"),
    CheckConstraint("kind IN (1, 2)"),
    CheckConstraint("priority BETWEEN 0 AND 9"),
    CheckConstraint("kind = 2 OR schedule_us > decided_us OR due_us = 9223372036854775807"),
    postgresql_with={"fillfactor": 70},
)
Index("timer_due", timer.c.shard_id, timer.c.tenant_id, timer.c.due_us, timer.c.ref)
Index(
    "timer_raised",
    timer.c.shard_id,
    timer.c.tenant_id,
    timer.c.due_us,
    timer.c.ref,
    postgresql_where=text("priority > 0"),
)
Index("timer_waiting", timer.c.shard_id, timer.c.schedule, postgresql_where=text("schedule IS NOT NULL"))

lease = Table(
    "lease",
    metadata,
    Column("run", UUID(as_uuid=True), nullable=False),
    Column("token", UUID(as_uuid=True), nullable=False),
    Column("schedule", UUID(as_uuid=True)),
    Column("fence", BigInteger, nullable=False),
    Column("template_id", BigInteger, nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("schedule_us", BigInteger, nullable=False),
    Column("due_us", BigInteger, nullable=False),
    Column("create_us", BigInteger, nullable=False),
    Column("lease_us", BigInteger, nullable=False),
    Column("cancel_us", BigInteger, nullable=False, server_default=text("0")),
    Column("cancel_until_us", BigInteger, nullable=False, server_default=text("0")),
    Column("cancel_reason", Text),
    Column("tenant_id", Integer, nullable=False),
    Column("route_id", Integer, nullable=False),
    Column("flags", Integer, nullable=False),
    Column("worker_no", Integer, nullable=False),
    Column("lease_ms", Integer, nullable=False),
    Column("spent", Integer, nullable=False),
    Column("shard_id", SmallInteger, nullable=False),
    Column("attempt", SmallInteger, nullable=False),
    Column("priority", SmallInteger, nullable=False),
    Column("progress", LargeBinary),
    PrimaryKeyConstraint("shard_id", "run"),
    CheckConstraint("attempt >= 1"),
    postgresql_with={"fillfactor": 90},
)
Index("lease_cancel", lease.c.shard_id, postgresql_where=text("cancel_us > 0"))

schedule = Table(
    "schedule",
    metadata,
    Column("uid", UUID(as_uuid=True), primary_key=True),
    Column("shard_id", SmallInteger, nullable=False),
    Column("tenant_id", Integer, ForeignKey("tenant.tenant_id"), nullable=False),
    Column("name", Text, nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("revision", BigInteger, nullable=False),
    Column("spec", JSONB, nullable=False),
    Column("trigger_id", BigInteger, nullable=False),
    Column("template_id", BigInteger, nullable=False),
    Column("labels", JSONB, nullable=False, server_default=text("'{}'")),
    Column("annotations", JSONB, nullable=False, server_default=text("'{}'")),
    Column("pause", JSONB),
    Column("quarantine_reason", Text),
    Column("create_us", BigInteger, nullable=False),
    Column("update_us", BigInteger, nullable=False),
    Column("delete_us", BigInteger),
    Column("traceparent", Text),
    CheckConstraint("version >= 1"),
    CheckConstraint("revision >= 1"),
)
Index(
    "schedule_name",
    schedule.c.tenant_id,
    schedule.c.name,
    unique=True,
    postgresql_where=text("delete_us IS NULL"),
)
Index("schedule_list", schedule.c.tenant_id, schedule.c.create_us, schedule.c.uid)
Index("schedule_shard", schedule.c.shard_id, schedule.c.uid)
Index(
    "schedule_resume",
    text("((pause ->> 'resume_us')::bigint)"),
    postgresql_where=text("pause ->> 'resume_us' IS NOT NULL"),
)

Index(
    "schedule_resume",
    text("((pause ->> 'resume_us')::bigint)"),
    postgresql_where=text("pause ->> 'resume_us' IS NOT NULL"),
    _table=schedule,
)
schedule_revision = Table(
    "schedule_revision",
    metadata,
    Column("uid", UUID(as_uuid=True), nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("shard_id", SmallInteger, nullable=False),
    Column("spec", JSONB, nullable=False),
    Column("trigger_id", BigInteger, nullable=False),
    Column("template_id", BigInteger, nullable=False),
    Column("payload", LargeBinary, nullable=False),
    Column("content_type", Text, nullable=False),
    Column("principal", Text, nullable=False),
    Column("create_us", BigInteger, nullable=False),
    PrimaryKeyConstraint("uid", "version"),
)

run = Table(
    "run",
    metadata,
    Column("id", UUID(as_uuid=True), nullable=False),
    Column("schedule", UUID(as_uuid=True)),
    Column("replayed_from", UUID(as_uuid=True)),
    Column("template_id", BigInteger, nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("schedule_us", BigInteger, nullable=False),
    Column("create_us", BigInteger, nullable=False),
    Column("due_us", BigInteger, nullable=False),
    Column("lease_us", BigInteger, nullable=False, server_default=text("0")),
    Column("end_us", BigInteger, nullable=False, server_default=text("0")),
    Column("fence", BigInteger, nullable=False, server_default=text("0")),
    Column("tenant_id", Integer, nullable=False),
    Column("route_id", Integer, nullable=False),
    Column("worker_no", Integer, nullable=False, server_default=text("0")),
    Column("spent", Integer, nullable=False, server_default=text("0")),
    Column("shard_id", SmallInteger, nullable=False),
    Column("cause", SmallInteger, nullable=False),
    Column("state", SmallInteger, nullable=False),
    Column("priority", SmallInteger, nullable=False),
    Column("attempt", SmallInteger, nullable=False),
    Column("payload", LargeBinary),
    Column("content_type", Text),
    Column("result", LargeBinary),
    Column("result_type", Text),
    Column("failure", LargeBinary),
    Column("progress", LargeBinary),
    Column("cancel_reason", Text),
    Column("labels", JSONB),
    Column("traceparent", Text),
    PrimaryKeyConstraint("shard_id", "id"),
    CheckConstraint("state IN (1, 4, 5, 6, 7, 8, 9)"),
    CheckConstraint("(state IN (1, 4)) = (end_us = 0)"),
    postgresql_partition_by="RANGE (id)",
)
Index("run_list", run.c.tenant_id, run.c.create_us)
Index(
    "run_of_schedule",
    run.c.schedule,
    run.c.create_us,
    postgresql_where=text("schedule IS NOT NULL"),
)

attempt = Table(
    "attempt",
    metadata,
    Column("run", UUID(as_uuid=True), nullable=False),
    Column("fence", BigInteger, nullable=False),
    Column("lease_us", BigInteger, nullable=False),
    Column("end_us", BigInteger, nullable=False),
    Column("worker_no", Integer, nullable=False),
    Column("shard_id", SmallInteger, nullable=False),
    Column("number", SmallInteger, nullable=False),
    Column("state", SmallInteger, nullable=False),
    Column("failure", LargeBinary),
    PrimaryKeyConstraint("shard_id", "run", "number"),
    postgresql_partition_by="RANGE (run)",
)

decision = Table(
    "decision",
    metadata,
    Column("schedule", UUID(as_uuid=True), nullable=False),
    Column("from_us", BigInteger, nullable=False),
    Column("until_us", BigInteger, nullable=False),
    Column("decided_us", BigInteger, nullable=False),
    Column("count", BigInteger, nullable=False),
    Column("tenant_id", Integer, nullable=False),
    Column("shard_id", SmallInteger, nullable=False),
    Column("reason", SmallInteger, nullable=False),
    Column("detail", Text),
    PrimaryKeyConstraint("schedule", "from_us", "until_us", "decided_us"),
    CheckConstraint("count >= 1"),
    CheckConstraint("from_us <= until_us"),
)

dead_letter = Table(
    "dead_letter",
    metadata,
    Column("run", UUID(as_uuid=True), primary_key=True),
    Column("shard_id", SmallInteger, nullable=False),
    Column("tenant_id", Integer, nullable=False),
    Column("route_id", Integer, nullable=False),
    Column("schedule", UUID(as_uuid=True)),
    Column("create_us", BigInteger, nullable=False),
    Column("spent", Integer, nullable=False),
    Column("failure", LargeBinary),
    Column("fingerprint", Text, nullable=False, server_default=text("''")),
    Column("replayed_by", UUID(as_uuid=True)),
    Column("replay_count", Integer, nullable=False, server_default=text("0")),
)
Index("dead_letter_list", dead_letter.c.tenant_id, dead_letter.c.create_us, dead_letter.c.run)

idempotency = Table(
    "idempotency",
    metadata,
    Column("tenant_id", Integer, nullable=False),
    Column("request_id", Text, nullable=False),
    Column("method", Text, nullable=False),
    Column("request_hash", LargeBinary, nullable=False),
    Column("response", LargeBinary, nullable=False),
    Column("create_us", BigInteger, nullable=False),
    PrimaryKeyConstraint("tenant_id", "request_id"),
)
Index("idempotency_age", idempotency.c.create_us)

audit = Table(
    "audit",
    metadata,
    Column("at_us", BigInteger, nullable=False),
    Column("audit_id", UUID(as_uuid=True), nullable=False, server_default=text("gen_random_uuid()")),
    Column("tenant_id", Integer, nullable=False),
    Column("principal", Text, nullable=False),
    Column("method", Text, nullable=False),
    Column("resource", Text, nullable=False),
    Column("request_id", Text, nullable=False, server_default=text("''")),
    Column("reason", Text, nullable=False, server_default=text("''")),
    Column("etag_before", Text, nullable=False, server_default=text("''")),
    Column("etag_after", Text, nullable=False, server_default=text("''")),
    Column("changed", Text, nullable=False, server_default=text("''")),
    Column("peer", Text, nullable=False, server_default=text("''")),
    PrimaryKeyConstraint("at_us", "audit_id"),
    postgresql_partition_by="RANGE (at_us)",
)
Index("audit_resource", audit.c.resource, audit.c.at_us)

calendar = Table(
    "calendar",
    metadata,
    Column("uid", UUID(as_uuid=True), primary_key=True),
    Column("tenant_id", Integer, ForeignKey("tenant.tenant_id"), nullable=False),
    Column("name", Text, nullable=False),
    Column("revision", BigInteger, nullable=False),
    Column("effective_year", SmallInteger, nullable=False),
    Column("create_us", BigInteger, nullable=False),
    Column("update_us", BigInteger, nullable=False),
    Column("delete_us", BigInteger),
    CheckConstraint("revision >= 1"),
    Index("calendar_name", "tenant_id", "name", unique=True, postgresql_where=text("delete_us IS NULL")),
    Index("calendar_list", "tenant_id", "create_us", "uid"),
)

calendar_revision = Table(
    "calendar_revision",
    metadata,
    Column("uid", UUID(as_uuid=True)),
    Column("revision", BigInteger, autoincrement=False),
    Column("display_name", Text, nullable=False),
    Column("labels", JSONB, nullable=False),
    Column("source", JSONB, nullable=False),
    Column("dates", JSONB, nullable=False),
    Column("effective_year", SmallInteger, nullable=False),
    Column("principal", Text, nullable=False),
    Column("create_us", BigInteger, nullable=False),
    PrimaryKeyConstraint("uid", "revision"),
)

schedule_calendar = Table(
    "schedule_calendar",
    metadata,
    Column("calendar", UUID(as_uuid=True)),
    Column("schedule", UUID(as_uuid=True)),
    PrimaryKeyConstraint("calendar", "schedule"),
    Index("schedule_calendar_schedule", "schedule"),
)

operation = Table(
    "operation",
    metadata,
    Column("operation_id", UUID(as_uuid=True), primary_key=True),
    Column("tenant_id", Integer, nullable=False),
    Column("kind", SmallInteger, nullable=False),
    Column("state", SmallInteger, nullable=False),
    Column("resource", Text, nullable=False),
    Column("request", JSONB, nullable=False),
    Column("principal", Text, nullable=False),
    Column("create_us", BigInteger, nullable=False),
    Column("update_us", BigInteger, nullable=False),
    Column("end_us", BigInteger, nullable=False, server_default=text("0")),
    Column("cancel_us", BigInteger, nullable=False, server_default=text("0")),
    CheckConstraint("state BETWEEN 1 AND 4"),
    CheckConstraint("(state = 1) = (end_us = 0)"),
    Index("operation_open", "create_us", "operation_id", postgresql_where=text("state = 1")),
    Index("operation_list", "tenant_id", "create_us", "operation_id"),
)

operation_step = Table(
    "operation_step",
    metadata,
    Column("operation_id", UUID(as_uuid=True)),
    Column("step", SmallInteger, autoincrement=False),
    Column("state", SmallInteger, nullable=False),
    Column("cursor", JSONB, nullable=False),
    Column("attempt_count", Integer, nullable=False, server_default=text("0")),
    Column("not_before_us", BigInteger, nullable=False, server_default=text("0")),
    Column("examined_count", BigInteger, nullable=False, server_default=text("0")),
    Column("changed_count", BigInteger, nullable=False, server_default=text("0")),
    Column("skipped_count", BigInteger, nullable=False, server_default=text("0")),
    Column("last_error", Text),
    CheckConstraint("state BETWEEN 1 AND 4"),
    PrimaryKeyConstraint("operation_id", "step"),
)

operation_move = Table(
    "operation_move",
    metadata,
    Column("operation_id", UUID(as_uuid=True)),
    Column("schedule", UUID(as_uuid=True)),
    Column("before_us", BigInteger, nullable=False),
    Column("after_us", BigInteger, nullable=False),
    PrimaryKeyConstraint("operation_id", "schedule"),
)

backfill_claim = Table(
    "backfill_claim",
    metadata,
    Column("schedule", UUID(as_uuid=True)),
    Column("schedule_us", BigInteger, autoincrement=False),
    Column("run", UUID(as_uuid=True), nullable=False),
    Column("operation_id", UUID(as_uuid=True), nullable=False),
    Column("live", Boolean, nullable=False),
    PrimaryKeyConstraint("schedule", "schedule_us"),
    Index("backfill_claim_live", "operation_id", postgresql_where=text("live")),
)
