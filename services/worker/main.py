"""How does the worker process start? Settings, handlers, then the SDK's worker until a signal comes."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from tickwheel.errors import TickwheelError
from tickwheel.runtime.config import ConfigurationInvalid, WorkerSettings, load_settings
from tickwheel.runtime.process import Phase, Process, collect_less_garbage, run_process
from tickwheel.services.worker import kinds
from tickwheel.services.worker.metrics import WorkerCollector
from tickwheel.worker import Worker


class HandlersModuleInvalid(TickwheelError):
    """The module that was named gives no handlers.

    module: its name.
    """

    def __init__(self, module: str, why: str) -> None:
        self.module = module
        super().__init__(f"{module} {why}: give it a function `register(worker)` that adds its handlers")


def build(settings: WorkerSettings, modules: Sequence[str] = ()) -> Worker:
    """The worker that the settings describe, with the built-in kinds and those of the modules."""
    worker = Worker(
        settings.coordinators,
        pool=settings.pool,
        queues=settings.queues,
        tenants=settings.tenants,
        capacity=settings.capacity,
        threads_max=settings.threads,
        drain_grace_s=settings.drain_timeout_ms / 1000,
        lease_margin_s=settings.lease_margin_ms / 1000,
    )
    kinds.register(worker)
    named = list(modules) or [name for name in settings.handlers_module.split(",") if name]
    for name in named:
        _load(worker, name)
    return worker


def _load(worker: Worker, name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
        raise HandlersModuleInvalid(name, "cannot be found") from error
    register = getattr(module, "register", None)
    if not callable(register):
        raise HandlersModuleInvalid(name, "has no `register`")
    register(worker)


async def serve(process: Process, modules: Sequence[str] = ()) -> None:
    """Start the worker, and register its end: goodbye, finish, hand back, close. Ready: a timer knows it."""
    settings = process.settings
    assert isinstance(settings, WorkerSettings)
    worker = build(settings, modules)
    process.metrics.registry.register(WorkerCollector(worker))
    process.health.add("worker", worker.problem)
    process.on_stop(Phase.CLOSE, "streams", worker.close)
    process.on_stop(Phase.RELEASE, "runs", worker.hand_back)
    process.on_stop(Phase.DRAIN, "runs", worker.wait_idle)
    process.on_stop(Phase.STOP_TAKING, "grants", lambda: _stop_taking(worker))
    collect_less_garbage()
    worker.start()
    process.spawn(worker.watch(), "streams")
    await worker.wait_connected()


async def _stop_taking(worker: Worker) -> None:
    worker.stop_taking()


def main(arguments: Sequence[str] | None = None) -> None:
    """`python -m tickwheel.services.worker [--module a.b]…`; all else comes from the settings."""
    parser = argparse.ArgumentParser(
        prog="python -m tickwheel.services.worker", description="Takes runs from a cluster and executes them."
    )
    parser.add_argument(
        "--module", action="append", default=[], help="a module with register(worker); may be repeated"
    )
    options = parser.parse_args(arguments)
    try:
        settings = load_settings(WorkerSettings)
    except ConfigurationInvalid as error:
        sys.exit(str(error))
    sys.exit(run_process(settings, lambda process: serve(process, options.module)))
