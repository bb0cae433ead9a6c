"""What the executor does that no stream is needed to see."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Any

import pytest

from tickwheel.v1 import worker_service_pb2 as pb
from tickwheel.worker import executor as module
from tickwheel.worker.attempt import SUCCEEDED, Attempt, Failed, Outcome, Progress, Released
from tickwheel.worker.codec import copy_grant
from tickwheel.worker.context import Context
from tickwheel.worker.executor import Executor
from tickwheel.worker.handlers import Handlers, outcome_of_error, outcome_of_result


class Harness:
    """An executor whose outcomes are collected."""

    def __init__(self, capacity: int, **functions: Callable[[Any], Any]) -> None:
        handlers = Handlers()
        for kind, function in functions.items():
            handlers.add(kind, function)
        self.finished: dict[Attempt, Outcome] = {}
        self.batches: list[int] = []
        self.progress: list[Progress] = []
        self.executor = Executor(
            handlers,
            capacity=capacity,
            report=self._report,
            on_progress=lambda attempt, progress: self.progress.append(progress),
        )

    def _report(self, finished: list[tuple[Attempt, Outcome]]) -> None:
        self.batches.append(len(finished))
        assert not self.finished.keys() & {attempt for attempt, _ in finished}
        self.finished.update(finished)

    async def until_finished(self, count: int) -> None:
        async with asyncio.timeout(10):
            while len(self.finished) < count:  # noqa: ASYNC110 - a deadline stands around it
                await asyncio.sleep(0.001)


def attempt(kind: str, data: bytes = b"") -> Attempt:
    grant = pb.Grant(run=f"tenants/t/runs/{secrets.token_hex(16)}", kind=kind, attempt=1)
    grant.payload.data = data
    return Attempt(grant, grant.run, 1, 1, secrets.token_hex(16), 0, 1, 10, 10, None)


async def test_outcomes_of_a_burst_are_handed_over_in_few_batches() -> None:
    async def noop(ctx: Context) -> None:
        pass

    harness = Harness(5000, noop=noop)
    attempts = [attempt("noop") for _ in range(2000)]
    harness.executor._begin(attempts)
    await harness.until_finished(2000)
    assert set(harness.finished.values()) == {SUCCEEDED}
    assert len(harness.batches) <= 2000 // module.OUTCOMES_BATCH_MAX + 1
    assert harness.executor.running_count == 0


async def test_what_finds_no_place_is_handed_back_and_not_renewed_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "OVERFLOW_S", 0.02)
    stop = asyncio.Event()

    async def long(ctx: Context) -> None:
        await stop.wait()

    harness = Harness(2, long=long)
    attempts = [attempt("long") for _ in range(4)]
    harness.executor._begin(attempts)
    await harness.until_finished(2)
    assert set(harness.finished) == set(attempts[2:]), "the ones that came last"
    assert all(isinstance(outcome, Released) for outcome in harness.finished.values())
    stop.set()
    await harness.until_finished(4)


async def test_what_waits_begins_when_a_place_becomes_free() -> None:
    order: list[int] = []

    async def note(ctx: Context) -> None:
        order.append(ctx.payload)
        await asyncio.sleep(0)

    harness = Harness(1, note=note)
    for number in range(5):
        grant = attempt("note", str(number).encode())
        grant.grant.payload.content_type = "application/json"
        harness.executor._begin([grant])
    await harness.until_finished(5)
    assert order == [0, 1, 2, 3, 4]


async def test_an_abandoned_attempt_that_has_not_begun_never_begins() -> None:
    begun: list[str] = []
    stop = asyncio.Event()

    async def long(ctx: Context) -> None:
        begun.append(ctx.run)
        await stop.wait()

    harness = Harness(1, long=long)
    first, second = attempt("long"), attempt("long")
    harness.executor._begin([first, second])
    harness.executor._abandon([(second, "its lease lapsed")])
    stop.set()
    await harness.until_finished(1)
    await harness.executor.wait_idle()
    assert begun == [first.run]
    assert second not in harness.finished


async def test_progress_out_of_range_is_the_handlers_error() -> None:
    async def wrong(ctx: Context) -> None:
        await ctx.progress(101)

    harness = Harness(1, wrong=wrong)
    harness.executor._begin([attempt("wrong")])
    await harness.until_finished(1)
    (outcome,) = harness.finished.values()
    assert isinstance(outcome, Failed)
    assert "0 to 100" in outcome.message
    assert harness.progress == []


def test_a_kind_has_one_handler() -> None:
    handlers = Handlers()
    handlers.add("a", print)
    with pytest.raises(ValueError, match="another kind"):
        handlers.add("a", repr)
    with pytest.raises(ValueError, match="needs a kind"):
        handlers.add("", repr)


class AsyncCallable:
    async def __call__(self, ctx: Context) -> None:
        pass


def test_async_objects_and_partials_are_async_handlers() -> None:
    import functools

    async def function(ctx: Context, extra: int) -> None:
        pass

    handlers = Handlers()
    handlers.add("object", AsyncCallable())
    handlers.add("partial", functools.partial(function, extra=1))
    handlers.add("sync", lambda ctx: None)
    found = {kind: handler.is_async for kind in handlers.kinds() if (handler := handlers.get(kind))}
    assert found == {"object": True, "partial": True, "sync": False}


def test_what_a_failure_keeps_is_bounded() -> None:
    class Silly(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    def deep(depth: int) -> None:
        if depth == 0:
            raise ValueError("x" * 100_000)
        deep(depth - 1)

    try:
        deep(500)
    except ValueError as error:
        outcome = outcome_of_error(error)
    assert isinstance(outcome, Failed)
    assert len(outcome.message) == 4096
    assert len(outcome.stack) <= 16384
    odd = outcome_of_error(Silly())
    assert isinstance(odd, Failed)
    assert odd.type == "Silly"
    assert isinstance(outcome_of_result(float("nan")), Failed | type(SUCCEEDED))


def test_a_copied_grant_is_equal_and_alone() -> None:
    response = pb.WorkResponse()
    for _ in range(3):
        response.grants.add(run="r", kind="k").payload.data = b"d"
    copy = copy_grant(response.grants[1])
    assert copy == response.grants[1]
    assert copy is not response.grants[1]
