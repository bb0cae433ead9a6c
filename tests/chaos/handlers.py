"""The handlers of worker processes under test, which write down what happens to each attempt.

Used as `python -m tickwheel.services.worker --module tests.chaos.handlers`. Each process appends to a file of
its own in the folder that CHAOS_FOLDER names, a line for each sighting, written at once: a `kill -9` loses
nothing that was seen. What the streams' thread learns is taken where the SDK tells the executor and its
counters, so it is what the worker acts on.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

from tests.chaos.history import Event

from tickwheel.worker import Context, SyncContext, Worker
from tickwheel.worker.attempt import Attempt, Failed, Outcome, Released, Stopped, Succeeded
from tickwheel.worker.session import Effects
from tickwheel.worker.stream import Streams

FOLDER_VARIABLE = "CHAOS_FOLDER"
EXIT_CODE = 137


class Diary:
    """Sightings of this process, in `<folder>/worker-<pid>.jsonl`."""

    def __init__(self, folder: str) -> None:
        path = Path(folder) / f"worker-{os.getpid()}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._pid = os.getpid()

    def note(self, event: Event, attempt: Attempt, **more: str) -> None:
        """One line, whole: O_APPEND and one write."""
        grant = attempt.grant
        line = {
            "event": event.value,
            "pid": self._pid,
            "run": attempt.run.rpartition("/")[2],
            "attempt": attempt.attempt,
            "fence": attempt.fence,
            "boot_us": time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000,
            "wall_us": time.time_ns() // 1_000,
            "due_us": grant.due_time.seconds * 1_000_000 + grant.due_time.nanos // 1_000,
            "token": attempt.token,
            "kind": grant.kind,
            "schedule": grant.schedule,
            **more,
        }
        os.write(self._file, json.dumps(line).encode() + b"\n")

    def watch(self) -> None:
        """Writes down what the streams' thread learns, from now on in this process."""
        apply = Streams._apply

        def watched(streams: Streams, effects: Effects) -> None:
            for attempt in effects.start:
                self.note(Event.GRANTED, attempt)
            for attempt in effects.stop:
                self.note(Event.STOPPED, attempt, result="its lease lapses")
            for attempt, why in effects.abandon:
                self.note(Event.STOPPED, attempt, result=why)
            for attempt in effects.forget:
                outcome, result = _outcome_text(attempt.outcome)
                self.note(Event.RECORDED, attempt, outcome=outcome, result=result)
            for attempt, why in effects.refused:
                self.note(Event.REFUSED, attempt, outcome=_outcome_text(attempt.outcome)[0], result=why)
            apply(streams, effects)

        Streams._apply = watched  # type: ignore[assignment,method-assign]


def _outcome_text(outcome: Outcome | None) -> tuple[str, str]:
    match outcome:
        case Succeeded(data):
            return "succeeded", data.decode()
        case Failed(type=type_):
            return "failed", type_
        case Stopped():
            return "stopped", ""
        case Released(reason):
            return "released", reason
        case None:
            return "none", ""


class Handlers:
    """What the tests have done. Payloads are JSON objects; each handler's result is its fence."""

    def __init__(self, diary: Diary) -> None:
        self._diary = diary

    async def work(self, ctx: Context) -> int:
        """`{"ms": 100, "fail": 1}`: takes so long, and fails in its first so many attempts."""
        payload = self._begin(ctx)
        try:
            if payload.get("ms"):
                await asyncio.sleep(payload["ms"] / 1_000)
            if ctx.attempt <= payload.get("fail", 0):
                raise RuntimeError(f"attempt {ctx.attempt} fails, as it was asked to")
            return ctx.fence
        finally:
            self._end(ctx)

    async def block(self, ctx: Context) -> int:
        """`{"ms": 100}`: as `work`, without letting the event loop go."""
        payload = self._begin(ctx)
        try:
            time.sleep(payload["ms"] / 1_000)  # noqa: ASYNC251 - it is what is tested
            return ctx.fence
        finally:
            self._end(ctx)

    def thread(self, ctx: SyncContext) -> int:
        """`{"ms": 100}`: in a thread, which looks whether it is to stop."""
        payload = self._begin(ctx)
        try:
            ctx.cancelled.wait(payload["ms"] / 1_000)
            ctx.raise_if_cancelled()
            return ctx.fence
        finally:
            self._end(ctx)

    async def die(self, ctx: Context) -> int:
        """Ends its process, as `kill -9` would; with `{"attempts": 1}` in its first so many attempts."""
        payload = self._begin(ctx)
        if ctx.attempt <= payload.get("attempts", 1_000):
            self._diary.note(Event.ENDED, ctx._attempt)
            os._exit(EXIT_CODE)
        self._end(ctx)
        return ctx.fence

    def _begin(self, ctx: Context | SyncContext) -> dict[str, Any]:
        self._diary.note(Event.STARTED, ctx._attempt)
        return ctx.payload if isinstance(ctx.payload, dict) else {}

    def _end(self, ctx: Context | SyncContext) -> None:
        self._diary.note(Event.ENDED, ctx._attempt)


def register(worker: Worker) -> None:
    """The kinds of the tests."""
    diary = Diary(os.environ[FOLDER_VARIABLE])
    diary.watch()
    handlers = Handlers(diary)
    for function in (handlers.work, handlers.block, handlers.thread, handlers.die):
        worker.handler(function.__name__)(function)
