"""What only the leading coordinator does, beside assigning shards: partitions, retention, resuming what is
due.

None of it needs to be done by one alone to be right (partitions are guarded by a lock, a resume by its
row); one is enough.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import psycopg
import structlog

from tickwheel.errors import FailedPrecondition, InvalidArgument, NotFound, StoreUnavailable
from tickwheel.ports import Election
from tickwheel.postgres import partitions, schedules
from tickwheel.postgres.connections import Connection, Database, cluster_now_us

log = structlog.get_logger(__name__)

MAINTENANCE_INTERVAL_MS = 180_000
RESUME_INTERVAL_MS = 1_000
RESUMES_MAX = 200
"""In one round."""

Resume = Callable[[str, str, bytes], Awaitable[None]]
"""Resumes (tenant, schedule, uid)."""


async def maintain_partitions(election: Election, database: Database, url: str) -> None:
    """A round every few minutes, in a thread and on a connection of its own, until cancelled."""
    while True:
        if election.term() is not None:
            try:
                now_us = await database.now_us()
                done = await asyncio.to_thread(_maintain_once, url, now_us)
                if done.created or done.dropped or done.blocked or done.deleted_count:
                    log.info(
                        "partitions_maintained",
                        created=done.created,
                        dropped=done.dropped,
                        blocked=done.blocked,
                        deleted=done.deleted_count,
                    )
            except (StoreUnavailable, psycopg.Error) as error:
                log.warning("partitions_not_maintained", error=str(error))
        await _next_round(election, MAINTENANCE_INTERVAL_MS)


def _maintain_once(url: str, now_us: int) -> partitions.Maintained:
    with psycopg.connect(url, autocommit=True, connect_timeout=5) as connection:
        return partitions.maintain(connection, now_us=now_us)


async def resume_paused(election: Election, database: Database, resume: Resume) -> None:
    """Resumes schedules whose `resume_time` has come, a bounded number a second, until cancelled."""
    while True:
        if election.term() is not None:
            try:
                await _resume_round(database, resume)
            except StoreUnavailable as error:
                log.info("resumes_wait", error=str(error))
        await asyncio.sleep(RESUME_INTERVAL_MS / 1_000)


async def _resume_round(database: Database, resume: Resume) -> None:
    async def ask(connection: Connection) -> list[tuple[bytes, str, str]]:
        now_us = await cluster_now_us(connection)
        return await schedules.due_resumes(connection, now_us, RESUMES_MAX)

    for uid, tenant, name in await database.read(ask):
        try:
            await resume(tenant, name, uid)
            log.info("schedule_resumed", tenant=tenant, schedule=name)
        except (NotFound, FailedPrecondition) as error:
            # Somebody was faster, or paused it for longer.
            log.debug("resume_overtaken", tenant=tenant, schedule=name, error=str(error))
        except InvalidArgument as error:
            log.error("resume_failed", tenant=tenant, schedule=name, error=str(error))


async def _next_round(election: Election, interval_ms: int) -> None:
    """After the interval, or as soon as the leadership changes."""
    try:
        async with asyncio.timeout(interval_ms / 1_000):
            await election.wait_for_change(election.term())
    except TimeoutError:
        pass
