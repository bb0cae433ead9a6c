"""How do attempts become calls of handlers, and their ends outcomes? On the handlers' event loop.

Attempts come in batches from the streams' thread and outcomes go back in batches: one hand-over between the
threads for each, because a hand-over costs as much as several runs. At most `capacity` handlers run at a
time; what a timer granted beyond that (its credit had been lowered too late) waits here a moment, in order.

Who may stop a handler, and what its outcome then is:

    abandon   its lease was given away               whatever it gives is dropped
    lapse     nobody renewed its lease in time       Failed, as LeaseLapsed, if it ends because of that
    cancel    the run was cancelled                  Stopped, if it ends because of that
    hand back the worker stops and grace is over     Released, if it ends because of that

An async handler is stopped by cancelling its task. A thread cannot be stopped: its context says so, and its
run is never handed back while it goes on.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import structlog
from opentelemetry import trace
from opentelemetry.context import Context as TraceContext
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tickwheel.domain.lease import LEASE_LAPSED
from tickwheel.worker.attempt import Attempt, Failed, Outcome, Progress, Released, Stopped
from tickwheel.worker.context import Cancelled, Context, SyncContext
from tickwheel.worker.handlers import Handler, Handlers, Release, outcome_of_error, outcome_of_result

OUTCOMES_BATCH_MAX = 512
"""Outcomes are handed over when there are so many, or after `FLUSH_DELAY_S`."""

FLUSH_DELAY_S = 0.002

OVERFLOW_S = 1.0
"""How long a grant beyond the capacity waits for a place."""

THREADS_MAX = 64

_logger = structlog.get_logger("tickwheel.worker")
_tracer = trace.get_tracer("tickwheel.worker")
_propagator = TraceContextTextMapPropagator()


@dataclass(slots=True)
class ExecutorStats:
    """Counters for metrics; only the handlers' loop writes them."""

    started: int = 0
    succeeded: int = 0
    failed: int = 0
    released: int = 0
    cancelled: int = 0
    lapsed: int = 0
    abandoned: int = 0
    loop_lag_s: float = 0.0
    kinds_unknown: int = 0


class Executor:
    """Runs handlers on the event loop that is running when it is made.

    report: takes a batch of (attempt, outcome); called on this loop. on_progress: called from any thread.
    """

    def __init__(
        self,
        handlers: Handlers,
        *,
        capacity: int,
        report: Callable[[list[tuple[Attempt, Outcome]]], None],
        on_progress: Callable[[Attempt, Progress], None],
        threads_max: int = THREADS_MAX,
    ) -> None:
        self.stats = ExecutorStats()
        self._handlers = handlers
        self._capacity = capacity
        self._report = report
        self._on_progress = on_progress
        self._threads_max = max(1, min(threads_max, capacity))
        self._threads: ThreadPoolExecutor | None = None
        self._loop = asyncio.get_running_loop()
        self._running: dict[Attempt, Context | SyncContext] = {}
        # Bounded by the credit that timers were given.
        self._waiting: deque[Attempt] = deque()
        self._finished: list[tuple[Attempt, Outcome]] = []
        self._overflow_handle: asyncio.TimerHandle | None = None
        self._flush_handle: asyncio.TimerHandle | None = None
        self._is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    # From the streams' thread.

    def begin(self, attempts: list[Attempt]) -> None:
        self._loop.call_soon_threadsafe(self._begin, attempts)

    def cancel(self, cancels: list[tuple[Attempt, str, int]]) -> None:
        self._loop.call_soon_threadsafe(self._cancel, cancels)

    def lapse(self, lapsed: list[Attempt]) -> None:
        self._loop.call_soon_threadsafe(self._lapse, lapsed)

    def abandon(self, abandoned: list[tuple[Attempt, str]]) -> None:
        self._loop.call_soon_threadsafe(self._abandon, abandoned)

    # On the loop.

    @property
    def running_count(self) -> int:
        return len(self._running)

    @property
    def waiting_count(self) -> int:
        return len(self._waiting)

    def _begin(self, attempts: Iterable[Attempt]) -> None:
        if self._is_draining:
            for attempt in attempts:
                self._give(attempt, Released("the worker stops"))
            return
        self._waiting.extend(attempts)
        self._launch_waiting()
        if self._waiting and self._overflow_handle is None:
            self._overflow_handle = self._loop.call_later(
                OVERFLOW_S, self._hand_back_overflow, self._waiting[-1]
            )

    def _hand_back_overflow(self, newest: Attempt) -> None:
        """What has waited since then for a place goes back: its lease would be renewed as long as what runs
        here goes on, and another worker may be free."""
        self._overflow_handle = None
        if newest in self._waiting:
            while self._waiting:
                attempt = self._waiting.popleft()
                self._give(attempt, Released("no place became free"))
                if attempt is newest:
                    break
        if self._waiting:
            self._overflow_handle = self._loop.call_later(
                OVERFLOW_S, self._hand_back_overflow, self._waiting[-1]
            )

    def _launch_waiting(self) -> None:
        """Hot: a task a run."""
        waiting = self._waiting
        room = self._capacity - len(self._running)
        while waiting and room > 0:
            attempt = waiting.popleft()
            kind = attempt.grant.kind
            handler = self._handlers.get(kind)
            if handler is None:
                self.stats.kinds_unknown += 1
                known = ", ".join(self._handlers.kinds()) or "none"
                self._give(
                    attempt,
                    Failed("UnknownKind", f"this worker has no handler for {kind!r}; it has: {known}"),
                )
                continue
            room -= 1
            self._launch(attempt, handler)

    def _launch(self, attempt: Attempt, handler: Handler) -> None:
        self.stats.started += 1
        if handler.is_async:
            context = Context(attempt, self._on_progress)
            self._running[attempt] = context
            context._task = self._loop.create_task(self._run_async(attempt, handler, context))
        else:
            sync_context = SyncContext(attempt, self._on_progress)
            self._running[attempt] = sync_context
            sync_context._task = self._loop.create_task(self._run_sync(attempt, handler, sync_context))

    async def _run_async(self, attempt: Attempt, handler: Handler, context: Context) -> None:
        outcome: Outcome
        try:
            if _is_sampled(attempt.grant.traceparent):
                with _span(attempt):
                    result = await handler.function(context)
            else:
                result = await handler.function(context)
            outcome = outcome_of_result(result)
        except asyncio.CancelledError as error:
            outcome = context._stopped_as or outcome_of_error(error)
        except Cancelled as error:
            outcome = context._stopped_as or outcome_of_error(error)
        except Release as release:
            outcome = Released(release.reason, release.not_before_us)
        except (Exception, SystemExit) as error:
            outcome = outcome_of_error(error)
        self._end(attempt, context, outcome)

    async def _run_sync(self, attempt: Attempt, handler: Handler, context: SyncContext) -> None:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._threads_max, thread_name_prefix="tickwheel-handler")
        call = contextvars.copy_context().run
        future = self._loop.run_in_executor(self._threads, call, _call_sync, attempt, handler, context)
        outcome: Outcome
        try:
            # Shielded: the task may be told to stop, but the thread goes on, and so does its slot.
            outcome = await asyncio.shield(future)
        except asyncio.CancelledError:
            future.cancel()
            raise
        if isinstance(outcome, Stopped):
            outcome = context._stopped_as or Failed(
                "Cancelled", "the handler raised Cancelled though nobody asked"
            )
        self._end(attempt, context, outcome)

    def _end(self, attempt: Attempt, context: Context | SyncContext, outcome: Outcome) -> None:
        """Hot: once a run."""
        del self._running[attempt]
        if context._grace is not None:
            context._grace.cancel()
        self._give(attempt, outcome)
        if self._waiting:
            self._launch_waiting()
        elif not self._running:
            self._idle.set()

    def _give(self, attempt: Attempt, outcome: Outcome) -> None:
        finished = self._finished
        finished.append((attempt, outcome))
        if len(finished) >= OUTCOMES_BATCH_MAX:
            self._flush()
        elif self._flush_handle is None:
            self._flush_handle = self._loop.call_later(FLUSH_DELAY_S, self._flush)

    def _flush(self) -> None:
        if self._flush_handle is not None:
            self._flush_handle.cancel()
            self._flush_handle = None
        if self._finished:
            finished, self._finished = self._finished, []
            self._report(finished)

    # Stopping handlers.

    def _cancel(self, cancels: Iterable[tuple[Attempt, str, int]]) -> None:
        for attempt, reason, grace_us in cancels:
            context = self._running.get(attempt)
            if context is None:
                self._drop_waiting(attempt, Stopped())
                continue
            context._stopped_as = Stopped()
            self._stop(context, reason or "the run was cancelled", grace_us / 1_000_000)

    def _lapse(self, lapsed: Iterable[Attempt]) -> None:
        for attempt in lapsed:
            self.stats.lapsed += 1
            _logger.warning("attempt_lapsed", run=attempt.run, attempt=attempt.attempt)
            context = self._running.get(attempt)
            if context is None:
                self._drop_waiting(attempt, Released("its lease lapsed before it began"))
                continue
            context._stopped_as = Failed(
                LEASE_LAPSED, "the worker stopped it: its lease was not renewed in time"
            )
            self._stop(context, "its lease lapsed", 0.0)

    def _abandon(self, abandoned: Iterable[tuple[Attempt, str]]) -> None:
        for attempt, why in abandoned:
            self.stats.abandoned += 1
            _logger.warning("attempt_abandoned", run=attempt.run, attempt=attempt.attempt, why=why)
            context = self._running.get(attempt)
            if context is None:
                self._drop_waiting(attempt, None)
                continue
            context._stopped_as = Released(why)  # The sessions drop it.
            self._stop(context, why, 0.0)

    def _stop(self, context: Context | SyncContext, reason: str, grace_s: float) -> None:
        """Tell the handler. A task that does not watch `cancelled` has no use for the grace."""
        watches = context._stop(reason)
        task = context._task
        if isinstance(context, SyncContext) or task is None:
            return
        if watches and grace_s > 0:
            if context._grace is None:
                context._grace = self._loop.call_later(grace_s, task.cancel)
        else:
            task.cancel()

    def _drop_waiting(self, attempt: Attempt, outcome: Outcome | None) -> None:
        try:
            self._waiting.remove(attempt)
        except ValueError:
            return  # It has ended; its outcome is on its way.
        if outcome is not None:
            self._give(attempt, outcome)

    # Stopping altogether.

    def stop_taking(self) -> None:
        """Start no more: what waits is handed back un-run, what runs goes on."""
        self._is_draining = True
        waiting, self._waiting = self._waiting, deque()
        for attempt in waiting:
            self._give(attempt, Released("the worker stops"))

    async def wait_idle(self) -> None:
        """Until no handler runs."""
        while self._running:
            self._idle.clear()
            await self._idle.wait()
        self._flush()

    async def hand_back(self, stop_s: float) -> None:
        """Stop the handlers that still run and hand their runs back.

        A task that ends within `stop_s` is released. One that does not, and a thread that does not look at
        `cancelled`, are left to their lease: they may not run here and elsewhere at a time.
        """
        for context in list(self._running.values()):
            context._stopped_as = Released("the worker stopped before the work was done")
            self._stop(context, "the worker stops", 0.0)
        try:
            async with asyncio.timeout(stop_s):
                await self.wait_idle()
        except TimeoutError:
            for attempt in self._running:
                _logger.warning("attempt_left_to_its_lease", run=attempt.run, attempt=attempt.attempt)
        self._flush()

    def close(self) -> None:
        """Threads that still run are not waited for."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)


def _call_sync(attempt: Attempt, handler: Handler, context: SyncContext) -> Outcome:
    """In a thread of the pool."""
    if context.stop_reason is not None:
        return Stopped()
    try:
        if _is_sampled(attempt.grant.traceparent):
            with _span(attempt):
                return outcome_of_result(handler.function(context))
        return outcome_of_result(handler.function(context))
    except Cancelled:
        return Stopped()
    except Release as release:
        return Released(release.reason, release.not_before_us)
    except (Exception, SystemExit) as error:
        return outcome_of_error(error)


def _is_sampled(traceparent: str) -> bool:
    """The last field's lowest bit. Asked for every run."""
    return bool(traceparent) and traceparent[-1] in "13579bdf"


def _span(attempt: Attempt) -> Any:
    """The handler's span, child of the fire's. It is entered and left in one task, so that no context is
    detached elsewhere, and its parent is the fire's whatever span is current here."""
    parent = _propagator.extract({"traceparent": attempt.grant.traceparent}, TraceContext())
    return _tracer.start_as_current_span(
        "tickwheel.run",
        context=parent,
        kind=trace.SpanKind.CONSUMER,
        attributes={
            "tickwheel.run": attempt.run,
            "tickwheel.attempt": attempt.attempt,
            "tickwheel.fence": attempt.fence,
            "tickwheel.kind": attempt.grant.kind,
        },
    )
