"""A shard registry in memory, held to the real one by `tests/conformance/test_shard_registry.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tickwheel.ports import (
    Assignment,
    AssignmentsWritten,
    AssignmentWrite,
    ClusterFacts,
    Doubt,
    LeaderLost,
    LeaderTerm,
    RegistrySnapshot,
    RegistryUnavailable,
    Resumption,
    TimerRecord,
    ViewChange,
)

Listener = Callable[[RegistrySnapshot, ViewChange], None]


@dataclass
class MemoryShardRegistry:
    """`tickwheel.ports.ShardRegistry`, with knobs for tests: lead, depose, register, kill, cut, mend."""

    _revision: int = 1
    _history: int = 1
    _leader: LeaderTerm | None = None
    _timers: dict[str, TimerRecord] = field(default_factory=dict)
    _assignments: dict[int, Assignment] = field(default_factory=dict)
    _drains: set[str] = field(default_factory=set)
    _epochs: dict[int, int] = field(default_factory=dict)
    _incarnation: int = 0
    _facts: ClusterFacts | None = None
    _doubt: Doubt | None = None
    _resumption: Resumption | None = None
    _lease_ms_max: int = 0
    _cut: bool = False
    _listeners: list[Listener] = field(default_factory=list)

    # -- knobs

    async def lead(self, node_id: str) -> LeaderTerm:
        """Begin a new term, ending the one in force."""
        self._leader = LeaderTerm(node_id, self._revision + 1)
        self._changed()
        return self._leader

    async def depose(self) -> None:
        self._leader = None
        self._changed()

    async def register(self, record: TimerRecord) -> None:
        self._timers[record.timer_id] = record
        self._changed()

    async def kill(self, timer_id: str) -> None:
        self._timers.pop(timer_id, None)
        self._changed()

    def cut(self) -> None:
        """Nobody is answered any more, and watches break."""
        self._cut = True
        self._tell(ViewChange.BROKEN)

    def mend(self) -> None:
        self._cut = False
        self._tell(ViewChange.CURRENT)

    # -- ShardRegistry

    async def snapshot(self) -> RegistrySnapshot:
        self._answer()
        return self._snapshot()

    async def watch(self, on_change: Listener) -> None:
        self._listeners.append(on_change)
        try:
            if not self._cut:
                on_change(self._snapshot(), ViewChange.CURRENT)
            await asyncio.Event().wait()
        finally:
            self._listeners.remove(on_change)

    async def assign(self, term: LeaderTerm, writes: Sequence[AssignmentWrite]) -> AssignmentsWritten:
        self._answer()
        if writes:
            self._guard(term)
        written: list[AssignmentWrite] = []
        conflicted: list[AssignmentWrite] = []
        for write in writes:
            found = self._assignments.get(write.shard)
            (written if (found.mod_revision if found else 0) == write.mod_revision else conflicted).append(
                write
            )
        for write in written:
            self._assignments[write.shard] = Assignment(
                write.shard, write.timer_id, write.generation, write.moved_at_us, self._revision + 1
            )
        if written:
            self._changed()
        return AssignmentsWritten(
            tuple(write.shard for write in written), tuple(write.shard for write in conflicted)
        )

    async def prove(self, timer_id: str, generations: Mapping[int, int], incarnation: int) -> frozenset[int]:
        self._answer()
        if incarnation != self._incarnation:
            return frozenset()
        return frozenset(
            shard
            for shard, generation in generations.items()
            if (found := self._assignments.get(shard))
            and (found.timer_id, found.generation) == (timer_id, generation)
        )

    async def epochs(self) -> dict[int, int]:
        self._answer()
        return dict(self._epochs)

    async def raise_epochs(self, epochs: Mapping[int, int]) -> None:
        self._answer()
        for shard, epoch in epochs.items():
            self._epochs[shard] = max(epoch, self._epochs.get(shard, epoch))
        self._revision += 1

    async def incarnation(self) -> int:
        self._answer()
        return self._incarnation

    async def raise_incarnation(self, incarnation: int) -> int:
        self._answer()
        self._incarnation = max(self._incarnation, incarnation)
        self._revision += 1
        return self._incarnation

    async def cluster_facts(self) -> ClusterFacts | None:
        self._answer()
        return self._facts

    async def put_cluster_facts(self, term: LeaderTerm, facts: ClusterFacts) -> None:
        self._answer()
        self._guard(term)
        self._facts = facts
        self._revision += 1

    async def doubt(self) -> Doubt | None:
        self._answer()
        return self._doubt

    async def put_doubt(self, doubt: Doubt) -> None:
        self._answer()
        self._doubt = doubt
        self._revision += 1

    async def resumption(self) -> Resumption | None:
        self._answer()
        return self._resumption

    async def put_resumption(self, resumption: Resumption) -> None:
        self._answer()
        self._resumption = resumption
        self._revision += 1

    async def lease_ms_max(self) -> int:
        self._answer()
        return self._lease_ms_max

    async def raise_lease_ms_max(self, lease_ms: int) -> None:
        self._answer()
        self._lease_ms_max = max(self._lease_ms_max, lease_ms)
        self._revision += 1

    async def request_drain(self, timer_id: str) -> None:
        self._answer()
        self._drains.add(timer_id)
        self._changed()

    async def cancel_drain(self, timer_id: str) -> None:
        self._answer()
        if timer_id in self._drains:
            self._drains.remove(timer_id)
            self._changed()

    async def wipe(self) -> None:
        """Forget everything, as if the store had been made anew."""
        self._leader, self._facts, self._incarnation = None, None, 0
        self._doubt, self._resumption, self._lease_ms_max = None, None, 0
        for kind in (self._timers, self._assignments, self._epochs):
            kind.clear()
        self._drains.clear()
        self._changed()

    # -- inside

    def _answer(self) -> None:
        if self._cut:
            raise RegistryUnavailable("memory", "UNAVAILABLE", "cut")

    def _guard(self, term: LeaderTerm) -> None:
        found = self._leader.create_revision if self._leader else 0
        if found != term.create_revision:
            raise LeaderLost(term.create_revision, found)

    def _snapshot(self) -> RegistrySnapshot:
        return RegistrySnapshot(
            self._history,
            self._revision,
            dict(self._timers),
            dict(self._assignments),
            frozenset(self._drains),
            self._leader.leader_id if self._leader else None,
        )

    def _changed(self) -> None:
        self._revision += 1
        if not self._cut:
            self._tell(ViewChange.CHANGED)

    def _tell(self, change: ViewChange) -> None:
        snapshot = self._snapshot()
        for listener in tuple(self._listeners):
            listener(snapshot, change)
