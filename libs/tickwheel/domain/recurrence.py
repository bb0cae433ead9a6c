"""From wall-clock patterns to instants: the engine behind every trigger.

A **pattern** knows naive wall times only: "every day at 02:30". A **source** gives instants. ``ZonedSource``
maps the one to the other, segment of constant offset by segment, and is the only place that knows what
happens when clocks change:

* a *wildcard* pattern steps through real time: wall times in a gap are absent, in an overlap both passes
  fire;
* a *fixed-time* pattern obeys its two policies. In a gap: RUN_AT_GAP_END fires once at the first instant
  after it, however many of its times fell in; RUN_SHIFTED fires each as late after the change as it lay after
  the gap's start; SKIP does not fire. In an overlap: the FIRST pass, the SECOND, or BOTH.

Patterns count in seconds of wall time since 1970-01-01T00:00:00 (``local_s``), sources in microseconds since
the Unix epoch. Every answer is bounded: by ``limit``, by ``until_us``, and by the calendar's cycle of 400
years.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from datetime import date
from enum import StrEnum
from functools import lru_cache
from typing import Protocol

from tickwheel.domain.cron import CronExpression, month_length
from tickwheel.domain.zone import (
    DAY_MAX,
    DAY_MIN,
    DAY_S,
    EPOCH_ORDINAL,
    FOREVER_S,
    INSTANT_S_MAX,
    INSTANT_S_MIN,
    Segment,
    Zone,
)

SECOND_US = 1_000_000
INSTANT_US_MAX = INSTANT_S_MAX * SECOND_US
_CYCLE_MONTHS = 4_800
"""The Gregorian calendar repeats after 400 years: what did not match within them never does."""
_SEGMENTS_MAX = 1_200
"""Changes of offset that a search crosses: a little more than 400 years of two a year."""
_CHANGE_S_MAX = 2 * DAY_S
"""No change of offset is wider: the date line, a whole day, is the widest there has been."""


class DstGapPolicy(StrEnum):
    RUN_AT_GAP_END = "RUN_AT_GAP_END"
    SKIP = "SKIP"
    RUN_SHIFTED = "RUN_SHIFTED"


class DstOverlapPolicy(StrEnum):
    FIRST = "FIRST"
    SECOND = "SECOND"
    BOTH = "BOTH"


class Pattern(Protocol):
    """Naive wall times, ascending and distinct."""

    is_wildcard: bool

    def next_local(self, local_s: int) -> int | None:
        """The first wall time at or after ``local_s``."""

    def take_local(self, first_s: int, end_s: int, limit: int) -> list[int]:
        """The oldest ``limit`` wall times in ``[first_s, end_s)``, ascending."""

    def take_local_newest(self, first_s: int, end_s: int, limit: int) -> list[int]:
        """The newest ``limit`` wall times in ``[first_s, end_s)``, ascending."""

    def count_local(self, first_s: int, end_s: int, count_max: int) -> int:
        """How many wall times lie in ``[first_s, end_s)``; may stop counting at ``count_max``."""


class Source(Protocol):
    """Instants, ascending and distinct."""

    def next_after(self, base_us: int) -> int | None:
        """The first instant strictly later than the base; None if there is none."""

    def take(self, after_us: int, until_us: int, limit: int) -> list[int]:
        """The oldest ``limit`` instants in ``(after_us, until_us]``, ascending."""

    def take_newest(self, after_us: int, until_us: int, limit: int) -> list[int]:
        """The newest ``limit`` instants in ``(after_us, until_us]``, ascending."""

    def count(self, after_us: int, until_us: int, count_max: int) -> int:
        """How many instants lie in ``(after_us, until_us]``; may stop counting at ``count_max``."""


class DayTimesPattern:
    """Wall times that are some days, each with the same times of day. A subclass says which days."""

    __slots__ = ("_months_max", "_times", "is_wildcard")

    def __init__(self, times: tuple[int, ...], months_max: int, *, is_wildcard: bool) -> None:
        self._times = times
        self._months_max = months_max
        self.is_wildcard = is_wildcard

    def _month_bits(self, year: int, month: int, length: int, first_weekday: int) -> int:
        """The matching days of a month: bit n for day n. ``first_weekday``: 0 = Sunday."""
        raise NotImplementedError

    def next_local(self, local_s: int) -> int | None:
        day, time_s = divmod(local_s, DAY_S)
        index = bisect_left(self._times, time_s)
        if index == len(self._times):
            day += 1
            index = 0
        if day < DAY_MIN:
            day, index = DAY_MIN, 0
        found = self._next_day(day)
        if found is None:
            return None
        return found * DAY_S + self._times[index if found == day else 0]

    def take_local(self, first_s: int, end_s: int, limit: int) -> list[int]:
        found: list[int] = []
        times = self._times
        day = self._next_day(max(first_s // DAY_S, DAY_MIN))
        while day is not None and len(found) < limit:
            base_s = day * DAY_S
            if base_s >= end_s:
                break
            low = bisect_left(times, first_s - base_s) if base_s < first_s else 0
            high = bisect_left(times, end_s - base_s) if base_s + DAY_S > end_s else len(times)
            found += [base_s + time_s for time_s in times[low : min(high, low + limit - len(found))]]
            day = self._next_day(day + 1)
        return found

    def take_local_newest(self, first_s: int, end_s: int, limit: int) -> list[int]:
        reversed_found: list[int] = []
        times = self._times
        for day in self._days_before(min((end_s - 1) // DAY_S, DAY_MAX), max(first_s // DAY_S, DAY_MIN)):
            base_s = day * DAY_S
            low = bisect_left(times, first_s - base_s) if base_s < first_s else 0
            high = bisect_left(times, end_s - base_s) if base_s + DAY_S > end_s else len(times)
            low = max(low, high - (limit - len(reversed_found)))
            reversed_found += [base_s + time_s for time_s in reversed(times[low:high])]
            if len(reversed_found) >= limit:
                break
        reversed_found.reverse()
        return reversed_found

    def count_local(self, first_s: int, end_s: int, count_max: int) -> int:
        times = self._times
        first_day, first_time_s = divmod(max(first_s, DAY_MIN * DAY_S), DAY_S)
        last_day, last_time_s = divmod(min(end_s, (DAY_MAX + 1) * DAY_S) - 1, DAY_S)
        if first_day > last_day:
            return 0
        # Whole days, then less what lies before the first and after the last wall time.
        count = self._count_days(first_day, last_day, 1 + count_max // len(times)) * len(times)
        if self._next_day(first_day) == first_day:
            count -= bisect_left(times, first_time_s)
        if self._next_day(last_day) == last_day:
            count -= len(times) - bisect_right(times, last_time_s)
        return count

    def _count_days(self, first_day: int, last_day: int, count_max: int) -> int:
        """How many days match from the first to the last, month by month; may stop at two more than the
        limit.
        """
        start = date.fromordinal(first_day + EPOCH_ORDINAL)
        year, month = start.year, start.month
        first = first_day - start.day + 1
        bits, count = -1 << start.day, 0
        while first <= last_day and count < count_max + 2:
            length = month_length(year, month)
            bits &= self._month_bits(year, month, length, (first + 4) % 7)
            if first + length - 1 > last_day:
                bits &= (1 << (last_day - first + 2)) - 1
            count += bits.bit_count()
            bits = -1
            first += length
            year, month = (year, month + 1) if month < 12 else (year + 1, 1)
        return count

    def _next_day(self, day: int) -> int | None:
        """The first matching day at or after ``day`` (days since 1970)."""
        if day > DAY_MAX:
            return None
        start = date.fromordinal(day + EPOCH_ORDINAL)
        year, month = start.year, start.month
        first = day - start.day + 1
        bits = -1 << start.day
        for _ in range(self._months_max + 1):
            length = month_length(year, month)
            # 1970-01-01 was a Thursday, 4 counted from Sunday.
            bits &= self._month_bits(year, month, length, (first + 4) % 7)
            if bits:
                return first + (bits & -bits).bit_length() - 2
            bits = -1
            first += length
            month += 1
            if month > 12:
                month, year = 1, year + 1
                if year > 9_999:
                    return None
        return None

    def _days_before(self, day: int, day_min: int) -> Iterator[int]:
        """The matching days from ``day`` down to ``day_min``."""
        if day < day_min:
            return
        start = date.fromordinal(day + EPOCH_ORDINAL)
        year, month = start.year, start.month
        first = day - start.day + 1
        while True:
            length = month_length(year, month)
            bits = self._month_bits(year, month, length, (first + 4) % 7)
            while bits:
                found = first + bits.bit_length() - 2
                bits ^= 1 << (bits.bit_length() - 1)
                if found < day_min:
                    return
                if found <= day:
                    yield found
            if first <= day_min:
                return
            month -= 1
            if month < 1:
                month, year = 12, year - 1
            first -= month_length(year, month)


class CronPattern(DayTimesPattern):
    """The wall times of a cron expression."""

    __slots__ = ("_bits", "_expression", "_years")

    def __init__(self, expression: CronExpression) -> None:
        times = _times_of_day(expression.second_mask, expression.minute_mask, expression.hour_mask)
        super().__init__(times, _CYCLE_MONTHS, is_wildcard=expression.is_wildcard)
        self._expression = expression
        self._bits: dict[int, int] = {}
        self._years = expression.years

    def _month_bits(self, year: int, month: int, length: int, first_weekday: int) -> int:
        if not self._expression.month_mask >> month & 1:
            return 0
        if self._years is not None and year not in self._years:
            return 0
        key = length << 3 | first_weekday
        bits = self._bits.get(key)
        if bits is None:
            bits = self._bits[key] = self._expression.day_bits(length, first_weekday)
        return bits


@lru_cache(maxsize=512)
def _times_of_day(second_mask: int, minute_mask: int, hour_mask: int) -> tuple[int, ...]:
    """The seconds of a day that three masks name, ascending: at most 86,400, shared by all that are written
    alike.
    """
    seconds, minutes, hours = _values(second_mask), _values(minute_mask), _values(hour_mask)
    return tuple(
        [hour * 3_600 + minute * 60 + second for hour in hours for minute in minutes for second in seconds]
    )


@lru_cache(maxsize=1_024)
def _values(mask: int) -> tuple[int, ...]:
    return tuple(value for value in range(mask.bit_length()) if mask >> value & 1)


SHIFT_DAYS_MAX = 31
"""An occurrence that finds no working day within so many days does not happen."""
_SHIFT_STEPS_MAX = 50_000
"""Source days that a search passes: more than there are excluded dates, and weekends between them."""


class ShiftedPattern:
    """A pattern whose days that are no working days are moved, times of day and all, to the next or the last
    one.

    A working day is one from Monday to Friday that is not among the excluded. What moves is the wall time, so
    clock changes treat it where it arrives. The target never goes back when the source goes on: everything
    here rests on that.
    """

    __slots__ = ("_days", "_excluded", "_inner", "_step", "is_wildcard")

    def __init__(self, inner: Pattern, excluded: Iterable[date], *, forward: bool) -> None:
        self._inner = inner
        self._excluded = frozenset(day.toordinal() - EPOCH_ORDINAL for day in excluded)
        self._step = 1 if forward else -1
        self._days: dict[int, list[int]] = {}
        self.is_wildcard = inner.is_wildcard

    def _is_working(self, day: int) -> bool:
        # 1970-01-01 was a Thursday, 4 counted from Sunday.
        return 1 <= (day + 4) % 7 <= 5 and day not in self._excluded

    def _target(self, day: int) -> int | None:
        for _ in range(SHIFT_DAYS_MAX + 1):
            if self._is_working(day):
                return day
            day += self._step
        return None

    def sources(self, day: int) -> list[int]:
        """The days whose times arrive at a working day, ascending: itself, and those that move to it."""
        found = [day]
        for _ in range(SHIFT_DAYS_MAX):
            day -= self._step
            if self._is_working(day):
                break
            found.append(day)
        return sorted(found)

    def sources_of(self, day: int, time_s: int) -> list[int]:
        """The days from which a time of a working day comes, ascending."""
        return [
            source
            for source in self.sources(day)
            if self._inner.next_local(source * DAY_S + time_s) == source * DAY_S + time_s
        ]

    def times_on(self, day: int) -> list[int]:
        """The seconds of a working day, ascending."""
        known = self._days.get(day)
        if known is not None:
            return known
        times: set[int] = set()
        for source in self.sources(day):
            low_s = source * DAY_S
            times.update(local_s - low_s for local_s in self._inner.take_local(low_s, low_s + DAY_S, DAY_S))
        if len(self._days) >= 64:
            self._days.clear()
        made = self._days[day] = sorted(times)
        return made

    def _days_from(self, day: int) -> Iterator[int]:
        """The days at or after one at which something arrives."""
        source = day if self._step < 0 or not self._is_working(day) else self.sources(day)[0]
        if self._step > 0 and not self._is_working(day):
            # What moves from before this day may arrive after it.
            while not self._is_working(source - 1) and day - source < SHIFT_DAYS_MAX:
                source -= 1
        last = None
        for _ in range(_SHIFT_STEPS_MAX):
            found_s = self._inner.next_local(source * DAY_S)
            if found_s is None:
                return
            source = found_s // DAY_S
            target = self._target(source)
            if target is not None and target >= day and target != last:
                yield target
                last = target
            source += 1

    def _days_back_from(self, day: int, day_min: int) -> Iterator[int]:
        """The days at or before one, down to `day_min`, at which something arrives."""
        source, source_min = day, day_min
        if self._step < 0:
            source += SHIFT_DAYS_MAX
        else:
            source_min -= SHIFT_DAYS_MAX
        last = None
        for _ in range(_SHIFT_STEPS_MAX):
            found = self._inner.take_local_newest(source_min * DAY_S, (source + 1) * DAY_S, 1)
            if not found:
                return
            source = found[0] // DAY_S
            target = self._target(source)
            if target is not None and target < day_min:
                return
            if target is not None and target <= day and target != last:
                yield target
                last = target
            source -= 1

    def next_local(self, local_s: int) -> int | None:
        for day in self._days_from(local_s // DAY_S):
            times = self.times_on(day)
            index = bisect_left(times, local_s - day * DAY_S)
            if index < len(times):
                return day * DAY_S + times[index]
        return None

    def take_local(self, first_s: int, end_s: int, limit: int) -> list[int]:
        found: list[int] = []
        for day in self._days_from(first_s // DAY_S):
            base_s = day * DAY_S
            if base_s >= end_s or len(found) >= limit:
                break
            found += [base_s + time_s for time_s in self.times_on(day) if first_s <= base_s + time_s < end_s]
        return found[:limit]

    def take_local_newest(self, first_s: int, end_s: int, limit: int) -> list[int]:
        reversed_found: list[int] = []
        for day in self._days_back_from((end_s - 1) // DAY_S, first_s // DAY_S):
            base_s = day * DAY_S
            times = [base_s + time_s for time_s in self.times_on(day) if first_s <= base_s + time_s < end_s]
            reversed_found += reversed(times)
            if len(reversed_found) >= limit:
                break
        return reversed_found[:limit][::-1]

    def count_local(self, first_s: int, end_s: int, count_max: int) -> int:
        count = 0
        for day in self._days_from(first_s // DAY_S):
            base_s = day * DAY_S
            if base_s >= end_s or count >= count_max:
                break
            times = self.times_on(day)
            count += bisect_left(times, end_s - base_s) - bisect_left(times, first_s - base_s)
        return count


class ZonedSource:
    """A pattern of wall times, as instants of a zone."""

    __slots__ = ("_segment", "gap_policy", "overlap_policy", "pattern", "zone")

    def __init__(self, pattern: Pattern, zone: Zone, gap: DstGapPolicy, overlap: DstOverlapPolicy) -> None:
        self.pattern = pattern
        self.zone = zone
        # A wildcard pattern follows real time: that is what these two mean.
        self.gap_policy = DstGapPolicy.SKIP if pattern.is_wildcard else gap
        self.overlap_policy = DstOverlapPolicy.BOTH if pattern.is_wildcard else overlap
        self._segment: Segment = zone.segment(zone.index_at(0))

    def next_after(self, base_us: int) -> int | None:
        first_s = max(base_us // SECOND_US + 1, INSTANT_S_MIN)
        segment = self._segment
        if not segment.start_s <= first_s < segment.end_s:
            if first_s > INSTANT_S_MAX:
                return None
            self._segment = segment = self.zone.segment(self.zone.index_at(first_s))
        # The common case: the last change is further back than any change is wide, and the next is not
        # reached.
        if segment.start_s + _CHANGE_S_MAX < first_s:
            found_s = self.pattern.next_local(first_s + segment.offset_s)
            if found_s is not None and found_s < segment.recurs_from_local_s:
                instant_s = found_s - segment.offset_s
                if instant_s < segment.end_s:
                    return instant_s * SECOND_US if instant_s <= INSTANT_S_MAX else None
        return self._search(first_s)

    def _search(self, first_s: int) -> int | None:
        """The first instant at or after ``first_s``, across changes of offset."""
        index = self.zone.index_at(first_s)
        known_from_s, known_s = FOREVER_S, -FOREVER_S  # no wall time lies in [known_from_s, known_s)

        def next_local(local_s: int) -> int:
            nonlocal known_from_s, known_s
            if not known_from_s <= local_s <= known_s:
                found_s = self.pattern.next_local(local_s)
                known_from_s, known_s = local_s, FOREVER_S if found_s is None else found_s
            return known_s

        at_s = first_s
        for _ in range(_SEGMENTS_MAX):
            segment = self.zone.segment(index)
            found_s = FOREVER_S
            gap_s = segment.gap_size_s if self.gap_policy != "SKIP" and segment.start_s > -FOREVER_S else 0
            into_s = at_s - segment.start_s
            if gap_s and self.gap_policy == "RUN_AT_GAP_END" and into_s == 0:
                if next_local(segment.seen_until_local_s) < segment.seen_until_local_s + gap_s:
                    found_s = segment.start_s
            elif gap_s and self.gap_policy == "RUN_SHIFTED" and into_s < gap_s:
                shifted_s = next_local(segment.seen_until_local_s + into_s) - segment.seen_until_local_s
                if shifted_s < gap_s:
                    found_s = segment.start_s + shifted_s
            low_s, high_s = self._window(segment, at_s, segment.end_s)
            if low_s < high_s:
                local_s = next_local(low_s)
                if local_s < high_s:
                    found_s = min(found_s, local_s - segment.offset_s)
            if found_s <= INSTANT_S_MAX:
                return found_s * SECOND_US
            if segment.end_s > INSTANT_S_MAX or (known_s >= FOREVER_S and at_s > known_from_s + 4 * DAY_S):
                return None
            index += 1
            at_s = segment.end_s
        return None

    def _window(self, segment: Segment, first_s: int, end_s: int) -> tuple[int, int]:
        """The wall times that fire as written within ``[first_s, end_s)`` of a segment."""
        low_s, high_s = first_s + segment.offset_s, end_s + segment.offset_s
        if self.overlap_policy == "FIRST":
            low_s = max(low_s, segment.seen_until_local_s)
        elif self.overlap_policy == "SECOND":
            high_s = min(high_s, segment.recurs_from_local_s)
        return low_s, high_s

    def take(self, after_us: int, until_us: int, limit: int) -> list[int]:
        found: list[int] = []
        first_s = max(after_us // SECOND_US + 1, INSTANT_S_MIN)
        end_s = min(until_us // SECOND_US, INSTANT_S_MAX) + 1
        while first_s < end_s and len(found) < limit:
            segment = self.zone.segment(self.zone.index_at(first_s))
            part = self._within(
                segment, first_s, min(end_s, segment.end_s), limit - len(found), is_newest=False
            )
            found += part
            first_s = segment.end_s
            if not part and first_s < end_s:
                # Nothing here: a sparse pattern is searched, not walked change by change.
                next_us = self.next_after(first_s * SECOND_US - 1)
                if next_us is None:
                    break
                first_s = next_us // SECOND_US
        return [instant_s * SECOND_US for instant_s in found]

    def take_newest(self, after_us: int, until_us: int, limit: int) -> list[int]:
        parts: list[list[int]] = []
        count = 0
        first_s = max(after_us // SECOND_US + 1, INSTANT_S_MIN)
        end_s = min(until_us // SECOND_US, INSTANT_S_MAX) + 1
        while first_s < end_s and count < limit:
            segment = self.zone.segment(self.zone.index_at(end_s - 1))
            start_s = max(first_s, segment.start_s)
            part = self._within(segment, start_s, end_s, limit - count, is_newest=True)
            parts.append(part)
            count += len(part)
            end_s = start_s
        return [instant_s * SECOND_US for part in reversed(parts) for instant_s in part]

    def count(self, after_us: int, until_us: int, count_max: int) -> int:
        count = 0
        first_s = max(after_us // SECOND_US + 1, INSTANT_S_MIN)
        end_s = min(until_us // SECOND_US, INSTANT_S_MAX) + 1
        while first_s < end_s and count < count_max:
            segment = self.zone.segment(self.zone.index_at(first_s))
            part_end_s = min(end_s, segment.end_s)
            # What a gap adds lies within its own width after the change, and may fall on ordinary instants.
            mixed_until_s = min(part_end_s, segment.start_s + segment.gap_size_s)
            if segment.start_s <= -FOREVER_S or self.gap_policy == "SKIP" or first_s >= mixed_until_s:
                mixed_until_s = first_s
            else:
                count += len(self._within(segment, first_s, mixed_until_s, DAY_S, is_newest=False))
            low_s, high_s = self._window(segment, mixed_until_s, part_end_s)
            if low_s < high_s:
                count += self.pattern.count_local(low_s, high_s, count_max - count)
            first_s = part_end_s
        return count

    def _within(
        self, segment: Segment, first_s: int, end_s: int, limit: int, *, is_newest: bool
    ) -> list[int]:
        """The oldest or newest ``limit`` instants in ``[first_s, end_s)``, which lies within the segment."""
        take = self.pattern.take_local_newest if is_newest else self.pattern.take_local
        low_s, high_s = self._window(segment, first_s, end_s)
        found = (
            [local_s - segment.offset_s for local_s in take(low_s, high_s, limit)] if low_s < high_s else []
        )
        gap_s = segment.gap_size_s if self.gap_policy != "SKIP" and segment.start_s > -FOREVER_S else 0
        if not gap_s:
            return found
        seen_s = segment.seen_until_local_s
        extra: Iterable[int] = ()
        if self.gap_policy == "RUN_AT_GAP_END":
            if first_s == segment.start_s and self.pattern.take_local(seen_s, seen_s + gap_s, 1):
                extra = (first_s,)
        else:
            low_s = seen_s + first_s - segment.start_s
            high_s = seen_s + min(gap_s, end_s - segment.start_s)
            extra = (local_s - seen_s + segment.start_s for local_s in take(low_s, high_s, limit))
        merged = sorted({*found, *extra})
        return merged[-limit:] if is_newest else merged[:limit]


class IntervalSource:
    """An instant and every ``duration_us`` after it: real time, so no clock change touches it."""

    __slots__ = ("anchor_us", "duration_us")

    def __init__(self, anchor_us: int, duration_us: int) -> None:
        self.anchor_us = anchor_us
        self.duration_us = duration_us

    def next_after(self, base_us: int) -> int | None:
        if base_us < self.anchor_us:
            return self.anchor_us
        found_us = self.anchor_us + ((base_us - self.anchor_us) // self.duration_us + 1) * self.duration_us
        return found_us if found_us <= INSTANT_US_MAX else None

    def _range(self, after_us: int, until_us: int) -> range:
        first_us = self.next_after(after_us)
        if first_us is None:
            return range(0)
        return range(first_us, min(until_us, INSTANT_US_MAX) + 1, self.duration_us)

    def take(self, after_us: int, until_us: int, limit: int) -> list[int]:
        return list(self._range(after_us, until_us)[:limit])

    def take_newest(self, after_us: int, until_us: int, limit: int) -> list[int]:
        return list(self._range(after_us, until_us)[-limit:]) if limit else []

    def count(self, after_us: int, until_us: int, count_max: int) -> int:
        return len(self._range(after_us, until_us))


class InstantsSource:
    """A list of instants."""

    __slots__ = ("instants_us",)

    def __init__(self, instants_us: Iterable[int]) -> None:
        self.instants_us = sorted(set(instants_us))

    def next_after(self, base_us: int) -> int | None:
        index = bisect_right(self.instants_us, base_us)
        return self.instants_us[index] if index < len(self.instants_us) else None

    def take(self, after_us: int, until_us: int, limit: int) -> list[int]:
        low = bisect_right(self.instants_us, after_us)
        high = bisect_right(self.instants_us, until_us)
        return self.instants_us[low : min(high, low + limit)]

    def take_newest(self, after_us: int, until_us: int, limit: int) -> list[int]:
        low = bisect_right(self.instants_us, after_us)
        high = bisect_right(self.instants_us, until_us)
        return self.instants_us[max(low, high - limit) : high]

    def count(self, after_us: int, until_us: int, count_max: int) -> int:
        return max(0, bisect_right(self.instants_us, until_us) - bisect_right(self.instants_us, after_us))


class ExcludingSource:
    """A source without some local dates. It jumps over a date, however often the source fires within it."""

    __slots__ = ("_ends_us", "_starts_us", "source")

    def __init__(self, source: Source, zone: Zone, dates: Iterable[date]) -> None:
        self.source = source
        self._starts_us: list[int] = []
        self._ends_us: list[int] = []
        stretches = [
            stretch for day in dates for stretch in zone.day_stretches(day.toordinal() - EPOCH_ORDINAL)
        ]
        for start_s, end_s in sorted(stretches):
            if self._ends_us and start_s * SECOND_US <= self._ends_us[-1]:
                self._ends_us[-1] = max(self._ends_us[-1], end_s * SECOND_US)
            else:
                self._starts_us.append(start_s * SECOND_US)
                self._ends_us.append(end_s * SECOND_US)

    def next_after(self, base_us: int) -> int | None:
        for _ in range(len(self._starts_us) + 1):
            found_us = self.source.next_after(base_us)
            if found_us is None:
                return None
            index = bisect_right(self._starts_us, found_us) - 1
            if index < 0 or found_us >= self._ends_us[index]:
                return found_us
            base_us = self._ends_us[index] - 1
        raise AssertionError("each step leaves one excluded stretch behind")

    def take(self, after_us: int, until_us: int, limit: int) -> list[int]:
        found: list[int] = []
        for low_us, high_us in self._allowed(after_us, until_us):
            found += self.source.take(low_us, high_us, limit - len(found))
            if len(found) >= limit:
                break
        return found

    def take_newest(self, after_us: int, until_us: int, limit: int) -> list[int]:
        parts: list[list[int]] = []
        count = 0
        for low_us, high_us in reversed(self._allowed(after_us, until_us)):
            part = self.source.take_newest(low_us, high_us, limit - count)
            parts.append(part)
            count += len(part)
            if count >= limit:
                break
        return [instant_us for part in reversed(parts) for instant_us in part]

    def count(self, after_us: int, until_us: int, count_max: int) -> int:
        count = 0
        for low_us, high_us in self._allowed(after_us, until_us):
            count += self.source.count(low_us, high_us, count_max - count)
            if count >= count_max:
                break
        return count

    def _allowed(self, after_us: int, until_us: int) -> list[tuple[int, int]]:
        """``(after_us, until_us]`` without the excluded stretches, as such intervals."""
        found: list[tuple[int, int]] = []
        for index in range(bisect_right(self._ends_us, after_us), len(self._starts_us)):
            start_us, end_us = self._starts_us[index], self._ends_us[index]
            if start_us > until_us:
                break
            if after_us < start_us - 1:
                found.append((after_us, start_us - 1))
            after_us = end_us - 1
        if after_us < until_us:
            found.append((after_us, until_us))
        return found
