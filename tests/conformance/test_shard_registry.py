"""What every shard registry does alike: the real one on etcd, and the one in memory that other tests use."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from typing import Protocol

import msgspec
import pytest
import pytest_asyncio
from aetcd import rpc
from tests.fakes.shard_registry import MemoryShardRegistry
from tests.integration.etcd_world import client_at, fresh_prefix, mono_us, running, until

from tickwheel.etcd.client import EtcdClient, delete_op, put_op
from tickwheel.etcd.keys import Keys
from tickwheel.etcd.registry import EtcdRegistry
from tickwheel.ports import (
    AssignmentWrite,
    ClusterFacts,
    Doubt,
    LeaderLost,
    LeaderTerm,
    RegistrySnapshot,
    Resumption,
    ShardRegistry,
    TimerRecord,
    ViewChange,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")


class Registry(ShardRegistry, Protocol):
    """A registry with the knobs that this suite turns; election and registration have tests of their own."""

    async def lead(self, node_id: str) -> LeaderTerm: ...
    async def depose(self) -> None: ...
    async def register(self, record: TimerRecord) -> None: ...
    async def kill(self, timer_id: str) -> None: ...
    async def wipe(self) -> None: ...


class EtcdWithKnobs(EtcdRegistry):
    """The real registry, whose leader and timers are written by hand."""

    def __init__(self, client: EtcdClient) -> None:
        super().__init__(client, mono_us)
        self._direct = client
        self._at = Keys(client.settings.prefix)

    async def _do(self, operation: object) -> int:
        response = await self._direct.call("Txn", rpc.TxnRequest(success=[operation]))
        return int(response.header.revision)

    async def lead(self, node_id: str) -> LeaderTerm:
        await self.depose()
        return LeaderTerm(node_id, await self._do(put_op(self._at.leader, node_id.encode())))

    async def depose(self) -> None:
        await self._do(delete_op(self._at.leader))

    async def register(self, record: TimerRecord) -> None:
        await self._do(put_op(self._at.timer(record.timer_id), msgspec.json.encode(record)))

    async def kill(self, timer_id: str) -> None:
        await self._do(delete_op(self._at.timer(timer_id)))


@pytest_asyncio.fixture(loop_scope="session", params=["memory", "etcd"])
async def registry(request: pytest.FixtureRequest) -> AsyncIterator[Registry]:
    if request.param == "memory":
        yield MemoryShardRegistry()
        return
    endpoint = request.getfixturevalue("etcd_endpoint")
    async with client_at(f"http://{endpoint}", prefix=fresh_prefix()) as client:
        yield EtcdWithKnobs(client)


def _record(timer_id: str, load: int = 0) -> TimerRecord:
    return TimerRecord(timer_id, "10.0.0.1:7100", "timer.example.org:443", "1.2.3", 4, load)


def _write(shard: int, timer_id: str = "a", generation: int = 1, revision: int = 0) -> AssignmentWrite:
    return AssignmentWrite(shard, timer_id, generation, 77, revision)


async def test_an_empty_registry_is_empty(registry: Registry) -> None:
    snapshot = await registry.snapshot()
    assert dict(snapshot.timers) == {}
    assert dict(snapshot.assignments) == {}
    assert snapshot.drains == frozenset()
    assert snapshot.leader_id is None
    assert await registry.epochs() == {}
    assert await registry.incarnation() == 0
    assert await registry.cluster_facts() is None


async def test_timers_come_and_go_whole(registry: Registry) -> None:
    await registry.register(_record("a", 3))
    await registry.register(_record("b"))
    assert (await registry.snapshot()).timers == {"a": _record("a", 3), "b": _record("b")}
    await registry.kill("a")
    assert set((await registry.snapshot()).timers) == {"b"}


async def test_revisions_only_grow_and_the_history_stays(registry: Registry) -> None:
    first = await registry.snapshot()
    await registry.register(_record("a"))
    second = await registry.snapshot()
    assert second.revision > first.revision
    assert second.history == first.history


async def test_only_the_leader_in_force_writes(registry: Registry) -> None:
    old = await registry.lead("one")
    new = await registry.lead("two")
    assert new.create_revision > old.create_revision
    assert (await registry.snapshot()).leader_id == "two"
    with pytest.raises(LeaderLost) as lost:
        await registry.assign(old, [_write(0)])
    assert (lost.value.expected, lost.value.found) == (old.create_revision, new.create_revision)
    with pytest.raises(LeaderLost):
        await registry.put_cluster_facts(old, ClusterFacts(1, 2, 3))
    await registry.depose()
    with pytest.raises(LeaderLost) as lost:
        await registry.assign(new, [_write(0)])
    assert lost.value.found == 0
    assert (await registry.snapshot()).assignments == {}
    assert await registry.cluster_facts() is None


async def test_a_write_replaces_only_the_value_that_it_names(registry: Registry) -> None:
    term = await registry.lead("one")
    outcome = await registry.assign(term, [_write(0), _write(1)])
    assert (outcome.written, outcome.conflicted) == ((0, 1), ())
    found = (await registry.snapshot()).assignments
    assert (found[0].timer_id, found[0].generation, found[0].moved_at_us) == ("a", 1, 77)
    stale = await registry.assign(
        term, [_write(0, "b", 2), _write(1, "b", 2, found[1].mod_revision), _write(2)]
    )
    assert (set(stale.written), stale.conflicted) == ({1, 2}, (0,))
    after = (await registry.snapshot()).assignments
    assert {shard: (value.timer_id, value.generation) for shard, value in after.items()} == {
        0: ("a", 1),
        1: ("b", 2),
        2: ("a", 1),
    }
    assert after[0] == found[0]
    assert after[1].mod_revision > found[1].mod_revision


async def test_nothing_to_assign_is_no_error(registry: Registry) -> None:
    term = await registry.lead("one")
    outcome = await registry.assign(term, [])
    assert (outcome.written, outcome.conflicted) == ((), ())


async def test_a_proof_needs_owner_generation_and_incarnation(registry: Registry) -> None:
    term = await registry.lead("one")
    await registry.assign(term, [_write(shard, "mine", 5) for shard in range(3)])
    assert await registry.raise_incarnation(2) == 2
    assert await registry.prove("mine", {0: 5, 1: 4, 2: 5, 3: 5}, 2) == {0, 2}
    assert await registry.prove("other", {0: 5}, 2) == frozenset()
    assert await registry.prove("mine", {0: 5}, 1) == frozenset()
    assert await registry.prove("mine", {}, 2) == frozenset()


async def test_epochs_and_incarnation_only_rise(registry: Registry) -> None:
    await registry.raise_epochs({0: 5, 1: 0})
    await registry.raise_epochs({0: 4, 1: 1, 2: 9})
    assert await registry.epochs() == {0: 5, 1: 1, 2: 9}
    assert await registry.raise_incarnation(3) == 3
    assert await registry.raise_incarnation(1) == 3
    assert await registry.incarnation() == 3


async def test_facts_are_the_last_ones_put(registry: Registry) -> None:
    term = await registry.lead("one")
    await registry.put_cluster_facts(term, ClusterFacts(1, 2, 3))
    await registry.put_cluster_facts(term, ClusterFacts(1, 2, 4))
    assert await registry.cluster_facts() == ClusterFacts(1, 2, 4)
    await registry.put_cluster_facts(term, ClusterFacts(1, 3, 2, incarnation=5, halted="another timeline"))
    assert await registry.cluster_facts() == ClusterFacts(1, 3, 2, 5, "another timeline")


async def test_the_last_doubt_is_remembered(registry: Registry) -> None:
    assert await registry.doubt() is None
    await registry.put_doubt(Doubt("a", 0, "another timeline"))
    await registry.put_doubt(Doubt("b", 1, "a shorter log"))
    assert await registry.doubt() == Doubt("b", 1, "a shorter log")


async def test_the_last_resumption_is_remembered(registry: Registry) -> None:
    assert await registry.resumption() is None
    await registry.put_resumption(Resumption(3, 1_700_000_000_000_000, 10_000))
    await registry.put_resumption(Resumption(4, 1_700_000_000_000_001, 60_000))
    assert await registry.resumption() == Resumption(4, 1_700_000_000_000_001, 60_000)


async def test_the_longest_lease_is_never_forgotten(registry: Registry) -> None:
    assert await registry.lease_ms_max() == 0
    await registry.raise_lease_ms_max(10_000)
    await registry.raise_lease_ms_max(60_000)
    await registry.raise_lease_ms_max(10_000)
    assert await registry.lease_ms_max() == 60_000


async def test_drains_are_asked_for_and_taken_back_any_number_of_times(registry: Registry) -> None:
    await registry.cancel_drain("a")
    await registry.request_drain("a")
    await registry.request_drain("a")
    assert (await registry.snapshot()).drains == {"a"}
    await registry.cancel_drain("a")
    await registry.cancel_drain("a")
    assert (await registry.snapshot()).drains == set()


async def test_a_watch_starts_with_what_is_there_and_tells_each_change(registry: Registry) -> None:
    await registry.register(_record("a"))
    seen: list[tuple[RegistrySnapshot, ViewChange]] = []
    async with running(registry.watch(lambda snapshot, change: seen.append((snapshot, change)))):
        await until(lambda: bool(seen), 5, "the snapshot")
        assert set(seen[0][0].timers) == {"a"}
        term = await registry.lead("one")
        await registry.assign(term, [_write(4)])
        await registry.request_drain("a")
        await registry.kill("a")
        await until(lambda: not seen[-1][0].timers, 5, "the last change")
        assert seen[-1][0] == await registry.snapshot()
    assert [change for _, change in seen] == [ViewChange.CURRENT, *[ViewChange.CHANGED] * (len(seen) - 1)]
    assert all(before.revision < after.revision for (before, _), (after, _) in itertools.pairwise(seen))


async def test_a_wipe_forgets_everything(registry: Registry) -> None:
    term = await registry.lead("one")
    await registry.assign(term, [_write(0, "mine", 5)])
    await registry.raise_epochs({0: 5})
    await registry.raise_incarnation(1)
    await registry.wipe()
    assert (await registry.snapshot()).assignments == {}
    assert await registry.prove("mine", {0: 5}, 1) == frozenset()
    assert await registry.epochs() == {}
    with pytest.raises(LeaderLost):
        await registry.assign(term, [_write(0)])
