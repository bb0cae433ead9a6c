"""The API of a whole cluster of processes: schedules that fire, workers in a shell script, failovers,
drains.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import psycopg
import pytest

from tickwheel import errors
from tickwheel.client import Client
from tickwheel.embedded.cluster import Cluster
from tickwheel.rpc.status import from_rpc_error
from tickwheel.v1 import run_pb2, schedule_pb2, worker_service_pb2, worker_service_pb2_grpc

State = run_pb2.Run.State
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def whole(short_folder: Path, postgres_bin_folder: Path | None) -> Iterator[Cluster]:
    """Two coordinators, two timers, one worker (queue "default")."""
    cluster = Cluster(
        short_folder / "whole", coordinators=2, timers=2, workers=1, postgres_bin_folder=postgres_bin_folder
    )
    try:
        yield cluster.start()
    finally:
        cluster.stop()


@pytest.fixture
async def client(whole: Cluster) -> AsyncIterator[Client]:
    async with Client(whole.api_addresses, retry_s_max=30) as client:
        await until(lambda: _healthy(client))
        yield client


async def _healthy(client: Client) -> bool:
    return (await client.cluster.health()).healthy


async def until(condition: Any, timeout_s: float = 60) -> Any:
    """What the condition gives as soon as it is true."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = await condition()
        if found:
            return found
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        await asyncio.sleep(0.05)


def fresh(prefix: str = "s") -> str:
    return f"{prefix}-{uuid.uuid4().hex[:12]}"


async def runs_of(client: Client, name: str, filter: str = "") -> list[run_pb2.Run]:
    wanted = f'schedule = "{name}"' + (f" AND {filter}" if filter else "")
    return [run async for run in client.runs.list(wanted, full=True)]


async def test_d_o10_a_schedule_due_in_three_seconds_fires_then(client: Client) -> None:
    """The owner has loaded that minute already: it is told of what is new."""
    due = datetime.now(UTC) + timedelta(seconds=3)
    name = fresh()
    await client.schedules.create(name, kind="echo", at=due, payload={"n": 1})
    (run,) = await until(lambda: runs_of(client, name, "state = SUCCEEDED"))
    assert run.result.data == b'{"n":1}'
    assert run.schedule_time.ToDatetime(UTC) == due
    assert run.due_lag_duration.ToTimedelta() < timedelta(seconds=1)
    read = await client.schedules.get(name)
    assert read.status.state == schedule_pb2.ScheduleStatus.STATE_COMPLETED
    assert read.status.last_run == run.name


async def test_f_o12_an_instant_in_the_past_runs_once_now_and_keeps_its_time(client: Client) -> None:
    past = datetime(2020, 1, 1, tzinfo=UTC)
    name = fresh()
    await client.schedules.create(name, kind="echo", at=past, misfire="FIRE_ONCE")
    # An instant of 2020 is beyond the catch-up window of a day: that it did not run is recorded.
    await until(lambda: _state_is(client, name, schedule_pb2.ScheduleStatus.STATE_COMPLETED))
    for run in await runs_of(client, name):
        assert run.schedule_time.ToDatetime(UTC) == past


async def _state_is(client: Client, name: str, state: Any) -> bool:
    return bool((await client.schedules.get(name)).status.state == state)


async def test_d_o03_a_pause_during_a_run_outlives_the_run(client: Client) -> None:
    name = fresh()
    await client.schedules.create(name, kind="sleep", every=timedelta(seconds=2), payload={"seconds": 2})
    (running,) = await until(lambda: runs_of(client, name, "state = RUNNING"))
    paused = await client.schedules.pause(name, "during the run")
    changed = await client.schedules.ensure(
        name, kind="sleep", every=timedelta(seconds=3), payload={"seconds": 0}
    )
    done = await client.runs.wait(running.name, timeout_s=60)
    assert done.state == State.STATE_SUCCEEDED
    after = await client.schedules.get(name)
    assert after.status.state == schedule_pb2.ScheduleStatus.STATE_PAUSED
    assert after.status.pause == paused.status.pause
    assert after.spec == changed.spec
    count = len(await runs_of(client, name))
    await asyncio.sleep(4)
    assert len(await runs_of(client, name)) == count, "no tick fires while it is paused"


async def test_d_o05_a_name_that_is_made_anew_fires_while_the_old_run_lives(client: Client) -> None:
    name = fresh()
    await client.schedules.create(name, kind="sleep", cron="0 0 1 1 *", payload={"seconds": 20})
    old = await client.schedules.run(name)
    await until(lambda: _run_state_is(client, old.name, State.STATE_RUNNING))
    await client.schedules.delete(name)
    await client.schedules.create(name, kind="echo", every=timedelta(seconds=1))
    fired = await until(lambda: runs_of(client, name, "state = SUCCEEDED"))
    assert fired[0].name != old.name
    assert (await client.runs.get(old.name)).state == State.STATE_RUNNING
    await client.schedules.delete(name)
    await client.runs.cancel(old.name, "enough", grace=timedelta(0))


async def _run_state_is(client: Client, name: str, state: Any) -> bool:
    return bool((await client.runs.get(name)).state == state)


async def test_d_o04_a_run_is_tried_again_with_the_payload_that_it_was_born_with(
    client: Client, whole: Cluster
) -> None:
    queue, name = fresh("q"), fresh()
    made = await client.schedules.create(name, kind="work", queue=queue, cron="0 0 1 1 *", payload={"v": 1})
    made.spec.template.lease_duration.FromSeconds(2)
    made = await client.schedules.update(made, update_mask=["spec.template.lease_duration"])
    run = await client.schedules.run(name)
    first = await acquire(whole, queue)
    made.spec.template.payload.data = b'{"v": 2}'
    made.spec.triggers[0].cron.expression = "0 0 2 2 *"
    await client.schedules.update(made, update_mask=["spec"])
    # The worker is never heard of again.
    second = await acquire(whole, queue, wait_s=30)
    assert (first.run, first.attempt) == (run.name, 1)
    assert (second.run, second.attempt) == (run.name, 2)
    assert second.payload.data == first.payload.data == b'{"v": 1}'
    assert second.fence > first.fence
    await complete(whole, second)


async def test_cancelling_a_run_tells_its_worker(client: Client) -> None:
    run = await client.runs.create("sleep", payload={"seconds": 60})
    await until(lambda: _run_state_is(client, run.name, State.STATE_RUNNING))
    started = time.monotonic()
    await client.runs.cancel(run.name, "not needed")
    done = await client.runs.wait(run.name, timeout_s=30)
    assert done.state == State.STATE_CANCELLED
    assert done.cancel_reason == "not needed"
    assert time.monotonic() - started < 10


async def test_a_dead_letter_and_its_replay(client: Client) -> None:
    run = await client.runs.create("fail", attempt_count_max=1)
    done = await client.runs.wait(run.name, timeout_s=30)
    assert done.state == State.STATE_DEAD_LETTERED
    replay = await client.dead_letters.replay(run.name, payload={"times": 0})
    done = await client.runs.wait(replay.name, timeout_s=30)
    assert done.state == State.STATE_SUCCEEDED
    assert done.replayed_from == run.name


# --- A worker that speaks to a coordinator alone ----------------------------------------------------------


def worker_stub(channel: grpc.aio.Channel) -> Any:
    return worker_service_pb2_grpc.WorkerServiceStub(channel)


async def acquire(whole: Cluster, queue: str, wait_s: int = 20) -> worker_service_pb2.Grant:
    async with grpc.aio.insecure_channel(whole.api_addresses[0]) as channel:
        request = worker_service_pb2.AcquireLeasesRequest(worker_id="a-script", queues=[queue])
        request.wait_duration_max.FromSeconds(wait_s)
        answer = await worker_stub(channel).AcquireLeases(request, timeout=wait_s + 20)
    assert len(answer.grants) == 1, "nothing was granted"
    grant: worker_service_pb2.Grant = answer.grants[0]
    return grant


async def complete(whole: Cluster, grant: worker_service_pb2.Grant) -> None:
    async with grpc.aio.insecure_channel(whole.api_addresses[0]) as channel:
        await worker_stub(channel).CompleteRun(
            worker_service_pb2.CompleteRunRequest(
                run=grant.run, attempt=grant.attempt, lease_token=grant.lease_token
            )
        )


async def test_a_worker_of_unary_calls_through_a_coordinator(client: Client, whole: Cluster) -> None:
    queue = fresh("q")
    run = await client.runs.create("work", queue=queue, payload=b"in")
    grant = await acquire(whole, queue)
    assert (grant.run, grant.payload.data) == (run.name, b"in")
    key: dict[str, Any] = {"run": grant.run, "attempt": grant.attempt, "lease_token": grant.lease_token}
    # Through the other coordinator: none of them keeps anything of it.
    async with grpc.aio.insecure_channel(whole.api_addresses[1]) as channel:
        stub = worker_stub(channel)
        renewed = await stub.RenewLease(worker_service_pb2.RenewLeaseRequest(**key))
        assert renewed.lease_duration.ToMilliseconds() > 0
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.FailRun(worker_service_pb2.FailRunRequest(**{**key, "lease_token": "0" * 32}))
        request = worker_service_pb2.CompleteRunRequest(**key)
        request.result.data = b"out"
        await stub.CompleteRun(request)
        await stub.CompleteRun(request)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert isinstance(from_rpc_error(caught.value), errors.LeaseSuperseded)
    done = await client.runs.get(run.name)
    assert (done.state, done.result.data) == (State.STATE_SUCCEEDED, b"out")


async def test_acquiring_from_an_empty_queue_waits_as_long_as_it_was_told(
    whole: Cluster, client: Client
) -> None:
    async with grpc.aio.insecure_channel(whole.api_addresses[0]) as channel:
        request = worker_service_pb2.AcquireLeasesRequest(worker_id="a-script", queues=[fresh("q")])
        request.wait_duration_max.FromMilliseconds(500)
        started = time.monotonic()
        answer = await worker_stub(channel).AcquireLeases(request)
    assert not answer.grants
    assert 0.3 < time.monotonic() - started < 10


async def test_a_released_run_costs_no_attempt(client: Client, whole: Cluster) -> None:
    queue = fresh("q")
    run = await client.runs.create("work", queue=queue, attempt_count_max=1)
    grant = await acquire(whole, queue)
    async with grpc.aio.insecure_channel(whole.api_addresses[0]) as channel:
        await worker_stub(channel).ReleaseLease(
            worker_service_pb2.ReleaseLeaseRequest(
                run=grant.run, attempt=grant.attempt, lease_token=grant.lease_token
            )
        )
    again = await acquire(whole, queue)
    assert again.run == run.name
    await complete(whole, again)
    assert (await client.runs.get(run.name)).state == State.STATE_SUCCEEDED


async def test_a_coordinator_serves_no_streams_and_says_who_does(whole: Cluster, client: Client) -> None:
    async with grpc.aio.insecure_channel(whole.api_addresses[0]) as channel:
        call = worker_stub(channel).Work(iter([worker_service_pb2.WorkRequest()]))
        with pytest.raises(grpc.aio.AioRpcError, match="WatchTimers"):
            await call.read()


# --- The cluster itself -----------------------------------------------------------------------------------


async def test_the_clusters_parts_are_listed(client: Client) -> None:
    shards = await client.cluster.shards()
    timers = await client.cluster.timers()
    assert [shard.shard for shard in shards] == list(range(16))
    assert sum(timer.shard_count for timer in timers) == 16
    assert {shard.timer for shard in shards} <= {timer.timer_id for timer in timers}
    assert all(
        timer.seen_time.ToDatetime(UTC) > datetime.now(UTC) - timedelta(seconds=30) for timer in timers
    )
    health = await client.cluster.health()
    assert health.healthy
    assert health.leader.startswith("coordinator-")


async def test_a_drained_timer_owns_nothing_and_comes_back(client: Client) -> None:
    timer = (await client.cluster.timers())[0].timer_id
    with pytest.raises(errors.NotFound):
        await client.cluster.drain("nobody")

    async def is_empty() -> bool:
        return await client.cluster.drain(timer) == 0

    await until(is_empty)
    assert all(shard.owner != timer for shard in await client.cluster.shards())
    run = await client.runs.create("echo")
    assert (await client.runs.wait(run.name, timeout_s=30)).state == State.STATE_SUCCEEDED
    await client.cluster.drain(timer, undrain=True)

    async def has_shards() -> bool:
        return any(shard.owner == timer for shard in await client.cluster.shards())

    await until(has_shards)


async def test_d_o14_the_leaders_death_stops_neither_the_api_nor_schedules(
    client: Client, whole: Cluster
) -> None:
    name = fresh()
    await client.schedules.create(name, kind="echo", every=timedelta(seconds=1))
    await until(lambda: runs_of(client, name))
    leader = (await client.cluster.health()).leader
    member = next(each for each in whole.of("coordinator") if leader.startswith(each.name))
    member.kill9()
    try:
        killed_at = datetime.now(UTC)
        run = await client.runs.create("echo")
        assert (await client.runs.wait(run.name, timeout_s=30)).state == State.STATE_SUCCEEDED

        async def another_leads() -> bool:
            health = await client.cluster.health()
            return health.healthy and health.leader not in ("", leader)

        await until(another_leads, 30)

        async def fired_since() -> bool:
            newest = (await runs_of(client, name))[0]
            return newest.create_time.ToDatetime(UTC) > killed_at + timedelta(seconds=1)

        await until(fired_since, 30)
    finally:
        member.start()
    await client.schedules.delete(name)


async def test_who_waits_at_a_coordinator_that_ends_waits_on_at_another(
    client: Client, whole: Cluster
) -> None:
    run = await client.runs.create("sleep", payload={"seconds": 8})
    ending = whole["coordinator-1"]
    async with Client([ending.address, whole["coordinator-2"].address], retry_s_max=30) as both:
        both._turn = 0
        waiting = asyncio.create_task(both.runs.wait(run.name, timeout_s=60))
        await until(lambda: _run_state_is(client, run.name, State.STATE_RUNNING))
        started = time.monotonic()
        await asyncio.to_thread(ending.stop)
        try:
            assert ending.exit_code == 0
            assert time.monotonic() - started < 6, "nobody who waits holds it up"
            assert (await waiting).state == State.STATE_SUCCEEDED
        finally:
            await asyncio.to_thread(ending.start)


async def test_a_restart_of_postgres_is_waited_out(client: Client, whole: Cluster) -> None:
    name = fresh()
    await client.schedules.create(name, kind="echo", cron="0 0 1 1 *")
    whole.postgres.restart("immediate")
    read = await client.schedules.get(name)
    assert read.name.endswith(name)
    run = await client.runs.create("echo")
    assert (await client.runs.wait(run.name, timeout_s=60)).state == State.STATE_SUCCEEDED


async def test_connections_that_are_killed_again_and_again_lose_nothing(
    client: Client, whole: Cluster
) -> None:
    made: list[str] = []

    async def create(count: int) -> None:
        while count:
            run = await client.runs.create("echo", due=timedelta(hours=1))
            made.append(run.name)
            count -= 1

    creating = [asyncio.create_task(create(60)) for _ in range(4)]
    with psycopg.connect(whole.postgres_url, autocommit=True) as connection:
        while not all(task.done() for task in creating):
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE application_name = 'tickwheel coordinator'"
            )
            await asyncio.sleep(0.2)
        await asyncio.gather(*creating)
        assert len(set(made)) == 240
        keys = [uuid.UUID(name.rpartition("/")[2]) for name in made]
        row = connection.execute("SELECT count(*) FROM run WHERE id = ANY (%s)", (keys,)).fetchone()
        assert row == (240,)
