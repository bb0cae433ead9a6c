"""One leader at a time, on a real etcd."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest
from tests.integration.etcd_proxy import EtcdProxy
from tests.integration.etcd_world import TTL_MS, Node, fresh_prefix, node_at, until

from tickwheel.embedded.etcd import EmbeddedEtcd
from tickwheel.ports import AssignmentWrite, ClusterFacts, LeaderLost

# grpc.aio has one poller for the process, and complains when it outlives an event loop.
pytestmark = pytest.mark.asyncio(loop_scope="session")


def _leaders(*nodes: Node) -> list[Node]:
    return [node for node in nodes if node.election.term() is not None]


async def test_leadership_is_handed_over_at_once_when_the_leader_resigns(etcd_endpoint: str) -> None:
    prefix, url = fresh_prefix(), f"http://{etcd_endpoint}"
    async with node_at(url, prefix=prefix) as one, node_at(url, prefix=prefix) as two:
        await until(lambda: len(_leaders(one, two)) == 1, 5, "a leader")
        (leader,) = _leaders(one, two)
        standby = two if leader is one else one
        old = leader.election.term()
        await until(lambda: standby.election.leader_id() == leader.node_id, 2, "the standby knows")
        changed = asyncio.create_task(standby.election.wait_for_change(None))
        await leader.election.resign()
        assert leader.election.term() is None
        seconds = await until(changed.done, 2, "the hand-over")
        assert seconds < 1
        new = changed.result()
        assert new is not None
        assert old is not None
        assert new.create_revision > old.create_revision
        await until(lambda: leader.election.leader_id() == standby.node_id, 2, "the old leader knows")


async def test_a_dead_leader_is_followed_within_its_ttl_and_half_a_second(etcd_endpoint: str) -> None:
    prefix, url = fresh_prefix(), f"http://{etcd_endpoint}"
    async with AsyncExitStack() as stack:
        async with node_at(url, prefix=prefix) as leader:
            await until(lambda: leader.election.term() is not None, 5, "a leader")
            standby = await stack.enter_async_context(node_at(url, prefix=prefix))
            await until(lambda: standby.election.leader_id() == leader.node_id, 5, "a standby")
        # `node_at` ends without a goodbye, as a killed process does.
        seconds = await until(
            lambda: standby.election.term() is not None, TTL_MS / 1_000 + 2, "the next leader"
        )
        print(f"leader dead -> next leader: {seconds:.2f} s")
        assert seconds < TTL_MS / 1_000 + 1.0  # etcd itself looks for lapsed leases every half second


async def test_two_nodes_of_one_configured_name_never_lead_together(etcd_endpoint: str) -> None:
    """C-O03."""
    prefix, url = fresh_prefix(), f"http://{etcd_endpoint}"
    async with (
        node_at(url, prefix=prefix, name="same") as one,
        node_at(url, prefix=prefix, name="same") as two,
    ):
        await one.registration.wait_registered()
        await two.registration.wait_registered()
        assert one.node_id != two.node_id
        assert set((await one.registry.snapshot()).timers) == {one.node_id, two.node_id}
        await until(lambda: len(_leaders(one, two)) == 1, 5, "a leader")
        for _ in range(100):
            await one.registry.snapshot()
            assert len(_leaders(one, two)) == 1


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED])
async def test_an_error_while_campaigning_is_not_success(etcd_endpoint: str, code: grpc.StatusCode) -> None:
    """C-O02."""
    prefix = fresh_prefix()
    async with node_at(f"http://{etcd_endpoint}", prefix=prefix) as owner, EtcdProxy(etcd_endpoint) as proxy:
        await until(lambda: owner.election.term() is not None, 5, "the owner leads")
        proxy.refuse["Txn"] = code
        async with node_at(proxy.url, prefix=prefix) as other:
            await until(lambda: proxy.calls["Txn"] >= 10, 10, "ten attempts")
            assert other.election.term() is None
            assert other.registry is not None
            proxy.refuse.clear()
            await until(lambda: other.election.leader_id() == owner.node_id, 5, "the truth")
            assert other.election.term() is None


async def test_a_lost_answer_to_the_winning_campaign_is_found_out_by_reading(etcd_endpoint: str) -> None:
    prefix = fresh_prefix()
    async with EtcdProxy(etcd_endpoint) as proxy:
        proxy.drop.add("Txn")
        async with node_at(proxy.url, prefix=prefix) as node:
            await until(lambda: proxy.calls["Txn"] >= 4, 10, "campaigns without an answer")
            assert node.election.term() is None
            proxy.drop.clear()
            await until(lambda: node.election.term() is not None, 5, "leadership, by the lease on the key")


async def test_a_leader_that_hears_nothing_stops_before_another_can_be_elected(etcd_endpoint: str) -> None:
    """C-O01, C-O11: the old leader's trust ends first, and its late write is refused."""
    prefix = fresh_prefix()
    async with EtcdProxy(etcd_endpoint) as proxy, AsyncExitStack() as stack:
        old = await stack.enter_async_context(node_at(proxy.url, prefix=prefix))
        await until(lambda: old.election.term() is not None, 5, "a leader")
        term = old.election.term()
        assert term is not None
        new = await stack.enter_async_context(node_at(f"http://{etcd_endpoint}", prefix=prefix))
        await new.registration.wait_registered()
        # Nothing of the lease gets through, nor does the watch; plain calls do.
        proxy.refuse["LeaseKeepAlive"] = proxy.refuse["Watch"] = grpc.StatusCode.UNAVAILABLE
        proxy.refuse["LeaseGrant"] = grpc.StatusCode.UNAVAILABLE
        await proxy.cut()  # the streams that are open already
        await until(lambda: old.election.term() is None, TTL_MS / 1_000, "the old leader's end")
        assert new.election.term() is None, "two leaders"
        await until(lambda: new.election.term() is not None, TTL_MS / 1_000 + 1, "the new leader")
        # Late, and through a way that works: the guard refuses.
        write = AssignmentWrite(3, old.node_id, 1, 0, 0)
        with pytest.raises(LeaderLost) as lost:
            await new.registry.assign(term, [write])
        assert lost.value.expected == term.create_revision
        with pytest.raises(LeaderLost):
            await new.registry.put_cluster_facts(term, ClusterFacts(1, 1, 1))
        assert (await new.registry.snapshot()).assignments == {}


async def test_leadership_and_registration_come_back_after_etcd_was_killed(short_folder: Path) -> None:
    with EmbeddedEtcd(short_folder / "etcd-kill") as server:
        async with node_at(f"http://{server.endpoint}", prefix="/kill/") as node:
            await until(lambda: node.election.term() is not None, 5, "a leader")
            await node.registration.wait_registered()
            first = node.election.term()
            server.kill9()
            await until(lambda: node.election.term() is None, TTL_MS / 1_000, "the end of trust")
            await asyncio.to_thread(server.start)
            seconds = await until(lambda: node.election.term() is not None, 5, "leadership again")
            print(f"etcd back -> leader again: {seconds:.2f} s")
            assert set((await node.registry.snapshot()).timers) == {node.node_id}
            again = node.election.term()
            assert first is not None
            assert again is not None
            assert again.create_revision >= first.create_revision
