"""What exclusions leave out: the occurrences that a schedule would have without them, for those who look."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import date

from tickwheel.domain import describe, trigger
from tickwheel.domain.recurrence import SECOND_US
from tickwheel.domain.trigger import CalendarShift, CompiledTrigger
from tickwheel.domain.zone import EPOCH_ORDINAL, zone


@dataclass(frozen=True, slots=True)
class ExcludedOccurrence:
    """An instant that a trigger names on a date on which nothing fires. `day` is local to that trigger."""

    schedule_time_us: int
    utc_offset: str
    day: date


def excluded(
    compiled: CompiledTrigger, after_us: int, until_us: int, count_max: int
) -> list[ExcludedOccurrence]:
    """The oldest `count_max` excluded instants in ``(after_us, until_us]``, ascending.

    Only excluded dates are searched, so the cost does not depend on how far apart they lie. An instant that
    another trigger of the set names all the same is not excluded.
    """
    bounds = compiled.trigger_set
    if bounds.start_us is not None:
        after_us = max(after_us, bounds.start_us - 1)
    if bounds.end_us is not None:
        until_us = min(until_us, bounds.end_us - 1)
    bare = trigger.compile(replace(bounds, exclusions=frozenset(), start_us=None, end_us=None))
    found: dict[int, ExcludedOccurrence] = {}
    for source, member in zip(bare.sources, bare.trigger_set.triggers, strict=True):
        if member.calendar_shift != CalendarShift.NONE:
            # It moves what falls on an excluded date: nothing is left out.
            continue
        in_zone = zone(member.time_zone)
        count = 0
        for day in sorted(bounds.exclusions):
            for start_s, end_s in in_zone.day_stretches(day.toordinal() - EPOCH_ORDINAL):
                low_us = max(after_us, start_s * SECOND_US - 1)
                high_us = min(until_us, end_s * SECOND_US - 1)
                if low_us >= high_us:
                    continue
                for instant_us in source.take(low_us, high_us, count_max - count):
                    count += 1
                    offset = describe.offset_text(in_zone.offset_at(instant_us // SECOND_US))
                    found.setdefault(instant_us, ExcludedOccurrence(instant_us, offset, day))
            if count >= count_max:
                break
    kept = [each for us, each in sorted(found.items()) if compiled.next_after(us - 1) != us]
    return kept[:count_max]
