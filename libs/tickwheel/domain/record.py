"""Runs, attempts and dead letters as they are read: what the rows of several tables say together."""

from __future__ import annotations

from dataclasses import dataclass, field

from tickwheel.domain.job import Failure, JobTemplate, Payload
from tickwheel.domain.run import AttemptState, Cause, RunState


@dataclass(frozen=True, slots=True)
class NewRun:
    """A run to be created: `due_us` is on the cluster clock, 0 for now; `template_body` is
    `encode_template`'s.
    """

    due_us: int
    template: JobTemplate
    template_body: bytes
    template_id: int
    payload: Payload
    labels: dict[str, str] | None = None


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run: its row, with its lease where it is leased and its timer where it waits."""

    run: bytes
    tenant: str
    shard: int
    state: RunState
    cause: Cause
    template: JobTemplate
    create_us: int
    schedule_us: int
    due_us: int
    lease_us: int
    end_us: int
    spent_count: int
    attempt: int
    version: int
    schedule: str = ""
    """The last part of its schedule's name, empty for a direct run."""
    worker: str = ""
    payload: Payload | None = None
    result: Payload | None = None
    failure: Failure | None = None
    progress: bytes | None = None
    cancel_reason: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    traceparent: str = ""
    replayed_from: bytes | None = None


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    run: bytes
    number: int
    fence: int
    worker: str
    host: str
    lease_us: int
    end_us: int
    """0 while it is leased."""
    state: AttemptState
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class DeadLetterRecord:
    run: bytes
    tenant: str
    schedule: str
    queue: str
    kind: str
    create_us: int
    attempt_count: int
    failure: Failure | None
    replayed_by: bytes | None
    replay_count: int
    payload: Payload | None = None
