"""Calendars, what an iCalendar makes of one, and triggers that move to working days."""

from __future__ import annotations

import random
from datetime import UTC, date, datetime, timedelta

import pytest

from tickwheel.domain import calendar, describe, trigger
from tickwheel.domain.calendar import CalendarSource
from tickwheel.domain.trigger import CalendarShift, Cron, Interval, Rrule, Trigger, TriggerSet
from tickwheel.errors import FieldInvalid, TriggerInvalid, TriggerNeverFires

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
EXPRESSIONS = ("0 9 * * *", "30 8,17 */3 * *", "0 12 1,15,28 * *", "0 6 * * 0,3", "15 4 29 2 *")
HOLIDAYS = frozenset({date(2027, 12, 24), date(2027, 12, 27), date(2028, 1, 3)})


def us(text: str) -> int:
    return (datetime.fromisoformat(text).replace(tzinfo=UTC) - EPOCH) // timedelta(microseconds=1)


def texts(instants: list[int]) -> list[str]:
    return [(EPOCH + timedelta(microseconds=each)).strftime("%Y-%m-%d %H:%M") for each in instants]


def shifted(expression: str, shift: CalendarShift, dates: frozenset[date]) -> trigger.CompiledTrigger:
    return trigger.compile(TriggerSet((Trigger(Cron(expression), calendar_shift=shift),), exclusions=dates))


# --- Moving to working days -------------------------------------------------------------------------------


def test_what_falls_on_a_holiday_or_a_weekend_moves_to_the_next_working_day() -> None:
    compiled = shifted("0 9 25 * *", CalendarShift.NEXT_WORKING_DAY, HOLIDAYS)
    assert texts(compiled.between(us("2027-11-01"), us("2028-02-01"), 9)) == [
        "2027-11-25 09:00",
        "2027-12-28 09:00",
        "2028-01-25 09:00",
    ], "2027-12-25 is a Saturday, the 27th is excluded"


def test_or_to_the_working_day_before() -> None:
    compiled = shifted("0 9 25 * *", CalendarShift.PREVIOUS_WORKING_DAY, HOLIDAYS)
    assert texts(compiled.between(us("2027-12-01"), us("2028-01-01"), 9)) == ["2027-12-23 09:00"]


def test_occurrences_that_meet_on_a_working_day_are_one() -> None:
    compiled = shifted("0 9 * * *", CalendarShift.NEXT_WORKING_DAY, HOLIDAYS)
    assert texts(compiled.between(us("2027-12-23"), us("2027-12-30"), 9)) == [
        "2027-12-23 09:00",
        "2027-12-28 09:00",
        "2027-12-29 09:00",
    ]


def test_every_way_of_asking_a_moved_trigger_agrees_with_moving_day_by_day() -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    base = date(2027, 1, 1)
    for _ in range(60):
        expression = rng.choice(
            ["0 9 * * *", "30 8,17 */3 * *", "0 12 1,15,28 * *", "0 6 * * 0,3", "15 4 29 2 *"]
        )
        forward = rng.random() < 0.5
        dates = {base + timedelta(days=rng.randrange(800)) for _ in range(rng.choice([0, 5, 80]))}
        if rng.random() < 0.3:
            start = rng.randrange(300)
            dates |= {base + timedelta(days=start + n) for n in range(rng.choice([10, 45]))}
        shift = CalendarShift.NEXT_WORKING_DAY if forward else CalendarShift.PREVIOUS_WORKING_DAY
        plain = trigger.compile(TriggerSet((Trigger(Cron(expression)),)))
        compiled = shifted(expression, shift, frozenset(dates))
        low, high = us("2027-02-10"), us("2028-11-20") + rng.randrange(86_400) * 1_000_000
        named = plain.between(low - 40 * 86_400_000_000, high + 40 * 86_400_000_000, 10_000)
        moved = {_moved(each, dates, 1 if forward else -1) for each in named} - {None}
        expected = sorted(each for each in moved if each is not None and low < each <= high)
        assert compiled.between(low, high, 10_000) == expected
        assert compiled.latest_between(low, high, 10_000) == expected[::-1]
        assert compiled.latest_between(low, high, 7) == expected[::-1][:7]
        assert compiled.count_between(low, high, 10_000) == len(expected)
        found, at = [], low
        while (next_us := compiled.next_after(at)) is not None and next_us <= high:
            found.append(next_us)
            at = next_us
        assert found == expected


def _moved(instant_us: int, dates: set[date], step: int) -> int | None:
    """The slow way: one day at a time."""
    at = EPOCH + timedelta(microseconds=instant_us)
    for _ in range(32):
        if at.weekday() < 5 and at.date() not in dates:
            return (at - EPOCH) // timedelta(microseconds=1)
        at += timedelta(days=step)
    return None


def test_a_moved_occurrence_says_from_where_it_was_moved() -> None:
    compiled = shifted("0 9 25 12 *", CalendarShift.NEXT_WORKING_DAY, HOLIDAYS)
    seen = describe.preview(compiled, us("2027-12-01"), 1)
    assert seen.occurrences[0].adjustment == "moved from 2027-12-25, no working day"
    assert "moved to the next working day" in seen.description


def test_a_trigger_that_moves_is_stored_as_one() -> None:
    moving = TriggerSet((Trigger(Cron("0 9 25 * *"), calendar_shift=CalendarShift.PREVIOUS_WORKING_DAY),))
    assert trigger.from_canonical(trigger.canonical_bytes(moving)) == moving
    still = TriggerSet((Trigger(Cron("0 9 25 * *")),))
    assert b"shift" not in trigger.canonical_bytes(still), "what was stored before keeps its id"


def test_only_days_can_be_moved_from() -> None:
    moving = Trigger(interval=Interval(1_000_000, 0), calendar_shift=CalendarShift.NEXT_WORKING_DAY)
    with pytest.raises(TriggerInvalid, match=r"triggers\[0\]\.calendar_shift"):
        trigger.compile(TriggerSet((moving,)))


def test_an_rrule_moves_too() -> None:
    rule = Trigger(
        rrule=Rrule("DTSTART:20271225T090000\nRRULE:FREQ=YEARLY"),
        calendar_shift=CalendarShift.NEXT_WORKING_DAY,
    )
    compiled = trigger.compile(TriggerSet((rule,), exclusions=HOLIDAYS))
    assert texts(compiled.between(us("2027-01-01"), us("2029-01-01"), 5)) == [
        "2027-12-28 09:00",
        "2028-12-25 09:00",
    ]


def test_a_trigger_whose_every_target_is_excluded_never_fires() -> None:
    start = date(2027, 12, 25)
    dates = frozenset(start + timedelta(days=n) for n in range(-40, 40))
    bounds = {"start_us": us("2027-12-01"), "end_us": us("2028-01-15")}
    moving = Trigger(Cron("0 9 25 12 *"), calendar_shift=CalendarShift.NEXT_WORKING_DAY)
    with pytest.raises(TriggerNeverFires):
        trigger.compile(TriggerSet((moving,), exclusions=dates, **bounds))


# --- Calendars --------------------------------------------------------------------------------------------


def test_rules_are_worked_out_up_to_a_year() -> None:
    source = CalendarSource((date(2026, 4, 3),), ("DTSTART:20241225\nRRULE:FREQ=YEARLY",))
    assert calendar.iso_dates(calendar.resolve(source, 2026)) == [
        "2024-12-25",
        "2025-12-25",
        "2026-04-03",
        "2026-12-25",
    ]


@pytest.mark.parametrize("rule", ["RRULE:FREQ=NEVER", "", "DTSTART:20240230\nRRULE:FREQ=YEARLY"])
def test_a_rule_that_cannot_be_read_is_named(rule: str) -> None:
    with pytest.raises(FieldInvalid) as refused:
        calendar.resolve(CalendarSource(rules=("DTSTART:20240101\nRRULE:FREQ=YEARLY", rule)), 2030)
    assert refused.value.field == "rules[1]"


def test_a_rule_that_names_every_day_is_too_much() -> None:
    with pytest.raises(FieldInvalid, match="more than 10000"):
        calendar.resolve(CalendarSource(rules=("DTSTART:20000101\nRRULE:FREQ=DAILY",)), 2046)


ICS = "\r\n".join(
    [
        "BEGIN:VCALENDAR",
        "VERSION:2.0",
        "BEGIN:VEVENT",
        "SUMMARY:Christmas,",
        "  both days",
        "DTSTART;VALUE=DATE:20261225",
        "DTEND;VALUE=DATE:20261227",
        "RRULE:FREQ=YEARLY",
        "END:VEVENT",
        "BEGIN:VEVENT",
        "DTSTART;VALUE=DATE:20270326",
        "BEGIN:VALARM",
        "DTSTART:19990101",
        "END:VALARM",
        "END:VEVENT",
        "BEGIN:VEVENT",
        "DTSTART:20270503T180000Z",
        "DTEND:20270504T020000Z",
        "END:VEVENT",
        "BEGIN:VEVENT",
        "DTSTART;VALUE=DATE:20270601",
        "STATUS:CANCELLED",
        "END:VEVENT",
        "BEGIN:VEVENT",
        "DTSTART;VALUE=DATE:20261126",
        "RRULE:FREQ=YEARLY;BYMONTH=11;BYDAY=4TH",
        "END:VEVENT",
        "END:VCALENDAR",
        "",
    ]
)


def test_an_icalendar_gives_the_dates_of_its_events() -> None:
    source = calendar.read_ics(ICS.encode())
    found = calendar.iso_dates(calendar.resolve(source, 2027))
    assert found == [
        "2026-11-26",
        "2026-12-25",
        "2026-12-26",
        "2027-03-26",
        "2027-05-03",
        "2027-05-04",
        "2027-11-25",
        "2027-12-25",
        "2027-12-26",
    ]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("", "BEGIN:VCALENDAR"),
        ("BEGIN:VCALENDAR\nEND:VCALENDAR", "no event"),
        ("BEGIN:VCALENDAR\nBEGIN:VEVENT\nDTSTART:tomorrow\nEND:VEVENT", "line 3"),
        ("BEGIN:VCALENDAR\nBEGIN:VEVENT\nEND:VEVENT", "line 2: this VEVENT has no DTSTART"),
        ("BEGIN:VCALENDAR\nBEGIN:VEVENT\nDTSTART:20270101", "line 2: this VEVENT has no end"),
        (
            "BEGIN:VCALENDAR\nBEGIN:VEVENT\nDTSTART:20270101\nRRULE:FREQ=DAILY\nEND:VEVENT",
            "line 4: only events",
        ),
        (
            "BEGIN:VCALENDAR\nBEGIN:VEVENT\nDTSTART:20270101\nDTEND:20300101\nEND:VEVENT",
            "line 2: this VEVENT lasts",
        ),
    ],
)
def test_an_icalendar_that_cannot_be_taken_is_refused_with_its_line(lines: str, words: str) -> None:
    with pytest.raises(FieldInvalid, match=words):
        calendar.read_ics(lines.encode())
