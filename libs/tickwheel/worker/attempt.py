"""What does a worker know about one attempt that it holds, and how can an attempt end? Plain values, no I/O.

An attempt is made when its grant is taken in and forgotten when the timer has recorded or refused it:

    RUNNING --finish--> FINISHED --recorded, superseded--> (forgotten)
       `--superseded--> ABANDONED    its handler is stopped, its outcome is dropped

One that lapses is told to stop and goes on being held: it ran, so its end is an outcome like any other, and
the timer judges whether it came too late.

One record serves the stream's thread and the handlers' thread: after the hand-over `phase`, `outcome`,
`deadline_us` and what the session keeps belong to the stream's thread alone; the rest never changes.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from tickwheel.worker.session import Session

LeaseToken: TypeAlias = str


class Phase(enum.Enum):
    """How far an attempt is."""

    # Told to stop or not, until its handler has ended.

    RUNNING = "RUNNING"
    FINISHED = "FINISHED"
    ABANDONED = "ABANDONED"


# A member of an enum is looked up slowly, and the hot path does so for every run.
_RUNNING = Phase.RUNNING
_FINISHED = Phase.FINISHED


@dataclass(frozen=True, slots=True)
class Succeeded:
    """The handler returned. `data` is empty and `content_type` too when it returned None."""

    data: bytes = b""
    content_type: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """The handler raised. The lengths are the contract's: message 4 KiB, stack 16 KiB."""

    type: str
    message: str
    non_retryable: bool = False
    retry_delay_us: int | None = None
    stack: str = ""


@dataclass(frozen=True, slots=True)
class Stopped:
    """The handler ended because it was told to."""


@dataclass(frozen=True, slots=True)
class Released:
    """Handed back: the work was not begun, or gave up at no cost in attempts."""

    reason: str
    not_before_us: int | None = None


Outcome: TypeAlias = Succeeded | Failed | Stopped | Released

SUCCEEDED = Succeeded()
"""The most frequent outcome, made once."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What a handler last said about itself."""

    percent: float
    message: str
    checkpoint: bytes


class Attempt:
    """One attempt that this worker holds.

    grant: the message that brought it, anything with the fields of `tickwheel.v1.Grant`.
    sequence: of the response that granted it, on the stream of `owner`; 0 for one that was announced there.
    lease_us: how long its lease lasts between renewals.
    deadline_us: when the worker stops it, on the worker's monotonic clock. Only ever raised.
    is_detached: `grant` is a copy, and holds none of the others that came in the same message.
    is_lapsed: its deadline passed while it ran, and it was told to stop.
    sent_on, sent_us: where and when its outcome was last put into a message.
    owner: the session that granted or last renewed it; None while no timer that is known to own it is
        connected.
    """

    __slots__ = (
        "attempt",
        "deadline_us",
        "fence",
        "grant",
        "is_detached",
        "is_lapsed",
        "lease_us",
        "outcome",
        "owner",
        "phase",
        "progress",
        "run",
        "sent_on",
        "sent_us",
        "sequence",
        "shard",
        "token",
    )

    def __init__(
        self,
        grant: Any,
        run: str,
        attempt: int,
        fence: int,
        token: LeaseToken,
        shard: int,
        sequence: int,
        lease_us: int,
        deadline_us: int,
        owner: Session | None,
    ) -> None:
        self.grant = grant
        self.run = run
        self.attempt = attempt
        self.fence = fence
        self.token = token
        self.shard = shard
        self.sequence = sequence
        self.lease_us = lease_us
        self.deadline_us = deadline_us
        self.owner = owner
        self.phase: Phase = _RUNNING
        self.outcome: Outcome | None = None
        self.is_detached = False
        self.is_lapsed = False
        self.sent_on: Session | None = None
        self.sent_us = 0
        self.progress: Progress | None = None

    def finish(self, outcome: Outcome) -> None:
        """Its handler ended. A second outcome raises ValueError and changes nothing."""
        if self.phase is not _RUNNING:
            raise ValueError(f"{self!r} has ended already: an attempt has one outcome")
        self.phase = _FINISHED
        self.outcome = outcome

    def __repr__(self) -> str:
        return f"<Attempt {self.run}#{self.attempt} fence {self.fence} {self.phase.value}>"
