"""The node's lease on a real etcd: kept, lost in every way there is, and won back."""

from __future__ import annotations

from functools import partial

import pytest
from aetcd import rpc
from tests.integration.etcd_proxy import EtcdProxy
from tests.integration.etcd_world import TTL_MS, client_at, fresh_prefix, mono_us, node_at, running, until

from tickwheel.etcd.lease import LeaseSettings, NodeLease

# grpc.aio has one poller for the process, and complains when it outlives an event loop.
pytestmark = pytest.mark.asyncio(loop_scope="session")


async def _revoke(node_lease: NodeLease, url: str) -> int:
    """Take the lease away on the server, behind the node's back."""
    lease_id = node_lease.lease_id()
    assert lease_id is not None
    async with client_at(url, prefix="/none/") as client:
        await client.call("LeaseRevoke", rpc.LeaseRevokeRequest(ID=lease_id))
    return lease_id


async def test_dropped_keepalive_answers_end_trust_before_etcd_gives_the_lease_away(
    etcd_endpoint: str,
) -> None:
    """G-O02: calls work, only keepalives are not answered."""
    async with EtcdProxy(etcd_endpoint) as proxy, client_at(proxy.url, prefix=fresh_prefix()) as client:
        lease = NodeLease(client, LeaseSettings(TTL_MS), mono_us)
        lost_at: list[int] = []
        lease.on_loss(lambda: lost_at.append(mono_us()))
        async with running(lease.run()):
            await until(
                lambda: proxy.calls["LeaseKeepAlive"] == 1 and lease.lease_id() is not None, 5, "a lease"
            )
            lease_id = lease.lease_id()
            proxy.drop.add("LeaseKeepAlive")
            dropped_at = mono_us()
            reopened_s = await until(lambda: proxy.calls["LeaseKeepAlive"] >= 2, 5, "a second stream")
            # The first unanswered renewal goes out a third of the TTL later at most.
            assert reopened_s < 2 * TTL_MS / 3 / 1_000
            await until(lambda: bool(lost_at), 5, "the end of trust")
            assert lost_at[0] - dropped_at < TTL_MS * 1_000
            assert lease.lease_id() is None
            # etcd still has it, renewed by the requests whose answers were dropped: the same lease comes
            # back.
            proxy.drop.clear()
            await until(lambda: lease.lease_id() is not None, 5, "trust again")
            assert lease.lease_id() == lease_id
            assert proxy.open["LeaseKeepAlive"] <= 2
        assert proxy.calls["LeaseGrant"] == 1


async def test_a_revoked_lease_is_noticed_and_the_registration_written_again(etcd_endpoint: str) -> None:
    prefix, url = fresh_prefix(), f"http://{etcd_endpoint}"
    async with node_at(url, prefix=prefix) as node:
        await node.registration.wait_registered()
        old = await _revoke(node.lease, url)
        await until(lambda: node.lease.lease_id() not in (None, old), TTL_MS / 1_000, "a new lease")
        written: set[str] = set()

        async def look() -> None:
            while node.node_id not in written:
                written.update((await node.registry.snapshot()).timers)

        async with running(look()) as (task,):
            await until(task.done, 2, "the registration under the new lease")


@pytest.mark.parametrize("part", ["coordinator", "timer"])
async def test_a_key_that_vanished_outweighs_keepalives_that_are_answered(
    etcd_endpoint: str, part: str
) -> None:
    """C-O11: the lease is revoked, while a stale member goes on answering keepalives."""
    leads = part == "coordinator"
    async with (
        EtcdProxy(etcd_endpoint) as proxy,
        node_at(proxy.url, prefix=fresh_prefix(), stand=leads, register=not leads) as node,
    ):
        if leads:
            await until(lambda: node.election.term() is not None, 5, "leadership")
        else:
            await node.registration.wait_registered()
        term = node.election.term()

        def alive(answer: bytes) -> bytes:
            response = rpc.LeaseKeepAliveResponse.FromString(answer)
            response.TTL = TTL_MS // 1_000
            return bytes(response.SerializeToString())

        proxy.rewrite["LeaseKeepAlive"] = alive
        old = await _revoke(node.lease, f"http://{etcd_endpoint}")
        if leads:
            await until(lambda: node.election.term() != term, 1, "the end of the old term")
        await until(lambda: node.lease.lease_id() not in (None, old), 2, "a new lease")


async def test_an_absurd_ttl_in_an_answer_changes_nothing_and_zero_loses_the_lease(
    etcd_endpoint: str,
) -> None:
    """G-O03, through the whole loop."""
    async with EtcdProxy(etcd_endpoint) as proxy, client_at(proxy.url, prefix=fresh_prefix()) as client:
        answered = 0
        ttl_s = 9_223_372_036

        def absurd(answer: bytes) -> bytes:
            nonlocal answered
            answered += 1
            response = rpc.LeaseKeepAliveResponse.FromString(answer)
            response.TTL = ttl_s
            return bytes(response.SerializeToString())

        proxy.rewrite["LeaseKeepAlive"] = absurd
        lease = NodeLease(client, LeaseSettings(TTL_MS), mono_us)
        async with running(lease.run()):
            await until(lambda: answered >= 2, 5, "the next renewal within a third of the TTL")
            term = lease.term()
            assert term is not None
            assert term.trusted_until_mono_us <= mono_us() + TTL_MS * 1_000
            for ttl_s in (0, -1):
                old = lease.lease_id()
                await until(partial(lambda old: lease.lease_id() != old, old), 3, f"loss by TTL {ttl_s}")


async def test_a_node_has_one_lease_and_renews_it_three_times_a_ttl(etcd_endpoint: str) -> None:
    """E-O08: registration and election share it."""
    prefix = fresh_prefix()
    async with EtcdProxy(etcd_endpoint) as proxy:
        renewals = 0

        def count(answer: bytes) -> bytes:
            nonlocal renewals
            renewals += 1
            return answer

        proxy.rewrite["LeaseKeepAlive"] = count
        async with node_at(proxy.url, prefix=prefix) as node:
            await node.registration.wait_registered()
            await until(lambda: node.election.term() is not None, 5, "leadership")
            before = renewals
            seconds = await until(lambda: renewals >= before + 3, 5, "three renewals")
            assert seconds > 2 * TTL_MS / 3 / 1_000 * 0.9
        assert proxy.calls["LeaseGrant"] == 1
