"""Work that goes on in the background: operations, and the steps in which they survive any crash."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any


class OperationKind(IntEnum):
    """Numbers are those of `tickwheel.v1.OperationMetadata.Kind`, and those in `operation.kind`."""

    BACKFILL = 1
    CALENDAR_RECOMPUTE = 2
    TZDATA_RECOMPUTE = 3


class OperationState(IntEnum):
    """Numbers are those of `tickwheel.v1.OperationMetadata.State`, and those in `operation.state`."""

    RUNNING = 1
    SUCCEEDED = 2
    FAILED = 3
    CANCELLED = 4


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation as it stands. `request` is what was asked for, frozen."""

    operation_id: bytes
    tenant_id: int
    kind: OperationKind
    state: OperationState
    resource: str
    request: dict[str, Any]
    principal: str
    create_us: int
    update_us: int
    end_us: int
    cancel_us: int

    @property
    def name(self) -> str:
        return operation_name(self.operation_id)


@dataclass(frozen=True, slots=True)
class Step:
    """One of an operation's steps. The cursor moves in the transaction that does the work."""

    number: int
    cursor: dict[str, Any]
    attempt_count: int


@dataclass(frozen=True, slots=True)
class Progress:
    """What one transaction of a step did. `wait_us`: how long nothing more can be done."""

    cursor: dict[str, Any]
    examined_count: int = 0
    changed_count: int = 0
    skipped_count: int = 0
    is_done: bool = False
    wait_us: int = 0


@dataclass(frozen=True, slots=True)
class Totals:
    """Of all steps of an operation."""

    step_count: int
    step_done_count: int
    examined_count: int
    changed_count: int
    skipped_count: int
    last_error: str


@dataclass(frozen=True, slots=True)
class Move:
    """A schedule (its full name) whose next occurrence became another one; NEVER_US for none."""

    schedule: str
    before_us: int
    after_us: int


def operation_name(operation_id: bytes) -> str:
    return f"operations/{operation_id.hex()}"
