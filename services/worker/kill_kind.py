"""A kind that ends its worker process, for tests of what becomes of the others: `--module` names this module.

It is not a built-in kind, since whoever may create runs could end workers with it.
"""

from __future__ import annotations

import os

from tickwheel.worker import Context, Worker

EXIT_CODE = 137


async def kill(ctx: Context) -> None:
    """Ends the process at once, as `kill -9` would."""
    os._exit(EXIT_CODE)


def register(worker: Worker) -> None:
    worker.handler("kill")(kill)
