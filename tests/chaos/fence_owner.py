"""An owner of the fence rig: a process that takes shards and fires, ends and re-takes through `TimerStore`.

Run as `python -m tests.chaos.fence_owner URL NAME SEED HISTORY`. It knows no others: it steals shards by
taking them at the next generation, as if a coordinator had assigned them to it, and finds out by the fence
what was stolen from it. It goes on for ever, until SIGTERM.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import psycopg
from tests.chaos.fence_ledger import PERIOD_US

from tickwheel.domain.ids import run_id_head
from tickwheel.domain.run import AttemptState, RunState
from tickwheel.domain.shard import FENCE_GRANT_BITS
from tickwheel.domain.timer_rows import NEVER_US
from tickwheel.errors import StoreUnavailable
from tickwheel.postgres.timer_store import (
    BatchRefused,
    CommitUnknown,
    Fence,
    Moves,
    Outcomes,
    RunGrants,
    ShardBusy,
    TimerStore,
)

SHARDS = range(6)
BATCH_MAX = 12
TRIES_MAX = 40
ROW_EXISTS = 64
CAUSE_SCHEDULED = 1 << 12

# How attempts end: what a worker reports is drawn from its token, so that it says the same to every owner.
ENDS = (
    *[(AttemptState.SUCCEEDED, RunState.SUCCEEDED)] * 5,
    *[(AttemptState.FAILED, RunState.SCHEDULED)] * 3,
    (AttemptState.RELEASED, RunState.SCHEDULED),
    (AttemptState.FAILED, RunState.DEAD_LETTERED),
    (AttemptState.OUTCOME_UNKNOWN, RunState.HELD),
    (AttemptState.CANCELLED, RunState.CANCELLED),
)


def _now_us() -> int:
    return time.time_ns() // 1_000


def _columns(values: list[Any], kind: type[np.generic]) -> Any:
    return np.array(values, dtype=kind)


def _halves(ids: list[uuid.UUID]) -> tuple[Any, Any]:
    mask = (1 << 64) - 1
    return _columns([i.int >> 64 for i in ids], np.uint64), _columns([i.int & mask for i in ids], np.uint64)


@dataclass(slots=True)
class Row:
    """A row of `timer`, as this owner remembers it: it may be stale."""

    shard: int
    ref: uuid.UUID
    kind: int
    due_us: int
    version: int
    decided_us: int
    schedule_us: int
    attempt: int
    flags: int


@dataclass(slots=True)
class Lease:
    shard: int
    run: uuid.UUID
    token: uuid.UUID
    row_exists: bool


@dataclass(slots=True)
class Held:
    """A shard that this owner believes to be its own."""

    epoch: int
    generation: int
    granted: int = 0
    rows: dict[uuid.UUID, Row] = field(default_factory=dict)
    leases: dict[uuid.UUID, Lease] = field(default_factory=dict)

    def next_fence(self) -> int:
        self.granted += 1
        return self.epoch << FENCE_GRANT_BITS | self.granted


@dataclass(slots=True)
class Batch:
    """What one call carries, sorted by (shard, key), with the numbers that were drawn for it."""

    outcomes: list[Lease] = field(default_factory=list)
    moves: list[tuple[Row, int, bool, int, Lease]] = field(default_factory=list)  # action, exclusive, passed
    grants: list[tuple[Row, Lease]] = field(default_factory=list)


class Owner:
    def __init__(self, url: str, name: str, seed: str, history: Path) -> None:
        self.url = url
        self.name = name
        self.random = Random(f"{seed} {name}")
        self.store = TimerStore(url, name, 1)
        self.held: dict[int, Held] = {}
        self.stopped = False
        self._history = history.open("a", buffering=1)

    def tell(self, event: str, **fields: Any) -> None:
        self._history.write(json.dumps({"event": event, "owner": self.name, **fields}) + "\n")

    async def run(self) -> None:
        self.tell("started")
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, setattr, self, "stopped", True)
        while not self.stopped:
            try:
                await self.step()
            except (StoreUnavailable, CommitUnknown, psycopg.Error):
                await asyncio.sleep(0.02)  # Reads and first connections: nothing hangs on them.
        await self.store.close()

    async def step(self) -> None:
        lot = self.random.random()
        if lot < 0.1 or not self.held:
            await self.steal()
        elif lot < 0.13:
            await self.take({shard: held.generation for shard, held in self.held.items()})
        elif lot < 0.19:
            await self._sweep(self.random.choice(sorted(self.held)))
        else:
            await self.fire()
        await asyncio.sleep(self.random.random() * 0.01)

    # Taking.

    async def steal(self) -> None:
        wanted = self.random.sample(SHARDS, self.random.randint(1, 3))
        async with await psycopg.AsyncConnection.connect(self.url, connect_timeout=2) as connection:
            found = await connection.execute(
                "SELECT shard_id, generation FROM shard WHERE shard_id = ANY (%s)", [wanted]
            )
            generations = {shard: generation + 1 for shard, generation in await found.fetchall()}
        await self.take(generations)

    async def take(self, generations: dict[int, int]) -> dict[int, int]:
        """Takes shards, or takes its own again, and loads them. Returns the epochs of those it got."""
        for shard in generations:
            self.held.pop(shard, None)
        for _ in range(TRIES_MAX):
            try:
                epochs = await self.store.take(generations, _now_us())
                break
            except ShardBusy:
                await self.store.end_blockers(sorted(generations))
            except (CommitUnknown, StoreUnavailable, psycopg.Error):
                await asyncio.sleep(0.02)
        else:
            return {}
        for shard, epoch in epochs.items():
            self.held[shard] = Held(epoch, generations[shard])
        for _ in range(TRIES_MAX):
            try:
                await self._load(epochs)
                return epochs
            except (CommitUnknown, StoreUnavailable):
                await asyncio.sleep(0.02)
        for shard in epochs:
            self.held.pop(shard, None)
        return {}

    async def _load(self, epochs: dict[int, int]) -> None:
        shards = sorted(epochs)
        if not shards:
            return
        found = await self.store.load_leases(shards)
        tokens: dict[int, list[str]] = {shard: [] for shard in shards}
        for n in range(len(found)):
            run = uuid.UUID(int=int(found.run_hi[n]) << 64 | int(found.run_lo[n]))
            token = uuid.UUID(int=int(found.token_hi[n]) << 64 | int(found.token_lo[n]))
            shard = int(found.shard[n])
            self.held[shard].leases[run] = Lease(shard, run, token, bool(found.flags[n] & ROW_EXISTS))
            tokens[shard].append(str(token))
        for shard in shards:
            await self._sweep(shard)
        for shard, epoch in epochs.items():
            self.tell("loaded", shard=shard, epoch=epoch, tokens=tokens[shard])

    async def _sweep(self, shard: int) -> None:
        """All that is due in the shard: what a coordinator or another's catch-up made, too."""
        none = np.zeros(1, dtype=np.uint64)
        rows = await self.store.load_timers([shard], [1], [-1], (none, none), [NEVER_US], 1_000)
        self.held[shard].rows = {}
        self._remember(rows)

    def _remember(self, rows: Any) -> set[uuid.UUID]:
        seen = set()
        for n in range(len(rows)):
            ref = uuid.UUID(int=int(rows.ref_hi[n]) << 64 | int(rows.ref_lo[n]))
            seen.add(ref)
            numbers = (
                rows.due_us,
                rows.version,
                rows.decided_us,
                rows.schedule_time_us,
                rows.attempt,
                rows.flags,
            )
            held = self.held.get(int(rows.shard[n]))
            if held is not None:
                row = Row(int(rows.shard[n]), ref, int(rows.kind[n]), *(int(column[n]) for column in numbers))
                held.rows[ref] = row
        return seen

    # Firing.

    def _draw(self) -> Batch:
        batch = Batch()
        rows = [row for held in self.held.values() for row in held.rows.values() if row.due_us != NEVER_US]
        for row in self.random.sample(rows, min(len(rows), self.random.randint(0, BATCH_MAX))):
            token = uuid.UUID(int=self.random.getrandbits(128))
            if row.kind == 2:
                batch.grants.append((row, Lease(row.shard, row.ref, token, True)))
                continue
            action = self.random.choice((0, 1, 1, 1, 1, 2))
            exclusive = action == 1 and self.random.random() < 0.3
            passed = 1 if exclusive else self.random.choice((1, 1, 1, 3))
            batch.moves.append(
                (row, action, exclusive, passed, Lease(row.shard, self._run_id(row), token, False))
            )
        leases = [lease for held in self.held.values() for lease in held.leases.values()]
        batch.outcomes = self.random.sample(leases, min(len(leases), self.random.randint(0, BATCH_MAX)))
        batch.outcomes.sort(key=lambda lease: (lease.shard, lease.run))
        batch.moves.sort(key=lambda move: (move[0].shard, move[0].ref))
        batch.grants.sort(key=lambda grant: (grant[0].shard, grant[0].ref))
        return batch

    def _run_id(self, row: Row) -> uuid.UUID:
        return uuid.UUID(int=run_id_head(0, _now_us(), row.shard) << 64 | self.random.getrandbits(64))

    async def fire(self) -> None:
        batch = self._draw()
        shards = sorted(self.held)
        generations = {shard: self.held[shard].generation for shard in shards}
        fence = Fence(
            _columns(shards, np.int16), _columns([self.held[shard].epoch for shard in shards], np.int64)
        )
        try:
            written = await self.store.write(
                0, fence, _now_us(), self._outcomes(batch), self._moves(batch), self._grants(batch)
            )
        except CommitUnknown:
            await self._resolve(batch, generations)
            return
        except BatchRefused as error:
            self.tell("refused", reason=str(error))
            return
        for shard in written.lost:
            self.held.pop(shard, None)
        await self._settle(batch, written)

    async def _resolve(self, batch: Batch, generations: dict[int, int]) -> None:
        """The commit is unknown: take our own shards again, and see what stands."""
        epochs = await self.take(generations)
        stands = {lease.token for shard in epochs for lease in self.held[shard].leases.values()}
        granted = [lease for *_, lease in batch.moves] + [lease for _, lease in batch.grants]
        by_shard: dict[int, dict[str, dict[str, bool]]] = {s: {"grants": {}, "outcomes": {}} for s in epochs}
        for lease in granted:
            if lease.shard in epochs:
                by_shard[lease.shard]["grants"][str(lease.token)] = lease.token in stands
        for lease in batch.outcomes:
            if lease.shard in epochs:
                by_shard[lease.shard]["outcomes"][str(lease.token)] = lease.token not in stands
        for shard, verdicts in by_shard.items():
            self.tell("resolved", epoch=epochs[shard], **verdicts)

    async def _settle(self, batch: Batch, written: Any) -> None:
        """What took effect is remembered; of what did not, the row is read again: it was stale or locked."""
        granted: list[str] = []
        not_granted: list[str] = []
        again: list[Row] = []
        moved, busy, leased = set(written.moves), set(written.busy), set(written.grants)
        for n, (row, action, _, passed, lease) in enumerate(batch.moves):
            if n in moved:
                row.decided_us += passed * PERIOD_US
                row.schedule_us = row.due_us = row.decided_us + PERIOD_US
            else:
                again.append(row)
            done = n in moved and n not in busy and action == 1
            (granted if done else not_granted).append(str(lease.token))
            if done and (held := self.held.get(lease.shard)):
                held.leases[lease.run] = lease
        for n, (row, lease) in enumerate(batch.grants):
            (granted if n in leased else not_granted).append(str(lease.token))
            if n not in leased:
                again.append(row)
            elif held := self.held.get(row.shard):
                held.rows.pop(row.ref, None)
                held.leases[lease.run] = lease
        ended = [batch.outcomes[n] for n in written.outcomes]
        for lease in batch.outcomes:
            # Those that were not taken: locked by a cancel (the next load finds them), or ended already.
            if lease in ended and (held := self.held.get(lease.shard)):
                held.leases.pop(lease.run, None)
                again.append(Row(lease.shard, lease.run, 2, 0, 0, 0, 0, 0, 0))
        self.tell(
            "answered", granted=granted, not_granted=not_granted, ended=[str(lease.token) for lease in ended]
        )
        await self._peek(again)

    async def _peek(self, rows: list[Row]) -> None:
        rows = [row for row in rows if row.shard in self.held]
        if not rows:
            return
        found = await self.store.peek_timers([row.shard for row in rows], *_halves([row.ref for row in rows]))
        seen = self._remember(found)
        for row in rows:
            if row.ref not in seen and (held := self.held.get(row.shard)):
                held.rows.pop(row.ref, None)

    # Columns.

    def _outcomes(self, batch: Batch) -> Outcomes | None:
        leases = batch.outcomes
        if not leases:
            return None
        ends = [ENDS[lease.token.int % len(ENDS)] for lease in leases]
        return Outcomes(
            _columns([lease.shard for lease in leases], np.int16),
            *_halves([lease.run for lease in leases]),
            *_halves([lease.token for lease in leases]),
            attempt_state=_columns([attempt for attempt, _ in ends], np.int16),
            run_state=_columns([run for _, run in ends], np.int16),
            next_us=_columns([NEVER_US if run == RunState.HELD else _now_us() for _, run in ends], np.int64),
            row_exists=_columns([lease.row_exists for lease in leases], np.bool_),
        )

    def _moves(self, batch: Batch) -> Moves | None:
        moves = batch.moves
        if not moves:
            return None
        rows = [row for row, *_ in moves]
        leases = [lease for *_, lease in moves]
        decided = [row.decided_us + passed * PERIOD_US for row, _, _, passed, _ in moves]
        columns = Moves(
            shard=_columns([row.shard for row in rows], np.int16),
            ref_hi=_halves([row.ref for row in rows])[0],
            ref_lo=_halves([row.ref for row in rows])[1],
            due_us=_columns([row.due_us for row in rows], np.int64),
            version=_columns([row.version for row in rows], np.int64),
            decided_us=_columns([row.decided_us for row in rows], np.int64),
            next_due_us=_columns([d + PERIOD_US for d in decided], np.int64),
            next_schedule_us=_columns([d + PERIOD_US for d in decided], np.int64),
            new_decided_us=_columns(decided, np.int64),
            run_count=np.ones(len(moves), dtype=np.int32),
            action=_columns([action for _, action, *_ in moves], np.int16),
            exclusive=_columns([exclusive for _, _, exclusive, *_ in moves], np.bool_),
            run_hi=_halves([lease.run for lease in leases])[0],
            run_lo=_halves([lease.run for lease in leases])[1],
            fence=_columns([self.held[row.shard].next_fence() for row in rows], np.int64),
            token_hi=_halves([lease.token for lease in leases])[0],
            token_lo=_halves([lease.token for lease in leases])[1],
            worker=np.ones(len(moves), dtype=np.int32),
            lease_ms=np.full(len(moves), 10_000, dtype=np.int32),
            flags=np.full(len(moves), CAUSE_SCHEDULED | 1, dtype=np.int32),
        )
        for n, (row, action, _, passed, _) in enumerate(moves):
            self._add_catch_up(columns, n, row, action, passed)
        return columns

    def _add_catch_up(self, columns: Moves, n: int, row: Row, action: int, passed: int) -> None:
        """Of the occurrences after the first, each becomes a waiting run or a decision; so does a first one
        for which nothing is born."""
        for step in range(0 if action == 0 else 1, passed):
            occurrence = row.decided_us + (step + 1) * PERIOD_US
            if self.random.random() < 0.5:
                run = self._run_id(row)
                columns.more_of.append(n)
                columns.more_run_hi.append(run.int >> 64)
                columns.more_run_lo.append(run.int & ((1 << 64) - 1))
                columns.more_schedule_us.append(occurrence)
                columns.more_flags.append(2 << 12)
            else:
                columns.why_of.append(n)
                columns.why_from_us.append(occurrence)
                columns.why_until_us.append(occurrence)
                columns.why_count.append(1)
                columns.why_reason.append(2)

    def _grants(self, batch: Batch) -> RunGrants | None:
        if not batch.grants:
            return None
        rows = [row for row, _ in batch.grants]
        return RunGrants(
            _columns([row.shard for row in rows], np.int16),
            *_halves([row.ref for row in rows]),
            due_us=_columns([row.due_us for row in rows], np.int64),
            attempt=_columns([row.attempt for row in rows], np.int16),
            fence=_columns([self.held[row.shard].next_fence() for row in rows], np.int64),
            token_hi=_halves([lease.token for _, lease in batch.grants])[0],
            token_lo=_halves([lease.token for _, lease in batch.grants])[1],
            worker=np.ones(len(rows), dtype=np.int32),
            lease_ms=np.full(len(rows), 10_000, dtype=np.int32),
        )


if __name__ == "__main__":
    url, name, seed, history = sys.argv[1:]
    asyncio.run(Owner(url, name, seed, Path(history)).run())
