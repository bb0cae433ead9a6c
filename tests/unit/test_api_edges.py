"""The edges of the API that need no server: filters, page tokens, names, values."""

from __future__ import annotations

import random
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from tickwheel.domain.job import (
    JobTemplate,
    Payload,
    RetryPolicy,
    Timeouts,
    UnknownOutcomePolicy,
    encode_template,
)
from tickwheel.domain.schedule import TimerState, first_state, state_after
from tickwheel.domain.trigger import NEVER_US, Cron, Trigger, TriggerSet
from tickwheel.domain.trigger import compile as compile_trigger
from tickwheel.errors import (
    FieldInvalid,
    FilterFieldNotIndexed,
    FilterInvalid,
    PageTokenMismatch,
    TriggerNeverFires,
)
from tickwheel.rpc import convert
from tickwheel.services.coordinator.calls import PageTokens, page_size
from tickwheel.services.coordinator.filters import Term, parse
from tickwheel.v1 import job_pb2

FIELDS = ("state", "labels", "name", "kind")


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("", []),
        ("  ", []),
        ("state = PAUSED", [Term("state", "", "=", "PAUSED")]),
        ('name:"nightly-*"', [Term("name", "", ":", "nightly-*")]),
        ('labels.team="a b" AND kind = x', [Term("labels", "team", "=", "a b"), Term("kind", "", "=", "x")]),
        ('labels."a.b" = "c"', [Term("labels", "a.b", "=", "c")]),
        ('kind = "AND"', [Term("kind", "", "=", "AND")]),
        (r'kind = "a\"b\\c"', [Term("kind", "", "=", r'a"b\c')]),
    ],
)
def test_a_filter_is_read_term_by_term(text: str, terms: list[Term]) -> None:
    assert parse(text, FIELDS) == terms


@pytest.mark.parametrize(
    "text",
    ["state", "= x", "state = a b", "state = a AND", "AND state = a", "state = a kind = b", '"', "state = "],
)
def test_what_is_no_filter_is_refused_with_where(text: str) -> None:
    with pytest.raises(FilterInvalid):
        parse(text, FIELDS)


def test_a_field_that_has_no_index_is_refused_with_those_that_have() -> None:
    with pytest.raises(FilterFieldNotIndexed, match="state, labels, name, kind"):
        parse("create_time = 5", FIELDS)


def test_any_text_is_either_read_or_refused() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    parts = ["state", "labels.x", "=", ":", '"', "\\", "AND", " ", "a", "\0", "(", "🙂", "*"]
    for _ in range(3_000):
        text = "".join(chance.choice(parts) for _ in range(chance.randrange(12)))
        try:
            parse(text, FIELDS)
        except (FilterInvalid, FilterFieldNotIndexed):
            continue


def test_a_page_token_is_read_by_its_own_query_alone() -> None:
    tokens = PageTokens("List", "tenants/a", "state = X")
    cursor = (1 << 60, bytes(range(16)))
    token = tokens.write(cursor)
    assert tokens.read(token) == cursor
    assert tokens.read("") is None
    assert tokens.write(None) == ""
    with pytest.raises(PageTokenMismatch):
        PageTokens("List", "tenants/b", "state = X").read(token)
    for rubbish in ("x", token[:-3], token + "A", "🙂", "A" * 100):
        with pytest.raises(PageTokenMismatch):
            tokens.read(rubbish)


def test_a_page_is_as_large_as_was_asked_within_bounds() -> None:
    assert [page_size(asked, 1_000) for asked in (0, 1, 1_000, 5_000)] == [50, 1, 1_000, 1_000]
    with pytest.raises(FieldInvalid):
        page_size(-1, 1_000)


def test_a_template_goes_through_the_wire_and_back() -> None:
    template = JobTemplate(
        kind="mail",
        queue="slow",
        priority=9,
        retry=RetryPolicy(
            attempt_count_max=7,
            initial_backoff_ms=1,
            multiplier=3.0,
            backoff_ms_max=5,
            jitter_ratio=0.0,
            non_retryable_types=("A", "B"),
        ),
        timeouts=Timeouts(start_ms_max=1, attempt_ms_max=2, run_ms_max=3, heartbeat_ms_max=4),
        lease_ms=2_500,
        on_unknown_outcome=UnknownOutcomePolicy.HOLD,
    )
    message = convert.template_message(template, Payload(b"x", "text/plain"))
    assert convert.template(message, "t") == template
    assert convert.payload(message.payload, "t.payload") == Payload(b"x", "text/plain")
    assert encode_template(convert.template(message, "t")) == encode_template(template)


def test_defaults_are_those_of_the_contract() -> None:
    template = convert.template(job_pb2.JobTemplate(kind="mail"), "t")
    assert template == JobTemplate(kind="mail")
    shown = convert.template_message(template)
    assert (shown.queue, shown.retry.attempt_count_max, shown.lease_duration.seconds) == ("default", 4, 10)


@pytest.mark.parametrize(
    ("seconds", "nanos"), [(-1, 0), (253_402_300_800, 0), (0, -1), (0, 1_000_000_000), (-(1 << 62), 0)]
)
def test_an_instant_outside_the_calendar_is_refused(seconds: int, nanos: int) -> None:
    with pytest.raises(FieldInvalid, match="when"):
        convert.time_us(Timestamp(seconds=seconds, nanos=nanos), "when")


def test_instants_and_durations_keep_their_microseconds() -> None:
    for us in (0, 1, 999_999, 1_000_000, 253_402_300_799_999_999):
        assert convert.time_us(convert.timestamp(us), "when") == us
    for us in (0, 1, 1_500_000):
        assert convert.duration_us(convert.duration(us), "length") == us
    assert convert.duration(-1_500_000) == Duration(seconds=-1, nanos=-500_000_000)
    with pytest.raises(FieldInvalid, match="fit together"):
        convert.duration_us(Duration(seconds=1, nanos=-1), "length")


@pytest.mark.parametrize("call", [convert.tenant_of, convert.schedule_of, convert.run_of])
@pytest.mark.parametrize(
    "name",
    ["", "/", "tenants", "tenants//", "tenants/A", "tenants/a/b", "tenants/-/schedules/x", "a" * 9_999],
)
def test_a_name_that_is_none_is_refused_without_repeating_it_all(call: Any, name: str) -> None:
    with pytest.raises(FieldInvalid) as caught:
        call(name)
    assert len(str(caught.value)) < 400


# --- When a schedule is due -------------------------------------------------------------------------------

DAY_US = 86_400_000_000


def at(*instants_us: int) -> Any:
    return compile_trigger(TriggerSet((Trigger(instants_us=instants_us),)))


def test_a_new_schedule_is_due_after_now() -> None:
    daily = compile_trigger(TriggerSet((Trigger(cron=Cron("0 9 * * *")),)))
    state = first_state(daily, bytes(16), 10 * DAY_US)
    assert state == TimerState(10 * DAY_US + 9 * 3_600_000_000, 10 * DAY_US + 9 * 3_600_000_000, 10 * DAY_US)


def test_instants_that_all_lie_in_the_past_are_due_at_once() -> None:
    assert first_state(at(5, 7), bytes(16), DAY_US) == TimerState(5, 5, 0)
    assert first_state(at(5, 2 * DAY_US), bytes(16), DAY_US).schedule_us == 2 * DAY_US


def test_what_is_over_never_fires() -> None:
    over = compile_trigger(TriggerSet((Trigger(cron=Cron("0 9 * * *")),), end_us=DAY_US))
    with pytest.raises(TriggerNeverFires):
        first_state(over, bytes(16), 10 * DAY_US)
    assert state_after(over, bytes(16), 10 * DAY_US) == TimerState(NEVER_US, NEVER_US, 10 * DAY_US)


def test_jitter_is_drawn_from_the_schedule_and_its_occurrence() -> None:
    jittered = compile_trigger(TriggerSet((Trigger(cron=Cron("0 * * * *")),), jitter_us=60_000_000))
    uids = [bytes([n]) * 16 for n in range(200)]
    states = [state_after(jittered, uid, DAY_US) for uid in uids]
    offsets = [state.due_us - state.schedule_us for state in states]
    assert states == [state_after(jittered, uid, DAY_US) for uid in uids]
    assert all(0 <= offset < 60_000_000 for offset in offsets)
    assert len(set(offsets)) > 150


def test_a_paused_schedule_is_never_due_and_keeps_what_was_decided() -> None:
    assert TimerState(5, 5, 3).never() == TimerState(NEVER_US, NEVER_US, 3)
