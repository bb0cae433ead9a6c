"""What does a run cost a worker process? CPU time for each no-op run, streams included, at a steady rate.

A scripted peer in this process grants; a real worker process (`tickwheel.services.worker`) runs. The CPU
time is the worker process's own, user and system, all threads, between two marks a few seconds apart.

    python -m tickwheel.bench.worker --rate 30000 --seconds 10 --json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tickwheel.bench.peer import SHARD_COUNT, Peer, PeerCluster, RateGranter

BUDGET_US = 12.0
"""CPU of the worker process for a run."""

WARM_UP_S = 2.0
START_S_MAX = 20.0
STOP_S_MAX = 20.0


@dataclass(frozen=True, slots=True)
class WorkerCost:
    """rate: runs recorded a second. cpu_us: of the worker process, a run. rss_growth_kib: between marks."""

    rate: float
    rate_wanted: int
    cpu_us: float
    cpu_us_budget: float
    timers: int
    responses: int
    grants_a_response: float
    rss_growth_kib: int


async def measure(rate: int, seconds: float, timers: int = 2, kind: str = "noop") -> WorkerCost:
    """Run one measurement, on ports of the system's choice."""
    cluster = PeerCluster(lease_us=10_000_000, heartbeat_us=3_333_333, keep_recorded=False)
    peers = [Peer(cluster) for _ in range(timers)]
    for index, peer in enumerate(peers):
        await peer.start()
        cluster.assign(range(index, SHARD_COUNT, timers), peer)
    environment = dict(
        os.environ,
        TICKWHEEL_COORDINATORS=",".join(peer.address for peer in peers),
        TICKWHEEL_CAPACITY=str(max(200, rate // 5)),
        TICKWHEEL_DRAIN_TIMEOUT_MS="1000",
        TICKWHEEL_LOG_LEVEL="warning",
    )
    command = [sys.executable, "-m", "tickwheel.services.worker"]
    process = await asyncio.create_subprocess_exec(
        *command, env=environment, stdout=asyncio.subprocess.DEVNULL
    )
    try:
        await _until(lambda: all(peer.streams and peer.streams[0].hello for peer in peers))
        granters = [
            asyncio.create_task(RateGranter(rate // timers, kind).run(peer, WARM_UP_S + seconds + 0.5))
            for peer in peers
        ]
        await asyncio.sleep(WARM_UP_S)
        mark = _mark(process.pid, cluster, peers)
        await asyncio.sleep(seconds)
        end = _mark(process.pid, cluster, peers)
        await asyncio.gather(*granters)
    finally:
        process.terminate()
        async with asyncio.timeout(STOP_S_MAX):
            await process.wait()
        for peer in peers:
            await peer.stop()
    runs = end.recorded - mark.recorded
    responses = end.responses - mark.responses
    return WorkerCost(
        rate=runs / (end.at_s - mark.at_s),
        rate_wanted=rate,
        cpu_us=(end.cpu_s - mark.cpu_s) / max(1, runs) * 1e6,
        cpu_us_budget=BUDGET_US,
        timers=timers,
        responses=responses,
        grants_a_response=runs / max(1, responses),
        rss_growth_kib=end.rss_kib - mark.rss_kib,
    )


@dataclass(frozen=True, slots=True)
class _Mark:
    at_s: float
    cpu_s: float
    rss_kib: int
    recorded: int
    responses: int


def _mark(pid: int, cluster: PeerCluster, peers: list[Peer]) -> _Mark:
    # Fields 14 and 15 of stat, counted after the name, which may hold spaces: user and system ticks.
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return _Mark(
        time.monotonic(),
        (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK"),
        pages * os.sysconf("SC_PAGE_SIZE") // 1024,
        cluster.recorded_count,
        sum(stream.sequence for peer in peers for stream in peer.streams),
    )


async def _until(condition: object) -> None:
    assert callable(condition)
    end_s = time.monotonic() + START_S_MAX
    while not condition():
        if time.monotonic() > end_s:
            raise TimeoutError(f"the worker did not connect within {START_S_MAX} s")
        await asyncio.sleep(0.02)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tickwheel.bench.worker", description=__doc__)
    parser.add_argument("--rate", type=int, default=30_000)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--timers", type=int, default=2)
    parser.add_argument("--kind", default="noop")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    cost = asyncio.run(measure(options.rate, options.seconds, options.timers, options.kind))
    if options.json:
        print(json.dumps(asdict(cost)))
    else:
        verdict = "ok" if cost.cpu_us <= cost.cpu_us_budget else "over"
        print(
            f"worker: {cost.cpu_us:.1f} µs of CPU a run (budget {cost.cpu_us_budget:.0f}: {verdict})"
            f" at {cost.rate:,.0f} runs/s of {cost.rate_wanted:,} wanted; {cost.grants_a_response:.0f} runs a"
            f" response, {cost.timers} timers, memory {cost.rss_growth_kib:+,} KiB"
        )


if __name__ == "__main__":
    main()
