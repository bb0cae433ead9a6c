"""What changed below a prefix? A snapshot, then every event after it, again and again, whatever breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc.aio
import structlog
from aetcd import rpc

from tickwheel.etcd.client import (
    EtcdClient,
    backoff_ms,
    is_worth_a_line,
    prefix_end,
    range_op,
    token_is_stale,
    translate,
    write,
)
from tickwheel.ports import RegistryRefused, RegistryUnavailable

log = structlog.get_logger(__name__)

_CREATED_TIMEOUT_MS = 1_000
_BACKOFF_FIRST_MS = 50
_BACKOFF_MAX_MS = 1_000
# A watch that lasted this long was healthy: the next failure is a first one.
_STABLE_MS = 2_000


@dataclass(frozen=True, slots=True)
class KeyValue:
    """A key below the watched prefix, with the revisions and the lease that etcd keeps for it."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    lease_id: int


@dataclass(frozen=True, slots=True)
class Listed:
    """Everything there is at one revision: forget what was known before. history: the cluster's id."""

    items: tuple[KeyValue, ...]
    revision: int
    history: int


@dataclass(frozen=True, slots=True)
class Change:
    """A key was written, or deleted (value None), at this revision."""

    key: str
    value: KeyValue | None
    revision: int


@dataclass(frozen=True, slots=True)
class Changed:
    """What happened next, in order. revision: of the store, the last change's or newer."""

    items: tuple[Change, ...]
    revision: int


@dataclass(frozen=True, slots=True)
class Broken:
    """Events may be missing until the next Listed."""

    reason: str


WatchItem = Listed | Changed | Broken


class _Again(Exception):
    """The watch ended; a new snapshot is needed."""


async def list_keys(client: EtcdClient, prefixes: Sequence[str], keys: Sequence[str] = ()) -> Listed:
    """Read some prefixes and single keys at one revision, linearizably."""
    operations = [range_op(prefix, prefix=True) for prefix in prefixes]
    operations += [range_op(key) for key in keys]
    response = await client.call("Txn", rpc.TxnRequest(success=operations))
    items = tuple(key_value(kv) for part in response.responses for kv in part.response_range.kvs)
    return Listed(items, response.header.revision, response.header.cluster_id)


class Watch:
    """Follows one key, or all keys below a prefix, of which only `listed` parts are read in the snapshot.

    A wide watch with a narrow snapshot is one stream and one order for several kinds of keys, without
    reading the kinds that nobody asked for.
    """

    def __init__(
        self,
        client: EtcdClient,
        key: str,
        mono_us: Callable[[], int],
        *,
        prefixes: Sequence[str] = (),
        keys: Sequence[str] = (),
        is_prefix: bool = False,
    ) -> None:
        self._client = client
        self._key = key
        self._range_end = prefix_end(key) if is_prefix else b""
        self._prefixes, self._keys = tuple(prefixes), tuple(keys)
        self._mono_us = mono_us

    async def run(self, sink: Callable[[WatchItem], None]) -> None:
        """Feed `sink`, on the event loop, until cancelled. Raises RegistryRefused."""
        failures = 0
        while True:
            started = self._mono_us()
            try:
                listed = await list_keys(self._client, self._prefixes, self._keys)
                sink(listed)
                await self._follow(listed.revision + 1, sink)
            except (_Again, RegistryUnavailable) as error:
                reason = str(error)
            stable = self._mono_us() - started >= _STABLE_MS * 1_000
            failures = 1 if stable else failures + 1
            sink(Broken(reason))
            if is_worth_a_line(failures):
                log.warning("etcd_watch_again", key=self._key, reason=reason, failures=failures)
            wait_ms = backoff_ms(failures, first_ms=_BACKOFF_FIRST_MS, max_ms=_BACKOFF_MAX_MS)
            await asyncio.sleep(wait_ms / 1_000)

    async def _follow(self, revision: int, sink: Callable[[WatchItem], None]) -> None:
        """Pass on events from `revision` until the stream fails; always ends by raising."""
        endpoint, call = await self._client.open_stream("watch", "Watch")
        try:
            create = rpc.WatchCreateRequest(
                key=self._key.encode(), range_end=self._range_end, start_revision=revision
            )
            # Running into this timeout cancels the call; that is meant, for it is not used again.
            async with asyncio.timeout(_CREATED_TIMEOUT_MS / 1_000):
                await write(call, rpc.WatchRequest(create_request=create))
                response = await call.read()
            while True:
                self._check(response)
                if response.events:
                    items = tuple(_change(event) for event in response.events)
                    sink(Changed(items, response.header.revision))
                response = await call.read()
        except TimeoutError as error:
            self._client.fail_over(endpoint)
            raise _Again("the watch was not confirmed in time") from error
        except grpc.aio.AioRpcError as error:
            if token_is_stale(error):
                self._client.forget_token()
                raise _Again("the token is stale") from error
            self._client.fail_over(endpoint)
            raise translate("Watch", error) from error
        finally:
            call.cancel()

    def _check(self, response: Any) -> None:
        """Raise if this response ends the watch: etcd leaves the stream itself open."""
        if response is grpc.aio.EOF:
            raise _Again("the stream ended")
        if not response.canceled:
            return
        if response.compact_revision:
            raise _Again(f"compacted at {response.compact_revision}")
        reason = response.cancel_reason
        if "invalid auth token" in reason or "auth store is old" in reason:
            self._client.forget_token()
            raise _Again(reason)
        if "permission denied" in reason or "user name is empty" in reason:
            raise RegistryRefused("Watch", "PERMISSION_DENIED", reason)
        raise _Again(reason or "cancelled by the server")


def key_value(kv: Any) -> KeyValue:
    """Give our value for etcd's."""
    return KeyValue(kv.key.decode(), kv.value, kv.create_revision, kv.mod_revision, kv.lease)


def _change(event: Any) -> Change:
    value = None if event.type == event.DELETE else key_value(event.kv)
    return Change(event.kv.key.decode(), value, event.kv.mod_revision)
