"""What a leader would write, from what it read: pure."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tickwheel.ports import Assignment, AssignmentWrite, RegistrySnapshot, TimerRecord, ViewChange
from tickwheel.services.coordinator.reconciler import (
    GENERATION_LIFT,
    Continuity,
    Decision,
    ReconcilerSettings,
    decide,
)

NOW_US = 1_000_000_000
SETTINGS = ReconcilerSettings(shard_count=4, drain_moves_max=2, rebalance_moves_max=1)


def _timer(timer_id: str) -> TimerRecord:
    return TimerRecord(timer_id, "127.0.0.1:1", "", "test", 1)


def _snapshot(
    owners: dict[int, str], *timers: str, generation: int = 1, moved_at_us: int = 0
) -> RegistrySnapshot:
    assignments = {
        shard: Assignment(shard, owner, generation, moved_at_us, 10 + shard)
        for shard, owner in owners.items()
    }
    return RegistrySnapshot(1, 100, {timer: _timer(timer) for timer in timers}, assignments)


def _decide(
    snapshot: RegistrySnapshot, floors: dict[int, int] | None = None, *, absence_is_death: bool = True
) -> Decision:
    return decide(snapshot, floors or {}, absence_is_death=absence_is_death, now_us=NOW_US, settings=SETTINGS)


def test_a_fresh_cluster_is_assigned_at_once() -> None:
    decision = _decide(_snapshot({}, "a"), absence_is_death=False)
    assert decision.writes == tuple(AssignmentWrite(shard, "a", 1, NOW_US, 0) for shard in range(4))


def test_a_settled_cluster_is_left_alone() -> None:
    decision = _decide(_snapshot({0: "a", 1: "a", 2: "b", 3: "b"}, "a", "b"))
    assert decision == Decision()


def test_an_absence_is_no_death_before_the_leader_has_watched_for_a_ttl() -> None:
    snapshot = _snapshot({0: "a", 1: "a", 2: "gone", 3: "gone"}, "a")
    assert _decide(snapshot, absence_is_death=False) == Decision(waiting=True)
    decision = _decide(snapshot)
    assert decision.writes == (
        AssignmentWrite(2, "a", 2, NOW_US, 12),
        AssignmentWrite(3, "a", 2, NOW_US, 13),
    )


def test_shards_of_a_wiped_registry_wait_for_their_owners_and_are_lifted_above_postgres() -> None:
    snapshot = _snapshot({}, "a")
    floors = {0: 7, 1: 7, 2: 7, 3: 9}
    assert _decide(snapshot, floors, absence_is_death=False).waiting
    generations = [write.generation for write in _decide(snapshot, floors).writes]
    assert generations == [7 + GENERATION_LIFT] * 3 + [9 + GENERATION_LIFT]


def test_a_restored_registry_is_lifted_where_it_stands_lower_and_keeps_its_owners() -> None:
    snapshot = _snapshot({0: "a", 1: "a", 2: "b", 3: "b"}, "a", "b", generation=5)
    decision = _decide(snapshot, {0: 5, 1: 6, 2: 4, 3: 5}, absence_is_death=False)
    assert decision.writes == (AssignmentWrite(1, "a", 6 + GENERATION_LIFT, NOW_US, 11),)


def test_planned_moves_under_way_use_up_the_budget() -> None:
    owners = dict.fromkeys(range(4), "a")
    snapshot = replace(_snapshot(owners, "a", "b"), drains=frozenset({"a"}))
    assert len(_decide(snapshot).writes) == 2
    moving = replace(snapshot.assignments[0], moved_at_us=NOW_US - 1, timer_id="b")
    snapshot = replace(snapshot, assignments={**snapshot.assignments, 0: moving})
    assert len(_decide(snapshot).writes) == 1


def test_a_stamp_from_the_far_future_does_not_pin_a_shard() -> None:
    owners = dict.fromkeys(range(4), "a")
    assert not _decide(_snapshot(owners, "a", "b", moved_at_us=NOW_US - 1_000_000)).writes
    assert len(_decide(_snapshot(owners, "a", "b", moved_at_us=NOW_US * 1_000)).writes) == 1


def test_watching_counts_from_the_last_break_of_watch_or_reads() -> None:
    continuity = Continuity()
    assert continuity.unbroken_us(50) == 0
    continuity.read_answered(50)  # no watch yet
    assert continuity.unbroken_us(60) == 0
    continuity.watch_is(ViewChange.CURRENT, 100)
    continuity.watch_is(ViewChange.CHANGED, 150)
    assert continuity.unbroken_us(200) == 100
    continuity.read_failed()
    assert continuity.unbroken_us(210) == 0
    continuity.read_answered(220)
    assert continuity.unbroken_us(230) == 10
    continuity.watch_is(ViewChange.BROKEN, 240)
    continuity.read_answered(250)
    assert continuity.unbroken_us(260) == 0
    continuity.watch_is(ViewChange.CURRENT, 300)
    assert continuity.unbroken_us(301) == 1


@pytest.mark.parametrize(
    "wrong", [{"shard_count": 0}, {"settle_ms": 7_000}, {"drain_moves_max": 0}, {"rebalance_moves_max": -1}]
)
def test_settings_that_cannot_hold_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=str(next(iter(wrong.values())))):
        ReconcilerSettings(**wrong)
