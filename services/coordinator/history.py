"""What does the cluster know of Postgres' history, and who accepts another one? (Design, section 6.)

Every second the leader writes down what it finds behind a connection of its own, as `ClusterFacts` in etcd:
timers compare their new connections with it. A difference that it finds, or that a timer reports, is written
down as the reason why nothing is granted (`halted`), and that stays until somebody resumes: a log that was
too short grows, and would hide it. Facts never go back: a history that was not accepted never becomes the
known one.

Each coordinator, leader or not, forgets what ids stand for when Postgres is another one than it was.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import psycopg
import structlog

from tickwheel.domain.job import LEASE_DEFAULT_MS
from tickwheel.errors import FailedPrecondition, FieldInvalid, StoreUnavailable
from tickwheel.ports import ClusterFacts, Doubt, Election, RegistryError, Resumption, ShardRegistry
from tickwheel.postgres import history
from tickwheel.postgres.connections import Connection, Database

log = structlog.get_logger(__name__)

KEEP_INTERVAL_MS: Final = 1_000
CONNECT_TIMEOUT_S: Final = 5
CALL_TIMEOUT_S: Final = 3.0
HOLD_MS_MAX: Final = 86_400_000


class HistoryKeeper:
    """One for each coordinator. `on_change` is called when this process finds another history than before."""

    def __init__(
        self,
        url: str,
        registry: ShardRegistry,
        election: Election,
        database: Database,
        on_change: Callable[[], None],
    ) -> None:
        self._url = url
        self._registry = registry
        self._election = election
        self._database = database
        self._on_change = on_change
        self._connection: psycopg.AsyncConnection[Any] | None = None
        self._seen: ClusterFacts | None = None
        self.halted = ""
        """Why nothing is granted, as last heard or found."""

    # Each coordinator.

    async def admit(self, connection: Connection) -> None:
        """For each new connection of this process: what ids stood for is forgotten with their history."""
        seen = self._seen
        self._see(seen, await history.read_facts(connection))

    def _see(self, seen: ClusterFacts | None, found: ClusterFacts) -> None:
        """`seen` is what was seen before `found` was read: a log only grows."""
        self._seen = found
        if seen is not None and (
            found.incarnation != seen.incarnation or history.difference(seen, seen.incarnation, found)
        ):
            log.warning("postgres_history_changed", incarnation=found.incarnation, timeline=found.timeline)
            self._on_change()

    async def run(self) -> None:
        """Reads, compares, and as the leader writes down, every second, until cancelled."""
        try:
            while True:
                try:
                    async with asyncio.timeout(CALL_TIMEOUT_S):
                        await self._look()
                except (StoreUnavailable, RegistryError, TimeoutError, psycopg.Error, OSError) as error:
                    log.debug("history_not_kept", error=repr(error))
                await asyncio.sleep(KEEP_INTERVAL_MS / 1_000)
        finally:
            await self._close()

    async def _look(self) -> None:
        term = self._election.term()
        known = await self._registry.cluster_facts()
        if term is None:
            self.halted = "" if known is None else known.halted
            await self._close()
            return
        incarnation = await self._registry.incarnation()
        doubt = await self._registry.doubt()
        if known is not None and known.halted:
            await self._close()  # What was resumed may stand behind a new connection alone.
        seen = self._seen
        found = await self._found()
        self._see(seen, found)
        why = _why_halted(known, incarnation, doubt, found)
        if why:
            if known is None or known.halted != why:
                await self._registry.put_cluster_facts(term, replace(known or found, halted=why))
            if self.halted != why:
                log.error("cluster_halted", reason=why)
            self.halted = why
            return
        if found.incarnation > incarnation:
            # The registry was wiped or restored: proofs compare with what stands there.
            await self._registry.raise_incarnation(found.incarnation)
        await self._registry.put_cluster_facts(term, found)
        if self.halted:
            log.warning("cluster_goes_on", incarnation=found.incarnation, timeline=found.timeline)
        self.halted = ""

    async def _found(self) -> ClusterFacts:
        """Behind a connection that stays, so that Postgres is never replaced without a new one."""
        if self._connection is None or self._connection.closed:
            self._connection = await psycopg.AsyncConnection.connect(
                self._url,
                autocommit=True,
                connect_timeout=CONNECT_TIMEOUT_S,
                application_name="tickwheel coordinator history",
                keepalives_idle=5,
                keepalives_interval=2,
                keepalives_count=3,
                tcp_user_timeout=10_000,
            )
        try:
            return await history.read_facts(self._connection)
        except BaseException:
            await self._close()
            raise

    async def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    # Accepting another history.

    async def resume(self, *, force: bool, hold_ms: int | None, principal: str, peer: str) -> Resumption:
        """Accepts what stands in Postgres now as the cluster's history.

        The order makes it safe to break off anywhere and to do again: the reason for the hold, the
        incarnation in the registry (from then on no proof made under the old one succeeds), then Postgres,
        every epoch under all fences. The leader notes the new facts by itself.

        Raises:
            FailedPrecondition: nothing is wrong that is known, and `force` was not said.
            FieldInvalid: the hold is out of bounds.
            StoreUnavailable: Postgres or etcd is out of reach.
        """
        if hold_ms is not None and not 0 <= hold_ms <= HOLD_MS_MAX:
            raise FieldInvalid("hold_duration", f"{hold_ms} ms is not between 0 and {HOLD_MS_MAX} ms")

        async def read(connection: Connection) -> tuple[ClusterFacts, int]:
            return await history.read_facts(connection), await history.lease_ms_max(connection)

        try:
            known = await self._registry.cluster_facts()
            incarnation = await self._registry.incarnation()
            found, lease_ms = await self._database.read(read)
            why = history.difference(known, incarnation, found) or (known.halted if known is not None else "")
            if not why and not force:
                raise FailedPrecondition(
                    "nothing stands still: Postgres is in the history that is known; if it lost commits "
                    "nevertheless, force it"
                )
            number = history.next_incarnation(incarnation, await self._registry.epochs(), found)
            if hold_ms is None:
                hold_ms = max(LEASE_DEFAULT_MS, lease_ms, await self._registry.lease_ms_max())
            # Its time counts from the change in Postgres: this is a moment before it, so it is put again.
            await self._registry.put_resumption(Resumption(number, await self._database.now_us(), hold_ms))
            await self._registry.raise_incarnation(number)
            at_us = await history.resume(
                self._url, number, principal=principal, peer=peer, reason=why or "forced"
            )
            resumption = Resumption(number, at_us, hold_ms)
            await self._registry.put_resumption(resumption)
        except RegistryError as error:
            raise StoreUnavailable("etcd", str(error)) from error
        log.warning("cluster_resumed", incarnation=number, hold_ms=hold_ms, reason=why or "forced")
        return resumption


def _why_halted(
    known: ClusterFacts | None, incarnation: int, doubt: Doubt | None, found: ClusterFacts
) -> str:
    """The first reason that was found since the last resume; empty when there is none."""
    if known is not None and known.halted and found.incarnation <= known.incarnation:
        return known.halted
    why = history.difference(known, incarnation, found)
    if not why and doubt is not None and found.incarnation <= doubt.incarnation:
        why = f"{doubt.node_id} found: {doubt.reason}"
    return why
