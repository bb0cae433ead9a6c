"""What becomes of an attempt when its worker dies, freezes, is cut off, or kills itself with it?"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from tests.chaos.history import Event
from tests.chaos.load import LEASE_MS, template
from tests.chaos.scene import Scene, until

from tickwheel.domain.run import AttemptState, RunState
from tickwheel.v1 import run_pb2, worker_service_pb2

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

TTL_S = LEASE_MS / 1_000
SOON_US = 100_000


@pytest.fixture(scope="module")
def module_scene(chaos_folder: Path, postgres_bin_folder: Path) -> Iterator[Scene]:
    with Scene(
        chaos_folder, timers=1, workers=2, worker_proxy=True, postgres_bin_folder=postgres_bin_folder
    ) as scene:
        yield scene


@pytest.fixture
def scene(module_scene: Scene) -> Iterator[Scene]:
    yield module_scene
    module_scene.recover()


def test_the_run_of_a_killed_worker_is_granted_again(scene: Scene) -> None:
    """Within the lease TTL and a second, with a higher fence."""
    run = scene.clients.create_run(template(ms=3_000, backoff_us=SOON_US))
    first = scene.wait_sighted(Event.STARTED, run, 10)
    scene.kill_worker(scene.worker_at(first.pid).name)
    killed_us = scene.absences[-1].from_us
    second = scene.wait_sighted(Event.GRANTED, run, TTL_S + 5, attempt=2)
    took_s = (second.boot_us - killed_us) / 1e6
    print(f"granted again after {took_s:.2f} s")
    assert took_s <= TTL_S + 1
    assert second.fence > first.fence
    history = scene.judge()
    states = [row.state for row in history.attempts if row.run == run and row.number == 1]
    assert states == [AttemptState.OUTCOME_UNKNOWN]


def test_the_late_outcome_of_a_frozen_worker_is_refused_with_a_reason(scene: Scene) -> None:
    run = scene.clients.create_run(template("thread", ms=2_000, backoff_us=SOON_US))
    first = scene.wait_sighted(Event.STARTED, run, 10)
    granted = scene.sightings(Event.GRANTED, run)[0]
    with scene.frozen_worker(scene.worker_at(first.pid).name):
        second = scene.wait_sighted(Event.STARTED, run, TTL_S + 5, attempt=2)
        assert second.pid != first.pid, "a frozen worker was granted the run"
        late = worker_service_pb2.CompleteRunRequest(
            run=f"tenants/default/runs/{run}", attempt=1, lease_token=granted.token
        )
        with pytest.raises(grpc.RpcError) as refused:
            scene.clients.worker("CompleteRun", late)
    error = refused.value
    print(f"refused: {error.details()}")
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION, error
    assert "lease" in (error.details() or ""), error
    told = scene.wait_sighted(Event.REFUSED, run, 5)
    print(f"the worker was told: {told.result}")
    assert "lease" in told.result
    history = scene.judge()
    assert not [
        seen for seen in history.sightings if (seen.run, seen.attempt, seen.event) == (run, 1, Event.RECORDED)
    ]
    row = next(row for row in history.runs if row.run == run)
    assert (row.state, row.attempt, row.fence) == (RunState.SUCCEEDED, 2, second.fence)


def test_a_worker_that_is_cut_off_stops_before_its_lease_is_given_away(scene: Scene) -> None:
    """The network swallows everything between one worker and the timer; the other worker takes over."""
    run = scene.clients.create_run(template(ms=2 * LEASE_MS, backoff_us=SOON_US))
    first = scene.wait_sighted(Event.STARTED, run, 10)
    scene.worker_proxy.hold(first.pid)
    second = scene.wait_sighted(Event.GRANTED, run, 2 * TTL_S + 5, attempt=2)
    scene.worker_proxy.hold()
    assert second.pid != first.pid
    stopped = scene.wait_sighted(Event.ENDED, run, 1)
    print(f"it had stopped {(second.boot_us - stopped.boot_us) / 1e3:.0f} ms before")
    assert stopped.boot_us < second.boot_us
    assert scene.wait_sighted(Event.STOPPED, run, 1).boot_us < second.boot_us
    scene.judge()


def test_a_run_that_kills_its_worker_ends_as_a_dead_letter(scene: Scene) -> None:
    """F-O13: the attempt is counted when it is handed out; healthy runs behind it are unharmed."""
    job = template("die", attempts=5, backoff_us=SOON_US, lease_ms=2_000)
    deadly = scene.clients.create_run(job)
    healthy = scene.clients.create_runs([(template(ms=20, backoff_us=SOON_US), 0)] * 20)

    def ended() -> bool:
        for member in scene.cluster.of("worker"):
            if not member.alive:
                scene.cluster[member.name].start()
        return scene.clients.get_run(deadly).state == run_pb2.Run.STATE_DEAD_LETTERED

    until(ended, 60, "the run is a dead letter")
    deliveries = scene.sightings(Event.GRANTED, deadly)
    for seen in scene.sightings(Event.ENDED, deadly):
        scene.note_death(seen.pid, seen.boot_us)
    assert [seen.attempt for seen in deliveries] == [1, 2, 3, 4, 5]
    found = scene.clients.get_run(deadly)
    print(f"dead: {found.last_failure.type}: {found.last_failure.message}")
    assert found.last_failure.type == "LeaseLapsed"
    history = scene.judge()
    states = {row.run: row.state for row in history.runs}
    assert [states[run] for run in healthy] == [RunState.SUCCEEDED] * 20


def test_a_handler_that_blocks_its_loop_loses_no_lease(scene: Scene) -> None:
    """C-O09: renewals do not share the handlers' loop, and the blocking is reported."""
    scene.cluster["worker-2"].stop()
    try:
        waits = scene.clients.create_run(template(ms=LEASE_MS + 2_000))
        scene.wait_sighted(Event.STARTED, waits, 10)
        blocks = scene.clients.create_run(template("block", ms=LEASE_MS + 2_000))
        for run in (waits, blocks):
            scene.wait_sighted(Event.RECORDED, run, 3 * TTL_S)
    finally:
        scene.cluster["worker-2"].start()
    history = scene.judge()
    attempts = {row.run: row.attempt for row in history.runs}
    assert [attempts[waits], attempts[blocks]] == [1, 1]
    reports = scene.log_lines(scene.cluster["worker-1"], "handlers_loop_blocked")
    assert any("block" in str(report["where"]) for report in reports), reports


def test_outcomes_that_race_with_their_expiry_are_recorded_once(scene: Scene) -> None:
    """D-O01: workers freeze with finished work, and thaw at the moment when their leases lapse."""
    for freeze_s in (TTL_S - 0.3, TTL_S, TTL_S + 0.3):
        runs = scene.clients.create_runs([(template(ms=300, backoff_us=SOON_US), 0)] * 40)
        first = scene.wait_sighted(Event.STARTED, runs[0], 10)
        name = scene.worker_at(first.pid).name
        with scene.frozen_worker(name):
            time.sleep(freeze_s)
    history = scene.judge()
    print(f"attempts: {len(history.attempts)}, runs: {len(history.runs)}")


def test_a_draining_worker_keeps_its_leases_until_its_work_is_done(scene: Scene) -> None:
    """C-O08: SIGTERM while a run has longer to go than its lease lasts."""
    runs = scene.clients.create_runs([(template(ms=LEASE_MS + 2_000), 0)] * 10)
    first = [scene.wait_sighted(Event.STARTED, run, 10) for run in runs]
    pids = {seen.pid for seen in first}
    members = [scene.worker_at(pid) for pid in pids]
    for member in members:
        member.terminate()
    until(lambda: not any(member.alive for member in members), 20, "the workers have drained")
    assert [member.exit_code for member in members] == [0] * len(members)
    for member in members:
        member.start()
    history = scene.judge()
    attempts = {row.run: row.attempt for row in history.runs}
    assert [attempts[run] for run in runs] == list(itertools.repeat(1, len(runs)))
