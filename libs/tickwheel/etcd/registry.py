"""Who is alive, and who should own which shard? `tickwheel.ports.ShardRegistry` on etcd."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import structlog
from aetcd import rpc

from tickwheel.etcd.client import (
    EtcdClient,
    delete_op,
    if_created_at,
    if_modified_at,
    prefix_end,
    put_op,
    range_op,
)
from tickwheel.etcd.keys import Keys
from tickwheel.etcd.watch import Broken, Changed, KeyValue, Listed, Watch, WatchItem, key_value, list_keys
from tickwheel.ports import (
    Assignment,
    AssignmentsWritten,
    AssignmentWrite,
    ClusterFacts,
    Doubt,
    LeaderLost,
    LeaderTerm,
    RegistryRefused,
    RegistrySnapshot,
    RegistryUnavailable,
    Resumption,
    TimerRecord,
    ViewChange,
)

log = structlog.get_logger(__name__)

# etcd's default max-txn-ops counts comparisons, and operations of either branch, each for itself.
TXN_OPERATIONS_MAX = 128
_RACES_MAX = 8

T = TypeVar("T")


class AssignmentValue(msgspec.Struct, frozen=True):
    """`assignments/<shard>` as JSON."""

    timer: str
    generation: int
    moved_at_us: int = 0


class View:
    """The registry's keys, parsed; a value that cannot be parsed is skipped with a log line, not fatal."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._history = 0
        self._revision = 0
        self._clear()

    def _clear(self) -> None:
        self._timers: dict[str, TimerRecord] = {}
        self._assignments: dict[int, Assignment] = {}
        self._drains: set[str] = set()
        self._leader_id: str | None = None

    def replace(self, listed: Listed) -> None:
        """Forget what was known, and know this."""
        self._clear()
        for item in listed.items:
            self._set(item.key, item)
        self._revision, self._history = listed.revision, listed.history

    def change(self, changed: Changed) -> bool:
        """Apply events; give whether any of them matters to a snapshot."""
        matters = [self._set(change.key, change.value) for change in changed.items]
        self._revision = changed.revision
        return any(matters)

    def snapshot(self) -> RegistrySnapshot:
        return RegistrySnapshot(
            history=self._history,
            revision=self._revision,
            timers=dict(self._timers),
            assignments=dict(self._assignments),
            drains=frozenset(self._drains),
            leader_id=self._leader_id,
        )

    def _set(self, key: str, item: KeyValue | None) -> bool:
        kind, name = self._keys.split(key)
        try:
            if kind == "timers":
                _put(
                    self._timers,
                    name,
                    None if item is None else msgspec.json.decode(item.value, type=TimerRecord),
                )
            elif kind == "assignments":
                _put(
                    self._assignments, int(name), None if item is None else parse_assignment(int(name), item)
                )
            elif kind == "drains":
                self._drains.discard(name) if item is None else self._drains.add(name)
            elif kind == "leader":
                self._leader_id = None if item is None else item.value.decode()
            else:
                return False
        except (msgspec.DecodeError, ValueError) as error:
            log.error("etcd_value_unreadable", key=key, error=str(error))
        return True


class EtcdRegistry:
    """The shard registry. Reads are linearizable; writes are guarded, and never repeated on a lost answer."""

    def __init__(self, client: EtcdClient, mono_us: Callable[[], int]) -> None:
        self._client = client
        self._mono_us = mono_us
        self._keys = Keys(client.settings.prefix)
        self._listed = (self._keys.timers, self._keys.assignments, self._keys.drains)

    async def snapshot(self) -> RegistrySnapshot:
        view = View(self._keys)
        view.replace(await list_keys(self._client, self._listed, (self._keys.leader,)))
        return view.snapshot()

    async def watch(self, on_change: Callable[[RegistrySnapshot, ViewChange], None]) -> None:
        view = View(self._keys)

        def sink(item: WatchItem) -> None:
            match item:
                case Listed():
                    view.replace(item)
                    on_change(view.snapshot(), ViewChange.CURRENT)
                case Changed():
                    if view.change(item):
                        on_change(view.snapshot(), ViewChange.CHANGED)
                case Broken():
                    on_change(view.snapshot(), ViewChange.BROKEN)

        watch = Watch(
            self._client,
            self._keys.prefix,
            self._mono_us,
            prefixes=self._listed,
            keys=(self._keys.leader,),
            is_prefix=True,
        )
        await watch.run(sink)

    async def assign(self, term: LeaderTerm, writes: Sequence[AssignmentWrite]) -> AssignmentsWritten:
        written: list[int] = []
        conflicted: list[int] = []
        for batch in _batches(writes, TXN_OPERATIONS_MAX - 1):  # one comparison is the leader's
            pending = batch
            # A batch that failed on some values is tried once more without them.
            for _ in range(2):
                changed = await self._assign_batch(term, pending)
                if not changed:
                    written.extend(write.shard for write in pending)
                    pending = []
                    break
                conflicted.extend(changed)
                pending = [write for write in pending if write.shard not in changed]
            conflicted.extend(write.shard for write in pending)
        return AssignmentsWritten(tuple(written), tuple(conflicted))

    async def _assign_batch(self, term: LeaderTerm, writes: Sequence[AssignmentWrite]) -> frozenset[int]:
        """Write all or none; give the shards whose value had changed, empty when all were written."""
        keys = {write.shard: self._keys.assignment(write.shard) for write in writes}
        request = rpc.TxnRequest(
            compare=[
                if_created_at(self._keys.leader, term.create_revision),
                *(if_modified_at(keys[write.shard], write.mod_revision) for write in writes),
            ],
            success=[put_op(keys[write.shard], _assignment_value(write)) for write in writes],
            failure=[range_op(self._keys.leader), *(range_op(keys[write.shard]) for write in writes)],
        )
        response = await self._client.call("Txn", request)
        if response.succeeded:
            return frozenset()
        leader, *found = (part.response_range.kvs for part in response.responses)
        _check_leader(term, leader)
        return frozenset(
            write.shard
            for write, kvs in zip(writes, found, strict=True)
            if (kvs[0].mod_revision if kvs else 0) != write.mod_revision
        )

    async def prove(self, timer_id: str, generations: Mapping[int, int], incarnation: int) -> frozenset[int]:
        if not generations:
            return frozenset()
        listed = await list_keys(self._client, (self._keys.assignments,), (self._keys.incarnation,))
        in_force = next((_number(item) for item in listed.items if item.key == self._keys.incarnation), 0)
        if in_force != incarnation:
            return frozenset()
        view = View(self._keys)
        view.replace(listed)
        assignments = view.snapshot().assignments
        return frozenset(
            shard
            for shard, generation in generations.items()
            if (found := assignments.get(shard))
            and (found.timer_id, found.generation) == (timer_id, generation)
        )

    async def epochs(self) -> dict[int, int]:
        return {shard: epoch for shard, (epoch, _) in (await self._epochs()).items()}

    async def raise_epochs(self, epochs: Mapping[int, int]) -> None:
        for _ in range(_RACES_MAX):
            known = await self._epochs()
            higher = [
                (shard, epoch, known.get(shard, (0, 0))[1])
                for shard, epoch in sorted(epochs.items())
                if epoch > known.get(shard, (-1, 0))[0]
            ]
            if not higher:
                return
            for batch in _batches(higher, TXN_OPERATIONS_MAX):
                request = rpc.TxnRequest(
                    compare=[
                        if_modified_at(self._keys.epoch(shard), revision) for shard, _, revision in batch
                    ],
                    success=[put_op(self._keys.epoch(shard), b"%d" % epoch) for shard, epoch, _ in batch],
                )
                await self._client.call("Txn", request)
        raise RegistryUnavailable("raise_epochs", "ABORTED", f"lost {_RACES_MAX} races for the epochs")

    async def _epochs(self) -> dict[int, tuple[int, int]]:
        """Shard -> (epoch, mod revision)."""
        known = {}
        for item in (await list_keys(self._client, (self._keys.epochs,))).items:
            try:
                known[int(self._keys.split(item.key)[1])] = (int(item.value), item.mod_revision)
            except ValueError as error:
                log.error("etcd_value_unreadable", key=item.key, error=str(error))
        return known

    async def incarnation(self) -> int:
        item = await self._get(self._keys.incarnation)
        return 0 if item is None else _number(item)

    async def raise_incarnation(self, incarnation: int) -> int:
        return await self._raise(self._keys.incarnation, incarnation)

    async def _raise(self, key: str, number: int) -> int:
        """Give the number that stands there afterwards: `number`, or a higher one that stood there before."""
        for _ in range(_RACES_MAX):
            item = await self._get(key)
            if item is not None and _number(item) >= number:
                return _number(item)
            request = rpc.TxnRequest(
                compare=[if_modified_at(key, 0 if item is None else item.mod_revision)],
                success=[put_op(key, b"%d" % number)],
            )
            if (await self._client.call("Txn", request)).succeeded:
                return number
        raise RegistryUnavailable("raise", "ABORTED", f"lost {_RACES_MAX} races for {key}")

    async def cluster_facts(self) -> ClusterFacts | None:
        item = await self._get(self._keys.facts)
        return None if item is None else msgspec.json.decode(item.value, type=ClusterFacts)

    async def put_cluster_facts(self, term: LeaderTerm, facts: ClusterFacts) -> None:
        request = rpc.TxnRequest(
            compare=[if_created_at(self._keys.leader, term.create_revision)],
            success=[put_op(self._keys.facts, msgspec.json.encode(facts))],
            failure=[range_op(self._keys.leader)],
        )
        response = await self._client.call("Txn", request)
        if not response.succeeded:
            _check_leader(term, response.responses[0].response_range.kvs)

    async def doubt(self) -> Doubt | None:
        item = await self._get(self._keys.doubt)
        return None if item is None else msgspec.json.decode(item.value, type=Doubt)

    async def put_doubt(self, doubt: Doubt) -> None:
        operation = put_op(self._keys.doubt, msgspec.json.encode(doubt))
        await self._client.call("Txn", rpc.TxnRequest(success=[operation]))

    async def resumption(self) -> Resumption | None:
        item = await self._get(self._keys.resumption)
        return None if item is None else msgspec.json.decode(item.value, type=Resumption)

    async def put_resumption(self, resumption: Resumption) -> None:
        operation = put_op(self._keys.resumption, msgspec.json.encode(resumption))
        await self._client.call("Txn", rpc.TxnRequest(success=[operation]))

    async def lease_ms_max(self) -> int:
        item = await self._get(self._keys.lease_ms_max)
        return 0 if item is None else _number(item)

    async def raise_lease_ms_max(self, lease_ms: int) -> None:
        await self._raise(self._keys.lease_ms_max, lease_ms)

    async def request_drain(self, timer_id: str) -> None:
        await self._client.call("Txn", rpc.TxnRequest(success=[put_op(self._keys.drain(timer_id), b"")]))

    async def cancel_drain(self, timer_id: str) -> None:
        await self._client.call("Txn", rpc.TxnRequest(success=[delete_op(self._keys.drain(timer_id))]))

    async def _get(self, key: str) -> KeyValue | None:
        response = await self._client.call("Range", rpc.RangeRequest(key=key.encode()))
        return key_value(response.kvs[0]) if response.kvs else None

    async def wipe(self) -> None:
        """Delete every key below the prefix. For tests and for a cluster that is being taken apart."""
        prefix = self._keys.prefix
        operation = rpc.RequestOp(
            request_delete_range=rpc.DeleteRangeRequest(key=prefix.encode(), range_end=prefix_end(prefix))
        )
        await self._client.call("Txn", rpc.TxnRequest(success=[operation]))


def parse_assignment(shard: int, item: KeyValue) -> Assignment:
    """Give the assignment that a key holds; what cannot be read is nobody's, of generation 0."""
    try:
        value = msgspec.json.decode(item.value, type=AssignmentValue)
    except msgspec.DecodeError as error:
        log.error("etcd_value_unreadable", key=item.key, error=str(error))
        value = AssignmentValue("", 0)
    return Assignment(shard, value.timer, value.generation, value.moved_at_us, item.mod_revision)


def _number(item: KeyValue) -> int:
    """Give the number that a key holds. What cannot be read is no number that a proof may rest on."""
    try:
        return int(item.value)
    except ValueError as error:
        raise RegistryRefused(
            "Range", "DATA_LOSS", f"{item.key} holds {item.value!r}, not a number"
        ) from error


def _assignment_value(write: AssignmentWrite) -> bytes:
    return msgspec.json.encode(AssignmentValue(write.timer_id, write.generation, write.moved_at_us))


def _check_leader(term: LeaderTerm, kvs: Sequence[Any]) -> None:
    found = kvs[0].create_revision if kvs else 0
    if found != term.create_revision:
        raise LeaderLost(term.create_revision, found)


def _put(target: dict[Any, Any], key: Any, value: Any) -> None:
    if value is None:
        target.pop(key, None)
    else:
        target[key] = value


def _batches(items: Sequence[T], size: int) -> Iterator[list[T]]:
    for start in range(0, len(items), size):
        yield list(items[start : start + size])
