"""Whatever is written where a trigger's text goes is answered or refused: never another exception, never
late.
"""

from __future__ import annotations

import contextlib
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tickwheel.domain import cron, describe
from tickwheel.domain import trigger as triggers
from tickwheel.domain.trigger import (
    NEVER_US,
    Cron,
    Dialect,
    Rrule,
    Trigger,
    TriggerSet,
    canonical_bytes,
    from_canonical,
)
from tickwheel.errors import InvalidArgument

pytestmark = pytest.mark.slow
EXAMPLES = settings(max_examples=1_000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
BASE_US = 1_790_000_000_000_000
ANSWER_S_MAX = 1.0
"""Ten times what is promised on an idle machine."""

words = st.one_of(
    st.text(alphabet="0123456789*/-,#LWH?()", max_size=8),
    st.sampled_from(
        ("*", "0", "*/5", "1-5", "L", "LW", "15W", "5L", "1#2", "?", "MON", "JAN-MAR", "H", "H/7", "29", "2")
    ),
)
crons = st.one_of(
    st.lists(words, min_size=4, max_size=8).map(" ".join),
    st.text(max_size=40),
    st.sampled_from(("@daily", "@weekly", "@x", "@")),
)
PARTS = [
    *("INTERVAL=2", "INTERVAL=7300", "COUNT=5", "COUNT=10000", "UNTIL=20300101T000000Z", "BYDAY=MO,-1FR"),
    *(
        "BYMONTH=2",
        "BYMONTHDAY=30",
        "BYMONTHDAY=-31",
        "BYYEARDAY=366",
        "BYWEEKNO=53",
        "BYSETPOS=-1",
        "WKST=SU",
    ),
    *("BYHOUR=5", "BYMINUTE=0,30", "BYSECOND=59", "BYDAY=SU", "BYMONTH=", "=", "X=1"),
]
rule_parts = st.one_of(
    st.sampled_from(PARTS),
    st.text(alphabet="BYMONTHDAU=0123456789,;-+", max_size=12),
)
rules = st.builds(
    lambda start, frequency, parts: f"{start} RRULE:FREQ={';'.join([frequency, *parts])}",
    st.sampled_from(
        ("DTSTART:20200229T013000", "DTSTART:19000101T000000Z", "DTSTART;VALUE=DATE:20270101", "")
    ),
    st.sampled_from(("YEARLY", "MONTHLY", "WEEKLY", "DAILY", "HOURLY", "MINUTELY", "SECONDLY", "NEVERLY")),
    st.lists(rule_parts, max_size=4),
)


def answer(trigger: Trigger) -> None:
    """Compiles and asks everything there is to ask."""
    began_s, refusal = time.process_time(), ""
    try:
        compiled = triggers.compile(TriggerSet((trigger,), start_us=1_000_000))
    except InvalidArgument as error:
        refusal = str(error)
    else:
        found = compiled.between(BASE_US, NEVER_US, 3)
        assert found == sorted(set(found))
        assert compiled.next_after(BASE_US) == (found[0] if found else None)
        if found:
            assert compiled.latest_between(BASE_US, found[-1], 3) == found[::-1]
            assert compiled.count_between(BASE_US, found[-1], 10) == len(found)
        assert "  " not in describe.preview(compiled, BASE_US, 3).description
        stored = canonical_bytes(compiled.trigger_set)
        assert triggers.compile(from_canonical(stored)).between(BASE_US, NEVER_US, 3) == found
    assert len(refusal) < 500
    assert time.process_time() - began_s < ANSWER_S_MAX


@EXAMPLES
@given(expression=crons, dialect=st.sampled_from(Dialect), seed=st.sampled_from((None, "a")))
def test_any_cron_is_answered_or_refused(expression: str, dialect: Dialect, seed: str | None) -> None:
    refused: InvalidArgument | None = None
    try:
        parsed = cron.parse(expression, dialect, seed)
    except InvalidArgument as error:
        refused = error
    if refused is not None:
        column = getattr(refused, "column", None)
        assert column is None or 1 <= column <= len(expression) + 1
        return
    assert cron.parse(parsed.text, dialect) == parsed
    answer(Trigger(cron=Cron(parsed.text, dialect), time_zone="Europe/Berlin"))


@EXAMPLES
@given(text=st.one_of(rules, st.text(max_size=60)))
def test_any_rule_is_answered_or_refused(text: str) -> None:
    answer(Trigger(rrule=Rrule(text), time_zone="America/New_York"))


@EXAMPLES
@given(name=st.one_of(st.text(max_size=70), st.text(alphabet="./\\AUTCEurope", max_size=20)))
def test_any_zone_name_is_known_or_refused(name: str) -> None:
    answer(Trigger(cron=Cron("0 0 * * *"), time_zone=name))


@EXAMPLES
@given(
    data=st.one_of(
        st.binary(max_size=60), st.text(max_size=60).map(lambda text: f'{{"triggers":[{text}]}}'.encode())
    )
)
def test_any_stored_bytes_are_read_or_refused(data: bytes) -> None:
    with contextlib.suppress(InvalidArgument):
        from_canonical(data)
