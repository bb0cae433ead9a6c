"""Who leads? Whoever made the leader key under its lease; see the package's page for the states."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog
from aetcd import rpc

from tickwheel.etcd.client import (
    EtcdClient,
    LeaseNotFound,
    backoff_ms,
    delete_op,
    if_created_at,
    put_op,
    range_op,
)
from tickwheel.etcd.keys import Keys
from tickwheel.etcd.lease import NodeLease
from tickwheel.etcd.watch import Broken, Changed, KeyValue, Listed, Watch, WatchItem
from tickwheel.ports import LeaderTerm, RegistryUnavailable

log = structlog.get_logger(__name__)

# A standby asks this often even if the watch says nothing: a watch that went quiet says nothing about itself.
_CAMPAIGN_INTERVAL_MS = 1_000


class EtcdElection:
    """Stands for election while `run` runs; one per process, on the process's only lease.

    node_id must be unique to the process (`tickwheel.etcd.registration.fresh_node_id`), yet nothing depends
    on it: a term is ours if its key hangs on our lease.
    """

    def __init__(
        self, client: EtcdClient, lease: NodeLease, node_id: str, mono_us: Callable[[], int]
    ) -> None:
        self._client = client
        self._lease = lease
        self._node_id = node_id
        self._mono_us = mono_us
        self._key = Keys(client.settings.prefix).leader
        self._term: LeaderTerm | None = None
        self._term_lease_id: int | None = None
        self._leader_id: str | None = None
        self._resigned = False
        self._wake = asyncio.Event()
        self._changed = asyncio.Event()
        lease.on_loss(self._lease_lost)

    def term(self) -> LeaderTerm | None:
        if self._term is None or self._lease.lease_id() != self._term_lease_id:
            return None
        return self._term

    def leader_id(self) -> str | None:
        return self._leader_id

    async def wait_for_change(self, known: LeaderTerm | None) -> LeaderTerm | None:
        while (current := self.term()) == known:
            await self._changed.wait()
        return current

    async def resign(self) -> None:
        """Give the leadership up and stand no more; for an orderly end. If it fails, the lease lapses."""
        self._resigned = True
        term = self._term
        self._become(None)
        if term is None:
            return
        request = rpc.TxnRequest(
            compare=[if_created_at(self._key, term.create_revision)], success=[delete_op(self._key)]
        )
        try:
            await self._client.call("Txn", request)
        except RegistryUnavailable as error:
            log.warning("leader_resignation_unconfirmed", error=str(error))

    async def run(self) -> None:
        """Stand for election until cancelled. Raises RegistryRefused (in an ExceptionGroup)."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(
                    Watch(self._client, self._key, self._mono_us, keys=(self._key,)).run(self._hear)
                )
                group.create_task(self._stand())
        finally:
            self._become(None)

    async def _stand(self) -> None:
        failures = 0
        while not self._resigned:
            lease_id = self._lease.lease_id()
            if lease_id is None:
                await self._lease.wait_for_change(None)
                continue
            self._wake.clear()
            if self.term() is None:
                try:
                    await self._campaign(lease_id)
                    failures = 0
                except LeaseNotFound as error:
                    self._lease.doubt(lease_id, str(error))
                    continue
                except RegistryUnavailable as error:
                    # Not elected, as far as is known: only a read that shows our lease on the key makes it
                    # so.
                    failures += 1
                    log.warning("leader_campaign_unanswered", error=str(error), failures=failures)
                    await asyncio.sleep(
                        backoff_ms(failures, first_ms=100, max_ms=_CAMPAIGN_INTERVAL_MS) / 1_000
                    )
                    continue
            try:
                async with asyncio.timeout(_CAMPAIGN_INTERVAL_MS / 1_000):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def _campaign(self, lease_id: int) -> None:
        """Make the key if there is none; else learn whose it is (ours, if an earlier answer was lost)."""
        request = rpc.TxnRequest(
            compare=[if_created_at(self._key, 0)],
            success=[put_op(self._key, self._node_id.encode(), lease_id)],
            failure=[range_op(self._key)],
        )
        response = await self._client.call("Txn", request)
        if response.succeeded:
            create_revision = response.header.revision
        else:
            (kv,) = response.responses[0].response_range.kvs
            self._leader_id = kv.value.decode()
            if kv.lease != lease_id:
                return
            create_revision = kv.create_revision
        if self._resigned or self._lease.lease_id() != lease_id:
            return
        self._leader_id = self._node_id
        self._term_lease_id = lease_id
        self._become(LeaderTerm(self._node_id, create_revision))

    def _hear(self, item: WatchItem) -> None:
        """Take in what the watch says of the key."""
        match item:
            case Listed(items=items, revision=revision):
                self._key_is(items[0] if items else None, revision)
            case Changed(items=changes):
                for change in changes:
                    self._key_is(change.value, change.revision)
            case Broken():
                pass

    def _key_is(self, kv: KeyValue | None, revision: int) -> None:
        self._leader_id = None if kv is None else kv.value.decode()
        found = 0 if kv is None else kv.create_revision
        # News older than our own term do not speak of it.
        if self._term is not None and revision >= self._term.create_revision != found:
            log.warning("leader_key_lost", term=self._term.create_revision, found=found)
            if self._term_lease_id is not None and kv is None and not self._resigned:
                # Our key hangs on our lease and we did not delete it: the lease is gone, whatever renewals
                # say.
                self._lease.doubt(self._term_lease_id, "the leader key vanished")
            self._become(None)
        if kv is None:
            self._wake.set()

    def _lease_lost(self) -> None:
        # The term may come back with the lease (`term` asks it); whoever waits must look now.
        self._notify()

    def _become(self, term: LeaderTerm | None) -> None:
        if term != self._term:
            log.info("leader_term", node_id=self._node_id, term=term and term.create_revision)
        self._term = term
        self._notify()

    def _notify(self) -> None:
        self._wake.set()
        self._changed.set()
        self._changed = asyncio.Event()
