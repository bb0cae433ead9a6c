"""The schema: made by migrations, described in `tables.py`, kept in partitions."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import Script

from tickwheel.domain.ids import DAY_US, run_id
from tickwheel.domain.shard import first_epoch
from tickwheel.embedded.postgres import EmbeddedPostgres
from tickwheel.errors import FieldInvalid, StoreUnavailable
from tickwheel.postgres import partitions
from tickwheel.postgres.migrate import make_engine, migrate, split_by_phase
from tickwheel.postgres.tables import metadata


@pytest.fixture
def fresh_url(postgres_server: EmbeddedPostgres) -> Iterator[str]:
    name = f"migrate_{uuid.uuid4().hex[:10]}"
    yield postgres_server.create_database(name)
    postgres_server.drop_database(name)


@pytest.fixture
def migrated(fresh_url: str) -> Iterator[psycopg.Connection]:
    migrate(fresh_url, shard_count=8)
    with psycopg.connect(fresh_url, autocommit=True) as connection:
        yield connection


def _one(connection: psycopg.Connection, query: str, *parameters: object) -> Any:
    row = connection.execute(query.encode(), parameters).fetchone()
    assert row is not None
    return row[0]


def test_migrating_twice_changes_nothing_the_second_time(fresh_url: str) -> None:
    first = migrate(fresh_url, shard_count=8)
    second = migrate(fresh_url)
    assert first.revision_before is None
    assert second.revision_before == second.revision == first.revision
    assert (second.cluster_id, second.shard_count) == (first.cluster_id, 8)


def test_a_new_cluster_has_its_shards_a_default_tenant_and_partitions_ahead(
    migrated: psycopg.Connection,
) -> None:
    assert _one(migrated, "SELECT count(*) FROM shard WHERE epoch = %s", first_epoch(0)) == 8
    assert _one(migrated, "SELECT count(*) FROM shard_cursor") == 8
    assert _one(migrated, "SELECT spread FROM tenant WHERE name = 'default'") == 8
    for parent in ("run", "attempt"):
        count = _one(migrated, "SELECT count(*) FROM pg_inherits WHERE inhparent = %s::regclass", parent)
        days = partitions.DAYS_BACK + 1 + partitions.DAYS_AHEAD
        assert count == days * len(partitions.RUN_RETENTION_DAYS)


def test_the_functions_of_timers_are_in_place(migrated: psycopg.Connection) -> None:
    names = {row[0] for row in migrated.execute("SELECT proname FROM pg_proc WHERE proname LIKE 'tw\\_%'")}
    assert {"tw_fence", "tw_take", "tw_write", "tw_quarantine"} <= names


def test_the_tables_in_the_code_are_the_tables_in_the_database(fresh_url: str) -> None:
    migrate(fresh_url, shard_count=8)
    engine = make_engine(fresh_url)

    def ours(_object: object, name: str | None, kind: str, reflected: bool, _compared: object) -> bool:
        if kind == "table" and reflected:
            return not any(str(name).startswith(f"{parent}_") for parent in ("run", "attempt", "audit")) and (
                name != "alembic_version"
            )
        return True

    with engine.connect() as connection:
        context = MigrationContext.configure(
            connection,
            opts={"include_object": ours, "compare_type": True, "compare_server_default": True},
        )
        difference = compare_metadata(context, metadata)
        columns = {
            name: {
                row[0]
                for row in connection.exec_driver_sql(
                    "SELECT attname FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 0", (name,)
                )
            }
            for name in metadata.tables
        }
    engine.dispose()
    assert difference == []
    assert columns == {name: set(table.columns.keys()) for name, table in metadata.tables.items()}


def test_a_cluster_keeps_the_number_of_shards_that_it_was_made_with(fresh_url: str) -> None:
    migrate(fresh_url, shard_count=8)
    with pytest.raises(FieldInvalid, match="8 shards, for its whole life"):
        migrate(fresh_url, shard_count=16)


def test_a_postgres_that_is_not_there_is_said_in_one_sentence() -> None:
    with pytest.raises(StoreUnavailable, match="Postgres is out of reach"):
        migrate("postgresql://127.0.0.1:1/nothing")


def test_a_phase_of_pre_stops_before_the_first_post_step() -> None:
    def step(revision: str, phase: str) -> Script:
        return cast(Script, SimpleNamespace(revision=revision, module=SimpleNamespace(phase=phase)))

    ahead = [step("1", "pre"), step("2", "post"), step("3", "pre")]
    assert split_by_phase(ahead, "pre") == (["1"], ("2", "3"))
    assert split_by_phase(ahead, "all") == (["1", "2", "3"], ())


def _insert_run(connection: psycopg.Connection, day: int, state: int, end_us: int) -> uuid.UUID:
    made = uuid.UUID(bytes=bytes(run_id(0, day * DAY_US, 3, uuid.uuid4().bytes[:8])))
    connection.execute(
        "INSERT INTO run (id, template_id, version, schedule_us, create_us, due_us, end_us, tenant_id,"
        " route_id, shard_id, cause, state, priority, attempt)"
        " VALUES (%s, 1, 0, 0, 0, 0, %s, 1, 1, 3, 5, %s, 0, 1)",
        (made, end_us, state),
    )
    return made


def _today(connection: psycopg.Connection) -> int:
    return int(_one(connection, "SELECT extract(epoch FROM now())::bigint")) // 86_400


def test_a_partition_is_dropped_when_everything_in_it_has_ended(migrated: psycopg.Connection) -> None:
    day = _today(migrated)
    _insert_run(migrated, day, state=5, end_us=1)
    done = partitions.maintain(migrated, now_us=(day + 31) * DAY_US)
    assert f"run_c0_d{day}" in done.dropped
    assert f"attempt_c0_d{day}" in done.dropped
    assert _one(migrated, "SELECT count(*) FROM run") == 0


@pytest.mark.parametrize("state", [1, 4])
def test_a_run_that_waits_or_is_held_outlives_its_partitions_retention(
    migrated: psycopg.Connection, state: int
) -> None:
    day = _today(migrated)
    living = _insert_run(migrated, day, state=state, end_us=0)
    for _ in range(3):
        _insert_run(migrated, day, state=5, end_us=1)
    done = partitions.maintain(migrated, now_us=(day + 31) * DAY_US)
    assert f"run_c0_d{day}" not in done.dropped
    assert [row[0] for row in migrated.execute("SELECT id FROM run")] == [living]
    migrated.execute("UPDATE run SET state = 5, end_us = 1")
    assert f"run_c0_d{day}" in partitions.maintain(migrated, now_us=(day + 31) * DAY_US).dropped


def test_a_leased_run_without_a_row_keeps_its_partition(migrated: psycopg.Connection) -> None:
    day = _today(migrated)
    run = uuid.UUID(bytes=bytes(run_id(0, day * DAY_US, 3, bytes(8))))
    migrated.execute(
        "INSERT INTO lease (run, token, fence, template_id, version, schedule_us, due_us, create_us,"
        " lease_us, tenant_id, route_id, flags, worker_no, lease_ms, spent, shard_id, attempt, priority)"
        " VALUES (%s, %s, 1, 1, 1, 0, 0, 0, 0, 1, 1, 0, 1, 10000, 0, 3, 1, 0)",
        (run, uuid.uuid4()),
    )
    assert f"run_c0_d{day}" not in partitions.maintain(migrated, now_us=(day + 31) * DAY_US).dropped


def test_a_dead_letter_keeps_its_run_for_ninety_days(migrated: psycopg.Connection) -> None:
    day = _today(migrated)
    run = _insert_run(migrated, day, state=7, end_us=1)
    migrated.execute(
        "INSERT INTO dead_letter (run, shard_id, tenant_id, route_id, create_us, spent)"
        " VALUES (%s, 3, 1, 1, %s, 4)",
        (run, day * DAY_US),
    )
    assert partitions.maintain(migrated, now_us=(day + 80) * DAY_US).dropped.count(f"run_c0_d{day}") == 0
    assert f"run_c0_d{day}" in partitions.maintain(migrated, now_us=(day + 92) * DAY_US).dropped


def test_creating_ahead_waits_for_no_reader(migrated: psycopg.Connection, fresh_url: str) -> None:
    day = _today(migrated)
    with psycopg.connect(fresh_url) as reader:
        reader.execute("SELECT count(*) FROM run")
        done = partitions.maintain(migrated, now_us=(day + 2) * DAY_US)
        assert {f"run_c0_d{day + 4}", f"run_c0_d{day + 5}"} <= set(done.created)
        assert done.blocked == []


def test_what_a_lock_keeps_away_is_tried_in_the_next_round(
    migrated: psycopg.Connection, fresh_url: str
) -> None:
    day = _today(migrated)
    with psycopg.connect(fresh_url) as blocker:
        blocker.execute("LOCK TABLE run IN ACCESS EXCLUSIVE MODE")
        done = partitions.maintain(migrated, now_us=(day + 1) * DAY_US, lock_timeout_ms=50)
        assert done.blocked == [f"run_c{retention}_d{day + 4}" for retention in (0, 1)]
    assert f"run_c0_d{day + 4}" in partitions.maintain(migrated, now_us=(day + 1) * DAY_US).created


def test_one_round_is_under_way_at_a_time(migrated: psycopg.Connection, fresh_url: str) -> None:
    with psycopg.connect(fresh_url, autocommit=True) as other:
        other.execute("SELECT pg_advisory_lock(27767, -2)")
        assert partitions.maintain(migrated, now_us=_today(migrated) * DAY_US).skipped


def test_a_partition_of_direct_runs_leaves_room_for_their_one_update(migrated: psycopg.Connection) -> None:
    name = f"run_c1_d{_today(migrated)}"
    options = _one(migrated, "SELECT reloptions FROM pg_class WHERE relname = %s", name)
    assert {"fillfactor=50", "toast_tuple_target=128"} <= set(options)
    storage = _one(
        migrated,
        "SELECT attstorage FROM pg_attribute WHERE attrelid = %s::regclass AND attname = 'payload'",
        name,
    )
    assert storage == "e"
