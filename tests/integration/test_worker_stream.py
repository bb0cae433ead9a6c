"""A real worker against scripted timers over real gRPC: streams, threads, handlers, their ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog

from tickwheel.bench.peer import SHARD_COUNT, Lease, Peer, PeerCluster, PeerStream
from tickwheel.worker import Abort, Cancelled, Context, Release, Retry, SyncContext, Worker

WAIT_S = 15.0


async def until(condition: Callable[[], Any], what: str, seconds: float = WAIT_S) -> Any:
    """Polls, with a deadline."""
    end_s = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end_s, f"within {seconds} s: {what}"
        await asyncio.sleep(0.01)
    return value


class World:
    """Two scripted timers and what a test starts with them."""

    def __init__(self) -> None:
        self.cluster = PeerCluster(lease_us=3_000_000, heartbeat_us=500_000)
        self.peers: list[Peer] = []
        self._serving: dict[Worker, asyncio.Task[None]] = {}

    async def start(self, timer_count: int = 2) -> None:
        for index in range(timer_count):
            peer = Peer(self.cluster)
            await peer.start()
            self.peers.append(peer)
            self.cluster.assign(range(index, SHARD_COUNT, timer_count), peer)

    def worker(self, **settings: Any) -> Worker:
        settings.setdefault("capacity", 10)
        return Worker([peer.address for peer in self.peers], **settings)

    async def serve(self, worker: Worker) -> list[PeerStream]:
        """Start it, and wait for its streams at all timers."""
        self._serving[worker] = asyncio.create_task(worker.serve())
        await until(lambda: all(peer.streams for peer in self.peers), "a stream at each timer")
        streams = [peer.streams[-1] for peer in self.peers]
        await until(lambda: all(stream.heartbeats for stream in streams), "a heartbeat at each")
        return streams

    async def stop(self, worker: Worker) -> None:
        worker.stop()
        await self._serving.pop(worker)

    async def close(self) -> None:
        for worker in list(self._serving):
            worker.stop()
            worker.stop()
            await self.stop(worker)
        for peer in self.peers:
            await peer.stop()

    def outcome(self, lease: Lease | None) -> Any:
        assert lease is not None, "there was no credit"
        return self.cluster.recorded.get(lease.token)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    await world.start()
    yield world
    await world.close()


def shard_of(peer: Peer) -> int:
    return peer.shards()[0]


# --- Handlers and their outcomes ---------------------------------------------------------------------------


async def test_what_handlers_return_and_raise_becomes_their_outcomes(world: World) -> None:
    worker = world.worker(kinds=[])

    def error(exception: BaseException) -> Callable[[Context], Any]:
        async def fail(ctx: Context) -> None:
            raise exception

        return fail

    async def give(ctx: Context) -> Any:
        return ctx.payload

    for kind, function in {
        "give": give,
        "none": lambda ctx: None,
        "bytes": lambda ctx: b"\x00\xff",
        "thread": lambda ctx: {"thread": threading.current_thread().name.startswith("tickwheel-handler")},
        "retry": error(Retry("later", after=2.5)),
        "abort": error(Abort("never", type="Broken")),
        "release": error(Release("the printer is off", not_before=30)),
        "value": error(ValueError("no\ud800")),
        "exit": error(SystemExit(3)),
        "odd": lambda ctx: object(),
        "large": lambda ctx: bytes(2 << 20),
        "cancelled": error(asyncio.CancelledError()),
    }.items():
        worker.handler(kind)(function)
    streams = await world.serve(worker)
    shard = shard_of(world.peers[0])
    leases = {}
    kinds = ["give", *(kind for kind in worker.handlers.kinds() if kind != "give"), "unheard-of"]
    for kind in kinds:
        await until(lambda: streams[0].grant_count_max > streams[0].granted, "credit")
        leases[kind] = streams[0].grant(shard, kind, b'{"a": 1}')
    await until(lambda: all(map(world.outcome, leases.values())), "all outcomes")
    got = {kind: world.outcome(lease) for kind, lease in leases.items()}
    assert json.loads(got["give"].success.result.data) == {"a": 1}
    assert got["give"].success.result.content_type == "application/json"
    assert got["none"].WhichOneof("result") == "success"
    assert not got["none"].success.HasField("result")
    assert got["bytes"].success.result.data == b"\x00\xff"
    assert json.loads(got["thread"].success.result.data) == {"thread": True}
    assert got["retry"].failure.retry_delay.ToMilliseconds() == 2500
    assert not got["retry"].failure.non_retryable
    assert (got["abort"].failure.type, got["abort"].failure.message) == ("Broken", "never")
    assert got["abort"].failure.non_retryable
    assert got["release"].release.not_before_duration.ToSeconds() == 30
    assert (got["value"].failure.type, got["value"].failure.message) == ("ValueError", "no?")
    assert "test_worker_stream.py" in got["value"].failure.stack
    assert got["exit"].failure.type == "SystemExit"
    assert got["odd"].failure.type == "ResultNotSerializable"
    assert got["large"].failure.type == "ResultTooLarge"
    assert got["cancelled"].failure.type == "CancelledError"
    assert got["unheard-of"].failure.type == "UnknownKind"
    assert not got["unheard-of"].failure.non_retryable


SEEN = "run tenant attempt attempt_count_max fence idempotency_key kind queue schedule payload checkpoint"


async def test_a_handler_sees_its_attempt(world: World) -> None:
    worker = world.worker()
    seen: dict[str, Any] = {}

    @worker.handler("look")
    async def look(ctx: Context) -> None:
        seen.update({name: getattr(ctx, name) for name in SEEN.split()})
        seen.update(times=(ctx.schedule_time, ctx.due_time, ctx.deadline), last_failure=ctx.last_failure)

    streams = await world.serve(worker)
    lease = streams[0].grant(shard_of(world.peers[0]), "look", b'"x"', checkpoint=b"cp")
    await until(lambda: world.outcome(lease), "the outcome")
    assert lease is not None
    assert seen["run"] == lease.run
    assert (seen["tenant"], seen["fence"]) == ("default", lease.fence)
    assert (seen["attempt"], seen["attempt_count_max"]) == (1, 4)
    assert (seen["payload"], seen["checkpoint"], seen["idempotency_key"]) == ("x", b"cp", lease.run)
    assert seen["times"] == (None, None, None)
    assert seen["last_failure"] is None


async def test_progress_travels_with_a_heartbeat(world: World) -> None:
    worker = world.worker()

    @worker.handler("slow")
    async def slow(ctx: Context) -> None:
        await ctx.progress(40, "half way", checkpoint=b"at 4")
        await asyncio.sleep(60)

    streams = await world.serve(worker)
    lease = streams[0].grant(shard_of(world.peers[0]), "slow")
    said = await until(lambda: [p for beat in streams[0].heartbeats for p in beat.progress], "progress")
    assert lease is not None
    assert (said[0].lease_token, said[0].percent, said[0].message) == (lease.token, 40, "half way")
    assert said[0].checkpoint == b"at 4"


async def test_no_more_than_the_capacity_runs_at_a_time(world: World) -> None:
    worker = world.worker(capacity=3)
    running = most = 0

    @worker.handler("count")
    async def count(ctx: Context) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.02)
        running -= 1

    streams = await world.serve(worker)
    granted = 0
    end_s = time.monotonic() + WAIT_S
    while granted < 60 and time.monotonic() < end_s:
        for peer, stream in zip(world.peers, streams, strict=True):
            granted += stream.grant(shard_of(peer), "count") is not None
        await asyncio.sleep(0.001)
    await until(lambda: world.cluster.recorded_count == granted, "all recorded")
    assert granted >= 60
    assert most <= 3


# --- Cancelling --------------------------------------------------------------------------------------------


def cancel(stream: PeerStream, lease: Lease | None, grace_s: float) -> None:
    assert lease is not None
    message = stream.out.cancels.add(run=lease.run, lease_token=lease.token, reason="not wanted")
    message.grace_duration.FromMilliseconds(round(grace_s * 1000))
    stream.wake.set()


async def test_a_cancel_stops_each_sort_of_handler_in_its_way(world: World) -> None:
    worker = world.worker()
    begun: set[str] = set()

    @worker.handler("deaf")
    async def deaf(ctx: Context) -> None:
        begun.add("deaf")
        await asyncio.sleep(60)

    @worker.handler("listening")
    async def listening(ctx: Context) -> dict[str, str | None]:
        begun.add("listening")
        await ctx.cancelled.wait()
        await asyncio.sleep(0.05)
        return {"stopped": ctx.stop_reason}

    @worker.handler("stubborn")
    async def stubborn(ctx: Context) -> None:
        begun.add("stubborn")
        await ctx.cancelled.wait()
        await asyncio.sleep(60)

    @worker.handler("thread")
    def thread(ctx: SyncContext) -> None:
        begun.add("thread")
        assert ctx.cancelled.wait(WAIT_S)
        ctx.raise_if_cancelled()

    @worker.handler("late")
    async def late(ctx: Context) -> None:
        begun.add("late")
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)

    (stream, _) = await world.serve(worker)
    leases = {}
    for kind in worker.handlers.kinds():
        leases[kind] = stream.grant(shard_of(world.peers[0]), kind)
    await until(lambda: len(begun) == 5, "all begun")
    for lease in leases.values():
        cancel(stream, lease, 0.3)
    await until(lambda: all(map(world.outcome, leases.values())), "all outcomes")
    got = {kind: world.outcome(lease).WhichOneof("result") for kind, lease in leases.items()}
    assert got == {
        "deaf": "cancelled",
        "listening": "success",  # It ended by itself, with something to say.
        "stubborn": "cancelled",  # After its grace.
        "thread": "cancelled",
        "late": "success",  # It had done its work, whoever wanted it no more.
    }


async def test_a_handler_that_raises_cancelled_unasked_has_failed(world: World) -> None:
    worker = world.worker()

    @worker.handler("odd")
    async def odd(ctx: Context) -> None:
        raise Cancelled("though nobody asked")

    (stream, _) = await world.serve(worker)
    lease = stream.grant(shard_of(world.peers[0]), "odd")
    assert (await until(lambda: world.outcome(lease), "the outcome")).failure.type == "Cancelled"


# --- Timers die, freeze and move ---------------------------------------------------------------------------


async def test_a_run_outlives_its_timer_and_its_outcome_goes_to_the_new_owner(
    world: World,
) -> None:
    worker = world.worker()
    finish = asyncio.Event()

    @worker.handler("long")
    async def long(ctx: Context) -> None:
        await finish.wait()

    first, second = world.peers
    streams = await world.serve(worker)
    lease = streams[1].grant(shard_of(second), "long")
    waiting = streams[1].grant(shard_of(second), "long")
    await until(lambda: worker.running_count == 2, "both run")
    shards = second.shards()
    await second.stop()
    # For a while nobody owns them; then the other takes over, and loads.
    await asyncio.sleep(0.3)
    first.loading.update(shards)
    world.cluster.assign(shards, first)
    await asyncio.sleep(0.7)
    first.loading.clear()
    assert lease is not None
    assert waiting is not None
    await until(lambda: {lease.token, waiting.token} <= set(streams[0].held), "the other holds them")
    beats = len(streams[0].heartbeats)
    # Two leases long: it lives by the other's renewals.
    await until(lambda: len(streams[0].heartbeats) > beats + 13, "heartbeats", 10)
    assert worker.running_count == 2
    finish.set()
    await until(lambda: world.outcome(lease) and world.outcome(waiting), "the outcomes")
    assert worker.executor_stats.lapsed == worker.executor_stats.abandoned == 0


async def test_a_shard_that_moved_takes_its_attempts_along(world: World) -> None:
    worker = world.worker()
    finish = asyncio.Event()

    @worker.handler("long")
    async def long(ctx: Context) -> None:
        await finish.wait()

    first, second = world.peers
    streams = await world.serve(worker)
    leases = [streams[1].grant(shard_of(second), "long") for _ in range(4)]
    await until(lambda: worker.running_count == 4, "all run")
    world.cluster.assign(second.shards(), first)
    finish.set()
    # The old owner answers "moved" to the outcomes.
    await until(lambda: all(map(world.outcome, leases)), "the outcomes")
    assert all(count == 1 for count in world.cluster.granted_runs.values())
    await until(lambda: worker.stream_stats.held == 0, "nothing is held")


async def test_a_frozen_timer_is_doubted_before_its_leases_lapse(world: World) -> None:
    worker = world.worker()
    finish = asyncio.Event()

    @worker.handler("long")
    async def long(ctx: Context) -> None:
        await finish.wait()

    first, second = world.peers
    streams = await world.serve(worker)
    lease = streams[1].grant(shard_of(second), "long")
    await until(lambda: worker.running_count == 1, "it runs")
    assert lease is not None
    second.silent = True
    world.cluster.assign(second.shards(), first)
    await until(lambda: lease.token in streams[0].held, "announced to the other", 2.0)
    # Longer than a lease: the silent stream is ended meanwhile, and the run goes on.
    await until(lambda: second.opened_count > 1, "the silent stream is ended", 10)
    assert worker.running_count == 1
    second.silent = False
    finish.set()
    await until(lambda: world.outcome(lease), "the outcome")


async def test_an_attempt_that_nobody_renews_is_stopped_in_time_and_says_so(world: World) -> None:
    worker = world.worker()
    stopped: list[str] = []
    release = threading.Event()

    @worker.handler("task")
    async def task(ctx: Context) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            stopped.append(str(ctx.stop_reason))

    @worker.handler("thread")
    def thread(ctx: SyncContext) -> dict[str, bool]:
        ctx.cancelled.wait(WAIT_S)
        stopped.append(str(ctx.stop_reason))
        release.wait(WAIT_S)
        return {"late": True}

    (stream, _) = await world.serve(worker)
    for peer in world.peers:
        peer.renewing = False
    began_s = time.monotonic()
    leases = [stream.grant(shard_of(world.peers[0]), kind) for kind in ("task", "thread")]
    await until(lambda: len(stopped) == 2, "both were told")
    took_s = time.monotonic() - began_s
    assert took_s < world.cluster.lease_us / 1e6, "before the lease could be given away"
    assert stopped == ["its lease lapsed"] * 2
    await until(lambda: world.outcome(leases[0]), "the task's end is reported")
    assert world.outcome(leases[0]).failure.type == "LeaseLapsed"
    # The thread goes on, and so does its lease, until the timer gives it away.
    assert leases[1] is not None
    await until(lambda: stream.heartbeats[-1].held_count == 1, "it is held")
    world.cluster.expire(leases[1].token)
    release.set()
    await until(lambda: worker.stream_stats.refused == 1, "its late outcome is refused")
    assert world.outcome(leases[1]) is None
    await until(lambda: stream.heartbeats[-1].held_count == 0, "then forgotten")


async def test_outcomes_wait_for_a_timer_that_cannot_record_and_none_is_lost(world: World) -> None:
    worker = world.worker()

    @worker.handler("noop")
    async def noop(ctx: Context) -> None:
        pass

    (stream, _) = await world.serve(worker)
    world.peers[0].recording = False
    leases = [stream.grant(shard_of(world.peers[0]), "noop") for _ in range(4)]
    await until(lambda: stream.outcome_count >= 4, "sent")
    await asyncio.sleep(0)
    assert stream.heartbeats[-1].held_count <= 4
    world.peers[0].recording = True
    await until(lambda: all(map(world.outcome, leases)), "repeated until recorded")
    await until(lambda: stream.heartbeats[-1].held_count == 0, "then forgotten")


async def test_a_timer_that_drains_loses_nothing_and_gets_no_stream_while_it_says_so(world: World) -> None:
    worker = world.worker()
    finish = asyncio.Event()

    @worker.handler("long")
    async def long(ctx: Context) -> None:
        await finish.wait()

    streams = await world.serve(worker)
    lease = streams[0].grant(shard_of(world.peers[0]), "long")
    await until(lambda: worker.running_count == 1, "it runs")
    streams[0].out.drain.reason = "rolling restart"
    streams[0].wake.set()
    finish.set()
    await until(lambda: world.outcome(lease), "the outcome")
    await until(lambda: world.peers[0].opened_count > 1, "it closes the stream, and another opens")


# --- Loops, threads, processes -----------------------------------------------------------------------------


async def test_a_handler_that_blocks_its_loop_loses_no_lease_and_is_reported(world: World) -> None:
    """C-O09: one handler awaits for longer than a lease, another blocks the loop for as long."""
    reports: list[Any] = []
    ready: list[Worker] = []

    def handlers_thread() -> None:
        async def main() -> None:
            worker = world.worker(capacity=4)

            @worker.handler("awaits")
            async def awaits(ctx: Context) -> None:
                await asyncio.sleep(4.5)

            @worker.handler("blocks")
            async def blocks(ctx: Context) -> None:
                time.sleep(4.5)  # noqa: ASYNC251 - it is what this is about

            ready.append(worker)
            await worker.serve()

        asyncio.run(main())

    with structlog.testing.capture_logs() as logs:
        thread = threading.Thread(target=handlers_thread)
        thread.start()
        await until(lambda: all(p.streams and p.streams[0].heartbeats for p in world.peers), "streams")
        stream = world.peers[0].streams[0]
        leases = [stream.grant(shard_of(world.peers[0]), kind) for kind in ("awaits", "blocks")]
        await until(lambda: all(map(world.outcome, leases)), "both outcomes", 12)
        reports = [entry for entry in logs if entry["event"] == "handlers_loop_blocked"]
        ready[0].stop()
        await asyncio.to_thread(thread.join, WAIT_S)
    assert [world.outcome(lease).WhichOneof("result") for lease in leases] == ["success", "success"]
    assert ready[0].executor_stats.lapsed == ready[0].executor_stats.abandoned == 0
    assert reports
    assert any("blocks" in line for line in reports[0]["where"]), "it names the culprit"
    assert ready[0].stream_stats.held == 0


async def test_a_drain_lets_work_end_while_renewals_go_on(world: World) -> None:
    """C-O08: the work outlasts several leases after the signal."""
    worker = world.worker(drain_grace_s=30)
    ended = []

    @worker.handler("long")
    async def long(ctx: Context) -> None:
        await asyncio.sleep(5)
        ended.append(ctx.stop_reason)

    (stream, _) = await world.serve(worker)
    lease = stream.grant(shard_of(world.peers[0]), "long")
    await until(lambda: worker.running_count == 1, "it runs")
    await world.stop(worker)
    assert ended == [None]
    assert world.outcome(lease).WhichOneof("result") == "success"
    assert stream.goodbye


async def test_after_the_grace_a_task_is_handed_back_and_a_thread_is_left_to_its_lease(world: World) -> None:
    worker = world.worker(drain_grace_s=0.1)
    release = threading.Event()

    @worker.handler("task")
    async def task(ctx: Context) -> None:
        await asyncio.sleep(60)

    @worker.handler("thread")
    def thread(ctx: SyncContext) -> None:
        release.wait(WAIT_S)

    (stream, _) = await world.serve(worker)
    leases = [stream.grant(shard_of(world.peers[0]), kind) for kind in ("task", "thread")]
    await until(lambda: worker.running_count == 2, "both run")
    await world.stop(worker)
    assert world.outcome(leases[0]).WhichOneof("result") == "release"
    assert world.outcome(leases[1]) is None
    release.set()


async def test_a_second_stop_hands_back_at_once(world: World) -> None:
    worker = world.worker(drain_grace_s=60)

    @worker.handler("long")
    async def long(ctx: Context) -> None:
        await asyncio.sleep(60)

    (stream, _) = await world.serve(worker)
    lease = stream.grant(shard_of(world.peers[0]), "long")
    await until(lambda: worker.running_count == 1, "it runs")
    worker.stop()
    began_s = time.monotonic()
    await world.stop(worker)
    assert time.monotonic() - began_s < 5
    assert world.outcome(lease).WhichOneof("result") == "release"


async def test_children_of_a_worker_with_open_streams_do_not_hang(world: World) -> None:
    """G-O05, G-O06: processes started by handlers, from the loop and from threads."""
    worker = world.worker(capacity=8)

    @worker.handler("async")
    async def run_async(ctx: Context) -> None:
        child = await asyncio.create_subprocess_exec("true")
        assert await child.wait() == 0

    @worker.handler("sync")
    def run_sync(ctx: SyncContext) -> None:
        subprocess.run(["true"], check=True, timeout=5)

    streams = await world.serve(worker)
    wanted = 200
    granted = 0
    end_s = time.monotonic() + 60
    while granted < wanted and time.monotonic() < end_s:
        kind = ("async", "sync")[granted % 2]
        if streams[0].grant(shard_of(world.peers[0]), kind) is not None:
            granted += 1
        else:
            await asyncio.sleep(0.002)
    await until(lambda: world.cluster.recorded_count == wanted, "all ended", 30)
    assert all(o.WhichOneof("result") == "success" for o in world.cluster.recorded.values())


async def test_streams_that_fail_again_and_again_leave_nothing_behind(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G-O04: one channel per timer, and neither tasks nor channels grow."""
    monkeypatch.setattr("tickwheel.worker.backoff.FIRST_S", 0.0005)
    monkeypatch.setattr("tickwheel.worker.stream.Backoff", lambda: Quick())
    worker = world.worker()
    streams = await world.serve(worker)
    assert streams
    # Away, though the other still lists it.
    await world.peers[1].stop(unlist=False)
    stats = worker.stream_stats
    loop = worker._streams._loop  # type: ignore[union-attr]
    assert loop is not None

    def census() -> tuple[int, int]:
        gc.collect()
        channels = sum(isinstance(thing, grpc.aio.Channel) for thing in gc.get_objects())
        return len(asyncio.all_tasks(loop)), channels

    await until(lambda: stats.streams_failed > 100, "a hundred failures")
    tasks, channels = census()
    await until(lambda: stats.streams_failed > 1000, "a thousand failures", 60)
    later_tasks, later_channels = census()
    assert later_channels == channels
    assert later_tasks <= tasks + 3
    port = int(world.peers[1].address.rpartition(":")[2])
    await world.peers[1].start(port)
    await until(lambda: world.peers[1].streams, "it is found when it is back")


class Quick:
    """A backoff without a wait to speak of."""

    failure_count = 0

    def reset(self) -> None:
        pass

    def next_delay_s(self) -> float:
        return 0.0005


async def test_a_worker_whose_streams_die_of_a_fault_ends_and_says_why(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = world.worker()
    await world.serve(worker)
    fault = ZeroDivisionError("a bug of ours")

    def broken(*_: object) -> None:
        raise fault

    monkeypatch.setattr("tickwheel.worker.holdings.Holdings.tick", broken)
    with pytest.raises(RuntimeError, match="streams' thread") as caught:
        await world._serving.pop(worker)
    assert isinstance(caught.value.__cause__, ExceptionGroup)
    assert caught.value.__cause__.exceptions == (fault,)
    assert str(worker.problem()).startswith("its streams' thread has ended")


async def test_spans_belong_to_their_fires_and_none_is_detached_elsewhere(world: World) -> None:
    """H-O02, with handlers that fail and are cancelled."""
    code = Path(__file__).with_name("worker_spans.py")
    result = await asyncio.to_thread(
        subprocess.run, [sys.executable, str(code)], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert "detach" not in result.stderr
