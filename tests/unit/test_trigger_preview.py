"""What a trigger says of itself: sentences, offsets, and warnings about clock changes."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest

from tickwheel.domain import describe
from tickwheel.domain import trigger as triggers
from tickwheel.domain.trigger import (
    Cron,
    Dialect,
    DstGapPolicy,
    DstOverlapPolicy,
    Interval,
    Rrule,
    Trigger,
    TriggerSet,
)

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def at(text: str) -> int:
    return (datetime.fromisoformat(text).replace(tzinfo=UTC) - EPOCH) // timedelta(microseconds=1)


def cron(
    expression: str, time_zone: str = "UTC", dialect: Dialect = Dialect.UNIX, **policies: Any
) -> TriggerSet:
    return TriggerSet((Trigger(cron=Cron(expression, dialect), time_zone=time_zone, **policies),))


@pytest.mark.parametrize(
    ("expression", "sentence"),
    [
        ("0 9 * * 1-5", "every working day at 09:00 in Berlin"),
        ("30 2 * * *", "every day at 02:30 in Berlin"),
        ("0 9,17 * * *", "every day at 09:00 and 17:00 in Berlin"),
        ("* * * * *", "every minute in Berlin"),
        ("*/15 * * * *", "every 15 minutes in Berlin"),
        ("0 * * * *", "every hour in Berlin"),
        ("5 * * * *", "at minute 5 every hour in Berlin"),
        ("0 */2 * * *", "every 2 hours in Berlin"),
        ("*/7 * * * *", "at minutes 0, 7, 14, 21, 28, 35, 42, 49 and 56 every hour in Berlin"),
        ("*/5 9-17 * * MON,WED", "every 5 minutes in hours 9 to 17, every Monday and Wednesday in Berlin"),
        ("0 0 1 * *", "on day 1 of every month at 00:00 in Berlin"),
        ("0 0 L 2 *", "on the last day of February at 00:00 in Berlin"),
        ("0 0 LW * *", "on the last working day of every month at 00:00 in Berlin"),
        ("0 0 15W * *", "on the working day nearest to day 15 of every month at 00:00 in Berlin"),
        ("0 0 * * 5L", "on the last Friday of every month at 00:00 in Berlin"),
        ("0 0 * * 1#1", "on the first Monday of every month at 00:00 in Berlin"),
        ("30 4 1,15 * 5", "on days 1 and 15 of every month and also every Friday at 04:30 in Berlin"),
        ("0 0 */2 * 1", None),
        ("0 9 * * SAT,SUN", "every Saturday and Sunday at 09:00 in Berlin"),
        ("0 9 * 12 *", "every day of December at 09:00 in Berlin"),
        ("0 9 * 12 MON", "every Monday of December at 09:00 in Berlin"),
    ],
)
def test_a_cron_reads_as_a_sentence(expression: str, sentence: str | None) -> None:
    found = describe.describe(cron(expression, "Europe/Berlin"))
    if sentence is not None:
        assert found == sentence
    assert "  " not in found


def test_other_triggers_and_bounds_read_as_sentences() -> None:
    every = Trigger(interval=Interval(90_000_000, at("2027-01-01T00:00:00")))
    once = Trigger(instants_us=(at("2027-01-01T00:00:00"),))
    rule = Trigger(rrule=Rrule("DTSTART:20270101T000000\nRRULE:FREQ=DAILY"), time_zone="America/New_York")
    assert describe.describe(TriggerSet((every,))) == "every 90 seconds, counted from 2027-01-01T00:00:00Z"
    assert describe.describe(TriggerSet((once,))) == "once, at 2027-01-01T00:00:00Z"
    assert "FREQ=DAILY in New York" in describe.describe(TriggerSet((rule,)))
    bounded = TriggerSet(
        cron("0 9 * * *").triggers,
        frozenset({date(2027, 12, 25), date(2027, 12, 26)}),
        at("2027-01-01T00:00:00"),
        at("2028-01-01T00:00:00"),
        60_000_000,
    )
    assert describe.describe(bounded) == (
        "every day at 09:00 UTC, except on 2027-12-25 and 2027-12-26, not before 2027-01-01T00:00:00Z, "
        "until 2028-01-01T00:00:00Z, each up to 1 minute later"
    )
    quartz = cron("*/30 * * ? * 2-6", dialect=Dialect.QUARTZ)
    assert describe.describe(quartz) == "every 30 seconds, every working day UTC"


GAP, SKIP, SHIFTED = DstGapPolicy.RUN_AT_GAP_END, DstGapPolicy.SKIP, DstGapPolicy.RUN_SHIFTED


@pytest.mark.parametrize(
    ("expression", "policy", "warning"),
    [
        ("30 2 * * *", GAP, "02:30 does not exist on 2027-03-28 in this zone: will run at 03:00"),
        ("30 2 * * *", SKIP, "02:30 does not exist on 2027-03-28 in this zone: will not run"),
        ("30 2 * * *", SHIFTED, "02:30 does not exist on 2027-03-28 in this zone: will run at 03:30"),
        (
            "0,30 2 * * *",
            GAP,
            "02:00 and 02:30 do not exist on 2027-03-28 in this zone: will run once at 03:00",
        ),
        (
            "0-50/10 2 * * *",
            GAP,
            "02:00, 02:10, 02:20, 02:30 and others do not exist on 2027-03-28 in this zone: "
            "will run once at 03:00",
        ),
        ("*/30 2 * * *", GAP, None),
        ("30 3 * * *", GAP, None),
    ],
)
def test_a_time_that_will_not_exist_is_warned_of(
    expression: str, policy: DstGapPolicy, warning: str | None
) -> None:
    trigger = triggers.compile(cron(expression, "Europe/Berlin", dst_gap_policy=policy))
    found = describe.preview(trigger, at("2027-03-27T12:00:00"), 20)
    assert found.warnings == (() if warning is None else (warning,))


@pytest.mark.parametrize(
    ("policy", "then"),
    [
        (DstOverlapPolicy.FIRST, "will run the first time only"),
        (DstOverlapPolicy.SECOND, "will run the second time only"),
        (DstOverlapPolicy.BOTH, "will run both times"),
    ],
)
def test_a_time_that_will_happen_twice_is_warned_of(policy: DstOverlapPolicy, then: str) -> None:
    trigger = triggers.compile(cron("30 2 * * *", "Europe/Berlin", dst_overlap_policy=policy))
    found = describe.preview(trigger, at("2027-10-30T12:00:00"), 3)
    assert found.warnings == (f"02:30 happens twice on 2027-10-31 in this zone: {then}",)


def test_each_occurrence_says_its_offset_and_what_a_clock_change_did() -> None:
    trigger = triggers.compile(cron("30 2 * * *", "Europe/Berlin", dst_overlap_policy=DstOverlapPolicy.BOTH))
    spring = describe.preview(trigger, at("2027-03-26T12:00:00"), 3).occurrences
    assert [found.utc_offset for found in spring] == ["+01:00", "+02:00", "+02:00"]
    assert [found.adjustment for found in spring] == [
        "",
        "02:30 does not exist on 2027-03-28 in this zone",
        "",
    ]
    autumn = describe.preview(trigger, at("2027-10-30T12:00:00"), 2).occurrences
    assert [found.utc_offset for found in autumn] == ["+02:00", "+01:00"]
    assert autumn[0].adjustment.endswith("this is the first time")
    assert autumn[1].adjustment.endswith("this is the second time")


def test_an_offset_with_seconds_is_said_in_full() -> None:
    trigger = triggers.compile(cron("0 12 * * *", "Africa/Monrovia"))
    assert describe.preview(trigger, at("1972-01-02T00:00:00"), 1).occurrences[0].utc_offset == "-00:44:30"


def test_a_preview_of_several_triggers_sees_each_occurrence_in_its_own_zone() -> None:
    both = TriggerSet(cron("0 9 * * *", "Europe/Berlin").triggers + cron("0 9 * * *", "Asia/Tokyo").triggers)
    found = describe.preview(triggers.compile(both), at("2027-01-01T12:00:00"), 2)
    assert [occurrence.utc_offset for occurrence in found.occurrences] == ["+09:00", "+01:00"]
    assert found.description == "every day at 09:00 in Berlin; and every day at 09:00 in Tokyo"
