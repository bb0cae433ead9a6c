"""The trigger engine against one that is slow and obviously right.

The slow engine walks every minute of UTC, asks the standard library what the wall shows, and applies the
rules word by word; it shares no code with the engine. Expressions are drawn together with the sets that they
mean, so the parser is judged too. Bases lie around changes of offset in every zone of the data.
"""

from __future__ import annotations

import calendar
import io
import pkgutil
import zoneinfo
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tickwheel.domain import trigger as triggers
from tickwheel.domain import zone as zones
from tickwheel.domain.trigger import (
    NEVER_US,
    CompiledTrigger,
    Cron,
    DstGapPolicy,
    DstOverlapPolicy,
    Interval,
    Trigger,
    TriggerSet,
)
from tickwheel.errors import TriggerNeverFires

pytestmark = pytest.mark.slow
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MINUTE_US = 60_000_000
DAYS_BEFORE, DAYS_AFTER = 3, 4
EXAMPLES = settings(
    max_examples=2_500,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)

# -- Expressions, drawn with what they mean
# --------------------------------------------------------------------------

MONTH_NAMES = "JAN FEB MAR APR MAY JUN JUL AUG SEP OCT NOV DEC".split()  # noqa: SIM905
WEEKDAY_NAMES = "SUN MON TUE WED THU FRI SAT".split()  # noqa: SIM905


@dataclass(frozen=True)
class Field:
    text: str
    values: frozenset[int]
    is_day: Callable[[date], bool] | None = None


def weekday_of(day: date) -> int:
    return day.isoweekday() % 7


@st.composite
def plain_field(
    draw: st.DrawFn, low: int, high: int, names: tuple[str, ...] = (), drawn_max: int | None = None
) -> Field:
    """A list of one to three items, or a star; single values up to ``drawn_max`` only."""
    texts, values = [], set()
    for _ in range(draw(st.sampled_from((1, 1, 1, 2, 3)))):
        kind = draw(
            st.sampled_from(("star", "star/n", "value", "value", "range", "range/n", "wrap", "value/n"))
        )
        first = draw(st.integers(low, high if drawn_max is None else drawn_max))
        last = draw(st.integers(first, high))
        step = draw(st.integers(1, high - low + 1))

        def word(value: int) -> str:
            name = names[value - low] if names else ""
            return name if name and draw(st.booleans()) else str(value)

        if kind == "star":
            texts.append("*")
            values |= set(range(low, high + 1))
        elif kind == "star/n":
            texts.append(f"*/{step}")
            values |= set(range(low, high + 1, step))
        elif kind == "value":
            texts.append(word(first))
            values.add(first)
        elif kind == "range":
            texts.append(f"{word(first)}-{word(last)}")
            values |= set(range(first, last + 1))
        elif kind == "wrap" and first > low:
            last = draw(st.integers(low, first - 1))
            texts.append(f"{word(first)}-{word(last)}")
            values |= set(range(first, high + 1)) | set(range(low, last + 1))
        elif kind == "range/n":
            texts.append(f"{word(first)}-{word(last)}/{step}")
            values |= set(range(first, last + 1, step))
        else:
            texts.append(f"{word(first)}/{step}")
            values |= set(range(first, high + 1, step))
    return Field(",".join(texts), frozenset(values))


def last_day(day: date) -> int:
    return calendar.monthrange(day.year, day.month)[1]


def nearest_working_day(day: date, wanted: int) -> bool:
    """Whether this is the working day of its month that is nearest to the wanted day of it."""
    if wanted > last_day(day):
        return False
    candidates = [date(day.year, day.month, number) for number in range(1, last_day(day) + 1)]
    working = [candidate for candidate in candidates if candidate.isoweekday() < 6]
    return day == min(working, key=lambda candidate: abs(candidate.day - wanted))


@st.composite
def day_rule(draw: st.DrawFn) -> Field:
    kind = draw(st.sampled_from(("L", "L-n", "nW", "LW")))
    number = draw(st.integers(1, 27))
    nothing: frozenset[int] = frozenset()
    if kind == "L":
        return Field("L", nothing, lambda day: day.day == last_day(day))
    if kind == "L-n":
        return Field(f"L-{number}", nothing, lambda day: day.day == last_day(day) - number)
    if kind == "nW":
        return Field(f"{number}W", nothing, lambda day: nearest_working_day(day, number))
    return Field("LW", nothing, lambda day: nearest_working_day(day, last_day(day)))


@st.composite
def weekday_rule(draw: st.DrawFn) -> Field:
    weekday, nth = draw(st.integers(0, 6)), draw(st.integers(1, 5))
    nothing: frozenset[int] = frozenset()
    if draw(st.booleans()):
        return Field(
            f"{weekday}L", nothing, lambda day: weekday_of(day) == weekday and day.day > last_day(day) - 7
        )
    return Field(
        f"{weekday}#{nth}", nothing, lambda day: weekday_of(day) == weekday and (day.day - 1) // 7 + 1 == nth
    )


STAR = st.just(Field("*", frozenset(range(60))))


@dataclass(frozen=True)
class Expression:
    """Five fields with their meaning."""

    minute: Field
    hour: Field
    day: Field
    month: Field
    weekday: Field

    @property
    def text(self) -> str:
        return " ".join(field.text for field in (self.minute, self.hour, self.day, self.month, self.weekday))

    @property
    def is_wildcard(self) -> bool:
        return self.minute.text.startswith("*") or self.hour.text.startswith("*")

    def matches_day(self, day: date) -> bool:
        if day.month not in self.month.values:
            return False
        by_day = self.day.is_day(day) if self.day.is_day else day.day in self.day.values
        by_weekday = (
            self.weekday.is_day(day) if self.weekday.is_day else weekday_of(day) in self.weekday.values
        )
        if self.day.text.startswith("*") or self.weekday.text.startswith("*"):
            return by_day and by_weekday
        return by_day or by_weekday

    def matches(self, wall_minute: int) -> bool:
        """Whether the wall time, in minutes since 1970-01-01T00:00, is one of the expression's."""
        day, minute_of_day = divmod(wall_minute, 1_440)
        return (
            minute_of_day % 60 in self.minute.values
            and minute_of_day // 60 in self.hour.values
            and self.matches_day(date(1970, 1, 1) + timedelta(days=day))
        )


def expressions() -> st.SearchStrategy[Expression]:
    return st.builds(
        Expression,
        plain_field(0, 59),
        st.one_of(plain_field(0, 23), plain_field(0, 23, drawn_max=4)),
        st.one_of(STAR, STAR, plain_field(1, 31), day_rule()),
        st.one_of(STAR, STAR, STAR, plain_field(1, 12, tuple(MONTH_NAMES))),
        st.one_of(STAR, STAR, plain_field(0, 6, tuple(WEEKDAY_NAMES)), weekday_rule()),
    )


# -- The slow engine
# -------------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def wall_minutes(zone_name: str, first_minute: int, count: int) -> list[int]:
    """What the wall shows at each minute of UTC, in minutes since 1970-01-01T00:00, by the standard
    library.
    """
    data = pkgutil.get_data("tzdata", f"zoneinfo/{zone_name}")
    assert data is not None
    standard = zoneinfo.ZoneInfo.from_file(io.BytesIO(data))
    start = EPOCH + timedelta(minutes=first_minute)
    naive_epoch = datetime(1970, 1, 1)
    return [
        ((start + timedelta(minutes=i)).astimezone(standard).replace(tzinfo=None) - naive_epoch)
        // timedelta(minutes=1)
        for i in range(count)
    ]


def slow_minutes(
    expression: Expression,
    zone_name: str,
    gap: DstGapPolicy,
    overlap: DstOverlapPolicy,
    first_minute: int,
    count: int,
) -> list[int]:
    """The minutes of UTC at which the expression fires, ascending, by walking every one of them."""
    wall = wall_minutes(zone_name, first_minute, count)
    matching = {minute for minute in set(wall) if expression.matches(minute)}
    if expression.is_wildcard:
        return [first_minute + i for i in range(count) if wall[i] in matching]
    found: set[int] = set()
    seen: set[int] = set()
    last_at = {minute: i for i, minute in enumerate(wall)}
    for i, minute in enumerate(wall):
        is_first, is_last = minute not in seen, last_at[minute] == i
        seen.add(minute)
        chosen = {"FIRST": is_first, "SECOND": is_last, "BOTH": True}[overlap.value]
        if minute in matching and chosen:
            found.add(first_minute + i)
        skipped = range(wall[i - 1] + 1, minute) if i and wall[i - 1] + 1 < minute else ()
        for number, missing in enumerate(skipped):
            if not expression.matches(missing) or missing in seen:
                continue
            if gap is DstGapPolicy.RUN_AT_GAP_END:
                found.add(first_minute + i)
            elif gap is DstGapPolicy.RUN_SHIFTED:
                found.add(first_minute + i + number)
    return sorted(found)


# -- Where to look
# ---------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def changes() -> list[tuple[str, int]]:
    """Every change of offset from 1975 to 2040 that happens on a whole minute, as (zone, minute of UTC)."""
    found = []
    for name in sorted(zones._names() - {"Factory"}):
        zone = zones.zone(name)
        indexes = range(zone.index_at(157_766_400) + 1, zone.index_at(2_208_988_800) + 1)
        found += [(name, zone.segment(index).start_s // 60) for index in indexes]
    return found


FAVOURITES = [
    *("Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "America/Sao_Paulo", "Pacific/Chatham"),
    *("Pacific/Apia", "Africa/Cairo", "Africa/Casablanca", "Europe/Dublin", "Antarctica/Troll", "Asia/Gaza"),
]


@lru_cache(maxsize=1)
def favourite_changes() -> list[tuple[str, int]]:
    return [place for place in changes() if place[0] in FAVOURITES]


def places() -> st.SearchStrategy[tuple[str, int]]:
    """A zone and the minute of UTC of one of its changes."""
    return st.one_of(st.sampled_from(changes()), st.sampled_from(favourite_changes()))


def compiled(expression: Expression, zone_name: str, **policies: object) -> CompiledTrigger | None:
    """None if it never fires."""
    trigger = Trigger(cron=Cron(expression.text), time_zone=zone_name, **policies)  # type: ignore[arg-type]
    try:
        return triggers.compile(TriggerSet((trigger,)))
    except TriggerNeverFires:
        return None


@EXAMPLES
@given(
    expression=expressions(),
    place=places(),
    gap=st.sampled_from(DstGapPolicy),
    overlap=st.sampled_from(DstOverlapPolicy),
    base_offsets_us=st.lists(
        st.integers(-2 * 1_440 * MINUTE_US, 2 * 1_440 * MINUTE_US), min_size=3, max_size=3
    ),
)
def test_the_engine_agrees_with_walking_every_minute(
    expression: Expression,
    place: tuple[str, int],
    gap: DstGapPolicy,
    overlap: DstOverlapPolicy,
    base_offsets_us: list[int],
) -> None:
    zone_name, change_minute = place
    trigger = compiled(expression, zone_name, dst_gap_policy=gap, dst_overlap_policy=overlap)
    first_minute, count = change_minute - DAYS_BEFORE * 1_440, (DAYS_BEFORE + DAYS_AFTER) * 1_440
    slow = slow_minutes(expression, zone_name, gap, overlap, first_minute, count)
    # The walk's own first day cannot know what came before it, nor its last what comes after.
    low_us, high_us = (change_minute - 2 * 1_440) * MINUTE_US, (change_minute + 3 * 1_440) * MINUTE_US
    expected = [minute * MINUTE_US for minute in slow if low_us < minute * MINUTE_US <= high_us]
    if trigger is None:
        assert expected == []
        return

    assert trigger.between(low_us, high_us, 100_000) == expected
    assert trigger.latest_between(low_us, high_us, 100_000) == expected[::-1]
    assert trigger.count_between(low_us, high_us, 100_000) == len(expected)
    limit = max(1, len(expected) // 3)
    assert trigger.between(low_us, high_us, limit) == expected[:limit]
    assert trigger.latest_between(low_us, high_us, limit) == expected[-limit:][::-1]

    bases_us = [change_minute * MINUTE_US + offset_us for offset_us in base_offsets_us]
    bases_us += [base_us + i for base_us in expected[:5] for i in (-1, 0, 1)]
    for base_us in bases_us:
        later = [instant_us for instant_us in expected if instant_us > base_us]
        next_us = trigger.next_after(base_us)
        assert next_us is None or next_us > base_us
        if later and base_us >= low_us:
            assert next_us == later[0]
        elif base_us >= low_us:
            assert next_us is None or next_us > high_us
        until_us = base_us + 1_440 * MINUTE_US
        inside = [instant_us for instant_us in expected if base_us < instant_us <= until_us]
        if base_us >= low_us and until_us <= high_us:
            assert trigger.count_between(base_us, until_us, 100_000) == len(inside)

    many = trigger.next_after_many(np.array(bases_us * 3, dtype=np.int64))
    for base_us, found_us in zip(bases_us * 3, many.tolist(), strict=True):
        next_us = trigger.next_after(base_us)
        assert found_us == (NEVER_US if next_us is None else next_us)


@settings(EXAMPLES, max_examples=500)
@given(
    pair=st.tuples(expressions(), expressions()),
    place=places(),
    minutes=st.integers(1, 3_000),
    excluded=st.sets(st.integers(-2, 3), max_size=4),
    bounds=st.tuples(st.integers(-2_000, 0), st.integers(1, 3_000)),
)
def test_several_triggers_bounds_and_exclusions_agree_with_filtering(
    pair: tuple[Expression, Expression],
    place: tuple[str, int],
    minutes: int,
    excluded: set[int],
    bounds: tuple[int, int],
) -> None:
    zone_name, change_minute = place
    first_minute, count = change_minute - DAYS_BEFORE * 1_440, (DAYS_BEFORE + DAYS_AFTER) * 1_440
    walls = wall_minutes(zone_name, first_minute, count)
    change_day = walls[DAYS_BEFORE * 1_440] // 1_440
    dates = frozenset(date(1970, 1, 1) + timedelta(days=change_day + offset) for offset in excluded)
    anchor_us = (change_minute - 5_000) * MINUTE_US
    start_us, end_us = ((change_minute + bound) * MINUTE_US for bound in bounds)
    members = [Trigger(cron=Cron(expression.text), time_zone=zone_name) for expression in pair]
    members.append(Trigger(interval=Interval(minutes * MINUTE_US, anchor_us), time_zone=zone_name))
    try:
        trigger = triggers.compile(TriggerSet(tuple(members), dates, start_us, end_us))
    except TriggerNeverFires:
        trigger = None

    policies = (DstGapPolicy.RUN_AT_GAP_END, DstOverlapPolicy.FIRST)
    firing = {
        minute
        for expression in pair
        for minute in slow_minutes(expression, zone_name, *policies, first_minute, count)
    }
    firing |= {
        minute
        for minute in range(first_minute, first_minute + count)
        if (minute - change_minute + 5_000) % minutes == 0
    }
    expected = [
        minute * MINUTE_US
        for minute in sorted(firing)
        if start_us <= minute * MINUTE_US < end_us
        and date(1970, 1, 1) + timedelta(days=walls[minute - first_minute] // 1_440) not in dates
    ]
    if trigger is None:
        # It may be a member that never fires at all, which is refused whatever the others say.
        assert not expected or any(compiled(expression, zone_name) is None for expression in pair)
        return
    assert trigger.between(0, NEVER_US, 100_000) == expected
    assert trigger.latest_between(0, NEVER_US, 100_000) == expected[::-1]
    assert trigger.count_between(0, NEVER_US, 100_000) == len(expected)
    bases_us = [start_us + i * 97 * MINUTE_US for i in range(-3, 40)]
    many = trigger.next_after_many(np.array(bases_us, dtype=np.int64)).tolist()
    for base_us, found_us in zip(bases_us, many, strict=True):
        wanted_us = min((instant_us for instant_us in expected if instant_us > base_us), default=NEVER_US)
        assert found_us == wanted_us
        assert (trigger.next_after(base_us) or NEVER_US) == wanted_us
