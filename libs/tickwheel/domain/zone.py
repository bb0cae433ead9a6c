"""Time zones as tables: which UTC offset holds when, and which wall times a change removes or repeats.

The data are those of the ``tzdata`` package and never those of the machine: two nodes with different system
files would compute different instants for one schedule. The TZif files are read here (RFC 9636), because the
standard ``zoneinfo`` answers "which offset at this instant" but does not show the changes themselves, and
everything that the DST policies decide happens at the changes. Tests hold the result to ``zoneinfo`` for
every zone.

A zone is a row of **segments** of constant offset. With ``local = instant + offset`` each segment covers a
stretch of wall time; where the next stretch starts later there is a *gap*, where it starts earlier the two
*overlap*. All numbers here are whole seconds since 1970-01-01, in UTC (``_s``) or on the wall (``_local_s``).
"""

from __future__ import annotations

import pkgutil
import re
import struct
from array import array
from bisect import bisect_right
from datetime import date
from functools import lru_cache
from typing import NamedTuple

import tzdata  # type: ignore[import-untyped]

from tickwheel.errors import TimeZoneUnknown

DAY_S = 86_400
EPOCH_ORDINAL = 719_163
"""``date(1970, 1, 1).toordinal()``"""
DAY_MIN = 1 - EPOCH_ORDINAL
DAY_MAX = date.max.toordinal() - EPOCH_ORDINAL
INSTANT_S_MIN = (DAY_MIN + 1) * DAY_S
INSTANT_S_MAX = (DAY_MAX + 1) * DAY_S - 1
"""9999-12-31T23:59:59Z: there is no occurrence after it."""
FOREVER_S = 1 << 60
"""Start (negated) of a zone's first segment and end of its last."""

_NAME_LENGTH_MAX = 64
_REFUSED = {
    "Factory": "it stands for a machine that was never configured",
    "localtime": "it means another zone on every machine",
    "posixrules": "it means another zone on every machine",
}
_YEARS_AHEAD = 3
_SEGMENTS_CACHED_MAX = 512


class Segment(NamedTuple):
    """A stretch ``[start_s, end_s)`` of constant ``offset_s``, and how its wall time meets its neighbours."""

    start_s: int
    end_s: int
    offset_s: int
    seen_until_local_s: int
    """Wall times below this already happened in an earlier segment; above the segment's first, it opens a
    gap.
    """
    recurs_from_local_s: int
    """Wall times from here on happen once more in a later segment."""

    @property
    def gap_size_s(self) -> int:
        """Seconds of wall time that the change at ``start_s`` jumps over; 0 when it jumps over none."""
        return max(0, self.start_s + self.offset_s - self.seen_until_local_s)


class Zone:
    """The segments of one IANA zone, extended by the zone's rule as far as they are asked for."""

    __slots__ = (
        "_cache",
        "_offsets",
        "_rule",
        "_rule_from_s",
        "_rule_year_next",
        "_safe_until_s",
        "_starts",
        "name",
    )

    def __init__(
        self, name: str, starts: array[int], offsets: array[int], rule: _Rule | None, rule_from_s: int
    ) -> None:
        self.name = name
        self._starts = starts
        self._offsets = offsets
        self._rule = rule
        self._rule_from_s = rule_from_s
        self._cache: dict[int, Segment] = {}
        self._safe_until_s = FOREVER_S
        self._rule_year_next = 10_000
        if rule is not None:
            self._rule_year_next = date.fromordinal(rule_from_s // DAY_S + EPOCH_ORDINAL).year
            self._safe_until_s = -FOREVER_S
            self._extend(2_040)

    def index_at(self, instant_s: int) -> int:
        """The index of the segment that holds ``instant_s``."""
        if instant_s >= self._safe_until_s:
            day = min(max(instant_s // DAY_S, DAY_MIN), DAY_MAX)
            self._extend(date.fromordinal(day + EPOCH_ORDINAL).year + _YEARS_AHEAD)
        return bisect_right(self._starts, instant_s) - 1

    def segment(self, index: int) -> Segment:
        """The segment at an index got from ``index_at``, or one more than such a one."""
        found = self._cache.get(index)
        if found is not None:
            return found
        starts, offsets = self._starts, self._offsets
        if index + 4 >= len(starts) and self._rule_year_next < 10_000:
            self._extend(self._rule_year_next + _YEARS_AHEAD)
            starts, offsets = self._starts, self._offsets
        count = len(starts)
        end_s = starts[index + 1] if index + 1 < count else FOREVER_S
        # Two neighbours suffice: no zone changes three times within the length of one change.
        seen = max(
            (starts[i] + offsets[i - 1] for i in range(max(1, index - 1), index + 1)), default=-FOREVER_S
        )
        recurs = min(
            (starts[i] + offsets[i] for i in range(index + 1, min(index + 3, count))), default=FOREVER_S
        )
        made = Segment(starts[index], end_s, offsets[index], seen, recurs)
        if len(self._cache) >= _SEGMENTS_CACHED_MAX:
            self._cache.clear()
        self._cache[index] = made
        return made

    def offset_at(self, instant_s: int) -> int:
        """Seconds to add to UTC for the wall time at this instant."""
        index = self.index_at(instant_s)
        return self._offsets[index]

    def local_at(self, instant_s: int) -> int:
        """The wall time at an instant."""
        return instant_s + self.offset_at(instant_s)

    def instants_of(self, local_s: int) -> tuple[int, ...]:
        """The instants at which the wall shows ``local_s``: none in a gap, two in an overlap, else one."""
        index = self.index_at(local_s - 2 * DAY_S)
        found: list[int] = []
        while True:
            segment = self.segment(index)
            instant_s = local_s - segment.offset_s
            if segment.start_s <= instant_s < segment.end_s:
                found.append(instant_s)
            if segment.end_s > local_s + 2 * DAY_S:
                return tuple(found)
            index += 1

    def day_stretches(self, day: int) -> list[tuple[int, int]]:
        """The stretches ``[start_s, end_s)`` of a local date (days since 1970): none if the zone skipped
        it.
        """
        first_local_s, last_local_s = day * DAY_S, (day + 1) * DAY_S
        index = self.index_at(first_local_s - 2 * DAY_S)
        found: list[tuple[int, int]] = []
        while True:
            segment = self.segment(index)
            start_s = max(segment.start_s, first_local_s - segment.offset_s)
            end_s = min(segment.end_s, last_local_s - segment.offset_s)
            if start_s < end_s:
                found.append((start_s, end_s))
            if segment.end_s > last_local_s + 2 * DAY_S:
                return found
            index += 1

    def _extend(self, year_max: int) -> None:
        """Adds what the zone's rule says for the years up to ``year_max``, which the file does not list."""
        rule = self._rule
        if rule is None or self._rule_year_next >= 10_000:
            self._safe_until_s = FOREVER_S
            return
        last_year = min(max(year_max, self._rule_year_next), 9_999)
        starts, offsets = array("q", self._starts), array("q", self._offsets)
        for year in range(self._rule_year_next, last_year + 1):
            for start_s, offset_s in rule.changes(year):
                if start_s > self._rule_from_s:
                    _append_change(starts, offsets, start_s, offset_s)
        # Replaced as a whole, so that another thread never sees one array longer than the other.
        self._starts, self._offsets = starts, offsets
        self._cache.clear()
        self._rule_year_next = last_year + 1
        self._safe_until_s = (
            FOREVER_S
            if last_year == 9_999
            else (date(last_year + 1 - _YEARS_AHEAD, 1, 1).toordinal() - EPOCH_ORDINAL) * DAY_S
        )


@lru_cache(maxsize=1_024)
def zone(name: str) -> Zone:
    """The zone of an IANA name; TimeZoneUnknown if it has no place in a cluster's data."""
    if not name:
        raise TimeZoneUnknown(name, "it is empty")
    if len(name) > _NAME_LENGTH_MAX:
        raise TimeZoneUnknown(name[:_NAME_LENGTH_MAX], f"it is longer than {_NAME_LENGTH_MAX} characters")
    if name in _REFUSED:
        raise TimeZoneUnknown(name, _REFUSED[name])
    # The package's own list decides, so neither paths, nor folders, nor its text files are ever opened.
    if name not in _names():
        raise TimeZoneUnknown(name, f"IANA tzdata {tzdata_version()} has no zone of that name")
    data = pkgutil.get_data("tzdata", f"zoneinfo/{name}")
    if data is None:
        raise TimeZoneUnknown(name, "the tzdata package does not hold it")
    return _read(name, data)


def tzdata_version() -> str:
    """The version of the zone data that instants are computed from, such as ``2025b``."""
    return str(tzdata.IANA_VERSION)


@lru_cache(maxsize=1)
def _names() -> frozenset[str]:
    data = pkgutil.get_data("tzdata", "zones")
    return frozenset((data or b"").decode("ascii").split())


class _DayRule(NamedTuple):
    """The day of a yearly change: ``M`` month.week.weekday, ``J`` day without Feb 29, or zero-based day."""

    kind: str
    month: int
    week: int
    day: int
    time_s: int

    def local_s(self, year: int) -> int:
        if self.kind == "M":
            first = date(year, self.month, 1)
            # POSIX counts weekdays from Sunday, and week 5 is the last one there is.
            day = 1 + (self.day - (first.weekday() + 1)) % 7 + 7 * (self.week - 1)
            month_length = (
                (date(year + self.month // 12, self.month % 12 + 1, 1) - first).days if year < 9_999 else 31
            )
            while day > month_length:
                day -= 7
            ordinal = first.toordinal() + day - 1
        elif self.kind == "J":
            leap = year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
            ordinal = date(year, 1, 1).toordinal() + self.day - 1 + (1 if leap and self.day >= 60 else 0)
        else:
            ordinal = date(year, 1, 1).toordinal() + self.day
        return (ordinal - EPOCH_ORDINAL) * DAY_S + self.time_s


class _Rule(NamedTuple):
    """The rule at the end of a TZif file: what holds for ever after its last listed change."""

    standard_s: int
    daylight_s: int
    begins: _DayRule
    ends: _DayRule

    def changes(self, year: int) -> list[tuple[int, int]]:
        """The year's two changes as (instant, new offset), in order."""
        begins_s = self.begins.local_s(year) - self.standard_s
        ends_s = self.ends.local_s(year) - self.daylight_s
        return sorted([(begins_s, self.daylight_s), (ends_s, self.standard_s)], key=lambda change: change[0])


def _append_change(starts: array[int], offsets: array[int], start_s: int, offset_s: int) -> None:
    """Adds a change unless it changes nothing (a new abbreviation)."""
    if start_s == starts[-1]:
        offsets[-1] = offset_s
        if len(offsets) > 1 and offsets[-2] == offset_s:
            starts.pop()
            offsets.pop()
        return
    if offset_s != offsets[-1]:
        starts.append(start_s)
        offsets.append(offset_s)


_HEADER = struct.Struct(">4sc15x6l")


def _read(name: str, data: bytes) -> Zone:
    """Reads a TZif file of version 2 or newer."""
    magic, version, *counts = _HEADER.unpack_from(data)
    if magic != b"TZif" or version < b"2":
        raise TimeZoneUnknown(name, "its data file is not TZif of version 2 or newer")
    ut_count, standard_count, leap_count, change_count, type_count, text_count = counts
    block_bytes = change_count * 5 + type_count * 6 + text_count + leap_count * 8 + standard_count + ut_count
    at = _HEADER.size + block_bytes
    _, _, ut_count, standard_count, leap_count, change_count, type_count, text_count = _HEADER.unpack_from(
        data, at
    )
    at += _HEADER.size
    times = struct.unpack_from(f">{change_count}q", data, at)
    at += change_count * 8
    type_indexes = data[at : at + change_count]
    at += change_count
    types = [struct.unpack_from(">lBB", data, at + 6 * i) for i in range(type_count)]
    at += type_count * 6 + text_count + leap_count * 12 + standard_count + ut_count
    footer = data[at:].strip(b"\n").decode("ascii")

    starts, offsets = array("q", [-FOREVER_S]), array("q", [types[0][0]])
    for time_s, type_index in zip(times, type_indexes, strict=True):
        _append_change(starts, offsets, time_s, types[type_index][0])
    # The rule begins after the last listed change, also where that one renames the zone and moves no hand.
    return Zone(name, starts, offsets, _read_rule(name, footer), times[-1] if times else 0)


_OFFSET = r"(?:<[^>]+>|[A-Za-z]+)([+-]?\d+(?::\d+){0,2})"
_DAY = r"(M\d+\.\d+\.\d+|J\d+|\d+)(?:/([+-]?\d+(?::\d+){0,2}))?"
_RULE = re.compile(rf"{_OFFSET}(?:(?:<[^>]+>|[A-Za-z]+)([+-]?\d+(?::\d+){{0,2}})?,{_DAY},{_DAY})?")


def _read_rule(name: str, text: str) -> _Rule | None:
    """Reads a POSIX TZ string; None if the zone has no yearly changes."""
    match = _RULE.fullmatch(text)
    if match is None:
        raise TimeZoneUnknown(name, f"its rule {text!r} cannot be read")
    standard, daylight, begin_day, begin_time, end_day, end_time = match.groups()
    if begin_day is None:
        return None
    standard_s = -_seconds(standard)  # POSIX counts offsets westwards
    daylight_s = -_seconds(daylight) if daylight else standard_s + 3_600
    return _Rule(standard_s, daylight_s, _day_rule(begin_day, begin_time), _day_rule(end_day, end_time))


def _day_rule(day: str, time: str | None) -> _DayRule:
    time_s = _seconds(time) if time else 7_200
    if day.startswith("M"):
        month, week, weekday = (int(part) for part in day[1:].split("."))
        return _DayRule("M", month, week, weekday, time_s)
    if day.startswith("J"):
        return _DayRule("J", 0, 0, int(day[1:]), time_s)
    return _DayRule("D", 0, 0, int(day), time_s)


def _seconds(text: str) -> int:
    sign = -1 if text.startswith("-") else 1
    parts = [int(part) for part in text.lstrip("+-").split(":")] + [0, 0]
    return sign * (parts[0] * 3_600 + parts[1] * 60 + parts[2])
