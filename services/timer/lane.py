"""How do due rows become grants, and outcomes become facts? One lane: one write connection, one batch at a
time.

A timer's shards are dealt out over a few lanes, so that while Postgres works on one batch another is being
built; a shard is in one lane, so in one batch at a time. A batch carries what has gathered: outcomes and
expiries first, then occurrences to decide and runs to lease. Nothing in memory changes before Postgres has
said which rows took effect.

When the answer does not come, nobody knows what took effect: the shards of the batch are taken again, and
their leases and rows are read afresh, before anything is believed (design, section 6).
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import structlog

from tickwheel.clock import mono_us, random_bytes
from tickwheel.domain import flags as bits
from tickwheel.domain import job, retry
from tickwheel.domain.decision import DecisionReason
from tickwheel.domain.misfire import MisfireDecision, decide
from tickwheel.domain.run import AttemptState, Cause, RunState
from tickwheel.domain.timer_rows import (
    KIND_SCHEDULE,
    NEVER_US,
    Bools,
    Int32s,
    Int64s,
    TimerRows,
    Uint64s,
)
from tickwheel.errors import StoreUnavailable, TickwheelError
from tickwheel.postgres.timer_store import (
    BatchRefused,
    CommitUnknown,
    Fence,
    Moves,
    Outcomes,
    RunGrants,
    Written,
)
from tickwheel.services.timer import plan
from tickwheel.services.timer.ready import ReadyQueues
from tickwheel.services.timer.session import WorkerSession

if TYPE_CHECKING:
    from tickwheel.services.timer.node import TimerNode

log = structlog.get_logger()

IN_WHEEL: Final = 0
READY: Final = 1
IN_BATCH: Final = 2

CATCH_UP_RUNS_MAX: Final = 5_000
"""Catch-up runs of one batch; what is left of a catch-up goes with the next."""
BACKOFF_LOCKED_US: Final = 50_000
BACKOFF_BUSY_US: Final = 200_000
OUTCOME_TRIES_MAX: Final = 100
LEFT_CREDIT_S: Final = 0.05
BUSY_US: Final = 3_000
"""A lane that wrote so recently is under load."""


_PASSING_STATES: Final = ("40001", "40P01", "55P03", "57014", "53300")
"""Refusals that have nothing to do with the data: the same batch may go through later."""
_NEEDS_NO_TEMPLATE: Final = (AttemptState.SUCCEEDED, AttemptState.CANCELLED)

_COUNTED_FLAGS: Final = bits.OVERLAP_MASK | bits.HAS_PAYLOAD | bits.HOLD_UNKNOWN | bits.NO_DEAD_LETTER


@dataclass(slots=True)
class Ended:
    """Attempts that have ended the same way at the same time, as they came in. `slots` are of the lease
    table."""

    slots: Int64s
    attempt_state: AttemptState
    results: Sequence[bytes | None] | None = None
    result_types: Sequence[str | None] | None = None
    failures: Sequence[job.Failure] | None = None
    not_before_ms: Sequence[int] | None = None
    by_owner: bool = False
    """The owner ended them (lapsed, timed out, cut off): their worker is told that they are over."""
    tries: int = 0

    def __len__(self) -> int:
        return len(self.slots)

    def pick(self, rows: Int64s) -> "Ended":
        """Some of the rows, by number."""
        indexes = rows.tolist()

        def some(values: Sequence[Any] | None) -> list[Any] | None:
            return None if values is None else [values[i] for i in indexes]

        return Ended(
            self.slots[rows],
            self.attempt_state,
            some(self.results),
            some(self.result_types),
            some(self.failures),
            some(self.not_before_ms),
            self.by_owner,
            self.tries,
        )

    def head(self, count: int) -> tuple["Ended", "Ended | None"]:
        """The first `count` rows, and the rest."""
        if count >= len(self):
            return self, None
        everything = np.arange(len(self))
        return self.pick(everything[:count]), self.pick(everything[count:])


@dataclass(slots=True)
class Batch:
    """What is on its way to Postgres, with what must be remembered until the answer."""

    now_us: int
    clock_us: int
    outcomes: Outcomes | None = None
    outcome_slots: Int64s = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    outcome_handles: Int64s = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """The same leases by handle: a shard that is lost meanwhile frees its slots."""
    by_owner: Bools = field(default_factory=lambda: np.empty(0, dtype=np.bool_))
    moves: Moves | None = None
    move_handles: Int64s = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    move_sessions: Int32s = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    grants: RunGrants | None = None
    grant_handles: Int64s = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    grant_sessions: Int32s = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    sessions: list[WorkerSession] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)

    def granted_tokens(self) -> set[str]:
        """Of the leases that it makes, if it is committed."""
        tokens: set[str] = set()
        if self.moves is not None:
            leased = self.moves.action == 1
            tokens.update(hex_ids(self.moves.token_hi[leased], self.moves.token_lo[leased]))
        if self.grants is not None:
            tokens.update(hex_ids(self.grants.token_hi, self.grants.token_lo))
        return tokens

    @property
    def shards(self) -> set[int]:
        found: set[int] = set()
        for part in (self.outcomes, self.moves, self.grants):
            if part is not None:
                found.update(np.unique(part.shard).tolist())
        return found

    @property
    def row_count(self) -> int:
        return sum(len(p.shard) for p in (self.outcomes, self.moves, self.grants) if p is not None)


class Lane:
    """One of a timer's write pipelines."""

    def __init__(self, number: int, node: "TimerNode") -> None:
        self.number = number
        self._node = node
        self.ready = ReadyQueues()
        self._ended: deque[Ended] = deque()
        self._settle: deque[Int64s] = deque()
        self._wake = asyncio.Event()
        self._turn = 0
        self._carry = 0.5
        self._busy_until_us = 0
        self.idle = asyncio.Event()
        """Set while no batch is being built or on its way."""
        self.idle.set()

    @property
    def ended_count(self) -> int:
        return sum(len(ended) for ended in self._ended)

    def wake(self) -> None:
        self._wake.set()

    # What comes in.

    def push_ready(self, handles: Int64s) -> None:
        """Entries of this lane's shards are due and planned."""
        entries = self._node.entries
        slots = entries.slot(handles)
        entries.state[slots] = READY
        self.ready.push(
            handles,
            entries.route[slots],
            entries.tenant[slots],
            entries.priority[slots],
            entries.due_us[slots],
        )
        self._wake.set()

    def push_ended(self, ended: Ended) -> None:
        """Attempts have ended; their leases are ENDING and in no other batch."""
        self._ended.append(ended)
        self._wake.set()

    def push_settle(self, handles: Int64s) -> None:
        """Occurrences that nobody took in time: they become waiting runs."""
        self._settle.append(handles)
        self._wake.set()

    # The loop.

    async def run(self) -> None:
        """Writes batches until it is cancelled."""
        failures = 0
        while True:
            await self._wake.wait()
            self._wake.clear()
            # Under load a little waiting makes larger batches; a lane that stood idle goes at once.
            if mono_us() - self._busy_until_us < BUSY_US and not self._has_much():
                await asyncio.sleep(self._node.grant_batch_wait_s)
            try:
                while await self._write_one():
                    failures = 0
                    self._busy_until_us = mono_us()
            except StoreUnavailable as error:
                failures += 1
                if failures == 1:
                    log.warning("lane_waits_for_postgres", lane=self.number, reason=error.reason)
                await asyncio.sleep(min(0.05 * 2 ** min(failures, 4), 0.5))
                self._wake.set()

    def _has_much(self) -> bool:
        return self.ended_count + self.ready.depth() > 200

    async def _write_one(self) -> bool:
        if self._node.halted:
            return False
        self.idle.clear()
        try:
            return await self._write_batch()
        finally:
            self.idle.set()

    async def _write_batch(self) -> bool:
        node = self._node
        batch = Batch(node.clock.now_us(), mono_us())
        try:
            await self._build(batch)
        except (StoreUnavailable, CommitUnknown, BatchRefused) as error:
            self._put_back(batch)
            raise StoreUnavailable("Postgres", str(error)) from error
        if not batch.row_count:
            return False
        await self._write(batch)
        return True

    async def _write(self, batch: Batch) -> None:
        node = self._node
        shards = np.array(sorted(batch.shards & node.epochs.keys()), dtype=np.int16)
        fence = Fence(shards, np.array([node.epochs[s] for s in shards.tolist()], dtype=np.int64))
        details = asyncio.create_task(self._load_details(batch))
        began = mono_us()
        try:
            written = await node.store.write(
                self.number, fence, batch.now_us, batch.outcomes, batch.moves, batch.grants
            )
        except StoreUnavailable:
            details.cancel()
            self._put_back(batch)
            raise
        except CommitUnknown as error:
            details.cancel()
            log.warning("commit_unknown", lane=self.number, rows=batch.row_count, reason=error.reason)
            self._give_credit_back(batch)
            await node.ownership.retake(self, batch, shards.tolist())
            return
        except BatchRefused as error:
            details.cancel()
            await self._refused(batch, error)
            return
        node.metrics.committed(batch.row_count, mono_us() - began)
        if written.lost:
            node.ownership.lost(written.lost, fence)
        await self._apply(batch, written, details)

    # Building.

    async def _build(self, batch: Batch) -> None:
        await self._take_ended(batch)
        room = self._node.grant_batch_max
        handles, sessions = self._pick(batch, room)
        settle = self._take_settle()
        if len(handles) or len(settle):
            await self._take_due(batch, handles, sessions, settle)

    def _pick(self, batch: Batch, room: int) -> tuple[Int64s, Int32s]:
        """Due rows for workers with credit: round about the sessions, as fair as the credit allows."""
        node = self._node
        sessions = [s for s in node.sessions.values() if s.credit > 0]
        batch.sessions = sessions
        if batch.clock_us < node.grants_from_mono_us:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int32)
        if not sessions or not self.ready.depth():
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int32)
        self._turn = (self._turn + 1) % len(sessions)
        order = list(range(self._turn, len(sessions))) + list(range(self._turn))
        parts: list[Int64s] = []
        owners: list[int] = []
        share = -(-min(self.ready.depth(), room) // len(sessions))
        parts_left = [self._part_of(session) for session in sessions]
        for limit in (share, room):
            for index in order:
                session = sessions[index]
                want = min(session.credit, room, limit, parts_left[index])
                if want <= 0:
                    continue
                taken = self.ready.take(want, session.routes, session.tenants, batch.now_us)
                if not len(taken):
                    continue
                taken = taken[node.entries.alive(taken)]
                session.reserve(len(taken))
                parts_left[index] -= len(taken)
                parts.append(taken)
                owners.extend([index] * len(taken))
                room -= len(taken)
            if room <= 0 or not self.ready.depth():
                break
        if not parts:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int32)
        return np.concatenate(parts), np.array(owners, dtype=np.int32)

    def _part_of(self, session: WorkerSession) -> int:
        """How much of a session's credit this lane may use now: what waits longest goes first in all lanes
        together, so where credit is scarce it is dealt out by what waits in each."""
        lanes = self._node.lanes
        credit = session.credit
        if credit >= sum(lane.ready.depth() for lane in lanes):
            return credit
        mine = self._waits_for(session)
        others = sum(lane._waits_for(session) for lane in lanes if lane is not self)
        part, self._carry = fair_part(credit, mine, others, self._carry)
        if part < min(credit, mine):
            # The others may be held up: what they leave is looked at again.
            asyncio.get_running_loop().call_later(LEFT_CREDIT_S, self._wake.set)
        return part

    def _waits_for(self, session: WorkerSession) -> int:
        depth = self.ready.depth
        if session.tenants is None:
            return sum(depth(route) for route in session.routes)
        return sum(depth(route, tenant) for route in session.routes for tenant in session.tenants)

    def _take_settle(self) -> Int64s:
        if not self._settle:
            return np.empty(0, dtype=np.int64)
        handles = np.concatenate(list(self._settle))
        self._settle.clear()
        entries = self._node.entries
        handles = handles[entries.alive(handles)]
        waiting: Int64s = handles[entries.state[entries.slot(handles)] == READY]
        return waiting

    async def _take_due(self, batch: Batch, handles: Int64s, sessions: Int32s, settle: Int64s) -> None:
        node = self._node
        entries = node.entries
        if len(settle):
            # A row that was just picked for a worker needs no settling.
            settle = np.setdiff1d(settle, handles)
            self.ready.discard(settle)
        both = np.concatenate([handles, settle])
        owner = np.concatenate([sessions, np.full(len(settle), -1, dtype=np.int32)])
        slots = entries.slot(both)
        entries.state[slots] = IN_BATCH
        batch.move_handles, batch.move_sessions = both, owner  # For `_put_back`, should the next line fail.
        await node.catalog.ensure_definitions(
            np.unique(entries.trigger_id[slots]).tolist(), np.unique(entries.template_id[slots]).tolist()
        )
        await node.history.note_lease(node.catalog.lease_ms_max)
        alive = entries.alive(both)
        if not alive.all():
            self._give_back(batch, owner[~alive])
            both, owner, slots = both[alive], owner[alive], slots[alive]
        both, owner, slots = self._without_broken_templates(batch, both, owner, slots)
        is_schedule = entries.kind[slots] == KIND_SCHEDULE
        await self._take_moves(batch, both[is_schedule], owner[is_schedule])
        self._take_grants(batch, both[~is_schedule], owner[~is_schedule])

    def _without_broken_templates(
        self, batch: Batch, handles: Int64s, owner: Int32s, slots: Int64s
    ) -> tuple[Int64s, Int32s, Int64s]:
        entries = self._node.entries
        templates = self._node.catalog.templates
        broken = [
            key
            for key in np.unique(entries.template_id[slots]).tolist()
            if isinstance(templates.get(key), Exception)
        ]
        if not broken:
            return handles, owner, slots
        bad = np.isin(entries.template_id[slots], broken)
        self._give_back(batch, owner[bad])
        self._node.set_aside(handles[bad], [str(templates[broken[0]])] * int(bad.sum()))
        return handles[~bad], owner[~bad], slots[~bad]

    async def _take_moves(self, batch: Batch, handles: Int64s, owner: Int32s) -> None:
        """Occurrences: each is decided now, one way or another."""
        node = self._node
        entries = node.entries
        if not len(handles):
            batch.move_handles, batch.move_sessions = handles, owner
            return
        slots = entries.slot(handles)
        order = np.lexsort((entries.ref_lo[slots], entries.ref_hi[slots], entries.shard[slots]))
        handles, owner, slots = handles[order], owner[order], slots[order]
        rows = entries.rows(handles)
        count = len(rows)
        overlap = rows.flags & bits.OVERLAP_MASK
        leased = node.leases.busy_mask(rows.ref_lo)
        action = np.where(owner >= 0, 1, 2).astype(np.int16)
        exclusive = (overlap == plan.OVERLAP_SKIP) | (overlap == 2)
        skipped = leased & (overlap == plan.OVERLAP_SKIP)
        action[leased & (overlap > plan.OVERLAP_SKIP) & (overlap < plan.OVERLAP_ALLOW_ALL)] = 2
        action[skipped] = 0
        late = batch.now_us - rows.due_us > rows.misfire_ms.astype(np.int64) * 1_000
        spent = rows.countdown == 0
        action[spent] = 0
        moves = self._moves(batch, rows, action, exclusive, owner, slots)
        self._explain(moves, skipped & ~spent & ~late, DecisionReason.OVERLAP)
        self._explain(moves, spent & ~late, DecisionReason.COMPLETED)
        self._skip_overtaken(batch, moves, rows, ~late & ~spent)
        deferred = np.zeros(count, dtype=np.bool_)
        if late.any():
            deferred = await self._catch_up(batch, moves, rows, late & ~spent)
        released = (action != 1) | (moves.action != 1)
        self._give_back(batch, owner[released & (owner >= 0)])
        owner = np.where(released, np.int32(-1), owner)
        if deferred.any():
            self._return_ready(handles[deferred])
            keep = ~deferred
            moves = _pick_moves(moves, keep)
            handles, owner = handles[keep], owner[keep]
        batch.moves, batch.move_handles, batch.move_sessions = moves, handles, owner

    def _moves(
        self,
        batch: Batch,
        rows: TimerRows,
        action: Any,
        exclusive: Bools,
        owner: Int32s,
        slots: Int64s,
    ) -> Moves:
        node = self._node
        entries = node.entries
        count = len(rows)
        random = np.frombuffer(random_bytes(24 * count), dtype=np.uint64)
        workers = np.array([s.worker_no for s in batch.sessions] + [0], dtype=np.int32)
        cause = np.int32(Cause.SCHEDULED << bits.CAUSE_SHIFT)
        return Moves(
            shard=rows.shard,
            ref_hi=rows.ref_hi,
            ref_lo=rows.ref_lo,
            due_us=rows.due_us,
            version=rows.version,
            decided_us=rows.decided_us,
            next_due_us=entries.next_due_us[slots],
            next_schedule_us=entries.next_schedule_us[slots],
            new_decided_us=rows.schedule_time_us.copy(),
            run_count=(action > 0).astype(np.int32),
            action=action,
            exclusive=exclusive,
            run_hi=plan.run_id_heads(batch.now_us, rows.shard),
            run_lo=random[:count],
            fence=plan.number_within_shards(rows.shard, node.fences),
            token_hi=random[count : 2 * count],
            token_lo=random[2 * count :],
            worker=workers[owner],
            lease_ms=self._lease_ms(rows.template_id),
            flags=(rows.flags & _COUNTED_FLAGS) | cause,
        )

    def _lease_ms(self, template_ids: Int64s) -> Int32s:
        templates = self._node.catalog.templates
        distinct, inverse = np.unique(template_ids, return_inverse=True)
        values = []
        for key in distinct.tolist():
            template = templates[key]
            assert isinstance(template, job.JobTemplate)
            values.append(template.lease_ms)
        return np.array(values, dtype=np.int32)[inverse]

    def _explain(self, moves: Moves, mask: Bools, reason: DecisionReason) -> None:
        for row in np.flatnonzero(mask).tolist():
            schedule_us = int(moves.new_decided_us[row])
            moves.why_of.append(row)
            moves.why_from_us.append(schedule_us)
            moves.why_until_us.append(schedule_us)
            moves.why_count.append(1)
            moves.why_reason.append(int(reason))

    def _skip_overtaken(self, batch: Batch, moves: Moves, rows: TimerRows, mask: Bools) -> None:
        """Under SKIP, the occurrences that came due while this one waited are decided with it, as one
        range."""
        behind = np.flatnonzero(mask & (moves.next_schedule_us <= batch.now_us))
        if not len(behind):
            return
        found = plan.overtaken(
            rows.pick(behind), moves.next_schedule_us[behind], self._node.catalog.triggers, batch.now_us
        )
        moves.next_schedule_us[behind] = found.following_us
        for place in np.flatnonzero(found.count).tolist():
            row = int(behind[place])
            moves.next_due_us[row] = found.following_us[place]
            moves.new_decided_us[row] = found.last_us[place]
            moves.why_of.append(row)
            moves.why_from_us.append(int(found.first_us[place]))
            moves.why_until_us.append(int(found.last_us[place]))
            moves.why_count.append(int(found.count[place]))
            moves.why_reason.append(int(DecisionReason.OVERLAP))

    async def _catch_up(self, batch: Batch, moves: Moves, rows: TimerRows, late: Bools) -> Bools:
        """Rows found later than their misfire threshold: what was missed runs, or not, as their policy says.

        Returns the rows that this batch has no room for.
        """
        node = self._node
        deferred = np.zeros(len(rows), dtype=np.bool_)
        picked = np.flatnonzero(late)
        rules = await node.misfire_rules(rows.pick(picked))
        room = CATCH_UP_RUNS_MAX
        for place, row in enumerate(picked.tolist()):
            if room <= 0:
                deferred[row] = True
                continue
            trigger = node.catalog.triggers[int(rows.trigger_id[row])]
            if isinstance(trigger, Exception):
                continue
            decision = decide(trigger, int(rows.decided_us[row]), batch.now_us, rules[place])
            if not decision.is_catch_up:
                continue
            room -= max(1, self._add_catch_up(moves, rows, row, decision))
            if place % 200 == 199:
                await asyncio.sleep(0)
        return deferred

    def _add_catch_up(self, moves: Moves, rows: TimerRows, row: int, decision: MisfireDecision) -> int:
        runs = decision.runs_us
        countdown = int(rows.countdown[row])
        if countdown >= 0:
            runs = runs[:countdown]
        moves.action[row] = 0
        moves.run_count[row] = len(runs)
        moves.new_decided_us[row] = decision.decided_us
        exhausted = countdown >= 0 and countdown <= len(runs)
        next_us = NEVER_US if decision.next_us is None or exhausted else decision.next_us
        moves.next_schedule_us[row] = next_us
        moves.next_due_us[row] = next_us
        flags = (int(rows.flags[row]) & _COUNTED_FLAGS) | (Cause.CATCH_UP << bits.CAUSE_SHIFT)
        head = int(plan.run_id_heads(self._node.clock.now_us(), rows.shard[row : row + 1])[0])
        random = np.frombuffer(random_bytes(8 * len(runs)), dtype=np.uint64).tolist()
        for schedule_us, low in zip(runs, random, strict=True):
            moves.more_of.append(row)
            moves.more_run_hi.append(head)
            moves.more_run_lo.append(low)
            moves.more_schedule_us.append(schedule_us)
            moves.more_flags.append(flags)
        for dropped in decision.dropped:
            moves.why_of.append(row)
            moves.why_from_us.append(dropped.first_us)
            moves.why_until_us.append(dropped.last_us)
            moves.why_count.append(dropped.count)
            moves.why_reason.append(int(dropped.reason))
        return len(runs)

    def _take_grants(self, batch: Batch, handles: Int64s, owner: Int32s) -> None:
        """Runs that wait: each is leased, unless its schedule's overlap policy holds it back."""
        node = self._node
        entries = node.entries
        slots = entries.slot(handles)
        flags = entries.flags[slots]
        overlap = flags & bits.OVERLAP_MASK
        alone = (
            (entries.schedule_lo[slots] != 0)
            & (overlap > 0)
            & (overlap != plan.OVERLAP_ALLOW_ALL)
            & (flags & bits.IGNORE_OVERLAP == 0)
        )
        if alone.any():
            schedules = entries.schedule_lo[slots]
            allowed = plan.first_of_each(schedules, alone) & ~(alone & node.leases.busy_mask(schedules))
            self._give_back(batch, owner[~allowed])
            self._node.postpone(handles[~allowed], BACKOFF_BUSY_US)
            handles, owner, slots = handles[allowed], owner[allowed], slots[allowed]
        if not len(handles):
            return
        order = np.lexsort((entries.ref_lo[slots], entries.ref_hi[slots], entries.shard[slots]))
        handles, owner, slots = handles[order], owner[order], slots[order]
        count = len(handles)
        random = np.frombuffer(random_bytes(16 * count), dtype=np.uint64)
        workers = np.array([s.worker_no for s in batch.sessions] + [0], dtype=np.int32)
        shard = entries.shard[slots]
        batch.grants = RunGrants(
            shard=shard,
            ref_hi=entries.ref_hi[slots],
            ref_lo=entries.ref_lo[slots],
            due_us=entries.due_us[slots],
            attempt=entries.attempt[slots],
            fence=plan.number_within_shards(shard, node.fences),
            token_hi=random[:count],
            token_lo=random[count:],
            worker=workers[owner],
            lease_ms=self._lease_ms(entries.template_id[slots]),
        )
        batch.grant_handles = handles
        batch.grant_sessions = owner

    async def _take_ended(self, batch: Batch) -> None:
        if not self._ended:
            return
        node = self._node
        leases = node.leases
        taken: list[Ended] = []
        room = node.outcome_batch_max
        while self._ended and room > 0:
            head, rest = self._ended.popleft().head(room)
            if rest is not None:
                self._ended.appendleft(rest)
            taken.append(head)
            room -= len(head)
        batch.ended = taken
        judged = [e for e in taken if e.attempt_state not in _NEEDS_NO_TEMPLATE]
        if judged:
            await node.catalog.ensure_definitions(
                [], np.unique(leases.template[np.concatenate([e.slots for e in judged])]).tolist()
            )
        batch.outcome_slots = np.concatenate([e.slots for e in taken])
        batch.outcomes = self._outcomes(batch, taken)
        order = np.lexsort((batch.outcomes.run_lo, batch.outcomes.run_hi, batch.outcomes.shard))
        batch.outcomes = _pick_columns(batch.outcomes, order)
        batch.outcome_slots = batch.outcome_slots[order]
        batch.outcome_handles = leases.handles(batch.outcome_slots)
        batch.by_owner = np.repeat([e.by_owner for e in taken], [len(e) for e in taken])[order]

    def _outcomes(self, batch: Batch, taken: Sequence[Ended]) -> Outcomes:
        leases = self._node.leases
        slots = batch.outcome_slots
        count = len(slots)
        attempt_state = np.empty(count, dtype=np.int16)
        run_state = np.empty(count, dtype=np.int16)
        next_us = np.zeros(count, dtype=np.int64)
        results: list[bytes | None] | None = None
        result_types: list[str | None] | None = None
        failures: list[bytes | None] | None = None
        fingerprints: list[str | None] | None = None
        at = 0
        for ended in taken:
            part = slice(at, at + len(ended))
            attempt_state[part] = ended.attempt_state
            if ended.attempt_state == AttemptState.SUCCEEDED:
                run_state[part] = RunState.SUCCEEDED
                if ended.results is not None:
                    if results is None or result_types is None:
                        results, result_types = [None] * count, [None] * count
                    results[part] = ended.results
                    result_types[part] = ended.result_types or [None] * len(ended)
            elif ended.attempt_state == AttemptState.CANCELLED:
                run_state[part] = RunState.CANCELLED
            else:
                if failures is None or fingerprints is None:
                    failures, fingerprints = [None] * count, [None] * count
                self._judge(batch, ended, at, run_state, next_us, failures, fingerprints)
            at += len(ended)
        return Outcomes(
            shard=leases.shard[slots],
            run_hi=leases.run_hi[slots],
            run_lo=leases.run_lo[slots],
            token_hi=leases.token_hi[slots],
            token_lo=leases.token_lo[slots],
            attempt_state=attempt_state,
            run_state=run_state,
            next_us=next_us,
            row_exists=leases.flags[slots] & bits.RUN_ROW != 0,
            results=results,
            result_types=result_types,
            failures=failures,
            fingerprints=fingerprints,
        )

    def _judge(
        self,
        batch: Batch,
        ended: Ended,
        at: int,
        run_state: Any,
        next_us: Int64s,
        failures: list[bytes | None],
        fingerprints: list[str | None],
    ) -> None:
        """What follows attempts that did not succeed: another one, a dead letter, or a person's decision."""
        node = self._node
        leases = node.leases
        for row, slot in enumerate(ended.slots.tolist(), at):
            template = node.catalog.templates.get(int(leases.template[slot]))
            if not isinstance(template, job.JobTemplate):
                template = job.JobTemplate(kind="unknown")
            failure = ended.failures[row - at] if ended.failures is not None else job.Failure()
            spent = int(leases.spent[slot])
            if ended.attempt_state == AttemptState.RELEASED:
                delay_ms = ended.not_before_ms[row - at] if ended.not_before_ms is not None else 0
                run_state[row] = RunState.SCHEDULED
                next_us[row] = batch.now_us + delay_ms * 1_000
                continue
            failures[row] = job.encode_failure(failure)
            fingerprints[row] = failure.fingerprint
            unknown = ended.attempt_state == AttemptState.OUTCOME_UNKNOWN
            if unknown and template.on_unknown_outcome == job.UnknownOutcomePolicy.HOLD:
                run_state[row] = RunState.HELD
                next_us[row] = NEVER_US
            elif retry.may_retry(template.retry, spent + 1, failure):
                unit = int.from_bytes(random_bytes(4), "big") / 2**32
                delay_ms = 0 if unknown else retry.retry_delay_ms(template.retry, spent + 1, failure, unit)
                run_state[row] = RunState.SCHEDULED
                next_us[row] = batch.now_us + delay_ms * 1_000
            elif leases.flags[slot] & bits.NO_DEAD_LETTER:
                run_state[row] = RunState.FAILED
            else:
                run_state[row] = RunState.DEAD_LETTERED

    # Details: what goes down the stream beside what Postgres checks.

    async def _load_details(self, batch: Batch) -> dict[int, tuple[Any, ...]]:
        """Heads of schedules into the catalog; rows of runs, by the low half of their ids."""
        node = self._node
        entries = node.entries
        details: dict[int, tuple[Any, ...]] = {}
        tenants: set[int] = set()
        if batch.moves is not None:
            leased = batch.moves.action == 1
            if leased.any():
                await node.catalog.ensure_heads(
                    batch.moves.ref_hi[leased], batch.moves.ref_lo[leased], batch.moves.version[leased]
                )
            tenants.update(np.unique(entries.tenant[entries.slot(batch.move_handles)]).tolist())
        if batch.grants is not None:
            slots = entries.slot(batch.grant_handles)
            tenants.update(np.unique(entries.tenant[slots]).tolist())
            born = entries.schedule_lo[slots] != 0
            if born.any():
                named = slots[born]
                await node.catalog.ensure_heads(
                    entries.schedule_hi[named], entries.schedule_lo[named], entries.version[named]
                )
            flags = entries.flags[slots]
            own = (flags & bits.OWN_PAYLOAD != 0) & (flags & bits.HAS_PAYLOAD != 0)
            chosen = slots[own | (flags & (bits.HAS_HISTORY | bits.TRACED) != 0)]
            if len(chosen):
                for row in await node.store.load_run_details(
                    entries.shard[chosen], entries.ref_hi[chosen], entries.ref_lo[chosen]
                ):
                    details[row[0].int & 0xFFFFFFFFFFFFFFFF] = row
        await node.catalog.ensure_tenants(tenants)
        return details

    # The answer.

    async def _apply(self, batch: Batch, written: Written, details: "asyncio.Task[dict[int, Any]]") -> None:
        node = self._node
        born: list[tuple[Any, Uint64s, Uint64s]] = []
        if batch.outcomes is not None:
            self._apply_outcomes(batch, batch.outcomes, written, born)
        try:
            found = await details
        except TickwheelError as error:
            # Committed, and not to be sent: they are handed back at once, at no cost in attempts.
            log.warning("grant_details_missing", lane=self.number, reason=str(error))
            found = None
        if batch.moves is not None:
            self._apply_moves(batch, batch.moves, written, born, found)
        if batch.grants is not None:
            self._apply_grants(batch, batch.grants, written, found)
        if born:
            node.refresh_soon(
                np.concatenate([part[0] for part in born]),
                np.concatenate([part[1] for part in born]),
                np.concatenate([part[2] for part in born]),
            )

    def _apply_outcomes(
        self, batch: Batch, outcomes: Outcomes, written: Written, born: list[tuple[Any, Uint64s, Uint64s]]
    ) -> None:
        node = self._node
        leases = node.leases
        slots = batch.outcome_slots
        here = leases.held(batch.outcome_handles)
        done = np.zeros(len(slots), dtype=np.bool_)
        done[written.outcomes] = True
        undecided = here & ~done
        if undecided.any():
            node.doubtful_outcomes(self, slots[undecided], batch.ended)
        again = done & ((outcomes.run_state == RunState.SCHEDULED) | (outcomes.run_state == RunState.HELD))
        if again.any():
            born.append((outcomes.shard[again], outcomes.run_hi[again], outcomes.run_lo[again]))
        told = here & done
        node.streams.tell_recorded(slots[told & ~batch.by_owner])
        if batch.by_owner.any():
            node.streams.tell_lapsed(slots[told & batch.by_owner], "the lease was ended by its owner")
        if node.traces is not None:
            failures = outcomes.failures
            node.traces.recorded(
                slots[told],
                outcomes.attempt_state[told],
                outcomes.run_state[told],
                None if failures is None else [failures[row] for row in np.flatnonzero(told).tolist()],
                batch.now_us,
            )
        leases.remove(slots[told])
        node.metrics.outcomes(outcomes.attempt_state[done], outcomes.run_state[done])

    def _apply_moves(
        self,
        batch: Batch,
        moves: Moves,
        written: Written,
        born: list[tuple[Any, Uint64s, Uint64s]],
        found: dict[int, Any] | None,
    ) -> None:
        node = self._node
        entries = node.entries
        handles = batch.move_handles
        done = np.zeros(len(handles), dtype=np.bool_)
        done[written.moves] = True
        busy = np.zeros(len(handles), dtype=np.bool_)
        busy[written.busy] = True
        alive = entries.alive(handles)
        self._not_written(batch, handles[~done & alive], batch.move_sessions[~done])
        granted = done & (moves.action == 1) & ~busy
        self._give_back(batch, batch.move_sessions[done & busy])
        waiting = done & (moves.action == 2) & ~busy
        if waiting.any():
            born.append((moves.shard[waiting], moves.run_hi[waiting], moves.run_lo[waiting]))
        if moves.more_of:
            chosen = np.flatnonzero(done[np.array(moves.more_of)])
            of = np.array(moves.more_of)[chosen]
            born.append(
                (
                    moves.shard[of],
                    np.array(moves.more_run_hi, dtype=np.uint64)[chosen],
                    np.array(moves.more_run_lo, dtype=np.uint64)[chosen],
                )
            )
        rows = np.flatnonzero(granted)
        if len(rows):
            slots = entries.slot(handles[rows])
            self._lease(
                batch,
                batch.move_sessions[rows],
                {
                    "shard": moves.shard[rows],
                    "run_hi": moves.run_hi[rows],
                    "run_lo": moves.run_lo[rows],
                    "token_hi": moves.token_hi[rows],
                    "token_lo": moves.token_lo[rows],
                    "fence": moves.fence[rows],
                    "attempt": 1,
                    "schedule_hi": moves.ref_hi[rows],
                    "schedule_lo": moves.ref_lo[rows],
                    "version": moves.version[rows],
                    "template": entries.template_id[slots],
                    "tenant": entries.tenant[slots],
                    "route": entries.route[slots],
                    "flags": moves.flags[rows],
                    "schedule_us": entries.schedule_time_us[slots],
                    "due_us": moves.due_us[rows],
                    "priority": entries.priority[slots],
                    "worker": moves.worker[rows],
                },
                moves.lease_ms[rows],
                found,
            )
        node.metrics.decided(moves, done, busy)
        self._advance(handles[done & alive], moves, np.flatnonzero(done & alive), busy)

    def _advance(self, handles: Int64s, moves: Moves, rows: Int64s, busy: Bools) -> None:
        """The entries of decided occurrences go on to their next one, or leave the memory."""
        node = self._node
        entries = node.entries
        slots = entries.slot(handles)
        entries.due_us[slots] = moves.next_due_us[rows]
        entries.schedule_time_us[slots] = moves.next_schedule_us[rows]
        entries.decided_us[slots] = moves.new_decided_us[rows]
        countdown = entries.countdown[slots]
        counted = (countdown > 0) & ~busy[rows]
        entries.countdown[slots] = np.where(
            counted, np.maximum(countdown - moves.run_count[rows], 0), countdown
        ).astype(np.int32)
        entries.state[slots] = IN_WHEEL
        entries.tries[slots] = 0
        soon = moves.next_due_us[rows] < node.loader.limits_us(entries.shard[slots], entries.tenant[slots])
        node.wheel.insert(entries.due_us[slots[soon]], handles[soon])
        entries.free(handles[~soon])
        node.wake_ticker()

    def _apply_grants(
        self, batch: Batch, grants: RunGrants, written: Written, found: dict[int, Any] | None
    ) -> None:
        node = self._node
        entries = node.entries
        handles = batch.grant_handles
        done = np.zeros(len(handles), dtype=np.bool_)
        done[written.grants] = True
        alive = entries.alive(handles)
        self._not_written(batch, handles[~done & alive], batch.grant_sessions[~done])
        rows = np.flatnonzero(done & alive)
        if len(rows):
            slots = entries.slot(handles[rows])
            self._lease(
                batch,
                batch.grant_sessions[rows],
                {
                    "shard": grants.shard[rows],
                    "run_hi": grants.ref_hi[rows],
                    "run_lo": grants.ref_lo[rows],
                    "token_hi": grants.token_hi[rows],
                    "token_lo": grants.token_lo[rows],
                    "fence": grants.fence[rows],
                    "attempt": grants.attempt[rows] + 1,
                    "schedule_hi": entries.schedule_hi[slots],
                    "schedule_lo": entries.schedule_lo[slots],
                    "version": entries.version[slots],
                    "template": entries.template_id[slots],
                    "tenant": entries.tenant[slots],
                    "route": entries.route[slots],
                    "flags": entries.flags[slots],
                    "spent": entries.countdown[slots],
                    "schedule_us": entries.schedule_time_us[slots],
                    "due_us": grants.due_us[rows],
                    "priority": entries.priority[slots],
                    "worker": grants.worker[rows],
                },
                grants.lease_ms[rows],
                found,
            )
        entries.free(handles[done])

    def _lease(
        self,
        batch: Batch,
        owner: Int32s,
        columns: dict[str, Any],
        lease_ms: Int32s,
        found: dict[int, Any] | None,
    ) -> None:
        """Committed grants: into the lease table, and down the streams."""
        node = self._node
        ttl_us = lease_ms.astype(np.int64) * 1_000
        streams = np.array([s.number for s in batch.sessions], dtype=np.int32)[owner]
        columns |= {
            "ttl_us": ttl_us,
            "lease_us": batch.now_us,
            "deadline_mono_us": batch.clock_us + ttl_us,
            "attempt_deadline_us": batch.now_us + self._attempt_us(columns["template"]),
            "stream": streams,
            "sequence": np.int64(1) << np.int64(62),
            "granted_here": True,
        }
        text = hex_ids(columns["token_hi"], columns["token_lo"])
        slots = node.leases.add(text, columns)
        node.watch_leases(slots)
        node.metrics.granted(batch.now_us - columns["due_us"])
        for index in np.unique(owner).tolist():
            session = batch.sessions[index]
            chosen = slots[owner == index]
            if found is None or session.closed:
                session.give_back(len(chosen))
                node.hand_back(chosen)
                continue
            for chunk in node.frames.grants(chosen, batch.clock_us, found):
                session.add_grants(chunk)
            node.wake_session(session)

    def _attempt_us(self, template_ids: Int64s) -> Int64s:
        templates = self._node.catalog.templates
        distinct, inverse = np.unique(template_ids, return_inverse=True)
        values = []
        for key in distinct.tolist():
            template = templates[key]
            assert isinstance(template, job.JobTemplate)
            values.append((template.timeouts.attempt_ms_max or 10 * 365 * 86_400_000) * 1_000)
        return np.array(values, dtype=np.int64)[inverse]

    # What did not go through.

    def _not_written(self, batch: Batch, handles: Int64s, owner: Int32s) -> None:
        """Stale, or locked by a coordinator just now: the rows are read again, which tells."""
        self._give_back(batch, owner)
        if len(handles):
            self._node.recheck(handles)

    def _give_back(self, batch: Batch, owner: Int32s) -> None:
        for index, count in zip(*np.unique(owner[owner >= 0], return_counts=True), strict=True):
            batch.sessions[int(index)].give_back(int(count))

    def _give_credit_back(self, batch: Batch) -> None:
        self._give_back(batch, batch.move_sessions)
        self._give_back(batch, batch.grant_sessions)

    def _return_ready(self, handles: Int64s) -> None:
        handles = handles[self._node.entries.alive(handles)]
        if len(handles):
            self.push_ready(handles)

    def _put_back(self, batch: Batch) -> None:
        """Nothing was sent: all is as it was."""
        self._give_credit_back(batch)
        self._return_ready(np.unique(np.concatenate([batch.move_handles, batch.grant_handles])))
        if batch.outcomes is None:
            self._ended.extendleft(reversed(batch.ended))
            return
        # A half of a refused batch has only some of the rows.
        waiting = batch.outcome_slots[self._node.leases.held(batch.outcome_handles)]
        self.requeue_ended(batch.ended, waiting)

    def requeue_ended(self, ended: Sequence[Ended], slots: Int64s) -> None:
        """Those rows of `ended` whose leases are in `slots` wait again, before all others."""
        for part in reversed(ended):
            chosen = np.flatnonzero(np.isin(part.slots, slots))
            if len(chosen):
                self._ended.appendleft(part.pick(chosen))
        self._wake.set()

    def drop_ended(self, slots: Int64s) -> None:
        """The leases in `slots` are another owner's now: what waits for them here is not ours to write."""
        kept = deque(part.pick(np.flatnonzero(~np.isin(part.slots, slots))) for part in self._ended)
        self._ended = deque(part for part in kept if len(part))

    async def _refused(self, batch: Batch, error: BatchRefused) -> None:
        """A batch that fails on data is halved until the culprit is alone (I11)."""
        log.warning(
            "batch_refused",
            lane=self.number,
            rows=batch.row_count,
            sqlstate=error.sqlstate,
            reason=error.reason,
        )
        if error.sqlstate in _PASSING_STATES or "no partition" in error.reason:
            self._put_back(batch)
            raise StoreUnavailable("Postgres", error.reason)
        if batch.row_count > 1:
            for half in _halves(batch):
                await self._write(half)
            return
        if batch.outcomes is not None and len(batch.outcome_slots):
            self._node.poison_outcome(self, batch.outcome_slots, error)
            return
        self._give_credit_back(batch)
        handles = np.concatenate([batch.move_handles, batch.grant_handles])
        self._node.set_aside(handles, [f"Postgres refuses it: {error.reason}"] * len(handles))


def fair_part(credit: int, mine: int, others: int, carry: float) -> tuple[int, float]:
    """The part of `credit` of a lane in which `mine` rows wait while `others` wait in other lanes, and what
    is owed to it from now on (0 up to 1).

    In proportion to what waits, the heads of all lanes grow old alike, whatever they are given to do.
    """
    if credit >= mine + others or not others:
        return credit, carry
    owed = credit * mine / (mine + others) + carry
    part = min(int(owed), credit)
    return part, min(owed - part, 1.0)


def hex_ids(hi: Uint64s, lo: Uint64s) -> list[str]:
    """32 hexadecimal digits of each pair."""
    both = np.empty((len(hi), 2), dtype=">u8")
    both[:, 0] = hi
    both[:, 1] = lo
    text = both.tobytes().hex()
    return [text[at : at + 32] for at in range(0, len(text), 32)]


_LISTED: Final = frozenset(
    {
        "more_of",
        "more_run_hi",
        "more_run_lo",
        "more_schedule_us",
        "more_flags",
        "why_of",
        "why_from_us",
        "why_until_us",
        "why_count",
        "why_reason",
    }
)


def _pick_moves(moves: Moves, keep: Bools) -> Moves:
    """Some of the moves, with their catch-up runs and decisions renumbered."""
    number = np.cumsum(keep) - 1
    columns = {name: getattr(moves, name)[keep] for name in Moves.__dataclass_fields__ if name not in _LISTED}
    picked = Moves(**columns)
    for row, of in enumerate(moves.more_of):
        if keep[of]:
            picked.more_of.append(int(number[of]))
            picked.more_run_hi.append(moves.more_run_hi[row])
            picked.more_run_lo.append(moves.more_run_lo[row])
            picked.more_schedule_us.append(moves.more_schedule_us[row])
            picked.more_flags.append(moves.more_flags[row])
    for row, of in enumerate(moves.why_of):
        if keep[of]:
            picked.why_of.append(int(number[of]))
            picked.why_from_us.append(moves.why_from_us[row])
            picked.why_until_us.append(moves.why_until_us[row])
            picked.why_count.append(moves.why_count[row])
            picked.why_reason.append(moves.why_reason[row])
    return picked


def _pick_columns(part: Any, rows: Any) -> Any:
    """The same rows of every column of an `Outcomes` or `RunGrants`."""
    picked: dict[str, Any] = {}
    for name in part.__dataclass_fields__:
        value = getattr(part, name)
        if value is None:
            picked[name] = None
        elif isinstance(value, np.ndarray):
            picked[name] = value[rows]
        else:
            picked[name] = [value[i] for i in np.arange(len(value))[rows].tolist()]
    return type(part)(**picked)


def _halves(batch: Batch) -> list[Batch]:
    """Two batches with the rows of one: by group first, then in the middle of the group."""
    parts = [
        part for part in (batch.outcomes, batch.moves, batch.grants) if part is not None and len(part.shard)
    ]
    if len(parts) > 1:
        outcomes_alone = _part(batch, batch.outcomes is not None, batch.outcomes is None, False, slice(None))
        rest = _part(batch, False, batch.outcomes is not None, True, slice(None))
        return [half for half in (outcomes_alone, rest) if half.row_count]
    middle = len(parts[0].shard) // 2
    return [_part(batch, True, True, True, rows) for rows in (slice(0, middle), slice(middle, None))]


def _part(batch: Batch, outcomes: bool, moves: bool, grants: bool, rows: slice) -> Batch:
    part = Batch(batch.now_us, batch.clock_us, sessions=batch.sessions, ended=batch.ended)
    if outcomes and batch.outcomes is not None:
        part.outcomes = _pick_columns(batch.outcomes, rows)
        part.outcome_slots = batch.outcome_slots[rows]
        part.outcome_handles = batch.outcome_handles[rows]
        part.by_owner = batch.by_owner[rows]
    if moves and batch.moves is not None:
        keep = np.zeros(len(batch.moves.shard), dtype=np.bool_)
        keep[rows] = True
        part.moves = _pick_moves(batch.moves, keep)
        part.move_handles, part.move_sessions = batch.move_handles[rows], batch.move_sessions[rows]
    if grants and batch.grants is not None:
        part.grants = _pick_columns(batch.grants, rows)
        part.grant_handles, part.grant_sessions = batch.grant_handles[rows], batch.grant_sessions[rows]
    return part
