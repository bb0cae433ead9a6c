"""Recurrence rules of RFC 5545, as patterns of wall times.

A rule is days with times of day. FREQ=DAILY and slower name the days, by filters that are applied to a year
at a time, which bounds every question; ``dateutil`` does the same by walking from DTSTART, and walks to the
year 9999 where nothing matches. A FREQ below the day (HOURLY, MINUTELY, SECONDLY) whose interval divides the
day is a list of times on every day; one that does not divide it steps through wall time and takes no BYxxx
parts, since what those would mean changes from day to day. Such rules are wildcard patterns: they follow real
time across clock changes.

DTSTART bounds the rule and gives it its phase; it is an occurrence itself only if the rule names it.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import date, datetime
from typing import NamedTuple

from tickwheel.domain.cron import month_length
from tickwheel.domain.recurrence import SECOND_US, DayTimesPattern, Pattern
from tickwheel.domain.zone import DAY_S, EPOCH_ORDINAL, FOREVER_S, Zone
from tickwheel.errors import TriggerInvalid, TriggerNeverFires

TEXT_LENGTH_MAX = 16_384
COUNT_MAX = 10_000
DATE_COUNT_MAX = 1_000
HORIZON_YEARS_MAX = 50
"""A rule that names no day within so many years is taken to name none."""
_YEARS_CACHED_MAX = 32

_FREQUENCIES = ("YEARLY", "MONTHLY", "WEEKLY", "DAILY")
# Every period lies well within the horizon, or a rule could be taken for one that names nothing.
_INTERVALS_MAX = {"YEARLY": 20, "MONTHLY": 240, "WEEKLY": 1_000, "DAILY": 7_300}
_STEP_INTERVAL_MAX = 100_000
_STEPS_S = {"HOURLY": 3_600, "MINUTELY": 60, "SECONDLY": 1}
_WEEKDAYS = ("MO", "TU", "WE", "TH", "FR", "SA", "SU")
_DAY_PARTS = {"BYMONTH": 12, "BYMONTHDAY": 31, "BYYEARDAY": 366, "BYWEEKNO": 53, "BYSETPOS": 366}
_TIME_PARTS = {"BYHOUR": 23, "BYMINUTE": 59, "BYSECOND": 59}
_PARTS = {"FREQ", "INTERVAL", "COUNT", "UNTIL", "WKST", "BYDAY", *_DAY_PARTS, *_TIME_PARTS}
_ONLY_WITH = {
    "BYMONTHDAY": {*_FREQUENCIES, *_STEPS_S} - {"WEEKLY"},
    "BYWEEKNO": {"YEARLY"},
    "BYYEARDAY": {"YEARLY", "HOURLY", "MINUTELY", "SECONDLY"},
}

_TIME = re.compile(r"([0-9]{4})([0-9]{2})([0-9]{2})(?:T([0-9]{2})([0-9]{2})([0-9]{2})(Z)?)?")
_BYDAY = re.compile(r"([+-]?[0-9]{1,2})?(MO|TU|WE|TH|FR|SA|SU)")
_INTEGER = re.compile(r"[+-]?[0-9]{1,6}")


class RulePattern:
    """The wall times of a rule, with RDATE and without EXDATE."""

    __slots__ = ("_added", "_removed", "_rule", "is_wildcard")

    def __init__(self, rule: Pattern, added: Iterable[int], removed: Iterable[int]) -> None:
        self._rule = rule
        self._removed = sorted(set(removed))
        self._added = sorted(set(added) - set(self._removed))
        self.is_wildcard = rule.is_wildcard

    def next_local(self, local_s: int) -> int | None:
        index = bisect_left(self._added, local_s)
        added_s = self._added[index] if index < len(self._added) else FOREVER_S
        found_s = self._rule.next_local(local_s)
        for _ in range(len(self._removed) + 1):
            if found_s is None or not _holds(self._removed, found_s):
                break
            found_s = self._rule.next_local(found_s + 1)
        first_s = min(added_s, FOREVER_S if found_s is None else found_s)
        return None if first_s >= FOREVER_S else first_s

    def take_local(self, first_s: int, end_s: int, limit: int) -> list[int]:
        return self._merge(self._rule.take_local, first_s, end_s, limit)[:limit]

    def take_local_newest(self, first_s: int, end_s: int, limit: int) -> list[int]:
        found = self._merge(self._rule.take_local_newest, first_s, end_s, limit)
        return found[max(0, len(found) - limit) :]

    def count_local(self, first_s: int, end_s: int, count_max: int) -> int:
        count = self._rule.count_local(first_s, end_s, count_max + len(self._removed))
        count -= sum(
            self._rule.next_local(local_s) == local_s for local_s in _between(self._removed, first_s, end_s)
        )
        count += sum(
            self._rule.next_local(local_s) != local_s for local_s in _between(self._added, first_s, end_s)
        )
        return count

    def _merge(
        self, take: Callable[[int, int, int], list[int]], first_s: int, end_s: int, limit: int
    ) -> list[int]:
        removed = _between(self._removed, first_s, end_s)
        found = set(take(first_s, end_s, limit + len(removed))) - set(removed)
        return sorted(found.union(_between(self._added, first_s, end_s)))


def _between(values: list[int], first: int, end: int) -> list[int]:
    return values[bisect_left(values, first) : bisect_left(values, end)]


def _holds(values: list[int], value: int) -> bool:
    index = bisect_left(values, value)
    return index < len(values) and values[index] == value


class _BoundedDays(DayTimesPattern):
    """Days of a rule, with times of day, from DTSTART to UNTIL."""

    __slots__ = ("_bits", "_days", "_first_s", "_last_s")

    def __init__(
        self, days: _Days, times: tuple[int, ...], first_s: int, last_s: int, *, is_wildcard: bool
    ) -> None:
        super().__init__(times, HORIZON_YEARS_MAX * 12, is_wildcard=is_wildcard)
        self._days = days
        self._bits: dict[int, list[int]] = {}
        self._first_s = first_s
        self._last_s = last_s

    def _month_bits(self, year: int, month: int, length: int, first_weekday: int) -> int:
        months = self._bits.get(year)
        if months is None:
            months = [0] * 13
            for day in self._days.of_year(year):
                months[day.month] |= 1 << day.day
            if len(self._bits) >= _YEARS_CACHED_MAX:
                self._bits.clear()
            self._bits[year] = months
        return months[month]

    def next_local(self, local_s: int) -> int | None:
        if local_s > self._last_s:
            return None
        found_s = super().next_local(max(local_s, self._first_s))
        return found_s if found_s is not None and found_s <= self._last_s else None

    def take_local(self, first_s: int, end_s: int, limit: int) -> list[int]:
        return super().take_local(max(first_s, self._first_s), min(end_s, self._last_s + 1), limit)

    def take_local_newest(self, first_s: int, end_s: int, limit: int) -> list[int]:
        return super().take_local_newest(max(first_s, self._first_s), min(end_s, self._last_s + 1), limit)

    def count_local(self, first_s: int, end_s: int, count_max: int) -> int:
        return super().count_local(max(first_s, self._first_s), min(end_s, self._last_s + 1), count_max)


@dataclass(frozen=True, slots=True)
class _Days:
    """The days that a rule of FREQ=DAILY or slower names. Weekdays: 0 = Monday. None: no such part."""

    frequency: str
    interval: int
    start: date
    week_start: int
    months: frozenset[int] | None
    month_days: frozenset[int] | None
    """Negative from the month's end; so are the others that may be."""
    year_days: frozenset[int] | None
    weeks: frozenset[int] | None
    weekdays: frozenset[tuple[int, int]] | None
    """(which of them in its period or 0 for each, weekday)"""
    positions: tuple[int, ...] | None

    def of_year(self, year: int) -> list[date]:
        """Those of one calendar year, ascending."""
        first, last = date(year, 1, 1).toordinal(), date(year, 12, 31).toordinal()
        low, high = first, last
        if self.frequency == "WEEKLY" and self.positions:
            # A week that crosses the new year is one set for BYSETPOS.
            low, high = max(1, self._week_of(first)), min(date.max.toordinal(), self._week_of(last) + 6)
        periods: dict[int, list[int]] = {}
        for ordinal in range(low, high + 1):
            period = self._period(ordinal)
            if period % self.interval == 0 and self._matches(ordinal):
                periods.setdefault(period, []).append(ordinal)
        chosen = [ordinal for days in periods.values() for ordinal in self._at_positions(days)]
        return [date.fromordinal(ordinal) for ordinal in sorted(chosen) if first <= ordinal <= last]

    def _week_of(self, ordinal: int) -> int:
        """The first day of the day's week. Ordinal 1 was a Monday."""
        return ordinal - (ordinal - 1 - self.week_start) % 7

    def _period(self, ordinal: int) -> int:
        """Which period of FREQ the day is in, counted from DTSTART's."""
        day = date.fromordinal(ordinal)
        if self.frequency == "YEARLY":
            return day.year - self.start.year
        if self.frequency == "MONTHLY":
            return (day.year - self.start.year) * 12 + day.month - self.start.month
        if self.frequency == "WEEKLY":
            return (self._week_of(ordinal) - self._week_of(self.start.toordinal())) // 7
        return ordinal - self.start.toordinal()

    def _at_positions(self, days: list[int]) -> Iterable[int]:
        if self.positions is None:
            return days
        indexes = (position - 1 if position > 0 else position for position in self.positions)
        return {days[index] for index in indexes if -len(days) <= index < len(days)}

    def _matches(self, ordinal: int) -> bool:
        day = date.fromordinal(ordinal)
        if self.months is not None and day.month not in self.months:
            return False
        month_size = month_length(day.year, day.month)
        if self.month_days is not None and not _is_in(self.month_days, day.day, month_size):
            return False
        day_of_year = ordinal - date(day.year, 1, 1).toordinal() + 1
        year_size = 366 if month_length(day.year, 2) == 29 else 365
        if self.year_days is not None and not _is_in(self.year_days, day_of_year, year_size):
            return False
        if self.weeks is not None and not self._matches_week(ordinal, day.year):
            return False
        if self.weekdays is None:
            return True
        weekday = (ordinal - 1) % 7
        if self.frequency == "YEARLY" and self.months is None:
            number, size = day_of_year, year_size
        else:
            number, size = day.day, month_size
        ranks = (0, (number - 1) // 7 + 1, -((size - number) // 7) - 1)
        return any((rank, weekday) in self.weekdays for rank in ranks)

    def _matches_week(self, ordinal: int, year: int) -> bool:
        """Whether the day's week is one of BYWEEKNO: week 1 is the first with four days in its year."""
        assert self.weeks is not None
        week = self._week_of(ordinal)
        middle_year = date.fromordinal(min(max(week + 3, 1), date.max.toordinal())).year
        first = self._week_of(date(middle_year, 1, 4).toordinal())
        following = self._week_of(date(min(middle_year + 1, 9_999), 1, 4).toordinal())
        return _is_in(self.weeks, (week - first) // 7 + 1, max(52, (following - first) // 7))


def _is_in(values: frozenset[int], number: int, size: int) -> bool:
    """Whether a number from 1 to ``size`` is chosen, counted from either end."""
    return number in values or number - size - 1 in values


class _Steps:
    """Every ``step_s`` of wall time from a first one to a last one."""

    is_wildcard = True
    __slots__ = ("_range",)

    def __init__(self, first_s: int, last_s: int, step_s: int) -> None:
        self._range = range(first_s, last_s + 1, step_s)

    def _part(self, first_s: int, end_s: int) -> range:
        start, step = self._range.start, self._range.step
        low = max(0, -(-(first_s - start) // step))
        high = max(low, -(-(end_s - start) // step))
        return self._range[low:high]

    def next_local(self, local_s: int) -> int | None:
        part = self._part(local_s, FOREVER_S)
        return part[0] if part else None

    def take_local(self, first_s: int, end_s: int, limit: int) -> list[int]:
        return list(self._part(first_s, end_s)[:limit])

    def take_local_newest(self, first_s: int, end_s: int, limit: int) -> list[int]:
        part = self._part(first_s, end_s)
        return list(part[max(0, len(part) - limit) :])

    def count_local(self, first_s: int, end_s: int, count_max: int) -> int:
        return len(self._part(first_s, end_s))


class _Listed:
    """Wall times in a list: a rule with COUNT, or none at all."""

    __slots__ = ("_values", "is_wildcard")

    def __init__(self, values: list[int], *, is_wildcard: bool) -> None:
        self._values = values
        self.is_wildcard = is_wildcard

    def next_local(self, local_s: int) -> int | None:
        index = bisect_left(self._values, local_s)
        return self._values[index] if index < len(self._values) else None

    def take_local(self, first_s: int, end_s: int, limit: int) -> list[int]:
        return _between(self._values, first_s, end_s)[:limit]

    def take_local_newest(self, first_s: int, end_s: int, limit: int) -> list[int]:
        found = _between(self._values, first_s, end_s)
        return found[max(0, len(found) - limit) :]

    def count_local(self, first_s: int, end_s: int, count_max: int) -> int:
        return len(_between(self._values, first_s, end_s))


class _Text(NamedTuple):
    """The lines, read: wall times in seconds since 1970-01-01T00:00:00."""

    start_s: int | None
    parts: dict[str, str]
    added: list[int]
    removed: list[int]


def parse(text: str, zone: Zone, start_us: int | None) -> Pattern:
    """The pattern of a text; ``start_us`` stands in for a missing DTSTART.

    Raises TriggerInvalid or TriggerNeverFires.
    """
    lines = _read_lines(text, zone)
    start_s = lines.start_s
    if start_s is None:
        if start_us is None:
            raise _invalid("it needs a DTSTART line, or the schedule a start_time")
        start_s = zone.local_at(start_us // SECOND_US)
    if lines.parts:
        rule = _rule(lines.parts, start_s, zone)
        if rule.next_local(start_s) is None:
            raise TriggerNeverFires(
                "rrule.rule", f"the rule names no instant within {HORIZON_YEARS_MAX} years of its start"
            )
    else:
        rule = _Listed([], is_wildcard=False)
    return RulePattern(rule, lines.added, lines.removed)


def _invalid(reason: str) -> TriggerInvalid:
    return TriggerInvalid("rrule.rule", reason)


def _read_lines(text: str, zone: Zone) -> _Text:
    if len(text) > TEXT_LENGTH_MAX:
        raise _invalid(f"it is longer than {TEXT_LENGTH_MAX} characters")
    start_s: int | None = None
    parts: dict[str, str] = {}
    dates: dict[str, list[int]] = {"RDATE": [], "EXDATE": []}
    for line in text.upper().split():
        if line.startswith("FREQ="):
            line = "RRULE:" + line
        head, colon, value = line.partition(":")
        name, *parameters = head.split(";")
        if not colon or name not in ("DTSTART", "RRULE", "RDATE", "EXDATE"):
            raise _invalid(f"{line[:40]!r} is not a DTSTART, RRULE, RDATE or EXDATE line")
        if name == "RRULE":
            if parts or parameters:
                raise _invalid("it has one RRULE line, without parameters")
            parts = _read_parts(value)
            continue
        _check_parameters(parameters, zone)
        times = [_local_time(word, zone) for word in value.split(",")]
        if name == "DTSTART":
            if start_s is not None or len(times) != 1:
                raise _invalid("it has one DTSTART")
            start_s = times[0]
        else:
            dates[name] += times
            if len(dates[name]) > DATE_COUNT_MAX:
                raise _invalid(f"more than {DATE_COUNT_MAX} dates in {name}")
    if not parts and not dates["RDATE"]:
        raise _invalid("it has neither an RRULE nor an RDATE line")
    return _Text(start_s, parts, dates["RDATE"], dates["EXDATE"])


def _check_parameters(parameters: list[str], zone: Zone) -> None:
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name == "TZID":
            if value != zone.name.upper():
                raise _invalid(f"TZID is {value[:64]}, but the trigger's time_zone is {zone.name}")
        elif parameter not in ("VALUE=DATE", "VALUE=DATE-TIME"):
            raise _invalid(f"cannot read the parameter {parameter[:40]!r}")


def _local_time(word: str, zone: Zone, *, is_end: bool = False) -> int:
    """A DATE or DATE-TIME as wall time; a date alone is its midnight, or its end for UNTIL."""
    match = _TIME.fullmatch(word)
    try:
        if match is None:
            raise ValueError(word)
        year, month, day, *clock = match.groups()[:6]
        hour, minute, second = (int(part or 0) for part in clock)
        at = datetime(int(year), int(month), int(day), hour, minute, second)
    except ValueError as error:
        raise _invalid(f"{word[:40]!r} is not a time such as 20270328T023000") from error
    local_s = (at.toordinal() - EPOCH_ORDINAL) * DAY_S + hour * 3_600 + minute * 60 + second
    if match.group(7):
        return zone.local_at(local_s)
    if is_end and match.group(4) is None:
        return local_s + DAY_S - 1
    return local_s


def _read_parts(value: str) -> dict[str, str]:
    parts: dict[str, str] = {}
    for word in value.strip(";").split(";"):
        name, equals, part = word.partition("=")
        if not equals or name not in _PARTS:
            raise _invalid(f"cannot read the part {word[:40]!r}")
        if name in parts:
            raise _invalid(f"{name} comes twice")
        parts[name] = part
    frequency = parts.get("FREQ", "")
    if frequency not in _FREQUENCIES and frequency not in _STEPS_S:
        raise _invalid(f"FREQ is {frequency[:20]!r}; it is one of {', '.join([*_FREQUENCIES, *_STEPS_S])}")
    if "COUNT" in parts and "UNTIL" in parts:
        raise _invalid("COUNT and UNTIL exclude each other")
    for name, frequencies in _ONLY_WITH.items():
        if name in parts and frequency not in frequencies:
            raise _invalid(f"{name} does not go with FREQ={frequency}")
    return parts


def _integers(name: str, text: str, low: int, high: int, *, is_signed: bool) -> list[int]:
    values = []
    for word in text.split(","):
        if _INTEGER.fullmatch(word) is None:
            raise _invalid(f"{name} is {word[:20]!r}, not a number")
        number = int(word)
        if not low <= (abs(number) if is_signed else number) <= high:
            raise _invalid(f"{name} is {number}, not within {low} to {high}")
        values.append(number)
    return sorted(set(values))


def _rule(parts: dict[str, str], start_s: int, zone: Zone) -> Pattern:
    """The pattern of an RRULE's parts."""
    frequency = parts["FREQ"]
    interval_max = _INTERVALS_MAX.get(frequency, _STEP_INTERVAL_MAX)
    interval = _integers("INTERVAL", parts.get("INTERVAL", "1"), 1, interval_max, is_signed=False)[0]
    count = _integers("COUNT", parts["COUNT"], 1, COUNT_MAX, is_signed=False)[0] if "COUNT" in parts else None
    last_s = _local_time(parts["UNTIL"], zone, is_end=True) if "UNTIL" in parts else FOREVER_S
    if last_s < start_s:
        raise _invalid("UNTIL is before DTSTART")
    is_wildcard = frequency in _STEPS_S
    step_s = _STEPS_S.get(frequency, DAY_S) * interval
    by_parts = [name for name in parts if name.startswith("BY")]
    if is_wildcard and DAY_S % step_s:
        if by_parts:
            reason = f"an interval of {step_s} s does not divide a day, so it takes no {by_parts[0]}"
            raise _invalid(reason)
        until_s = min(last_s, FOREVER_S if count is None else start_s + (count - 1) * step_s)
        return _Steps(start_s, until_s, step_s)

    times = _times(parts, frequency, step_s, start_s % DAY_S)
    if not times:
        raise TriggerNeverFires("rrule.rule", "its interval never meets BYHOUR, BYMINUTE and BYSECOND")
    if "BYSETPOS" in parts and (is_wildcard or len(times) != 1):
        raise _invalid("BYSETPOS wants FREQ=DAILY or slower and one time of day")
    days = _days(parts, "DAILY" if is_wildcard else frequency, 1 if is_wildcard else interval, start_s)
    rule = _BoundedDays(days, times, start_s, last_s, is_wildcard=is_wildcard)
    if count is None:
        return rule
    return _Listed(rule.take_local(start_s, FOREVER_S, count), is_wildcard=is_wildcard)


def _times(parts: dict[str, str], frequency: str, step_s: int, start_time_s: int) -> tuple[int, ...]:
    """The times of day, in seconds, ascending."""
    chosen: dict[str, list[int] | None] = {
        name: _integers(name, parts[name], 0, high, is_signed=False) if name in parts else None
        for name, high in _TIME_PARTS.items()
    }
    hours, minutes, seconds = chosen["BYHOUR"], chosen["BYMINUTE"], chosen["BYSECOND"]
    if frequency in _STEPS_S:
        # Below the day BYxxx expands what is finer than FREQ, and limits the rest.
        candidates = set(range(start_time_s % step_s, DAY_S, step_s))
        if frequency == "HOURLY" and minutes is not None:
            candidates = {
                time_s - time_s % 3_600 + minute * 60 + time_s % 60
                for time_s in candidates
                for minute in minutes
            }
        if frequency in ("HOURLY", "MINUTELY") and seconds is not None:
            candidates = {time_s - time_s % 60 + second for time_s in candidates for second in seconds}
        return tuple(
            time_s
            for time_s in sorted(candidates)
            if (hours is None or time_s // 3_600 in hours)
            and (minutes is None or time_s // 60 % 60 in minutes)
            and (seconds is None or time_s % 60 in seconds)
        )
    start_hour, start_minute, start_second = start_time_s // 3_600, start_time_s // 60 % 60, start_time_s % 60
    return tuple(
        sorted(
            hour * 3_600 + minute * 60 + second
            for hour in (hours if hours is not None else [start_hour])
            for minute in (minutes if minutes is not None else [start_minute])
            for second in (seconds if seconds is not None else [start_second])
        )
    )


def _days(parts: dict[str, str], frequency: str, interval: int, start_s: int) -> _Days:
    """The days of a rule, with what DTSTART says where no part does."""
    start = date.fromordinal(start_s // DAY_S + EPOCH_ORDINAL)
    week_start = parts.get("WKST", "MO")
    if week_start not in _WEEKDAYS:
        raise _invalid(f"WKST is {week_start[:20]!r}, not a weekday such as MO")
    chosen = {
        name: frozenset(_integers(name, parts[name], 1, high, is_signed=name != "BYMONTH"))
        for name, high in _DAY_PARTS.items()
        if name in parts
    }
    weekdays = _weekdays(parts["BYDAY"], frequency) if "BYDAY" in parts else None
    if weekdays is None and not chosen.keys() & {"BYMONTHDAY", "BYYEARDAY", "BYWEEKNO"}:
        if frequency == "YEARLY":
            chosen.setdefault("BYMONTH", frozenset({start.month}))
        if frequency in ("YEARLY", "MONTHLY"):
            chosen["BYMONTHDAY"] = frozenset({start.day})
        elif frequency == "WEEKLY":
            weekdays = frozenset({(0, start.weekday())})
    return _Days(
        frequency=frequency,
        interval=interval,
        start=start,
        week_start=_WEEKDAYS.index(week_start),
        months=chosen.get("BYMONTH"),
        month_days=chosen.get("BYMONTHDAY"),
        year_days=chosen.get("BYYEARDAY"),
        weeks=chosen.get("BYWEEKNO"),
        weekdays=weekdays,
        positions=tuple(chosen["BYSETPOS"]) if "BYSETPOS" in chosen else None,
    )


def _weekdays(text: str, frequency: str) -> frozenset[tuple[int, int]]:
    found = set()
    for word in text.split(","):
        match = _BYDAY.fullmatch(word)
        if match is None:
            raise _invalid(f"BYDAY is {word[:20]!r}, not a weekday such as MO or -1FR")
        rank = int(match.group(1) or 0)
        if match.group(1) and (frequency not in ("MONTHLY", "YEARLY") or not 1 <= abs(rank) <= 53):
            raise _invalid(f"{word} goes with FREQ=MONTHLY or YEARLY and a number from 1 to 53")
        found.add((rank, _WEEKDAYS.index(match.group(2))))
    return frozenset(found)
