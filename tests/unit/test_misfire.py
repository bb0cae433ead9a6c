"""Misfire decisions: the field reports B-O01 to B-O11, and what must hold for any of them."""

from __future__ import annotations

import random
import time
from datetime import UTC, datetime, timedelta

import pytest

from tickwheel.domain import trigger as triggers
from tickwheel.domain.decision import DecisionReason
from tickwheel.domain.misfire import (
    COUNTED_MAX,
    COUNTED_SEVERAL_MAX,
    DroppedRange,
    MisfireDecision,
    MisfirePolicy,
    MisfireRules,
    decide,
)
from tickwheel.domain.trigger import CompiledTrigger, Cron, Interval, Trigger, TriggerSet

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
SECOND_US = 1_000_000
MINUTE_US = 60 * SECOND_US
HOUR_US = 60 * MINUTE_US
SKIP = MisfireRules(MisfirePolicy.SKIP)
FIRE_ONCE = MisfireRules(MisfirePolicy.FIRE_ONCE)
FIRE_ALL = MisfireRules(MisfirePolicy.FIRE_ALL)


def at(text: str) -> int:
    return (datetime.fromisoformat(text).replace(tzinfo=UTC) - EPOCH) // timedelta(microseconds=1)


def cron(expression: str, time_zone: str = "UTC") -> CompiledTrigger:
    return triggers.compile(TriggerSet((Trigger(cron=Cron(expression), time_zone=time_zone),)))


def interval(duration_us: int, anchor_us: int) -> CompiledTrigger:
    return triggers.compile(TriggerSet((Trigger(interval=Interval(duration_us, anchor_us)),)))


def reasons(decision: MisfireDecision) -> list[tuple[DecisionReason, int]]:
    return [(part.reason, part.count) for part in decision.dropped]


class TestMoreThanAHundredMissedTicks:  # B-O01
    trigger = cron("* * * * *")
    decided_us = at("2024-05-01T00:00:00")
    now_us = at("2024-05-01T02:30:20")
    next_us = at("2024-05-01T02:31:00")

    def test_skip_runs_none_and_records_150(self) -> None:
        decision = decide(self.trigger, self.decided_us, self.now_us, SKIP)
        assert decision.runs_us == ()
        assert reasons(decision) == [(DecisionReason.MISFIRE_SKIPPED, 150)]
        assert (decision.missed_count, decision.next_us) == (150, self.next_us)

    def test_fire_once_runs_the_latest(self) -> None:
        decision = decide(self.trigger, self.decided_us, self.now_us, FIRE_ONCE)
        assert decision.runs_us == (at("2024-05-01T02:30:00"),)
        assert reasons(decision) == [(DecisionReason.MISFIRE_COLLAPSED, 149)]
        assert (decision.missed_count, decision.next_us) == (150, self.next_us)

    def test_fire_all_runs_each_in_order(self) -> None:
        decision = decide(self.trigger, self.decided_us, self.now_us, FIRE_ALL)
        assert len(decision.runs_us) == 150
        assert list(decision.runs_us) == sorted(decision.runs_us)
        assert decision.is_catch_up
        assert (decision.dropped, decision.next_us) == ((), self.next_us)

    def test_a_cap_keeps_the_newest_and_records_the_rest(self) -> None:
        rules = MisfireRules(MisfirePolicy.FIRE_ALL, catchup_count_max=100)
        decision = decide(self.trigger, self.decided_us, self.now_us, rules)
        assert decision.runs_us[0] == at("2024-05-01T00:51:00")
        assert decision.runs_us[-1] == at("2024-05-01T02:30:00")
        assert len(decision.runs_us) == 100
        assert decision.dropped == (
            DroppedRange(
                DecisionReason.CATCHUP_COUNT, at("2024-05-01T00:01:00"), at("2024-05-01T00:50:00"), 50
            ),
        )
        assert (decision.missed_count, decision.next_us) == (150, self.next_us)


def test_a_resumed_schedule_starts_with_the_next_occurrence() -> None:  # B-O02
    # Resuming with "skip" moves the last decided instant to the resumption.
    decision = decide(cron("* * * * *"), at("2024-05-01T10:01:30"), at("2024-05-01T10:01:30"), FIRE_ALL)
    assert (decision.runs_us, decision.dropped) == ((), ())
    assert decision.next_us == at("2024-05-01T10:02:00")


@pytest.mark.parametrize(("rules", "run_count"), [(SKIP, 0), (FIRE_ONCE, 1), (FIRE_ALL, 5)])
def test_an_interval_keeps_its_phase_over_an_outage(rules: MisfireRules, run_count: int) -> None:  # B-O03
    trigger = interval(15 * SECOND_US, at("2024-05-01T12:40:06"))
    decision = decide(trigger, at("2024-05-01T12:40:36"), at("2024-05-01T12:41:58"), rules)
    assert len(decision.runs_us) == run_count
    assert decision.missed_count == 5
    assert decision.next_us == at("2024-05-01T12:42:06")
    if run_count:
        assert decision.runs_us[-1] == at("2024-05-01T12:41:51")


@pytest.mark.parametrize(("rules", "run_count"), [(SKIP, 0), (FIRE_ONCE, 1)])
def test_a_clock_that_jumps_an_hour_does_not_burst(rules: MisfireRules, run_count: int) -> None:  # B-O04
    trigger = interval(5 * SECOND_US, at("2024-05-01T00:00:00"))
    decided_us = at("2024-05-01T09:00:00")
    decision = decide(trigger, decided_us, decided_us + HOUR_US, rules)
    assert (len(decision.runs_us), decision.missed_count) == (run_count, 720)
    following = decide(trigger, decision.decided_us, decided_us + HOUR_US + 5 * SECOND_US, rules)
    assert len(following.runs_us) == 1
    assert not following.is_catch_up


def test_a_one_shot_that_was_slept_through_runs_once_or_is_recorded() -> None:  # B-O05
    due_us = at("2024-05-01T14:00:00")
    trigger = triggers.compile(TriggerSet((Trigger(instants_us=(due_us,)),)))
    now_us = at("2024-05-01T18:00:10")
    assert decide(trigger, due_us - HOUR_US, now_us, FIRE_ONCE).runs_us == (due_us,)
    expired = decide(trigger, due_us - HOUR_US, now_us, MisfireRules(catchup_us=HOUR_US))
    assert (expired.runs_us, expired.next_us) == ((), None)
    assert reasons(expired) == [(DecisionReason.CATCHUP_WINDOW, 1)]


def test_nothing_older_than_the_catch_up_window_runs() -> None:  # B-O06
    rules = MisfireRules(MisfirePolicy.FIRE_ALL, catchup_us=30 * MINUTE_US)
    trigger = cron("* * * * *")
    decided_us, now_us = at("2024-05-01T10:00:00"), at("2024-05-01T12:00:30")
    decision = decide(trigger, decided_us, now_us, rules)
    assert len(decision.runs_us) == 30
    assert decision.runs_us[0] == at("2024-05-01T11:31:00")
    assert decision.runs_us[-1] == at("2024-05-01T12:00:00")
    assert reasons(decision) == [(DecisionReason.CATCHUP_WINDOW, 90)]

    both = MisfireRules(MisfirePolicy.FIRE_ALL, catchup_us=30 * MINUTE_US, catchup_count_max=20)
    decision = decide(trigger, decided_us, now_us, both)
    assert decision.runs_us[0] == at("2024-05-01T11:41:00")
    assert reasons(decision) == [(DecisionReason.CATCHUP_WINDOW, 90), (DecisionReason.CATCHUP_COUNT, 10)]


@pytest.mark.parametrize("policy", [MisfirePolicy.FIRE_ONCE, MisfirePolicy.FIRE_ALL])
def test_the_window_is_measured_from_the_nominal_instant(policy: MisfirePolicy) -> None:  # B-O07
    rules = MisfireRules(policy, catchup_us=10 * MINUTE_US)
    decision = decide(cron("0 * * * *"), at("2024-05-01T01:00:00"), at("2024-05-01T03:05:00"), rules)
    assert decision.runs_us == (at("2024-05-01T03:00:00"),)
    assert reasons(decision) == [(DecisionReason.CATCHUP_WINDOW, 1)]
    assert decision.next_us == at("2024-05-01T04:00:00")


def test_the_window_includes_its_edge() -> None:
    rules = MisfireRules(MisfirePolicy.FIRE_ONCE, catchup_us=5 * MINUTE_US)
    trigger, decided_us = cron("0 * * * *"), at("2024-05-01T02:00:00")
    assert decide(trigger, decided_us, at("2024-05-01T03:05:00"), rules).runs_us != ()
    assert decide(trigger, decided_us, at("2024-05-01T03:05:00") + 1, rules).runs_us == ()


def test_a_pause_that_was_skipped_leaves_no_misfires() -> None:  # B-O08
    trigger = cron("*/5 * * * *")
    for resumed, expected in (("2024-05-01T08:59:59", "09:00:00"), ("2024-05-01T09:00:00", "09:05:00")):
        decision = decide(trigger, at(resumed), at(resumed), MisfireRules(catchup_us=MINUTE_US))
        assert (decision.missed_count, decision.decided_us) == (0, at(resumed))
        assert decision.next_us == at(f"2024-05-01T{expected}")


def test_a_slow_pass_within_the_threshold_is_no_misfire() -> None:  # B-O09
    rules = MisfireRules(MisfirePolicy.SKIP, threshold_us=5 * MINUTE_US)
    decision = decide(cron("0 0 * * *"), at("2024-04-30T00:00:00"), at("2024-05-01T00:01:30"), rules)
    assert decision.runs_us == (at("2024-05-01T00:00:00"),)
    assert (decision.missed_count, decision.is_catch_up) == (0, False)


def test_a_restart_in_summer_time_waits_for_the_next_instant_only() -> None:  # B-O10
    trigger = cron("*/5 * * * *", "Europe/London")
    decision = decide(trigger, at("2024-08-28T09:00:00"), at("2024-08-28T09:02:00"), FIRE_ONCE)
    assert (decision.runs_us, decision.next_us) == ((), at("2024-08-28T09:05:00"))


def test_a_tick_during_a_deployment_runs_once() -> None:  # B-O11
    decision = decide(cron("0 0 * * *"), at("2024-04-30T00:00:00"), at("2024-05-01T00:00:40"), FIRE_ONCE)
    assert decision.runs_us == (at("2024-05-01T00:00:00"),)


def test_an_outage_of_an_hour_gives_each_policy_its_exact_count() -> None:
    trigger = cron("* * * * *")
    decided_us, now_us = at("2024-05-01T10:00:00"), at("2024-05-01T11:00:05")
    counts = [
        len(decide(trigger, decided_us, now_us, rules).runs_us) for rules in (SKIP, FIRE_ONCE, FIRE_ALL)
    ]
    assert counts == [0, 1, 60]


def test_occurrences_within_the_threshold_all_run_as_scheduled() -> None:
    trigger = interval(SECOND_US, at("2024-05-01T00:00:00"))
    decided_us = at("2024-05-01T00:01:00")
    decision = decide(trigger, decided_us, decided_us + 30 * SECOND_US, SKIP)
    assert len(decision.runs_us) == 30
    assert not decision.is_catch_up


def test_ten_thousand_missed_occurrences_are_decided_within_milliseconds() -> None:
    rules = MisfireRules(MisfirePolicy.FIRE_ALL, catchup_us=400 * 24 * HOUR_US, catchup_count_max=10_000)
    trigger = cron("* * * * *", "Europe/Berlin")
    decided_us, now_us = at("2024-01-01T00:00:00"), at("2024-12-31T00:00:00")
    best_s = 1.0
    for _ in range(5):
        began_s = time.perf_counter()
        decision = decide(trigger, decided_us, now_us, rules)
        best_s = min(best_s, time.perf_counter() - began_s)
    assert len(decision.runs_us) == 10_000
    assert decision.missed_count == 365 * 24 * 60
    assert best_s < 0.05


def test_counting_stops_at_its_bound_and_says_so() -> None:
    one = Trigger(interval=Interval(10_000, 0))
    now_us = at("2024-05-01T00:00:00")
    found = decide(triggers.compile(TriggerSet((one,))), 0, now_us, SKIP).dropped[0]
    assert (found.count, found.is_count_exact) == (COUNTED_MAX, False)
    several = triggers.compile(TriggerSet((one, Trigger(cron=Cron("* * * * *")))))
    began_s = time.perf_counter()
    found = decide(several, 0, now_us, SKIP).dropped[0]
    assert time.perf_counter() - began_s < 1.0
    assert (found.count, found.is_count_exact) == (COUNTED_SEVERAL_MAX, False)


@pytest.mark.parametrize("seed", range(200))
def test_every_occurrence_is_decided_exactly_once(seed: int) -> None:
    draw = random.Random(seed)
    step = draw.choice((1, 2, 5, 7, 15))
    trigger = draw.choice((cron(f"*/{step} * * * *"), interval(step * MINUTE_US + 1, 12_345)))
    decided_us = at("2024-03-30T00:00:00") + draw.randrange(3 * 24 * HOUR_US)
    now_us = decided_us + draw.randrange(2 * 24 * HOUR_US)
    rules = MisfireRules(
        draw.choice(list(MisfirePolicy)),
        threshold_us=draw.choice((0, MINUTE_US, HOUR_US)),
        catchup_us=draw.choice((0, HOUR_US, 24 * HOUR_US, 100 * HOUR_US)),
        catchup_count_max=draw.choice((1, 10, 10_000)),
    )
    decision = decide(trigger, decided_us, now_us, rules)
    due = trigger.between(decided_us, now_us, 100_000)
    seen = list(decision.runs_us)
    for part in decision.dropped:
        inside = [instant_us for instant_us in due if part.first_us <= instant_us <= part.last_us]
        assert (inside[0], inside[-1], len(inside)) == (part.first_us, part.last_us, part.count), seed
        seen += inside
    assert sorted(seen) == [instant_us for instant_us in due if instant_us <= decision.decided_us], seed
    assert decision.next_us == trigger.next_after(decision.decided_us), seed
    if not due or decision.is_catch_up:
        assert decision.next_us is None or decision.next_us > now_us, seed
