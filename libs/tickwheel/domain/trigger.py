"""What makes a schedule due: triggers as values, their stored form, and their compiled form that gives
instants.

A ``TriggerSet`` is what a schedule says; ``compile`` proves it and makes a ``CompiledTrigger``, which the
timer asks. All times are microseconds since the Unix epoch (``_us``), in [1970 .. 9999]. Local dates are
``datetime.date``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from enum import StrEnum
from itertools import chain
from typing import TYPE_CHECKING, Any

from tickwheel.domain import cron
from tickwheel.domain.cron import Dialect
from tickwheel.domain.recurrence import (
    INSTANT_US_MAX,
    CronPattern,
    DstGapPolicy,
    DstOverlapPolicy,
    ExcludingSource,
    InstantsSource,
    IntervalSource,
    Pattern,
    ShiftedPattern,
    Source,
    ZonedSource,
)
from tickwheel.domain.zone import zone
from tickwheel.errors import TimeZoneUnknown, TriggerInvalid, TriggerNeverFires

if TYPE_CHECKING:
    # numpy is imported where arrays are: the CLI answers one instant and should not wait for it.
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "NEVER_US",
    "CalendarShift",
    "CompiledTrigger",
    "Cron",
    "Dialect",
    "DstGapPolicy",
    "DstOverlapPolicy",
    "Interval",
    "Rrule",
    "Trigger",
    "TriggerSet",
    "canonical_bytes",
    "compile",
    "from_canonical",
    "jitter_offsets_us",
    "next_after_grouped",
    "resolve_hash",
    "trigger_id",
]

NEVER_US = 2**63 - 1
"""In arrays: there is no further occurrence."""
INTERVAL_US_MIN = 10_000
"""One tick of the wheel: nothing fires more finely."""
INTERVAL_US_MAX = 100 * 366 * 86_400 * 1_000_000
JITTER_US_MAX = 86_400 * 1_000_000
TRIGGER_COUNT_MAX = 32
INSTANT_COUNT_MAX = 1_000
EXCLUSION_COUNT_MAX = 10_000
_BASES_ONE_BY_ONE_MAX = 8
"""Up to so many distinct bases are searched one by one; more are looked up in an enumerated window."""
_WINDOW_COUNT_MAX = 65_536
_COUNT_PAGE = 4_096
"""Occurrences of several triggers that are counted at a time: small enough for a processor's cache."""


class CalendarShift(StrEnum):
    """What becomes of an occurrence on a day that is no working day: a weekend's, or an excluded date."""

    NONE = "NONE"
    """On an excluded date it does not happen; weekends are days as any other."""
    NEXT_WORKING_DAY = "NEXT_WORKING_DAY"
    PREVIOUS_WORKING_DAY = "PREVIOUS_WORKING_DAY"


@dataclass(frozen=True, slots=True)
class Cron:
    expression: str
    dialect: Dialect = Dialect.UNIX


@dataclass(frozen=True, slots=True)
class Interval:
    duration_us: int
    anchor_us: int
    """The first occurrence; the others follow at whole multiples of the duration."""


@dataclass(frozen=True, slots=True)
class Rrule:
    text: str
    """RFC 5545 lines: RRULE, and if wanted DTSTART, RDATE, EXDATE; times without Z are in the trigger's
    zone.
    """


@dataclass(frozen=True, slots=True)
class Trigger:
    """One of ``cron``, ``interval``, ``instants_us`` and ``rrule``, with the zone that it is meant in."""

    cron: Cron | None = None
    interval: Interval | None = None
    instants_us: tuple[int, ...] = ()
    rrule: Rrule | None = None
    time_zone: str = "UTC"
    dst_gap_policy: DstGapPolicy = DstGapPolicy.RUN_AT_GAP_END
    dst_overlap_policy: DstOverlapPolicy = DstOverlapPolicy.FIRST
    calendar_shift: CalendarShift = CalendarShift.NONE


@dataclass(frozen=True, slots=True)
class TriggerSet:
    """All triggers of a schedule: it is due whenever one of them is, once where several agree."""

    triggers: tuple[Trigger, ...]
    exclusions: frozenset[date] = field(default_factory=frozenset)
    """Local dates, in each trigger's own zone, on which nothing fires. Calendars are resolved into these."""
    start_us: int | None = None
    """No occurrence is earlier."""
    end_us: int | None = None
    """Every occurrence is earlier (exclusive, as in google.type.Interval)."""
    jitter_us: int = 0


class CompiledTrigger:
    """The occurrences of a TriggerSet. Cheap to ask, not to make: keep it by ``trigger_id``.

    It remembers its last answer: between two occurrences every base has the same next one.
    """

    __slots__ = ("_memo", "_sources", "trigger_set")

    def __init__(self, trigger_set: TriggerSet, sources: Sequence[Source]) -> None:
        self.trigger_set = trigger_set
        self._sources = tuple(sources)
        self._memo: tuple[int, int, int | None] = (0, 0, None)

    @property
    def sources(self) -> tuple[Source, ...]:
        """One for each trigger, in their order."""
        return self._sources

    def next_after(self, base_us: int) -> int | None:
        """The first occurrence strictly later than ``base_us``; None if there is none."""
        from_us, before_us, next_us = self._memo
        if from_us <= base_us < before_us:
            return next_us
        next_us = self._next_after(base_us)
        # One assignment, so that another thread never sees half of it.
        self._memo = (base_us, NEVER_US if next_us is None else next_us, next_us)
        return next_us

    def _next_after(self, base_us: int) -> int | None:
        start_us, end_us = self.trigger_set.start_us, self.trigger_set.end_us
        if start_us is not None and base_us < start_us:
            base_us = start_us - 1
        if len(self._sources) == 1:
            found_us = self._sources[0].next_after(base_us)
        else:
            each = [source.next_after(base_us) for source in self._sources]
            found_us = min((instant_us for instant_us in each if instant_us is not None), default=None)
        if found_us is not None and end_us is not None and found_us >= end_us:
            return None
        return found_us

    def between(self, after_us: int, until_us: int, limit: int) -> list[int]:
        """The oldest ``limit`` occurrences in ``(after_us, until_us]``, ascending.

        To enumerate more, or to be interrupted, go on with the last one as ``after_us``.
        """
        after_us, until_us = self._bounds(after_us, until_us)
        return _merged([source.take(after_us, until_us, limit) for source in self._sources])[:limit]

    def latest_between(self, after_us: int, until_us: int, limit: int) -> list[int]:
        """The newest ``limit`` occurrences in ``(after_us, until_us]``, newest first.

        To go on, give the last one less 1 as ``until_us``.
        """
        after_us, until_us = self._bounds(after_us, until_us)
        parts = [source.take_newest(after_us, until_us, limit) for source in self._sources]
        return _merged(parts)[::-1][:limit]

    def count_between(self, after_us: int, until_us: int, count_max: int) -> int:
        """How many occurrences lie in ``(after_us, until_us]``; ``count_max`` if there are that many or more.

        One cron or interval is counted by the calendar, without enumerating; several are enumerated, at some
        million a second.
        """
        after_us, until_us = self._bounds(after_us, until_us)
        if len(self._sources) == 1:
            return min(count_max, self._sources[0].count(after_us, until_us, count_max))
        count = 0
        while count < count_max:
            page = self.between(after_us, until_us, min(_COUNT_PAGE, count_max - count))
            count += len(page)
            if not page:
                break
            after_us = page[-1]
        return count

    def next_after_many(self, bases_us: NDArray[np.int64]) -> NDArray[np.int64]:
        """``next_after`` of each base, int64[n] to int64[n]; NEVER_US where there is none."""
        import numpy as np

        first = self._sources[0]
        if len(self._sources) == 1 and isinstance(first, IntervalSource):
            return self._next_after_many_interval(first, bases_us)
        bases, inverse = np.unique(bases_us, return_inverse=True)
        found = np.full(len(bases), NEVER_US, dtype=np.int64)
        done = 0
        while done < len(bases):
            left = len(bases) - done
            window: list[int] = []
            if left > _BASES_ONE_BY_ONE_MAX:
                limit = min(32 * left, _WINDOW_COUNT_MAX)
                window = self.between(int(bases[done]), int(bases[-1]), limit)
            if len(window) > 1:
                # The window names every occurrence from the first base to its own last.
                answered = int(np.searchsorted(bases, window[-1], side="left"))
                positions = np.searchsorted(
                    np.array(window, dtype=np.int64), bases[done:answered], side="right"
                )
                found[done:answered] = np.array(window, dtype=np.int64)[positions]
                done = answered
            else:
                # Few bases, or no two occurrences among them: then the memo of next_after answers most.
                next_us = self.next_after(int(bases[done]))
                if next_us is None:
                    break
                answered = int(np.searchsorted(bases, next_us, side="left"))
                found[done:answered] = next_us
                done = answered
        result: NDArray[np.int64] = found[inverse]
        return result

    def _next_after_many_interval(
        self, source: IntervalSource, bases_us: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        import numpy as np

        start_us, end_us = self.trigger_set.start_us, self.trigger_set.end_us
        bases = np.minimum(bases_us, INSTANT_US_MAX)
        if start_us is not None:
            bases = np.maximum(bases, start_us - 1)
        steps = np.maximum((bases - source.anchor_us) // source.duration_us + 1, 0)
        found: NDArray[np.int64] = source.anchor_us + steps * source.duration_us
        last_us = INSTANT_US_MAX if end_us is None else end_us - 1
        return np.where(found > last_us, np.int64(NEVER_US), found)

    def _bounds(self, after_us: int, until_us: int) -> tuple[int, int]:
        start_us, end_us = self.trigger_set.start_us, self.trigger_set.end_us
        if start_us is not None:
            after_us = max(after_us, start_us - 1)
        if end_us is not None:
            until_us = min(until_us, end_us - 1)
        return after_us, until_us


def _merged(parts: list[list[int]]) -> list[int]:
    """Ascending lists as one, without repetitions."""
    if len(parts) == 1:
        return parts[0]
    # Sorting finds the ascending runs and merges them; a set would lose their order first.
    return list(dict.fromkeys(sorted(chain.from_iterable(parts))))


def compile(trigger_set: TriggerSet, calendar_dates: frozenset[date] = frozenset()) -> CompiledTrigger:
    """Proves a TriggerSet and makes it ready to be asked.

    ``calendar_dates`` are the dates that the excluded calendars name now, on top of the set's own exclusions.
    Raises TriggerInvalid, TriggerNeverFires or TimeZoneUnknown, with the path of the field.
    """
    _check_bounds(trigger_set)
    dates = trigger_set.exclusions | calendar_dates
    if len(dates) > EXCLUSION_COUNT_MAX:
        raise TriggerInvalid("exclusions", f"{len(dates)} dates are more than {EXCLUSION_COUNT_MAX}")
    sources: list[Source] = []
    for index, trigger in enumerate(trigger_set.triggers):
        try:
            source = _source(trigger, trigger_set.start_us, dates)
            # A trigger that moves its occurrences has none on an excluded date.
            excludes = bool(dates) and trigger.calendar_shift == CalendarShift.NONE
            sources.append(ExcludingSource(source, zone(trigger.time_zone), dates) if excludes else source)
        except (TriggerInvalid, TriggerNeverFires, TimeZoneUnknown) as error:
            raise error.under(f"triggers[{index}]") from error
    compiled = CompiledTrigger(trigger_set, sources)
    start_us, end_us = trigger_set.start_us, trigger_set.end_us
    is_proved = start_us is None and end_us is None and any(_surely_fires(source) for source in sources)
    if not is_proved and compiled.next_after(-1 if start_us is None else start_us - 1) is None:
        raise TriggerNeverFires("triggers", "the bounds and the exclusions leave no occurrence")
    return compiled


def _surely_fires(source: Source) -> bool:
    """Whether parsing has proved it: a cron with a day that matches, whose missing times run all the same."""
    return (
        isinstance(source, ZonedSource)
        and isinstance(source.pattern, CronPattern)
        and source.gap_policy is DstGapPolicy.RUN_AT_GAP_END
    )


def _check_bounds(trigger_set: TriggerSet) -> None:
    count = len(trigger_set.triggers)
    if not 1 <= count <= TRIGGER_COUNT_MAX:
        raise TriggerInvalid("triggers", f"a schedule has 1 to {TRIGGER_COUNT_MAX} triggers, not {count}")
    if not 0 <= trigger_set.jitter_us <= JITTER_US_MAX:
        raise TriggerInvalid("jitter_duration", f"it lies between 0 and {JITTER_US_MAX // 1_000_000} s")
    for name, value in (("start_time", trigger_set.start_us), ("end_time", trigger_set.end_us)):
        if value is not None:
            _check_instant(name, value)
    if (
        trigger_set.start_us is not None
        and trigger_set.end_us is not None
        and trigger_set.end_us <= trigger_set.start_us
    ):
        raise TriggerInvalid("end_time", "it is not after start_time")


def _check_instant(name: str, value_us: int) -> None:
    if not 0 <= value_us <= INSTANT_US_MAX:
        raise TriggerInvalid(name, "it is not within the years 1970 to 9999")


def _source(trigger: Trigger, start_us: int | None, dates: frozenset[date]) -> Source:
    """The instants of one trigger, without bounds and exclusions, but moved where the trigger moves."""
    kinds = [trigger.cron, trigger.interval, trigger.instants_us or None, trigger.rrule]
    if sum(kind is not None for kind in kinds) != 1:
        raise TriggerInvalid("trigger", "it is exactly one of cron, interval, instants and rrule")
    in_zone = zone(trigger.time_zone)
    if trigger.cron is not None:
        pattern = CronPattern(cron.parse(trigger.cron.expression, Dialect(trigger.cron.dialect)))
        return _zoned(pattern, trigger, dates)
    if trigger.calendar_shift != CalendarShift.NONE and trigger.rrule is None:
        raise TriggerInvalid("calendar_shift", "only a cron or an rrule has days to move from")
    if trigger.interval is not None:
        return _interval_source(trigger.interval)
    if trigger.rrule is not None:
        # Imported here because few triggers want it, and the command line is to start quickly.
        from tickwheel.domain import rrule

        rule = rrule.parse(trigger.rrule.text, in_zone, start_us)
        return _zoned(rule, trigger, dates)
    if len(trigger.instants_us) > INSTANT_COUNT_MAX:
        count = len(trigger.instants_us)
        raise TriggerInvalid("instants", f"{count} instants are more than {INSTANT_COUNT_MAX}")
    for instant_us in trigger.instants_us:
        _check_instant("instants", instant_us)
    return InstantsSource(trigger.instants_us)


def _zoned(pattern: Pattern, trigger: Trigger, dates: frozenset[date]) -> ZonedSource:
    if trigger.calendar_shift != CalendarShift.NONE:
        forward = trigger.calendar_shift == CalendarShift.NEXT_WORKING_DAY
        pattern = ShiftedPattern(pattern, dates, forward=forward)
    return ZonedSource(pattern, zone(trigger.time_zone), trigger.dst_gap_policy, trigger.dst_overlap_policy)


def _interval_source(interval: Interval) -> IntervalSource:
    if interval.duration_us <= 0:
        raise TriggerInvalid("interval.duration", "it must be longer than zero")
    if not INTERVAL_US_MIN <= interval.duration_us <= INTERVAL_US_MAX:
        raise TriggerInvalid("interval.duration", "it lies between 10 ms and 100 years")
    _check_instant("interval.anchor_time", interval.anchor_us)
    return IntervalSource(interval.anchor_us, interval.duration_us)


def resolve_hash(trigger_set: TriggerSet, name: str) -> TriggerSet:
    """The set with each ``H`` of its cron expressions replaced by numbers drawn from the schedule's name.

    This is the form to store and to compile: an ``H`` that has no name is refused.
    """

    def resolved(trigger: Trigger) -> Trigger:
        if trigger.cron is None or "H" not in trigger.cron.expression.upper():
            return trigger
        parsed = cron.parse(trigger.cron.expression, Dialect(trigger.cron.dialect), name)
        return replace(trigger, cron=Cron(parsed.text, parsed.dialect))

    triggers: list[Trigger] = []
    for index, trigger in enumerate(trigger_set.triggers):
        try:
            triggers.append(resolved(trigger))
        except (TriggerInvalid, TriggerNeverFires) as error:
            raise error.under(f"triggers[{index}]") from error
    return replace(trigger_set, triggers=tuple(triggers))


def canonical_bytes(trigger_set: TriggerSet) -> bytes:
    """The stored form: JSON with sorted keys, without defaults; equal for sets that say the same.

    Order and repetition of triggers, instants and dates do not matter, nor do a cron's case and blanks.
    """
    import msgspec

    triggers = sorted(
        {
            msgspec.json.encode(_trigger_fields(trigger), order="deterministic")
            for trigger in trigger_set.triggers
        }
    )
    fields: dict[str, Any] = {
        "triggers": [msgspec.Raw(trigger) for trigger in triggers],
        "exclusions": sorted(day.isoformat() for day in trigger_set.exclusions) or None,
        "start_us": trigger_set.start_us,
        "end_us": trigger_set.end_us,
        "jitter_us": trigger_set.jitter_us or None,
    }
    return msgspec.json.encode(_without_none(fields), order="deterministic")


def from_canonical(data: bytes) -> TriggerSet:
    """The set that ``canonical_bytes`` stored; TriggerInvalid if the bytes are not such."""
    import msgspec

    try:
        return msgspec.json.decode(data, type=TriggerSet)
    except msgspec.MsgspecError as error:
        raise TriggerInvalid("triggers", f"the stored form cannot be read: {error}") from error


def trigger_id(data: bytes) -> int:
    """The identity of a stored form: the first 63 bits of its SHA-256, never 0."""
    return (int.from_bytes(hashlib.sha256(data).digest()[:8], "big") >> 1) or 1


def _trigger_fields(trigger: Trigger) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "instants_us": sorted(set(trigger.instants_us)) or None,
        "time_zone": trigger.time_zone if trigger.time_zone != "UTC" else None,
    }
    if trigger.cron is not None:
        expression = " ".join(trigger.cron.expression.upper().split())
        fields["cron"] = {"expression": expression, "dialect": Dialect(trigger.cron.dialect).value}
    if trigger.interval is not None:
        fields["interval"] = {
            "duration_us": trigger.interval.duration_us,
            "anchor_us": trigger.interval.anchor_us,
        }
    if trigger.rrule is not None:
        fields["rrule"] = {"text": "\n".join(trigger.rrule.text.split())}
    if trigger.dst_gap_policy != DstGapPolicy.RUN_AT_GAP_END:
        fields["dst_gap_policy"] = DstGapPolicy(trigger.dst_gap_policy).value
    if trigger.dst_overlap_policy != DstOverlapPolicy.FIRST:
        fields["dst_overlap_policy"] = DstOverlapPolicy(trigger.dst_overlap_policy).value
    if trigger.calendar_shift != CalendarShift.NONE:
        fields["calendar_shift"] = CalendarShift(trigger.calendar_shift).value
    return _without_none(fields)


def _without_none(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def next_after_grouped(
    triggers: Sequence[CompiledTrigger], trigger_index: NDArray[np.intp], bases_us: NDArray[np.int64]
) -> NDArray[np.int64]:
    """``next_after`` for a batch of schedules that share triggers: row i asks ``triggers[trigger_index[i]]``.

    Shapes: trigger_index int[n], bases_us int64[n], the answer int64[n] with NEVER_US for never. Each trigger
    is asked once for all its rows, so a midnight burst computes each distinct cron once.
    """
    import numpy as np

    found = np.empty(len(bases_us), dtype=np.int64)
    order = np.argsort(trigger_index, kind="stable")
    sorted_index = trigger_index[order]
    edges = np.flatnonzero(np.diff(sorted_index, prepend=-1, append=len(triggers)))
    for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        trigger = triggers[int(sorted_index[low])]
        if high - low == 1:
            row = order[low]
            next_us = trigger.next_after(int(bases_us[row]))
            found[row] = NEVER_US if next_us is None else next_us
        else:
            rows = order[low:high]
            found[rows] = trigger.next_after_many(bases_us[rows])
    return found


def jitter_offsets_us(
    schedule_uid_hi: NDArray[np.uint64],
    schedule_uid_lo: NDArray[np.uint64],
    schedule_time_us: NDArray[np.int64],
    jitter_us: int,
    next_schedule_time_us: NDArray[np.int64],
) -> NDArray[np.int64]:
    """How much later than its nominal instant each occurrence is due: int64[n] in [0, jitter_us).

    Drawn from (schedule, occurrence) alone, so that a retry, a preview and another timer agree. The window is
    cut at the next nominal instant (NEVER_US: not cut): an occurrence never reaches it. The mixing is
    SplitMix64's.
    """
    import numpy as np

    if jitter_us <= 0:
        return np.zeros(len(schedule_time_us), dtype=np.int64)
    drawn = _mix(schedule_uid_hi.astype(np.uint64))
    drawn = _mix(drawn ^ schedule_uid_lo.astype(np.uint64))
    drawn = _mix(drawn ^ schedule_time_us.astype(np.int64).view(np.uint64))
    to_next = np.where(
        next_schedule_time_us == NEVER_US, np.int64(NEVER_US), next_schedule_time_us - schedule_time_us
    )
    window = np.clip(to_next, 1, jitter_us).astype(np.uint64)
    return (drawn % window).astype(np.int64)


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """One step of SplitMix64 (Steele, Lea, Flood 2014): every input bit reaches every output bit."""
    import numpy as np

    mixed = value + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
