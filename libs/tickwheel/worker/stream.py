"""How do the worker's streams live? One thread with an event loop of its own for all of them.

Renewals must not depend on the handlers' loop: a handler that blocks it loses no lease. So everything that
touches a stream happens here, and only batches of attempts and outcomes pass between the threads. What is
said on a stream, and what an answer means, `session` and `holdings` decide; this file moves the messages:

* a timer has one channel for its whole life, and at most one stream at a time;
* a stream has one reader and one writer task. gRPC allows one write at a time, so the writer merges what
  waits into one message;
* no timeout stands around a read or a write, since it would cancel the call: a frozen peer is noticed by the
  silence after our own heartbeats.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
import structlog

from tickwheel.clock import boot_us
from tickwheel.v1 import worker_service_pb2 as pb
from tickwheel.v1 import worker_service_pb2_grpc
from tickwheel.worker.attempt import Attempt, Outcome, Progress
from tickwheel.worker.backoff import Backoff
from tickwheel.worker.channel import ChannelOptions, open_channel
from tickwheel.worker.codec import copy_grant, encode
from tickwheel.worker.discovery import Discovery
from tickwheel.worker.holdings import Holdings
from tickwheel.worker.session import MARGIN_DEFAULT_US, Effects, Identity, ProtocolError, Session

TICK_S = 0.05
STABLE_US = 5_000_000
"""A stream that lived so long, once welcomed, was a stable one."""

DRAINING_S = 1.0
"""A timer that drains is looked at again after so long."""

_logger = structlog.get_logger("tickwheel.worker")


def fastest_loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where it is installed: a task and a wake-up cost two thirds. None: asyncio's own."""
    with contextlib.suppress(ImportError):
        import uvloop

        return uvloop.new_event_loop
    return None


class Work(Protocol):
    """Who runs the attempts. Called from the streams' thread; must not block."""

    def begin(self, attempts: list[Attempt]) -> None: ...
    def cancel(self, cancels: list[tuple[Attempt, str, int]]) -> None: ...
    def lapse(self, lapsed: list[Attempt]) -> None: ...
    def abandon(self, abandoned: list[tuple[Attempt, str]]) -> None: ...


@dataclass(slots=True)
class StreamStats:
    """Counters for metrics; only the streams' thread writes them."""

    streams_open: int = 0
    streams_welcomed: int = 0
    streams_opened: int = 0
    streams_failed: int = 0
    requests: int = 0
    responses: int = 0
    grants: int = 0
    recorded: int = 0
    refused: int = 0
    moved: int = 0
    held: int = 0
    outcomes_dropped: int = 0


@dataclass(slots=True)
class _Link:
    """One timer that the coordinators know, or knew while its stream still lives."""

    timer_id: str
    address: str
    draining: bool
    present: bool
    wake: asyncio.Event
    changed: asyncio.Event
    task: asyncio.Task[None] | None = None
    call: Any = None


class Streams:
    """The thread. `start` it, hand it outcomes, `stop` it.

    coordinators: addresses to find timers at. margin_us: how early attempts are stopped. every_tick: called
    twenty times a second, on the thread.
    """

    def __init__(
        self,
        identity: Identity,
        coordinators: Sequence[str],
        work: Work,
        options: ChannelOptions | None = None,
        *,
        margin_us: int = MARGIN_DEFAULT_US,
        every_tick: Callable[[], None] | None = None,
    ) -> None:
        self.stats = StreamStats()
        self._options = options or ChannelOptions()
        self._work = work
        self._every_tick = every_tick
        self._holdings = Holdings(identity, margin_us)
        self._discovery = Discovery(coordinators, self._options, self._set_timers)
        self._links: dict[str, _Link] = {}
        self._thread = threading.Thread(target=self._main, name="tickwheel-streams", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._is_leaving = False
        self._settled: list[Future[None]] = []
        self._started = threading.Event()
        self.failure: BaseException | None = None

    # From any thread.

    def start(self) -> None:
        self._thread.start()
        self._started.wait()
        if self.failure is not None:
            raise RuntimeError("the streams' thread could not start") from self.failure

    def report(self, finished: list[tuple[Attempt, Outcome]]) -> None:
        """Take outcomes. One hand-over for the batch."""
        self._post(self._report, finished)

    def progress(self, attempt: Attempt, progress: Progress) -> None:
        self._post(self._holdings.progress, attempt, progress)

    def goodbye(self, reason: str) -> None:
        """Tell every timer that no more grants are wanted. Heartbeats and outcomes go on."""
        self._post(self._goodbye, reason)

    def settled(self) -> Future[None]:
        """Done when nothing is held any more: everything is recorded or refused."""
        future: Future[None] = Future()
        self._post(self._settle_later, future)
        return future

    def stop(self) -> None:
        """End every stream and the thread. What is still held is left to its lease."""
        if self._stopping is not None:
            self._post(self._stopping.set)
        self._thread.join()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _post(self, call: Callable[..., object], *args: Any) -> None:
        loop = self._loop
        if loop is None:
            raise RuntimeError("the streams are not started: call start() first")
        # After the end there is nobody to tell.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(call, *args)

    # The thread.

    def _main(self) -> None:
        try:
            with asyncio.Runner(loop_factory=fastest_loop_factory()) as runner:
                runner.run(self._run())
        except BaseException as error:
            self.failure = error
            _logger.exception("streams_thread_died")
        finally:
            self._started.set()

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                own = [tasks.create_task(self._discovery.run()), tasks.create_task(self._tick())]
                self._started.set()
                await self._stopping.wait()
                for task in own:
                    task.cancel()
                for link in list(self._links.values()):
                    if link.task is not None:
                        link.task.cancel()
        finally:
            for future in self._settled:
                future.cancel()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now_us = boot_us()
            self._apply(self._holdings.tick(now_us))
            for key in self._holdings.dead(now_us):
                _logger.warning("timer_silent", timer=key)
                link = self._links[key]
                if link.call is not None:
                    link.call.cancel()
            self._wake(now_us)
            self.stats.streams_welcomed = self._holdings.welcomed_count
            if self._every_tick is not None:
                self._every_tick()

    def _wake(self, now_us: int) -> None:
        for key, session in self._holdings.sessions.items():
            if session.has_request(now_us):
                self._links[key].wake.set()

    def _apply(self, effects: Effects) -> None:
        if effects.start:
            self.stats.grants += len(effects.start)
            self._work.begin(effects.start)
        if effects.cancel:
            self._work.cancel(effects.cancel)
        if effects.stop:
            self._work.lapse(effects.stop)
        if effects.abandon:
            self._work.abandon(effects.abandon)
        self.stats.held = self._holdings.held_count
        self.stats.recorded += len(effects.forget)
        self.stats.moved += len(effects.moved)
        for attempt, why in effects.refused:
            self.stats.refused += 1
            _logger.warning("outcome_refused", run=attempt.run, attempt=attempt.attempt, why=why)
        for attempt in effects.detach:
            attempt.grant = copy_grant(attempt.grant)
        if self._settled and (effects.forget or effects.refused or effects.abandon):
            self._notice_settled()

    def _report(self, finished: list[tuple[Attempt, Outcome]]) -> None:
        """Hot: once a batch."""
        self.stats.outcomes_dropped += self._holdings.finish_all(finished)
        self._wake(boot_us())

    def _goodbye(self, reason: str) -> None:
        self._is_leaving = True
        self._holdings.goodbye(reason)
        self._wake(boot_us())

    def _settle_later(self, future: Future[None]) -> None:
        self._settled.append(future)
        self._notice_settled()

    def _notice_settled(self) -> None:
        if self._holdings.held_count == 0:
            settled, self._settled = self._settled, []
            for future in settled:
                if future.set_running_or_notify_cancel():
                    future.set_result(None)

    # Timers.

    def _set_timers(self, timers: Mapping[str, tuple[str, bool]]) -> None:
        for timer_id, (address, draining) in timers.items():
            link = self._links.get(timer_id)
            if link is None:
                link = _Link(timer_id, address, draining, True, asyncio.Event(), asyncio.Event())
                self._links[timer_id] = link
                assert self._tasks is not None
                link.task = self._tasks.create_task(self._live(link))
            link.present = True
            link.draining = draining
            link.changed.set()
        for timer_id, link in self._links.items():
            if timer_id not in timers:
                link.present = False
                link.changed.set()
        self._holdings.set_present(timers)

    async def _live(self, link: _Link) -> None:
        """One stream after another with one timer, until the coordinators do not know it any more."""
        channel = open_channel(link.address, self._options)
        stub = worker_service_pb2_grpc.WorkerServiceStub(channel)
        backoff = Backoff()
        try:
            while link.present:
                if link.draining and not self._holdings.homeless_count:
                    # It would say Drain at once, and nothing that we hold can be its own.
                    await self._wait_changed(link, DRAINING_S)
                    continue
                stable = await self._stream(link, stub)
                if stable:
                    backoff.reset()
                await self._wait_changed(link, backoff.next_delay_s())
        finally:
            del self._links[link.timer_id]
            await channel.close(None)

    async def _wait_changed(self, link: _Link, delay_s: float) -> None:
        """Until the delay is over, or the timer has vanished."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                while link.present:
                    link.changed.clear()
                    await link.changed.wait()

    async def _stream(self, link: _Link, stub: Any) -> bool:
        """One stream from Hello to its end. True if it was a stable one."""
        session = self._holdings.open(link.timer_id, boot_us())
        self.stats.streams_open += 1
        self.stats.streams_opened += 1
        call = stub.Work(metadata=self._options.metadata)
        link.call = call
        writer = asyncio.ensure_future(self._write(link, call, session))
        welcomed_us: int | None = None
        try:
            while True:
                response = await call.read()
                if not isinstance(response, pb.WorkResponse):
                    break
                now_us = boot_us()
                self.stats.responses += 1
                effects = self._holdings.receive(link.timer_id, response, now_us)
                self._apply(effects)
                if welcomed_us is None and session.is_welcomed:
                    welcomed_us = now_us
                    _logger.info("stream_welcomed", timer=link.timer_id, address=link.address)
                    if session.timer_id and session.timer_id != link.timer_id:
                        # Another process has the address now; the coordinators will name it.
                        _logger.warning("timer_is_another", expected=link.timer_id, found=session.timer_id)
                        link.present = False
                        break
                if effects.close:
                    _logger.info("stream_closed", timer=link.timer_id, why=effects.close)
                    break
                if session.has_request(now_us):
                    link.wake.set()
        except grpc.aio.AioRpcError as error:
            self.stats.streams_failed += 1
            _logger.info("stream_broke", timer=link.timer_id, code=error.code().name, details=error.details())
        except ProtocolError as error:
            self.stats.streams_failed += 1
            _logger.error("stream_illegal", timer=link.timer_id, state=error.state.value, what=error.what)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # The tick ended a silent call, not us.
            self.stats.streams_failed += 1
        finally:
            link.call = None
            self.stats.streams_open -= 1
            self._holdings.lost(link.timer_id, boot_us())
            writer.cancel()
            call.cancel()
            with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
                await writer
        return welcomed_us is not None and boot_us() - welcomed_us >= STABLE_US

    async def _write(self, link: _Link, call: Any, session: Session) -> None:
        """The one writer of a stream: what waits becomes one message."""
        try:
            while True:
                request = session.take_request(boot_us())
                if request is None:
                    link.wake.clear()
                    await link.wake.wait()
                    continue
                self.stats.requests += 1
                await call.write(encode(request))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError):
            # The reader says why the stream broke.
            return
        except asyncio.CancelledError:
            raise
        except Exception:
            _logger.exception("stream_writer_failed", timer=link.timer_id)
            call.cancel()
