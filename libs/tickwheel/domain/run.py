"""The life of a run: its states, its events, and the one table that says which leads where.

States are these and no others. RUNNING and CANCELLING are not written on the run's own row: a lease row
stands for them (with a cancel mark for CANCELLING), and the run's row catches up when the attempt ends.
"""

from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType

from tickwheel.errors import StateTransitionForbidden


class RunState(IntEnum):
    """Numbers are those of `tickwheel.v1.Run.State`, and those in Postgres."""

    SCHEDULED = 1
    RUNNING = 2
    CANCELLING = 3
    HELD = 4
    SUCCEEDED = 5
    FAILED = 6
    DEAD_LETTERED = 7
    CANCELLED = 8
    EXPIRED = 9


TERMINAL = frozenset(
    {RunState.SUCCEEDED, RunState.FAILED, RunState.DEAD_LETTERED, RunState.CANCELLED, RunState.EXPIRED}
)


class Cause(IntEnum):
    """Numbers are those of `tickwheel.v1.Run.Cause`, and those in Postgres."""

    SCHEDULED = 1
    CATCH_UP = 2
    BACKFILL = 3
    MANUAL = 4
    DIRECT = 5
    REPLAY = 6


class AttemptState(IntEnum):
    """Numbers are those of `tickwheel.v1.Attempt.State`, and those in Postgres."""

    LEASED = 1
    SUCCEEDED = 2
    FAILED = 3
    TIMED_OUT = 4
    OUTCOME_UNKNOWN = 5
    CANCELLED = 6
    RELEASED = 7


class RunEvent(IntEnum):
    GRANT = 1
    SUCCEED = 2
    FAIL_RETRYABLE = 3
    FAIL_LAST = 4
    FAIL_LAST_NO_DEAD_LETTER = 5
    RELEASE = 6
    LAPSE_HOLD = 7
    CANCEL = 8
    CANCEL_CONFIRMED = 9
    START_TOO_LATE = 10


_S, _E = RunState, RunEvent

# Read a row as: in this state, this event leads to that state. What is not here is forbidden.
TRANSITIONS: Mapping[tuple[RunState, RunEvent], RunState] = MappingProxyType(
    {
        (_S.SCHEDULED, _E.GRANT): _S.RUNNING,
        (_S.SCHEDULED, _E.CANCEL): _S.CANCELLED,
        (_S.SCHEDULED, _E.START_TOO_LATE): _S.EXPIRED,
        (_S.RUNNING, _E.SUCCEED): _S.SUCCEEDED,
        (_S.RUNNING, _E.FAIL_RETRYABLE): _S.SCHEDULED,
        (_S.RUNNING, _E.FAIL_LAST): _S.DEAD_LETTERED,
        (_S.RUNNING, _E.FAIL_LAST_NO_DEAD_LETTER): _S.FAILED,
        (_S.RUNNING, _E.RELEASE): _S.SCHEDULED,
        (_S.RUNNING, _E.LAPSE_HOLD): _S.HELD,
        (_S.RUNNING, _E.CANCEL): _S.CANCELLING,
        (_S.RUNNING, _E.CANCEL_CONFIRMED): _S.CANCELLED,
        (_S.CANCELLING, _E.SUCCEED): _S.SUCCEEDED,
        (_S.CANCELLING, _E.FAIL_RETRYABLE): _S.CANCELLED,
        (_S.CANCELLING, _E.FAIL_LAST): _S.CANCELLED,
        (_S.CANCELLING, _E.FAIL_LAST_NO_DEAD_LETTER): _S.CANCELLED,
        (_S.CANCELLING, _E.RELEASE): _S.CANCELLED,
        (_S.CANCELLING, _E.LAPSE_HOLD): _S.CANCELLED,
        (_S.CANCELLING, _E.CANCEL): _S.CANCELLING,
        (_S.CANCELLING, _E.CANCEL_CONFIRMED): _S.CANCELLED,
        (_S.HELD, _E.SUCCEED): _S.SUCCEEDED,
        (_S.HELD, _E.FAIL_RETRYABLE): _S.SCHEDULED,
        (_S.HELD, _E.CANCEL): _S.CANCELLED,
        # Cancelling what has ended changes nothing: the verb is idempotent.
        **{(state, _E.CANCEL): state for state in TERMINAL},
    }
)


def after(state: RunState, event: RunEvent) -> RunState:
    """The state that follows.

    Raises:
        StateTransitionForbidden: the table has no such row; nothing has changed.
    """
    following = TRANSITIONS.get((state, event))
    if following is None:
        raise StateTransitionForbidden(state=state.name, event=event.name)
    return following
