"""Triggers through the server: the cases of `tests/data/cron.json`, previews, upcoming occurrences."""

from __future__ import annotations

import asyncio
import json
import sys
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tickwheel import errors
from tickwheel.client import Call, Client, make_spec
from tickwheel.embedded.cluster import Cluster
from tickwheel.v1 import schedule_pb2, schedule_service_pb2

CASES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent.parent / "data" / "cron.json").read_text(encoding="utf-8")
)["cases"]
FIRING = [case for case in CASES if not case.get("error")]
REFUSED = [case for case in CASES if case.get("error")]
SAVED_REFUSED = [case for case in REFUSED if not case["expr"].startswith("H ")]
"""An `H` draws from the schedule's name: only a trigger that is not saved has none."""
TRIGGER_ERRORS = (errors.TriggerInvalid, errors.TriggerNeverFires, errors.TimeZoneUnknown)


@pytest.fixture
def sql(api_cluster: Cluster) -> Iterator[psycopg.Connection]:
    with psycopg.connect(api_cluster.postgres_url, autocommit=True) as connection:
        yield connection


def fresh(prefix: str = "t") -> str:
    return f"{prefix}-{uuid.uuid4().hex[:12]}"


def names(cases: list[dict[str, Any]]) -> list[str]:
    return [case["id"] for case in cases]


def trigger_of(case: dict[str, Any]) -> schedule_pb2.Trigger:
    dialect = schedule_pb2.CronDialect.Value(f"CRON_DIALECT_{case['dialect']}")
    return schedule_pb2.Trigger(
        cron=schedule_pb2.CronTrigger(expression=case["expr"], dialect=dialect), time_zone=case["tz"]
    )


def spec_of(case: dict[str, Any]) -> schedule_pb2.ScheduleSpec:
    spec = make_spec("echo", cron="* * * * *")
    spec.triggers[0].CopyFrom(trigger_of(case))
    return spec


def at(text: str) -> datetime:
    return datetime.fromisoformat(text)


def instants(occurrences: Any) -> list[str]:
    return [each.schedule_time.ToJsonString() for each in occurrences]


def test_all_145_cases_are_asked_of_the_server() -> None:
    assert len(FIRING) + len(REFUSED) == 145


@pytest.mark.parametrize("case", FIRING, ids=names(FIRING))
async def test_a_preview_names_the_expected_instants(client: Client, case: dict[str, Any]) -> None:
    count = len(case["expected"]) + bool(case.get("exhausted"))
    seen = await client.schedules.preview(trigger_of(case), count=count or 1, after=at(case["base"]))
    assert instants(seen.occurrences)[: len(case["expected"])] == case["expected"]
    if case.get("exhausted"):
        assert len(seen.occurrences) == len(case["expected"])
    assert seen.description


@pytest.mark.parametrize("case", FIRING, ids=names(FIRING))
async def test_a_schedule_that_starts_after_the_base_is_due_at_the_expected_instants(
    client: Client, case: dict[str, Any]
) -> None:
    spec = spec_of(case)
    base = at(case["base"]).astimezone(UTC)
    spec.start_time.FromDatetime(base + timedelta(microseconds=1))
    lies_ahead = base > datetime.now(UTC)
    try:
        made = await client.schedules.create(fresh(), spec, validate_only=True)
    except errors.TriggerNeverFires:
        assert all(at(each) < datetime.now(UTC) for each in case["expected"])
        return
    found = instants(made.status.next_occurrences)
    assert found
    if lies_ahead:
        assert found[: len(case["expected"])] == case["expected"]


@pytest.mark.parametrize("case", SAVED_REFUSED, ids=names(SAVED_REFUSED))
async def test_a_bad_trigger_is_refused_at_creation_with_its_field(
    client: Client, case: dict[str, Any]
) -> None:
    with pytest.raises(TRIGGER_ERRORS) as refused:
        await client.schedules.create(fresh(), spec_of(case))
    _check_refusal(refused.value, "schedule.spec.triggers[0].", case)


@pytest.mark.parametrize("case", SAVED_REFUSED, ids=names(SAVED_REFUSED))
async def test_a_bad_trigger_is_refused_at_an_update_with_its_field(
    client: Client, case: dict[str, Any]
) -> None:
    before = await client.schedules.create(fresh(), kind="echo", cron="0 9 * * *")
    wanted = schedule_pb2.Schedule(name=before.name, spec=spec_of(case))
    with pytest.raises(TRIGGER_ERRORS) as refused:
        await client.schedules.update(wanted, update_mask=["spec.triggers"])
    _check_refusal(refused.value, "schedule.spec.triggers[0].", case)
    assert (await client.schedules.get(before.name)).spec == before.spec


@pytest.mark.parametrize("case", REFUSED, ids=names(REFUSED))
async def test_a_bad_trigger_is_refused_in_a_preview_with_its_field(
    client: Client, case: dict[str, Any]
) -> None:
    with pytest.raises(TRIGGER_ERRORS) as refused:
        await client.schedules.preview(trigger_of(case), after=at(case["base"]))
    _check_refusal(refused.value, "triggers[0].", case)


def _check_refusal(refused: Any, path: str, case: dict[str, Any]) -> None:
    if isinstance(refused, errors.TimeZoneUnknown):
        assert refused.field == f"{path}time_zone"
        assert refused.name == case["tz"][:64]
    else:
        assert refused.field.startswith(f"{path}cron.")
    if isinstance(refused, errors.TriggerInvalid) and case["expr"]:
        assert refused.column is not None
        assert 1 <= refused.column <= len(case["expr"]) + 1


async def test_an_endless_expression_is_refused_as_a_bad_trigger(client: Client) -> None:
    for expression in ("1," * 5_000 + "1 * * * *", "0-99999999 * * * *", "* " * 5_000):
        with pytest.raises(errors.TriggerInvalid):
            await client.schedules.create(fresh(), kind="echo", cron=expression)


# --- Previews ---------------------------------------------------------------------------------------------


async def test_a_preview_says_what_a_clock_change_does(client: Client) -> None:
    trigger = make_spec("x", cron="30 2 * * *", time_zone="Europe/Berlin").triggers[0]
    seen = await client.schedules.preview(trigger, count=2, after=at("2027-03-27T12:00:00Z"))
    assert instants(seen.occurrences) == ["2027-03-28T01:00:00Z", "2027-03-29T00:30:00Z"]
    assert [each.utc_offset for each in seen.occurrences] == ["+02:00", "+02:00"]
    assert seen.occurrences[0].adjustment == "02:30 does not exist on 2027-03-28 in this zone"
    assert not seen.occurrences[1].adjustment
    assert seen.description == "every day at 02:30 in Berlin"
    assert list(seen.warnings) == ["02:30 does not exist on 2027-03-28 in this zone: will run at 03:00"]


async def test_each_occurrence_is_shown_in_the_zone_of_the_trigger_that_names_it(client: Client) -> None:
    request = schedule_service_pb2.PreviewTriggerRequest(
        triggers=[
            make_spec("x", cron="0 12 * * *", time_zone=zone).triggers[0]
            for zone in ("Asia/Tokyo", "America/New_York")
        ],
        count=2,
    )
    request.after_time.FromDatetime(at("2027-01-01T00:00:00Z"))
    seen = await client._send(Call("schedules", "PreviewTrigger", request, lambda response: response))
    assert [each.utc_offset for each in seen.occurrences] == ["+09:00", "-05:00"]


async def _list(
    client: Client, request: schedule_service_pb2.ListUpcomingOccurrencesRequest
) -> schedule_service_pb2.ListUpcomingOccurrencesResponse:
    return await client._send(
        Call("schedules", "ListUpcomingOccurrences", request, lambda response: response)
    )


# --- Upcoming occurrences ---------------------------------------------------------------------------------


async def test_upcoming_occurrences_are_due_when_the_timer_row_says(
    client: Client, sql: psycopg.Connection
) -> None:
    spec = make_spec("echo", cron="0 * * * *", jitter=timedelta(minutes=30))
    made = await client.schedules.create(fresh(), spec)
    row = sql.execute(
        "SELECT due_us, schedule_us FROM timer WHERE ref = %s", (uuid.UUID(made.uid),)
    ).fetchone()
    seen = await client.schedules.upcoming(made.name, count=3)
    first = seen.occurrences[0]
    assert row == (first.due_time.ToMicroseconds(), first.schedule_time.ToMicroseconds())
    assert list(seen.occurrences) == list(made.status.next_occurrences)[:3]
    assert (
        len(
            {
                each.due_time.ToMicroseconds() - each.schedule_time.ToMicroseconds()
                for each in seen.occurrences
            }
        )
        > 1
    )


async def test_upcoming_occurrences_come_page_by_page_within_bounds(client: Client) -> None:
    made = await client.schedules.create(fresh(), kind="echo", cron="0 9 * * *", time_zone="Europe/Berlin")
    request = schedule_service_pb2.ListUpcomingOccurrencesRequest(name=made.name, page_size=2)
    request.after_time.FromDatetime(at("2030-03-29T00:00:00Z"))
    request.until_time.FromDatetime(at("2030-04-02T07:00:00Z"))
    found: list[schedule_pb2.Occurrence] = []
    page_count = 0
    while True:
        page = await _list(client, request)
        found += page.occurrences
        page_count += 1
        if not page.next_page_token:
            break
        request.page_token = page.next_page_token
    assert [(each.schedule_time.ToJsonString(), each.utc_offset) for each in found] == [
        ("2030-03-29T08:00:00Z", "+01:00"),
        ("2030-03-30T08:00:00Z", "+01:00"),
        ("2030-03-31T07:00:00Z", "+02:00"),
        ("2030-04-01T07:00:00Z", "+02:00"),
    ], "until_time is exclusive"
    assert page_count <= 3


async def test_an_excluded_date_is_shown_on_request(client: Client) -> None:
    spec = make_spec("echo", cron="0 9 * * *", time_zone="Asia/Tokyo")
    spec.exclusions.add(dates=["2030-05-02"])
    made = await client.schedules.create(fresh(), spec)
    after, until = at("2030-05-01T00:00:00+09:00"), at("2030-05-04T00:00:00+09:00")
    plain = await client.schedules.upcoming(made.name, after=after, until=until)
    shown = await client.schedules.upcoming(made.name, after=after, until=until, show_excluded=True)
    assert instants(plain.occurrences) == ["2030-05-01T00:00:00Z", "2030-05-03T00:00:00Z"]
    assert [each.exclusion for each in shown.occurrences] == ["", "the date 2030-05-02 is excluded", ""]
    assert not shown.occurrences[1].HasField("due_time")
    assert shown.occurrences[1].schedule_time.ToJsonString() == "2030-05-02T00:00:00Z"


async def test_a_count_limit_ends_the_upcoming_occurrences(client: Client) -> None:
    spec = make_spec("echo", cron="0 * * * *")
    spec.run_count_max = 3
    made = await client.schedules.create(fresh(), spec)
    request = schedule_service_pb2.ListUpcomingOccurrencesRequest(name=made.name, page_size=2)
    first = await _list(client, request)
    request.page_token = first.next_page_token
    second = await _list(client, request)
    assert (len(first.occurrences), len(second.occurrences)) == (2, 1)
    assert not second.next_page_token


async def test_the_command_line_shows_what_is_upcoming_and_what_is_left_out(
    client: Client, api_cluster: Cluster
) -> None:
    spec = make_spec("echo", cron="30 2 * * *", time_zone="Europe/Berlin")
    spec.exclusions.add(dates=["2031-03-29"])
    made = await client.schedules.create(fresh(), spec)
    command = [
        *("schedule", "upcoming", made.name, "--excluded", "--count", "2"),
        *("--after", "2031-03-28T12:00:00Z", "--address", api_cluster.api_addresses[0]),
    ]
    shown = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tickwheel.cli", *command), stdout=asyncio.subprocess.PIPE
    )
    output, _ = await shown.communicate()
    text = " ".join(output.decode().split())
    assert shown.returncode == 0
    assert "every day at 02:30 in Berlin, except on 2031-03-29" in text
    assert "the date 2031-03-29 is excluded" in text
    assert "warning: 02:30 does not exist on 2031-03-30 in this zone: will run at 03:00" in text


async def test_upcoming_occurrences_of_a_missing_schedule_are_not_found(client: Client) -> None:
    with pytest.raises(errors.NotFound):
        await client.schedules.upcoming("there-is-none")
