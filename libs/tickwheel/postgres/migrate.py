"""`tickwheel migrate`: brings a database to the schema of this version, as often as it is called.

Migrations come in two kinds, so that old and new code can overlap in a rolling upgrade: a "pre" step is
harmless to the code of the version before (run it first), a "post" step needs that code gone (run it last).
`phase="pre"` stops before the first post step; `phase="all"` goes on to the end.

After the steps the functions of `sql/functions.sql` are put in place again, the rows that every cluster needs
are made where they are missing, and partitions are created ahead.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

import psycopg
import sqlalchemy
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import Script, ScriptDirectory

from tickwheel.domain.shard import SHARD_COUNT_DEFAULT, first_epoch
from tickwheel.errors import FieldInvalid, StoreUnavailable
from tickwheel.postgres import partitions, statements

POSTGRES_VERSION_MIN = 150_000
_MIGRATION_LOCK = (27767, -1)
"""An advisory lock beside those of the shards' fences, whose second half is a shard."""
_CONNECT_SECONDS_MAX = 10

Phase = Literal["pre", "all"]


@dataclass(frozen=True, slots=True)
class Migrated:
    """What a migration did."""

    cluster_id: uuid.UUID
    shard_count: int
    revision_before: str | None
    revision: str | None
    pending_post: tuple[str, ...]
    """Post steps that wait for `phase="all"`."""


def migrate(url: str, *, shard_count: int | None = None, phase: Phase = "all") -> Migrated:
    """Brings the database at `url` up to date. Two at a time take turns.

    `shard_count` counts at the first migration alone (default 256): it is fixed for the life of a cluster.

    Raises:
        FieldInvalid: `shard_count` is out of bounds, or not what the cluster was made with.
        StoreUnavailable: there is no Postgres 15 or newer at `url`.
    """
    if shard_count is not None and not 1 <= shard_count <= 4096:
        raise FieldInvalid("shard_count", f"{shard_count} is not between 1 and 4096")
    try:
        # The lock is the session's and goes with it, whatever happens to this process.
        connection = psycopg.connect(url, autocommit=True, connect_timeout=_CONNECT_SECONDS_MAX)
    except psycopg.OperationalError as error:
        raise StoreUnavailable("Postgres", str(error).strip()) from error
    with connection:
        if connection.info.server_version < POSTGRES_VERSION_MIN:
            version = connection.info.server_version // 10_000
            raise StoreUnavailable("Postgres", f"version {version} is too old: tickwheel needs 15 or newer")
        connection.execute("SELECT pg_advisory_lock(%s, %s)", _MIGRATION_LOCK)
        before, after, pending = _upgrade(url, phase)
        connection.execute(statements.read("functions.sql").encode())
        cluster_id, count = _seed(connection, shard_count)
        partitions.maintain(connection, now_us=_now_us(connection), lock_timeout_ms=30_000)
    return Migrated(cluster_id, count, before, after, pending)


def alembic_config(connection: sqlalchemy.Connection | None = None) -> Config:
    """Alembic's settings, without a file; migrations run on `connection`."""
    config = Config()
    config.set_main_option("script_location", "tickwheel.postgres:migrations")
    config.attributes["connection"] = connection
    return config


def make_engine(url: str) -> sqlalchemy.Engine:
    """An engine for migrations: psycopg reads the URL itself, so that several hosts are possible."""
    return sqlalchemy.create_engine(
        "postgresql+psycopg://",
        creator=lambda: psycopg.connect(url, connect_timeout=_CONNECT_SECONDS_MAX),
        poolclass=sqlalchemy.NullPool,
    )


def _upgrade(url: str, phase: Phase) -> tuple[str | None, str | None, tuple[str, ...]]:
    engine = make_engine(url)
    with engine.connect() as connection:
        before = MigrationContext.configure(connection).get_current_revision()
        connection.rollback()
        config = alembic_config(connection)
        ahead = _revisions_after(ScriptDirectory.from_config(config), before)
        wanted, pending = split_by_phase(ahead, phase)
        if wanted:
            command.upgrade(config, wanted[-1])
        connection.commit()
        after = MigrationContext.configure(connection).get_current_revision()
    engine.dispose()
    return before, after, pending


def _revisions_after(scripts: ScriptDirectory, current: str | None) -> list[Script]:
    """Oldest first."""
    return list(reversed(list(scripts.iterate_revisions("head", current or "base"))))


def split_by_phase(ahead: list[Script], phase: Phase) -> tuple[list[str], tuple[str, ...]]:
    """The revisions to run now, and those that wait: the first post step and all after it."""
    revisions = [script.revision for script in ahead]
    if phase == "all":
        return revisions, ()
    for index, script in enumerate(ahead):
        if script.module.phase == "post":
            return revisions[:index], tuple(revisions[index:])
    return revisions, ()


def _seed(connection: psycopg.Connection, shard_count: int | None) -> tuple[uuid.UUID, int]:
    """The rows that every cluster has. Those that stand are left as they are."""
    with connection.transaction():
        connection.execute(
            "INSERT INTO cluster (cluster_id, shard_count) VALUES (%s, %s) ON CONFLICT DO NOTHING",
            (uuid.uuid4(), shard_count or SHARD_COUNT_DEFAULT),
        )
        row = connection.execute("SELECT cluster_id, shard_count, incarnation FROM cluster").fetchone()
        assert row is not None
        cluster_id, count, incarnation = row
        if shard_count is not None and shard_count != count:
            raise FieldInvalid(
                "shard_count", f"this cluster has {count} shards, for its whole life; not {shard_count}"
            )
        connection.execute(
            "INSERT INTO shard (shard_id, epoch) SELECT s, %s FROM generate_series(0, %s - 1) AS s"
            " ON CONFLICT DO NOTHING",
            (first_epoch(incarnation), count),
        )
        connection.execute(
            "INSERT INTO shard_cursor (shard_id) SELECT s FROM generate_series(0, %s - 1) AS s"
            " ON CONFLICT DO NOTHING",
            (count,),
        )
        connection.execute(
            "INSERT INTO tenant (name, spread, create_us) VALUES ('default', %s, %s) ON CONFLICT DO NOTHING",
            (count, _now_us(connection)),
        )
    # Small tables that every plan meets: without statistics their first plans are guesses.
    connection.execute("ANALYZE shard, tenant, cluster")
    return cluster_id, count


def _now_us(connection: psycopg.Connection) -> int:
    row = connection.execute("SELECT clock_timestamp()").fetchone()
    assert row is not None
    now: datetime = row[0]
    return int((now - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds() * 1_000_000)
