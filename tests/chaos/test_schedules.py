"""What becomes of schedules that are poisoned, changed or deleted while they fire?"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.chaos.history import Event
from tests.chaos.load import template, wall_us
from tests.chaos.scene import Scene, until

from tickwheel.domain.decision import DecisionReason
from tickwheel.domain.run import RunState
from tickwheel.domain.trigger import Cron, Trigger, TriggerSet, canonical_bytes
from tickwheel.v1 import schedule_pb2

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

YEAR_10000_US = 253_402_300_800_000_000
POISONS = {
    "bad-cron": canonical_bytes(TriggerSet((Trigger(cron=Cron("0 0 31 2 *")),))),
    "bad-zone": canonical_bytes(TriggerSet((Trigger(cron=Cron("* * * * *"), time_zone="Mars/Olympus"),))),
    "year-10000": canonical_bytes(TriggerSet((Trigger(instants_us=(YEAR_10000_US,)),))),
    "no-trigger": b"bob is amazing",
}


@pytest.fixture(scope="module")
def module_scene(chaos_folder: Path, postgres_bin_folder: Path) -> Iterator[Scene]:
    with Scene(chaos_folder, timers=1, workers=1, postgres_bin_folder=postgres_bin_folder) as scene:
        yield scene


@pytest.fixture
def scene(module_scene: Scene) -> Iterator[Scene]:
    yield module_scene
    module_scene.recover()


def _poison(scene: Scene, name: str, body: bytes) -> None:
    """By SQL, as an upgrade that reads old rows otherwise would find it: the schedule gets these triggers."""
    trigger_id = -int(uuid.uuid4().int >> 66)
    due_us = wall_us() + 500_000
    sql = scene.sql
    with sql.transaction():
        sql.execute("INSERT INTO trigger_def VALUES (%s, %s)", (trigger_id, body))
        uid, shard = sql.execute(
            "UPDATE schedule SET trigger_id = %s, version = version + 1 WHERE name = %s"
            " RETURNING uid, shard_id",
            (trigger_id, name),
        ).fetchall()[0]
        sql.execute(
            "UPDATE timer SET trigger_id = %s, version = version + 1, due_us = %s, schedule_us = %s"
            " WHERE shard_id = %s AND ref = %s",
            (trigger_id, due_us, due_us, shard, uid),
        )


def test_a_poison_row_stops_itself_and_not_its_shard(scene: Scene) -> None:
    """F-O01: a bad cron, a bad zone, an instant beyond the calendar, bytes that are no trigger at all, beside
    good schedules of the same shards."""
    good = [f"good-{number}" for number in range(20)]
    for name in good:
        scene.clients.create_schedule(name, 500_000, template(ms=1))
    for name in POISONS:
        scene.clients.create_schedule(name, 3_600_000_000, template(ms=1))
    for name, body in POISONS.items():
        _poison(scene, name, body)

    def quarantined() -> bool:
        rows = scene.rows("SELECT count(*) FROM schedule WHERE quarantine_reason IS NOT NULL")
        return int(rows[0][0]) == len(POISONS)

    since_us = wall_us()
    until(quarantined, 15, "the poisoned ones are quarantined")
    until(lambda: wall_us() - since_us > 3_000_000, 5, "the others go on")
    for name in POISONS:
        status = scene.clients.get_schedule(name).status
        print(f"{name}: {status.quarantine_reason}")
        assert status.state == schedule_pb2.ScheduleStatus.STATE_QUARANTINED
        assert status.quarantine_reason
    lags = [
        seen.wall_us - seen.due_us
        for seen in scene.sightings(Event.STARTED)
        if seen.schedule.rpartition("/")[2] in good and seen.due_us > since_us
    ]
    assert len(lags) >= 20 * 4
    assert max(lags) < 2_000_000
    # An update mends it.
    scene.clients.update_interval("bad-cron", 500_000)
    assert not scene.clients.get_schedule("bad-cron").status.quarantine_reason
    uid = scene.rows("SELECT uid FROM schedule WHERE name = 'bad-cron'")[0][0]
    until(
        lambda: bool(scene.rows("SELECT FROM run WHERE schedule = %s", uid)), 10, "the mended one fires again"
    )
    # What the poisoned ones missed is not theirs to answer for.
    for name in POISONS:
        if name != "bad-cron":
            scene.clients.forget_windows(name)
    scene.judge()


def test_a_name_that_was_deleted_while_its_run_lives_fires_anew(scene: Scene) -> None:
    """D-O05: the new schedule of the name waits for nothing of the old one."""
    old = scene.clients.create_schedule("reborn", 500_000, template(ms=4_000))
    until(lambda: bool(scene.rows("SELECT FROM lease WHERE schedule = %s::uuid", old)), 5, "it runs")
    scene.clients.delete("reborn")
    new = scene.clients.create_schedule(
        "reborn", 500_000, template(ms=1), overlap=schedule_pb2.OverlapPolicy.POLICY_SKIP
    )
    took_s = until(
        lambda: bool(scene.rows("SELECT FROM run WHERE schedule = %s::uuid", new)), 5, "the new one fires"
    )
    print(f"the new one had run after {took_s:.2f} s")
    assert new != old
    assert took_s < 3.0
    scene.judge()


def test_a_run_that_is_due_before_all_others_does_not_wait_for_them(scene: Scene) -> None:
    """D-O10: the only schedule is due in an hour; a run due in two seconds starts then."""
    scene.clients.create_schedule("hourly", 3_600_000_000, template(ms=1))
    due_us = wall_us() + 2_000_000
    run = scene.clients.create_run(template(ms=1), due_us)
    seen = scene.wait_sighted(Event.STARTED, run, 5)
    late_ms = (seen.wall_us - due_us) / 1_000
    print(f"{late_ms:.1f} ms late")
    assert 0 <= late_ms < 500
    scene.judge()


def test_restarts_and_reloads_do_not_move_an_interval(scene: Scene) -> None:
    """D-O12: occurrences stand at anchor + k * interval, whoever reads the row anew, and none is lost."""
    uid = scene.clients.create_schedule("steady", 1_000_000, template(ms=1))
    for _ in range(2):
        time.sleep(2)
        scene.cluster["timer-1"].restart()
    scene.wait_served()
    time.sleep(1)
    history = scene.judge()
    instants = sorted(row.schedule_us for row in history.runs if row.schedule == uid)
    assert all(instant % 1_000_000 == 0 for instant in instants)
    assert len(instants) >= 5


def test_a_schedule_that_overruns_its_interval_keeps_no_backlog(scene: Scene) -> None:
    """E-O06, C-O07: each run takes 2.5 intervals; what falls into it is skipped and recorded."""
    uid = scene.clients.create_schedule(
        "slow", 400_000, template(ms=1_000), overlap=schedule_pb2.OverlapPolicy.POLICY_SKIP
    )
    most = 0
    ends_us = wall_us() + 5_000_000
    while wall_us() < ends_us:
        waiting = scene.rows("SELECT count(*) FROM timer WHERE kind = 2 AND schedule = %s::uuid", uid)
        most = max(most, int(waiting[0][0]))
        time.sleep(0.1)
    history = scene.judge()
    runs = [row for row in history.runs if row.schedule == uid]
    skipped = [row for row in history.decisions if row.schedule == uid]
    print(f"{len(runs)} runs, {len(skipped)} skipped, at most {most} waited")
    assert most <= 1
    assert {row.reason for row in skipped} == {DecisionReason.OVERLAP}
    assert len(skipped) >= len(runs)
    lives = sorted((row.lease_us, row.lease_us + 1_000_000) for row in runs)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(lives))


def test_a_pause_or_an_update_during_a_run_is_not_undone_at_its_end(scene: Scene) -> None:
    """D-O03, D-O04: the run ends as it was begun; the schedule stays as it was changed."""
    uid = scene.clients.create_schedule("changed", 500_000, template(ms=1_500, generation=1))
    until(lambda: bool(scene.rows("SELECT FROM lease WHERE schedule = %s::uuid", uid)), 5, "it runs")
    scene.clients.update_interval("changed", 300_000)
    scene.clients.pause("changed")
    scene.settle(10)
    status = scene.clients.get_schedule("changed").status
    assert status.state == schedule_pb2.ScheduleStatus.STATE_PAUSED
    count = len(scene.rows("SELECT FROM run WHERE schedule = %s::uuid", uid))
    time.sleep(1)
    assert len(scene.rows("SELECT FROM run WHERE schedule = %s::uuid", uid)) == count
    spec = scene.clients.get_schedule("changed").spec
    assert spec.triggers[0].interval.duration.ToMilliseconds() == 300
    history = scene.judge()
    assert {row.state for row in history.runs if row.schedule == uid} == {RunState.SUCCEEDED}
