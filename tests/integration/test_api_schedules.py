"""ScheduleService against a real Postgres. Ids such as F-O07 are field reports that became tests."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import grpc
import psycopg
import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from tickwheel import errors
from tickwheel.client import Client, make_spec
from tickwheel.domain.decision import DecisionReason
from tickwheel.domain.trigger import NEVER_US
from tickwheel.embedded.cluster import Cluster
from tickwheel.v1 import schedule_pb2, schedule_service_pb2, schedule_service_pb2_grpc

State = schedule_pb2.ScheduleStatus.State


@pytest.fixture
def sql(api_cluster: Cluster) -> Iterator[psycopg.Connection]:
    with psycopg.connect(api_cluster.postgres_url, autocommit=True) as connection:
        yield connection


def fresh(prefix: str = "s") -> str:
    return f"{prefix}-{uuid.uuid4().hex[:12]}"


def timer_row(sql: psycopg.Connection, schedule: schedule_pb2.Schedule) -> dict[str, Any]:
    cursor = sql.execute("SELECT * FROM timer WHERE ref = %s", (uuid.UUID(schedule.uid),))
    row = cursor.fetchone()
    assert row is not None
    assert cursor.description is not None
    return dict(zip((column.name for column in cursor.description), row, strict=True))


async def test_a_schedule_is_read_as_it_was_created(client: Client) -> None:
    name = fresh()
    made = await client.schedules.create(
        name,
        kind="report",
        cron="0 9 * * MON-FRI",
        time_zone="Europe/Berlin",
        payload={"a": 1},
        labels={"team": "x"},
    )
    read = await client.schedules.get(name)
    assert read == made
    assert read.name == f"tenants/default/schedules/{name}"
    assert read.spec.triggers[0].cron.expression == "0 9 * * MON-FRI"
    assert read.spec.template.payload.data == b'{"a": 1}'
    assert read.status.state == State.STATE_ACTIVE
    assert len(read.status.next_occurrences) == 10
    assert read.effective_spec.misfire.policy == schedule_pb2.MisfirePolicy.POLICY_FIRE_ONCE
    assert read.effective_spec.template.retry.attempt_count_max == 4
    assert not read.spec.HasField("misfire"), "what the user typed stays as it is"


async def test_its_timer_row_says_when_it_is_due(client: Client, sql: psycopg.Connection) -> None:
    made = await client.schedules.create(fresh(), kind="echo", cron="* * * * *")
    row = timer_row(sql, made)
    assert row["kind"] == 1
    assert (
        row["due_us"]
        == row["schedule_us"]
        == made.status.next_occurrences[0].schedule_time.seconds * 1_000_000
    )
    assert row["decided_us"] < row["schedule_us"]
    assert (row["version"], row["countdown"], row["misfire_ms"]) == (1, -1, 60_000)


async def test_a_name_is_taken_once(client: Client) -> None:
    name = fresh()
    await client.schedules.create(name, kind="echo", cron="* * * * *")
    with pytest.raises(errors.AlreadyExists, match=name):
        await client.schedules.create(name, kind="echo", cron="* * * * *")


async def test_one_of_two_who_create_the_same_name_at_once_gets_it(client: Client) -> None:
    name = fresh()
    outcomes = await asyncio.gather(
        *(client.schedules.create(name, kind="echo", cron="* * * * *") for _ in range(8)),
        return_exceptions=True,
    )
    made = [each for each in outcomes if isinstance(each, schedule_pb2.Schedule)]
    assert len(made) == 1
    assert all(isinstance(each, errors.AlreadyExists) for each in outcomes if each is not made[0])


# --- request_id -------------------------------------------------------------------------------------------


async def test_the_same_request_id_gives_the_first_answer_again(
    client: Client, sql: psycopg.Connection
) -> None:
    name, request_id = fresh(), fresh("r")
    first = await client.schedules.create(name, kind="echo", cron="* * * * *", request_id=request_id)
    await client.schedules.pause(name, "to change it")
    again = await client.schedules.create(name, kind="echo", cron="* * * * *", request_id=request_id)
    assert again == first
    count = sql.execute("SELECT count(*) FROM audit WHERE request_id = %s", (request_id,)).fetchone()
    assert count == (1,)


async def test_concurrent_calls_with_one_request_id_do_it_once(client: Client) -> None:
    request_id = fresh("r")
    runs = await asyncio.gather(*(client.runs.create("echo", request_id=request_id) for _ in range(20)))
    assert len({run.name for run in runs}) == 1
    assert all(run == runs[0] for run in runs)


async def test_a_request_id_with_another_request_is_refused(client: Client) -> None:
    request_id = fresh("r")
    await client.runs.create("echo", request_id=request_id)
    with pytest.raises(errors.RequestIdReused):
        await client.runs.create("other", request_id=request_id)


async def test_a_call_that_failed_leaves_its_request_id_free(client: Client) -> None:
    request_id, name = fresh("r"), fresh()
    with pytest.raises(errors.TriggerInvalid):
        await client.schedules.create(name, kind="echo", cron="61 * * * *", request_id=request_id)
    await client.schedules.create(name, kind="echo", cron="1 * * * *", request_id=request_id)


async def test_every_mutation_leaves_one_audit_record(client: Client, sql: psycopg.Connection) -> None:
    name = fresh()
    await client.schedules.create(name, kind="echo", cron="* * * * *")
    await client.schedules.pause(name, "stock-taking")
    await client.schedules.resume(name)
    await client.schedules.run(name)
    await client.schedules.delete(name)
    rows = sql.execute(
        "SELECT method, reason, etag_before <> etag_after FROM audit WHERE resource = %s ORDER BY at_us",
        (f"tenants/default/schedules/{name}",),
    ).fetchall()
    assert [row[0] for row in rows] == [
        "CreateSchedule",
        "PauseSchedule",
        "ResumeSchedule",
        "RunSchedule",
        "DeleteSchedule",
    ]
    assert rows[1][1] == "stock-taking"


async def test_validate_only_says_what_would_be_and_does_nothing(
    client: Client, sql: psycopg.Connection
) -> None:
    name = fresh()
    would_be = await client.schedules.create(name, kind="echo", cron="0 0 1 1 *", validate_only=True)
    assert would_be.status.next_occurrences
    with pytest.raises(errors.NotFound):
        await client.schedules.get(name)
    audit = sql.execute(
        "SELECT count(*) FROM audit WHERE resource = %s", (f"tenants/default/schedules/{name}",)
    ).fetchone()
    assert audit == (0,)


# --- etag -------------------------------------------------------------------------------------------------


async def test_an_old_etag_is_refused_and_told_the_current_one(client: Client) -> None:
    name = fresh()
    made = await client.schedules.create(name, kind="echo", cron="* * * * *")
    paused = await client.schedules.pause(name, "first", etag=made.etag)
    with pytest.raises(errors.EtagMismatch) as caught:
        await client.schedules.pause(name, "second", etag=made.etag)
    assert caught.value.current == paused.etag
    with pytest.raises(errors.EtagMismatch):
        await client.schedules.delete(name, etag=made.etag)
    await client.schedules.delete(name, etag=paused.etag)


async def test_a_schedule_made_anew_has_another_uid_and_etag(client: Client) -> None:
    name = fresh()
    first = await client.schedules.create(name, kind="echo", cron="* * * * *")
    await client.schedules.delete(name)
    second = await client.schedules.create(name, kind="echo", cron="* * * * *")
    assert second.uid != first.uid
    with pytest.raises(errors.EtagMismatch):
        await client.schedules.pause(name, "no", etag=first.etag)


# --- Update -----------------------------------------------------------------------------------------------


async def test_an_update_of_the_template_leaves_the_due_time_alone(
    client: Client, sql: psycopg.Connection
) -> None:
    name = fresh()
    made = await client.schedules.create(name, kind="echo", every=timedelta(hours=1))
    before = timer_row(sql, made)
    made.spec.template.priority = 7
    updated = await client.schedules.update(made, update_mask=["spec.template"])
    after = timer_row(sql, made)
    assert updated.version == 2
    assert (after["due_us"], after["decided_us"]) == (before["due_us"], before["decided_us"])
    assert (after["version"], after["priority"]) == (2, 7)


async def test_an_update_of_labels_makes_no_new_version(client: Client) -> None:
    name = fresh()
    made = await client.schedules.create(name, kind="echo", cron="* * * * *")
    wanted = schedule_pb2.Schedule(name=name, labels={"a": "b"})
    updated = await client.schedules.update(wanted)
    assert (updated.version, dict(updated.labels)) == (1, {"a": "b"})
    assert updated.etag != made.etag
    assert (await client.schedules.update(wanted)).etag == updated.etag, "the same again changes nothing"


async def test_other_triggers_are_due_after_now_and_what_was_overdue_is_recorded(
    client: Client, sql: psycopg.Connection
) -> None:
    name = fresh()
    made = await client.schedules.create(name, kind="echo", cron="* * * * *")
    # As if its timer had been away for ten minutes.
    sql.execute(
        "UPDATE timer SET due_us = due_us - 600000000, schedule_us = schedule_us - 600000000,"
        " decided_us = schedule_us - 660000000 WHERE ref = %s",
        (uuid.UUID(made.uid),),
    )
    made.spec.triggers[0].cron.expression = "0 3 * * *"
    await client.schedules.update(made, update_mask=["spec"])
    row = timer_row(sql, made)
    assert row["due_us"] > datetime.now(UTC).timestamp() * 1e6
    decision = sql.execute(
        "SELECT reason, count FROM decision WHERE schedule = %s", (uuid.UUID(made.uid),)
    ).fetchone()
    assert decision is not None
    assert decision[0] == DecisionReason.SUPERSEDED
    assert decision[1] >= 10


async def test_what_was_overdue_when_its_schedule_is_deleted_is_recorded(
    client: Client, sql: psycopg.Connection
) -> None:
    name = fresh()
    made = await client.schedules.create(name, kind="echo", cron="* * * * *")
    sql.execute(
        "UPDATE timer SET due_us = due_us - 600000000, schedule_us = schedule_us - 600000000,"
        " decided_us = schedule_us - 660000000 WHERE ref = %s",
        (uuid.UUID(made.uid),),
    )
    await client.schedules.delete(name)
    decision = sql.execute(
        "SELECT reason, count FROM decision WHERE schedule = %s", (uuid.UUID(made.uid),)
    ).fetchone()
    assert decision is not None
    assert decision[0] == DecisionReason.SUPERSEDED
    assert decision[1] >= 10


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda spec: setattr(spec.triggers[0], "time_zone", "Europe/Foo"), errors.TimeZoneUnknown),
        (lambda spec: setattr(spec.triggers[0].cron, "expression", "61 * * * *"), errors.TriggerInvalid),
        (lambda spec: setattr(spec.triggers[0].cron, "expression", "0 0 31 2 *"), errors.TriggerNeverFires),
        (lambda spec: setattr(spec.template, "kind", "no blanks"), errors.FieldInvalid),
    ],
)
@pytest.mark.parametrize("mask", [["spec"], []])
async def test_f_o15_an_update_is_proven_like_a_creation(
    client: Client, sql: psycopg.Connection, change: Any, error: type[Exception], mask: list[str]
) -> None:
    name = fresh()
    made = await client.schedules.create(name, kind="echo", cron="* * * * *", time_zone="Europe/Berlin")
    before = timer_row(sql, made)
    wanted = schedule_pb2.Schedule()
    wanted.CopyFrom(made)
    change(wanted.spec)
    with pytest.raises(error, match=r"schedule\.spec\."):
        await client.schedules.update(wanted, update_mask=mask)
    assert await client.schedules.get(name) == made
    assert timer_row(sql, made) == before


@pytest.mark.parametrize("path", ["status", "uid", "spec.nonsense", "version"])
async def test_a_mask_that_names_what_cannot_be_set_is_refused(client: Client, path: str) -> None:
    name = fresh()
    made = await client.schedules.create(name, kind="echo", cron="* * * * *")
    with pytest.raises(errors.FieldInvalid, match="update_mask"):
        await client.schedules.update(made, update_mask=[path])


async def test_ensure_creates_then_changes_and_never_unpauses(client: Client) -> None:
    name = fresh()
    made = await client.schedules.ensure(name, kind="echo", cron="0 1 * * *")
    await client.schedules.pause(name, "maintenance")
    changed = await client.schedules.ensure(name, kind="echo", cron="0 2 * * *")
    assert changed.uid == made.uid
    assert changed.version == 2
    assert changed.status.state == State.STATE_PAUSED
    again = await client.schedules.ensure(name, kind="echo", cron="0 2 * * *")
    assert again.etag == changed.etag


async def test_a_quarantined_schedule_is_mended_by_an_update(client: Client, sql: psycopg.Connection) -> None:
    name = fresh()
    made = await client.schedules.create(name, kind="echo", cron="* * * * *")
    sql.execute("UPDATE schedule SET quarantine_reason = 'bad cron' WHERE uid = %s", (uuid.UUID(made.uid),))
    sql.execute("UPDATE timer SET due_us = %s WHERE ref = %s", (NEVER_US, uuid.UUID(made.uid)))
    assert (await client.schedules.get(name)).status.state == State.STATE_QUARANTINED
    made.spec.template.priority = 1
    mended = await client.schedules.update(made, update_mask=["spec"])
    assert mended.status.state == State.STATE_ACTIVE
    assert timer_row(sql, made)["due_us"] < NEVER_US


async def test_a_poison_row_can_be_read_and_listed(client: Client, sql: psycopg.Connection) -> None:
    name = fresh("poison")
    made = await client.schedules.create(name, kind="echo", cron="* * * * *")
    sql.execute(
        'INSERT INTO trigger_def (trigger_id, body) VALUES (99, \'{"triggers":[{"cron":{"expression":'
        '"bob is amazing","dialect":"UNIX"}}]}\') ON CONFLICT DO NOTHING'
    )
    sql.execute("UPDATE schedule SET trigger_id = 99 WHERE uid = %s", (uuid.UUID(made.uid),))
    assert (await client.schedules.get(name)).name == made.name
    assert [each.name async for each in client.schedules.list(f'name = "{name}"')] == [made.name]


# --- Pause and resume -------------------------------------------------------------------------------------


async def test_a_paused_schedule_is_never_due(client: Client, sql: psycopg.Connection) -> None:
    name = fresh()
    made = await client.schedules.create(name, kind="echo", cron="* * * * *")
    paused = await client.schedules.pause(name, "stock-taking")
    assert paused.status.state == State.STATE_PAUSED
    assert paused.status.pause.reason == "stock-taking"
    assert not paused.status.next_occurrences
    row = timer_row(sql, made)
    assert (row["due_us"], row["schedule_us"]) == (NEVER_US, NEVER_US)


async def test_a_pause_needs_a_reason_and_a_time_to_come(client: Client) -> None:
    name = fresh()
    await client.schedules.create(name, kind="echo", cron="* * * * *")
    with pytest.raises(errors.FieldInvalid, match="reason"):
        await client.schedules.pause(name, "  ")
    with pytest.raises(errors.FieldInvalid, match="resume_time"):
        await client.schedules.pause(name, "why", resume_time=datetime.now(UTC) - timedelta(seconds=1))


async def test_resuming_skips_what_was_missed_and_says_so(client: Client, sql: psycopg.Connection) -> None:
    name = fresh()
    made = await client.schedules.create(name, kind="echo", cron="* * * * *")
    await client.schedules.pause(name, "why")
    sql.execute("UPDATE timer SET decided_us = decided_us - 600000000 WHERE ref = %s", (uuid.UUID(made.uid),))
    resumed = await client.schedules.resume(name)
    assert resumed.status.state == State.STATE_ACTIVE
    assert not resumed.status.HasField("pause")
    row = timer_row(sql, made)
    assert row["decided_us"] > datetime.now(UTC).timestamp() * 1e6 - 60e6
    decision = sql.execute(
        "SELECT reason, count FROM decision WHERE schedule = %s", (uuid.UUID(made.uid),)
    ).fetchone()
    assert decision in ((DecisionReason.PAUSED, 10), (DecisionReason.PAUSED, 11))


async def test_resuming_with_the_misfire_policy_leaves_the_missed_ones_to_the_owner(
    client: Client, sql: psycopg.Connection
) -> None:
    name = fresh()
    made = await client.schedules.create(name, kind="echo", cron="* * * * *")
    await client.schedules.pause(name, "why")
    sql.execute("UPDATE timer SET decided_us = decided_us - 600000000 WHERE ref = %s", (uuid.UUID(made.uid),))
    decided_us = timer_row(sql, made)["decided_us"]
    await client.schedules.resume(name, run_missed=True)
    row = timer_row(sql, made)
    assert row["decided_us"] == decided_us
    assert row["due_us"] < datetime.now(UTC).timestamp() * 1e6


async def test_a_paused_schedule_resumes_by_itself(client: Client) -> None:
    name = fresh()
    await client.schedules.create(name, kind="echo", cron="* * * * *")
    await client.schedules.pause(name, "a moment", resume_time=datetime.now(UTC) + timedelta(seconds=1))
    async with asyncio.timeout(15):
        # A reader that polls is what a person would do; there is nothing to be told by.
        found = await client.schedules.get(name)
        while found.status.state == State.STATE_PAUSED:
            await asyncio.sleep(0.1)
            found = await client.schedules.get(name)
    assert found.status.state == State.STATE_ACTIVE


# --- Running by hand, deleting ----------------------------------------------------------------------------


async def test_a_manual_run_carries_its_schedules_version_and_payload(client: Client) -> None:
    name = fresh()
    await client.schedules.create(name, kind="echo", cron="0 0 1 1 *", payload={"v": 1})
    run = await client.runs.get((await client.schedules.run(name)).name)
    assert run.schedule == f"tenants/default/schedules/{name}"
    assert run.schedule_version == 1
    assert run.cause == run.CAUSE_MANUAL
    assert run.template.payload.data == b'{"v": 1}'


async def test_d_o04_a_run_keeps_the_payload_of_the_version_that_it_was_born_from(client: Client) -> None:
    name = fresh()
    made = await client.schedules.create(name, kind="echo", cron="0 0 1 1 *", payload={"v": 1})
    run = await client.schedules.run(name)
    made.spec.template.payload.data = b'{"v": 2}'
    made.spec.triggers[0].cron.expression = "0 0 2 2 *"
    await client.schedules.update(made, update_mask=["spec"])
    assert (await client.runs.get(run.name)).template.payload.data == b'{"v": 1}'


async def test_a_manual_run_waits_for_no_other_unless_told(client: Client) -> None:
    name = fresh()
    await client.schedules.create(name, kind="echo", cron="0 0 1 1 *")
    await client.schedules.run(name)
    with pytest.raises(errors.StateTransitionForbidden, match="ignore_overlap"):
        await client.schedules.run(name)
    await client.schedules.run(name, ignore_overlap=True)


async def test_d_o05_a_deleted_name_is_free_at_once_while_its_run_lives_on(
    client: Client, sql: psycopg.Connection
) -> None:
    name = fresh()
    await client.schedules.create(name, kind="echo", cron="* * * * *")
    run = await client.schedules.run(name)
    deleted = await client.schedules.delete(name)
    assert deleted.status.state == State.STATE_DELETED
    made = await client.schedules.create(name, kind="echo", cron="* * * * *")
    assert timer_row(sql, made)["due_us"] < NEVER_US
    assert (await client.runs.get(run.name)).state == run.STATE_SCHEDULED
    # Nothing keeps the new one's occurrences back.
    busy = sql.execute("SELECT count(*) FROM timer WHERE schedule = %s", (uuid.UUID(made.uid),)).fetchone()
    assert busy == (0,)


async def test_deleting_what_is_not_there(client: Client) -> None:
    name = fresh()
    with pytest.raises(errors.NotFound):
        await client.schedules.delete(name)
    await client.schedules.delete(name, allow_missing=True)


async def test_pausing_can_cancel_the_runs_that_live(client: Client) -> None:
    name = fresh()
    await client.schedules.create(name, kind="echo", cron="0 0 1 1 *")
    run = await client.schedules.run(name)
    await client.schedules.pause(name, "stop it all", cancel_live_runs=True)
    cancelled = await client.runs.get(run.name)
    assert cancelled.state == cancelled.STATE_CANCELLED
    assert cancelled.cancel_reason == "stop it all"


# --- Bad values -------------------------------------------------------------------------------------------


def stub(cluster: Cluster) -> tuple[grpc.aio.Channel, Any]:
    channel = grpc.aio.insecure_channel(cluster.api_addresses[0])
    return channel, schedule_service_pb2_grpc.ScheduleServiceStub(channel)


async def test_f_o05_instants_in_the_far_future_are_stored_and_the_year_10000_is_refused(
    client: Client, sql: psycopg.Connection
) -> None:
    last = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
    made = await client.schedules.create(fresh(), kind="echo", at=last)
    assert timer_row(sql, made)["due_us"] == 253_402_300_799_000_000
    later = await client.schedules.create(fresh(), kind="echo", at=datetime.now(UTC) + timedelta(days=400))
    assert timer_row(sql, later)["due_us"] > (datetime.now(UTC) + timedelta(days=399)).timestamp() * 1e6
    spec = make_spec("echo", at=last)
    spec.triggers[0].instants.times[0].CopyFrom(Timestamp(seconds=253_402_300_800))
    with pytest.raises(errors.InvalidArgument, match=r"triggers\[0\]\.instants\.times\[0\]"):
        await client.schedules.create(fresh(), spec)


async def test_f_o12_an_instant_in_the_past_is_due_at_once_and_keeps_its_time(
    client: Client, sql: psycopg.Connection
) -> None:
    past = datetime(2020, 1, 1, tzinfo=UTC)
    made = await client.schedules.create(fresh(), kind="echo", at=past)
    row = timer_row(sql, made)
    assert row["schedule_us"] == row["due_us"] == int(past.timestamp() * 1e6)
    assert row["decided_us"] == 0


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda spec: spec.triggers[0].interval.duration.FromSeconds(0), "interval.duration"),
        (lambda spec: spec.triggers[0].interval.duration.FromSeconds(-1), "interval.duration"),
        (
            lambda spec: spec.template.timeouts.attempt_duration_max.FromSeconds(0),
            "template.timeouts.attempt_duration_max",
        ),
        (lambda spec: spec.jitter_duration.FromSeconds(-5), "jitter_duration"),
        (lambda spec: spec.misfire.threshold_duration.FromSeconds(-1), "misfire.threshold_duration"),
        (lambda spec: spec.template.lease_duration.FromSeconds(1), "template.lease_duration"),
        (lambda spec: setattr(spec.template, "priority", 10), "template.priority"),
        (lambda spec: setattr(spec.template, "queue", "No Queue"), "template.queue"),
        (lambda spec: setattr(spec.template.retry, "multiplier", 0.5), "template.retry.multiplier"),
        (
            lambda spec: setattr(spec.template.retry, "jitter_ratio", float("nan")),
            "template.retry.jitter_ratio",
        ),
        (lambda spec: setattr(spec, "run_count_max", -1), "run_count_max"),
        (lambda spec: setattr(spec.overlap, "policy", 77), "overlap.policy"),
        (lambda spec: spec.exclusions.add().dates.append("2027-02-30"), "exclusions[0].dates[0]"),
    ],
)
async def test_f_o11_f_o12_a_bad_value_is_refused_with_its_field(
    client: Client, change: Any, field: str
) -> None:
    spec = make_spec("echo", every=timedelta(seconds=60))
    change(spec)
    with pytest.raises(errors.InvalidArgument) as caught:
        await client.schedules.create(fresh(), spec)
    assert getattr(caught.value, "field", "").endswith(field)


async def test_f_o11_jitter_is_late_by_less_than_its_window_and_never_out_of_order(client: Client) -> None:
    made = await client.schedules.create(
        fresh(), kind="echo", cron="* * * * *", jitter=timedelta(seconds=3600)
    )
    occurrences = [(o.schedule_time.seconds, o.due_time.seconds) for o in made.status.next_occurrences]
    assert all(schedule <= due < schedule + 60 for schedule, due in occurrences), "cut at the next occurrence"
    exact = await client.schedules.create(fresh(), kind="echo", cron="* * * * *", jitter=timedelta(0))
    assert all(o.schedule_time == o.due_time for o in exact.status.next_occurrences)


async def test_f_o07_bytes_round_trip_and_nul_in_text_is_refused(client: Client) -> None:
    for data in (b'{"k":"a\\u0000b"}', b"a\x00b", b'"\\ud800"', bytes(range(256))):
        name = fresh()
        await client.schedules.create(name, kind="echo", cron="* * * * *", payload=data)
        assert (await client.schedules.get(name)).spec.template.payload.data == data
    for bad in ({"labels": {"a": "x\0y"}}, {"labels": {"x\0": "y"}}, {"annotations": {"a": "\0"}}):
        with pytest.raises(errors.FieldInvalid, match=r"U\+0000"):
            await client.schedules.create(fresh(), kind="echo", cron="* * * * *", **bad)  # type: ignore[arg-type]
    with pytest.raises(errors.FieldInvalid, match="schedule_id"):
        await client.schedules.create("a\0b", kind="echo", cron="* * * * *")


@pytest.mark.parametrize(
    "name", ["\U0001f600" * 255, "\u00e9", "e\u0301", "\u202eabc", "A", "", "a" * 64, "-a", "a-"]
)
async def test_f_o08_a_name_is_plain_and_short(client: Client, name: str) -> None:
    with pytest.raises(errors.FieldInvalid, match="schedule_id"):
        await client.schedules.create(name, kind="echo", cron="* * * * *")


async def test_f_o08_other_text_is_kept_as_it_is_sent(client: Client) -> None:
    spec = make_spec("echo", cron="* * * * *")
    spec.display_name = "\u00e9 e\u0301 \u202e \U0001f600"
    name = fresh()
    await client.schedules.create(name, spec, annotations={"who": spec.display_name})
    read = await client.schedules.get(name)
    assert read.spec.display_name == spec.display_name == read.annotations["who"]


async def test_f_o09_a_payload_of_a_mebibyte_is_stored_and_more_is_refused(client: Client) -> None:
    for data in (("\U0001f600" * 2_000).encode(), bytes(1024 * 1024)):
        name = fresh()
        await client.schedules.create(name, kind="echo", cron="* * * * *", payload=data)
        assert (await client.schedules.get(name)).spec.template.payload.data == data
    with pytest.raises(errors.FieldInvalid, match=r"template\.payload"):
        await client.schedules.create(fresh(), kind="echo", cron="* * * * *", payload=bytes(1024 * 1024 + 1))


async def test_a_json_payload_is_handed_over_as_its_text(client: Client) -> None:
    spec = make_spec("echo", cron="* * * * *")
    spec.template.payload.json.update({"a": 1, "b": [True, None, "ü"]})
    name = fresh()
    await client.schedules.create(name, spec)
    read = (await client.schedules.get(name)).spec.template.payload
    assert read.content_type == "application/json"
    assert read.data == '{"a":1,"b":[true,null,"ü"]}'.encode()


async def test_nothing_but_our_own_errors_goes_out(api_cluster: Cluster) -> None:
    channel, service = stub(api_cluster)
    async with channel:
        for request in (
            schedule_service_pb2.CreateScheduleRequest(),
            schedule_service_pb2.CreateScheduleRequest(parent="tenants/default", schedule_id="a"),
            schedule_service_pb2.CreateScheduleRequest(parent="tenants/nobody", schedule_id="a"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await service.CreateSchedule(request)
            assert caught.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)


# --- Listing ----------------------------------------------------------------------------------------------


async def test_f_o10_pages_over_equal_creation_times_miss_and_repeat_nothing(
    client: Client, api_cluster: Cluster, sql: psycopg.Connection
) -> None:
    prefix = fresh("same")
    made = await asyncio.gather(
        *(client.schedules.create(f"{prefix}-{n}", kind="echo", cron="* * * * *") for n in range(30))
    )
    sql.execute(
        "UPDATE schedule SET create_us = 1 WHERE uid = ANY (%s)", ([uuid.UUID(each.uid) for each in made],)
    )
    channel, service = stub(api_cluster)
    sizes, seen, token = [], [], ""
    async with channel:
        while True:
            page = await service.ListSchedules(
                schedule_service_pb2.ListSchedulesRequest(
                    parent="tenants/default", page_size=7, page_token=token, filter=f'name : "{prefix}-*"'
                )
            )
            sizes.append(len(page.schedules))
            seen += [each.name for each in page.schedules]
            token = page.next_page_token
            if not token:
                break
    assert sizes[:5] == [7, 7, 7, 7, 2]
    assert len(set(seen)) == len(seen) == 30


async def test_filters_of_a_list(client: Client) -> None:
    prefix = fresh("filter")
    await client.schedules.create(
        f"{prefix}-a", kind="mail", queue="slow", cron="* * * * *", labels={"p": prefix}
    )
    await client.schedules.create(
        f"{prefix}-b", kind="echo", cron="* * * * *", labels={"p": prefix, "x": "1"}
    )
    await client.schedules.create(f"{prefix}-c", kind="echo", cron="* * * * *")
    await client.schedules.pause(f"{prefix}-c", "why")

    async def names(filter: str) -> list[str]:
        return [each.name.rpartition("-")[2] async for each in client.schedules.list(filter)]

    assert await names(f'name : "{prefix}*"') == ["a", "b", "c"]
    assert await names(f'labels.p = "{prefix}"') == ["a", "b"]
    assert await names(f'labels.p = "{prefix}" AND labels.x = "1"') == ["b"]
    assert await names(f'name : "{prefix}*" AND state = PAUSED') == ["c"]
    assert await names(f'name : "{prefix}*" AND kind = "mail" AND queue = "slow"') == ["a"]
    assert await names(f'name : "{prefix}*" AND queue = "default"') == ["b", "c"]


@pytest.mark.parametrize(
    ("filter", "error"),
    [
        ("create_time = 1", errors.FilterFieldNotIndexed),
        ("state = SLEEPING", errors.FilterInvalid),
        ("state = ", errors.FilterInvalid),
        ("state = PAUSED OR state = ACTIVE", errors.FilterInvalid),
        ("state = PAUSED AND", errors.FilterInvalid),
        ("labels = a", errors.FilterInvalid),
        ("state != PAUSED", errors.FilterInvalid),
        ("'; DROP TABLE run --", errors.FilterInvalid),
    ],
)
async def test_a_filter_that_cannot_be_answered_is_refused(
    client: Client, filter: str, error: type[Exception]
) -> None:
    with pytest.raises(error):
        _ = [each async for each in client.schedules.list(filter)]


async def test_a_page_token_belongs_to_its_query(client: Client, api_cluster: Cluster) -> None:
    for _ in range(2):
        await client.schedules.create(fresh("page"), kind="echo", cron="* * * * *")
    channel, service = stub(api_cluster)
    request = schedule_service_pb2.ListSchedulesRequest(parent="tenants/default", page_size=1)
    async with channel:
        request.page_token = (await service.ListSchedules(request)).next_page_token
        assert request.page_token
        await service.ListSchedules(request)
        request.show_deleted = True
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await service.ListSchedules(request)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        request.page_token = "rubbish"
        with pytest.raises(grpc.aio.AioRpcError):
            await service.ListSchedules(request)


async def test_deleted_schedules_are_shown_to_those_who_ask(client: Client) -> None:
    name = fresh("gone")
    await client.schedules.create(name, kind="echo", cron="* * * * *")
    await client.schedules.delete(name)
    filter = f'name = "{name}"'
    assert [each async for each in client.schedules.list(filter)] == []
    (found,) = [each async for each in client.schedules.list(filter, show_deleted=True)]
    assert found.status.state == State.STATE_DELETED


def test_a_page_of_a_list_is_read_from_its_index(sql: psycopg.Connection) -> None:
    sql.execute("SET enable_seqscan = off")
    plan = sql.execute(
        "EXPLAIN SELECT * FROM schedule WHERE tenant_id = 1 AND (create_us, uid) > (5, %s)"
        " ORDER BY create_us, uid LIMIT 5000",
        (uuid.uuid4(),),
    ).fetchall()
    text = "\n".join(row[0] for row in plan)
    assert "schedule_list" in text
    assert "Sort" not in text


async def test_a_preview_needs_no_schedule(client: Client) -> None:
    trigger = schedule_pb2.Trigger(time_zone="America/New_York")
    trigger.cron.expression = "30 2 * * *"
    after = datetime(2026, 3, 8, 6, 30, tzinfo=UTC)
    preview = await client.schedules.preview(trigger, count=2, after=after)
    assert [o.schedule_time.ToJsonString() for o in preview.occurrences] == [
        "2026-03-08T07:00:00Z",
        "2026-03-09T06:30:00Z",
    ]
    assert [o.utc_offset for o in preview.occurrences] == ["-04:00", "-04:00"]
