"""The worker process: `python -m tickwheel.services.worker`, against scripted timers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
import time
import urllib.request
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tickwheel.bench.peer import SHARD_COUNT, Peer, PeerCluster, PeerStream, RateGranter

LIBRARY = Path(__file__).parents[2] / "libs"
WAIT_S = 20.0


async def until(condition: Callable[[], Any], what: str, seconds: float = WAIT_S) -> Any:
    end_s = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end_s, f"within {seconds} s: {what}"
        await asyncio.sleep(0.02)
    return value


class Service:
    """One worker process, with its log."""

    def __init__(self, process: Process, peer: Peer) -> None:
        self.process = process
        self.peer = peer
        self.log: list[dict[str, Any]] = []
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            with contextlib.suppress(ValueError):
                self.log.append(json.loads(line))

    def event(self, name: str) -> dict[str, Any] | None:
        return next((entry for entry in self.log if entry.get("event") == name), None)

    async def stream(self) -> PeerStream:
        await until(lambda: self.peer.streams and self.peer.streams[-1].heartbeats, "a stream")
        return self.peer.streams[-1]

    async def exit_code(self) -> int:
        async with asyncio.timeout(WAIT_S):
            code = await self.process.wait()
            await self._reading
            return code


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    cluster = PeerCluster(lease_us=3_000_000, heartbeat_us=500_000)
    peer = Peer(cluster)
    await peer.start()
    cluster.assign(range(SHARD_COUNT), peer)
    yield peer
    await peer.stop()


@pytest.fixture
async def start(peer: Peer) -> AsyncIterator[Callable[..., Any]]:
    services: list[Service] = []

    async def start(*arguments: str, **settings: str) -> Service:
        environment = {
            **os.environ,
            "PYTHONPATH": f"{LIBRARY}:{Path(__file__).parent}",
            "TICKWHEEL_COORDINATORS": peer.address,
            "TICKWHEEL_LOG_FORMAT": "json",
            "TICKWHEEL_METRICS_PORT": "0",
            **{f"TICKWHEEL_{name.upper()}": value for name, value in settings.items()},
        }
        command = [sys.executable, "-m", "tickwheel.services.worker", *arguments]
        process = await asyncio.create_subprocess_exec(*command, env=environment, stderr=PIPE)
        services.append(Service(process, peer))
        return services[-1]

    yield start
    for service in services:
        if service.process.returncode is None:
            service.process.kill()
            await service.exit_code()


async def test_the_built_in_kinds_do_what_they_say(peer: Peer, start: Callable[..., Any]) -> None:
    service = await start()
    stream = await service.stream()
    assert stream.hello is not None
    assert set(stream.hello.kinds) == {"echo", "fail", "noop", "sleep"}
    leases = {
        "echo": stream.grant(0, "echo", b'{"a": [1]}'),
        "noop": stream.grant(0, "noop"),
        "sleep": stream.grant(0, "sleep", b'{"seconds": 0.05}'),
        "bad sleep": stream.grant(0, "sleep", b'{"seconds": "soon"}'),
        "fail": stream.grant(0, "fail"),
        "fail once": stream.grant(0, "fail", b'{"times": 1}'),
        "fail no more": stream.grant(0, "fail", b'{"times": 0}'),
    }
    recorded = peer.cluster.recorded
    await until(lambda: len(recorded) == len(leases), "all outcomes")
    got = {name: recorded[lease.token] for name, lease in leases.items() if lease is not None}
    assert json.loads(got["echo"].success.result.data) == {"a": [1]}
    assert got["noop"].WhichOneof("result") == got["sleep"].WhichOneof("result") == "success"
    assert (got["bad sleep"].failure.type, got["bad sleep"].failure.non_retryable) == ("InvalidPayload", True)
    assert not got["fail"].failure.non_retryable
    assert got["fail once"].WhichOneof("result") == "failure"
    assert got["fail no more"].WhichOneof("result") == "success"


async def test_a_signal_drains_it_and_it_exits_with_0(peer: Peer, start: Callable[..., Any]) -> None:
    """C-O08, in small: the job is longer than a lease, the grace longer than the job."""
    service = await start(drain_timeout_ms="20000")
    stream = await service.stream()
    lease = stream.grant(0, "sleep", b'{"seconds": 4}')
    assert lease is not None
    await until(lambda: lease.token in stream.held and stream.heartbeats[-1].held_count == 1, "it runs")
    service.process.send_signal(signal.SIGTERM)
    began_s = time.monotonic()
    assert await service.exit_code() == 0
    assert time.monotonic() - began_s > 2
    assert peer.cluster.recorded[lease.token].WhichOneof("result") == "success"
    assert stream.goodbye


async def test_a_second_signal_hands_back_what_runs(peer: Peer, start: Callable[..., Any]) -> None:
    service = await start(drain_timeout_ms="60000")
    stream = await service.stream()
    lease = stream.grant(0, "sleep", b'{"seconds": 60}')
    assert lease is not None
    await until(lambda: stream.heartbeats[-1].held_count == 1, "it runs")
    service.process.send_signal(signal.SIGTERM)
    await until(lambda: stream.goodbye, "goodbye")
    service.process.send_signal(signal.SIGTERM)
    began_s = time.monotonic()
    assert await service.exit_code() == 0
    assert time.monotonic() - began_s < 8
    assert peer.cluster.recorded[lease.token].WhichOneof("result") == "release"


async def test_it_shows_its_counters_and_its_health(peer: Peer, start: Callable[..., Any]) -> None:
    service = await start()
    stream = await service.stream()
    for _ in range(3):
        stream.grant(0, "noop")
    await until(lambda: peer.cluster.recorded_count == 3, "recorded")
    served = await until(lambda: service.event("metrics_served"), "the metrics' port")
    await until(lambda: service.event("ready"), "ready")

    def read(path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{served['port']}{path}", timeout=5) as answer:
            return str(answer.read().decode())

    health = json.loads(await asyncio.to_thread(read, "/healthz"))
    assert health == {"healthy": True, "problems": {}}
    end_s = time.monotonic() + WAIT_S
    while "tickwheel_worker_recorded_total 3.0" not in (text := await asyncio.to_thread(read, "/metrics")):
        assert time.monotonic() < end_s, text
    assert "tickwheel_worker_streams_welcomed 1.0" in text
    assert len(re.findall(r"^tickwheel_worker_", text, re.M)) < 40


async def test_handlers_come_from_a_named_module(peer: Peer, start: Callable[..., Any]) -> None:
    """F-O13, the worker's part: the process dies, and no outcome comes."""
    service = await start("--module", "tickwheel.services.worker.kill_kind")
    stream = await service.stream()
    assert stream.hello is not None
    assert "kill" in stream.hello.kinds
    stream.grant(0, "kill")
    assert await service.exit_code() == 137
    assert peer.cluster.recorded == {}


@pytest.mark.parametrize(
    ("module", "words"),
    [("no.such.module", "cannot be found"), ("tickwheel.services.worker.metrics", "has no `register`")],
)
async def test_a_module_without_handlers_is_refused_with_a_sentence(
    start: Callable[..., Any], module: str, words: str
) -> None:
    service = await start("--module", module)
    assert await service.exit_code() == 2
    refused = service.event("cannot_start")
    assert refused is not None
    assert words in refused["reason"]


async def test_a_killed_workers_leases_are_left_alone(peer: Peer, start: Callable[..., Any]) -> None:
    service = await start()
    stream = await service.stream()
    lease = stream.grant(0, "sleep", b'{"seconds": 60}')
    assert lease is not None
    await until(lambda: stream.heartbeats[-1].held_count == 1, "it runs")
    service.process.kill()
    await until(lambda: not peer.streams, "the stream breaks")
    assert lease.token in peer.cluster.leases


@pytest.mark.slow
async def test_two_hundred_thousand_short_runs_leave_nothing_behind(
    peer: Peer, start: Callable[..., Any]
) -> None:
    """E-O05."""
    peer.cluster.keep_recorded = False
    service = await start(capacity="3000", log_level="warning")
    stream = await service.stream()

    async def run_until(count: int) -> None:
        granting = asyncio.create_task(granter.run(peer, 120))
        await until(lambda: peer.cluster.recorded_count >= count, f"{count} runs", 100)
        granting.cancel()

    def rss_kib() -> int:
        pages = int(Path(f"/proc/{service.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") // 1024

    granter = RateGranter(12_000, "noop")
    await run_until(50_000)
    before_kib = rss_kib()
    granter = RateGranter(12_000, "noop")
    await run_until(200_000)
    assert rss_kib() - before_kib < 20 * 1024
    await until(lambda: not peer.cluster.leases, "all recorded")
    await until(lambda: stream.heartbeats[-1].held_count == 0, "nothing is held")


async def test_the_benchmark_prints_what_a_run_costs() -> None:
    command = [sys.executable, "-m", "tickwheel.bench.worker", "--rate", "2000", "--seconds", "1", "--json"]
    process = await asyncio.create_subprocess_exec(
        *command, env={**os.environ, "PYTHONPATH": str(LIBRARY)}, stdout=PIPE
    )
    async with asyncio.timeout(60):
        output, _ = await process.communicate()
    cost = json.loads(output)
    assert process.returncode == 0
    assert cost["cpu_us"] > 0
    assert cost["rate"] > 1000
