"""Runs in Postgres, as coordinators write and read them."""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tickwheel.domain import flags, ids
from tickwheel.domain.job import Payload, UnknownOutcomePolicy, decode_failure
from tickwheel.domain.record import AttemptRecord, NewRun, RunRecord
from tickwheel.domain.run import TERMINAL, AttemptState, Cause, RunState
from tickwheel.errors import StoreUnavailable
from tickwheel.postgres import arrays, partitions, statements
from tickwheel.postgres.catalog import Catalog
from tickwheel.postgres.connections import Connection

_SQL = statements.load("runs.sql")
SCAN_ROWS_MAX = 5_000
"""Rows that one page of a list looks at, whatever its filter leaves of them."""
CANCEL_TRIES_MAX = 3
_AFTER_EVERYTHING = (1 << 62, b"\xff" * 16)
"""A cursor that every run comes after."""


@dataclass(frozen=True, slots=True)
class Inserted:
    """Rows that were inserted, in the order given: `ids` uint8[n, 16], `shards` int[n], `due_us` int64[n]."""

    ids: NDArray[np.uint8]
    shards: NDArray[np.int64]
    due_us: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where runs come from, other than from a direct call."""

    cause: Cause = Cause.DIRECT
    schedule: bytes | None = None
    version: int = 0
    replayed_from: bytes | None = None
    ignore_overlap: bool = False
    own_payload: bool = True


async def insert(
    connection: Connection,
    runs: Sequence[NewRun],
    routes: Sequence[int],
    shards: NDArray[np.int64],
    *,
    tenant_id: int,
    now_us: int,
    origin: Origin,
    traceparent: str | None,
) -> Inserted:
    """Waiting runs with their timer rows. `routes` and `shards` say each run's; all share `origin`."""
    count = len(runs)
    due_us = np.fromiter((run.due_us for run in runs), dtype=np.int64, count=count)
    due_us[due_us == 0] = now_us
    heads = _heads(shards, now_us)
    tails = np.frombuffer(os.urandom(8 * count), dtype=np.uint64)
    has_labels = any(run.labels for run in runs)
    has_payload = origin.own_payload and any(run.payload.data or run.payload.content_type for run in runs)
    parameters = {
        "id": arrays.uuid(heads, tails),
        "shard": arrays.int2(shards),
        "due": arrays.int8(due_us),
        "template": arrays.int8(np.fromiter((run.template_id for run in runs), dtype=np.int64, count=count)),
        "route": arrays.int4(np.fromiter(routes, dtype=np.int32, count=count)),
        "priority": arrays.int2(
            np.fromiter((run.template.priority for run in runs), dtype=np.int16, count=count)
        ),
        "flags": arrays.int4(
            np.fromiter((_flags(run, origin) for run in runs), dtype=np.int32, count=count)
            | np.int32(flags.TRACED if _is_sampled(traceparent) else 0)
        ),
        # A direct run has a payload of its own, even an empty one: NULL would mean its schedule's.
        "payload": arrays.bytea([run.payload.data for run in runs])
        if has_payload
        else arrays.bytea_nulls(count),
        "content_type": arrays.text([run.payload.content_type for run in runs])
        if has_payload
        else arrays.text_nulls(count),
        "labels": arrays.text(
            [msgspec.json.encode(run.labels).decode() if run.labels else None for run in runs]
        )
        if has_labels
        else arrays.text_nulls(count),
        "schedule": None if origin.schedule is None else uuid.UUID(bytes=origin.schedule),
        "version": origin.version,
        "replayed_from": None if origin.replayed_from is None else uuid.UUID(bytes=origin.replayed_from),
        "tenant": tenant_id,
        "now": now_us,
        "cause": int(origin.cause),
        "traceparent": traceparent,
    }
    await connection.execute(_SQL["insert_runs"], parameters)
    halves = np.stack((heads, tails), axis=1).astype(">u8")
    return Inserted(halves.view(np.uint8).reshape(count, 16), shards, due_us)


def _heads(shards: NDArray[np.int64], now_us: int) -> NDArray[np.uint64]:
    """The first halves of the ids, one for each run: only a few shards are concerned."""
    distinct, inverse = np.unique(shards, return_inverse=True)
    heads = [ids.run_id_head(ids.DIRECT_RUN_CLASS, now_us, int(shard)) for shard in distinct]
    return np.array(heads, dtype=np.uint64)[inverse]


def _flags(run: NewRun, origin: Origin) -> int:
    bits = flags.RUN_ROW | int(origin.cause) << flags.CAUSE_SHIFT
    if run.payload.data:
        bits |= flags.HAS_PAYLOAD
    if origin.own_payload:
        bits |= flags.OWN_PAYLOAD
    if origin.ignore_overlap:
        bits |= flags.IGNORE_OVERLAP
    if run.template.on_unknown_outcome is UnknownOutcomePolicy.HOLD:
        bits |= flags.HOLD_UNKNOWN
    return bits


def _is_sampled(traceparent: str | None) -> bool:
    """The lowest bit of the last field."""
    return traceparent is not None and int(traceparent[-2:], 16) & 1 == 1


async def find(
    connection: Connection, catalog: Catalog, tenant_id: int, tenant: str, run: bytes, *, full: bool
) -> RunRecord | None:
    found = await find_many(connection, catalog, tenant_id, tenant, [run], full=full)
    return found[0]


async def find_many(
    connection: Connection,
    catalog: Catalog,
    tenant_id: int,
    tenant: str,
    runs: Sequence[bytes],
    *,
    full: bool,
) -> list[RunRecord | None]:
    """These runs, in their order, in one snapshot; None for what is not the tenant's, or not there."""
    parameters = {
        "shard": [ids.run_shard(run) for run in runs],
        "run": [uuid.UUID(bytes=run) for run in runs],
        "full": full,
    }
    rows = await (await connection.execute(_SQL["details"], parameters, binary=True)).fetchall()
    templates = await catalog.templates(
        connection, {row[5] or row[28] for row in rows if row[5] is not None or row[28] is not None}
    )
    return [_record(row, tenant_id, tenant, templates, full) for row in rows]


def _record(row: Sequence[Any], tenant_id: int, tenant: str, templates: Any, full: bool) -> RunRecord | None:
    (run, shard, r_tenant, _r_schedule, replayed_from, r_template, r_version, r_schedule_us, r_create) = row[
        :9
    ]
    (r_due, r_lease_us, r_end, _r_worker, r_cause, r_state, r_attempt, r_spent, payload) = row[9:18]
    (content_type, result, result_type, failure, progress, cancel_reason, labels, traceparent) = row[18:26]
    (l_tenant, _l_schedule, l_template, l_version, l_schedule_us, l_create, l_due, l_lease_us) = row[26:34]
    (_l_worker, l_flags, l_attempt, l_spent, l_cancel, l_cancel_reason, l_progress) = row[34:41]
    (t_due, _t_decided, schedule, worker, _host, v_payload, v_type) = row[41:48]
    has_row, leased = r_tenant is not None, l_tenant is not None
    if (l_tenant if leased else r_tenant) != tenant_id:
        return None
    template = templates.get(l_template if leased else r_template)
    if template is None:
        raise StoreUnavailable("Postgres", f"the template of run {run.bytes.hex()} is missing")
    if leased:
        state = RunState.CANCELLING if l_cancel else RunState.RUNNING
    else:
        state = RunState(r_state)
    data, kind = (payload, content_type) if payload is not None else (v_payload, v_type)
    return RunRecord(
        run=run.bytes,
        tenant=tenant,
        shard=shard,
        state=state,
        cause=Cause(r_cause if has_row else (l_flags & flags.CAUSE_MASK) >> flags.CAUSE_SHIFT or 1),
        template=template,
        create_us=r_create if has_row else l_create,
        schedule_us=r_schedule_us if has_row else l_schedule_us,
        due_us=l_due if leased else t_due if t_due is not None and r_state == 1 else r_due,
        lease_us=l_lease_us if leased else r_lease_us,
        end_us=0 if leased else r_end,
        spent_count=l_spent if leased else r_spent,
        attempt=l_attempt if leased else r_attempt,
        version=r_version if has_row else l_version,
        schedule=schedule or "",
        worker=worker or "",
        payload=Payload(bytes(data), kind or "") if full and data is not None else None,
        result=None if result is None else Payload(bytes(result), result_type or ""),
        failure=None if failure is None else decode_failure(bytes(failure)),
        progress=bytes(l_progress) if l_progress else bytes(progress) if progress else None,
        cancel_reason=(l_cancel_reason if leased else cancel_reason) or "",
        labels=labels or {},
        traceparent=traceparent or "",
        replayed_from=None if replayed_from is None else replayed_from.bytes,
    )


@dataclass(frozen=True, slots=True)
class Filter:
    state: RunState | None = None
    schedule: bytes | None = None


@dataclass(frozen=True, slots=True)
class Page:
    runs: list[bytes]
    next_before: tuple[int, bytes] | None
    """The cursor of the next page; None on the last one."""


async def list_page(
    connection: Connection,
    tenant_id: int,
    wanted: Filter,
    *,
    before: tuple[int, bytes] | None,
    page_max: int,
) -> Page:
    """One page of keys, newest first. It may be short and still lead on: each looks at SCAN_ROWS_MAX rows."""
    before_us, before_id = before or _AFTER_EVERYTHING
    # The bound is right for the highest class; with one class it leaves out every newer partition.
    day = min(before_us // ids.DAY_US, (1 << 16) - 2)
    _, bound = partitions.day_bounds(max(partitions.RUN_RETENTION_DAYS), day)
    parameters: dict[str, Any] = {
        "tenant": tenant_id,
        "schedule": None if wanted.schedule is None else uuid.UUID(bytes=wanted.schedule),
        "before_us": before_us,
        "before_id": uuid.UUID(bytes=before_id),
        "id_bound": bound,
        "page_max": page_max + 1,
        "scan_max": max(SCAN_ROWS_MAX, page_max + 1) if wanted.state is not None else page_max + 1,
        "by_state": wanted.state is not None,
        "with_row": False,
        "cancelled": None,
    }
    live_only = wanted.state in (RunState.RUNNING, RunState.CANCELLING)
    if live_only:
        parameters |= {"with_row": True, "cancelled": wanted.state is RunState.CANCELLING}
    keys: list[tuple[int, bytes]] = []
    if wanted.state is None or live_only:
        rows = await (await connection.execute(_SQL["list_leases"], parameters)).fetchall()
        keys = [(create_us, run.bytes) for _, run, create_us, _ in rows]
    scanned_to: tuple[int, bytes] | None = None
    if not live_only:
        name = "list_rows" if wanted.schedule is None else "list_rows_of_schedule"
        rows = await (await connection.execute(_SQL[name], parameters)).fetchall()
        keys += [
            (row[2], row[1].bytes) for row in rows if wanted.state is None or _state_of(row) is wanted.state
        ]
        if len(rows) == parameters["scan_max"]:
            scanned_to = (rows[-1][2], rows[-1][1].bytes)
    # Both sources are read down to a point; what lies below the higher of the two points is not complete.
    keys.sort(reverse=True)
    if len(keys) > page_max:
        page = keys[:page_max]
        return Page([run for _, run in page], page[-1])
    return Page([run for _, run in keys], scanned_to)


def _state_of(row: Sequence[Any]) -> RunState:
    if row[5]:
        return RunState.CANCELLING
    return RunState.RUNNING if row[4] else RunState(row[3])


async def cancel(connection: Connection, run: bytes, reason: str, grace_us: int, now_us: int) -> bool:
    """Ends a run that waits, or marks the lease of one that runs; whether its worker is to be told.

    Nothing happens to a run that has ended.
    """
    key = {"shard": ids.run_shard(run), "run": uuid.UUID(bytes=run)}
    parameters = key | {"now": now_us, "until": now_us + grace_us, "reason": reason}
    for _ in range(CANCEL_TRIES_MAX):
        if await (await connection.execute(_SQL["take_waiting"], key)).fetchone() is not None:
            await connection.execute(_SQL["end_cancelled"], parameters)
            return False
        if await (await connection.execute(_SQL["mark_cancelled"], parameters)).fetchone() is not None:
            return True
        # Neither waits nor runs, or runs and was cancelled before: or it moved from one to the other
        # between the two statements, and then the next round finds it.
        row = await (await connection.execute(_SQL["standing"], key)).fetchone()
        assert row is not None
        if row[0] or (row[1] is not None and RunState(row[1]) in TERMINAL):
            return bool(row[0])
    return False


async def attempts_page(
    connection: Connection, run: bytes, *, after: int, page_max: int
) -> tuple[list[AttemptRecord], int | None]:
    """Attempts by number, and the cursor of the next page."""
    parameters = {
        "shard": ids.run_shard(run),
        "run": uuid.UUID(bytes=run),
        "after": after,
        "page_max": page_max + 1,
    }
    rows = await (await connection.execute(_SQL["attempts"], parameters, binary=True)).fetchall()
    if len(rows) > page_max:
        return [_attempt(row, run) for row in rows[:page_max]], rows[page_max - 1][0]
    found = [_attempt(row, run) for row in rows]
    for row in await (await connection.execute(_SQL["last_attempt"], parameters)).fetchall():
        number, fence, lease_us, end_us, state, worker, host = row
        if number > after and all(each.number != number for each in found):
            found.append(
                AttemptRecord(
                    run, number, fence, worker or "", host or "", lease_us, end_us, AttemptState(state)
                )
            )
    return found, None


def _attempt(row: Sequence[Any], run: bytes) -> AttemptRecord:
    number, fence, lease_us, end_us, state, failure, worker, host = row
    return AttemptRecord(
        run=run,
        number=number,
        fence=fence,
        worker=worker or "",
        host=host or "",
        lease_us=lease_us,
        end_us=end_us,
        state=AttemptState(state),
        failure=None if failure is None else decode_failure(bytes(failure)),
    )


async def ended(connection: Connection, runs: Sequence[bytes]) -> list[int]:
    """Which of these runs (positions) are terminal: one statement for all waiters."""
    parameters = {
        "shard": [ids.run_shard(run) for run in runs],
        "run": [uuid.UUID(bytes=run) for run in runs],
    }
    rows = await (await connection.execute(_SQL["changed"], parameters)).fetchall()
    return [int(row[0]) - 1 for row in rows]
