"""Is this timer listed as alive? Writes `timers/<id>` under the node's lease, again whenever it is gone."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import replace

import msgspec
import structlog
from aetcd import rpc

from tickwheel.etcd.client import (
    EtcdClient,
    LeaseNotFound,
    backoff_ms,
    delete_op,
    if_created_at,
    if_modified_at,
    put_op,
    range_op,
)
from tickwheel.etcd.keys import Keys
from tickwheel.etcd.lease import NodeLease
from tickwheel.etcd.watch import Broken, Changed, KeyValue, Listed, Watch, WatchItem
from tickwheel.ports import IdentityTaken, RegistryUnavailable, TimerRecord

log = structlog.get_logger(__name__)

# However busy a timer is, its record changes at most this often: every reader of the registry hears of it.
_RECORD_INTERVAL_MS = 1_000
_VERIFY_INTERVAL_MS = 3_000


def fresh_node_id(name: str) -> str:
    """Give an id for one life of one process; two of one configured name, or a restart, never share it."""
    return f"{name}-{secrets.token_hex(8)}"


class Registration:
    """Keeps a timer's record in the registry while `run` runs."""

    def __init__(
        self, client: EtcdClient, lease: NodeLease, record: TimerRecord, mono_us: Callable[[], int]
    ) -> None:
        self._client = client
        self._lease = lease
        self._record = record
        self._mono_us = mono_us
        self._key = Keys(client.settings.prefix).timer(record.timer_id)
        self._written: tuple[int, TimerRecord, int] | None = None  # lease, record, mod revision
        self._wake = asyncio.Event()
        self._registered = asyncio.Event()
        lease.on_loss(self._wake.set)

    def update(self, *, capacity: int | None = None, load: int | None = None) -> None:
        """Say how the timer is; written within a second or so if it is different."""
        self._record = replace(
            self._record,
            capacity=self._record.capacity if capacity is None else capacity,
            load=self._record.load if load is None else load,
        )

    async def wait_registered(self) -> None:
        """Wait until the record was written for the first time."""
        await self._registered.wait()

    async def withdraw(self) -> None:
        """Delete the record, so that the shards are given away now; for an orderly end, after `run`."""
        if self._written is None:
            return
        _, _, revision = self._written
        request = rpc.TxnRequest(
            compare=[if_modified_at(self._key, revision)], success=[delete_op(self._key)]
        )
        try:
            await self._client.call("Txn", request)
        except RegistryUnavailable as error:
            log.warning("registration_withdrawal_unconfirmed", error=str(error))

    async def run(self) -> None:
        """Stay registered until cancelled. Raises RegistryRefused, IdentityTaken (in an ExceptionGroup)."""
        async with asyncio.TaskGroup() as group:
            group.create_task(
                Watch(self._client, self._key, self._mono_us, keys=(self._key,)).run(self._hear)
            )
            group.create_task(self._keep_written())

    async def _keep_written(self) -> None:
        failures = 0
        verified_at = self._mono_us()
        while True:
            lease_id = self._lease.lease_id()
            if lease_id is None:
                await self._lease.wait_for_change(None)
                continue
            self._wake.clear()
            now = self._mono_us()
            due = now - verified_at >= _VERIFY_INTERVAL_MS * 1_000
            if due or self._written is None or self._written[:2] != (lease_id, self._record):
                try:
                    await self._write(lease_id, self._record)
                    failures, verified_at = 0, now
                except LeaseNotFound as error:
                    self._lease.doubt(lease_id, str(error))
                    continue
                except RegistryUnavailable as error:
                    failures += 1
                    log.warning("registration_unanswered", error=str(error), failures=failures)
                    await asyncio.sleep(backoff_ms(failures, first_ms=100, max_ms=1_000) / 1_000)
                    continue
            try:
                async with asyncio.timeout(_RECORD_INTERVAL_MS / 1_000):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def _write(self, lease_id: int, record: TimerRecord) -> None:
        """Write the record where there is none, or where it is of an earlier write of this process."""
        operation = put_op(self._key, msgspec.json.encode(record), lease_id)
        request = rpc.TxnRequest(
            compare=[if_created_at(self._key, 0)], success=[operation], failure=[range_op(self._key)]
        )
        response = await self._client.call("Txn", request)
        if not response.succeeded:
            (kv,) = response.responses[0].response_range.kvs
            if not self._lease.is_mine(kv.lease):
                raise IdentityTaken(record.timer_id, kv.lease)
            if kv.lease == lease_id and kv.value == operation.request_put.value:
                self._wrote(lease_id, record, kv.mod_revision)
                return
            request = rpc.TxnRequest(
                compare=[if_modified_at(self._key, kv.mod_revision)], success=[operation]
            )
            response = await self._client.call("Txn", request)
            if not response.succeeded:  # it lapsed between the two: come again
                raise RegistryUnavailable("Txn", "ABORTED", "the record changed while it was written")
        self._wrote(lease_id, record, response.header.revision)

    def _wrote(self, lease_id: int, record: TimerRecord, revision: int) -> None:
        if self._written is None or self._written[0] != lease_id:
            log.info(
                "timer_registered", timer_id=record.timer_id, lease_id=f"{lease_id:x}", revision=revision
            )
        self._written = (lease_id, record, revision)
        self._registered.set()

    def _hear(self, item: WatchItem) -> None:
        match item:
            case Listed(items=items, revision=revision):
                self._key_is(items[0] if items else None, revision)
            case Changed(items=changes):
                for change in changes:
                    self._key_is(change.value, change.revision)
            case Broken():
                pass

    def _key_is(self, kv: KeyValue | None, revision: int) -> None:
        if kv is not None or self._written is None or revision < self._written[2]:
            return
        # The key hangs on the lease, and nobody else deletes it: believe the key, not the renewals.
        self._lease.doubt(self._written[0], "the registration vanished")
        self._written = None
        self._wake.set()
