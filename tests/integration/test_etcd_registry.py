"""Assignments, epochs, proofs and facts on a real etcd."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio
from aetcd import rpc
from tests.integration.etcd_proxy import EtcdProxy
from tests.integration.etcd_world import Node, client_at, fresh_prefix, mono_us, node_at, running, until

from tickwheel.etcd.client import put_op
from tickwheel.etcd.lease import LeaseSettings, NodeLease
from tickwheel.etcd.registration import Registration
from tickwheel.etcd.registry import EtcdRegistry
from tickwheel.ports import (
    AssignmentWrite,
    ClusterFacts,
    IdentityTaken,
    LeaderTerm,
    RegistryUnavailable,
    TimerRecord,
)

# grpc.aio has one poller for the process, and complains when it outlives an event loop.
pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(loop_scope="session")
async def leader(etcd_endpoint: str) -> AsyncIterator[Node]:
    async with node_at(f"http://{etcd_endpoint}", prefix=fresh_prefix()) as node:
        await until(lambda: node.election.term() is not None, 5, "a leader")
        await node.registration.wait_registered()
        yield node


def _term(node: Node) -> LeaderTerm:
    term = node.election.term()
    assert term is not None
    return term


def _writes(shards: range, timer_id: str, generation: int, revision: int = 0) -> list[AssignmentWrite]:
    return [AssignmentWrite(shard, timer_id, generation, 5, revision) for shard in shards]


async def test_256_shards_are_assigned_in_transactions_of_at_most_128_operations(etcd_endpoint: str) -> None:
    """A default etcd refuses more; three transactions are enough."""
    async with EtcdProxy(etcd_endpoint) as proxy, AsyncExitStack() as stack:
        leader = await stack.enter_async_context(node_at(proxy.url, prefix=fresh_prefix()))
        await until(lambda: leader.election.term() is not None, 5, "a leader")
        await leader.registration.wait_registered()
        before = proxy.calls["Txn"]
        outcome = await leader.registry.assign(_term(leader), _writes(range(256), "t", 1))
        assert proxy.calls["Txn"] - before <= 3 + 1  # one more may be a standby's campaign
        assert outcome.written == tuple(range(256))
        assert outcome.conflicted == ()
        assignments = (await leader.registry.snapshot()).assignments
        assert set(assignments) == set(range(256))
        assert {(a.timer_id, a.generation, a.moved_at_us) for a in assignments.values()} == {("t", 1, 5)}


async def test_a_value_that_changed_meanwhile_is_not_overwritten_and_the_rest_is_written(
    leader: Node,
) -> None:
    await leader.registry.assign(_term(leader), _writes(range(1), "other", 7))
    outcome = await leader.registry.assign(_term(leader), _writes(range(4), "mine", 1))
    assert outcome.written == (1, 2, 3)
    assert outcome.conflicted == (0,)
    assignments = (await leader.registry.snapshot()).assignments
    assert (assignments[0].timer_id, assignments[0].generation) == ("other", 7)
    # With the revision that is there now it goes through.
    outcome = await leader.registry.assign(
        _term(leader), _writes(range(1), "mine", 8, assignments[0].mod_revision)
    )
    assert outcome.written == (0,)


async def test_a_proof_covers_only_what_is_still_mine(leader: Node) -> None:
    registry = leader.registry
    await registry.raise_incarnation(3)
    await registry.assign(_term(leader), _writes(range(4), "mine", 2))
    assert await registry.prove("mine", {0: 2, 1: 1, 3: 2, 9: 1}, 3) == {0, 3}
    assert await registry.prove("another", {0: 2}, 3) == frozenset()
    assert await registry.prove("mine", {0: 2}, 2) == frozenset()
    await registry.wipe()
    assert await registry.prove("mine", {0: 2}, 3) == frozenset()


async def test_no_proof_is_given_while_etcd_does_not_answer(etcd_endpoint: str) -> None:
    async with EtcdProxy(etcd_endpoint) as proxy, client_at(proxy.url, prefix=fresh_prefix()) as client:
        registry = EtcdRegistry(client, mono_us)
        await registry.snapshot()
        proxy.drop.add("Txn")
        with pytest.raises(RegistryUnavailable):
            await registry.prove("mine", {0: 1}, 0)


async def test_epochs_and_the_incarnation_only_rise(leader: Node) -> None:
    registry = leader.registry
    await registry.raise_epochs({shard: 10 + shard for shard in range(256)})
    await registry.raise_epochs({0: 9, 1: 12, 300: 0})
    epochs = await registry.epochs()
    assert (epochs[0], epochs[1], epochs[255], epochs[300]) == (10, 12, 265, 0)
    await asyncio.gather(*(registry.raise_epochs({5: epoch}) for epoch in (100, 300, 200)))
    assert (await registry.epochs())[5] == 300
    assert await registry.raise_incarnation(2) == 2
    assert await registry.raise_incarnation(1) == 2
    assert await registry.incarnation() == 2


async def test_cluster_facts_are_kept(leader: Node) -> None:
    assert await leader.registry.cluster_facts() is None
    facts = ClusterFacts(system_identifier=7_412_345_678_901_234_567, timeline=3, wal_position=1 << 60)
    await leader.registry.put_cluster_facts(_term(leader), facts)
    assert await leader.registry.cluster_facts() == facts


async def test_an_unreadable_value_is_skipped_alone(leader: Node) -> None:
    prefix = leader.client.settings.prefix
    await leader.registry.assign(_term(leader), _writes(range(2), "mine", 1))
    broken = [
        put_op(f"{prefix}assignments/1", b"{not json"),
        put_op(f"{prefix}assignments/x", b"{}"),
        put_op(f"{prefix}timers/t", b'{"capacity": "many"}'),
    ]
    await leader.client.call("Txn", rpc.TxnRequest(success=broken))
    snapshot = await leader.registry.snapshot()
    assert set(snapshot.assignments) == {0, 1}
    assert (snapshot.assignments[1].timer_id, snapshot.assignments[1].generation) == ("", 0)
    assert set(snapshot.timers) == {leader.node_id}
    assert await leader.registry.prove("mine", {0: 1, 1: 1}, 0) == {0}


async def test_a_timer_tells_its_load_and_withdraws(leader: Node) -> None:
    leader.registration.update(load=42)
    seen: list[int | None] = []

    async def look() -> None:
        while not seen or seen[-1] != 42:
            record = (await leader.registry.snapshot()).timers.get(leader.node_id)
            seen.append(record.load if record is not None else None)

    async with running(look()) as (task,):
        await until(task.done, 5, "the load")
    await leader.registration.withdraw()
    assert leader.node_id not in (await leader.registry.snapshot()).timers


async def test_an_id_that_another_live_process_uses_is_refused(leader: Node) -> None:
    lease = NodeLease(leader.client, LeaseSettings(), mono_us)
    record = TimerRecord(leader.node_id, "127.0.0.1:9", "", "test", 1)
    registration = Registration(leader.client, lease, record, mono_us)
    keeper = asyncio.create_task(lease.run())
    with pytest.raises(ExceptionGroup) as group:
        await registration.run()
    keeper.cancel()
    assert group.group_contains(IdentityTaken)


async def test_the_next_endpoint_is_used_when_one_is_dead(etcd_endpoint: str) -> None:
    dead = "http://127.0.0.1:1"
    async with client_at(dead, dead, f"http://{etcd_endpoint}", prefix=fresh_prefix()) as client:
        response = await client.call("Range", rpc.RangeRequest(key=b"x"))
        assert response.header.revision > 0


async def test_every_call_has_a_deadline(etcd_endpoint: str) -> None:
    async with (
        EtcdProxy(etcd_endpoint) as proxy,
        client_at(proxy.url, prefix=fresh_prefix(), call_timeout_ms=100, call_attempts_max=2) as client,
    ):
        proxy.hold["Range"] = asyncio.Event()
        with pytest.raises(RegistryUnavailable) as caught:
            await client.call("Range", rpc.RangeRequest(key=b"x"))
        assert caught.value.code == "DEADLINE_EXCEEDED"
        assert proxy.calls["Range"] == 2


async def test_a_write_without_an_answer_is_not_sent_again(etcd_endpoint: str) -> None:
    async with (
        EtcdProxy(etcd_endpoint) as proxy,
        client_at(proxy.url, prefix=fresh_prefix(), call_timeout_ms=100) as client,
    ):
        proxy.drop.add("Txn")
        with pytest.raises(RegistryUnavailable):
            await EtcdRegistry(client, mono_us).request_drain("x")
        assert proxy.calls["Txn"] == 1
