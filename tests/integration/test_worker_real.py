"""The worker SDK against a real cluster: Postgres, etcd, a coordinator and two timers in processes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tickwheel.client import Client
from tickwheel.embedded.cluster import Cluster
from tickwheel.v1 import job_pb2, run_pb2
from tickwheel.worker import Abort, Context, Retry, SyncContext, Worker

WAIT_S = 30.0
State = run_pb2.Run.State

SHORT_LEASES = {
    "attempt_lease_ttl_ms": "4000",
    "heartbeat_interval_ms": "1000",
    "etcd_lease_ttl_ms": "2000",
    "etcd_call_timeout_ms": "800",
    "takeover_ms_max": "1500",
    "seen_interval_ms": "500",
}


@pytest.fixture(scope="module")
def cluster(short_folder: Path, postgres_bin_folder: Path | None) -> Iterator[Cluster]:
    cluster = Cluster(
        short_folder / "worker",
        workers=0,
        service_settings={"timer": SHORT_LEASES},
        postgres_bin_folder=postgres_bin_folder,
    )
    try:
        yield cluster.start()
    finally:
        cluster.stop()


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[Client]:
    async with Client(cluster.api_addresses, retry_s_max=10.0) as client:
        yield client


@asynccontextmanager
async def working(cluster: Cluster, **handlers: Callable[..., Any]) -> AsyncIterator[Worker]:
    """A worker with these kinds, in this process."""
    worker = Worker(cluster.api_addresses, capacity=20, drain_grace_s=5)
    for kind, function in handlers.items():
        worker.handler(kind)(function)
    serving = asyncio.create_task(worker.serve())
    try:
        async with asyncio.timeout(WAIT_S):
            while worker.stream_stats.streams_welcomed < 2:  # noqa: ASYNC110 - a deadline stands around it
                await asyncio.sleep(0.02)
        yield worker
    finally:
        worker.stop()
        await serving


async def until(condition: Callable[[], Any], what: str) -> None:
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s, f"within {WAIT_S} s: {what}"
        await asyncio.sleep(0.02)


def quick(kind: str, attempt_count_max: int = 4) -> job_pb2.JobTemplate:
    """Tried again at once."""
    template = job_pb2.JobTemplate(kind=kind)
    template.retry.attempt_count_max = attempt_count_max
    template.retry.jitter_ratio = 0
    template.retry.initial_backoff_duration.FromMilliseconds(50)
    return template


async def test_outcomes_of_every_sort_are_recorded(cluster: Cluster, client: Client) -> None:
    async def give(ctx: Context) -> Any:
        return ctx.payload

    def thread(ctx: SyncContext) -> bytes:
        return b"\x00\xff"

    async def third(ctx: Context) -> int:
        if ctx.attempt < 3:
            raise Retry(f"attempt {ctx.attempt}", after=0.05)
        return ctx.attempt

    async def abort(ctx: Context) -> None:
        raise Abort("pointless", type="Broken")

    async def always(ctx: Context) -> None:
        raise ValueError("no")

    async with working(cluster, give=give, thread=thread, third=third, abort=abort, always=always) as worker:
        made = {
            "give": await client.runs.create("give", payload={"a": [1, None]}),
            "delayed": await client.runs.create("give", payload={"b": 1}, due=timedelta(seconds=1)),
            "thread": await client.runs.create("thread"),
            "third": await client.runs.create("third"),
            "abort": await client.runs.create("abort"),
            "always": await client.runs.create(template=quick("always", 2)),
        }
        runs = {name: await client.runs.wait(run.name, WAIT_S) for name, run in made.items()}
        await until(lambda: worker.stream_stats.held == 0, "everything is recorded")
    states = {name: State.Name(run.state).removeprefix("STATE_") for name, run in runs.items()}
    assert states == {
        "give": "SUCCEEDED",
        "delayed": "SUCCEEDED",
        "thread": "SUCCEEDED",
        "third": "SUCCEEDED",
        "abort": "DEAD_LETTERED",
        "always": "DEAD_LETTERED",
    }
    full = await client.runs.get(made["give"].name)
    assert json.loads(full.result.data) == {"a": [1, None]}
    assert (await client.runs.get(made["thread"].name)).result.data == b"\x00\xff"
    assert runs["third"].attempt_count == 3
    assert (runs["abort"].attempt_count, runs["abort"].last_failure.type) == (1, "Broken")
    assert (runs["always"].attempt_count, runs["always"].last_failure.type) == (2, "ValueError")


async def test_a_checkpoint_reaches_the_next_attempt_with_the_failure_of_the_last(
    cluster: Cluster, client: Client
) -> None:
    seen: list[tuple[bytes, Any, str]] = []
    fences: list[int] = []

    async def resume(ctx: Context) -> None:
        seen.append((ctx.checkpoint, ctx.last_failure, ctx.idempotency_key))
        fences.append(ctx.fence)
        if ctx.attempt == 1:
            await ctx.progress(50, "half way", checkpoint=b"row 500")
            await asyncio.sleep(3)
            raise RuntimeError("lost the connection")

    async with working(cluster, resume=resume):
        run = await client.runs.create(template=quick("resume"))
        ended = await client.runs.wait(run.name, WAIT_S)
    assert ended.state == State.STATE_SUCCEEDED
    assert seen[0][:2] == (b"", None)
    assert seen[1][:2] == (b"row 500", ("RuntimeError", "lost the connection"))
    assert seen[0][2] == seen[1][2]
    assert fences[1] > fences[0]


async def test_a_job_longer_than_its_lease_runs_once(cluster: Cluster, client: Client) -> None:
    """C-O10, in small: alive is what is renewed, however long it takes."""
    begun = 0

    async def long(ctx: Context) -> None:
        nonlocal begun
        begun += 1
        await asyncio.sleep(10)

    async with working(cluster, long=long) as worker:
        run = await client.runs.create("long")
        ended = await client.runs.wait(run.name, WAIT_S)
        assert worker.executor_stats.lapsed == 0
    assert (ended.state, ended.attempt_count, begun) == (State.STATE_SUCCEEDED, 1, 1)


async def test_a_cancel_reaches_the_handler(cluster: Cluster, client: Client) -> None:
    begun = asyncio.Event()
    reasons: list[str | None] = []

    async def long(ctx: Context) -> None:
        begun.set()
        await ctx.cancelled.wait()
        reasons.append(ctx.stop_reason)
        ctx.raise_if_cancelled()

    async with working(cluster, long=long):
        run = await client.runs.create("long")
        async with asyncio.timeout(WAIT_S):
            await begun.wait()
        await client.runs.cancel(run.name, "not wanted")
        ended = await client.runs.wait(run.name, WAIT_S)
    assert ended.state == State.STATE_CANCELLED
    assert reasons == ["not wanted"]


class LeaseLapsed(Exception):
    """Named as what the SDK reports for an attempt that it stopped at its deadline."""


async def test_what_was_stopped_because_its_lease_lapsed_is_an_unknown_outcome(
    cluster: Cluster, client: Client
) -> None:
    async def stopped(ctx: Context) -> None:
        raise LeaseLapsed

    template = quick("stopped")
    template.on_unknown_outcome = job_pb2.UNKNOWN_OUTCOME_POLICY_HOLD
    async with working(cluster, stopped=stopped) as worker:
        run = await client.runs.create(template=template)
        await until(lambda: worker.stream_stats.recorded == 1, "its end is recorded")
        held = await client.runs.get(run.name)
    assert held.state == State.STATE_HELD
    assert held.last_failure.type == "LeaseLapsed"


async def test_a_worker_that_stops_hands_back_what_it_cannot_finish_and_no_attempt_is_spent(
    cluster: Cluster, client: Client
) -> None:
    begun: list[str] = []

    async def stuck(ctx: Context) -> None:
        begun.append("first")
        await asyncio.sleep(60)

    async def prompt(ctx: Context) -> None:
        begun.append("second")

    first = Worker(cluster.api_addresses, capacity=20, drain_grace_s=0.2)
    first.handler("hand-back")(stuck)
    serving = asyncio.create_task(first.serve())
    run = await client.runs.create(template=quick("hand-back", 1))
    await until(lambda: begun, "it runs")
    async with working(cluster, **{"hand-back": prompt}):
        first.stop()
        await serving
        ended = await client.runs.wait(run.name, WAIT_S)
    assert ended.state == State.STATE_SUCCEEDED
    assert begun == ["first", "second"]


async def test_outcomes_wait_while_postgres_is_away(cluster: Cluster, client: Client) -> None:
    begun: dict[str, int] = {}
    finish = asyncio.Event()

    async def gated(ctx: Context) -> None:
        begun[ctx.run] = begun.get(ctx.run, 0) + 1
        await finish.wait()

    async with working(cluster, gated=gated) as worker:
        runs = [await client.runs.create("gated") for _ in range(10)]
        await until(lambda: len(begun) == 10, "all run")
        cluster.postgres.kill9()
        finish.set()
        await until(lambda: worker.running_count == 0, "all ended")
        # Longer than a lease: etcd proves who owns what meanwhile.
        await asyncio.sleep(6)
        assert worker.stream_stats.held == 10
        await asyncio.to_thread(cluster.postgres.start)
        ended = [await client.runs.wait(run.name, WAIT_S) for run in runs]
        await until(lambda: worker.stream_stats.held == 0, "nothing is held")
    assert {run.state for run in ended} == {State.STATE_SUCCEEDED}
    assert set(begun.values()) == {1}


async def test_runs_outlive_the_death_of_a_timer(cluster: Cluster, client: Client) -> None:
    begun: dict[str, int] = {}

    async def long(ctx: Context) -> None:
        begun[ctx.run] = begun.get(ctx.run, 0) + 1
        await asyncio.sleep(9)

    async with working(cluster, long=long) as worker:
        runs = [await client.runs.create("long") for _ in range(12)]
        await until(lambda: len(begun) == 12, "all run")
        cluster["timer-1"].kill9()
        ended = [await client.runs.wait(run.name, WAIT_S) for run in runs]
        await until(lambda: worker.stream_stats.held == 0, "nothing is held")
        assert worker.executor_stats.lapsed == 0
    cluster["timer-1"].start()
    assert {run.state for run in ended} == {State.STATE_SUCCEEDED}
    assert set(begun.values()) == {1}
