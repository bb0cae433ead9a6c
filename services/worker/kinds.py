"""Which kinds does every worker process handle, so that a newcomer has something to run?"""

from __future__ import annotations

import asyncio
from typing import Any

from tickwheel.worker import Abort, Context, Worker

SLEEP_STEP_S = 1.0
SLEEP_S_MAX = 86_400.0


async def noop(ctx: Context) -> None:
    """Does nothing."""


async def echo(ctx: Context) -> Any:
    """Gives its payload back."""
    return ctx.payload


async def sleep(ctx: Context) -> None:
    """Takes `{"seconds": 0.1}`, and says how far it is."""
    seconds = _number(ctx, "seconds", 1.0)
    if not 0 <= seconds <= SLEEP_S_MAX:
        raise Abort(f"seconds is {seconds}: give 0 to {SLEEP_S_MAX}", type="InvalidPayload")
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    while (left_s := began_s + seconds - loop.time()) > 0:
        if seconds > SLEEP_STEP_S:
            ctx.report_progress(100 * (1 - left_s / seconds), f"{left_s:.1f} s are left")
        await asyncio.sleep(min(left_s, SLEEP_STEP_S))


async def fail(ctx: Context) -> dict[str, int]:
    """Fails: always, or with `{"times": n}` in its first n attempts. `{"message": …}` is what it says."""
    payload = ctx.payload if isinstance(ctx.payload, dict) else {}
    times = payload.get("times")
    if times is not None and ctx.attempt > _number(ctx, "times", 0):
        return {"attempt": ctx.attempt}
    raise RuntimeError(str(payload.get("message", f"attempt {ctx.attempt} fails, as it was asked to")))


def _number(ctx: Context, field: str, default: float) -> float:
    payload = ctx.payload
    value = payload.get(field, default) if isinstance(payload, dict) else default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Abort(f"{field} is {value!r}: give a number", type="InvalidPayload")
    return float(value)


def register(worker: Worker) -> None:
    """The built-in kinds."""
    for function in (noop, echo, sleep, fail):
        worker.handler(function.__name__)(function)
