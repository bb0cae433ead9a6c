"""Connections to Postgres: a bounded pool that outlives restarts, and transactions that are repeated where
that is safe.

Several hosts in the URL with `target_session_attrs=read-write` follow a failover: every new connection
looks for the primary anew. A connection that died while it was idle is noticed before it is handed out,
without asking the server.

A transaction whose connection breaks *before* its commit was sent has had no effect, so it is repeated
(twice at most). When it breaks during the commit nobody knows: the caller is told, and the request_id
makes its retry safe.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import psycopg
import structlog

from tickwheel.errors import StoreUnavailable
from tickwheel.postgres import arrays, statements
from tickwheel.postgres.pool import Pool

log = structlog.get_logger(__name__)

Connection = psycopg.AsyncConnection[Any]
T = TypeVar("T")

ATTEMPTS_MAX = 3
WAITING_MAX = 5_000
"""Callers that wait for a connection; more are told to come back."""

_COMMON = statements.load("common.sql")


class CommitUnknown(StoreUnavailable):
    """The connection broke while the commit was under way. Ask again with the same request_id."""

    def __init__(self) -> None:
        super().__init__("Postgres", "the connection broke during the commit, which may have happened")


class _RolledBack(Exception):
    """Ends a transaction that was only tried."""


class Database:
    """The pool of one process. Made on the event loop that uses it; `open` it first."""

    def __init__(
        self,
        url: str,
        *,
        connections_max: int = 8,
        connect_timeout_ms: int = 3_000,
        transaction_timeout_ms: int = 5_000,
        wait_timeout_ms: int = 2_000,
        name: str = "tickwheel",
    ) -> None:
        self.admit: Callable[[Connection], Awaitable[None]] | None = None
        """Given each new connection before its first use."""
        self._transaction_timeout_ms = transaction_timeout_ms
        self._url = url
        self._parameters: dict[str, Any] = {
            "autocommit": True,
            "connect_timeout": max(1, connect_timeout_ms // 1_000),
            "application_name": name,
            "prepare_threshold": 2,
            # A peer that vanished without a word is given up within seconds.
            "keepalives_idle": 5,
            "keepalives_interval": 2,
            "keepalives_count": 3,
            "tcp_user_timeout": 10_000,
        }
        self._pool = Pool(
            self._connect,
            connections_max=connections_max,
            waiting_max=WAITING_MAX,
            wait_timeout_ms=wait_timeout_ms,
        )

    async def close(self) -> None:
        """Whoever comes later is told that the pool is closed."""
        await self._pool.close()

    @property
    def waiting_count(self) -> int:
        """Callers that wait for a connection."""
        return self._pool.waiting_count

    async def _connect(self) -> Connection:
        connection = await psycopg.AsyncConnection.connect(self._url, **self._parameters)
        try:
            await self._configure(connection)
        except BaseException:
            await connection.close()
            raise
        return connection

    async def _configure(self, connection: Connection) -> None:
        arrays.register(connection)
        timeout = f"{self._transaction_timeout_ms}ms"
        await connection.execute(
            "SELECT set_config('statement_timeout', %s, false),"
            " set_config('idle_in_transaction_session_timeout', %s, false), set_config('jit', 'off', false)",
            (timeout, timeout),
        )
        if self.admit is not None:
            await self.admit(connection)

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """A connection in autocommit mode, answers binary where a cursor asks for it.

        Raises:
            StoreUnavailable: none is to be had, or it broke.
        """
        try:
            async with self._pool.connection() as connection:
                yield connection
        except (psycopg.OperationalError, psycopg.InterfaceError) as error:
            raise translate(error) from error

    async def read(self, work: Callable[[Connection], Awaitable[T]]) -> T:
        """Runs statements that change nothing, again on another connection where one broke."""
        for attempt in range(1, ATTEMPTS_MAX + 1):
            async with self._pool.connection() as connection:
                try:
                    return await work(connection)
                except (psycopg.OperationalError, psycopg.InterfaceError) as error:
                    if attempt == ATTEMPTS_MAX or not _is_broken(connection, error):
                        raise translate(error) from error
                    broken = translate(error)
            log.info("read_repeated", attempt=attempt, error=str(broken))
        raise AssertionError("the last attempt returns or raises")

    async def transaction(self, work: Callable[[Connection], Awaitable[T]], *, try_only: bool = False) -> T:
        """Runs `work` in one transaction and commits it; `try_only`: rolls back what it did, and gives its
        result.

        `work` may run more than once, so it has no effects outside.

        Raises:
            StoreUnavailable: Postgres is out of reach; nothing happened.
            CommitUnknown: it may have happened.
        """
        for attempt in range(1, ATTEMPTS_MAX + 1):
            try:
                return await self._transact(work, try_only)
            except _Repeat as repeat:
                if attempt == ATTEMPTS_MAX:
                    raise translate(repeat.cause) from repeat.cause
                log.info("transaction_repeated", attempt=attempt, error=str(repeat.cause))
                # Two that met in a deadlock should not meet again.
                await asyncio.sleep(random.uniform(0.001, 0.02) * attempt)
        raise AssertionError("the last attempt returns or raises")

    async def _transact(self, work: Callable[[Connection], Awaitable[T]], try_only: bool) -> T:
        committing = False
        async with self._pool.connection() as connection:
            try:
                async with connection.transaction():
                    result = await work(connection)
                    if try_only:
                        raise _RolledBack
                    committing = True
            except _RolledBack:
                return result
            except (psycopg.errors.DeadlockDetected, psycopg.errors.SerializationFailure) as error:
                raise _Repeat(error) from error
            except (psycopg.OperationalError, psycopg.InterfaceError) as error:
                if committing:
                    raise CommitUnknown from error
                if _is_broken(connection, error):
                    raise _Repeat(error) from error
                raise translate(error) from error
            return result

    async def now_us(self) -> int:
        """The cluster clock, read in Postgres."""

        async def ask(connection: Connection) -> int:
            return await cluster_now_us(connection)

        return await self.read(ask)


class _Repeat(Exception):
    def __init__(self, cause: psycopg.Error) -> None:
        self.cause = cause


async def cluster_now_us(connection: Connection) -> int:
    row = await (await connection.execute(_COMMON["now"])).fetchone()
    if row is None:
        raise StoreUnavailable("Postgres", "the database has no cluster yet: run `tickwheel migrate`")
    return int(row[0])


def _is_broken(connection: Connection, error: psycopg.Error) -> bool:
    return connection.broken or connection.closed or isinstance(error, psycopg.errors.AdminShutdown)


def translate(error: psycopg.Error) -> StoreUnavailable:
    """What a caller is told of an operational error."""
    if isinstance(error, psycopg.errors.QueryCanceled):
        return StoreUnavailable("Postgres", "it took too long")
    lines = str(error).strip().splitlines()
    return StoreUnavailable("Postgres", lines[0] if lines else type(error).__name__)
