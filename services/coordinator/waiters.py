"""Waits for runs to end: one query for all who wait, ten times a second, however many they are."""

from __future__ import annotations

import asyncio
from collections import defaultdict

import structlog

from tickwheel.errors import LimitExceeded, StoreUnavailable
from tickwheel.postgres import runs
from tickwheel.postgres.connections import Connection, Database

log = structlog.get_logger(__name__)

POLL_INTERVAL_MS = 100
RUNS_MAX = 20_000
"""Runs that are waited for at a time."""
QUERY_RUNS_MAX = 2_000


class Waiters:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: dict[bytes, set[asyncio.Future[None]]] = defaultdict(set)
        self._wake = asyncio.Event()

    async def wait(self, run: bytes, timeout_ms: int) -> bool:
        """Whether the run ended within the time. Raises LimitExceeded where too many are waited for."""
        if run not in self._waiting and len(self._waiting) >= RUNS_MAX:
            raise LimitExceeded(
                "runs that are waited for", RUNS_MAX, len(self._waiting) + 1, "TOO_MANY_WAITERS"
            )
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[run].add(future)
        self._wake.set()
        try:
            async with asyncio.timeout(timeout_ms / 1_000):
                await future
            return True
        except TimeoutError:
            return False
        finally:
            remaining = self._waiting.get(run)
            if remaining is not None:
                remaining.discard(future)
                if not remaining:
                    del self._waiting[run]

    def end(self, error: Exception) -> None:
        """Tells all who wait that nobody polls for them any more."""
        for futures in self._waiting.values():
            for future in futures:
                if not future.done():
                    future.set_exception(error)

    async def run(self) -> None:
        """Polls while anybody waits, until cancelled."""
        while True:
            await self._wake.wait()
            if not self._waiting:
                self._wake.clear()
                continue
            try:
                await self._poll()
            except StoreUnavailable as error:
                log.info("wait_poll_failed", error=str(error))
            await asyncio.sleep(POLL_INTERVAL_MS / 1_000)

    async def _poll(self) -> None:
        wanted = list(self._waiting)
        for start in range(0, len(wanted), QUERY_RUNS_MAX):
            part = wanted[start : start + QUERY_RUNS_MAX]

            async def ask(connection: Connection, part: list[bytes] = part) -> list[int]:
                return await runs.ended(connection, part)

            for position in await self._database.read(ask):
                for future in self._waiting.get(part[position], ()):
                    if not future.done():
                        future.set_result(None)
