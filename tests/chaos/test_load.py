"""What becomes of memory and of order when there is more work than workers, or very much of it?"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.chaos.history import Event, percentile
from tests.chaos.load import template, wall_us
from tests.chaos.scene import Scene, until

from tickwheel.domain.run import RunState
from tickwheel.embedded.member import Member

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

WORK_MS = 200
CAPACITY = 50
OVERLOAD_S = 14
MEBIBYTE = 1 << 20


@pytest.fixture(scope="module")
def module_scene(chaos_folder: Path, postgres_bin_folder: Path) -> Iterator[Scene]:
    with Scene(
        chaos_folder,
        timers=1,
        workers=1,
        worker_settings={"capacity": str(CAPACITY)},
        postgres_bin_folder=postgres_bin_folder,
    ) as scene:
        yield scene


@pytest.fixture
def scene(module_scene: Scene) -> Iterator[Scene]:
    yield module_scene
    module_scene.recover()


def _memory_bytes(member: Member) -> int:
    assert member.pid is not None, f"{member.name} does not run"
    return int(psutil.Process(member.pid).memory_info().rss)


def test_twice_the_capacity_leaves_memory_flat_and_order_by_due_time(scene: Scene) -> None:
    """Then all drains. What starts late has been overtaken by little."""
    rate = CAPACITY * 1_000 // WORK_MS
    members = [scene.cluster[name] for name in ("timer-1", "worker-1", "coordinator-1")]
    began_us = wall_us()
    with scene.load(run_rate=2 * rate, work_ms=WORK_MS, delay_us_max=100_000) as load:
        time.sleep(5)
        before = [_memory_bytes(member) for member in members]
        time.sleep(OVERLOAD_S - 5)
        after = [_memory_bytes(member) for member in members]
    ended_us = wall_us()
    drained_s = scene.settle(90)
    for member, first, last in zip(members, before, after, strict=True):
        print(
            f"{member.name}: {first / MEBIBYTE:.0f} MiB after 5 s, {last / MEBIBYTE:.0f} after {OVERLOAD_S} s"
        )
    history = scene.judge()
    starts = [
        seen
        for seen in history.sightings
        if seen.event is Event.STARTED and seen.attempt == 1 and seen.due_us >= began_us
    ]
    assert len(starts) == load.created
    newest_us, overtaken = 0, []
    for seen in starts:
        overtaken.append(max(0, newest_us - seen.due_us))
        newest_us = max(newest_us, seen.due_us)
    overtaken.sort()
    print(
        f"{load.created} runs in {(ended_us - began_us) / 1e6:.0f} s, drained {drained_s:.1f} s later;"
        f" overtaken by p50/p99/max {[percentile(overtaken, p) // 1_000 for p in (0.5, 0.99, 1)]} ms"
    )
    for first, last in zip(before, after, strict=True):
        assert last - first < 24 * MEBIBYTE
    # They waited for up to half a minute.
    assert percentile(overtaken, 0.99) < 2_000_000


def test_many_executions_leave_nothing_behind(scene: Scene) -> None:
    """E-O05: memory after 100,000 short executions is what it was after 25,000, and nothing is in flight."""
    scene.cluster["worker-1"].stop()
    scene.cluster["worker-1"].environment["TICKWHEEL_CAPACITY"] = "2000"
    scene.cluster["worker-1"].start()
    members = [scene.cluster[name] for name in ("timer-1", "worker-1")]
    job = template("noop")
    ended = "SELECT count(*) FROM run WHERE state = %s"
    count_before = int(scene.rows(ended, RunState.SUCCEEDED)[0][0])
    memory: list[list[int]] = []
    began = time.monotonic()
    for quarter in range(1, 5):
        for _ in range(5):
            scene.clients.create_runs([(job, 0)] * 5_000)
        wanted = count_before + quarter * 25_000
        until(
            lambda wanted=wanted: int(scene.rows(ended, RunState.SUCCEEDED)[0][0]) >= wanted,  # type: ignore[misc]
            60,
            "a quarter is done",
        )
        memory.append([_memory_bytes(member) for member in members])
    print(f"100,000 executions in {time.monotonic() - began:.1f} s")
    for member, *sizes in zip(members, *memory, strict=True):
        print(f"{member.name}: {[f'{size / MEBIBYTE:.1f}' for size in sizes]} MiB")
        assert sizes[-1] - sizes[0] < 20 * MEBIBYTE
    assert scene.rows("SELECT count(*) FROM lease") == [(0,)]
