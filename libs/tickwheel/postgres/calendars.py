"""Calendars in Postgres: their revisions, and which schedules name them."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import Any

import msgspec
import psycopg

from tickwheel.domain import ids
from tickwheel.domain.calendar import CalendarRecord, CalendarSource, iso_dates
from tickwheel.errors import AlreadyExists
from tickwheel.postgres import statements
from tickwheel.postgres.connections import Connection

_SQL = statements.load("calendars.sql")


@dataclass(frozen=True, slots=True)
class SharedDates:
    """What a schedule needs of a calendar that it names."""

    uid: bytes
    dates: frozenset[date]
    title: str
    """Its display name, or its id where it has none."""


async def find(
    connection: Connection, tenant_id: int, tenant: str, name: str, revision: int = 0
) -> CalendarRecord | None:
    """A calendar, at an earlier revision where one is given."""
    parameters = {"tenant": tenant_id, "name": name, "revision": revision}
    row = await (await connection.execute(_SQL["get"], parameters)).fetchone()
    if row is None:
        return None
    record = _record(row, tenant)
    return replace(record, revision=revision) if revision else record


async def lock(connection: Connection, tenant_id: int, tenant: str, name: str) -> CalendarRecord | None:
    """A calendar that nobody else changes, and no schedule is computed from, before this transaction ends."""
    parameters = {"tenant": tenant_id, "name": name}
    if await (await connection.execute(_SQL["lock"], parameters)).fetchone() is None:
        return None
    return await find(connection, tenant_id, tenant, name)


async def list_page(
    connection: Connection, tenant_id: int, tenant: str, after: tuple[int, bytes] | None, page_max: int
) -> list[CalendarRecord]:
    after_us, after_uid = after or (-1, ids.NO_UUID)
    parameters = {
        "tenant": tenant_id,
        "after_us": after_us,
        "after_uid": uuid.UUID(bytes=after_uid),
        "page_max": page_max,
    }
    rows = await (await connection.execute(_SQL["list"], parameters)).fetchall()
    return [_record(row, tenant) for row in rows]


async def revisions_page(
    connection: Connection, tenant_id: int, tenant: str, name: str, before: int, page_max: int
) -> list[CalendarRecord]:
    """Newest first."""
    parameters = {"tenant": tenant_id, "name": name, "before": before, "page_max": page_max}
    rows = await (await connection.execute(_SQL["revisions"], parameters)).fetchall()
    return [_record(row, tenant) for row in rows]


async def insert(
    connection: Connection,
    tenant_id: int,
    tenant: str,
    name: str,
    display_name: str,
    labels: dict[str, str],
    source: CalendarSource,
    dates: frozenset[date],
    effective_year: int,
    principal: str,
    now_us: int,
) -> CalendarRecord:
    """Raises AlreadyExists."""
    uid = secrets.token_bytes(16)
    record = CalendarRecord(
        uid, tenant, name, 1, now_us, now_us, display_name, labels, source, dates, effective_year
    )
    parameters = {
        "uid": uuid.UUID(bytes=uid),
        "tenant": tenant_id,
        "name": name,
        "year": effective_year,
        "now": now_us,
    }
    try:
        await connection.execute(_SQL["insert"], parameters)
    except psycopg.errors.UniqueViolation as error:
        raise AlreadyExists(record.full_name) from error
    await _insert_revision(connection, record, principal, now_us)
    return record


async def write(connection: Connection, record: CalendarRecord, principal: str, now_us: int) -> None:
    """A further revision; the calendar is locked."""
    parameters = {
        "uid": uuid.UUID(bytes=record.uid),
        "revision": record.revision,
        "year": record.effective_year,
        "now": now_us,
    }
    await connection.execute(_SQL["write"], parameters)
    await _insert_revision(connection, record, principal, now_us)


async def _insert_revision(
    connection: Connection, record: CalendarRecord, principal: str, now_us: int
) -> None:
    source = {"dates": iso_dates(record.source.dates), "rules": list(record.source.rules)}
    parameters = {
        "uid": uuid.UUID(bytes=record.uid),
        "revision": record.revision,
        "display_name": record.display_name,
        "labels": _json(record.labels),
        "source": _json(source),
        "dates": _json(iso_dates(record.dates)),
        "year": record.effective_year,
        "principal": principal,
        "now": now_us,
    }
    await connection.execute(_SQL["insert_revision"], parameters)


async def delete(connection: Connection, record: CalendarRecord, now_us: int) -> None:
    parameters = {"uid": uuid.UUID(bytes=record.uid), "now": now_us}
    await connection.execute(_SQL["delete"], parameters)


async def shared(
    connection: Connection, tenant_id: int, names: Collection[str], *, locked: bool
) -> dict[str, SharedDates]:
    """The calendars of these names (last parts) that there are. `locked`: they stay as they are until the
    transaction ends.
    """
    if not names:
        return {}
    parameters = {"tenant": tenant_id, "names": sorted(names)}
    if locked:
        await connection.execute(_SQL["share"], parameters)
    rows = await (await connection.execute(_SQL["read"], parameters)).fetchall()
    return {
        name: SharedDates(uid.bytes, _dates(dates), title or name.replace("-", " "))
        for name, uid, dates, title in rows
    }


async def link(connection: Connection, schedule: bytes, named: Collection[SharedDates]) -> None:
    """Says which calendars a schedule names, in place of those that it named."""
    parameters = {
        "schedule": uuid.UUID(bytes=schedule),
        "calendars": [uuid.UUID(bytes=each.uid) for each in named],
    }
    await connection.execute(_SQL["unlink"], parameters)
    if named:
        await connection.execute(_SQL["link"], parameters)


async def dependents(
    connection: Connection, calendar: bytes, after: bytes, page_max: int
) -> list[tuple[bytes, str]]:
    """(uid, name) of the live schedules that name a calendar, by uid."""
    parameters = {
        "calendar": uuid.UUID(bytes=calendar),
        "after": uuid.UUID(bytes=after),
        "page_max": page_max,
    }
    rows = await (await connection.execute(_SQL["dependents"], parameters)).fetchall()
    return [(uid.bytes, name) for uid, name in rows]


async def outrun(connection: Connection, year: int, count_max: int) -> list[tuple[str, str]]:
    """(tenant, name) of calendars whose rules are not worked out as far as this year."""
    parameters = {"year": year, "count_max": count_max}
    return [
        (row[0], row[1]) for row in await (await connection.execute(_SQL["outrun"], parameters)).fetchall()
    ]


def _record(row: Sequence[Any], tenant: str) -> CalendarRecord:
    (uid, name, revision, create_us, _, _, display_name, labels, source, dates, year, update_us) = row
    return CalendarRecord(
        uid.bytes,
        tenant,
        name,
        revision,
        create_us,
        update_us,
        display_name,
        labels,
        CalendarSource(tuple(sorted(_dates(source["dates"]))), tuple(source["rules"])),
        _dates(dates),
        year,
    )


def _dates(texts: Sequence[str]) -> frozenset[date]:
    return frozenset(date.fromisoformat(text) for text in texts)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
