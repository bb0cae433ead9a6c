"""Safety under random faults, and with a real etcd of three members of which one is killed."""

from __future__ import annotations

import asyncio
import os
import random
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from tests.integration.etcd_cluster import EtcdCluster
from tests.integration.etcd_proxy import EtcdProxy
from tests.integration.etcd_world import TTL_MS, Node, fresh_prefix, mono_us, node_at, running, until

from tickwheel.ports import AssignmentWrite, LeaderLost, LeaderTerm, RegistryUnavailable

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]

_RPCS = ("Txn", "Watch", "LeaseKeepAlive", "LeaseGrant")
_SECONDS = 20


class History:
    """Every guarded write that was confirmed, and every moment at which two nodes trusted a term."""

    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = nodes
        self.writes: list[tuple[int, LeaderTerm]] = []  # generation written, term
        self.double: list[set[LeaderTerm]] = []
        self.terms: set[LeaderTerm] = set()

    async def sample(self) -> None:
        while True:
            now = {term for node in self.nodes if (term := node.election.term()) is not None}
            self.terms |= now
            if len(now) > 1:
                self.double.append(now)
            await asyncio.sleep(0.002)

    async def write(self, node: Node) -> None:
        """As the reconciler does: read, write guarded, never take an error for success."""
        while True:
            term = node.election.term()
            if term is None:
                await node.election.wait_for_change(None)
                continue
            try:
                found = (await node.registry.snapshot()).assignments.get(0)
                generation, revision = (found.generation, found.mod_revision) if found else (0, 0)
                outcome = await node.registry.assign(
                    term, [AssignmentWrite(0, node.node_id, generation + 1, 0, revision)]
                )
                if outcome.written:
                    self.writes.append((generation + 1, term))
            except (RegistryUnavailable, LeaderLost):
                pass
            await asyncio.sleep(0.02)


async def _disturb(proxy: EtcdProxy, dice: random.Random) -> None:
    """One fault after another, between them a little peace."""
    await asyncio.sleep(dice.uniform(0, 1))
    while True:
        rpcs = dice.sample(_RPCS, dice.randint(1, len(_RPCS)))
        if dice.random() < 0.3:
            proxy.drop.update(rpcs)  # etcd does what it is asked, and nobody hears of it
        else:
            proxy.sever(*rpcs)
        await asyncio.sleep(dice.uniform(0.2, 2 * TTL_MS / 1_000))
        proxy.drop.clear()
        proxy.refuse.clear()
        await asyncio.sleep(dice.uniform(0.2, TTL_MS / 1_000))


async def test_no_two_nodes_ever_lead_and_no_old_term_writes_after_a_new_one(
    etcd_endpoint: str,
) -> None:
    seed = int(os.environ.get("TICKWHEEL_SEED", random.randrange(1 << 32)))
    print(f"TICKWHEEL_SEED={seed}")
    dice = random.Random(seed)
    async with AsyncExitStack() as stack:
        proxies = [await stack.enter_async_context(EtcdProxy(etcd_endpoint)) for _ in range(3)]
        prefix = fresh_prefix()
        nodes = [await stack.enter_async_context(node_at(proxy.url, prefix=prefix)) for proxy in proxies]
        history = History(nodes)
        faults = [_disturb(proxy, random.Random(dice.random())) for proxy in proxies]
        async with running(history.sample(), *(history.write(node) for node in nodes)):
            await until(lambda: len(history.terms) == 1, 5, "a leader")
            first = next(number for number, node in enumerate(nodes) if node.election.term())
            proxies[first].sever(*_RPCS)
            await until(lambda: len(history.terms) == 2, TTL_MS / 1_000 + 3, "another leader")
            proxies[first].refuse.clear()
            await stack.enter_async_context(running(*faults))
            started = mono_us()
            await until(lambda: mono_us() - started > _SECONDS * 1_000_000, _SECONDS + 5, "the time is up")
    print(f"{len(history.terms)} terms, {len(history.writes)} confirmed writes")
    assert not history.double
    in_order = sorted(history.writes, key=lambda write: write[0])
    generations = [generation for generation, _ in in_order]
    assert len(set(generations)) == len(generations), "a generation was given twice"
    revisions = [term.create_revision for _, term in in_order]
    assert revisions == sorted(revisions), "an old term wrote after a new one"


async def test_the_death_of_etcds_own_leader_moves_nothing_for_long(short_folder: Path) -> None:
    async with EtcdCluster(short_folder / "m") as cluster, AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(node_at(*cluster.urls, prefix="/m/")) for _ in range(3)]
        for node in nodes:
            await node.registration.wait_registered()
        await until(lambda: any(node.election.term() for node in nodes), 5, "a leader")
        leader = await cluster.leader()
        assert leader is not None
        cluster.kill(leader)
        killed_at = mono_us()
        first = [AssignmentWrite(0, "t", 1, 0, 0)]

        async def write() -> None:
            while True:
                for node in nodes:
                    term = node.election.term()
                    try:
                        if term and (await node.registry.assign(term, first)).written:
                            return
                    except (RegistryUnavailable, LeaderLost):
                        pass
                await asyncio.sleep(0.02)

        async with running(write()) as (task,):
            seconds = await until(task.done, 10, "a guarded write through the survivors")
        print(f"etcd's leader killed -> the next guarded write: {seconds:.2f} s")
        await until(lambda: mono_us() - killed_at > 2 * TTL_MS * 1_000, 10, "two TTLs")
        leases = [node.lease.lease_id() for node in nodes]
        assert None not in leases
        assert set((await nodes[0].registry.snapshot()).timers) == {node.node_id for node in nodes}
        assert sum(node.election.term() is not None for node in nodes) == 1
