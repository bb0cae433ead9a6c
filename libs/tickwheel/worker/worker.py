"""What does a worker process do from its start to its end?

start    streams' thread, executor on the running loop
work     until `stop` is called, or a signal comes
drain    goodbye to the timers; heartbeats go on; what runs is finished within the grace
release  what did not finish is stopped and handed back; a second signal comes straight here
close    when the timers have recorded everything, or the time for that is over
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import grpc
import structlog

from tickwheel.clock import boot_us
from tickwheel.worker.channel import ChannelOptions
from tickwheel.worker.executor import Executor, ExecutorStats
from tickwheel.worker.handlers import Handlers
from tickwheel.worker.session import MARGIN_DEFAULT_US, Identity
from tickwheel.worker.stream import Streams, StreamStats

CAPACITY_MAX = 20_000
"""All that is held must fit into one message, by name."""

LAG_US_MAX = 1_000_000
"""A handlers' loop that does not answer for so long is reported."""

_WATCH_INTERVAL_S = 0.5
_CONNECTED_POLL_S = 0.02
_PING_INTERVAL_US = 200_000

STOP_S = 2.0
"""How long handlers that were told to stop may take, after the grace."""

RECORD_S = 10.0
"""How long the timers may take to record the last outcomes."""

_logger = structlog.get_logger("tickwheel.worker")

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Worker:
    """Takes runs from a cluster and calls handlers with them.

    coordinators: addresses, host:port; any one that answers will do.
    queues, tenants: the last parts of their names; no tenants means all.
    kinds: what to ask for; None: the kinds that have handlers.
    capacity: how many runs at a time.
    lease_margin_s: how early an attempt is stopped before its lease can be given away.
    drain_grace_s: how long running handlers may go on after the worker was told to stop.
    """

    def __init__(
        self,
        coordinators: Sequence[str] | str,
        *,
        pool: str = "default",
        queues: Sequence[str] = ("default",),
        tenants: Sequence[str] = (),
        kinds: Sequence[str] | None = None,
        capacity: int = 100,
        threads_max: int = 64,
        drain_grace_s: float = 30.0,
        lease_margin_s: float = MARGIN_DEFAULT_US / 1_000_000,
        credentials: grpc.ChannelCredentials | None = None,
        metadata: Sequence[tuple[str, str]] = (),
        worker_id: str | None = None,
    ) -> None:
        if not 1 <= capacity <= CAPACITY_MAX:
            raise ValueError(f"capacity is {capacity}: give 1 to {CAPACITY_MAX}")
        if drain_grace_s < 0:
            raise ValueError(f"drain_grace_s is {drain_grace_s}: give 0 or more")
        self._coordinators = [coordinators] if isinstance(coordinators, str) else list(coordinators)
        if not self._coordinators:
            raise ValueError("no coordinator: give at least one address, such as 127.0.0.1:7600")
        self.handlers = Handlers()
        self.worker_id = worker_id or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self.capacity = capacity
        self._pool = pool
        self._queues = tuple(queues)
        self._tenants = tuple(tenants)
        self._kinds = None if kinds is None else tuple(kinds)
        self._threads_max = threads_max
        self._drain_grace_s = drain_grace_s
        self._margin_us = round(lease_margin_s * 1_000_000)
        self._options = ChannelOptions(credentials, tuple(metadata))
        self._streams: Streams | None = None
        self._executor: Executor | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop_count = 0
        self._stop_changed = asyncio.Event()
        self._lag = _LoopLag()

    def handler(self, kind: str) -> Callable[[_Function], _Function]:
        """Register a function, async or sync, for a kind. A sync one runs in a thread."""

        def register(function: _Function) -> _Function:
            self.handlers.add(kind, function)
            return function

        return register

    @property
    def stream_stats(self) -> StreamStats:
        return self._streams.stats if self._streams is not None else StreamStats()

    @property
    def executor_stats(self) -> ExecutorStats:
        stats = self._executor.stats if self._executor is not None else ExecutorStats()
        stats.loop_lag_s = self._lag.lag_us / 1_000_000
        return stats

    @property
    def running_count(self) -> int:
        return self._executor.running_count if self._executor is not None else 0

    def problem(self) -> str | None:
        """What keeps it from working, in a sentence; None: nothing does. From any thread."""
        streams = self._streams
        if streams is None:
            return "it has not started"
        if not streams.is_alive:
            return f"its streams' thread has ended: {streams.failure!r}"
        if self._lag.lag_us > LAG_US_MAX:
            return f"the handlers' event loop has not answered for {self._lag.lag_us // 1000} ms"
        # Without a timer it has nothing to do, but a restart would not help, and would end what runs.
        return None

    async def wait_connected(self) -> None:
        """Until a timer knows it."""
        while not self.stream_stats.streams_welcomed:  # noqa: ASYNC110 - another thread counts them
            await asyncio.sleep(_CONNECTED_POLL_S)

    def run(self) -> None:
        """Serve until SIGTERM or SIGINT, in an event loop of its own. Returns when everything is drained."""
        asyncio.run(self.serve(handle_signals=True))

    def stop(self) -> None:
        """Drain; called once more: hand back at once. From any thread, or a signal handler."""
        loop = self._loop
        if loop is not None:
            loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        self._stop_count += 1
        self._stop_changed.set()

    async def serve(self, *, handle_signals: bool = False) -> None:
        """Serve in the running event loop until `stop` is called. Handlers run in this loop."""
        self.start()
        loop = asyncio.get_running_loop()
        signals = (signal.SIGTERM, signal.SIGINT) if handle_signals else ()
        for number in signals:
            loop.add_signal_handler(number, self._stop)
        watching = asyncio.ensure_future(self.watch())
        stopping = asyncio.ensure_future(self._stopped(1))
        try:
            await asyncio.wait({watching, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                watching.result()
            self.stop_taking()
            await self._unless_hurried(self.wait_idle(), self._drain_grace_s, 2)
            await self._unless_hurried(self.hand_back(), RECORD_S, 3)
        finally:
            watching.cancel()
            stopping.cancel()
            for number in signals:
                loop.remove_signal_handler(number)
            await self.close()

    async def _unless_hurried(self, work: Coroutine[Any, Any, None], seconds: float, stop_count: int) -> None:
        """Until it is done, the time is over, or `stop` was called so often."""
        doing = asyncio.ensure_future(work)
        hurried = asyncio.ensure_future(self._stopped(stop_count))
        try:
            await asyncio.wait({doing, hurried}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            doing.cancel()
            hurried.cancel()
        if doing.done() and not doing.cancelled():
            doing.result()

    async def _stopped(self, count: int) -> None:
        while self._stop_count < count:
            self._stop_changed.clear()
            await self._stop_changed.wait()

    # The steps of a life, for a process that has an order of its own for them.

    def start(self) -> None:
        """Connect, and run handlers in the running event loop from now on. Once in a worker's life."""
        if self._streams is not None:
            raise RuntimeError("this worker has served already: make another one")
        self._loop = asyncio.get_running_loop()
        self._lag.watch(self._loop)
        identity = Identity(
            worker_id=self.worker_id,
            pool=self._pool,
            host=socket.gethostname(),
            queues=self._queues,
            tenants=self._tenants,
            kinds=self.handlers.kinds() if self._kinds is None else self._kinds,
            capacity=self.capacity,
        )
        executor = self._executor = Executor(
            self.handlers,
            capacity=self.capacity,
            report=lambda finished: streams.report(finished),
            on_progress=lambda attempt, progress: streams.progress(attempt, progress),
            threads_max=self._threads_max,
        )
        streams = self._streams = Streams(
            identity,
            self._coordinators,
            executor,
            self._options,
            margin_us=self._margin_us,
            every_tick=self._lag.tick,
        )
        streams.start()
        _logger.info("worker_started", worker=self.worker_id, kinds=identity.kinds, capacity=self.capacity)

    def stop_taking(self) -> None:
        """Ask for no more, and hand back what has not begun. What runs goes on, and so do its renewals."""
        if self._streams is None or self._executor is None:
            return
        _logger.info("worker_draining", running=self._executor.running_count)
        self._streams.goodbye("the worker stops")
        self._executor.stop_taking()

    async def watch(self) -> None:
        """Until the streams' thread dies of a fault, which it raises: without it nothing is renewed."""
        streams = self._streams
        assert streams is not None, "start() comes first"
        while streams.is_alive:  # noqa: ASYNC110 - it is a thread's end that is waited for
            await asyncio.sleep(_WATCH_INTERVAL_S)
        raise RuntimeError("the streams' thread has ended") from streams.failure

    async def wait_idle(self) -> None:
        """Until no handler runs and the timers have recorded everything."""
        if self._streams is not None and self._executor is not None:
            await self._executor.wait_idle()
            await asyncio.wrap_future(self._streams.settled())

    async def hand_back(self) -> None:
        """Stop the handlers that still run, hand their runs back, and wait until that is recorded."""
        if self._streams is not None and self._executor is not None:
            await self._executor.hand_back(STOP_S)
            if self._executor.running_count == 0:
                await asyncio.wrap_future(self._streams.settled())

    async def close(self) -> None:
        """End the streams. What is still held is left to its lease."""
        if self._streams is None or self._executor is None:
            return
        self._executor.close()
        if self._streams.stats.held:
            _logger.warning("worker_left_unrecorded", held=self._streams.stats.held)
        await asyncio.to_thread(self._streams.stop)
        _logger.info("worker_stopped", worker=self.worker_id)


class _LoopLag:
    """Notices when the handlers' loop does not answer. Ticked from the streams' thread."""

    def __init__(self) -> None:
        self.lag_us = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread_id = 0
        self._asked_us: int | None = None
        self._next_us = 0
        self._is_reported = False

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Call this on the loop."""
        self._loop = loop
        self._thread_id = threading.get_ident()

    def tick(self) -> None:
        now_us = boot_us()
        if self._asked_us is None:
            if now_us >= self._next_us and self._loop is not None and not self._loop.is_closed():
                self._asked_us = now_us
                self._loop.call_soon_threadsafe(self._answer)
            return
        self.lag_us = now_us - self._asked_us
        if self.lag_us > LAG_US_MAX and not self._is_reported:
            self._is_reported = True
            _logger.warning(
                "handlers_loop_blocked", lag_ms=self.lag_us // 1000, where=_where(self._thread_id)
            )

    def _answer(self) -> None:
        now_us = boot_us()
        if self._asked_us is not None:
            self.lag_us = now_us - self._asked_us
        if self._is_reported:
            _logger.warning("handlers_loop_freed", lag_ms=self.lag_us // 1000)
        self._is_reported = False
        self._next_us = now_us + _PING_INTERVAL_US
        self._asked_us = None


def _where(thread_id: int) -> list[str]:
    """What the thread executes now: the innermost frames, outermost first."""
    frame = sys._current_frames().get(thread_id)
    if frame is None:
        return []
    return [f"{entry.filename}:{entry.lineno} {entry.name}" for entry in traceback.extract_stack(frame)[-4:]]
