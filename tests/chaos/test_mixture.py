"""Everything at once, at random, for minutes: `make soak ARGS="tests/chaos"`.

CHAOS_SEED chooses the faults (their moments are the machine's), CHAOS_SECONDS how long they go on.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
from tests.chaos.load import LEASE_MS, template
from tests.chaos.proxy import Cut
from tests.chaos.scene import ETCD_LEASE_TTL_MS, Scene

pytestmark = [pytest.mark.chaos, pytest.mark.soak]

SECONDS_DEFAULT = 120.0
KILL_CONNECTIONS = (
    "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
    " WHERE datname = current_database() AND application_name <> 'chaos' AND random() < 0.5"
)


def _fault(scene: Scene, chance: random.Random) -> str:
    """Does one thing and mends it. What it did."""
    kind = chance.choice(
        ("kill timer", "freeze timer", "kill worker", "freeze worker", "kill coordinator", "kill connections",
         "cut answers", "restart Postgres", "stop etcd", "restart timer")
    )  # fmt: skip
    number = chance.randint(1, 2)
    pause_s = chance.uniform(0.1, 2 * ETCD_LEASE_TTL_MS / 1_000)
    members = scene.cluster
    match kind.split():
        case ["kill", "worker"]:
            scene.kill_worker(f"worker-{number}")
            members[f"worker-{number}"].start()
        case ["freeze", "worker"]:
            with scene.frozen_worker(f"worker-{number}"):
                time.sleep(chance.uniform(0.1, 1.5 * LEASE_MS / 1_000))
        case ["freeze", "timer"]:
            members[f"timer-{number}"].pause()
            time.sleep(pause_s)
            members[f"timer-{number}"].resume()
        case ["kill", "connections"]:
            scene.rows(KILL_CONNECTIONS)
        case ["cut", "answers"]:
            scene.postgres_proxy.cut = lambda head, piece: (
                Cut.AFTER if b" lane " in head and len(piece) > 200 and chance.random() < 0.1 else None
            )
            time.sleep(1)
            scene.postgres_proxy.cut = lambda head, piece: None
        case ["restart", "Postgres"]:
            members.postgres.restart("immediate" if chance.random() < 0.5 else "fast")
        case ["stop", "etcd"]:
            members.etcd.stop()
            time.sleep(pause_s)
            members.etcd.start()
        case ["restart", "timer"]:
            members[f"timer-{number}"].restart()
        case [_, name]:
            members[f"{name}-{number}"].kill9()
            time.sleep(pause_s)
            members[f"{name}-{number}"].start()
    return kind


@pytest.mark.timeout(3_600)
def test_random_faults_break_no_promise(chaos_folder: Path, postgres_bin_folder: Path) -> None:
    seed = int(os.environ.get("CHAOS_SEED", "0")) or time.time_ns() % 1_000_000
    seconds = float(os.environ.get("CHAOS_SECONDS", SECONDS_DEFAULT))
    print(f"CHAOS_SEED={seed} CHAOS_SECONDS={seconds:g}")
    chance = random.Random(seed)
    with Scene(
        chaos_folder,
        coordinators=2,
        timers=2,
        workers=2,
        postgres_proxy=True,
        postgres_bin_folder=postgres_bin_folder,
    ) as scene:
        names = [f"mixed-{number}" for number in range(12)]
        for name in names:
            scene.clients.create_schedule(name, 500_000, template(ms=50, backoff_us=100_000))
        done = []
        with scene.load(run_rate=100, work_ms=50, mutated=names[:6], cancel=True, seed=seed):
            ends = time.monotonic() + seconds
            while time.monotonic() < ends:
                time.sleep(chance.uniform(0.2, 2.0))
                done.append(_fault(scene, chance))
        print(f"{len(done)} faults: {', '.join(done)}")
        scene.recover(60)
        history = scene.judge(120)
    print(
        f"{len(history.runs)} runs, {len(history.attempts)} rows of attempts, {len(history.sightings)} lines"
    )
