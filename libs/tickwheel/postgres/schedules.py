"""Schedules in Postgres. Every mutation of one rewrites its timer row in the same transaction (design,
section 3).
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import psycopg

from tickwheel.domain import ids, trigger
from tickwheel.domain.decision import DecisionReason
from tickwheel.domain.job import Payload, encode_template
from tickwheel.domain.schedule import Pause, ScheduleRecord, ScheduleSpec, ScheduleState, TimerState
from tickwheel.domain.shard import shard_of
from tickwheel.errors import AlreadyExists
from tickwheel.postgres import statements
from tickwheel.postgres.connections import Connection

_SQL = statements.load("schedules.sql")
SCAN_ROWS_MAX = 5_000
"""Rows that one page of a list looks at, whatever its filter leaves of them."""
LIVE_RUNS_MAX = 1_000


@dataclass(frozen=True, slots=True)
class Stored:
    """A schedule with the stored form of its triggers."""

    record: ScheduleRecord
    trigger_body: bytes


@dataclass(frozen=True, slots=True)
class Filter:
    """What a list asks for; None: anything."""

    state: ScheduleState | None = None
    labels: dict[str, str] | None = None
    queue: str | None = None
    kind: str | None = None
    name: str | None = None
    name_prefix: str | None = None


@dataclass(frozen=True, slots=True)
class Page:
    found: list[Stored]
    next_after: tuple[int, bytes] | None
    """The cursor of the next page; None on the last one."""


async def find(
    connection: Connection, tenant_id: int, tenant: str, name: str, *, full: bool
) -> Stored | None:
    """A live schedule; `full`: with its payload."""
    parameters = {"tenant": tenant_id, "name": name, "full": full}
    row = await (await connection.execute(_SQL["get"], parameters, binary=True)).fetchone()
    return None if row is None else _stored(row, tenant, full)


async def list_page(
    connection: Connection,
    tenant_id: int,
    tenant: str,
    wanted: Filter,
    *,
    after: tuple[int, bytes] | None,
    page_max: int,
    deleted: bool,
    full: bool,
) -> Page:
    """One page by creation. It may be short, even empty, and still lead on: each looks at SCAN_ROWS_MAX
    rows.
    """
    after_us, after_uid = after or (-1, ids.NO_UUID)
    scan_max = max(SCAN_ROWS_MAX, page_max)
    parameters = {
        "tenant": tenant_id,
        "after_us": after_us,
        "after_uid": uuid.UUID(bytes=after_uid),
        "scan_max": scan_max,
        "page_max": page_max,
        "deleted": deleted or wanted.state is ScheduleState.DELETED,
        "labels": None if wanted.labels is None else msgspec.json.encode(wanted.labels).decode(),
        "prefix": wanted.name_prefix,
        "exact": wanted.name,
        "queue": wanted.queue,
        "kind": wanted.kind,
        "state": None if wanted.state is None else int(wanted.state),
        "full": full,
    }
    rows = await (await connection.execute(_SQL["list"], parameters, binary=True)).fetchall()
    found = [_stored(row, tenant, full) for row in rows if row[0] is not None]
    if len(found) == page_max:
        last = found[-1].record
        return Page(found, (last.create_us, last.uid))
    seen_count, last_us, last_uid = rows[0][23:26]
    return Page(found, (last_us, last_uid.bytes) if seen_count == scan_max else None)


async def lock(connection: Connection, tenant_id: int, tenant: str, name: str) -> Stored | None:
    """A live schedule under the locks of its timer row and its own row, in that order."""
    row = await (await connection.execute(_SQL["locate"], {"tenant": tenant_id, "name": name})).fetchone()
    if row is None:
        return None
    key = {"uid": row[0], "shard": row[1]}
    await connection.execute(_SQL["lock_timer"], key)
    if await (await connection.execute(_SQL["lock_schedule"], key)).fetchone() is None:
        # It was deleted while we waited; one that was made anew under its name is another schedule.
        return None
    found = await find(connection, tenant_id, tenant, name, full=True)
    return found if found is not None and found.record.uid == row[0].bytes else None


async def insert(
    connection: Connection,
    *,
    tenant_id: int,
    tenant: str,
    name: str,
    uid: bytes,
    shard_count: int,
    spec: ScheduleSpec,
    state: TimerState,
    route_id: int,
    labels: dict[str, str],
    annotations: dict[str, str],
    principal: str,
    traceparent: str | None,
    now_us: int,
) -> Stored:
    """A new schedule. Raises AlreadyExists."""
    row = await (await connection.execute(_SQL["lock_placement"], {"tenant": tenant_id})).fetchone()
    assert row is not None
    shard = shard_of(tenant, name.encode(), min(int(row[0]), shard_count), shard_count)
    trigger_body = trigger.canonical_bytes(spec.triggers)
    template_body = encode_template(spec.template)
    parameters = _spec_parameters(spec, trigger_body, template_body) | {
        "uid": uuid.UUID(bytes=uid),
        "shard": shard,
        "tenant": tenant_id,
        "name": name,
        "labels": msgspec.json.encode(labels).decode(),
        "annotations": msgspec.json.encode(annotations).decode(),
        "now": now_us,
        "traceparent": traceparent,
        "principal": principal,
        "due": state.due_us,
        "schedule": state.schedule_us,
        "decided": state.decided_us,
        "route": route_id,
        "countdown": spec.run_count_max or -1,
    }
    try:
        await connection.execute(_SQL["insert"], parameters)
    except psycopg.errors.UniqueViolation as error:
        raise AlreadyExists(ids.schedule_name(tenant, name)) from error
    record = ScheduleRecord(
        uid=uid,
        tenant=tenant,
        name=name,
        shard=shard,
        version=1,
        revision=1,
        verbatim=spec.verbatim,
        trigger_id=trigger.trigger_id(trigger_body),
        template_id=parameters["template"],
        labels=labels,
        annotations=annotations,
        pause=None,
        quarantine_reason=None,
        create_us=now_us,
        update_us=now_us,
        delete_us=None,
        timer=state,
        observed_version=1,
        countdown=parameters["countdown"],
        payload=spec.payload,
    )
    return Stored(record, trigger_body)


async def insert_version(
    connection: Connection,
    record: ScheduleRecord,
    spec: ScheduleSpec,
    *,
    route_id: int,
    countdown: int,
    principal: str,
    now_us: int,
) -> None:
    """A further version of the spec; `record.version` is the new one. The timer row's due time is not
    touched.
    """
    parameters = _spec_parameters(
        spec, trigger.canonical_bytes(spec.triggers), encode_template(spec.template)
    )
    parameters |= {
        "uid": uuid.UUID(bytes=record.uid),
        "shard": record.shard,
        "version": record.version,
        "route": route_id,
        "countdown": countdown,
        "principal": principal,
        "now": now_us,
    }
    await connection.execute(_SQL["insert_version"], parameters)


async def write(connection: Connection, record: ScheduleRecord, now_us: int) -> None:
    """The schedule's own row; its revision grows by one."""
    parameters = {
        "uid": uuid.UUID(bytes=record.uid),
        "version": record.version,
        "spec": record.verbatim,
        "trigger": record.trigger_id,
        "template": record.template_id,
        "labels": msgspec.json.encode(record.labels).decode(),
        "annotations": msgspec.json.encode(record.annotations).decode(),
        "pause": None if record.pause is None else _pause_text(record.pause),
        "quarantine_reason": record.quarantine_reason,
        "now": now_us,
    }
    await connection.execute(_SQL["write"], parameters)


async def write_timer(connection: Connection, record: ScheduleRecord, state: TimerState) -> None:
    """When it is due; its timer row is locked."""
    parameters = {
        "shard": record.shard,
        "uid": uuid.UUID(bytes=record.uid),
        "due": state.due_us,
        "schedule": state.schedule_us,
        "decided": state.decided_us,
    }
    await connection.execute(_SQL["write_timer"], parameters)


async def delete(connection: Connection, record: ScheduleRecord, now_us: int) -> None:
    """Its timer row goes, its own row is marked, its name is free."""
    key = {"shard": record.shard, "uid": uuid.UUID(bytes=record.uid), "now": now_us}
    await connection.execute(_SQL["delete_timer"], key)
    await connection.execute(_SQL["delete"], key)


async def insert_decision(
    connection: Connection,
    record: ScheduleRecord,
    tenant_id: int,
    reason: DecisionReason,
    from_us: int,
    until_us: int,
    count: int,
    now_us: int,
) -> None:
    """Why occurrences in [from_us .. until_us] did not become runs."""
    parameters = {
        "uid": uuid.UUID(bytes=record.uid),
        "from_us": from_us,
        "until_us": until_us,
        "now": now_us,
        "count": count,
        "tenant": tenant_id,
        "shard": record.shard,
        "reason": int(reason),
        "detail": None,
    }
    await connection.execute(_SQL["insert_decision"], parameters)


async def live_runs(connection: Connection, record: ScheduleRecord) -> list[bytes]:
    """Runs that wait or run, in lock order, LIVE_RUNS_MAX at most."""
    parameters = _key(record) | {"count_max": LIVE_RUNS_MAX}
    rows = await (await connection.execute(_SQL["live_runs"], parameters)).fetchall()
    return [row[0].bytes for row in rows]


async def last_run(connection: Connection, record: ScheduleRecord) -> tuple[bytes | None, int]:
    """The newest run, live or not, and when the last of the newest 100 that succeeded ended (0: none)."""
    key = _key(record)
    lease = await (await connection.execute(_SQL["last_lease"], key)).fetchone()
    row = lease or await (await connection.execute(_SQL["last_run"], key)).fetchone()
    success = await (await connection.execute(_SQL["last_success"], key | {"rows_max": 100})).fetchone()
    assert success is not None
    return (None if row is None else row[0].bytes), success[0] or 0


async def due_resumes(connection: Connection, now_us: int, count_max: int) -> list[tuple[bytes, str, str]]:
    """(uid, tenant, name) of paused schedules whose time to resume has come."""
    parameters = {"now": now_us, "count_max": count_max}
    rows = await (await connection.execute(_SQL["due_resumes"], parameters)).fetchall()
    return [(uid.bytes, tenant, name) for uid, tenant, name in rows]


def _key(record: ScheduleRecord) -> dict[str, Any]:
    return {"shard": record.shard, "uid": uuid.UUID(bytes=record.uid)}


def _spec_parameters(spec: ScheduleSpec, trigger_body: bytes, template_body: bytes) -> dict[str, Any]:
    from tickwheel.domain.job import content_id

    return {
        "spec": spec.verbatim,
        "trigger": trigger.trigger_id(trigger_body),
        "trigger_body": trigger_body,
        "template": content_id(template_body),
        "template_body": template_body,
        "payload": spec.payload.data,
        "content_type": spec.payload.content_type,
        "flags": spec.timer_flags,
        "misfire_ms": spec.misfire.threshold_us // 1_000,
        "priority": spec.template.priority,
    }


def _pause_text(pause: Pause) -> str:
    fields = {"reason": pause.reason, "principal": pause.principal, "pause_us": pause.pause_us}
    if pause.resume_us:
        fields["resume_us"] = pause.resume_us
    return msgspec.json.encode(fields).decode()


def _stored(row: Sequence[Any], tenant: str, full: bool) -> Stored:
    (uid, shard, name, version, revision, verbatim, trigger_id, template_id, labels, annotations, pause) = (
        row[:11]
    )
    (quarantine_reason, create_us, update_us, delete_us, due_us, schedule_us, decided_us) = row[11:18]
    (observed_version, countdown, payload, content_type, trigger_body) = row[18:23]
    record = ScheduleRecord(
        uid=uid.bytes,
        tenant=tenant,
        name=name,
        shard=shard,
        version=version,
        revision=revision,
        verbatim=verbatim,
        trigger_id=trigger_id,
        template_id=template_id,
        labels=labels,
        annotations=annotations,
        pause=None
        if pause is None
        else Pause(pause["reason"], pause["principal"], pause["pause_us"], pause.get("resume_us", 0)),
        quarantine_reason=quarantine_reason,
        create_us=create_us,
        update_us=update_us,
        delete_us=delete_us,
        timer=None if due_us is None else TimerState(due_us, schedule_us, decided_us),
        observed_version=observed_version or 0,
        countdown=-1 if countdown is None else countdown,
        payload=Payload(bytes(payload or b""), content_type or "") if full else None,
    )
    return Stored(record, bytes(trigger_body or b""))
