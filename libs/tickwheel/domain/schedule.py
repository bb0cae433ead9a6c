"""A schedule: what its owner wants (the spec), and how it stands in the timer's row.

The row is where a schedule meets its shard's owner: `TimerState` is the part of it that says what is due.
Every mutation computes a new one from the old, here, and writes it in its own transaction.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

from tickwheel.domain import flags, trigger
from tickwheel.domain.job import JobTemplate, Payload, UnknownOutcomePolicy
from tickwheel.domain.misfire import MisfirePolicy, MisfireRules
from tickwheel.domain.trigger import NEVER_US, CompiledTrigger, TriggerSet
from tickwheel.errors import TriggerNeverFires

BUFFER_COUNT_DEFAULT = 100
BUFFER_COUNT_MAX = 10_000
RUN_COUNT_MAX = 1_000_000_000
MISFIRE_THRESHOLD_MS_MAX = 30 * 86_400_000
CATCHUP_MS_MAX = 366 * 86_400_000


class OverlapPolicy(IntEnum):
    """Numbers are those of `tickwheel.v1.OverlapPolicy.Policy`, and those in `timer.flags`."""

    SKIP = 1
    BUFFER_ONE = 2
    BUFFER_ALL = 3
    CANCEL_OTHER = 4
    ALLOW_ALL = 5


MISFIRE_NUMBERS: dict[MisfirePolicy, int] = {
    MisfirePolicy.FIRE_ONCE: 1,
    MisfirePolicy.FIRE_ALL: 2,
    MisfirePolicy.SKIP: 3,
}
"""Of `tickwheel.v1.MisfirePolicy.Policy`, and those in `timer.flags`."""


class ScheduleState(IntEnum):
    """Numbers are those of `tickwheel.v1.ScheduleStatus.State`. Derived, never stored."""

    ACTIVE = 1
    PAUSED = 2
    COMPLETED = 3
    QUARANTINED = 4
    DELETED = 5


@dataclass(frozen=True, slots=True)
class ScheduleSpec:
    """The desired state, read and proven. `verbatim` is what the user typed (JSON, without the payload)."""

    triggers: TriggerSet
    template: JobTemplate
    payload: Payload
    misfire: MisfireRules
    overlap: OverlapPolicy
    buffer_count_max: int
    run_count_max: int
    """0: no limit."""
    verbatim: str

    @property
    def timer_flags(self) -> int:
        """What the owner must know of it without reading the spec."""
        bits = int(self.overlap) | MISFIRE_NUMBERS[self.misfire.policy] << flags.MISFIRE_SHIFT
        if self.payload.data:
            bits |= flags.HAS_PAYLOAD
        if self.triggers.jitter_us:
            bits |= flags.JITTER
        if self.template.on_unknown_outcome is UnknownOutcomePolicy.HOLD:
            bits |= flags.HOLD_UNKNOWN
        return bits


@dataclass(frozen=True, slots=True)
class TimerState:
    """When a schedule is due. `due_us` is NEVER_US when nothing is; `decided_us` only grows (I2)."""

    due_us: int
    schedule_us: int
    decided_us: int

    def never(self) -> TimerState:
        """The same with nothing due: paused."""
        return replace(self, due_us=NEVER_US, schedule_us=NEVER_US)


def first_state(compiled: CompiledTrigger, uid: bytes, now_us: int) -> TimerState:
    """Of a schedule that is created now.

    One whose instants all lie in the past is due at once, with the first of them: its misfire policy decides.

    Raises:
        TriggerNeverFires: it would never be due.
    """
    state = state_after(compiled, uid, now_us)
    if state.due_us == NEVER_US and all(each.instants_us for each in compiled.trigger_set.triggers):
        state = state_after(compiled, uid, 0)
    if state.due_us == NEVER_US:
        raise TriggerNeverFires("triggers", "no occurrence lies in the future")
    return state


def state_after(compiled: CompiledTrigger, uid: bytes, decided_us: int) -> TimerState:
    """What is due after the last decided occurrence, jitter included."""
    schedule_us = compiled.next_after(decided_us)
    if schedule_us is None:
        return TimerState(NEVER_US, NEVER_US, decided_us)
    return TimerState(schedule_us + jitter_us(compiled, uid, schedule_us), schedule_us, decided_us)


def jitter_us(compiled: CompiledTrigger, uid: bytes, schedule_us: int) -> int:
    """How much later than its nominal instant this occurrence is due."""
    window_us = compiled.trigger_set.jitter_us
    if not window_us:
        return 0
    import numpy as np

    following_us = compiled.next_after(schedule_us)
    offsets = trigger.jitter_offsets_us(
        np.array([int.from_bytes(uid[:8], "big")], dtype=np.uint64),
        np.array([int.from_bytes(uid[8:], "big")], dtype=np.uint64),
        np.array([schedule_us], dtype=np.int64),
        window_us,
        np.array([NEVER_US if following_us is None else following_us], dtype=np.int64),
    )
    return int(offsets[0])


@dataclass(frozen=True, slots=True)
class Pause:
    """Why and by whom a schedule is paused. `resume_us`: when it resumes by itself, 0 for never."""

    reason: str
    principal: str
    pause_us: int
    resume_us: int = 0


@dataclass(frozen=True, slots=True)
class ScheduleRecord:
    """A schedule as it stands in Postgres, with its timer's row where there is one."""

    uid: bytes
    tenant: str
    name: str
    """The last part of its name."""
    shard: int
    version: int
    revision: int
    verbatim: str
    trigger_id: int
    template_id: int
    labels: dict[str, str]
    annotations: dict[str, str]
    pause: Pause | None
    quarantine_reason: str | None
    create_us: int
    update_us: int
    delete_us: int | None
    timer: TimerState | None
    observed_version: int
    countdown: int
    """Occurrences that may still become runs; -1 for any number."""
    payload: Payload | None = None
    """None where it was not asked for."""

    @property
    def etag(self) -> str:
        """A schedule that was made anew under the same name never has the etag of the one before."""
        return f"{self.uid.hex()[:8]}-{self.revision}"

    @property
    def state(self) -> ScheduleState:
        if self.delete_us is not None:
            return ScheduleState.DELETED
        if self.quarantine_reason is not None:
            return ScheduleState.QUARANTINED
        if self.pause is not None:
            return ScheduleState.PAUSED
        if self.timer is None or self.timer.due_us == NEVER_US or self.countdown == 0:
            return ScheduleState.COMPLETED
        return ScheduleState.ACTIVE
