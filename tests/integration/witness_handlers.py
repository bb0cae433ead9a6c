"""A handler that leaves a line for each attempt that it runs, where no database can lose it.

Used as `--module tests.integration.witness_handlers`. The file is the one that WITNESS_FILE names.
"""

from __future__ import annotations

import asyncio
import os

from tickwheel.worker import Context, Worker

FILE_VARIABLE = "WITNESS_FILE"


async def witness(ctx: Context) -> None:
    """One line, whole: O_APPEND and one write. `fence` is what it was given to pass on."""
    line = f"{ctx.run} {ctx.attempt} {ctx.fence}\n".encode()
    file = os.open(os.environ[FILE_VARIABLE], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, line)
    finally:
        os.close(file)
    await asyncio.sleep(0)


def register(worker: Worker) -> None:
    worker.handler(witness.__name__)(witness)
