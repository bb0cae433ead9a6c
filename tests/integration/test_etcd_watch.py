"""A watch that never ends, on a real etcd."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
from aetcd import rpc
from tests.integration.etcd_proxy import EtcdProxy
from tests.integration.etcd_world import client_at, fresh_prefix, mono_us, running, until

from tickwheel.embedded.etcd import EmbeddedEtcd
from tickwheel.etcd.client import EtcdClient, delete_op, put_op
from tickwheel.etcd.registry import EtcdRegistry
from tickwheel.etcd.watch import Broken, Changed, Listed, Watch, WatchItem
from tickwheel.ports import RegistryRefused, RegistrySnapshot, RegistryUnavailable, ViewChange

# grpc.aio has one poller for the process, and complains when it outlives an event loop.
pytestmark = pytest.mark.asyncio(loop_scope="session")


class Reader:
    """What a reader of a watch believes."""

    def __init__(self) -> None:
        self.items: list[WatchItem] = []
        self.values: dict[str, bytes] = {}
        self.current = False

    def __call__(self, item: WatchItem) -> None:
        self.items.append(item)
        match item:
            case Listed():
                self.current = True
                self.values = {kv.key: kv.value for kv in item.items}
            case Changed():
                for change in item.items:
                    if change.value is None:
                        self.values.pop(change.key, None)
                    else:
                        self.values[change.key] = change.value.value
            case Broken():
                self.current = False

    @property
    def lists(self) -> int:
        return sum(isinstance(item, Listed) for item in self.items)


def _watch(client: EtcdClient) -> Watch:
    prefix = client.settings.prefix
    return Watch(client, prefix, mono_us, prefixes=(prefix,), is_prefix=True)


async def _put(client: EtcdClient, name: str, value: bytes) -> int:
    key = client.settings.prefix + name
    response = await client.call("Txn", rpc.TxnRequest(success=[put_op(key, value)]))
    return int(response.header.revision)


async def test_compaction_during_a_blocked_watch_leads_to_a_new_snapshot(etcd_endpoint: str) -> None:
    """G-O01: the server cancels the watch and leaves the stream open."""
    prefix = fresh_prefix()
    async with EtcdProxy(etcd_endpoint) as proxy, client_at(proxy.url, prefix=prefix) as client:
        proxy.hold["Watch"] = asyncio.Event()
        await _put(client, "member", b"old")
        reader = Reader()
        async with running(_watch(client).run(reader)):
            await until(lambda: proxy.calls["Watch"] == 1, 5, "the watch held back")
            for number in range(500):
                revision = await _put(client, "member", b"%d" % number)
            async with client_at(f"http://{etcd_endpoint}", prefix=prefix) as direct:
                await direct.endpoint.kv.Compact(rpc.CompactionRequest(revision=revision), timeout=5)
            opened = proxy.calls["Watch"]
            proxy.hold.pop("Watch").set()
            await until(
                lambda: reader.values.get(f"{prefix}member") == b"499", 5, "the changes made meanwhile"
            )
            await _put(client, "member", b"after")
            await until(
                lambda: reader.values.get(f"{prefix}member") == b"after", 5, "events of the new watch"
            )
            assert proxy.calls["Watch"] - opened <= 3
            assert proxy.open["Watch"] == 1


async def test_a_change_between_the_read_and_the_watch_is_seen(etcd_endpoint: str) -> None:
    """D-O08."""
    prefix = fresh_prefix()
    async with EtcdProxy(etcd_endpoint) as proxy, client_at(proxy.url, prefix=prefix) as client:
        await _put(client, "owner", b"a")
        proxy.hold["Watch"] = asyncio.Event()
        reader = Reader()
        async with running(_watch(client).run(reader)):
            await until(lambda: reader.lists == 1 and proxy.calls["Watch"] == 1, 5, "the snapshot")
            assert reader.values == {f"{prefix}owner": b"a"}
            await client.call("Txn", rpc.TxnRequest(success=[delete_op(f"{prefix}owner")]))
            proxy.hold.pop("Watch").set()
            await until(lambda: reader.values == {}, 1, "the deletion")
            assert reader.lists == 1


async def test_a_watch_outlives_the_death_of_etcd(short_folder: Path) -> None:
    prefix = fresh_prefix()
    with EmbeddedEtcd(short_folder / "etcd-watch") as server:
        async with client_at(f"http://{server.endpoint}", prefix=prefix) as client:
            reader = Reader()
            async with running(_watch(client).run(reader)):
                await until(lambda: reader.current, 5, "the snapshot")
                server.kill9()
                await until(lambda: not reader.current, 5, "the break")
                await asyncio.to_thread(server.start)
                seconds = await until(lambda: reader.current, 5, "a new snapshot")
                assert seconds < 2.5  # the channel's backoff is at most a second
                await _put(client, "after", b"1")
                await until(lambda: f"{prefix}after" in reader.values, 5, "events again")


async def test_a_watch_that_may_not_read_raises_and_a_stale_token_is_replaced(short_folder: Path) -> None:
    with EmbeddedEtcd(short_folder / "etcd-auth") as server:
        url = f"http://{server.endpoint}"
        async with client_at(url, prefix="/mine/") as client:
            auth = client.endpoint.auth
            for user in ("root", "reader"):
                await auth.UserAdd(rpc.AuthUserAddRequest(name=user, password=f"{user}-secret"))
            await auth.RoleAdd(rpc.AuthRoleAddRequest(name="root"))
            await auth.RoleAdd(rpc.AuthRoleAddRequest(name="mine"))
            await auth.UserGrantRole(rpc.AuthUserGrantRoleRequest(user="root", role="root"))
            permission = rpc.Permission(permType=rpc.Permission.READWRITE, key=b"/mine/", range_end=b"/mine0")
            await auth.RoleGrantPermission(rpc.AuthRoleGrantPermissionRequest(name="mine", perm=permission))
            await auth.UserGrantRole(rpc.AuthUserGrantRoleRequest(user="reader", role="mine"))
            await auth.AuthEnable(rpc.AuthEnableRequest())
            # No user at all: the first read is refused.
            with pytest.raises(RegistryRefused):
                await _watch(client).run(Reader())
        async with client_at(url, prefix="/mine/", user="reader", password="wrong") as client:
            with pytest.raises(RegistryRefused):
                await _watch(client).run(Reader())
        async with client_at(url, prefix="/others/", user="reader", password="reader-secret") as client:
            # The snapshot reads nothing here, so that it is the watch that is refused.
            watch = Watch(client, "/others/", mono_us, prefixes=("/mine/",), is_prefix=True)
            with pytest.raises(RegistryRefused):
                async with asyncio.timeout(5):
                    await watch.run(Reader())
        async with client_at(url, prefix="/mine/", user="reader", password="reader-secret") as client:
            reader = Reader()
            async with running(_watch(client).run(reader)):
                await until(lambda: reader.current, 5, "the snapshot")
                # Simple tokens live in the server's memory: after a restart the old one is unknown.
                await asyncio.to_thread(server.restart)
                await until(lambda: not reader.current, 5, "the break")
                await until(lambda: reader.current, 5, "a snapshot with a new token")
                await _put(client, "after", b"1")
                await until(lambda: "/mine/after" in reader.values, 5, "events again")


async def test_a_thousand_failed_streams_leave_nothing_behind(etcd_endpoint: str) -> None:
    """G-O04, speeded up: one channel for the whole life, tasks flat."""
    async with EtcdProxy(etcd_endpoint) as proxy, client_at(proxy.url, prefix=fresh_prefix()) as client:
        await _put(client, "x", b"")
        proxy.refuse["Watch"] = grpc.StatusCode.UNAVAILABLE
        before = len(asyncio.all_tasks())
        channel = client.endpoint.channel
        for _ in range(1_000):
            with pytest.raises(RegistryUnavailable):
                await _watch(client)._follow(1, lambda _: None)
        assert proxy.calls["Watch"] == 1_000
        assert client.endpoint.channel is channel
        await until(lambda: len(asyncio.all_tasks()) <= before + 2, 5, "tasks as few as before")


async def test_the_registry_reports_current_changed_and_broken(short_folder: Path) -> None:
    with EmbeddedEtcd(short_folder / "etcd-view") as server:
        async with client_at(f"http://{server.endpoint}", prefix="/view/") as client:
            registry = EtcdRegistry(client, mono_us)
            seen: list[tuple[RegistrySnapshot, ViewChange]] = []
            async with running(registry.watch(lambda snapshot, change: seen.append((snapshot, change)))):
                await until(lambda: bool(seen), 5, "the snapshot")
                await registry.request_drain("timer-1")
                await until(lambda: seen[-1][0].drains == {"timer-1"}, 5, "the drain")
                await registry.raise_epochs({1: 1})  # of no interest to a view
                await registry.cancel_drain("timer-1")
                await until(lambda: not seen[-1][0].drains, 5, "the drain's end")
                assert [change for _, change in seen] == [
                    ViewChange.CURRENT,
                    ViewChange.CHANGED,
                    ViewChange.CHANGED,
                ]
                server.kill9()
                await until(lambda: seen[-1][1] is ViewChange.BROKEN, 5, "the break")
