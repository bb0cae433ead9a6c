"""What becomes of due rows? Pure decisions over columns: the next occurrence, when to settle, which numbers
to give.

Everything here takes `now_us` and gives arrays; the lane sends them to Postgres, whose rows decide.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from tickwheel.domain import flags as bits
from tickwheel.domain.ids import SCHEDULED_RUN_CLASS, run_id_head
from tickwheel.domain.timer_rows import NEVER_US, Bools, Int16s, Int64s, TimerRows, Uint64s
from tickwheel.domain.trigger import CompiledTrigger, jitter_offsets_us, next_after_grouped

OVERLAP_SKIP: Final = 1
OVERLAP_ALLOW_ALL: Final = 5
COUNTED_MAX: Final = 1_000_000
"""How far a skipped range is counted."""


@dataclass(frozen=True, slots=True)
class NextPlan:
    """For each schedule row: its next nominal and due instants, and when it is settled if nobody took it.

    failed: rows whose trigger is not to be computed, with the reason: they are quarantined.
    """

    next_schedule_us: Int64s
    next_due_us: Int64s
    settle_us: Int64s
    failed: Mapping[int, str]


def plan_next(
    rows: TimerRows,
    triggers: Mapping[int, CompiledTrigger | Exception],
    settle_after_us: int,
) -> NextPlan:
    """The next occurrence of each schedule row, computed from its scheduled instant and never from now.

    Rows whose trigger is not in `triggers` must not be asked for. A trigger that names no later instant, or a
    countdown that ends with this occurrence, gives NEVER_US.
    """
    count = len(rows)
    failed: dict[int, str] = {}
    distinct, inverse = np.unique(rows.trigger_id, return_inverse=True)
    compiled: list[CompiledTrigger] = []
    index = np.full(len(distinct), -1, dtype=np.intp)
    for place, trigger_id in enumerate(distinct.tolist()):
        trigger = triggers[trigger_id]
        if isinstance(trigger, Exception):
            for row in np.flatnonzero(inverse == place).tolist():
                failed[row] = str(trigger)
        else:
            index[place] = len(compiled)
            compiled.append(trigger)
    which = index[inverse]
    good = np.flatnonzero(which >= 0)
    next_schedule = np.full(count, NEVER_US, dtype=np.int64)
    next_due = next_schedule
    if len(good):
        try:
            next_schedule[good] = next_after_grouped(compiled, which[good], rows.schedule_time_us[good])
        except Exception:  # One bad trigger must not stop the others: find it by asking each alone (I11).
            _ask_each(compiled, which, good, rows.schedule_time_us, next_schedule, failed)
        stuck = good[next_schedule[good] <= rows.schedule_time_us[good]]
        for row in stuck.tolist():
            failed[row] = "its trigger named an occurrence that is not later than the last one"
        next_schedule[stuck] = NEVER_US
        next_schedule[rows.countdown == 1] = NEVER_US
        next_due = next_schedule.copy()
        _add_jitter(rows, compiled, which, next_schedule, next_due)
    patience = np.minimum(settle_after_us, rows.misfire_ms.astype(np.int64) * 500)
    return NextPlan(next_schedule, next_due, rows.due_us + patience, failed)


@dataclass(frozen=True, slots=True)
class Overtaken:
    """Occurrences that came while an earlier one of their schedule was still undecided: `count` of them, from
    `first_us` to `last_us`, and the one after them; `count` 0 where there are none."""

    count: Int64s
    first_us: Int64s
    last_us: Int64s
    following_us: Int64s


def overtaken(
    rows: TimerRows,
    next_schedule_us: Int64s,
    triggers: Mapping[int, CompiledTrigger | Exception],
    now_us: int,
) -> Overtaken:
    """What an exclusive schedule that is decided late skips with that decision, in one range.

    Only rows whose policy is SKIP, that run any number of times and have no jitter: others take their
    occurrences one by one. Each (trigger, instant) is asked once.
    """
    count = np.zeros(len(rows), dtype=np.int64)
    last, following = next_schedule_us.copy(), next_schedule_us.copy()
    asked: dict[tuple[int, int], tuple[int, int, int]] = {}
    exclusive = (rows.flags & bits.OVERLAP_MASK == OVERLAP_SKIP) & (rows.flags & bits.JITTER == 0)
    for row in np.flatnonzero((next_schedule_us <= now_us) & exclusive & (rows.countdown < 0)).tolist():
        key = (int(rows.trigger_id[row]), int(next_schedule_us[row]))
        found = asked.get(key)
        if found is None:
            trigger = triggers[key[0]]
            assert not isinstance(trigger, Exception)
            newest = trigger.latest_between(key[1] - 1, now_us, 1)[0]
            after = trigger.next_after(newest)
            skipped = trigger.count_between(key[1] - 1, newest, COUNTED_MAX)
            found = asked[key] = (skipped, newest, NEVER_US if after is None else after)
        count[row], last[row], following[row] = found
    return Overtaken(count, next_schedule_us, last, following)


def _ask_each(
    compiled: Sequence[CompiledTrigger],
    which: npt.NDArray[np.intp],
    good: npt.NDArray[np.intp],
    bases_us: Int64s,
    answers_us: Int64s,
    failed: dict[int, str],
) -> None:
    for row in good.tolist():
        try:
            found = compiled[which[row]].next_after(int(bases_us[row]))
            answers_us[row] = NEVER_US if found is None else found
        except Exception as error:  # As above.
            failed[row] = f"its trigger cannot be computed: {error}"


def _add_jitter(
    rows: TimerRows,
    compiled: Sequence[CompiledTrigger],
    which: npt.NDArray[np.intp],
    next_schedule: Int64s,
    next_due: Int64s,
) -> None:
    jittered = np.flatnonzero((rows.flags & bits.JITTER != 0) & (next_schedule != NEVER_US) & (which >= 0))
    if not len(jittered):
        return
    after_next = next_after_grouped(compiled, which[jittered], next_schedule[jittered])
    for place in np.unique(which[jittered]).tolist():
        jitter_us = compiled[place].trigger_set.jitter_us
        chosen = which[jittered] == place
        group = jittered[chosen]
        next_due[group] += jitter_offsets_us(
            rows.ref_hi[group], rows.ref_lo[group], next_schedule[group], jitter_us, after_next[chosen]
        )


def number_within_shards(shards: Int16s, counters: Int64s) -> Int64s:
    """A fresh number for each row, growing by one within a shard; `counters[shard]` holds each shard's next
    one.

    Rows are sorted by shard. The counters are advanced.
    """
    if not len(shards):
        return np.empty(0, dtype=np.int64)
    starts = np.flatnonzero(np.diff(shards, prepend=shards[0] - 1))
    counts = np.diff(starts, append=len(shards))
    rank = np.arange(len(shards)) - np.repeat(starts, counts)
    numbers: Int64s = counters[shards] + rank
    counters[shards[starts]] += counts
    return numbers


def run_id_heads(now_us: int, shards: Int16s) -> Uint64s:
    """The high halves of the ids of runs that are born from schedules."""
    base = np.uint64(run_id_head(SCHEDULED_RUN_CLASS, now_us, 0))
    heads: Uint64s = base | (shards.astype(np.uint64) << np.uint64(32))
    return heads


def first_of_each(keys: Uint64s, active: Bools) -> Bools:
    """True for inactive rows, and for the first active row of each key."""
    allowed = ~active
    rows = np.flatnonzero(active)
    if len(rows):
        _, first = np.unique(keys[rows], return_index=True)
        allowed[rows[first]] = True
    return allowed
