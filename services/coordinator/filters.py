"""Filters of lists: terms joined by AND, each on a field that the method names. Pure.

state = PAUSED AND labels.team = "billing" AND name : "nightly-*"
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from tickwheel.errors import FilterFieldNotIndexed, FilterInvalid

FILTER_CHARACTERS_MAX = 2_000
TERM_COUNT_MAX = 20
_TERM = re.compile(
    r'\s*(?P<field>[a-z_]+(?:\.(?:[A-Za-z0-9_./-]+|"(?:[^"\\]|\\.)*"))?)\s*(?P<operator>=|:|!=|<=|>=|<|>)\s*'
    r'(?P<value>"(?:[^"\\]|\\.)*"|[A-Za-z0-9_./*-]+)\s*'
)
_AND = re.compile(r"AND\b")


@dataclass(frozen=True, slots=True)
class Term:
    field: str
    """Its first part, such as `labels`."""
    key: str
    """What follows the first point, such as a label's key; empty otherwise."""
    operator: str
    """`=` or `:`."""
    value: str


def parse(text: str, fields: Iterable[str]) -> list[Term]:
    """The terms of a filter, in their order; none for an empty one.

    `fields` are those that may be asked for, `labels` for any label.

    Raises:
        FilterInvalid: the text cannot be read.
        FilterFieldNotIndexed: a term names another field.
    """
    if len(text) > FILTER_CHARACTERS_MAX:
        raise FilterInvalid("filter", f"{len(text)} characters are more than {FILTER_CHARACTERS_MAX}")
    known = tuple(fields)
    terms: list[Term] = []
    position = 0
    while text[position:].strip():
        if terms:
            joined = _AND.match(text, position)
            if joined is None:
                raise FilterInvalid("filter", f"expected AND at column {position + 1}")
            position = joined.end()
        match = _TERM.match(text, position)
        if match is None:
            raise FilterInvalid("filter", f"expected a term such as state = PAUSED at column {position + 1}")
        terms.append(_term(match, known))
        position = match.end()
        if len(terms) > TERM_COUNT_MAX:
            raise FilterInvalid("filter", f"more than {TERM_COUNT_MAX} terms")
    if terms and text.rstrip().endswith("AND"):
        raise FilterInvalid("filter", "expected a term after AND")
    return terms


def _term(match: re.Match[str], known: tuple[str, ...]) -> Term:
    field, _, key = match["field"].partition(".")
    if field not in known:
        raise FilterFieldNotIndexed("filter", f"{field} cannot be asked for; use {', '.join(known)}")
    if (field == "labels") != bool(key):
        wanted = 'labels.KEY = "VALUE"' if field == "labels" else f"{field} without a point"
        raise FilterInvalid("filter", f"write {wanted}")
    if match["operator"] not in ("=", ":"):
        raise FilterInvalid("filter", f"{match['operator']} is not supported; use = (or : for a prefix)")
    return Term(field, _unquoted(key), match["operator"], _unquoted(match["value"]))


def _unquoted(text: str) -> str:
    if not text.startswith('"'):
        return text
    return re.sub(r"\\(.)", r"\1", text[1:-1])
