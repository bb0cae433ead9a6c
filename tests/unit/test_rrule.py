"""Recurrence rules: the examples of RFC 5545, agreement with dateutil, and what is refused."""

from __future__ import annotations

import random
import time
from datetime import UTC, datetime, timedelta
from itertools import takewhile

import pytest
from dateutil.rrule import rrulestr

from tickwheel.domain import rrule
from tickwheel.domain import trigger as triggers
from tickwheel.domain.trigger import (
    NEVER_US,
    CompiledTrigger,
    DstGapPolicy,
    DstOverlapPolicy,
    Rrule,
    Trigger,
    TriggerSet,
)
from tickwheel.domain.zone import zone
from tickwheel.errors import InvalidArgument, TriggerInvalid, TriggerNeverFires

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
NAIVE_EPOCH = datetime(1970, 1, 1)
NEW_YORK = "America/New_York"


def compiled(text: str, time_zone: str = "UTC", **policies: object) -> CompiledTrigger:
    trigger = Trigger(rrule=Rrule(text), time_zone=time_zone, **policies)  # type: ignore[arg-type]
    return triggers.compile(TriggerSet((trigger,)))


def instants(trigger: CompiledTrigger, count: int, after: str = "1970-01-01T00:00:00") -> list[str]:
    after_us = (datetime.fromisoformat(after).replace(tzinfo=UTC) - EPOCH) // timedelta(microseconds=1)
    found = trigger.between(after_us, NEVER_US, count)
    return [(EPOCH + timedelta(microseconds=instant_us)).strftime("%Y-%m-%d %H:%M") for instant_us in found]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("FREQ=DAILY;COUNT=3", ["1997-09-02", "1997-09-03", "1997-09-04"]),
        ("FREQ=DAILY;INTERVAL=10;COUNT=3", ["1997-09-02", "1997-09-12", "1997-09-22"]),
        ("FREQ=WEEKLY;COUNT=3;WKST=SU;BYDAY=TU,TH", ["1997-09-02", "1997-09-04", "1997-09-09"]),
        ("FREQ=WEEKLY;INTERVAL=2;COUNT=3;WKST=SU;BYDAY=TU,TH", ["1997-09-02", "1997-09-04", "1997-09-16"]),
        ("FREQ=MONTHLY;COUNT=3;BYDAY=1FR", ["1997-09-05", "1997-10-03", "1997-11-07"]),
        ("FREQ=MONTHLY;COUNT=3;BYDAY=-2MO", ["1997-09-22", "1997-10-20", "1997-11-17"]),
        ("FREQ=MONTHLY;BYMONTHDAY=-3", ["1997-09-28", "1997-10-29", "1997-11-28"]),
        ("FREQ=MONTHLY;BYDAY=FR;BYMONTHDAY=13", ["1998-02-13", "1998-03-13", "1998-11-13"]),
        ("FREQ=MONTHLY;COUNT=3;BYDAY=TU,WE,TH;BYSETPOS=3", ["1997-09-04", "1997-10-07", "1997-11-06"]),
        ("FREQ=MONTHLY;BYDAY=MO,TU,WE,TH,FR;BYSETPOS=-2", ["1997-09-29", "1997-10-30", "1997-11-27"]),
        ("FREQ=YEARLY;INTERVAL=3;COUNT=3;BYYEARDAY=1,100,200", ["1998-01-01", "1998-04-10", "1998-07-19"]),
        ("FREQ=YEARLY;BYWEEKNO=20;BYDAY=MO", ["1998-05-11", "1999-05-17", "2000-05-15"]),
        ("FREQ=YEARLY;INTERVAL=4;BYMONTH=11;BYDAY=TU;BYMONTHDAY=2,3,4,5,6,7,8", ["2000-11-07", "2004-11-02"]),
        ("FREQ=YEARLY;BYMONTH=3;BYDAY=TH", ["1998-03-05", "1998-03-12", "1998-03-19"]),
    ],
)
def test_the_examples_of_the_standard_hold(rule: str, expected: list[str]) -> None:
    start = "19970902T090000" if "INTERVAL=3" not in rule else "19970101T090000"
    start = "19961105T090000" if "INTERVAL=4" in rule else start
    if "INTERVAL=3" in rule:
        expected = ["1997-01-01", "1997-04-10", "1997-07-19"]
    if "INTERVAL=4" in rule:
        expected = ["1996-11-05", *expected]
    found = instants(compiled(f"DTSTART;TZID={NEW_YORK}:{start} RRULE:{rule}", NEW_YORK), len(expected))
    assert [text[:10] for text in found] == expected
    assert {text[11:] for text in found} <= {"13:00", "14:00"}  # 09:00 in New York


def test_exdates_are_left_out_and_rdates_added() -> None:
    text = (
        "DTSTART:20270101T090000\nRRULE:FREQ=DAILY\n"
        "EXDATE:20270102T090000,20270104T090000\nRDATE:20270103T120000,20270104T090000"
    )
    assert instants(compiled(text), 4) == [
        "2027-01-01 09:00",
        "2027-01-03 09:00",
        "2027-01-03 12:00",
        "2027-01-05 09:00",
    ]


def test_a_rule_is_read_in_the_zone_of_its_trigger() -> None:
    text = "DTSTART:20270327T023000 RRULE:FREQ=DAILY"
    assert instants(compiled(text, "Europe/Berlin"), 3) == [
        "2027-03-27 01:30",
        "2027-03-28 01:00",
        "2027-03-29 00:30",
    ]
    skipping = compiled(text, "Europe/Berlin", dst_gap_policy=DstGapPolicy.SKIP)
    assert instants(skipping, 2) == ["2027-03-27 01:30", "2027-03-29 00:30"]
    twice = compiled(
        "DTSTART:20271031T023000 RRULE:FREQ=DAILY", "Europe/Berlin", dst_overlap_policy=DstOverlapPolicy.BOTH
    )
    assert instants(twice, 3) == ["2027-10-31 00:30", "2027-10-31 01:30", "2027-11-01 01:30"]


def test_a_rule_below_the_day_follows_real_time() -> None:
    hourly = compiled("DTSTART:20271031T013000 RRULE:FREQ=HOURLY", "Europe/Berlin")
    assert instants(hourly, 4) == [
        "2027-10-30 23:30",
        "2027-10-31 00:30",
        "2027-10-31 01:30",
        "2027-10-31 02:30",
    ]


def test_a_missing_start_is_the_start_of_the_schedule() -> None:
    trigger = Trigger(rrule=Rrule("FREQ=WEEKLY"), time_zone="Asia/Tokyo")
    with pytest.raises(TriggerInvalid):
        triggers.compile(TriggerSet((trigger,)))
    start_us = 1_800_000_000_000_000  # 2027-01-15T08:00:00Z, a Friday
    found = triggers.compile(TriggerSet((trigger,), start_us=start_us))
    assert instants(found, 2) == ["2027-01-15 08:00", "2027-01-22 08:00"]


def random_rule(draw: random.Random) -> str:
    frequency = draw.choice(("YEARLY", "MONTHLY", "WEEKLY", "DAILY", "HOURLY", "MINUTELY"))
    interval = (
        draw.choice((1, 1, 2, 3, 5))
        if frequency not in ("HOURLY", "MINUTELY")
        else draw.choice((1, 2, 6, 12))
    )
    parts = [f"FREQ={frequency}", f"INTERVAL={interval}"]

    def maybe(part: str, chance: float) -> None:
        if draw.random() < chance:
            parts.append(part)

    def numbers(low: int, high: int, *, signed: bool = False) -> str:
        chosen = draw.sample(range(low, high + 1), draw.randint(1, 3))
        return ",".join(str(-number if signed and draw.random() < 0.3 else number) for number in chosen)

    maybe(f"BYMONTH={numbers(1, 12)}", 0.3)
    days = ",".join(draw.sample(["MO", "TU", "WE", "TH", "FR", "SA", "SU"], draw.randint(1, 3)))
    if frequency == "MONTHLY":
        # All with numbers or none: dateutil takes a mixture as "and", the standard as "or".
        rank = draw.choice(("", "1", "2", "-1", "-5"))
        days = ",".join(f"{rank}{day}" for day in days.split(","))
    maybe(f"BYDAY={days}", 0.4)
    if frequency != "WEEKLY":
        maybe(f"BYMONTHDAY={numbers(1, 31, signed=True)}", 0.3)
    if frequency == "YEARLY":
        maybe(f"BYYEARDAY={numbers(1, 366, signed=True)}", 0.2)
        maybe(f"BYWEEKNO={numbers(1, 53, signed=True)}", 0.2)
    is_positioned = frequency in ("YEARLY", "MONTHLY") and draw.random() < 0.2
    if is_positioned:
        parts.append(f"BYSETPOS={draw.choice((1, 2, -1, -2))}")
    else:
        maybe(f"BYHOUR={numbers(0, 23)}", 0.3)
        if frequency != "MINUTELY":
            maybe(f"BYMINUTE={numbers(0, 59)}", 0.3)
    maybe(f"WKST={draw.choice(('MO', 'SU', 'WE'))}", 0.3)
    maybe(draw.choice((f"COUNT={draw.randint(1, 40)}", f"UNTIL=2021{draw.randint(1, 12):02}15T120000")), 0.3)
    return ";".join(parts)


@pytest.mark.parametrize("seed", range(250))
def test_a_rule_names_the_wall_times_that_dateutil_names(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    text = random_rule(draw)
    start = datetime(2020, draw.randint(1, 12), draw.randint(1, 28), draw.randint(0, 23), draw.randint(0, 59))
    low = start + timedelta(days=draw.choice((-5, 0, 1, 40, 400)))
    high = low + timedelta(days=draw.choice((3, 40, 500)))
    # dateutil looks for an impossible date until this year; the engine stops by itself.
    monkeypatch.setattr("datetime.MAXYEAR", 2026)
    try:
        standard = rrulestr(text if "WKST" in text else f"{text};WKST=MO", dtstart=start)
        found = list(takewhile(lambda local: local < high, standard))
    except ValueError:
        found = []  # a BYHOUR that the interval never meets
    expected = [(local - NAIVE_EPOCH) // timedelta(seconds=1) for local in found if local >= low]
    low_s, high_s = ((edge - NAIVE_EPOCH) // timedelta(seconds=1) for edge in (low, high))
    try:
        pattern = rrule.parse(f"DTSTART:{start:%Y%m%dT%H%M%S} RRULE:{text}", zone("UTC"), None)
    except TriggerNeverFires:
        assert expected == [], (seed, text)
        return
    assert pattern.take_local(low_s, high_s, 1_000_000) == expected, (seed, text)
    assert pattern.take_local_newest(low_s, high_s, 1_000_000) == expected, (seed, text)
    assert pattern.take_local_newest(low_s, high_s, 3) == expected[-3:], (seed, text)
    assert pattern.count_local(low_s, high_s, 1_000_000) == len(expected), (seed, text)
    found_s = pattern.next_local(low_s)
    assert (found_s if found_s is not None and found_s < high_s else None) == (
        expected[0] if expected else None
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        "DTSTART:20270101T000000",
        "DTSTART:20270101T000000 RRULE:",
        "DTSTART:20270101T000000 RRULE:FREQ=FORTNIGHTLY",
        "DTSTART:20270101T000000 RRULE:FREQ=DAILY;INTERVAL=0",
        "DTSTART:20270101T000000 RRULE:FREQ=DAILY;INTERVAL=-1",
        "DTSTART:20270101T000000 RRULE:FREQ=DAILY;COUNT=0",
        "DTSTART:20270101T000000 RRULE:FREQ=DAILY;COUNT=99999",
        "DTSTART:20270101T000000 RRULE:FREQ=DAILY;COUNT=3;UNTIL=20280101T000000",
        "DTSTART:20270101T000000 RRULE:FREQ=DAILY;UNTIL=20260101T000000",
        "DTSTART:20270101T000000 RRULE:FREQ=DAILY;FREQ=DAILY",
        "DTSTART:20270101T000000 RRULE:FREQ=DAILY;BYEASTER=1",
        "DTSTART:20270101T000000 RRULE:FREQ=DAILY;BYHOUR=24",
        "DTSTART:20270101T000000 RRULE:FREQ=DAILY;BYDAY=1MO",
        "DTSTART:20270101T000000 RRULE:FREQ=WEEKLY;BYMONTHDAY=1",
        "DTSTART:20270101T000000 RRULE:FREQ=DAILY;BYMONTH=13",
        "DTSTART:20270101T000000 RRULE:FREQ=HOURLY;INTERVAL=7;BYDAY=MO",
        "DTSTART:20270101T000000 RRULE:FREQ=MONTHLY;BYSETPOS=0;BYDAY=MO",
        "DTSTART:20270101T000000 RRULE:FREQ=MONTHLY;BYSETPOS=1;BYDAY=MO;BYHOUR=1,2",
        "DTSTART:20270101T000000 RRULE:FREQ=DAILY RRULE:FREQ=DAILY",
        "DTSTART:20270101T000000 DTSTART:20270101T000000 RRULE:FREQ=DAILY",
        "DTSTART:20270230T000000 RRULE:FREQ=DAILY",
        "DTSTART;TZID=Asia/Tokyo:20270101T000000 RRULE:FREQ=DAILY",
        "DTSTART:20270101T000000 EXRULE:FREQ=DAILY",
        "DTSTART:20270101T000000 RRULE:FREQ=DAILY;BYMONTH=2;BYMONTHDAY=30",
        "DTSTART:20270101T000000 RRULE:FREQ=YEARLY;BYMONTH=2;BYMONTHDAY=30",
        "DTSTART:20270101T000000 RRULE:FREQ=SECONDLY;BYMONTH=2;BYMONTHDAY=30",
        "DTSTART:20270101T000000 RRULE:FREQ=SECONDLY;INTERVAL=86400;BYHOUR=5",
        "DTSTART:20270101T000000 RRULE:FREQ=DAILY;COUNT=1 EXDATE:20270101T000000",
        "X" * 100_000,
    ],
)
def test_a_bad_or_hostile_rule_is_refused_quickly(text: str) -> None:
    began_s = time.perf_counter()
    with pytest.raises(InvalidArgument) as refused:
        compiled(text)
    assert time.perf_counter() - began_s < 1.0  # 100 ms on an idle machine; tests share theirs
    assert len(str(refused.value)) < 300


LONG_AGO = [
    "FREQ=SECONDLY",
    "FREQ=SECONDLY;BYHOUR=3",
    "FREQ=MINUTELY;INTERVAL=7",
    "FREQ=YEARLY;BYMONTH=2;BYMONTHDAY=29",
    "FREQ=DAILY;INTERVAL=7300",
    "FREQ=MONTHLY;INTERVAL=240",
    "FREQ=DAILY;BYMONTH=2;BYMONTHDAY=29;BYDAY=SU",
]


@pytest.mark.parametrize("rule", LONG_AGO)
def test_a_rule_that_began_long_ago_is_answered_quickly(rule: str) -> None:
    trigger = compiled(f"DTSTART:19000101T000000 RRULE:{rule}")
    began_s = time.perf_counter()
    found = trigger.between(1_800_000_000_000_000, NEVER_US, 3)
    assert time.perf_counter() - began_s < 1.0
    assert found == sorted(found)
