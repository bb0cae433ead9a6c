"""The judge itself: a good history passes, and each promise broken once is complained about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.chaos.history import (
    CHECKS,
    FOREVER_US,
    THAW_GRACE_US,
    Absence,
    Acknowledged,
    ActiveWindow,
    AttemptRow,
    Complaint,
    DecisionRow,
    Event,
    History,
    LeaseRow,
    Pause,
    RunRow,
    ScheduleRow,
    Sighting,
    TimerRow,
    Write,
    judge,
    percentile,
)

from tickwheel.domain.decision import DecisionReason
from tickwheel.domain.run import AttemptState, Cause, RunState
from tickwheel.domain.shard import FENCE_GRANT_BITS

S = 1_000_000
FIRST_PID, SECOND_PID = 101, 102
EPOCH_1, EPOCH_2 = 1 << FENCE_GRANT_BITS, 2 << FENCE_GRANT_BITS


def story(
    run: str, pid: int, attempt: int, fence: int, at_us: int, outcome: str = "succeeded"
) -> list[Sighting]:
    """An attempt that is granted, begins 1 ms later, takes 100 ms, and is acknowledged 5 ms after that."""

    def seen(event: Event, after_us: int, **more: str) -> Sighting:
        when_us = at_us + after_us
        return Sighting(event, pid, run, attempt, fence, when_us, when_us, due_us=at_us - 1_000, **more)

    return [
        seen(Event.GRANTED, 0),
        seen(Event.STARTED, 1_000),
        seen(Event.ENDED, 101_000),
        seen(Event.RECORDED, 106_000, outcome=outcome, result=f'"{fence}"' if outcome == "succeeded" else ""),
    ]


def run_row(
    run: str,
    lease_us: int,
    fence: int,
    *,
    shard: int = 1,
    schedule: str = "",
    state: RunState = RunState.SUCCEEDED,
    attempt: int = 1,
) -> RunRow:
    """Due when it was leased; it gave its fence."""
    cause = Cause.SCHEDULED if schedule else Cause.DIRECT
    times_us = (lease_us, lease_us, lease_us, lease_us)
    return RunRow(run, shard, schedule, f'"{fence}"', *times_us, state, attempt, fence, cause)


def good() -> History:
    """Two runs of a schedule, one occurrence that was skipped, a direct run that took two attempts."""
    runs = [
        run_row("a1", 10 * S, EPOCH_1 + 1, schedule="sch"),
        run_row("a2", 30 * S, EPOCH_2 + 1, schedule="sch"),
        run_row("d1", 14 * S, EPOCH_1 + 5, shard=2, attempt=2),
    ]
    sightings = [
        *story("a1", FIRST_PID, 1, EPOCH_1 + 1, 10 * S),
        *story("a2", SECOND_PID, 1, EPOCH_2 + 1, 30 * S),
        *story("d1", FIRST_PID, 1, EPOCH_1 + 4, 12 * S, outcome="failed"),
        *story("d1", SECOND_PID, 2, EPOCH_1 + 5, 14 * S),
    ]
    return History(
        sightings=sightings,
        runs=runs,
        attempts=[
            AttemptRow("d1", 2, 1, EPOCH_1 + 4, AttemptState.FAILED, 12 * S, 13 * S),
            AttemptRow("d1", 2, 2, EPOCH_1 + 5, AttemptState.SUCCEEDED, 14 * S, 15 * S),
        ],
        timers=[TimerRow("sch", 1, 1, 40 * S, 30 * S)],
        decisions=[DecisionRow("sch", 20 * S, 20 * S, DecisionReason.OVERLAP)],
        schedules=[ScheduleRow("sch", deleted=False, quarantined=False)],
        writes=[Write(1, "timer-1", "timer-1", "lease INSERT")],
        acknowledged=Acknowledged(
            runs={"d1"}, schedules={"sch"}, windows=[ActiveWindow("sch", 0, 10 * S, 5 * S, 35 * S)]
        ),
        read_us=36 * S,
    )


def complaints(history: History, about: str) -> list[Complaint]:
    return [complaint for complaint in judge(history) if complaint.invariant == about]


def test_a_good_history_is_not_complained_about() -> None:
    assert judge(good()) == []


def the_run_vanishes(history: History) -> None:
    history.runs = [row for row in history.runs if row.run != "d1"]


def the_run_never_ends(history: History) -> None:
    history.runs[2] = replace(history.runs[2], state=RunState.SCHEDULED)
    history.timers.append(TimerRow("d1", 2, 2, 50 * S, 0))


def the_schedule_vanishes(history: History) -> None:
    history.schedules = []


def the_schedule_loses_its_timer(history: History) -> None:
    history.timers = []


def a_deleted_schedule_keeps_its_timer(history: History) -> None:
    history.schedules = [ScheduleRow("sch", deleted=True, quarantined=False)]


def a_cancelled_run_runs_on(history: History) -> None:
    history.acknowledged.cancelled.add("d1")


def an_occurrence_becomes_two_runs(history: History) -> None:
    history.runs.append(replace(history.runs[0], run="a9", fence=EPOCH_1 + 9, state=RunState.CANCELLED))


def an_occurrence_is_leased_twice(history: History) -> None:
    history.leases.append(LeaseRow("a9", 1, "sch", 10 * S, 10 * S, 10 * S, 1, EPOCH_1 + 9, Cause.SCHEDULED))


def a_decided_occurrence_runs_all_the_same(history: History) -> None:
    history.decisions.append(DecisionRow("sch", 25 * S, 35 * S, DecisionReason.PAUSED))


def an_occurrence_is_passed_over(history: History) -> None:
    history.decisions = []


def a_paused_schedule_fires(history: History) -> None:
    history.acknowledged.pauses.append(Pause("sch", 20 * S, 31 * S))


def a_later_attempt_has_a_lower_fence(history: History) -> None:
    history.attempts[0] = replace(history.attempts[0], fence=EPOCH_1 + 7)
    history.sightings = [
        replace(seen, fence=EPOCH_1 + 7) if seen.fence == EPOCH_1 + 4 else seen for seen in history.sightings
    ]


def an_attempt_has_two_fences(history: History) -> None:
    history.sightings.append(replace(history.sightings[0], fence=EPOCH_1 + 2))


def a_fence_is_given_twice(history: History) -> None:
    history.runs[1] = replace(history.runs[1], fence=history.runs[0].fence)


def an_attempt_is_granted_to_two_workers(history: History) -> None:
    history.sightings.append(replace(history.sightings[0], pid=SECOND_PID))


def two_attempts_live_at_once(history: History) -> None:
    history.sightings = [
        replace(seen, boot_us=14 * S + 500)
        if (seen.run, seen.attempt, seen.event) == ("d1", 1, Event.ENDED)
        else seen
        for seen in history.sightings
    ]


def an_attempt_never_stops(history: History) -> None:
    history.sightings = [
        seen for seen in history.sightings if (seen.run, seen.attempt, seen.event) != ("d1", 1, Event.ENDED)
    ]


def a_timer_writes_to_a_shard_that_it_lost(history: History) -> None:
    history.writes.append(Write(1, "timer-1", "timer-2", "lease INSERT"))


def an_old_epoch_grants_again(history: History) -> None:
    history.runs.append(run_row("x1", 31 * S, EPOCH_1 + 20, state=RunState.CANCELLED))


def a_recorded_success_is_not_in_the_row(history: History) -> None:
    history.runs[0] = replace(history.runs[0], state=RunState.DEAD_LETTERED)
    history.dead_letters.add("a1")


def a_recorded_result_is_another(history: History) -> None:
    history.runs[0] = replace(history.runs[0], result='"another"')


def a_recorded_failure_has_no_row(history: History) -> None:
    history.attempts = history.attempts[1:]


def a_recorded_failure_stands_as_a_lapse(history: History) -> None:
    history.attempts[0] = replace(history.attempts[0], state=AttemptState.OUTCOME_UNKNOWN)


def a_run_succeeds_twice(history: History) -> None:
    history.sightings = [
        replace(seen, outcome="succeeded") if seen.outcome == "failed" else seen for seen in history.sightings
    ]


def a_run_succeeds_out_of_nowhere(history: History) -> None:
    history.runs.append(run_row("x1", 31 * S, EPOCH_2 + 20, state=RunState.SUCCEEDED))


def a_run_waits_after_its_end(history: History) -> None:
    history.timers.append(TimerRow("d1", 2, 2, 50 * S, 0))


def a_run_waits_nowhere(history: History) -> None:
    history.runs.append(run_row("x1", 0, 0, attempt=0, state=RunState.SCHEDULED))


def a_dead_letter_names_the_living(history: History) -> None:
    history.dead_letters.add("a1")


def a_lease_stays_behind(history: History) -> None:
    history.leases.append(LeaseRow("x1", 1, "", 0, 31 * S, 31 * S, 1, EPOCH_2 + 30, Cause.DIRECT))


def a_due_row_stays_behind(history: History) -> None:
    history.timers[0] = replace(history.timers[0], due_us=20 * S)


def a_run_begins_early(history: History) -> None:
    history.sightings[1] = replace(history.sightings[1], wall_us=history.sightings[1].due_us - 50_000)


BREAKS: tuple[tuple[str, Callable[[History], None]], ...] = (
    ("I1 an acknowledged run survives", the_run_vanishes),
    ("I1 an acknowledged run survives", the_run_never_ends),
    ("I1 an acknowledged schedule survives", the_schedule_vanishes),
    ("I1 an acknowledged schedule survives", the_schedule_loses_its_timer),
    ("I1 an acknowledged schedule survives", a_deleted_schedule_keeps_its_timer),
    ("I1 an acknowledged cancel stands", a_cancelled_run_runs_on),
    ("I2 an occurrence becomes one run", an_occurrence_becomes_two_runs),
    ("I2 an occurrence becomes one run", an_occurrence_is_leased_twice),
    ("I2 an occurrence becomes one run", a_decided_occurrence_runs_all_the_same),
    ("I2 no occurrence is passed over in silence", an_occurrence_is_passed_over),
    ("I2 a paused schedule stands still", a_paused_schedule_fires),
    ("I3 fences rise", a_later_attempt_has_a_lower_fence),
    ("I3 fences rise", an_attempt_has_two_fences),
    ("I3 a fence is given once", a_fence_is_given_twice),
    ("I3, I5 one attempt lives at a time", an_attempt_is_granted_to_two_workers),
    ("I3, I5 one attempt lives at a time", two_attempts_live_at_once),
    ("I3, I5 one attempt lives at a time", an_attempt_never_stops),
    ("I4 who lost a shard writes nothing", a_timer_writes_to_a_shard_that_it_lost),
    ("I4 an old epoch grants nothing", an_old_epoch_grants_again),
    ("I6 a recorded outcome is kept", a_recorded_success_is_not_in_the_row),
    ("I6 a recorded outcome is kept", a_recorded_result_is_another),
    ("I6 a recorded outcome is kept", a_recorded_failure_has_no_row),
    ("I6 a recorded outcome is kept", a_recorded_failure_stands_as_a_lapse),
    ("I6 a recorded outcome is kept", a_run_succeeds_twice),
    ("I6 an outcome was reported", a_run_succeeds_out_of_nowhere),
    ("rows agree", a_run_waits_after_its_end),
    ("rows agree", a_run_waits_nowhere),
    ("rows agree", a_dead_letter_names_the_living),
    ("everything settles", a_lease_stays_behind),
    ("everything settles", a_due_row_stays_behind),
    ("I10 nothing before its due time", a_run_begins_early),
)


@pytest.mark.parametrize(("invariant", "break_it"), BREAKS, ids=lambda value: getattr(value, "__name__", ""))
def test_each_broken_promise_is_complained_about(invariant: str, break_it: Callable[[History], None]) -> None:
    history = good()
    break_it(history)
    assert complaints(history, invariant), judge(history)


def test_every_check_is_broken_here() -> None:
    assert {name for name, _ in CHECKS} == {name for name, _ in BREAKS}


def test_a_killed_worker_runs_nothing_any_more() -> None:
    history = good()
    an_attempt_never_stops(history)
    history.absences.append(Absence(FIRST_PID, 13 * S, FOREVER_US))
    assert judge(history) == []


def test_a_frozen_worker_is_excused_until_it_has_looked_at_the_clock() -> None:
    history = good()
    an_attempt_never_stops(history)
    thawed_us = 20 * S
    history.absences.append(Absence(FIRST_PID, 12 * S + 50_000, thawed_us))
    ended = replace(history.sightings[8], event=Event.ENDED, boot_us=thawed_us + THAW_GRACE_US - 1)
    history.sightings.append(ended)
    assert judge(history) == []
    history.sightings[-1] = replace(ended, boot_us=thawed_us + THAW_GRACE_US + 1)
    assert complaints(history, "I3, I5 one attempt lives at a time")


def test_complaints_of_one_kind_are_bounded() -> None:
    history = good()
    history.acknowledged.runs.update(f"gone{number}" for number in range(100))
    found = complaints(history, "I1 an acknowledged run survives")
    assert len(found) == 21
    assert "80 more" in str(found[-1])


def test_percentiles_are_values_that_occurred() -> None:
    values = list(range(1, 101))
    assert [percentile(values, share) for share in (0.0, 0.5, 0.95, 0.99, 1.0)] == [1, 50, 95, 99, 100]
