"""Triggers in plain English, and what clock changes will do to them, before it happens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta

from tickwheel.domain import cron
from tickwheel.domain.cron import CronExpression, DayRule, Dialect
from tickwheel.domain.recurrence import (
    SECOND_US,
    DstGapPolicy,
    DstOverlapPolicy,
    ExcludingSource,
    Pattern,
    ShiftedPattern,
    Source,
    ZonedSource,
)
from tickwheel.domain.trigger import (
    NEVER_US,
    CalendarShift,
    CompiledTrigger,
    Interval,
    Trigger,
    TriggerSet,
)
from tickwheel.domain.zone import DAY_S, Segment, zone

PREVIEW_COUNT_MAX = 1_000
WARNING_COUNT_MAX = 20
_TIMES_LISTED_MAX = 4

_WEEKDAYS = ("Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")
_MONTHS = (
    *("", "January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
_WORKING_DAYS = 0b0111110
_NAIVE_EPOCH = datetime(1970, 1, 1)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class PreviewedOccurrence:
    schedule_time_us: int
    utc_offset: str
    """In the trigger's zone at that instant, such as ``+02:00``."""
    adjustment: str
    """What a clock change did to it; empty for nothing."""


@dataclass(frozen=True, slots=True)
class Preview:
    description: str
    occurrences: tuple[PreviewedOccurrence, ...]
    warnings: tuple[str, ...]
    """About clock changes up to the last of the occurrences."""


def preview(trigger: CompiledTrigger, after_us: int, count: int) -> Preview:
    """The next ``count`` occurrences, with what is worth knowing about them."""
    found_us = trigger.between(after_us, NEVER_US, min(count, PREVIEW_COUNT_MAX))
    occurrences = tuple(occurrence(trigger, instant_us) for instant_us in found_us)
    warnings = clock_change_warnings(trigger, after_us, found_us[-1]) if found_us else ()
    return Preview(describe(trigger.trigger_set), occurrences, tuple(warnings))


# -- Clock changes
# ---------------------------------------------------------------------------------------------------


def clock_change_warnings(trigger: CompiledTrigger, after_us: int, until_us: int) -> list[str]:
    """A sentence for each change of offset in ``(after_us, until_us]`` that meets a fixed time of a
    trigger.
    """
    found: list[tuple[int, str]] = []
    for source in map(_zoned, trigger.sources):
        if source is None or source.pattern.is_wildcard:
            continue
        index = source.zone.index_at(after_us // SECOND_US) + 1
        while len(found) < WARNING_COUNT_MAX * 4:
            segment = source.zone.segment(index - 1)
            if segment.end_s * SECOND_US > until_us:
                break
            segment = source.zone.segment(index)
            sentence = _change_sentence(source, segment)
            if sentence:
                found.append((segment.start_s, sentence))
            index += 1
    return list(dict.fromkeys(sentence for _, sentence in sorted(found)))[:WARNING_COUNT_MAX]


def _change_sentence(source: ZonedSource, segment: Segment) -> str:
    """What the change at the segment's start does to the source's wall times; empty for nothing."""
    new_s = segment.start_s + segment.offset_s
    old_s = segment.seen_until_local_s
    times = source.pattern.take_local(min(old_s, new_s), max(old_s, new_s), _TIMES_LISTED_MAX + 1)
    if not times:
        return ""
    has_more = len(times) > _TIMES_LISTED_MAX
    clocks = _joined([_clock(local_s) for local_s in times[:_TIMES_LISTED_MAX]], has_more=has_more)
    day, is_one = _date(times[0]), len(times) == 1
    if new_s > old_s:
        verb = "does" if is_one else "do"
        if source.gap_policy is DstGapPolicy.SKIP:
            then = "will not run"
        elif source.gap_policy is DstGapPolicy.RUN_SHIFTED:
            shifted = [_clock(local_s + new_s - old_s) for local_s in times[:_TIMES_LISTED_MAX]]
            then = f"will run at {_joined(shifted, has_more=has_more)}"
        else:
            then = f"will run {'' if is_one else 'once '}at {_clock(new_s)}"
        return f"{clocks} {verb} not exist on {day} in this zone: {then}"
    verb = "happens" if is_one else "happen"
    then = {
        DstOverlapPolicy.FIRST: "will run the first time only",
        DstOverlapPolicy.SECOND: "will run the second time only",
        DstOverlapPolicy.BOTH: "will run both times",
    }[source.overlap_policy]
    return f"{clocks} {verb} twice on {day} in this zone: {then}"


def _zoned(source: Source) -> ZonedSource | None:
    inner = source.source if isinstance(source, ExcludingSource) else source
    return inner if isinstance(inner, ZonedSource) else None


def occurrence(trigger: CompiledTrigger, instant_us: int) -> PreviewedOccurrence:
    """An instant that the trigger names, seen from the first of its triggers that names it."""
    for source, member in zip(trigger.sources, trigger.trigger_set.triggers, strict=True):
        if source.next_after(instant_us - 1) == instant_us:
            offset_s = zone(member.time_zone).offset_at(instant_us // SECOND_US)
            zoned = _zoned(source)
            text = _adjustment(zoned, instant_us // SECOND_US) if zoned is not None else ""
            return PreviewedOccurrence(instant_us, offset_text(offset_s), text)
    raise AssertionError(f"no trigger names {instant_us}")


def _adjustment(source: ZonedSource, instant_s: int) -> str:
    segment = source.zone.segment(source.zone.index_at(instant_s))
    local_s = instant_s + segment.offset_s
    moved = _moved_text(source.pattern, local_s)
    if moved:
        return moved
    if source.pattern.next_local(local_s) != local_s:
        return _change_sentence(source, segment).rpartition(": ")[0]
    if source.pattern.is_wildcard:
        return ""
    if local_s >= segment.recurs_from_local_s:
        return f"{_clock(local_s)} happens twice on {_date(local_s)} in this zone: this is the first time"
    if local_s < segment.seen_until_local_s:
        return f"{_clock(local_s)} happens twice on {_date(local_s)} in this zone: this is the second time"
    return ""


def _moved_text(pattern: Pattern, local_s: int) -> str:
    """From which day a wall time was moved to a working day; empty where it stands on its own."""
    if not isinstance(pattern, ShiftedPattern):
        return ""
    day, time_s = divmod(local_s, DAY_S)
    sources = pattern.sources_of(day, time_s)
    if not sources or day in sources:
        return ""
    days = _joined([_date(source * DAY_S) for source in sources[:_TIMES_LISTED_MAX]])
    return f"moved from {days}, no working day"


def _clock(local_s: int) -> str:
    text = (_NAIVE_EPOCH + timedelta(seconds=local_s)).strftime("%H:%M:%S")
    return text.removesuffix(":00") if text.endswith(":00") else text


def _date(local_s: int) -> str:
    return (_NAIVE_EPOCH + timedelta(seconds=local_s)).date().isoformat()


def offset_text(offset_s: int) -> str:
    """An offset from UTC, such as ``+02:00``."""
    sign, size = ("-", -offset_s) if offset_s < 0 else ("+", offset_s)
    text = f"{sign}{size // 3_600:02}:{size // 60 % 60:02}"
    return f"{text}:{size % 60:02}" if size % 60 else text


def _instant(instant_us: int) -> str:
    text = (_EPOCH + timedelta(microseconds=instant_us)).isoformat()
    return text.removesuffix("+00:00") + "Z"


# -- Sentences
# -------------------------------------------------------------------------------------------------------


def describe(
    trigger_set: TriggerSet, calendars: Sequence[str] = (), own_dates: frozenset[date] | None = None
) -> str:
    """One sentence, such as ``every working day at 09:00 in Berlin, except German holidays``.

    ``calendars`` are the names of those whose dates are among the exclusions; ``own_dates`` the dates that
    are excluded beside them (None: all).
    """
    text = "; and ".join(_trigger_text(trigger) for trigger in trigger_set.triggers)
    dates = sorted(trigger_set.exclusions if own_dates is None else own_dates)
    if calendars:
        text += f", except {_joined(list(calendars))}"
    if dates:
        listed = _joined([day.isoformat() for day in dates[:3]])
        text += f", except on {listed}" if len(dates) <= 3 else f", except on {len(dates)} dates"
    if trigger_set.start_us is not None:
        text += f", not before {_instant(trigger_set.start_us)}"
    if trigger_set.end_us is not None:
        text += f", until {_instant(trigger_set.end_us)}"
    if trigger_set.jitter_us:
        text += f", each up to {_duration(trigger_set.jitter_us)} later"
    return text


def _trigger_text(trigger: Trigger) -> str:
    moved = {
        CalendarShift.NONE: "",
        CalendarShift.NEXT_WORKING_DAY: ", moved to the next working day",
        CalendarShift.PREVIOUS_WORKING_DAY: ", moved to the working day before",
    }[CalendarShift(trigger.calendar_shift)]
    if trigger.cron is not None:
        expression = cron.parse(trigger.cron.expression, Dialect(trigger.cron.dialect))
        return f"{_cron_text(expression)} {_place(trigger.time_zone)}{moved}"
    if trigger.interval is not None:
        return _interval_text(trigger.interval)
    if trigger.rrule is not None:
        text = " ".join(trigger.rrule.text.split())
        return f"by the rule {text[:200]} {_place(trigger.time_zone)}{moved}"
    instants = sorted(set(trigger.instants_us))
    if len(instants) == 1:
        return f"once, at {_instant(instants[0])}"
    return f"{len(instants)} times, from {_instant(instants[0])} to {_instant(instants[-1])}"


def _interval_text(interval: Interval) -> str:
    duration = _duration(interval.duration_us).removeprefix("1 ")
    return f"every {duration}, counted from {_instant(interval.anchor_us)}"


def _duration(duration_us: int) -> str:
    for unit_s, name in ((86_400, "day"), (3_600, "hour"), (60, "minute"), (1, "second")):
        unit_us = unit_s * SECOND_US
        if duration_us % unit_us == 0:
            count = duration_us // unit_us
            return f"{count} {name}{'' if count == 1 else 's'}"
    return f"{duration_us / 1_000:g} ms"


def _place(time_zone: str) -> str:
    if time_zone in ("UTC", "Etc/UTC"):
        return "UTC"
    return f"in {time_zone.rpartition('/')[2].replace('_', ' ')}"


def _cron_text(expression: CronExpression) -> str:
    times, is_frequent = _times_text(expression)
    days = _days_text(expression)
    if is_frequent:
        return times if days == "every day" else f"{times}, {days}"
    return f"{days} {times}"


def _values(mask: int) -> list[int]:
    return [value for value in range(mask.bit_length()) if mask >> value & 1]


def _step(values: Sequence[int], size: int) -> int | None:
    """The step of values that start at 0 and divide the cycle evenly: 1 is every one of them."""
    if len(values) < 2:
        return None
    step = values[1]
    return step if size % step == 0 and list(values) == list(range(0, size, step)) else None


def _times_text(expression: CronExpression) -> tuple[str, bool]:
    """The times of day, and whether they read as a frequency."""
    seconds, minutes, hours = (
        _values(mask) for mask in (expression.second_mask, expression.minute_mask, expression.hour_mask)
    )
    if len(seconds) * len(minutes) * len(hours) <= _TIMES_LISTED_MAX and len(hours) < 24:
        clocks = [
            _clock(hour * 3_600 + minute * 60 + second)
            for hour in hours
            for minute in minutes
            for second in seconds
        ]
        return f"at {_joined(clocks)}", False
    words = []
    second_step, minute_step, hour_step = _step(seconds, 60), _step(minutes, 60), _step(hours, 24)
    if second_step is not None:
        words.append(_every(second_step, "second"))
    elif seconds != [0]:
        words.append(f"at second{_s(seconds)} {_spans(seconds)}")
    if minute_step is not None:
        # "every 30 seconds" says already that it is every minute.
        words += [] if second_step is not None and minute_step == 1 else [_every(minute_step, "minute")]
    elif minutes != [0] or hour_step is None or words:
        words.append(f"at minute{_s(minutes)} {_spans(minutes)}")
    if hour_step is None:
        words.append(f"in hour{_s(hours)} {_spans(hours)}")
    elif hour_step > 1 or not any(word.startswith("every") for word in words):
        words.append(_every(hour_step, "hour"))
    return " ".join(words), True


def _every(step: int, unit: str) -> str:
    return f"every {unit}" if step == 1 else f"every {step} {unit}s"


def _s(values: Sequence[int]) -> str:
    return "" if len(values) == 1 else "s"


def _spans(values: Iterable[int]) -> str:
    """``9 to 17 and 20``"""
    spans: list[list[int]] = []
    for value in values:
        if spans and value == spans[-1][1] + 1:
            spans[-1][1] = value
        else:
            spans.append([value, value])
    return _joined([str(low) if low == high else f"{low} to {high}" for low, high in spans])


def _joined(words: Sequence[str], *, has_more: bool = False, last: str = "and") -> str:
    if has_more:
        return f"{', '.join(words)} and others"
    if len(words) == 1:
        return words[0]
    return f"{', '.join(words[:-1])} {last} {words[-1]}"


def _days_text(expression: CronExpression) -> str:
    months = _values(expression.month_mask)
    names = _joined([_MONTHS[month] for month in months])
    of_month = "of every month" if len(months) == 12 else f"of {names}"
    all_weekdays = expression.weekday_mask == 0x7F
    all_days = expression.day_mask == 0xFFFFFFFE
    by_weekday = _weekdays_text(expression, of_month)
    by_day = f"on {_month_days_text(expression)} {of_month}"
    if all_days and all_weekdays:
        text = "every day" if len(months) == 12 else f"every day {of_month}"
    elif all_days and not expression.is_either_day:
        text = by_weekday
        if len(months) < 12 and not expression.weekday_rules:
            text += f" {of_month}"
    elif all_weekdays and not expression.is_either_day:
        text = by_day
    elif expression.is_either_day:
        text = f"{by_day} and also {by_weekday}"
    else:
        text = f"{by_day} if that is a day for which {by_weekday} holds"
        if not expression.weekday_rules:
            weekdays = [_WEEKDAYS[day] for day in _values(expression.weekday_mask)]
            text = f"{by_day} if that is a {_joined(weekdays, last='or')}"
    if expression.years is not None:
        text += f" in {_spans(sorted(expression.years))}"
    return text


def _weekdays_text(expression: CronExpression, of_month: str) -> str:
    words = []
    if expression.weekday_mask == _WORKING_DAYS:
        words.append("every working day")
    elif expression.weekday_mask:
        # A week reads from Monday on.
        days = sorted(_values(expression.weekday_mask), key=lambda day: (day - 1) % 7)
        words.append(f"every {_joined([_WEEKDAYS[day] for day in days])}")
    words += [
        f"on the {_rank(rule)} {_WEEKDAYS[rule.weekday]} {of_month}" for rule in expression.weekday_rules
    ]
    return _joined(words)


def _rank(rule: DayRule) -> str:
    return (
        "last"
        if rule.kind == "LAST_WEEKDAY"
        else ("first", "second", "third", "fourth", "fifth")[rule.nth - 1]
    )


def _month_days_text(expression: CronExpression) -> str:
    words = []
    days = _values(expression.day_mask)
    if days:
        words.append(f"day{_s(days)} {_spans(days)}")
    for rule in expression.day_rules:
        if rule.kind == "NEAREST":
            words.append(f"the working day nearest to day {rule.number}")
        elif rule.kind == "NEAREST_LAST":
            words.append("the last working day")
        elif rule.number:
            words.append(f"day {rule.number} before the last")
        else:
            words.append("the last day")
    return _joined(words)
