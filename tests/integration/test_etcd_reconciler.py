"""The reconciler on a real etcd: deaths, drains, outages, wiped registries, changes of leader."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc
import pytest
from aetcd import rpc
from tests.integration.etcd_proxy import EtcdProxy
from tests.integration.etcd_world import TTL_MS, Node, fresh_prefix, mono_us, node_at, running, until

from tickwheel.embedded.etcd import EmbeddedEtcd
from tickwheel.ports import RegistrySnapshot, ViewChange
from tickwheel.services.coordinator.reconciler import (
    GENERATION_LIFT,
    Outcome,
    PassReport,
    Reconciler,
    ReconcilerSettings,
)

# grpc.aio has one poller for the process, and complains when it outlives an event loop.
pytestmark = pytest.mark.asyncio(loop_scope="session")

SHARDS = 256


class ShiftedClock:
    """The host's clocks; the cluster clock can be moved ahead, so that no test waits for a hold to pass."""

    def __init__(self) -> None:
        self.ahead_us = 0

    def now_us(self) -> int:
        return time.time_ns() // 1_000 + self.ahead_us

    def mono_us(self) -> int:
        return mono_us()


class Cluster:
    """A coordinator's reconciler beside a view of what stands in etcd."""

    def __init__(self, node: Node, generations: dict[int, int]) -> None:
        self.clock = ShiftedClock()
        self.reports: list[PassReport] = []
        self.generations = generations
        self.reconciler = Reconciler(
            node.registry,
            node.election,
            self.clock,
            ReconcilerSettings(shard_count=SHARDS, lease_ttl_ms=TTL_MS),
            self._postgres_generations,
            self.reports.append,
        )
        self.seen = RegistrySnapshot(0, 0)
        self.history: list[RegistrySnapshot] = []

    async def _postgres_generations(self) -> Mapping[int, int]:
        return self.generations

    def see(self, snapshot: RegistrySnapshot, _: ViewChange) -> None:
        self.seen = snapshot
        self.history.append(snapshot)

    def held(self) -> Counter[str]:
        return Counter(found.timer_id for found in self.seen.assignments.values())

    def is_settled(self) -> bool:
        return bool(self.reports) and self.reports[-1].outcome is Outcome.SETTLED

    def outcomes(self) -> set[Outcome]:
        return {report.outcome for report in self.reports}


@asynccontextmanager
async def cluster_on(node: Node, generations: dict[int, int] | None = None) -> AsyncIterator[Cluster]:
    cluster = Cluster(node, {} if generations is None else generations)
    async with running(cluster.reconciler.run(), node.registry.watch(cluster.see)):
        yield cluster


async def test_the_shards_of_a_killed_timer_go_to_the_survivors_and_no_other_moves(
    etcd_endpoint: str,
) -> None:
    prefix, url = fresh_prefix(), f"http://{etcd_endpoint}"
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(node_at(url, prefix=prefix))
        two = await stack.enter_async_context(node_at(url, prefix=prefix, stand=False))
        async with AsyncExitStack() as doomed_stack:
            doomed = await doomed_stack.enter_async_context(node_at(url, prefix=prefix, stand=False))
            for node in (one, two, doomed):
                await node.registration.wait_registered()
            cluster = await stack.enter_async_context(cluster_on(one))
            await until(lambda: len(cluster.seen.assignments) == SHARDS, 10, "the first assignment")
            assert sorted(cluster.held().values()) == [85, 85, 86]
            await until(cluster.is_settled, 5, "peace")
            before = cluster.seen.assignments
        seconds = await until(
            lambda: doomed.node_id not in cluster.held(), TTL_MS / 1_000 + 3, "reassignment"
        )
        print(f"timer killed -> its shards reassigned: {seconds:.2f} s")
        assert seconds < TTL_MS / 1_000 + 1.0
        assert sorted(cluster.held().values()) == [128, 128]
        for shard, found in cluster.seen.assignments.items():
            moved = before[shard].timer_id == doomed.node_id
            assert found.generation == before[shard].generation + moved
            assert moved or found == before[shard]


async def test_a_second_pass_writes_nothing_and_load_makes_no_pass(etcd_endpoint: str) -> None:
    async with node_at(f"http://{etcd_endpoint}", prefix=fresh_prefix()) as node, cluster_on(node) as cluster:
        await until(lambda: len(cluster.seen.assignments) == SHARDS, 10, "the first assignment")
        await until(cluster.is_settled, 5, "peace")
        revisions = {found.mod_revision for found in cluster.seen.assignments.values()}
        for _ in range(3):
            assert (await cluster.reconciler.step()).outcome is Outcome.SETTLED
        assert {found.mod_revision for found in cluster.seen.assignments.values()} == revisions


async def test_a_drained_timer_is_emptied_in_bounded_batches_and_a_newcomer_is_filled_after_the_hold(
    etcd_endpoint: str,
) -> None:
    prefix, url = fresh_prefix(), f"http://{etcd_endpoint}"
    async with node_at(url, prefix=prefix) as one, cluster_on(one) as cluster:
        await until(lambda: len(cluster.seen.assignments) == SHARDS, 10, "the first assignment")
        async with AsyncExitStack() as two_stack:
            two = await two_stack.enter_async_context(node_at(url, prefix=prefix, stand=False))
            await until(lambda: two.node_id in cluster.seen.timers, 5, "the newcomer")
            await cluster.reconciler.step()
            assert cluster.held()[two.node_id] == 0, "shards that have just moved are held"
            cluster.clock.ahead_us += 2 * TTL_MS * 1_000
            await until(lambda: cluster.held()[two.node_id] == SHARDS // 2, 10, "balance")
            await one.registry.request_drain(two.node_id)
            await until(lambda: cluster.held()[two.node_id] == 0, 10, "the drain")
        for report in cluster.reports:
            reasons = Counter(move.reason.value for move in report.moves)
            assert reasons["drain"] <= 32
            assert reasons["rebalance"] <= 16
        await until(lambda: two.node_id not in cluster.seen.timers, TTL_MS / 1_000 + 2, "the timer's end")
        await until(lambda: not cluster.seen.drains, 10, "the request of a timer that is gone is forgotten")


async def test_an_outage_of_etcd_kills_nobody(short_folder: Path) -> None:
    """Everybody is absent for a moment when etcd comes back: the leases lapsed while it was frozen."""
    with EmbeddedEtcd(short_folder / "etcd-frozen") as server:
        async with (
            EtcdProxy(server.endpoint) as late,
            node_at(f"http://{server.endpoint}", prefix="/frozen/") as one,
            node_at(late.url, prefix="/frozen/", stand=False) as two,
        ):
            await one.registration.wait_registered()
            await two.registration.wait_registered()
            async with cluster_on(one) as cluster:
                await until(lambda: len(cluster.seen.assignments) == SHARDS, 10, "the first assignment")
                before = {shard: found.timer_id for shard, found in cluster.seen.assignments.items()}
                server.pause()
                try:
                    # Both must have given up their leases before it goes on.
                    await until(lambda: one.lease.lease_id() is None, TTL_MS / 1_000 + 1, "the end of trust")
                    frozen_at = mono_us()
                    await until(lambda: mono_us() - frozen_at > TTL_MS * 1_000, 10, "a whole TTL")
                    # The other timer comes back a little later than the leader does.
                    late.refuse.update(dict.fromkeys(("LeaseGrant", "Txn"), grpc.StatusCode.UNAVAILABLE))
                    cluster.reports.clear()
                finally:
                    server.resume()
                await until(
                    lambda: Outcome.WAITING in cluster.outcomes(), 10, "a leader that sees one absent"
                )
                assert one.election.term() is not None
                late.refuse.clear()
                await until(lambda: Outcome.SETTLED in cluster.outcomes(), 10, "everybody is back")
                resumed_at = mono_us()
                await until(lambda: mono_us() - resumed_at > TTL_MS * 1_000, 10, "a whole TTL")
                assert {shard: found.timer_id for shard, found in cluster.seen.assignments.items()} == before


async def test_a_wiped_registry_is_lifted_above_postgres(etcd_endpoint: str) -> None:
    generations: dict[int, int] = {}
    async with (
        node_at(f"http://{etcd_endpoint}", prefix=fresh_prefix()) as node,
        cluster_on(node, generations) as cluster,
    ):
        await until(lambda: len(cluster.seen.assignments) == SHARDS, 10, "the first assignment")
        generations.update({shard: 40 + shard for shard in range(SHARDS)})
        first = node.election.term()
        await node.registry.wipe()
        await until(lambda: node.election.term() not in (None, first), 10, "a new term")
        await until(lambda: len(cluster.seen.assignments) == SHARDS, TTL_MS / 1_000 + 5, "assignments again")
        for shard, found in cluster.seen.assignments.items():
            assert found.generation == 40 + shard + GENERATION_LIFT
        assert Outcome.WAITING in cluster.outcomes(), "the owners were given a TTL to come back"


async def test_a_leader_that_does_not_know_postgres_generations_writes_nothing(etcd_endpoint: str) -> None:
    async with node_at(f"http://{etcd_endpoint}", prefix=fresh_prefix()) as node:
        await node.registration.wait_registered()
        await until(lambda: node.election.term() is not None, 5, "a leader")
        cluster = Cluster(node, {})
        answers: list[dict[int, int]] = []

        async def away() -> dict[int, int]:
            if not answers:
                raise OSError("connection refused")
            return answers[0]

        cluster.reconciler.postgres_generations = away
        assert (await cluster.reconciler.step()).outcome is Outcome.BLIND
        assert (await node.registry.snapshot()).assignments == {}
        answers.append({})
        assert (await cluster.reconciler.step()).outcome is Outcome.WRITTEN
        assert len((await node.registry.snapshot()).assignments) == SHARDS


async def test_the_next_leader_goes_on_where_the_killed_one_stopped(etcd_endpoint: str) -> None:
    """A host dies with leader and timer on it: the standby has watched all along, and judges at once."""
    prefix, url = fresh_prefix(), f"http://{etcd_endpoint}"
    async with AsyncExitStack() as stack:
        standby = await stack.enter_async_context(node_at(url, prefix=prefix, stand=False))
        async with AsyncExitStack() as host:
            leader = await host.enter_async_context(node_at(url, prefix=prefix))
            await leader.registration.wait_registered()
            await standby.registration.wait_registered()
            first = await host.enter_async_context(cluster_on(leader))
            await until(lambda: len(first.seen.assignments) == SHARDS, 10, "the first assignment")
            second = await stack.enter_async_context(cluster_on(standby))
            await stack.enter_async_context(running(standby.election.run()))
            ready_at = mono_us()
            await until(lambda: mono_us() - ready_at > TTL_MS * 1_000, 10, "a TTL of watching")
            assert second.outcomes() == {Outcome.STANDBY}
        seconds = await until(
            lambda: second.held()[standby.node_id] == SHARDS, TTL_MS / 1_000 + 5, "everything at the survivor"
        )
        print(f"host with leader and timer killed -> reassigned: {seconds:.2f} s")
        assert seconds < TTL_MS / 1_000 + 1.5
        assert not first.history or first.seen.leader_id == leader.node_id


async def test_a_shard_map_with_an_unreadable_value_is_mended(etcd_endpoint: str) -> None:
    async with node_at(f"http://{etcd_endpoint}", prefix=fresh_prefix()) as node, cluster_on(node) as cluster:
        await until(lambda: len(cluster.seen.assignments) == SHARDS, 10, "the first assignment")
        key = f"{node.client.settings.prefix}assignments/9".encode()
        put = rpc.RequestOp(request_put=rpc.PutRequest(key=key, value=b"\xff"))
        await node.client.call("Txn", rpc.TxnRequest(success=[put]))
        await until(lambda: cluster.seen.assignments[9].generation == 0, 5, "the broken value")
        await until(
            lambda: cluster.seen.assignments[9].timer_id == node.node_id, TTL_MS / 1_000 + 3, "mended"
        )
