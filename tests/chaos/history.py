"""Did this history keep the promises? A judge of what was seen, recorded and acknowledged.

Three parties say what happened, and none of them trusts another:

* workers: each process wrote down what it was granted, what its handlers began and ended, and what it was
  told about their outcomes (`Sighting`);
* Postgres: the rows that stand at the end, and who wrote to which shard while whom it belonged to (`Write`);
* clients: what was acknowledged to them.

`judge` compares these and knows the invariants of the design by their numbers; it knows nothing of how the
system works. All of it is pure: lists of records in, complaints out.

Two clocks. `boot_us` is CLOCK_BOOTTIME of the one machine that everything runs on, so stamps of different
processes may be compared; `wall_us` and everything in rows is the cluster clock, which on one machine is
that machine's wall clock.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from tickwheel.domain.run import TERMINAL, AttemptState, Cause, RunState
from tickwheel.domain.shard import FENCE_GRANT_BITS

CLOCK_TOLERANCE_US = 20_000
"""By how much two readings of the cluster clock in two processes may disagree."""
THAW_GRACE_US = 500_000
"""What a process may still do after it was frozen, until its own watch has looked at the clock: no process
can stop while it does not run. That is what the fence is for."""
COMPLAINTS_MAX = 20
"""Of one check: a broken build would otherwise fill the screen."""
FOREVER_US = 1 << 62

BORN_OF_OCCURRENCE = (Cause.SCHEDULED, Cause.CATCH_UP)


class Event(StrEnum):
    """What a worker process can say about an attempt."""

    GRANTED = "granted"
    """The grant was taken in."""
    STARTED = "started"
    """Its handler begins."""
    ENDED = "ended"
    """Its handler has ended, one way or another."""
    STOPPED = "stopped"
    """The worker gave it up: its lease lapsed on the worker's clock, or is another's."""
    RECORDED = "recorded"
    """A timer acknowledged its outcome; `outcome` and `result` say which."""
    REFUSED = "refused"
    """A timer did not take its outcome; `result` says why."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """One line of a worker process. `run` is 32 hexadecimal digits."""

    event: Event
    pid: int
    run: str
    attempt: int
    fence: int
    boot_us: int
    wall_us: int
    due_us: int = 0
    token: str = ""
    kind: str = ""
    schedule: str = ""
    outcome: str = ""
    """succeeded, failed, stopped or released, for RECORDED and REFUSED."""
    result: str = ""


@dataclass(frozen=True, slots=True)
class Absence:
    """A worker process did not run in this time: frozen, or dead for good (until FOREVER_US)."""

    pid: int
    from_us: int
    until_us: int


@dataclass(frozen=True, slots=True)
class RunRow:
    run: str
    shard: int
    schedule: str
    result: str
    schedule_us: int
    create_us: int
    due_us: int
    lease_us: int
    state: int
    attempt: int
    fence: int
    cause: int
    spent: int = 0


@dataclass(frozen=True, slots=True)
class LeaseRow:
    run: str
    shard: int
    schedule: str
    schedule_us: int
    due_us: int
    lease_us: int
    attempt: int
    fence: int
    cause: int


@dataclass(frozen=True, slots=True)
class AttemptRow:
    run: str
    shard: int
    number: int
    fence: int
    state: int
    lease_us: int
    end_us: int


@dataclass(frozen=True, slots=True)
class TimerRow:
    """What waits. kind 1: a schedule's next occurrence, 2: a run."""

    ref: str
    shard: int
    kind: int
    due_us: int
    decided_us: int


@dataclass(frozen=True, slots=True)
class DecisionRow:
    schedule: str
    from_us: int
    until_us: int
    reason: int


@dataclass(frozen=True, slots=True)
class ScheduleRow:
    uid: str
    deleted: bool
    quarantined: bool


@dataclass(frozen=True, slots=True)
class Write:
    """A timer's statement touched rows of a shard, at a moment when the shard belonged to `owner`."""

    shard: int
    writer: str
    owner: str
    what: str


@dataclass(frozen=True, slots=True)
class ActiveWindow:
    """Between these instants the schedule certainly stood, unpaused, with this interval and anchor."""

    uid: str
    anchor_us: int
    interval_us: int
    from_us: int
    until_us: int

    def occurrences(self) -> Iterator[int]:
        """Those after `from_us` and before `until_us`."""
        first = (
            self.anchor_us + -(-(self.from_us + 1 - self.anchor_us) // self.interval_us) * self.interval_us
        )
        return iter(range(first, self.until_us, self.interval_us))


@dataclass(frozen=True, slots=True)
class Pause:
    """Acknowledged when `decided_us` was the last decided occurrence; `resume_us` is when its end was asked
    for (missed ones dropped), FOREVER_US while it lasts."""

    uid: str
    decided_us: int
    resume_us: int = FOREVER_US


@dataclass(slots=True)
class Acknowledged:
    """What clients were told is so."""

    runs: set[str] = field(default_factory=set)
    schedules: set[str] = field(default_factory=set)
    """By uid."""
    cancelled: set[str] = field(default_factory=set)
    """Runs that were answered to be CANCELLED."""
    windows: list[ActiveWindow] = field(default_factory=list)
    pauses: list[Pause] = field(default_factory=list)


@dataclass(slots=True)
class History:
    """Everything that is known about one experiment.

    is_settled: nothing was due any more when the rows were read, so everything has to have ended.
    """

    sightings: list[Sighting] = field(default_factory=list)
    absences: list[Absence] = field(default_factory=list)
    runs: list[RunRow] = field(default_factory=list)
    leases: list[LeaseRow] = field(default_factory=list)
    attempts: list[AttemptRow] = field(default_factory=list)
    timers: list[TimerRow] = field(default_factory=list)
    decisions: list[DecisionRow] = field(default_factory=list)
    dead_letters: set[str] = field(default_factory=set)
    schedules: list[ScheduleRow] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)
    acknowledged: Acknowledged = field(default_factory=Acknowledged)
    is_settled: bool = True
    read_us: int = 0
    """When the rows were read, on the cluster clock."""

    @property
    def rows(self) -> list[RunRow | LeaseRow]:
        """Of runs: in a schedule's first attempt a run is its lease row only."""
        return [*self.runs, *self.leases]


@dataclass(frozen=True, slots=True)
class Complaint:
    invariant: str
    what: str

    def __str__(self) -> str:
        return f"{self.invariant}: {self.what}"


def judge(history: History) -> list[Complaint]:
    """Every promise that the history breaks; empty: none. At most COMPLAINTS_MAX of one kind."""
    complaints: list[Complaint] = []
    for invariant, check in CHECKS:
        found = [Complaint(invariant, what) for what in check(history)]
        complaints += found[:COMPLAINTS_MAX]
        if len(found) > COMPLAINTS_MAX:
            complaints.append(Complaint(invariant, f"and {len(found) - COMPLAINTS_MAX} more like these"))
    return complaints


# --- I1: what was acknowledged stands -----------------------------------------------------------------------


def lost_runs(history: History) -> Iterator[str]:
    """A run that was acknowledged has a row; once all is settled it has ended, too."""
    states = {row.run: RunState(row.state) for row in history.runs}
    leased = {row.run for row in history.leases}
    waiting = {row.ref for row in history.timers}
    for run in sorted(history.acknowledged.runs):
        if run not in states:
            yield f"run {run} was acknowledged and has no row"
        elif history.is_settled and states[run] not in TERMINAL and states[run] is not RunState.HELD:
            where = "its lease stands" if run in leased else "it waits" if run in waiting else "it is nowhere"
            yield f"run {run} is {states[run].name} after everything has settled: {where}"


def lost_schedules(history: History) -> Iterator[str]:
    """A schedule that was acknowledged stands, and so does its timer row while it is not deleted."""
    rows = {row.uid: row for row in history.schedules}
    timers = {row.ref for row in history.timers if row.kind == 1}
    for uid in sorted(history.acknowledged.schedules):
        if uid not in rows:
            yield f"schedule {uid} was acknowledged and has no row"
    for row in history.schedules:
        if row.deleted == (row.uid in timers):
            yield f"schedule {row.uid}: deleted is {row.deleted}, and its timer row says the opposite"


def undone_cancels(history: History) -> Iterator[str]:
    """A run that was answered to be cancelled stays so."""
    states = {row.run: RunState(row.state) for row in history.runs}
    leased = {row.run for row in history.leases}
    for run in sorted(history.acknowledged.cancelled):
        if states.get(run) is not RunState.CANCELLED or run in leased:
            now = "leased" if run in leased else getattr(states.get(run), "name", "gone")
            yield f"run {run} was answered to be cancelled, and is {now}"


# --- I2: an occurrence becomes at most one run, and is never passed over in silence -------------------------


def doubled_occurrences(history: History) -> Iterator[str]:
    """One run for an occurrence at the most, and no run for one that was decided otherwise."""
    owners: dict[tuple[str, int], set[str]] = defaultdict(set)
    for row in history.rows:
        if row.schedule and row.cause in BORN_OF_OCCURRENCE:
            owners[row.schedule, row.schedule_us].add(row.run)
    for (schedule, schedule_us), runs in sorted(owners.items()):
        if len(runs) > 1:
            yield f"occurrence {schedule_us} of {schedule} became {len(runs)} runs: {sorted(runs)}"
    instants = _instants(owners)
    for decision in history.decisions:
        inside = _between(instants.get(decision.schedule, []), decision.from_us, decision.until_us)
        for schedule_us in inside:
            yield (
                f"occurrence {schedule_us} of {decision.schedule} became a run although it was decided "
                f"otherwise (reason {decision.reason})"
            )


def missed_occurrences(history: History) -> Iterator[str]:
    """Each occurrence of a schedule that certainly stood became a run, or has a decision."""
    instants = _instants((row.schedule, row.schedule_us) for row in history.rows)
    decided: dict[str, list[DecisionRow]] = defaultdict(list)
    for decision in history.decisions:
        decided[decision.schedule].append(decision)
    for window in history.acknowledged.windows:
        found = set(instants.get(window.uid, []))
        for schedule_us in window.occurrences():
            if schedule_us in found:
                continue
            if not any(each.from_us <= schedule_us <= each.until_us for each in decided[window.uid]):
                yield f"occurrence {schedule_us} of {window.uid} has neither a run nor a decision"


def fired_while_paused(history: History) -> Iterator[str]:
    """After a pause was acknowledged nothing of the schedule becomes a run until it is resumed."""
    born: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for row in history.rows:
        if row.schedule and row.cause in BORN_OF_OCCURRENCE:
            born[row.schedule].append((row.schedule_us, row.run))
    for pause in history.acknowledged.pauses:
        for schedule_us, run in born[pause.uid]:
            if pause.decided_us < schedule_us <= pause.resume_us:
                yield f"run {run} was born for {schedule_us} while {pause.uid} was paused"


# --- I3, I5: one live attempt, higher fences ----------------------------------------------------------------


def fences_that_fall(history: History) -> Iterator[str]:
    """Of a run: each attempt has one fence, and a later attempt a higher one."""
    fences: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for seen in history.sightings:
        fences[seen.run][seen.attempt].add(seen.fence)
    for attempt in history.attempts:
        fences[attempt.run][attempt.number].add(attempt.fence)
    for row in history.rows:
        if row.fence and row.attempt:
            fences[row.run][row.attempt].add(row.fence)
    for run, by_attempt in sorted(fences.items()):
        last = 0
        for number in sorted(by_attempt):
            found = sorted(by_attempt[number])
            if len(found) > 1:
                yield f"attempt {number} of run {run} has the fences {found}"
            if found[0] <= last:
                yield f"attempt {number} of run {run} has fence {found[0]}, an earlier one had {last}"
            last = max(last, found[-1])


def shared_fences(history: History) -> Iterator[str]:
    """A fence is given once: no two attempts of a shard share one."""
    users: dict[tuple[int, int], set[tuple[str, int]]] = defaultdict(set)
    for attempt in history.attempts:
        users[attempt.shard, attempt.fence].add((attempt.run, attempt.number))
    for row in history.rows:
        if row.fence and row.attempt:
            users[row.shard, row.fence].add((row.run, row.attempt))
    for (shard, fence), attempts in sorted(users.items()):
        if len(attempts) > 1:
            yield f"fence {fence} of shard {shard} was given to {sorted(attempts)}"


@dataclass(frozen=True, slots=True)
class _Life:
    """When one attempt could do something in a worker process."""

    run: str
    attempt: int
    pid: int
    granted_us: int
    spans: tuple[tuple[int, int], ...]


def double_lives(history: History) -> Iterator[str]:
    """While an attempt was granted, no handler of an earlier one was running anywhere.

    A frozen process runs nothing, and what it does in the first moment after is not held against it.
    """
    lives: dict[str, list[_Life]] = defaultdict(list)
    for life in _lives(history):
        lives[life.run].append(life)
    for run, found in sorted(lives.items()):
        found.sort(key=lambda life: (life.attempt, life.granted_us))
        for index, life in enumerate(found):
            for other in found[index + 1 :]:
                if other.attempt == life.attempt:
                    yield f"attempt {life.attempt} of run {run} was granted to {life.pid} and to {other.pid}"
                    continue
                for begin, end in life.spans:
                    if end > other.granted_us:
                        late = f"{(end - other.granted_us) // 1000} ms" if end < FOREVER_US else "for ever"
                        yield (
                            f"run {run}: attempt {life.attempt} ran on in {life.pid}, {late} after attempt "
                            f"{other.attempt} was granted to {other.pid} (it began at {begin})"
                        )
                        break


def _lives(history: History) -> Iterator[_Life]:
    absences: dict[int, list[Absence]] = defaultdict(list)
    for absence in history.absences:
        absences[absence.pid].append(absence)
    stories: dict[tuple[str, int, int], dict[Event, int]] = defaultdict(dict)
    for seen in history.sightings:
        story = stories[seen.run, seen.attempt, seen.pid]
        story[seen.event] = min(seen.boot_us, story.get(seen.event, FOREVER_US))
    for (run, attempt, pid), story in stories.items():
        granted_us = story.get(Event.GRANTED, story.get(Event.STARTED, FOREVER_US))
        if Event.STARTED not in story:
            if granted_us < FOREVER_US:
                yield _Life(run, attempt, pid, granted_us, ())
            continue
        whole = (story[Event.STARTED], story.get(Event.ENDED, FOREVER_US))
        yield _Life(run, attempt, pid, granted_us, tuple(_without(whole, absences[pid])))


def _without(span: tuple[int, int], absences: Iterable[Absence]) -> Iterator[tuple[int, int]]:
    """The parts of a span in which its process ran and could know the time."""
    begin, end = span
    for absence in sorted(absences, key=lambda each: each.from_us):
        if absence.until_us <= begin or absence.from_us >= end:
            continue
        if begin < absence.from_us:
            yield begin, absence.from_us
        begin = min(FOREVER_US, absence.until_us + THAW_GRACE_US)
        if begin >= end:
            return
    yield begin, end


# --- I4: who lost a shard writes nothing to it --------------------------------------------------------------


def strange_writes(history: History) -> Iterator[str]:
    """A timer writes to a shard only while the shard is its own."""
    counts: dict[Write, int] = defaultdict(int)
    for write in history.writes:
        if write.writer != write.owner:
            counts[write] += 1
    for write, count in counts.items():
        yield (
            f"{write.writer} wrote to shard {write.shard} ({write.what}, {count} times) while it was "
            f"{write.owner or 'nobody'}'s"
        )


def late_epochs(history: History) -> Iterator[str]:
    """Nothing is granted under an epoch after something was granted under a later one of the shard."""
    grants: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for attempt in history.attempts:
        grants[attempt.shard][attempt.fence >> FENCE_GRANT_BITS].append(attempt.lease_us)
    for row in history.rows:
        if row.fence and row.lease_us:
            grants[row.shard][row.fence >> FENCE_GRANT_BITS].append(row.lease_us)
    for shard, by_epoch in sorted(grants.items()):
        latest_us, latest_epoch = 0, 0
        for epoch in sorted(by_epoch):
            first_us = min(by_epoch[epoch])
            if first_us + CLOCK_TOLERANCE_US < latest_us:
                yield (
                    f"shard {shard}: epoch {latest_epoch} granted {(latest_us - first_us) // 1000} ms after "
                    f"epoch {epoch} had begun to"
                )
            if max(by_epoch[epoch]) > latest_us:
                latest_us, latest_epoch = max(by_epoch[epoch]), epoch


# --- I6: an outcome is recorded once, as it was reported ----------------------------------------------------

_RECORDED_AS = {
    "succeeded": AttemptState.SUCCEEDED,
    "failed": AttemptState.FAILED,
    "stopped": AttemptState.CANCELLED,
    "released": AttemptState.RELEASED,
}


def outcomes_not_kept(history: History) -> Iterator[str]:
    """What a worker was told is recorded stands in the rows; and two attempts never succeed for one run."""
    runs = {row.run: row for row in history.runs}
    attempts = {(row.run, row.number): row for row in history.attempts}
    winners: dict[str, set[int]] = defaultdict(set)
    for seen in history.sightings:
        if seen.event is not Event.RECORDED:
            continue
        where = f"attempt {seen.attempt} of run {seen.run} was acknowledged as {seen.outcome}"
        if seen.outcome == "succeeded":
            winners[seen.run].add(seen.attempt)
            row = runs.get(seen.run)
            if row is None:
                yield f"{where}, and the run has no row"
            elif (row.state, row.attempt, row.fence) != (RunState.SUCCEEDED, seen.attempt, seen.fence):
                yield (
                    f"{where} with fence {seen.fence}, and the row says {RunState(row.state).name} by "
                    f"attempt {row.attempt} with fence {row.fence}"
                )
            elif row.result != seen.result:
                yield f"{where} with {seen.result!r}, and the row holds {row.result!r}"
        attempt = attempts.get((seen.run, seen.attempt))
        if attempt is None:
            if seen.outcome != "succeeded" or seen.attempt > 1:
                yield f"{where}, and the attempt has no row"
        elif (attempt.fence, attempt.state) != (seen.fence, _RECORDED_AS[seen.outcome]):
            state = AttemptState(attempt.state).name
            yield f"{where} with fence {seen.fence}, and its row says {state} with fence {attempt.fence}"
    for run, numbers in sorted(winners.items()):
        if len(numbers) > 1:
            yield f"run {run} succeeded in the attempts {sorted(numbers)}"


def outcomes_out_of_nowhere(history: History) -> Iterator[str]:
    """A run that succeeded did so in an attempt that a worker saw through; an acknowledged one was ended."""
    ended = {(seen.run, seen.attempt) for seen in history.sightings if seen.event is Event.ENDED}
    for row in history.runs:
        if row.state == RunState.SUCCEEDED and (row.run, row.attempt) not in ended:
            yield f"run {row.run} succeeded by attempt {row.attempt}, which no worker saw through"


def contradicting_rows(history: History) -> Iterator[str]:
    """A run is its timer row, its lease row, or its end: exactly one of them. Dead letters name the dead."""
    waiting = {row.ref for row in history.timers if row.kind == 2}
    leased = {row.run for row in history.leases}
    for run in sorted(waiting & leased):
        yield f"run {run} waits and is leased"
    for row in history.runs:
        state = RunState(row.state)
        live = (row.run in waiting) + (row.run in leased)
        if state in TERMINAL and live:
            yield f"run {row.run} has ended as {state.name}, and is still waiting or leased"
        if state is RunState.SCHEDULED and not live:
            yield f"run {row.run} is SCHEDULED, and neither waits nor is leased"
        if (state is RunState.DEAD_LETTERED) != (row.run in history.dead_letters):
            yield f"run {row.run} is {state.name}, and its dead letter says the opposite"


def unsettled(history: History) -> Iterator[str]:
    """After the end nothing is leased, and nothing that is due waits."""
    if not history.is_settled:
        return
    for lease in history.leases:
        yield f"attempt {lease.attempt} of run {lease.run} still has its lease"
    for row in history.timers:
        if row.due_us < history.read_us - 2_000_000:
            late_ms = (history.read_us - row.due_us) // 1000
            yield f"{'schedule' if row.kind == 1 else 'run'} {row.ref} has been due for {late_ms} ms"


# --- I10: nothing before its time ---------------------------------------------------------------------------


def starts_before_due(history: History) -> Iterator[str]:
    for seen in history.sightings:
        if seen.event is Event.STARTED and seen.wall_us < seen.due_us - CLOCK_TOLERANCE_US:
            early_us = seen.due_us - seen.wall_us
            yield f"attempt {seen.attempt} of run {seen.run} began {early_us} µs before its due time"
    for row in history.leases:
        if row.lease_us < row.due_us - CLOCK_TOLERANCE_US:
            yield f"run {row.run} was leased {row.due_us - row.lease_us} µs before its due time"


CHECKS: tuple[tuple[str, Callable[[History], Iterator[str]]], ...] = (
    ("I1 an acknowledged run survives", lost_runs),
    ("I1 an acknowledged schedule survives", lost_schedules),
    ("I1 an acknowledged cancel stands", undone_cancels),
    ("I2 an occurrence becomes one run", doubled_occurrences),
    ("I2 no occurrence is passed over in silence", missed_occurrences),
    ("I2 a paused schedule stands still", fired_while_paused),
    ("I3 fences rise", fences_that_fall),
    ("I3 a fence is given once", shared_fences),
    ("I3, I5 one attempt lives at a time", double_lives),
    ("I4 who lost a shard writes nothing", strange_writes),
    ("I4 an old epoch grants nothing", late_epochs),
    ("I6 a recorded outcome is kept", outcomes_not_kept),
    ("I6 an outcome was reported", outcomes_out_of_nowhere),
    ("rows agree", contradicting_rows),
    ("everything settles", unsettled),
    ("I10 nothing before its due time", starts_before_due),
)


def lags_us(history: History, from_us: int = 0, until_us: int = FOREVER_US, attempt: int = 1) -> list[int]:
    """From due to the handler's beginning, sorted; of runs that were due in [from_us, until_us)."""
    return sorted(
        seen.wall_us - seen.due_us
        for seen in history.sightings
        if seen.event is Event.STARTED and seen.attempt == attempt and from_us <= seen.due_us < until_us
    )


def grant_lags_us(history: History, from_us: int, until_us: int) -> list[int]:
    """From due to leased, sorted; of occurrences that were due in [from_us, until_us), so that stood in a
    wheel."""
    return sorted(
        row.lease_us - row.due_us
        for row in history.rows
        if row.schedule and row.attempt == 1 and row.lease_us and from_us <= row.due_us < until_us
    )


def percentile(ordered: Sequence[int], share: float) -> int:
    """The smallest value that is not below `share` (0 to 1) of them. Needs at least one."""
    return ordered[min(len(ordered) - 1, max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1))]


def _instants(pairs: Iterable[tuple[str, int]]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    for schedule, schedule_us in pairs:
        found[schedule].append(schedule_us)
    return {schedule: sorted(instants) for schedule, instants in found.items()}


def _between(ordered: Sequence[int], low: int, high: int) -> Sequence[int]:
    return ordered[bisect_left(ordered, low) : bisect_right(ordered, high)]
