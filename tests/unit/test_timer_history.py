"""When does a timer halt, when does it go on, and for how long does it grant nothing? Without a process."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.fakes.shard_registry import MemoryShardRegistry

from tickwheel.clock import mono_us
from tickwheel.domain.job import LEASE_DEFAULT_MS, LEASE_MS_MAX
from tickwheel.ports import ClusterFacts, Doubt, Resumption
from tickwheel.postgres.history import HistoryChanged
from tickwheel.services.coordinator.history import _why_halted
from tickwheel.services.timer import history as module
from tickwheel.services.timer.history import NOT_YET_US, History

FACTS = ClusterFacts(system_identifier=7, timeline=1, wal_position=1_000)
SHORTER = ClusterFacts(7, 1, 900)
GROWN = ClusterFacts(7, 1, 2_000)
RESUMED = ClusterFacts(7, 1, 950, incarnation=1)


class Lane:
    def __init__(self) -> None:
        self.idle = asyncio.Event()
        self.idle.set()
        self.woken = 0

    def wake(self) -> None:
        self.woken += 1


class FakeNode:
    """What `History` needs of a timer. `found` is what stands behind its connections."""

    def __init__(self) -> None:
        self.registry = MemoryShardRegistry()
        self.timer_id = "t"
        self.incarnation = 0
        self.halted = ""
        self.halt_changed = asyncio.Event()
        self.grants_from_mono_us = NOT_YET_US
        self.found = FACTS
        self.renewed = self.forgotten = self.registered = 0
        self.lanes = [Lane(), Lane()]
        self.metrics = SimpleNamespace(halt=lambda halted: None)
        self.clock = SimpleNamespace(now_us=lambda: 5_000_000)
        self.ownership = SimpleNamespace(wake=lambda: None)
        self.store = self
        self._tasks: list[asyncio.Task[Any]] = []

    async def probe(self) -> ClusterFacts:
        return self.found

    async def renew(self) -> None:
        self.renewed += 1

    def watch(self, guard: object) -> None:
        self.guard = guard

    def forget_everything(self) -> None:
        self.forgotten += 1

    async def register_again(self) -> None:
        self.registered += 1

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        self._tasks.append(asyncio.create_task(work))

    def end(self) -> None:
        for task in self._tasks:
            task.cancel()


class Stage:
    def __init__(self) -> None:
        self.node = FakeNode()
        self.registry = self.node.registry
        self.history = History(cast(Any, self.node))

    async def leader_says(self, facts: ClusterFacts) -> None:
        await self.registry.put_cluster_facts(await self.registry.lead("c"), facts)

    async def connect(self, found: ClusterFacts) -> bool:
        """A new connection, as `Connection` makes one: is it used?"""
        try:
            self.history.admit()
            self.history.check(await self.history.known(), found)
        except HistoryChanged:
            return False
        return True

    async def look(self) -> None:
        """One round of `run`, which sleeps before each."""
        round_ = asyncio.create_task(self.history.run())
        await asyncio.sleep(0.05)
        round_.cancel()


@pytest.fixture
async def stage(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(module, "LOOK_INTERVAL_S", 0.002)
    stage = Stage()
    yield stage
    stage.node.end()


async def test_a_shorter_log_halts_and_stays_a_reason_when_it_has_grown(stage: Stage) -> None:
    await stage.leader_says(FACTS)
    assert await stage.connect(FACTS)
    assert not await stage.connect(SHORTER)
    assert "restored" in stage.node.halted
    stage.node.found = GROWN
    await stage.look()
    assert stage.node.halted, "a log that was too short grows"
    assert not await stage.connect(GROWN)
    assert await stage.registry.doubt() == Doubt("t", 0, stage.node.halted)
    assert stage.node.renewed, "connections that were made before are dropped"


async def test_the_leaders_word_halts_a_timer_whose_connections_still_reach_the_old_postgres(
    stage: Stage,
) -> None:
    await stage.leader_says(FACTS)
    await stage.look()
    assert not stage.node.halted
    await stage.leader_says(ClusterFacts(7, 1, 1_000, halted="timeline 2"))
    await stage.look()
    assert "timeline 2" in stage.node.halted
    assert await stage.registry.doubt() is None, "it found nothing itself"


async def test_it_goes_on_only_with_what_was_accepted_in_both_stores(stage: Stage) -> None:
    await stage.leader_says(FACTS)
    assert not await stage.connect(SHORTER)
    await stage.registry.put_resumption(Resumption(1, 4_000_000, 60_000))
    await stage.registry.raise_incarnation(1)
    await stage.look()
    assert stage.node.halted, "Postgres has not heard of it yet"
    assert not stage.node.forgotten
    stage.node.found = RESUMED
    before_us = mono_us()
    await stage.look()
    assert not stage.node.halted
    assert (stage.node.incarnation, stage.node.forgotten, stage.node.registered) == (1, 1, 1)
    assert await stage.connect(RESUMED)
    assert stage.node.grants_from_mono_us >= before_us + 60_000_000


async def test_a_sleeper_that_wakes_up_after_a_resume_is_halted_by_its_next_look_or_connection(
    stage: Stage,
) -> None:
    await stage.leader_says(RESUMED)
    await stage.registry.raise_incarnation(1)
    assert not await stage.connect(RESUMED)
    assert "resumed as incarnation 1" in stage.node.halted
    assert await stage.registry.doubt() is None


async def test_what_it_knew_last_counts_while_the_registry_is_away(stage: Stage) -> None:
    await stage.leader_says(FACTS)
    assert await stage.connect(GROWN)
    stage.registry.cut()
    assert await stage.connect(GROWN)
    assert not await stage.connect(SHORTER)


async def test_it_starts_only_on_the_history_that_is_known(stage: Stage) -> None:
    await stage.leader_says(FACTS)
    stage.node.found = SHORTER
    entering = asyncio.create_task(stage.history.enter())
    await asyncio.sleep(0.02)
    assert not entering.done()
    await stage.registry.raise_incarnation(1)
    stage.node.found = RESUMED
    async with asyncio.timeout(5):
        await entering
    assert stage.node.incarnation == 1


@pytest.mark.parametrize(
    ("resumption", "hold_s"),
    [
        (None, 0),
        (Resumption(0, 4_000_000, 3_000), 3),
        (Resumption(0, 1_000_000, 3_000), 0),
        (Resumption(0, 9_000_000_000, 3_000), 4),
    ],
)
async def test_a_timer_that_starts_waits_for_what_is_left_of_a_resume(
    stage: Stage, resumption: Resumption | None, hold_s: int
) -> None:
    """The clock stands at 5 s. A second is added for clocks that differ; more than all is never waited."""
    if resumption is not None:
        await stage.registry.put_resumption(resumption)
    assert stage.node.grants_from_mono_us == NOT_YET_US, "nothing is granted before the registry was asked"
    before_us = mono_us()
    await stage.look()
    if hold_s:
        held_us = stage.node.grants_from_mono_us - hold_s * 1_000_000
        assert before_us <= held_us <= mono_us()
    else:
        assert stage.node.grants_from_mono_us == 0


async def test_a_resume_of_which_nothing_is_known_is_waited_out_as_long_as_any_lease_can_last(
    stage: Stage,
) -> None:
    stage.node.found = RESUMED
    await stage.registry.raise_incarnation(1)
    before_us = mono_us()
    await stage.look()
    assert stage.node.incarnation == 1
    assert stage.node.grants_from_mono_us >= before_us + LEASE_MS_MAX * 1_000


async def test_the_longest_lease_is_noted_once_and_nothing_waits_for_a_registry_that_is_away(
    stage: Stage,
) -> None:
    await stage.history.note_lease(LEASE_DEFAULT_MS)
    assert await stage.registry.lease_ms_max() == 0
    stage.registry.cut()
    await stage.history.note_lease(60_000)
    stage.registry.mend()
    await stage.history.note_lease(60_000)
    assert await stage.registry.lease_ms_max() == 0, "not tried again at once"
    stage.history._note_from_us = 0
    await stage.history.note_lease(60_000)
    assert await stage.registry.lease_ms_max() == 60_000


@pytest.mark.parametrize(
    ("known", "doubt", "found", "why"),
    [
        (FACTS, None, GROWN, ""),
        (None, None, FACTS, ""),
        (FACTS, None, SHORTER, "restored"),
        (ClusterFacts(7, 1, 1_000, halted="the first"), None, GROWN, "the first"),
        (ClusterFacts(7, 1, 1_000, halted="the first"), None, ClusterFacts(8, 1, 1), "the first"),
        (ClusterFacts(7, 1, 1_000, halted="the first"), None, RESUMED, ""),
        (FACTS, Doubt("t", 0, "a shorter log"), GROWN, "t found: a shorter log"),
        (FACTS, Doubt("t", 0, "a shorter log"), RESUMED, ""),
    ],
)
def test_the_leader_keeps_the_first_reason_until_somebody_resumes(
    known: ClusterFacts | None, doubt: Doubt | None, found: ClusterFacts, why: str
) -> None:
    said = _why_halted(known, found.incarnation, doubt, found)
    assert why in said
    assert bool(said) == bool(why)
