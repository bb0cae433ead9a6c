"""What becomes of the work when a timer dies or freezes?"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tests.chaos.history import Event, judge, lags_us, percentile
from tests.chaos.load import template, wall_us
from tests.chaos.scene import ETCD_LEASE_TTL_MS, Scene, until

pytestmark = [pytest.mark.chaos, pytest.mark.slow]


def test_a_killed_timer_loses_nothing_and_re_runs_nothing(
    chaos_folder: Path, postgres_bin_folder: Path
) -> None:
    """300 due runs a second, schedules that are mutated meanwhile, long runs that are executing."""
    with Scene(chaos_folder, timers=2, workers=2, postgres_bin_folder=postgres_bin_folder) as scene:
        clients = scene.clients
        names = [f"tick-{number}" for number in range(8)]
        for name in names:
            clients.create_schedule(name, 500_000, template(ms=5))
        long_runs = clients.create_runs([(template(ms=12_000), 0)] * 30)
        for run in long_runs:
            scene.wait_sighted(Event.STARTED, run, 10)
        with scene.load(run_rate=300, mutated=names[:4], cancel=True):
            time.sleep(2)
            killed_us = wall_us()
            scene.cluster["timer-1"].kill9()
            until(lambda: set(scene.owners().values()) == {"timer-2"}, 10, "the survivor has every shard")
            took_s = (wall_us() - killed_us) / 1e6
            time.sleep(3)
        history = scene.judge()

    lags = lags_us(history, killed_us, killed_us + 5_000_000)
    p95_s = percentile(lags, 0.95) / 1e6
    print(f"takeover {took_s:.2f} s, {len(lags)} runs due in the 5 s after the kill, lag p95 {p95_s:.2f} s")
    assert len(lags) > 1_000
    assert p95_s <= 5.0
    attempts = {run.run: run.attempt for run in history.runs}
    assert [attempts[run] for run in long_runs] == [1] * len(long_runs), "a run that was executing was re-run"


@pytest.mark.parametrize("fence_is_broken", [False, True], ids=["as built", "without a fence"])
def test_a_frozen_timer_writes_nothing_after_it_lost_its_shards(
    chaos_folder: Path, postgres_bin_folder: Path, fence_is_broken: bool
) -> None:
    """SIGSTOP for three etcd lease TTLs, under load; a build without a fence has to be found out."""
    with Scene(
        chaos_folder,
        timers=2,
        workers=2,
        postgres_bin_folder=postgres_bin_folder,
        fence_is_broken=fence_is_broken,
    ) as scene:
        clients = scene.clients
        names = [f"tick-{number}" for number in range(8)]
        for name in names:
            clients.create_schedule(name, 200_000, template(ms=5))
        before = scene.epochs()
        lost = [shard for shard, owner in scene.owners().items() if owner == "timer-1"]
        assert lost
        with scene.load(run_rate=200):
            time.sleep(1)
            scene.cluster["timer-1"].pause()
            time.sleep(3 * ETCD_LEASE_TTL_MS / 1_000)
            assert set(scene.owners().values()) == {"timer-2"}, "its shards were not taken over"
            after = scene.epochs()
            assert all(after[shard] > before[shard] for shard in lost)
            scene.cluster["timer-1"].resume()
            time.sleep(3)
        if fence_is_broken:
            scene.stop_schedules()
            time.sleep(3)
            complaints = judge(scene.history(is_settled=False))
            print("\n".join(map(str, complaints)))
            assert {"I4 who lost a shard writes nothing"} <= {each.invariant for each in complaints}
            return
        scene.judge()
