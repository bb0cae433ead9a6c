"""Dead letters in Postgres: read, and replayed as new runs."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tickwheel.domain import ids
from tickwheel.domain.job import Payload, decode_failure
from tickwheel.domain.record import DeadLetterRecord
from tickwheel.postgres import statements
from tickwheel.postgres.connections import Connection

_SQL = statements.load("dead_letters.sql")
SCAN_ROWS_MAX = 5_000


@dataclass(frozen=True, slots=True)
class Source:
    """A dead letter with what a replay needs of its run."""

    record: DeadLetterRecord
    schedule: bytes | None
    """The uid of its schedule."""
    template_id: int
    version: int
    labels: dict[str, str]


@dataclass(frozen=True, slots=True)
class Filter:
    schedule: str | None = None
    kind: str | None = None
    fingerprint: str | None = None


@dataclass(frozen=True, slots=True)
class Page:
    found: list[DeadLetterRecord]
    next_before: tuple[int, bytes] | None


async def find(connection: Connection, tenant_id: int, tenant: str, run: bytes) -> Source | None:
    parameters = {"tenant": tenant_id, "run": uuid.UUID(bytes=run), "shard": ids.run_shard(run)}
    row = await (await connection.execute(_SQL["get"], parameters, binary=True)).fetchone()
    if row is None:
        return None
    data, kind = (row[9], row[10]) if row[9] is not None else (row[11], row[12])
    return Source(
        record=_record(row, tenant, Payload(bytes(data or b""), kind or "")),
        schedule=None if row[13] is None else row[13].bytes,
        template_id=row[14],
        version=row[15],
        labels=row[16] or {},
    )


async def lock(connection: Connection, tenant_id: int, run: bytes) -> int | None:
    """How often it was replayed, under its lock; None where there is none."""
    parameters = {"tenant": tenant_id, "run": uuid.UUID(bytes=run)}
    row = await (await connection.execute(_SQL["lock"], parameters)).fetchone()
    return None if row is None else int(row[0])


async def mark_replayed(connection: Connection, run: bytes, replayed_by: bytes) -> None:
    parameters = {"run": uuid.UUID(bytes=run), "replayed_by": uuid.UUID(bytes=replayed_by)}
    await connection.execute(_SQL["replayed"], parameters)


async def list_page(
    connection: Connection,
    tenant_id: int,
    tenant: str,
    wanted: Filter,
    *,
    before: tuple[int, bytes] | None,
    page_max: int,
) -> Page:
    """Newest first. A page may be short, even empty, and still lead on."""
    before_us, before_run = before or (1 << 62, b"\xff" * 16)
    scan_max = max(SCAN_ROWS_MAX, page_max)
    parameters = {
        "tenant": tenant_id,
        "before_us": before_us,
        "before_run": uuid.UUID(bytes=before_run),
        "scan_max": scan_max,
        "page_max": page_max,
        "schedule": wanted.schedule,
        "kind": wanted.kind,
        "fingerprint": wanted.fingerprint,
    }
    rows = await (await connection.execute(_SQL["list"], parameters, binary=True)).fetchall()
    found = [_record(row, tenant, None) for row in rows if row[0] is not None]
    if len(found) == page_max:
        return Page(found, (found[-1].create_us, found[-1].run))
    seen_count, last_us, last_run = rows[0][9:12]
    return Page(found, (last_us, last_run.bytes) if seen_count == scan_max else None)


def _record(row: Sequence[Any], tenant: str, payload: Payload | None) -> DeadLetterRecord:
    run, create_us, spent, failure, replayed_by, replay_count, schedule, queue, kind = row[:9]
    return DeadLetterRecord(
        run=run.bytes,
        tenant=tenant,
        schedule=schedule or "",
        queue=queue or "",
        kind=kind or "",
        create_us=create_us,
        attempt_count=spent,
        failure=None if failure is None else decode_failure(bytes(failure)),
        replayed_by=None if replayed_by is None else replayed_by.bytes,
        replay_count=replay_count,
        payload=payload,
    )
