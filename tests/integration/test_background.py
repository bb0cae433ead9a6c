"""Work in the background against a real Postgres: backfills, changed time-zone data, operations."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import psycopg
import pytest
from google.longrunning import operations_pb2, operations_pb2_grpc

from tickwheel import errors
from tickwheel.client import Client, make_spec
from tickwheel.domain.run import Cause, RunState
from tickwheel.domain.zone import tzdata_version
from tickwheel.embedded.cluster import Cluster
from tickwheel.rpc.status import from_rpc_error
from tickwheel.v1 import (
    calendar_pb2,
    operation_pb2,
    schedule_pb2,
    schedule_service_pb2,
    schedule_service_pb2_grpc,
)

HOUR = timedelta(hours=1)
HOUR_US = 3_600_000_000
State = operation_pb2.OperationMetadata.State


@pytest.fixture
def sql(api_cluster: Cluster) -> Iterator[psycopg.Connection]:
    with psycopg.connect(api_cluster.postgres_url, autocommit=True) as connection:
        yield connection


@pytest.fixture
async def channel(api_cluster: Cluster) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(api_cluster.api_addresses[0]) as channel:
        yield channel


def fresh() -> str:
    return f"b-{uuid.uuid4().hex[:12]}"


def this_hour() -> datetime:
    return datetime.now(UTC).replace(minute=0, second=0, microsecond=0)


async def hourly(client: Client, **fields: Any) -> schedule_pb2.Schedule:
    return await client.schedules.create(fresh(), make_spec("echo", cron="0 * * * *", **fields))


async def backfill(
    channel: grpc.aio.Channel,
    name: str,
    start: datetime,
    end: datetime,
    concurrency_max: int = 0,
    **more: Any,
) -> operations_pb2.Operation:
    request = schedule_service_pb2.BackfillScheduleRequest(name=name, concurrency_max=concurrency_max, **more)
    request.start_time.FromDatetime(start)
    request.end_time.FromDatetime(end)
    return await schedule_service_pb2_grpc.ScheduleServiceStub(channel).BackfillSchedule(request)


def metadata_of(operation: operations_pb2.Operation) -> operation_pb2.OperationMetadata:
    metadata = operation_pb2.OperationMetadata()
    assert operation.metadata.Unpack(metadata)
    return metadata


async def get(channel: grpc.aio.Channel, name: str) -> operations_pb2.Operation:
    request = operations_pb2.GetOperationRequest(name=name)
    return await operations_pb2_grpc.OperationsStub(channel).GetOperation(request)


async def ended(channel: grpc.aio.Channel, name: str) -> operation_pb2.OperationMetadata:
    request = operations_pb2.WaitOperationRequest(name=name)
    request.timeout.FromSeconds(120)
    found = await operations_pb2_grpc.OperationsStub(channel).WaitOperation(request)
    assert found.done, metadata_of(found)
    return metadata_of(found)


async def until(what: Callable[[], Awaitable[bool]], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    tries = 0
    while not await what():
        tries += 1
        # A machine that stood still for a minute has not given the cluster that minute.
        assert time.monotonic() < deadline or tries < 50, "it did not come to that"
        await asyncio.sleep(0.1)


def backfilled(sql: psycopg.Connection, schedule: schedule_pb2.Schedule) -> list[int]:
    rows = sql.execute(
        "SELECT schedule_us FROM run WHERE schedule = %s AND cause = %s ORDER BY schedule_us",
        (uuid.UUID(schedule.uid), int(Cause.BACKFILL)),
    )
    return [row[0] for row in rows]


def end_runs(sql: psycopg.Connection, schedule: schedule_pb2.Schedule) -> None:
    """As if workers had done them all."""
    uid = uuid.UUID(schedule.uid)
    sql.execute("DELETE FROM timer WHERE ref IN (SELECT id FROM run WHERE schedule = %s)", (uid,))
    sql.execute("UPDATE run SET state = 5, end_us = due_us WHERE schedule = %s AND state = 1", (uid,))


# --- Backfills --------------------------------------------------------------------------------------------


async def test_a_backfill_keeps_to_its_concurrency_until_all_have_ended(
    client: Client, channel: grpc.aio.Channel, sql: psycopg.Connection
) -> None:
    schedule = await hourly(client, payload={"a": 1})
    begun = await backfill(channel, schedule.name, this_hour() - 7 * HOUR, this_hour(), 3)
    found: list[int] = []
    for expected in (3, 6, 7):

        async def enough(expected: int = expected) -> bool:
            return len(backfilled(sql, schedule)) == expected

        await until(enough)
        await asyncio.sleep(1.0)
        found = backfilled(sql, schedule)
        assert len(found) == expected, "no more than three of them live"
        assert not (await get(channel, begun.name)).done
        end_runs(sql, schedule)
    metadata = await ended(channel, begun.name)
    assert (metadata.examined_count, metadata.changed_count, metadata.skipped_count) == (7, 7, 0)
    start_us = int((this_hour() - 7 * HOUR).timestamp()) * 1_000_000
    assert found == [start_us + n * HOUR_US for n in range(7)], "the end is exclusive"
    runs = [run async for run in client.runs.list(f'schedule = "{schedule.name}"', full=True)]
    assert all(run.template.payload.data == b'{"a": 1}' for run in runs)


async def test_a_backfill_leaves_out_what_ran_and_what_another_one_claimed(
    client: Client, channel: grpc.aio.Channel, sql: psycopg.Connection
) -> None:
    schedule = await hourly(client)
    start = this_hour() - 5 * HOUR
    start_us = int(start.timestamp()) * 1_000_000
    first = await backfill(channel, schedule.name, start, start + HOUR)
    await until(lambda: _is(lambda: len(backfilled(sql, schedule)) == 1))
    # As the schedule's own owner would have left it: a run that ended, and one that lives without a row.
    row = sql.execute(
        "SELECT id, template_id, tenant_id, route_id, shard_id, create_us FROM run WHERE schedule = %s",
        (uuid.UUID(schedule.uid),),
    ).fetchone()
    assert row is not None
    made, template, tenant, route, shard, create_us = row
    other = uuid.UUID(int=made.int ^ 1)
    sql.execute(
        "INSERT INTO run (id, schedule, template_id, version, schedule_us, create_us, due_us, end_us,"
        " tenant_id, route_id, shard_id, cause, state, priority, attempt)"
        " VALUES (%s, %s, %s, 1, %s, %s, %s, %s, %s, %s, %s, 1, 5, 0, 1)",
        (
            *(other, uuid.UUID(schedule.uid), template, start_us + HOUR_US, create_us, create_us),
            *(create_us, tenant, route, shard),
        ),
    )
    sql.execute(
        "INSERT INTO lease (run, token, schedule, fence, template_id, version, schedule_us, due_us,"
        " create_us, lease_us, tenant_id, route_id, flags, worker_no, lease_ms, spent, shard_id, attempt,"
        " priority)"
        " VALUES (%s, %s, %s, 1, %s, 1, %s, 0, 0, 0, %s, %s, %s, 1, 10000, 0, %s, 1, 0)",
        (
            *(uuid.UUID(int=made.int ^ 2), uuid.uuid4(), uuid.UUID(schedule.uid), template),
            *(start_us + 2 * HOUR_US, tenant, route, int(Cause.SCHEDULED) << 12, shard),
        ),
    )
    second = await backfill(channel, schedule.name, start, this_hour(), 10)
    await until(lambda: _is(lambda: len(backfilled(sql, schedule)) == 3))
    end_runs(sql, schedule)
    sql.execute("DELETE FROM lease WHERE schedule = %s", (uuid.UUID(schedule.uid),))
    metadata = await ended(channel, second.name)
    assert (metadata.examined_count, metadata.changed_count, metadata.skipped_count) == (5, 2, 3)
    assert backfilled(sql, schedule) == [start_us + n * HOUR_US for n in (0, 3, 4)]
    assert (await ended(channel, first.name)).state == State.STATE_SUCCEEDED


async def _is(what: Callable[[], bool]) -> bool:
    return what()


async def test_a_backfill_takes_nothing_that_the_schedule_has_not_decided(
    client: Client, channel: grpc.aio.Channel, sql: psycopg.Connection
) -> None:
    schedule = await hourly(client)
    decided_us = int((this_hour() - 3 * HOUR).timestamp()) * 1_000_000
    sql.execute("UPDATE timer SET decided_us = %s WHERE ref = %s", (decided_us, uuid.UUID(schedule.uid)))
    begun = await backfill(channel, schedule.name, this_hour() - 5 * HOUR, this_hour(), 10)
    await until(lambda: _is(lambda: len(backfilled(sql, schedule)) == 3))
    end_runs(sql, schedule)
    assert (await ended(channel, begun.name)).changed_count == 3
    assert backfilled(sql, schedule)[-1] == decided_us


async def test_a_cancelled_backfill_makes_no_more_runs(
    client: Client, channel: grpc.aio.Channel, sql: psycopg.Connection
) -> None:
    schedule = await hourly(client)
    begun = await backfill(channel, schedule.name, this_hour() - 9 * HOUR, this_hour(), 2)
    await until(lambda: _is(lambda: len(backfilled(sql, schedule)) == 2))
    stub = operations_pb2_grpc.OperationsStub(channel)
    await stub.CancelOperation(operations_pb2.CancelOperationRequest(name=begun.name))
    assert (await ended(channel, begun.name)).state == State.STATE_CANCELLED
    end_runs(sql, schedule)
    await asyncio.sleep(1.5)
    assert len(backfilled(sql, schedule)) == 2
    await stub.DeleteOperation(operations_pb2.DeleteOperationRequest(name=begun.name))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await get(channel, begun.name)
    assert isinstance(from_rpc_error(caught.value), errors.NotFound)


async def test_an_interval_that_is_not_over_is_refused(client: Client, channel: grpc.aio.Channel) -> None:
    schedule = await hourly(client)
    for start, end in ((-2, 2), (-1, -1), (-1, -2)):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await backfill(channel, schedule.name, this_hour() + start * HOUR, this_hour() + end * HOUR)
        refused = from_rpc_error(caught.value)
        assert isinstance(refused, errors.FieldInvalid)
        assert refused.field == "end_time"


async def test_the_same_request_id_begins_one_backfill(
    client: Client, channel: grpc.aio.Channel, sql: psycopg.Connection
) -> None:
    schedule = await hourly(client)
    start, request_id = this_hour() - 2 * HOUR, fresh()
    both = [
        await backfill(channel, schedule.name, start, this_hour(), 5, request_id=request_id) for _ in range(2)
    ]
    assert both[0].name == both[1].name
    tried = await backfill(channel, schedule.name, start, this_hour(), 5, validate_only=True)
    with pytest.raises(grpc.aio.AioRpcError):
        await get(channel, tried.name)


@pytest.fixture(scope="module")
def whole_cluster(short_folder: Path, postgres_bin_folder: Path | None) -> Iterator[Cluster]:
    """With a timer and a worker; its coordinator may be killed."""
    cluster = Cluster(
        short_folder / "bg", coordinators=1, timers=1, workers=1, postgres_bin_folder=postgres_bin_folder
    )
    try:
        yield cluster.start()
    finally:
        cluster.stop()


async def test_a_coordinator_that_is_killed_loses_and_repeats_nothing_of_a_backfill(
    whole_cluster: Cluster,
) -> None:
    cluster = whole_cluster
    async with Client(cluster.api_addresses, retry_s_max=30.0) as client:
        schedule = await client.schedules.create(fresh(), make_spec("echo", cron="* * * * *", overlap="SKIP"))
        end = datetime.now(UTC).replace(second=0, microsecond=0)
        begun = await client.schedules.backfill(
            schedule.name, end - timedelta(minutes=200), end, concurrency_max=7
        )
        with psycopg.connect(cluster.postgres_url, autocommit=True) as sql:
            for part in (30, 90, 150):

                async def so_far(part: int = part) -> bool:
                    return len(backfilled(sql, schedule)) >= part

                await until(so_far)
                cluster["coordinator-1"].kill9()
                cluster["coordinator-1"].start()
            metadata = metadata_of(await client.operations.wait(begun.name, timeout_s=120.0))
            assert metadata.state == State.STATE_SUCCEEDED
            assert (metadata.examined_count, metadata.changed_count) == (200, 200)
            end_us = int(end.timestamp()) * 1_000_000
            expected = [end_us - n * 60_000_000 for n in range(200, 0, -1)]
            assert backfilled(sql, schedule) == expected, "each once"
            states = sql.execute(
                "SELECT DISTINCT state FROM run WHERE schedule = %s AND cause = 3", (uuid.UUID(schedule.uid),)
            ).fetchall()
            assert states == [(int(RunState.SUCCEEDED),)]


async def test_a_coordinator_that_is_killed_leaves_no_schedule_at_the_dates_before(
    whole_cluster: Cluster,
) -> None:
    cluster = whole_cluster
    async with Client(cluster.api_addresses, retry_s_max=30.0) as client:
        calendar = await client.calendars.create(fresh(), calendar_pb2.Calendar(dates=["2030-05-01"]))
        spec = make_spec("echo", cron="0 9 1 6 *")
        spec.exclusions.add(calendars=[calendar.name])
        made = [await client.schedules.create(fresh(), spec) for _ in range(120)]
        day = made[0].status.next_occurrences[0].schedule_time.ToDatetime().date().isoformat()
        changed = await client.calendars.update(
            calendar_pb2.Calendar(name=calendar.name, dates=[day], etag=calendar.etag)
        )
        operation = changed.recompute_operation

        async def is_under_way() -> bool:
            return metadata_of(await client.operations.get(operation)).examined_count > 0

        await until(is_under_way)
        for _ in range(2):
            cluster["coordinator-1"].kill9()
            cluster["coordinator-1"].start()
        metadata = metadata_of(await client.operations.wait(operation, timeout_s=120.0))
        assert metadata.state == State.STATE_SUCCEEDED
        assert (metadata.examined_count, metadata.changed_count) == (120, 120), "each once"
        with psycopg.connect(cluster.postgres_url, autocommit=True) as sql:
            versions = sql.execute(
                "SELECT s.version, t.version, count(*) FROM schedule s JOIN timer t ON t.ref = s.uid"
                " JOIN schedule_calendar c ON c.schedule = s.uid WHERE c.calendar = %s GROUP BY 1, 2",
                (uuid.UUID(calendar.uid),),
            ).fetchall()
        assert versions == [(2, 2, 120)]
        for schedule in made[::40]:
            found = await client.schedules.get(schedule.name)
            assert found.status.next_occurrences[0].schedule_time.ToDatetime().date().isoformat() > day


async def test_a_backfill_does_not_make_the_schedule_skip_its_own_occurrences(whole_cluster: Cluster) -> None:
    """SKIP skips what comes while a run of the schedule lives: those of a backfill are not counted."""
    async with Client(whole_cluster.api_addresses, retry_s_max=30.0) as client:
        spec = make_spec("sleep", every=timedelta(seconds=1), overlap="SKIP", payload={"seconds": 0.01})
        schedule = await client.schedules.create(fresh(), spec)
        await client.schedules.pause(schedule.name, "to let some pass")
        start = datetime.now(UTC)
        await asyncio.sleep(8.0)
        await client.schedules.resume(schedule.name)
        end = datetime.now(UTC)
        begun = await client.schedules.backfill(schedule.name, start, end, concurrency_max=1)
        await client.operations.wait(begun.name, timeout_s=60.0)
        with psycopg.connect(whole_cluster.postgres_url, autocommit=True) as sql:
            uid = uuid.UUID(schedule.uid)
            skipped = sql.execute(
                "SELECT count(*) FROM decision WHERE schedule = %s AND reason = 1", (uid,)
            ).fetchone()
            assert skipped == (0,)
            assert len(backfilled(sql, schedule)) >= 6
        await client.schedules.delete(schedule.name)


async def test_an_operation_that_fails_holds_up_no_other(client: Client, sql: psycopg.Connection) -> None:
    poison = uuid.uuid4()
    sql.execute(
        "INSERT INTO operation (operation_id, tenant_id, kind, state, resource, request, principal,"
        " create_us, update_us) VALUES (%s, 1, 1, 1, 'nothing', '{}', 'test', 0, 0)",
        (poison,),
    )
    sql.execute(
        "INSERT INTO operation_step (operation_id, step, state, cursor) VALUES (%s, 0, 1, '{}')", (poison,)
    )
    schedule = await hourly(client)
    begun = await client.schedules.backfill(
        schedule.name, this_hour() - 2 * HOUR, this_hour(), concurrency_max=5
    )
    await until(lambda: _is(lambda: len(backfilled(sql, schedule)) == 2))
    end_runs(sql, schedule)
    assert (await client.operations.wait(begun.name, timeout_s=60.0)).done
    failing = await client.operations.get(f"operations/{poison.hex}")
    assert "KeyError" in metadata_of(failing).last_error
    assert not failing.done, "it is tried again, later and later"
    await client.operations.cancel(failing.name)
    assert (await client.operations.wait(failing.name, timeout_s=60.0)).done


# --- Time-zone data ---------------------------------------------------------------------------------------


async def test_changed_time_zone_data_move_what_they_change_and_nothing_else(
    client: Client, channel: grpc.aio.Channel, sql: psycopg.Connection
) -> None:
    def row(schedule: schedule_pb2.Schedule) -> Any:
        statement = "SELECT due_us, schedule_us, decided_us FROM timer WHERE ref = %s"
        return sql.execute(statement, (uuid.UUID(schedule.uid),)).fetchone()

    def recorded() -> Any:
        return sql.execute("SELECT tzdata_version FROM cluster").fetchone()

    await until(lambda: _is(lambda: recorded() == (tzdata_version(),)))
    moved = await client.schedules.create(
        fresh(), kind="echo", cron="0 9 1 1 *", time_zone="Europe/Berlin", jitter=timedelta(minutes=5)
    )
    kept = await client.schedules.create(fresh(), kind="echo", cron="0 9 * * *")
    paused = await client.schedules.create(fresh(), kind="echo", cron="0 9 * * *")
    await client.schedules.pause(paused.name, "stock-taking")
    right = {each.name: row(each) for each in (moved, kept, paused)}
    # As older data had it: an hour later.
    sql.execute(
        "UPDATE timer SET due_us = due_us + %s, schedule_us = schedule_us + %s WHERE ref = %s",
        (HOUR_US, HOUR_US, uuid.UUID(moved.uid)),
    )
    sql.execute("UPDATE cluster SET tzdata_version = '2000a'")
    await until(lambda: _is(lambda: recorded() == (tzdata_version(),)))
    assert {each.name: row(each) for each in (moved, kept, paused)} == right
    stub = operations_pb2_grpc.OperationsStub(channel)
    listed = await stub.ListOperations(operations_pb2.ListOperationsRequest(name="", page_size=1))
    metadata = metadata_of(listed.operations[0])
    assert metadata.kind == operation_pb2.OperationMetadata.KIND_TZDATA_RECOMPUTE
    assert metadata.state == State.STATE_SUCCEEDED
    assert metadata.step_count == metadata.step_done_count == 16, "a step for each shard"
    assert [move.schedule for move in metadata.moves] == [moved.name]
    assert metadata.changed_count == 1

    async def is_shown() -> bool:
        return (await client.schedules.get(moved.name)).status.tzdata_version == tzdata_version()

    await until(is_shown, 20.0)
