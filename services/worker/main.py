"""How does the worker process start? Settings, handlers, then the SDK's worker until a signal comes."""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib
import sys
from collections.abc import Sequence

from tickwheel.runtime.config import WorkerSettings, load_settings
from tickwheel.services.worker import kinds
from tickwheel.worker import Worker
from tickwheel.worker.stream import fastest_loop_factory

GC_ALLOCATIONS = 20_000
"""More objects than are freed, until the collector looks at the young ones."""


class HandlersModuleInvalid(Exception):
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


def main(arguments: Sequence[str] | None = None) -> None:
    """`python -m tickwheel.services.worker [--module a.b]…`; all else comes from the settings."""
    parser = argparse.ArgumentParser(prog="python -m tickwheel.services.worker", description=__doc__)
    parser.add_argument(
        "--module",
        action="append",
        default=[],
        help="a module with register(worker); may be repeated",
    )
    options = parser.parse_args(arguments)
    settings = load_settings(WorkerSettings)
    try:
        worker = build(settings, options.module)
    except HandlersModuleInvalid as error:
        sys.exit(str(error))
    # What is loaded by now stays for good, and thousands of live attempts are no garbage to be looked for.
    gc.freeze()
    gc.set_threshold(GC_ALLOCATIONS, 20, 50)
    with asyncio.Runner(loop_factory=fastest_loop_factory()) as runner:
        runner.run(worker.serve(handle_signals=True))
