"""The life of a process: its loop, its end, and its pulse.

    async def serve(process: Process) -> None:
        pool = await open_pool()
        process.on_stop(Phase.CLOSE, "pool", pool.close)
        process.on_stop(Phase.DRAIN, "streams", node.drain)
        process.spawn(node.run(), "node")       # and returns: from now on it is ready

    sys.exit(run_process(load_settings(TimerSettings), serve))

It ends when SIGTERM or SIGINT arrives, or when something that was spawned fails. Then, always in this order:

    STOP_TAKING   nothing new is accepted                          at most `exit_timeout_ms`
    DRAIN         what runs comes to its end                       at most `drain_timeout_ms`
    RELEASE       leases, shards, leadership are handed back       at most `exit_timeout_ms`
    CLOSE         connections and files                            at most `exit_timeout_ms`

Within a phase the steps go in the reverse order of their registration; a step that fails or is too slow is
logged, and the next one follows. A second signal ends the draining at once; a third ends the process.
Telemetry is shut down last and gets no more than a second: a collector that is away keeps neither leases nor
the process.

Exit codes: 0 asked to end; 1 something failed; 2 it could not start with these settings, ports or folders;
128 + the signal's number when a third signal cut it off; 70 it did not end within all its times (a thread
that blocks).
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import faulthandler
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import structlog

import tickwheel
from tickwheel.errors import TickwheelError
from tickwheel.runtime.config import CommonSettings
from tickwheel.runtime.logging import configure_logging
from tickwheel.runtime.telemetry import Health, Metrics, MetricsServer, Tracing

log = structlog.get_logger()

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_CANNOT_START = 2
EXIT_STUCK = 70

TRACES_SHUTDOWN_MS = 1_000
GC_ALLOCATIONS = 20_000
"""More objects than are freed, until the collector looks at the young ones."""
LOOP_BEAT_MS = 50
LOOP_WARNING_INTERVAL_MS = 10_000

Step = Callable[[], Awaitable[object]]
Serve = Callable[["Process"], Awaitable[None]]


def collect_less_garbage() -> None:
    """For processes on the hot path, once they are set up: what is loaded by now stays for good, and
    thousands of live attempts are no garbage to be looked for again and again.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_ALLOCATIONS, 20, 50)


class Phase(enum.IntEnum):
    """In the order in which they happen."""

    STOP_TAKING = 1
    DRAIN = 2
    RELEASE = 3
    CLOSE = 4


class Process:
    """What `serve` gets: where to register the steps of the end, and to spawn what runs until then."""

    def __init__(
        self, settings: CommonSettings, metrics: Metrics, health: Health, tracing: Tracing | None = None
    ) -> None:
        self.settings = settings
        self.metrics = metrics
        self.health = health
        self.tracing = tracing
        self.metrics_port: int | None = None
        """Where `/metrics` and `/healthz` are served; None when they are not."""
        self._steps: dict[Phase, list[tuple[str, Step]]] = {phase: [] for phase in Phase}
        self._tasks: set[asyncio.Task[object]] = set()
        self._stopping = asyncio.Event()
        self._hurrying = asyncio.Event()
        self._ready = False
        self._exit_code = EXIT_OK
        health.add("start", lambda: None if self._ready else "still starting")

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    def ready(self) -> None:
        """It serves. Said by `serve` when it goes on; a `serve` that returns says it by that."""
        if not self._ready:
            self._ready = True
            log.info("ready")

    def on_stop(self, phase: Phase, name: str, step: Step) -> None:
        self._steps[phase].append((name, step))

    def spawn(self, work: Coroutine[Any, Any, object], name: str) -> asyncio.Task[object]:
        """Runs it until the end; its failure ends the process with code 1. It is cancelled before CLOSE."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def stop(self) -> None:
        """As SIGTERM does; a second call hurries."""
        if self._stopping.is_set():
            self._hurrying.set()
        self._stopping.set()

    async def wait_stopping(self) -> None:
        await self._stopping.wait()

    def _task_ended(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._fail(task.get_name(), error)

    def _fail(self, name: str, error: BaseException) -> None:
        if isinstance(error, TickwheelError) and not self._ready:
            # The sentence says what to do; where in our code it was noticed helps nobody.
            log.error("cannot_start", reason=str(error))
            self._exit_code = EXIT_CANNOT_START
        else:
            log.error("part_failed", part=name, exc_info=error)
            self._exit_code = EXIT_FAILED
        self._hurrying.set()
        self._stopping.set()

    async def _run(self, serve: Serve) -> int:
        serving = self.spawn(_serve_until_ready(self, serve), "serve")
        await self._stopping.wait()
        log.info("stopping", hurried=self._hurrying.is_set())
        exit_seconds = self.settings.exit_timeout_ms / 1_000
        if not self._ready:
            serving.cancel()
        await self._end(Phase.STOP_TAKING, exit_seconds)
        await self._drain()
        await self._end(Phase.RELEASE, exit_seconds)
        await self._cancel_tasks(exit_seconds)
        await self._end(Phase.CLOSE, exit_seconds)
        return self._exit_code

    async def _drain(self) -> None:
        draining = asyncio.create_task(self._end(Phase.DRAIN, self.settings.drain_timeout_ms / 1_000))
        hurrying = asyncio.create_task(self._hurrying.wait())
        try:
            await asyncio.wait((draining, hurrying), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (draining, hurrying):
                task.cancel()
            await asyncio.wait((draining, hurrying), timeout=self.settings.exit_timeout_ms / 1_000)

    async def _end(self, phase: Phase, timeout_seconds: float) -> None:
        started = time.monotonic()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_seconds
        for name, step in reversed(self._steps[phase]):
            task = asyncio.ensure_future(_as_coroutine(step()))
            try:
                # Not `asyncio.timeout`: a step that swallows its cancellation must not hold up the rest.
                _, late = await asyncio.wait((task,), timeout=max(0.0, deadline - loop.time()))
            except asyncio.CancelledError:
                task.cancel()
                raise
            if late:
                task.cancel()
                log.warning("stop_step_late", phase=phase.name, step=name, timeout_seconds=timeout_seconds)
            elif not task.cancelled() and (error := task.exception()) is not None:
                log.error("stop_step_failed", phase=phase.name, step=name, exc_info=error)
        log.debug("stop_phase_over", phase=phase.name, took_ms=int((time.monotonic() - started) * 1_000))

    async def _cancel_tasks(self, timeout_seconds: float) -> None:
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=timeout_seconds)
            for task in late:
                log.warning("task_did_not_end", task=task.get_name())


class LoopPulse:
    """Measures how late the event loop is, and tells a health check in another thread if it moves at all."""

    def __init__(self, metrics: Metrics, warning_ms: int, stuck_ms: int) -> None:
        self._lag = metrics.histogram("tickwheel_loop_lag_seconds", "How late the event loop woke up.")
        self._warning_ms = warning_ms
        self._stuck_ms = stuck_ms
        self._beat_seconds = time.monotonic()
        self._warned_seconds = -float("inf")

    def problem(self) -> str | None:
        """Thread-safe. None while the loop moves."""
        silent_ms = int((time.monotonic() - self._beat_seconds) * 1_000)
        if silent_ms <= self._stuck_ms + LOOP_BEAT_MS:
            return None
        return f"the event loop has not moved for {silent_ms} ms ({self._stuck_ms} are allowed)"

    async def run(self) -> None:
        while True:
            asleep = time.monotonic()
            await asyncio.sleep(LOOP_BEAT_MS / 1_000)
            self._beat_seconds = time.monotonic()
            lag_seconds = max(0.0, self._beat_seconds - asleep - LOOP_BEAT_MS / 1_000)
            self._lag.observe(lag_seconds)
            since_warning_ms = (self._beat_seconds - self._warned_seconds) * 1_000
            if lag_seconds * 1_000 > self._warning_ms and since_warning_ms > LOOP_WARNING_INTERVAL_MS:
                self._warned_seconds = self._beat_seconds
                log.warning("loop_late", lag_ms=int(lag_seconds * 1_000))


def run_process(settings: CommonSettings, serve: Serve) -> int:
    """Runs `serve` to its end, as this module says; gives the exit code.

    Once a process, in the main thread.
    """
    name = settings.section
    configure_logging(settings.log_level, settings.log_format, process=name, node_name=settings.node_name)
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1)  # Shows where every thread stands.
    metrics, health = Metrics(), Health()
    server: MetricsServer | None = None
    tracing = Tracing(
        settings.otlp_endpoint,
        settings.trace_sample_ratio,
        process=name,
        node_name=settings.node_name,
        version=tickwheel.__version__,
    )
    pulse = LoopPulse(metrics, settings.loop_lag_warning_ms, settings.loop_lag_stuck_ms)
    health.add("loop", pulse.problem)
    # Until there is a Process that knows better: `/healthz` answers from here on.
    health.add("start", lambda: "still starting")
    code = EXIT_FAILED
    try:
        if settings.metrics_port is not None:
            server = MetricsServer(metrics, health, settings.metrics_host, settings.metrics_port)
            log.info("metrics_served", host=settings.metrics_host, port=server.port)
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            code = runner.run(_main(settings, serve, metrics, health, tracing, pulse, server))
            _cut_off_after(settings.exit_timeout_ms, code)
    except TickwheelError as error:
        log.error("cannot_start", reason=str(error))
        code = EXIT_CANNOT_START
    finally:
        _cut_off_after(settings.exit_timeout_ms, code)
        tracing.shutdown(TRACES_SHUTDOWN_MS)
        if server is not None:
            server.close()
    log.info("stopped", exit_code=code)
    return code


async def _main(
    settings: CommonSettings,
    serve: Serve,
    metrics: Metrics,
    health: Health,
    tracing: Tracing,
    pulse: LoopPulse,
    server: MetricsServer | None,
) -> int:
    process = Process(settings, metrics, health, tracing)
    process.metrics_port = server.port if server is not None else None
    loop = asyncio.get_running_loop()
    signal_count = 0

    def on_signal(number: signal.Signals) -> None:
        nonlocal signal_count
        signal_count += 1
        log.info("signal", signal=number.name, count=signal_count)
        if signal_count > 2:
            os._exit(128 + number)
        if signal_count == 1:
            phases_ms = settings.drain_timeout_ms + len(Phase) * settings.exit_timeout_ms
            _cut_off_after(phases_ms + settings.exit_timeout_ms, EXIT_STUCK)
        process.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    beating = asyncio.create_task(pulse.run(), name="loop-pulse")
    try:
        return await process._run(serve)
    finally:
        beating.cancel()


def _cut_off_after(timeout_ms: int, code: int) -> None:
    """The process ends by then, whatever thread or loop still blocks it."""

    def cut_off() -> None:
        time.sleep(timeout_ms / 1_000)
        with contextlib.suppress(Exception):
            sys.stderr.flush()
            sys.stdout.flush()
        os._exit(code or EXIT_STUCK)

    threading.Thread(target=cut_off, name="cut-off", daemon=True).start()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # There is none for Windows.
        return None
    return uvloop.new_event_loop


async def _serve_until_ready(process: Process, serve: Serve) -> None:
    await serve(process)
    process.ready()


async def _as_coroutine(work: Awaitable[Any]) -> object:
    return await work
