"""What does a handler know about the attempt that it serves?"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import structlog
from google.protobuf.json_format import MessageToDict

from tickwheel.worker.attempt import Attempt, Outcome, Progress

PROGRESS_MESSAGE_MAX = 1024
CHECKPOINT_BYTES_MAX = 64 << 10


class Cancelled(Exception):
    """Raise it from a handler (or let `raise_if_cancelled` do so) to end because the run was cancelled."""


class BaseContext:
    """What async and sync handlers have in common. Read from the grant when asked for, not before."""

    __slots__ = ("_attempt", "_grace", "_logger", "_on_progress", "_stop_reason", "_stopped_as", "_task")

    def __init__(self, attempt: Attempt, on_progress: Callable[[Attempt, Progress], None]) -> None:
        self._attempt = attempt
        self._on_progress = on_progress
        self._stop_reason: str | None = None
        self._logger: Any = None
        # The executor's: what runs the handler, what becomes of it if it ends because it was told to, and the
        # timer that cancels it then.
        self._task: asyncio.Task[None] | None = None
        self._stopped_as: Outcome | None = None
        self._grace: asyncio.TimerHandle | None = None

    @property
    def run(self) -> str:
        """`tenants/{t}/runs/{r}`."""
        return self._attempt.run

    @property
    def tenant(self) -> str:
        """The last part of the tenant's name."""
        return self._attempt.run.split("/", 2)[1]

    @property
    def attempt(self) -> int:
        """1 for the first."""
        return self._attempt.attempt

    @property
    def attempt_count_max(self) -> int:
        """How many attempts there may be in all."""
        return int(self._attempt.grant.attempt_count_max)

    @property
    def is_last_attempt(self) -> bool:
        """A failure now makes the run a dead letter."""
        return self.attempt >= self.attempt_count_max > 0

    @property
    def fence(self) -> int:
        """Pass it to what you write to. A later attempt, or run of the same schedule, has a higher one."""
        return self._attempt.fence

    @property
    def idempotency_key(self) -> str:
        """The same in every attempt of the run: give it to what must not be done twice."""
        return str(self._attempt.grant.idempotency_key)

    @property
    def kind(self) -> str:
        return str(self._attempt.grant.kind)

    @property
    def queue(self) -> str:
        return str(self._attempt.grant.queue)

    @property
    def schedule(self) -> str:
        """`tenants/{t}/schedules/{s}`, empty for a direct run."""
        return str(self._attempt.grant.schedule)

    @property
    def schedule_time(self) -> datetime | None:
        """The nominal instant of the occurrence, UTC; None for a direct run."""
        return self._time("schedule_time")

    @property
    def due_time(self) -> datetime | None:
        """The instant after jitter, spread or backoff, UTC."""
        return self._time("due_time")

    @property
    def deadline(self) -> datetime | None:
        """The attempt is ended at this instant at the latest, UTC; None: no limit."""
        return self._time("deadline_time")

    def _time(self, field: str) -> datetime | None:
        grant = self._attempt.grant
        if not grant.HasField(field):
            return None
        moment: datetime = getattr(grant, field).ToDatetime(tzinfo=UTC)
        return moment

    @property
    def payload(self) -> Any:
        """The JSON value where the payload is JSON, else bytes; None when there is none."""
        payload = self._attempt.grant.payload
        content = payload.WhichOneof("content")
        if content is None:
            return None
        if content == "json":
            return MessageToDict(payload.json)
        if payload.content_type.split(";")[0].strip().lower() == "application/json":
            return json.loads(payload.data) if payload.data else None
        return payload.data

    @property
    def payload_bytes(self) -> bytes:
        """The payload as it travelled; of a JSON object its encoding."""
        payload = self._attempt.grant.payload
        if payload.WhichOneof("content") == "json":
            return json.dumps(MessageToDict(payload.json), separators=(",", ":")).encode()
        return bytes(payload.data)

    @property
    def content_type(self) -> str:
        payload = self._attempt.grant.payload
        return "application/json" if payload.WhichOneof("content") == "json" else str(payload.content_type)

    @property
    def checkpoint(self) -> bytes:
        """What the attempt before said last in `progress(..., checkpoint=...)`; empty at first."""
        return bytes(self._attempt.grant.checkpoint)

    @property
    def last_failure(self) -> tuple[str, str] | None:
        """(type, message) of the failure of the attempt before, None at first."""
        grant = self._attempt.grant
        if not grant.HasField("last_failure"):
            return None
        return grant.last_failure.type, grant.last_failure.message

    @property
    def logger(self) -> Any:
        """A structlog logger that names the run, the attempt and the fence."""
        if self._logger is None:
            self._logger = structlog.get_logger("tickwheel.handler").bind(
                run=self.run, attempt=self.attempt, fence=self.fence, kind=self.kind
            )
        return self._logger

    def report_progress(self, percent: float, message: str = "", *, checkpoint: bytes = b"") -> None:
        """Say how far the work is, from any thread. It goes out with the next heartbeat, about once a second;
        in between only the latest word counts. The checkpoint is handed to the next attempt, if there is one.
        """
        if not 0 <= percent <= 100:
            raise ValueError(f"percent is {percent}: give a number from 0 to 100")
        if len(checkpoint) > CHECKPOINT_BYTES_MAX:
            raise ValueError(
                f"the checkpoint has {len(checkpoint)} bytes, {CHECKPOINT_BYTES_MAX} are kept: store it apart"
            )
        progress = Progress(float(percent), message[:PROGRESS_MESSAGE_MAX], bytes(checkpoint))
        self._on_progress(self._attempt, progress)

    @property
    def stop_reason(self) -> str | None:
        """Why the handler is to stop (a cancel, a lapsed lease, a drain); None: it is not."""
        return self._stop_reason

    def raise_if_cancelled(self) -> None:
        """Raises `Cancelled` once the handler is to stop."""
        if self._stop_reason is not None:
            raise Cancelled(self._stop_reason)


class Context(BaseContext):
    """The context of an async handler. It belongs to the handlers' event loop."""

    __slots__ = ("_cancelled",)

    def __init__(self, attempt: Attempt, on_progress: Callable[[Attempt, Progress], None]) -> None:
        super().__init__(attempt, on_progress)
        self._cancelled: asyncio.Event | None = None

    @property
    def cancelled(self) -> asyncio.Event:
        """Set when the handler is to stop. A handler that has asked for it is given the cancel's grace to end
        by itself; one that has not is cancelled at once, in the way of asyncio.
        """
        if self._cancelled is None:
            self._cancelled = asyncio.Event()
            if self._stop_reason is not None:
                self._cancelled.set()
        return self._cancelled

    async def progress(self, percent: float, message: str = "", *, checkpoint: bytes = b"") -> None:
        """As `report_progress`, and lets others run."""
        self.report_progress(percent, message, checkpoint=checkpoint)
        await asyncio.sleep(0)

    def _stop(self, reason: str) -> bool:
        """Note that it is to stop. True: the handler watches `cancelled`, and may be given its grace."""
        self._stop_reason = reason
        if self._cancelled is None:
            return False
        self._cancelled.set()
        return True


class SyncContext(BaseContext):
    """The context of a sync handler, which runs in a thread."""

    __slots__ = ("_cancelled",)

    def __init__(self, attempt: Attempt, on_progress: Callable[[Attempt, Progress], None]) -> None:
        super().__init__(attempt, on_progress)
        self._cancelled = threading.Event()

    @property
    def cancelled(self) -> threading.Event:
        """Set when the handler is to stop: a thread cannot be stopped from outside, so look at it."""
        return self._cancelled

    def progress(self, percent: float, message: str = "", *, checkpoint: bytes = b"") -> None:
        """As `report_progress`."""
        self.report_progress(percent, message, checkpoint=checkpoint)

    def _stop(self, reason: str) -> bool:
        self._stop_reason = reason
        self._cancelled.set()
        return True
