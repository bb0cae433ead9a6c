"""Cron expressions of named dialects, parsed into bit masks.

The dialect is said, never guessed from the number of fields:

=============  ==================================================  ====================
dialect        fields                                              weekday numbers
=============  ==================================================  ====================
UNIX           minute hour day-of-month month day-of-week          0 or 7 = Sunday
UNIX_SECONDS   second, then as UNIX                                0 or 7 = Sunday
QUARTZ         second minute hour day-of-month month day-of-week   1 = Sunday
               and, if wanted, year; one day field must be ``?``
=============  ==================================================  ====================

Every field takes lists, ranges, steps and ``*``; ``a/n`` runs from a to the field's end; a range that ends
before it begins wraps (``22-2``, ``FRI-MON``). Months and weekdays take English names of three letters. The
days take ``L``, ``L-n``, ``nW``, ``LW`` (day of month) and ``nL``, ``n#k`` (day of week). ``H``, ``H(a-b)``
and ``H/n`` stand for numbers drawn from the schedule's name, so that a thousand schedules written alike do
not fire together; what is stored is the expression with the numbers in place.

Where both day fields are restricted either may match, as in Vixie cron; where one of them *starts with* a
star (``*/2`` too) both must. A job whose minute or hour starts with a star is a *wildcard* job: it steps
through real time, see ``recurrence``.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

from tickwheel.errors import TriggerInvalid, TriggerNeverFires

EXPRESSION_LENGTH_MAX = 1_024
YEAR_FIRST, YEAR_LAST = 1970, 2099
"""The years that QUARTZ's seventh field can name."""


class Dialect(StrEnum):
    UNIX = "UNIX"
    UNIX_SECONDS = "UNIX_SECONDS"
    QUARTZ = "QUARTZ"


class DayRule(NamedTuple):
    """A day that depends on the month: its last, the working day nearest to one, its third Friday."""

    kind: str
    """LAST (day of month minus ``number``), NEAREST and NEAREST_LAST working day, LAST_WEEKDAY,
    NTH_WEEKDAY.
    """
    number: int = 0
    """The day of the month, or how many days before its end."""
    weekday: int = 0
    """0 = Sunday"""
    nth: int = 0


@dataclass(frozen=True, slots=True)
class CronExpression:
    """A parsed expression. Bit n of a mask stands for the value n; in ``weekday_mask`` bit 0 is Sunday."""

    dialect: Dialect
    text: str
    """Single blanks, upper case, macros expanded, ``H`` resolved: parsing it again gives the same masks."""
    second_mask: int
    minute_mask: int
    hour_mask: int
    day_mask: int
    day_rules: tuple[DayRule, ...]
    month_mask: int
    weekday_mask: int
    weekday_rules: tuple[DayRule, ...]
    years: frozenset[int] | None
    """None: every year."""
    is_either_day: bool
    """Both day fields are restricted, and a day matches if either does."""
    is_wildcard: bool

    def day_bits(self, day_count: int, first_weekday: int) -> int:
        """The matching days of a month that has ``day_count`` days and begins on ``first_weekday`` (0 =
        Sunday).
        """
        all_days = (1 << (day_count + 1)) - 2
        by_day = self.day_mask & all_days
        for rule in self.day_rules:
            by_day |= _rule_bit(rule, day_count, first_weekday)
        # The week turned to begin on the month's first day, five times over: bit 0 is then day 1.
        week = (self.weekday_mask << 7 | self.weekday_mask) >> first_weekday & 0x7F
        by_weekday = week * _FIVE_WEEKS << 1 & all_days
        for rule in self.weekday_rules:
            by_weekday |= _rule_bit(rule, day_count, first_weekday)
        return by_day | by_weekday if self.is_either_day else by_day & by_weekday


_FIVE_WEEKS = 1 | 1 << 7 | 1 << 14 | 1 << 21 | 1 << 28


def _rule_bit(rule: DayRule, day_count: int, first_weekday: int) -> int:
    """The day that a rule names in a month, as a bit; 0 if this month has none."""

    def weekday(day: int) -> int:
        return (first_weekday + day - 1) % 7

    def nearest_working_day(day: int) -> int:
        if weekday(day) == 6:
            return day - 1 if day > 1 else day + 2
        if weekday(day) == 0:
            return day + 1 if day < day_count else day - 2
        return day

    day = 0
    if rule.kind == "LAST":
        day = day_count - rule.number
    elif rule.kind == "NEAREST":
        day = nearest_working_day(rule.number) if rule.number <= day_count else 0
    elif rule.kind == "NEAREST_LAST":
        day = nearest_working_day(day_count)
    elif rule.kind == "LAST_WEEKDAY":
        day = day_count - (weekday(day_count) - rule.weekday) % 7
    elif rule.kind == "NTH_WEEKDAY":
        day = 1 + (rule.weekday - first_weekday) % 7 + 7 * (rule.nth - 1)
    return 1 << day if 1 <= day <= day_count else 0


@dataclass(frozen=True, slots=True, eq=False)
class _Field:
    name: str
    low: int
    high: int
    """The largest value that may be written (7 for a weekday)."""
    cycle: int
    """The largest value of the cycle itself: where ``a/n`` ends, and where a range wraps."""
    names: dict[str, int]


_MONTHS = {
    name: i
    for i, name in enumerate(
        ["JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC"], 1
    )
}
_WEEKDAYS = {name: i for i, name in enumerate(["SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT"])}
_QUARTZ_WEEKDAYS = {name: i + 1 for name, i in _WEEKDAYS.items()}

_SECOND = _Field("second", 0, 59, 59, {})
_MINUTE = _Field("minute", 0, 59, 59, {})
_HOUR = _Field("hour", 0, 23, 23, {})
_DAY = _Field("day_of_month", 1, 31, 31, {})
_MONTH = _Field("month", 1, 12, 12, _MONTHS)
_WEEKDAY = _Field("day_of_week", 0, 7, 6, _WEEKDAYS)
_QUARTZ_WEEKDAY = _Field("day_of_week", 1, 7, 7, _QUARTZ_WEEKDAYS)
_YEAR = _Field("year", YEAR_FIRST, YEAR_LAST, YEAR_LAST, {})

_FIELDS = {
    Dialect.UNIX: (_MINUTE, _HOUR, _DAY, _MONTH, _WEEKDAY),
    Dialect.UNIX_SECONDS: (_SECOND, _MINUTE, _HOUR, _DAY, _MONTH, _WEEKDAY),
    Dialect.QUARTZ: (_SECOND, _MINUTE, _HOUR, _DAY, _MONTH, _QUARTZ_WEEKDAY, _YEAR),
}
_FIELD_COUNTS = {Dialect.UNIX: "5", Dialect.UNIX_SECONDS: "6, seconds first", Dialect.QUARTZ: "6 or 7"}

_MACROS = {
    "@YEARLY": "0 0 1 1 *",
    "@ANNUALLY": "0 0 1 1 *",
    "@MONTHLY": "0 0 1 * *",
    "@WEEKLY": "0 0 * * 0",
    "@DAILY": "0 0 * * *",
    "@MIDNIGHT": "0 0 * * *",
    "@HOURLY": "0 * * * *",
}
_QUARTZ_MACROS = {
    "@YEARLY": "0 0 0 1 1 ?",
    "@ANNUALLY": "0 0 0 1 1 ?",
    "@MONTHLY": "0 0 0 1 * ?",
    "@WEEKLY": "0 0 0 ? * 1",
    "@DAILY": "0 0 0 * * ?",
    "@MIDNIGHT": "0 0 0 * * ?",
    "@HOURLY": "0 0 * * * ?",
}

_WORD = re.compile(r"[^ \t\r\n]+")
_NUMBER = re.compile(r"[0-9]{1,4}")
_ITEM = re.compile(r"(?P<low>\*|\?|[0-9A-Z]+)(?:-(?P<high>[0-9A-Z]+))?(?:/(?P<step>[0-9]+))?")
_HASHED = re.compile(r"H(?:\((?P<low>[0-9A-Z]+)-(?P<high>[0-9A-Z]+)\))?(?:/(?P<step>[0-9]+))?")
_LAST_MINUS = re.compile(r"L-(?P<number>[0-9]+)")
_NEAREST = re.compile(r"(?P<number>[0-9]+)W")
_LAST_WEEKDAY = re.compile(r"(?P<weekday>[0-9]+|[A-Z]{3})L")
_NTH_WEEKDAY = re.compile(r"(?P<weekday>[0-9]+|[A-Z]{3})#(?P<nth>[0-9]+)")


class _Part(NamedTuple):
    """One parsed field."""

    text: str
    mask: int
    rules: tuple[DayRule, ...]

    @property
    def is_star(self) -> bool:
        return self.text[0] in "*?"


@lru_cache(maxsize=4_096)
def parse(expression: str, dialect: Dialect, seed: str | None = None) -> CronExpression:
    """Parses an expression; ``seed`` (the schedule's name) gives ``H`` its numbers, and without one ``H`` is
    refused.

    Raises TriggerInvalid with the field and the column, or TriggerNeverFires.
    """
    if len(expression) > EXPRESSION_LENGTH_MAX:
        raise TriggerInvalid("cron.expression", f"it is longer than {EXPRESSION_LENGTH_MAX} characters")
    words = [(match.group(), match.start() + 1) for match in _WORD.finditer(expression)]
    if not words:
        raise TriggerInvalid("cron.expression", "it is empty")
    if words[0][0].startswith("@"):
        words = _expand(words, dialect)
    fields = _FIELDS[dialect]
    if dialect is Dialect.QUARTZ and len(words) == 6:
        fields = fields[:6]
    if len(words) != len(fields):
        column = words[len(fields)][1] if len(words) > len(fields) else len(expression) + 1
        raise TriggerInvalid(
            "cron.expression",
            f"{dialect.value} has {_FIELD_COUNTS[dialect]} fields between blanks; this has {len(words)}",
            column,
        )
    parts = {}
    for field, (word, column) in zip(fields, words, strict=True):
        try:
            parts[field.name] = _parse_field(field, word, seed if "H" in word.upper() else None)
        except TriggerInvalid as error:
            at = error.column or 1
            raise TriggerInvalid(error.field, error.reason, column + at - 1) from error
    day, weekday = parts["day_of_month"], parts["day_of_week"]
    if dialect is Dialect.QUARTZ and (day.text == "?") == (weekday.text == "?"):
        column = words[5][1]
        raise TriggerInvalid(
            "cron.day_of_week", "QUARTZ wants ? in exactly one of its two day fields", column
        )
    made = CronExpression(
        dialect=dialect,
        text=" ".join(part.text for part in parts.values()),
        second_mask=parts["second"].mask if "second" in parts else 1,
        minute_mask=parts["minute"].mask,
        hour_mask=parts["hour"].mask,
        day_mask=day.mask,
        day_rules=day.rules,
        month_mask=parts["month"].mask,
        weekday_mask=_weekday_mask(weekday.mask, dialect),
        weekday_rules=weekday.rules,
        years=_years(parts.get("year")),
        is_either_day=not (day.is_star or weekday.is_star),
        is_wildcard=parts["minute"].is_star or parts["hour"].is_star,
    )
    _refuse_never(made)
    return made


def _expand(words: list[tuple[str, int]], dialect: Dialect) -> list[tuple[str, int]]:
    macro, column = words[0]
    name = macro.upper()
    if name == "@REBOOT":
        raise TriggerInvalid("cron.expression", "@reboot has no meaning in a cluster", column)
    if name not in _MACROS:
        known = ", ".join(sorted(_MACROS)).lower()
        raise TriggerInvalid("cron.expression", f"{macro[:32]!r} is not one of {known}", column)
    if len(words) > 1:
        raise TriggerInvalid("cron.expression", f"{macro} stands alone", words[1][1])
    text = _QUARTZ_MACROS[name] if dialect is Dialect.QUARTZ else _MACROS[name]
    if dialect is Dialect.UNIX_SECONDS:
        text = "0 " + text
    return [(word, column) for word in text.split()]


@lru_cache(maxsize=4_096)
def _parse_field(field: _Field, word: str, seed: str | None) -> _Part:
    """The field's mask and rules; the text comes back in upper case with ``H`` resolved.

    Columns in errors count from the word's own start: the same word is parsed once, wherever it stands.
    """
    column = 1
    if not word.isascii():
        offset = next(i for i, character in enumerate(word) if not character.isascii())
        raise TriggerInvalid(
            f"cron.{field.name}", f"{word[offset]!r} is not an ASCII character", column + offset
        )
    mask, rules, texts = 0, [], []
    for item in word.upper().split(","):
        if not item:
            raise TriggerInvalid(f"cron.{field.name}", "a list has an empty item", column)
        resolved = _resolve_hash(field, item, column, seed) if item[0] == "H" else item
        if field is _QUARTZ_WEEKDAY and item == "L":
            resolved = "7"  # there it is the week's last day, Saturday
        rule = _parse_rule(field, resolved, column)
        if rule is not None:
            rules.append(rule)
        else:
            for value in _parse_item(field, resolved, column):
                mask |= 1 << value
        texts.append(resolved)
        column += len(item) + 1
    if len(texts) > 1 and "?" in texts:
        raise TriggerInvalid(f"cron.{field.name}", "? stands alone in its field", column)
    return _Part(",".join(texts), mask, tuple(rules))


def _parse_item(field: _Field, item: str, column: int) -> Iterable[int]:
    match = _ITEM.fullmatch(item)
    if match is None:
        raise TriggerInvalid(f"cron.{field.name}", f"cannot read {item[:32]!r}", column)
    low_text, high_text, step_text = match.group("low", "high", "step")
    if low_text == "?" and (field.name not in ("day_of_month", "day_of_week") or step_text or high_text):
        raise TriggerInvalid(f"cron.{field.name}", "? stands for a whole day field", column)
    step = _number(field, step_text, column + match.start("step")) if step_text else 1
    if step == 0:
        raise TriggerInvalid(f"cron.{field.name}", "a step of 0 never moves", column + match.start("step"))
    if low_text in ("*", "?"):
        if high_text:
            raise TriggerInvalid(f"cron.{field.name}", f"{low_text} cannot begin a range", column)
        return range(field.low, field.cycle + 1, step)
    low = _value(field, low_text, column)
    if high_text is None:
        if not step_text:
            return (low,)
        high = field.cycle
    else:
        high = _value(field, high_text, column + match.start("high"))
    if low > high and low > field.cycle:
        low = field.low  # 7-2 and 7/2 begin on the Sunday that is also 0
    if low <= high:
        return range(low, high + 1, step)
    size = field.cycle - field.low + 1
    return [field.low + (value - field.low) % size for value in range(low, high + size + 1, step)]


def _parse_rule(field: _Field, item: str, column: int) -> DayRule | None:
    if field.name == "day_of_month":
        if item == "L":
            return DayRule("LAST")
        if item in ("LW", "WL"):
            return DayRule("NEAREST_LAST")
        if match := _LAST_MINUS.fullmatch(item):
            number = _number(field, match.group("number"), column + 2)
            if number > 30:
                raise TriggerInvalid(
                    "cron.day_of_month", f"no month has a day {number} before its last", column + 2
                )
            return DayRule("LAST", number)
        if match := _NEAREST.fullmatch(item):
            return DayRule("NEAREST", _value(field, match.group("number"), column))
    elif field.name == "day_of_week":
        if item == "L":
            raise TriggerInvalid("cron.day_of_week", "say which weekday is the last, such as 5L", column)
        if match := _LAST_WEEKDAY.fullmatch(item):
            return DayRule("LAST_WEEKDAY", weekday=_weekday(field, match.group("weekday"), column))
        if match := _NTH_WEEKDAY.fullmatch(item):
            nth = _number(field, match.group("nth"), column + match.start("nth"))
            if not 1 <= nth <= 5:
                reason = f"a month has a weekday at most 5 times, not {nth}"
                raise TriggerInvalid("cron.day_of_week", reason, column + match.start("nth"))
            return DayRule("NTH_WEEKDAY", weekday=_weekday(field, match.group("weekday"), column), nth=nth)
    return None


def _resolve_hash(field: _Field, item: str, column: int, seed: str | None) -> str:
    """``H`` as a number or a stepped range that depends on the seed and the field only."""
    match = _HASHED.fullmatch(item)
    if match is None:
        raise TriggerInvalid(f"cron.{field.name}", f"cannot read {item[:32]!r}", column)
    if seed is None:
        reason = "H is drawn from the schedule's name, and there is no name here"
        raise TriggerInvalid(f"cron.{field.name}", reason, column)
    # Days 29 to 31 are left out: a schedule must not lose months to its name.
    low, high = field.low, 28 if field is _DAY else field.cycle
    if match.group("low"):
        low = _value(field, match.group("low"), column + match.start("low"))
        high = _value(field, match.group("high"), column + match.start("high"))
        if low > high:
            raise TriggerInvalid(f"cron.{field.name}", f"{item[:32]} ends before it begins", column)
    draw = int.from_bytes(hashlib.sha256(f"{seed}\0{field.name}".encode()).digest()[:8], "big")
    if not match.group("step"):
        return str(low + draw % (high - low + 1))
    step = _number(field, match.group("step"), column + match.start("step"))
    if step == 0:
        raise TriggerInvalid(f"cron.{field.name}", "a step of 0 never moves", column + match.start("step"))
    return f"{low + draw % min(step, high - low + 1)}-{high}/{step}"


def _value(field: _Field, text: str, column: int) -> int:
    """A number or a name within the field's range."""
    if text in field.names:
        return field.names[text]
    number = _number(field, text, column)
    if not field.low <= number <= field.high:
        reason = f"{number} is not within {field.low} to {field.high}"
        raise TriggerInvalid(f"cron.{field.name}", reason, column)
    return number


def _number(field: _Field, text: str, column: int) -> int:
    if _NUMBER.fullmatch(text) is None:
        kind = "has too many digits" if text.isdigit() else "is neither a number nor a name of this field"
        raise TriggerInvalid(f"cron.{field.name}", f"{text[:32]!r} {kind}", column)
    return int(text)


def _weekday(field: _Field, text: str, column: int) -> int:
    """A weekday as 0 = Sunday, whatever the dialect counts from."""
    value = _value(field, text, column)
    return value - 1 if field is _QUARTZ_WEEKDAY else value % 7


def _weekday_mask(mask: int, dialect: Dialect) -> int:
    if dialect is Dialect.QUARTZ:
        return mask >> 1
    return (mask | mask >> 7) & 0x7F


def _years(part: _Part | None) -> frozenset[int] | None:
    if part is None or part.text == "*":
        return None
    return frozenset(year for year in range(YEAR_FIRST, YEAR_LAST + 1) if part.mask >> year & 1)


def month_length(year: int, month: int) -> int:
    if month == 2:
        return 29 if year % 4 == 0 and (year % 100 != 0 or year % 400 == 0) else 28
    return 30 if month in (4, 6, 9, 11) else 31


def _refuse_never(expression: CronExpression) -> None:
    """Proves that some month matches: the calendar repeats after 400 years, to the weekday."""
    for length, months in ((31, (1, 3, 5, 7, 8, 10, 12)), (30, (4, 6, 9, 11)), (28, (2,))):
        if any(expression.month_mask >> month & 1 for month in months) and expression.years is None:
            # Every month but a leap February begins on each weekday within those 400 years, and so does that
            # one.
            lengths = (28, 29) if length == 28 else (length,)
            if any(expression.day_bits(size, weekday) for size in lengths for weekday in range(7)):
                return
    if expression.years is not None:
        for year in sorted(expression.years):
            for month in range(1, 13):
                if expression.month_mask >> month & 1 and expression.day_bits(
                    month_length(year, month), _first_weekday(year, month)
                ):
                    return
    raise TriggerNeverFires("cron.expression", f"no calendar day matches {expression.text!r}")


def _first_weekday(year: int, month: int) -> int:
    """The weekday of a month's first day, 0 = Sunday (Sakamoto's method)."""
    shifted = year - (month < 3)
    return (
        shifted
        + shifted // 4
        - shifted // 100
        + shifted // 400
        + (0, 3, 2, 5, 0, 3, 5, 1, 4, 6, 2, 4)[month - 1]
        + 1
    ) % 7
