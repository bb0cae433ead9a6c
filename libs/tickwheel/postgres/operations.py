"""Operations in Postgres: how they begin, go on and end, and what background work asks of schedules."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from tickwheel.domain.operation import Move, Operation, OperationKind, OperationState, Progress, Step, Totals
from tickwheel.domain.schedule import TimerState
from tickwheel.postgres import statements
from tickwheel.postgres.connections import Connection

_SQL = statements.load("operations.sql")
MOVES_MAX = 100
"""Of one operation that are kept for people; all are counted."""
_AFTER_EVERYTHING = (1 << 62, b"\xff" * 16)


async def begin(
    connection: Connection,
    kind: OperationKind,
    *,
    tenant_id: int,
    resource: str,
    request: dict[str, Any],
    cursors: Sequence[dict[str, Any]],
    principal: str,
    now_us: int,
) -> Operation:
    """A new operation, with a step for each cursor to start from."""
    operation_id = secrets.token_bytes(16)
    parameters = {
        "id": uuid.UUID(bytes=operation_id),
        "tenant": tenant_id,
        "kind": int(kind),
        "resource": resource,
        "request": _json(request),
        "principal": principal,
        "now": now_us,
        "cursors": [_json(each) for each in cursors],
    }
    await connection.execute(_SQL["insert"], parameters)
    await connection.execute(_SQL["insert_steps"], parameters)
    return Operation(
        operation_id,
        tenant_id,
        kind,
        OperationState.RUNNING,
        resource,
        request,
        principal,
        now_us,
        now_us,
        0,
        0,
    )


async def find(connection: Connection, operation_id: bytes) -> Operation | None:
    row = await (await connection.execute(_SQL["get"], _key(operation_id))).fetchone()
    return None if row is None else _operation(row)


async def list_page(
    connection: Connection, tenant_id: int, before: tuple[int, bytes] | None, page_max: int
) -> list[Operation]:
    """Newest first; tenant 0: the cluster's own."""
    before_us, before_id = before or _AFTER_EVERYTHING
    parameters = {
        "tenant": tenant_id,
        "before_us": before_us,
        "before_id": uuid.UUID(bytes=before_id),
        "page_max": page_max,
    }
    rows = await (await connection.execute(_SQL["list"], parameters)).fetchall()
    return [_operation(row) for row in rows]


async def totals(connection: Connection, operation_id: bytes) -> Totals:
    row = await (await connection.execute(_SQL["totals"], _key(operation_id))).fetchone()
    assert row is not None
    return Totals(*row)


async def moves(connection: Connection, operation_id: bytes) -> list[Move]:
    parameters = _key(operation_id) | {"count_max": MOVES_MAX}
    rows = await (await connection.execute(_SQL["moves"], parameters)).fetchall()
    return [Move(f"tenants/{tenant}/schedules/{name}", before, after) for tenant, name, before, after in rows]


@dataclass(frozen=True, slots=True)
class Open:
    """An operation under way. `step`: the next to go on with, None when all have ended."""

    operation: Operation
    step: int | None
    not_before_us: int


async def open_ones(connection: Connection, count_max: int) -> list[Open]:
    rows = await (await connection.execute(_SQL["open"], {"count_max": count_max})).fetchall()
    return [Open(_operation(row[:11]), row[11], row[12] or 0) for row in rows]


async def is_open(connection: Connection, kind: OperationKind, resource: str) -> bool:
    parameters = {"kind": int(kind), "resource": resource}
    return await (await connection.execute(_SQL["open_of"], parameters)).fetchone() is not None


async def lock_step(connection: Connection, operation_id: bytes, step: int) -> Step | None:
    """The step under its lock; None where it has ended, or the operation has, or was asked to stop."""
    parameters = _key(operation_id) | {"step": step}
    row = await (await connection.execute(_SQL["lock_step"], parameters)).fetchone()
    return None if row is None else Step(step, row[0], row[1])


async def advance(
    connection: Connection, operation_id: bytes, step: int, progress: Progress, now_us: int
) -> None:
    """Records what this transaction did of a step that it has locked."""
    parameters = _key(operation_id) | {
        "step": step,
        "cursor": _json(progress.cursor),
        "examined": progress.examined_count,
        "changed": progress.changed_count,
        "skipped": progress.skipped_count,
        "done": progress.is_done,
        "not_before": now_us + progress.wait_us,
        "now": now_us,
    }
    await connection.execute(_SQL["advance"], parameters)
    if progress.examined_count or progress.is_done:
        await connection.execute(_SQL["touch"], parameters)


async def fail_step(
    connection: Connection, operation_id: bytes, step: int, error: str, not_before_us: int, attempts_max: int
) -> None:
    parameters = _key(operation_id) | {
        "step": step,
        "error": error[:1_000],
        "not_before": not_before_us,
        "attempts_max": attempts_max,
    }
    await connection.execute(_SQL["fail_step"], parameters)


async def end(connection: Connection, operation_id: bytes, now_us: int) -> OperationState | None:
    """Ends an operation that is through, or was asked to stop; None where it goes on, or had ended."""
    parameters = _key(operation_id) | {"now": now_us}
    row = await (await connection.execute(_SQL["end"], parameters)).fetchone()
    return None if row is None else OperationState(row[0])


async def cancel(connection: Connection, operation_id: bytes, now_us: int) -> None:
    await connection.execute(_SQL["cancel"], _key(operation_id) | {"now": now_us})


async def delete(connection: Connection, operation_id: bytes) -> bool:
    """Forgets an operation that has ended; False where it goes on."""
    done = await connection.execute(_SQL["delete"], _key(operation_id))
    if done.rowcount:
        await connection.execute(_SQL["delete_parts"], _key(operation_id))
    return done.rowcount > 0


async def insert_move(
    connection: Connection, operation_id: bytes, schedule: bytes, before_us: int, after_us: int
) -> None:
    parameters = _key(operation_id) | {
        "schedule": uuid.UUID(bytes=schedule),
        "before": before_us,
        "after": after_us,
        "count_max": MOVES_MAX,
    }
    await connection.execute(_SQL["insert_move"], parameters)


# --- Calendars that changed -------------------------------------------------------------------------------


async def dependents_page(
    connection: Connection, calendar: bytes, after: bytes, page_max: int
) -> list[tuple[bytes, str, str]]:
    """(uid, tenant, name) of live schedules that name a calendar, by uid."""
    parameters = {
        "calendar": uuid.UUID(bytes=calendar),
        "after": uuid.UUID(bytes=after),
        "page_max": page_max,
    }
    rows = await (await connection.execute(_SQL["dependents_page"], parameters)).fetchall()
    return [(uid.bytes, tenant, name) for uid, tenant, name in rows]


# --- Time-zone data that changed --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """A schedule's timer row, with the stored form of its triggers (empty: it is missing)."""

    uid: bytes
    state: TimerState
    version: int
    trigger_id: int
    trigger_body: bytes


async def shard_page(
    connection: Connection, shard: int, after: bytes, page_max: int
) -> tuple[list[PlannedRow], bytes | None]:
    """The schedules of a shard after a uid that have a timer row, and the uid to go on after (None: the end).

    At most `page_max` schedules are looked at, those that were deleted included.
    """
    parameters = {"shard": shard, "after": uuid.UUID(bytes=after), "page_max": page_max}
    rows = await (await connection.execute(_SQL["shard_page"], parameters)).fetchall()
    found = [
        PlannedRow(uid.bytes, TimerState(due, schedule, decided), version, trigger_id, bytes(body or b""))
        for uid, due, schedule, decided, version, trigger_id, body in rows
        if due is not None
    ]
    return found, rows[-1][0].bytes if len(rows) == page_max else None


async def move_timer(connection: Connection, shard: int, row: PlannedRow, state: TimerState) -> bool:
    """Writes when a schedule is due, unless somebody has rewritten the row since it was read."""
    parameters = {
        "shard": shard,
        "uid": uuid.UUID(bytes=row.uid),
        "due": state.due_us,
        "schedule": state.schedule_us,
        "decided": state.decided_us,
        "old_due": row.state.due_us,
        "old_schedule": row.state.schedule_us,
        "old_decided": row.state.decided_us,
        "version": row.version,
    }
    return (await connection.execute(_SQL["move_timer"], parameters)).rowcount == 1


async def recorded_tzdata(connection: Connection) -> tuple[str, int, bool]:
    """The version that due times are computed from, the number of shards, and whether there are schedules."""
    row = await (await connection.execute(_SQL["recorded_tzdata"])).fetchone()
    assert row is not None
    return row[0], row[1], row[2]


async def record_tzdata(connection: Connection, version: str) -> None:
    await connection.execute(_SQL["record_tzdata"], {"version": version})


# --- Backfills --------------------------------------------------------------------------------------------


async def lock_timer(connection: Connection, shard: int, schedule: bytes) -> int | None:
    """The last occurrence that was decided, under the timer row's lock; None where there is no such row."""
    parameters = {"shard": shard, "uid": uuid.UUID(bytes=schedule)}
    row = await (await connection.execute(_SQL["lock_timer"], parameters)).fetchone()
    return None if row is None else int(row[0])


async def live_claims(connection: Connection, operation_id: bytes, shard: int) -> int:
    """Runs of a backfill that wait or run now."""
    parameters = _key(operation_id) | {"shard": shard}
    await connection.execute(_SQL["settle_claims"], parameters)
    row = await (await connection.execute(_SQL["live_claims"], parameters)).fetchone()
    assert row is not None
    return int(row[0])


async def already_born(
    connection: Connection, shard: int, schedule: bytes, instants_us: Sequence[int]
) -> set[int]:
    """Which occurrences of a schedule have a run. Its timer row is locked: no more are born meanwhile."""
    parameters = {
        "shard": shard,
        "uid": uuid.UUID(bytes=schedule),
        "instants": list(instants_us),
        "first": min(instants_us),
    }
    found: set[int] = set()
    for name in ("born_leased", "born_rows"):
        rows = await (await connection.execute(_SQL[name], parameters)).fetchall()
        found.update(row[0] for row in rows)
    return found


async def claim(
    connection: Connection,
    operation_id: bytes,
    schedule: bytes,
    instants_us: Sequence[int],
    runs: Sequence[bytes],
) -> set[int]:
    """Claims occurrences for new runs; gives those that no backfill had claimed."""
    parameters = _key(operation_id) | {
        "uid": uuid.UUID(bytes=schedule),
        "instants": list(instants_us),
        "runs": [uuid.UUID(bytes=run) for run in runs],
    }
    rows = await (await connection.execute(_SQL["claim"], parameters)).fetchall()
    return {row[0] for row in rows}


@dataclass(frozen=True, slots=True)
class BackfilledRuns:
    """Runs of one schedule's version for occurrences of the past, with what all of them share."""

    runs: Sequence[bytes]
    instants_us: Sequence[int]
    schedule: bytes
    shard: int
    tenant_id: int
    version: int
    template_id: int
    route_id: int
    priority: int
    flags: int
    cause: int
    payload: bytes
    content_type: str


async def insert_backfilled(connection: Connection, made: BackfilledRuns, now_us: int) -> None:
    parameters = {
        "runs": [uuid.UUID(bytes=run) for run in made.runs],
        "instants": list(made.instants_us),
        "uid": uuid.UUID(bytes=made.schedule),
        "shard": made.shard,
        "tenant": made.tenant_id,
        "version": made.version,
        "template": made.template_id,
        "route": made.route_id,
        "priority": made.priority,
        "flags": made.flags,
        "cause": made.cause,
        "payload": made.payload,
        "content_type": made.content_type,
        "now": now_us,
    }
    await connection.execute(_SQL["insert_backfilled"], parameters)


def _key(operation_id: bytes) -> dict[str, Any]:
    return {"id": uuid.UUID(bytes=operation_id)}


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _operation(row: Sequence[Any]) -> Operation:
    return Operation(row[0].bytes, row[1], OperationKind(row[2]), OperationState(row[3]), *row[4:11])
