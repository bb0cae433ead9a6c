"""Calendars: dates, and rules that name dates; and what of an iCalendar becomes one.

A rule is RFC 5545 lines (DTSTART and RRULE, RDATE or EXDATE) of which only the dates count. Rules go on for
ever, so they are worked out up to a year, `effective_year`, and schedules are computed from those dates
alone: what a schedule was computed from stands in its stored trigger, and needs no calendar to be read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date, timedelta

from tickwheel.domain import ids, trigger
from tickwheel.domain.recurrence import SECOND_US
from tickwheel.domain.trigger import EXCLUSION_COUNT_MAX, Rrule, Trigger, TriggerSet
from tickwheel.domain.zone import DAY_S, EPOCH_ORDINAL
from tickwheel.errors import FieldInvalid, InvalidArgument

RULE_COUNT_MAX = 500
RULE_CHARACTERS_MAX = 2_000
YEARS_AHEAD = 20
"""How far rules are worked out, counted from the year in which that is done."""
YEARS_AHEAD_MIN = 10
"""They are worked out anew when less than this is left."""
ICS_BYTES_MAX = 1 << 20
EVENT_DAYS_MAX = 366
_LINES_MAX = 100_000
_DAY_US = DAY_S * SECOND_US
_DATE = re.compile(r"(\d{4})(\d{2})(\d{2})(?:T\d{6}Z?)?")
_DAYS = re.compile(r"P(?:(\d{1,3})W|(\d{1,3})D)(?:T[0-9HMS]+)?")


@dataclass(frozen=True, slots=True)
class CalendarSource:
    """What a calendar says, as it was given."""

    dates: tuple[date, ...] = ()
    rules: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CalendarRecord:
    """A calendar at one of its revisions."""

    uid: bytes
    tenant: str
    name: str
    """The last part of its name."""
    revision: int
    create_us: int
    update_us: int
    display_name: str
    labels: dict[str, str]
    source: CalendarSource
    dates: frozenset[date]
    """The source, worked out up to `effective_year`."""
    effective_year: int

    @property
    def etag(self) -> str:
        """A calendar that was made anew under the same name never has the etag of the one before."""
        return f"{self.uid.hex()[:8]}-{self.revision}"

    @property
    def full_name(self) -> str:
        return calendar_name(self.tenant, self.name)


def calendar_name(tenant: str, calendar: str) -> str:
    return f"{ids.tenant_name(tenant)}/calendars/{calendar}"


def year_of(now_us: int) -> int:
    """The UTC year of an instant."""
    return date.fromordinal(now_us // _DAY_US + EPOCH_ORDINAL).year


def resolve(source: CalendarSource, effective_year: int) -> frozenset[date]:
    """The dates that it names up to the end of a year; those given one by one count whatever their year.

    Raises:
        FieldInvalid: a rule cannot be read (`rules[n]`), or there are too many dates.
    """
    if len(source.rules) > RULE_COUNT_MAX:
        raise FieldInvalid("rules", f"{len(source.rules)} are more than {RULE_COUNT_MAX}")
    found = set(source.dates)
    end_us = (date(effective_year, 12, 31).toordinal() - EPOCH_ORDINAL + 1) * _DAY_US - 1
    for index, text in enumerate(source.rules):
        field = f"rules[{index}]"
        if len(text) > RULE_CHARACTERS_MAX:
            raise FieldInvalid(field, f"{len(text)} characters are more than {RULE_CHARACTERS_MAX}")
        try:
            compiled = trigger.compile(TriggerSet((Trigger(rrule=Rrule(text)),)))
            instants = compiled.between(-1, end_us, EXCLUSION_COUNT_MAX + 1)
        except InvalidArgument as error:
            raise FieldInvalid(field, getattr(error, "reason", str(error))) from error
        found.update(date.fromordinal(instant_us // _DAY_US + EPOCH_ORDINAL) for instant_us in instants)
        if len(found) > EXCLUSION_COUNT_MAX:
            break
    if len(found) > EXCLUSION_COUNT_MAX:
        raise FieldInvalid("dates", f"with those of the rules they are more than {EXCLUSION_COUNT_MAX}")
    return frozenset(found)


def read_ics(data: bytes) -> CalendarSource:
    """The dates of an iCalendar's events, and rules for those that recur every year.

    Raises:
        FieldInvalid: it is none, or an event cannot be taken: with the number of its line.
    """
    if len(data) > ICS_BYTES_MAX:
        raise FieldInvalid("ics", f"{len(data)} bytes are more than {ICS_BYTES_MAX}")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FieldInvalid("ics", f"it is not UTF-8: {error.reason} at byte {error.start}") from error
    dates: set[date] = set()
    rules: list[str] = []
    event: _Event | None = None
    depth, has_calendar = 0, False
    for number, line in _unfolded(text):
        name, value = _property(line)
        if name == "BEGIN":
            has_calendar |= value == "VCALENDAR"
            if event is not None:
                # A part of an event, such as an alarm, has dates of its own: they are not the event's.
                depth += 1
            elif value == "VEVENT":
                event = _Event(number)
        elif name == "END" and event is not None and depth:
            depth -= 1
        elif name == "END" and event is not None:
            if value != "VEVENT":
                raise _bad(number, f"END:{value[:20]} stands where END:VEVENT is wanted")
            event.add_to(dates, rules)
            event = None
        elif event is not None and not depth:
            event.take(name, value, number)
    if not has_calendar:
        raise FieldInvalid("ics", "it has no BEGIN:VCALENDAR")
    if event is not None:
        raise _bad(event.line, "this VEVENT has no end")
    if not dates and not rules:
        raise FieldInvalid("ics", "it has no event with a date")
    return CalendarSource(tuple(sorted(dates)), tuple(dict.fromkeys(rules)))


class _Event:
    """One VEVENT while its lines come."""

    def __init__(self, line: int) -> None:
        self.line = line
        self._first: date | None = None
        self._end: date | None = None
        self._ends_at_midnight = True
        self._day_count: int | None = None
        self._rule = ""
        self._more: list[date] = []
        self._without: list[date] = []
        self._cancelled = False

    def take(self, name: str, value: str, number: int) -> None:
        if name == "DTSTART":
            self._first = _date(value, number)
        elif name == "DTEND":
            self._end = _date(value, number)
            # A time of day falls into its day; a date, or a midnight, is the day after the last.
            self._ends_at_midnight = "T" not in value or "T000000" in value
        elif name == "DURATION":
            match = _DAYS.fullmatch(value)
            if match is not None:
                weeks, days = match.groups()
                self._day_count = int(weeks) * 7 if weeks else int(days)
        elif name == "RRULE":
            if self._rule:
                raise _bad(number, "an event with several RRULE lines is not taken")
            if "FREQ=YEARLY" not in value.upper().split(";"):
                raise _bad(number, "only events that recur every year (FREQ=YEARLY) are taken")
            self._rule = value.upper()
        elif name in ("RDATE", "EXDATE"):
            into = self._more if name == "RDATE" else self._without
            into += [_date(word.partition("/")[0], number) for word in value.split(",")]
        elif name == "STATUS":
            self._cancelled = value.upper() == "CANCELLED"

    def add_to(self, dates: set[date], rules: list[str]) -> None:
        if self._cancelled:
            return
        if self._first is None:
            raise _bad(self.line, "this VEVENT has no DTSTART")
        count = self._day_count or 1
        if self._end is not None:
            count = (self._end - self._first).days + (0 if self._ends_at_midnight else 1)
        if not 0 <= count <= EVENT_DAYS_MAX:
            raise _bad(self.line, f"this VEVENT lasts {count} days, not 1 to {EVENT_DAYS_MAX}")
        # An event of several days is as many rules, each a day later.
        for offset in range(max(1, count)):
            later = timedelta(days=offset)
            if self._rule and offset and "BY" in self._rule:
                raise _bad(self.line, "an event of several days with a BY part in its rule is not taken")
            if not self._rule:
                dates.update(day + later for day in {self._first, *self._more} - set(self._without))
                continue
            lines = [f"DTSTART:{self._first + later:%Y%m%d}", f"RRULE:{self._rule}"]
            for name, days in (("RDATE", self._more), ("EXDATE", self._without)):
                if days:
                    lines.append(f"{name}:" + ",".join(f"{day + later:%Y%m%d}" for day in days))
            rules.append("\n".join(lines))


def _unfolded(text: str) -> Iterator[tuple[int, str]]:
    """The logical lines, numbered by their first: one that starts with a blank continues the one before."""
    held, held_number = "", 0
    for number, line in enumerate(text.splitlines(), start=1):
        if number > _LINES_MAX:
            raise FieldInvalid("ics", f"it has more than {_LINES_MAX} lines")
        if line[:1] in (" ", "\t"):
            held += line[1:]
            continue
        if held:
            yield held_number, held
        held, held_number = line, number
    if held:
        yield held_number, held


def _property(line: str) -> tuple[str, str]:
    head, _, value = line.partition(":")
    return head.partition(";")[0].strip().upper(), value.strip()


def _date(text: str, number: int) -> date:
    match = _DATE.fullmatch(text.strip().upper())
    try:
        if match is None:
            raise ValueError(text)
        return date(*(int(part) for part in match.groups()))
    except ValueError as error:
        raise _bad(number, f"{text[:40]!r} is not a date such as 20271225") from error


def _bad(number: int, reason: str) -> FieldInvalid:
    return FieldInvalid("ics", f"line {number}: {reason}")


def merged(first: CalendarSource, second: CalendarSource) -> CalendarSource:
    """What either of them says."""
    return CalendarSource(
        tuple(sorted({*first.dates, *second.dates})), tuple(dict.fromkeys([*first.rules, *second.rules]))
    )


def iso_dates(dates: Sequence[date] | frozenset[date]) -> list[str]:
    """As they are stored and answered: ascending."""
    return [day.isoformat() for day in sorted(dates)]
