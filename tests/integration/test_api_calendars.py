"""CalendarService against a real Postgres, and what a changed calendar does to the schedules that name it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import grpc
import psycopg
import pytest
from google.longrunning import operations_pb2, operations_pb2_grpc

from tickwheel import errors
from tickwheel.client import Client, make_spec
from tickwheel.embedded.cluster import Cluster
from tickwheel.rpc.status import from_rpc_error
from tickwheel.v1 import (
    calendar_pb2,
    calendar_service_pb2,
    calendar_service_pb2_grpc,
    operation_pb2,
    schedule_pb2,
    schedule_service_pb2,
    schedule_service_pb2_grpc,
)

PARENT = "tenants/default"
ICS = b"""BEGIN:VCALENDAR
BEGIN:VEVENT
DTSTART;VALUE=DATE:20241225
DTEND;VALUE=DATE:20241227
RRULE:FREQ=YEARLY
END:VEVENT
BEGIN:VEVENT
DTSTART;VALUE=DATE:20300419
END:VEVENT
END:VCALENDAR
"""


@pytest.fixture
def sql(api_cluster: Cluster) -> Iterator[psycopg.Connection]:
    with psycopg.connect(api_cluster.postgres_url, autocommit=True) as connection:
        yield connection


@pytest.fixture
async def channel(api_cluster: Cluster) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(api_cluster.api_addresses[0]) as channel:
        yield channel


@pytest.fixture
def calendars(channel: grpc.aio.Channel) -> Any:
    return calendar_service_pb2_grpc.CalendarServiceStub(channel)


def fresh(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex[:12]}"


async def create(calendars: Any, *dates: str, **fields: Any) -> calendar_pb2.Calendar:
    request = calendar_service_pb2.CreateCalendarRequest(
        parent=PARENT, calendar_id=fresh("c"), calendar=calendar_pb2.Calendar(dates=dates, **fields)
    )
    made = await calendars.CreateCalendar(request)
    assert isinstance(made, calendar_pb2.Calendar)
    return made


async def refused(call: Any) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value)


async def ended(channel: grpc.aio.Channel, name: str) -> operation_pb2.OperationMetadata:
    request = operations_pb2.WaitOperationRequest(name=name)
    request.timeout.FromSeconds(60)
    found = await operations_pb2_grpc.OperationsStub(channel).WaitOperation(request)
    assert found.done
    metadata = operation_pb2.OperationMetadata()
    assert found.metadata.Unpack(metadata)
    assert metadata.state == operation_pb2.OperationMetadata.STATE_SUCCEEDED, metadata
    return metadata


def tomorrow_at(hour: int) -> datetime:
    day = datetime.now(UTC).date() + timedelta(days=1)
    return datetime(day.year, day.month, day.day, hour, tzinfo=UTC)


def first_next(schedule: schedule_pb2.Schedule) -> datetime:
    return schedule.status.next_occurrences[0].schedule_time.ToDatetime(tzinfo=UTC)


# --- The calendar itself ----------------------------------------------------------------------------------


async def test_a_calendar_is_read_as_it_was_created(calendars: Any) -> None:
    made = await create(calendars, "2030-05-01", display_name="Holidays", labels={"country": "de"})
    read = await calendars.GetCalendar(calendar_service_pb2.GetCalendarRequest(name=made.name))
    assert read == made
    assert (read.revision, list(read.dates), read.display_name) == (1, ["2030-05-01"], "Holidays")
    page = await calendars.ListCalendars(
        calendar_service_pb2.ListCalendarsRequest(parent=PARENT, page_size=1_000)
    )
    assert made.name in [each.name for each in page.calendars]


async def test_a_change_needs_the_current_etag(calendars: Any) -> None:
    made = await create(calendars, "2030-05-01")
    wanted = calendar_pb2.Calendar(name=made.name, dates=["2030-05-02"])
    missing = await refused(
        calendars.UpdateCalendar(calendar_service_pb2.UpdateCalendarRequest(calendar=wanted))
    )
    assert isinstance(missing, errors.FieldInvalid)
    assert missing.field == "calendar.etag"
    wanted.etag = made.etag
    changed = await calendars.UpdateCalendar(calendar_service_pb2.UpdateCalendarRequest(calendar=wanted))
    assert (changed.revision, list(changed.dates)) == (2, ["2030-05-02"])
    late = await refused(
        calendars.UpdateCalendar(calendar_service_pb2.UpdateCalendarRequest(calendar=wanted))
    )
    assert isinstance(late, errors.EtagMismatch)
    assert late.current == changed.etag


async def test_revisions_stay_and_can_be_rolled_back_to(calendars: Any) -> None:
    made = await create(calendars, "2030-05-01")
    wanted = calendar_pb2.Calendar(name=made.name, dates=["2030-06-01"], etag=made.etag)
    second = await calendars.UpdateCalendar(calendar_service_pb2.UpdateCalendarRequest(calendar=wanted))
    third = await calendars.RollbackCalendar(
        calendar_service_pb2.RollbackCalendarRequest(name=made.name, revision=1, etag=second.etag)
    )
    assert (third.revision, list(third.dates)) == (3, ["2030-05-01"])
    listed = await calendars.ListCalendarRevisions(
        calendar_service_pb2.ListCalendarRevisionsRequest(name=made.name)
    )
    assert [(each.revision, list(each.dates)) for each in listed.calendars] == [
        (3, ["2030-05-01"]),
        (2, ["2030-06-01"]),
        (1, ["2030-05-01"]),
    ]


async def test_an_icalendar_is_imported_and_its_rules_are_worked_out(calendars: Any) -> None:
    name = f"{PARENT}/calendars/{fresh('c')}"
    made = await calendars.ImportCalendar(calendar_service_pb2.ImportCalendarRequest(name=name, ics=ICS))
    assert list(made.dates) == ["2030-04-19"]
    assert {"2024-12-25", "2024-12-26", "2035-12-26", "2030-04-19"} <= set(made.effective_dates)
    more = ICS.replace(b"20300419", b"20310411")
    merged = await calendars.ImportCalendar(
        calendar_service_pb2.ImportCalendarRequest(name=name, ics=more, merge=True, etag=made.etag)
    )
    assert list(merged.dates) == ["2030-04-19", "2031-04-11"]
    bad = await refused(
        calendars.ImportCalendar(
            calendar_service_pb2.ImportCalendarRequest(
                name=name, ics=ICS.replace(b"20300419", b"soon"), etag=merged.etag
            )
        )
    )
    assert isinstance(bad, errors.FieldInvalid)
    assert "line 8" in str(bad)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"dates": ["2030-02-30"]}, "calendar.dates[0]"),
        ({"dates": ["2030-02-03"], "rules": ["RRULE:FREQ=NEVER"]}, "calendar.rules[0]"),
    ],
)
async def test_a_bad_calendar_is_refused_with_its_field(
    calendars: Any, fields: dict[str, Any], field: str
) -> None:
    request = calendar_service_pb2.CreateCalendarRequest(
        parent=PARENT, calendar_id=fresh("c"), calendar=calendar_pb2.Calendar(**fields)
    )
    error = await refused(calendars.CreateCalendar(request))
    assert isinstance(error, errors.FieldInvalid)
    assert error.field == field


# --- Schedules that name it -------------------------------------------------------------------------------


async def test_a_schedule_is_not_due_on_the_dates_of_its_calendar(client: Client, calendars: Any) -> None:
    holiday = tomorrow_at(9)
    made = await create(calendars, holiday.date().isoformat(), display_name="German holidays")
    spec = make_spec("echo", cron="0 9 * * *")
    spec.exclusions.add(calendars=[made.name])
    schedule = await client.schedules.create(fresh("s"), spec)
    assert first_next(schedule) not in (holiday,)
    assert first_next(await client.schedules.get(schedule.name)) == first_next(schedule)
    shown = await client.schedules.upcoming(
        schedule.name, after=holiday - timedelta(hours=1), count=2, show_excluded=True
    )
    calendar_id = made.name.rpartition("/")[2]
    assert shown.occurrences[0].exclusion == f"{holiday.date()} is in the calendar {calendar_id}"
    assert shown.description == "every day at 09:00 UTC, except German holidays"


async def test_a_schedule_that_moves_is_due_on_the_next_working_day(client: Client, calendars: Any) -> None:
    made = await create(calendars, "2030-12-25", "2030-12-26")
    spec = make_spec("echo", cron="0 9 25 12 *")
    spec.triggers[0].calendar_shift = schedule_pb2.CALENDAR_SHIFT_NEXT_WORKING_DAY
    spec.exclusions.add(calendars=[made.name])
    spec.start_time.FromDatetime(datetime(2030, 1, 1))
    schedule = await client.schedules.create(fresh("s"), spec)
    assert first_next(schedule) == datetime(2030, 12, 27, 9, tzinfo=UTC)
    assert schedule.status.next_occurrences[0].adjustment == "moved from 2030-12-25, no working day"


async def test_a_preview_takes_calendars_too(calendars: Any, channel: grpc.aio.Channel) -> None:
    made = await create(calendars, "2030-05-02", display_name="Bank holidays")
    request = schedule_service_pb2.PreviewTriggerRequest(
        triggers=make_spec("x", cron="0 9 * * MON-FRI").triggers, count=2
    )
    request.exclusions.add(calendars=[made.name])
    request.after_time.FromDatetime(datetime(2030, 5, 1))
    seen = await schedule_service_pb2_grpc.ScheduleServiceStub(channel).PreviewTrigger(request)
    assert [each.schedule_time.ToJsonString()[:10] for each in seen.occurrences] == [
        "2030-05-01",
        "2030-05-03",
    ]
    assert seen.description == "every working day at 09:00 UTC, except Bank holidays"


@pytest.mark.parametrize(
    "name", ["tenants/default/calendars/there-is-none", "tenants/other/calendars/c", "holidays"]
)
async def test_a_calendar_that_is_not_there_is_refused_with_its_field(client: Client, name: str) -> None:
    spec = make_spec("echo", cron="0 9 * * *")
    spec.exclusions.add(calendars=[name])
    with pytest.raises(errors.FieldInvalid) as caught:
        await client.schedules.create(fresh("s"), spec)
    assert caught.value.field == "schedule.spec.exclusions[0].calendars[0]"


async def test_a_calendar_in_use_cannot_be_deleted(client: Client, calendars: Any) -> None:
    made = await create(calendars, "2030-05-01")
    spec = make_spec("echo", cron="0 9 * * *")
    spec.exclusions.add(calendars=[made.name])
    schedule = await client.schedules.create(fresh("s"), spec)
    request = calendar_service_pb2.DeleteCalendarRequest(name=made.name, etag=made.etag)
    error = await refused(calendars.DeleteCalendar(request))
    assert isinstance(error, errors.CalendarInUse)
    assert error.dependent == schedule.name
    listed = await calendars.ListCalendarDependents(
        calendar_service_pb2.ListCalendarDependentsRequest(name=made.name)
    )
    assert list(listed.schedules) == [schedule.name]
    await client.schedules.delete(schedule.name)
    await calendars.DeleteCalendar(request)
    gone = await refused(calendars.GetCalendar(calendar_service_pb2.GetCalendarRequest(name=made.name)))
    assert isinstance(gone, errors.NotFound)


# --- A calendar that changes ------------------------------------------------------------------------------


async def test_a_changed_calendar_moves_what_depends_on_it(
    client: Client, calendars: Any, channel: grpc.aio.Channel, sql: psycopg.Connection
) -> None:
    made = await create(calendars, "2030-05-01")
    hours = (1, 5, 9)
    names = []
    for hour in hours:
        spec = make_spec("echo", cron=f"0 {hour} * * *")
        spec.exclusions.add(calendars=[made.name])
        names.append((await client.schedules.create(fresh("s"), spec)).name)
    before = [await client.schedules.get(name) for name in names]
    days = sorted({first_next(each).date().isoformat() for each in before})
    wanted = calendar_pb2.Calendar(name=made.name, dates=days, etag=made.etag)
    changed = await calendars.UpdateCalendar(calendar_service_pb2.UpdateCalendarRequest(calendar=wanted))
    metadata = await ended(channel, changed.recompute_operation)
    assert (metadata.examined_count, metadata.changed_count, metadata.skipped_count) == (3, 3, 0)
    assert {move.schedule for move in metadata.moves} == set(names)
    for old in before:
        new = await client.schedules.get(old.name)
        assert first_next(new).date().isoformat() not in days
        assert new.version == old.version + 1, "a fire that was planned by the dates before must not pass"
        row = sql.execute(
            "SELECT version, schedule_us, decided_us FROM timer WHERE ref = %s", (uuid.UUID(new.uid),)
        ).fetchone()
        assert row is not None
        assert row[0] == new.version
        assert row[1] == new.status.next_occurrences[0].schedule_time.ToMicroseconds() > row[2]


async def test_what_is_paused_stays_paused_and_follows_its_calendar_when_it_resumes(
    client: Client, calendars: Any, channel: grpc.aio.Channel
) -> None:
    made = await create(calendars, "2030-05-01")
    spec = make_spec("echo", cron="0 9 * * *")
    spec.exclusions.add(calendars=[made.name])
    schedule = await client.schedules.create(fresh("s"), spec)
    await client.schedules.pause(schedule.name, "stock-taking")
    day = first_next(schedule).date().isoformat()
    wanted = calendar_pb2.Calendar(name=made.name, dates=[day], etag=made.etag)
    changed = await calendars.UpdateCalendar(calendar_service_pb2.UpdateCalendarRequest(calendar=wanted))
    await ended(channel, changed.recompute_operation)
    assert (
        await client.schedules.get(schedule.name)
    ).status.state == schedule_pb2.ScheduleStatus.STATE_PAUSED
    resumed = await client.schedules.resume(schedule.name)
    assert first_next(resumed).date().isoformat() > day


async def test_a_calendar_that_leaves_nothing_quarantines_until_it_is_mended(
    client: Client, calendars: Any, channel: grpc.aio.Channel
) -> None:
    made = await create(calendars, "2030-05-01")
    spec = make_spec("echo", at=[datetime(2031, 6, 1, 9, tzinfo=UTC)])
    spec.exclusions.add(calendars=[made.name])
    schedule = await client.schedules.create(fresh("s"), spec)
    wanted = calendar_pb2.Calendar(name=made.name, dates=["2031-06-01"], etag=made.etag)
    changed = await calendars.UpdateCalendar(calendar_service_pb2.UpdateCalendarRequest(calendar=wanted))
    metadata = await ended(channel, changed.recompute_operation)
    assert metadata.skipped_count == 1
    stopped = await client.schedules.get(schedule.name)
    assert stopped.status.state == schedule_pb2.ScheduleStatus.STATE_QUARANTINED
    assert "never fires" in stopped.status.quarantine_reason
    back = await calendars.RollbackCalendar(
        calendar_service_pb2.RollbackCalendarRequest(name=made.name, revision=1, etag=changed.etag)
    )
    await ended(channel, back.recompute_operation)
    mended = await client.schedules.get(schedule.name)
    assert mended.status.state == schedule_pb2.ScheduleStatus.STATE_ACTIVE
    assert first_next(mended) == datetime(2031, 6, 1, 9, tzinfo=UTC)


async def test_schedules_made_while_their_calendar_changes_follow_it_all(
    client: Client, calendars: Any, channel: grpc.aio.Channel
) -> None:
    made = await create(calendars, "2030-05-01")
    day = tomorrow_at(9).date().isoformat()

    async def schedule() -> str:
        spec = make_spec("echo", cron="0 9 * * *")
        spec.exclusions.add(calendars=[made.name])
        return (await client.schedules.create(fresh("s"), spec)).name

    async def change() -> calendar_pb2.Calendar:
        wanted = calendar_pb2.Calendar(name=made.name, dates=[day], etag=made.etag)
        answer = await calendars.UpdateCalendar(calendar_service_pb2.UpdateCalendarRequest(calendar=wanted))
        assert isinstance(answer, calendar_pb2.Calendar)
        return answer

    names, changed = await asyncio.gather(asyncio.gather(*(schedule() for _ in range(20))), change())
    await ended(channel, changed.recompute_operation)
    for name in names:
        found = await client.schedules.get(name)
        days = {each.schedule_time.ToJsonString()[:10] for each in found.status.next_occurrences}
        assert day not in days
