"""A bounded pool of connections that has no tasks of its own, so nothing of it can die unseen.

A caller takes a place, then the connection that was used last, or makes a new one. A place is given back
whatever happens to its caller, so neither a cancelled call nor a deadline that passes while a connection
is being made ever shrinks the pool; and there are never more connections than places, for a half-made one
keeps the place.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import psycopg

from tickwheel.errors import StoreUnavailable

Connection = psycopg.AsyncConnection[Any]


class Pool:
    """`connect` gives a connection that is ready for use; it may raise OperationalError."""

    def __init__(
        self,
        connect: Callable[[], Awaitable[Connection]],
        *,
        connections_max: int,
        waiting_max: int,
        wait_timeout_ms: int,
    ) -> None:
        self._connect = connect
        self._connections_max = connections_max
        self._waiting_max = waiting_max
        self._wait_timeout_ms = wait_timeout_ms
        self._places = asyncio.Semaphore(connections_max)
        self._idle: list[Connection] = []
        self._closed = False
        self.waiting_count = 0

    @property
    def idle_count(self) -> int:
        return len(self._idle)

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """A connection for the caller alone.

        Raises:
            StoreUnavailable: all are busy for too long, or none can be made.
        """
        await self._take_place()
        # From here on the place is ours, and whoever ends up with the connection gives it back.
        try:
            connection = self._take_idle() or await self._make()
        except psycopg.Error as error:
            lines = str(error).strip().splitlines()
            raise StoreUnavailable("Postgres", lines[0] if lines else type(error).__name__) from error
        try:
            yield connection
        finally:
            await self._give_back(connection)

    async def close(self) -> None:
        """Closes what is idle now, and what is in use when it comes back."""
        self._closed = True
        while self._idle:
            await self._idle.pop().close()

    async def _take_place(self) -> None:
        if self._closed:
            raise StoreUnavailable("Postgres", "this process is ending")
        if self.waiting_count >= self._waiting_max:
            raise StoreUnavailable("Postgres", f"{self.waiting_count} callers wait for a connection already")
        self.waiting_count += 1
        try:
            async with asyncio.timeout(self._wait_timeout_ms / 1_000):
                await self._places.acquire()
        except TimeoutError:
            busy = f"all {self._connections_max} connections were busy for {self._wait_timeout_ms} ms"
            raise StoreUnavailable("Postgres", busy) from None
        finally:
            self.waiting_count -= 1

    def _take_idle(self) -> Connection | None:
        """The one that was used last, so that few are in use; those that the server has closed are
        dropped.
        """
        while self._idle:
            connection = self._idle.pop()
            if not has_gone(connection):
                return connection
            connection.pgconn.finish()
        return None

    async def _make(self) -> Connection:
        """A new one. If the caller gives up meanwhile, it is finished all the same, and becomes idle."""
        making = asyncio.ensure_future(self._connect())
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(self._made_for_nobody)
            raise
        except BaseException:
            self._places.release()
            raise

    def _made_for_nobody(self, making: asyncio.Future[Connection]) -> None:
        if not making.cancelled() and making.exception() is None:
            if self._closed:
                making.result().pgconn.finish()
            else:
                self._idle.append(making.result())
        self._places.release()

    async def _give_back(self, connection: Connection) -> None:
        try:
            status = connection.pgconn.transaction_status
            if self._closed or connection.closed or status != psycopg.pq.TransactionStatus.IDLE:
                # A statement that was cut off may still run in it: nobody else should get its answer.
                connection.pgconn.finish()
            else:
                self._idle.append(connection)
        finally:
            self._places.release()


def has_gone(connection: Connection) -> bool:
    """Whether the server has said something while the connection was idle; the server is asked nothing.

    That is its farewell, nearly always: the first statement would find it otherwise, and be lost. (libpq
    reads the farewell's text first and notices the end only later, so its status says nothing yet.)
    """
    if connection.closed:
        return True
    poll = select.poll()
    poll.register(connection.pgconn.socket, select.POLLIN | select.POLLHUP | select.POLLERR)
    return bool(poll.poll(0))
