"""The leader's loop: see who lives, plan who should own what, write it. Everybody else only watches.

The registry is authoritative; this loop holds nothing that it could not read again. A pass reads everything
afresh, plans, and writes guarded assignments; a pass that finds nothing to do writes nothing; a pass that was
cut off anywhere is simply made again, by whoever leads then. The watch only decides *when* the next pass is
made; every few seconds one is made regardless, for a watch that went quiet says nothing about itself.

Two judgements need more than a reading:

**Is an absent timer dead?** After an outage of the registry everybody is absent for a moment. So an absence
counts as a death only for a node that has itself watched the registry, unbroken, for one lease TTL: in that
time every living timer had to renew or to register again. Standbys watch too, so the death of a host that
carries the leader and a timer is judged at once by the next leader.

**Which generation is new?** The next one after the registry's, unless the registry was wiped or restored and
knows less than Postgres, where each owner wrote the generation under which it took its shard. So every new
leader reads those once, and lifts what is below them by `GENERATION_LIFT`: the lost registry may have handed
out generations that Postgres never saw, and none of those may ever be proved again.
"""

from __future__ import annotations

import asyncio
import enum
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from tickwheel.domain.assignment import Move, MoveReason, TimerInfo, plan
from tickwheel.ports import (
    AssignmentWrite,
    Election,
    LeaderLost,
    LeaderTerm,
    RegistrySnapshot,
    RegistryUnavailable,
    ShardRegistry,
    ViewChange,
)

log = structlog.get_logger(__name__)

GENERATION_LIFT = 1 << 20
_BACKOFF_FIRST_MS = 100
_BACKOFF_MAX_MS = 1_000


class ReconcilerClock(Protocol):
    """now_us: the cluster clock; mono_us: this host's monotonic one. Never mixed."""

    def now_us(self) -> int: ...

    def mono_us(self) -> int: ...


@dataclass(frozen=True, slots=True)
class ReconcilerSettings:
    """relist_ms: a pass is made at least so often. settle_ms: a planned move counts as under way for so long.

    drain_moves_max, rebalance_moves_max: planned moves under way at any time, of either kind.
    """

    shard_count: int = 256
    lease_ttl_ms: int = 3_000
    relist_ms: int = 3_000
    settle_ms: int = 500
    drain_moves_max: int = 32
    rebalance_moves_max: int = 16
    postgres_timeout_ms: int = 2_000

    def __post_init__(self) -> None:
        for name in ("shard_count", "lease_ttl_ms", "relist_ms", "settle_ms", "postgres_timeout_ms"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} ({getattr(self, name)}) must be positive")
        if self.drain_moves_max < 1 or self.rebalance_moves_max < 0:
            raise ValueError(
                f"drain_moves_max ({self.drain_moves_max}) must be at least 1 and rebalance_moves_max"
                f" ({self.rebalance_moves_max}) at least 0"
            )
        if self.settle_ms > self.hold_ms:
            raise ValueError(f"settle_ms ({self.settle_ms}) must not exceed two lease TTLs ({self.hold_ms})")

    @property
    def hold_ms(self) -> int:
        """Rebalancing leaves a shard where it is for two lease TTLs after its last move."""
        return 2 * self.lease_ttl_ms


class Outcome(enum.Enum):
    """What a pass came to."""

    STANDBY = "standby"  # somebody else leads
    SETTLED = "settled"  # nothing to do
    WRITTEN = "written"  # assignments were written; more may follow
    WAITING = "waiting"  # somebody is absent, and this node has not watched long enough to call it dead
    BLIND = "blind"  # Postgres' generations are not known yet: nothing may be written


@dataclass(frozen=True, slots=True)
class PassReport:
    """moves: as planned; written, conflicted: shards; again_ms: make the next pass no later than this."""

    outcome: Outcome
    again_ms: int
    moves: tuple[Move, ...] = ()
    written: tuple[int, ...] = ()
    conflicted: tuple[int, ...] = ()


@dataclass(slots=True)
class Continuity:
    """For how long has this node watched the registry without a break?"""

    _watching: bool = False
    _since_mono_us: int | None = None

    def watch_is(self, change: ViewChange, now_mono_us: int) -> None:
        if change is ViewChange.BROKEN:
            self._watching = False
            self._since_mono_us = None
        elif not self._watching:
            self._watching = True
            self._since_mono_us = now_mono_us

    def read_failed(self) -> None:
        """A read went unanswered: whatever the watch says, the registry was out of reach."""
        self._since_mono_us = None

    def read_answered(self, now_mono_us: int) -> None:
        if self._watching and self._since_mono_us is None:
            self._since_mono_us = now_mono_us

    def unbroken_us(self, now_mono_us: int) -> int:
        return 0 if self._since_mono_us is None else now_mono_us - self._since_mono_us


@dataclass(frozen=True, slots=True)
class Decision:
    """What a leader would write now. waiting: absences were left alone."""

    writes: tuple[AssignmentWrite, ...] = ()
    moves: tuple[Move, ...] = ()
    waiting: bool = False
    under_way: int = 0


def decide(
    snapshot: RegistrySnapshot,
    postgres_generations: Mapping[int, int],
    *,
    absence_is_death: bool,
    now_us: int,
    settings: ReconcilerSettings,
) -> Decision:
    """Plan the assignments for what was read: pure.

    A shard that nobody owns although Postgres knows an owner (the registry was wiped) waits like an absent
    timer's: its owner may be about to register.
    """
    shards = range(settings.shard_count)
    current = {shard: found.timer_id for shard, found in snapshot.assignments.items() if shard in shards}
    unclear = any(
        (owner := current.get(shard)) not in snapshot.timers
        and (owner is not None or postgres_generations.get(shard, 0) > 0)
        for shard in shards
    )
    if unclear and not absence_is_death:
        return Decision(waiting=True)
    hold_us = settings.hold_ms * 1_000
    # A stamp from the future beyond any skew is nonsense, and must not pin a shard for ever.
    moved_at_us = {
        shard: found.moved_at_us
        for shard, found in snapshot.assignments.items()
        if found.moved_at_us <= now_us + hold_us
    }
    under_way = sum(now_us - moved < settings.settle_ms * 1_000 for moved in moved_at_us.values())
    timers = {
        timer_id: TimerInfo(max(0, record.capacity), max(0, record.load), timer_id in snapshot.drains)
        for timer_id, record in snapshot.timers.items()
    }
    moves = plan(
        current,
        timers,
        settings.shard_count,
        moved_at_us=moved_at_us,
        now_us=now_us,
        hold_us=hold_us,
        drain_moves_max=max(0, settings.drain_moves_max - under_way),
        rebalance_moves_max=max(0, settings.rebalance_moves_max - under_way),
    )
    targets = {move.shard: move.target for move in moves}
    writes = []
    for shard in shards:
        found = snapshot.assignments.get(shard)
        generation, revision = (found.generation, found.mod_revision) if found else (0, 0)
        floor = postgres_generations.get(shard, 0)
        owner = targets.get(shard) or (current.get(shard) if generation < floor else None)
        if owner is not None and owner in snapshot.timers:
            lifted = floor + GENERATION_LIFT if generation < floor else generation + 1
            writes.append(AssignmentWrite(shard, owner, lifted, now_us, revision))
    return Decision(tuple(writes), moves, False, under_way)


@dataclass(slots=True)
class Reconciler:
    """Runs on every coordinator; acts while this node's election says that it leads.

    postgres_generations: gives shard -> generation under which Postgres says it was last taken; may raise.
    """

    registry: ShardRegistry
    election: Election
    clock: ReconcilerClock
    settings: ReconcilerSettings
    postgres_generations: Callable[[], Awaitable[Mapping[int, int]]]
    on_pass: Callable[[PassReport], None] = lambda _: None
    _continuity: Continuity = field(default_factory=Continuity)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _floors: Mapping[int, int] | None = None
    _floors_read_in: LeaderTerm | None = None
    _history: tuple[int, int] = (0, 0)
    _seen: object = None

    async def run(self) -> None:
        """Reconcile until cancelled. Raises RegistryRefused (in an ExceptionGroup)."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.registry.watch(self._hear))
            group.create_task(self._wake_on_election())
            group.create_task(self._pass_after_pass())

    async def step(self) -> PassReport:
        """Make one pass. Raises RegistryUnavailable, RegistryRefused, LeaderLost; making it again is safe."""
        term = self.election.term()
        try:
            snapshot = await self.registry.snapshot()
        except RegistryUnavailable:
            self._continuity.read_failed()
            raise
        self._continuity.read_answered(self.clock.mono_us())
        self._notice_history(snapshot)
        if term is None:
            return PassReport(Outcome.STANDBY, self.settings.relist_ms)
        if not await self._know_floors(term):
            return PassReport(Outcome.BLIND, _BACKOFF_MAX_MS)
        missing_us = self.settings.lease_ttl_ms * 1_000 - self._continuity.unbroken_us(self.clock.mono_us())
        decision = decide(
            snapshot,
            self._floors or {},
            absence_is_death=missing_us <= 0,
            now_us=self.clock.now_us(),
            settings=self.settings,
        )
        if decision.waiting:
            return PassReport(Outcome.WAITING, max(1, min(self.settings.relist_ms, missing_us // 1_000 + 1)))
        if missing_us <= 0:
            await self._forget_drains_of_the_dead(snapshot)
        if not decision.writes:
            # Moves under way may have used up the budget of this pass.
            again_ms = self.settings.settle_ms if decision.under_way else self.settings.relist_ms
            return PassReport(Outcome.SETTLED, again_ms)
        return await self._write(term, decision)

    async def _write(self, term: LeaderTerm, decision: Decision) -> PassReport:
        outcome = await self.registry.assign(term, decision.writes)
        by_reason = {reason.value: 0 for reason in MoveReason}
        for move in decision.moves:
            by_reason[move.reason.value] += 1
        log.info(
            "shards_assigned",
            term=term.create_revision,
            written=len(outcome.written),
            conflicted=len(outcome.conflicted),
            **{reason: count for reason, count in by_reason.items() if count},
        )
        return PassReport(
            Outcome.WRITTEN,
            1 if outcome.conflicted else self.settings.settle_ms,
            decision.moves,
            outcome.written,
            outcome.conflicted,
        )

    async def _know_floors(self, term: LeaderTerm) -> bool:
        """Read Postgres' generations once a term (or history); give whether they are known.

        Nothing is written before that, which costs nothing: while Postgres is away, no shard can be taken.
        """
        if self._floors_read_in == term and self._floors is not None:
            return True
        try:
            async with asyncio.timeout(self.settings.postgres_timeout_ms / 1_000):
                self._floors = dict(await self.postgres_generations())
        except Exception as error:
            # Another store's reader, injected: whatever it raises, nothing is known.
            log.warning("postgres_generations_unknown", error=repr(error))
            return False
        self._floors_read_in = term
        return True

    def _notice_history(self, snapshot: RegistrySnapshot) -> None:
        """A registry that is another one, or went back, was wiped or restored: begin again."""
        history, revision = self._history
        if history and (snapshot.history != history or snapshot.revision < revision):
            log.error("registry_history_changed", revision=snapshot.revision, seen=revision)
            self._floors = None
            self._continuity.read_failed()
            self._continuity.read_answered(self.clock.mono_us())
        self._history = (snapshot.history, snapshot.revision)

    async def _forget_drains_of_the_dead(self, snapshot: RegistrySnapshot) -> None:
        owners = {found.timer_id for found in snapshot.assignments.values()}
        for timer_id in snapshot.drains - set(snapshot.timers) - owners:
            await self.registry.cancel_drain(timer_id)

    async def _pass_after_pass(self) -> None:
        failures = 0
        while True:
            self._wake.clear()
            try:
                report = await self.step()
            except (RegistryUnavailable, LeaderLost) as error:
                failures += 1
                ceiling_ms = min(_BACKOFF_MAX_MS, _BACKOFF_FIRST_MS * 2 ** min(failures - 1, 8))
                if failures & (failures - 1) == 0:
                    log.warning("reconciler_pass_failed", error=str(error), failures=failures)
                await asyncio.sleep(random.uniform(ceiling_ms / 2, ceiling_ms) / 1_000)
                continue
            failures = 0
            self.on_pass(report)
            try:
                async with asyncio.timeout(report.again_ms / 1_000):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def _wake_on_election(self) -> None:
        term: LeaderTerm | None = None
        while True:
            term = await self.election.wait_for_change(term)
            self._wake.set()

    def _hear(self, snapshot: RegistrySnapshot, change: ViewChange) -> None:
        """Make a pass when something changed that a plan depends on; load alone does not."""
        self._continuity.watch_is(change, self.clock.mono_us())
        seen = (
            frozenset((timer_id, record.capacity) for timer_id, record in snapshot.timers.items()),
            snapshot.drains,
            frozenset((found.shard, found.mod_revision) for found in snapshot.assignments.values()),
        )
        if seen != self._seen or change is not ViewChange.CHANGED:
            self._seen = seen
            self._wake.set()
