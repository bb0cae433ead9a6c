"""ClusterService: what the cluster is doing, for operators, and for workers that look for timers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

from tickwheel.errors import FieldInvalid, NotFound, StoreUnavailable
from tickwheel.ports import RegistryRefused, RegistrySnapshot, RegistryUnavailable
from tickwheel.postgres import cluster
from tickwheel.postgres.cluster import ShardRow, TimerNodeRow
from tickwheel.rpc import convert
from tickwheel.services.coordinator.calls import Context, principal_of
from tickwheel.services.coordinator.node import Node
from tickwheel.v1 import cluster_service_pb2, cluster_service_pb2_grpc

WATCH_REPEAT_MS = 10_000
"""A watch says something at least so often, so that a silent one is known to be dead."""
PROBE_TIMEOUT_MS = 2_000


class ClusterService(cluster_service_pb2_grpc.ClusterServiceServicer):
    def __init__(self, node: Node) -> None:
        self._node = node

    async def ListShards(
        self, request: cluster_service_pb2.ListShardsRequest, context: Context
    ) -> cluster_service_pb2.ListShardsResponse:
        rows = await self._node.database.read(cluster.shards)
        snapshot = self._node.view.snapshot
        response = cluster_service_pb2.ListShardsResponse()
        for row in rows:
            assignment = snapshot.assignments.get(row.shard)
            response.shards.add(
                shard=row.shard,
                timer="" if assignment is None else assignment.timer_id,
                generation=0 if assignment is None else assignment.generation,
                epoch=row.epoch,
                owner=row.owner,
            )
        return response

    async def ListTimers(
        self, request: cluster_service_pb2.ListTimersRequest, context: Context
    ) -> cluster_service_pb2.ListTimersResponse:
        return cluster_service_pb2.ListTimersResponse(timers=await self._timers())

    async def WatchTimers(
        self, request: cluster_service_pb2.WatchTimersRequest, context: Context
    ) -> AsyncIterator[cluster_service_pb2.WatchTimersResponse]:
        view = self._node.view
        while True:
            changed = asyncio.ensure_future(view.wait_changed())
            pausing = asyncio.ensure_future(self._node.pause(WATCH_REPEAT_MS / 1_000))
            try:
                if view.snapshot.revision:
                    # Without Postgres: a worker finds its timers while Postgres is away.
                    timers = _timer_messages(view.snapshot, {})
                    yield cluster_service_pb2.WatchTimersResponse(timers=timers)
                done, _ = await asyncio.wait({changed, pausing}, return_when=asyncio.FIRST_COMPLETED)
                if pausing in done:
                    pausing.result()
            finally:
                changed.cancel()
                pausing.cancel()

    async def _timers(self) -> list[cluster_service_pb2.Timer]:
        try:
            rows = await self._node.database.read(cluster.timer_nodes)
        except StoreUnavailable:
            rows = {}
        return _timer_messages(self._node.view.snapshot, rows)

    async def DrainTimer(
        self, request: cluster_service_pb2.DrainTimerRequest, context: Context
    ) -> cluster_service_pb2.DrainTimerResponse:
        if not request.timer_id:
            raise FieldInvalid("timer_id", "it is required; ListTimers gives the ids")
        try:
            snapshot = await self._node.registry.snapshot()
            if request.timer_id not in snapshot.timers and request.timer_id not in snapshot.drains:
                raise NotFound(f"timers/{request.timer_id}")
            if request.undrain:
                await self._node.registry.cancel_drain(request.timer_id)
            else:
                await self._node.registry.request_drain(request.timer_id)
        except (RegistryUnavailable, RegistryRefused) as error:
            raise StoreUnavailable("etcd", str(error)) from error
        return cluster_service_pb2.DrainTimerResponse(
            remaining_shard_count=0 if request.undrain else await self._remaining(snapshot, request.timer_id)
        )

    async def _remaining(self, snapshot: RegistrySnapshot, timer_id: str) -> int:
        """Shards that are assigned to the timer, or whose epoch it still holds."""
        assigned = {
            shard for shard, assignment in snapshot.assignments.items() if assignment.timer_id == timer_id
        }
        rows = await self._node.database.read(cluster.shards)
        return len(assigned | {row.shard for row in rows if row.owner == timer_id})

    async def GetClusterHealth(
        self, request: cluster_service_pb2.GetClusterHealthRequest, context: Context
    ) -> cluster_service_pb2.ClusterHealth:
        snapshot, etcd_reachable = await self._probe_etcd()
        rows, postgres_reachable = await self._probe_postgres()
        unowned = [
            shard
            for shard in range(self._node.shard_count)
            if shard not in snapshot.assignments
            or snapshot.assignments[shard].timer_id not in snapshot.timers
            or (postgres_reachable and rows[shard].owner not in snapshot.timers)
        ]
        leader = snapshot.leader_id or ""
        health = cluster_service_pb2.ClusterHealth(
            leader=leader,
            coordinators=sorted({self._node.node_id, leader} - {""}),
            timer_count=len(snapshot.timers),
            shard_count=self._node.shard_count,
            unowned_shards=unowned,
            etcd_reachable=etcd_reachable,
            postgres_reachable=postgres_reachable,
            halted_reason=self._node.history.halted,
        )
        health.verdict = _verdict(health)
        health.healthy = health.verdict.startswith("All is well")
        return health

    async def ResumeCluster(
        self, request: cluster_service_pb2.ResumeClusterRequest, context: Context
    ) -> cluster_service_pb2.ResumeClusterResponse:
        hold_ms = request.hold_duration.ToMilliseconds() if request.HasField("hold_duration") else None
        resumption = await self._node.history.resume(
            force=request.force, hold_ms=hold_ms, principal=principal_of(context), peer=context.peer()
        )
        return cluster_service_pb2.ResumeClusterResponse(
            incarnation=resumption.incarnation, hold_duration=convert.duration(resumption.hold_ms * 1_000)
        )

    async def _probe_etcd(self) -> tuple[RegistrySnapshot, bool]:
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_MS / 1_000):
                return await self._node.registry.snapshot(), True
        except (RegistryUnavailable, RegistryRefused, TimeoutError):
            return self._node.view.snapshot, False

    async def _probe_postgres(self) -> tuple[dict[int, ShardRow], bool]:
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_MS / 1_000):
                return {row.shard: row for row in await self._node.database.read(cluster.shards)}, True
        except (StoreUnavailable, TimeoutError):
            return {}, False


def _timer_messages(
    snapshot: RegistrySnapshot, rows: dict[str, TimerNodeRow]
) -> list[cluster_service_pb2.Timer]:
    counts = Counter(assignment.timer_id for assignment in snapshot.assignments.values())
    messages = []
    for timer_id in sorted(snapshot.timers):
        record, row = snapshot.timers[timer_id], rows.get(timer_id)
        message = cluster_service_pb2.Timer(
            timer_id=timer_id,
            node_name=row.node_name if row is not None else timer_id.rpartition("-")[0],
            address=record.address_external,
            version=record.version,
            shard_count=counts[timer_id],
            draining=timer_id in snapshot.drains,
        )
        if row is not None:
            message.start_time.CopyFrom(convert.timestamp(row.started_us))
            message.seen_time.CopyFrom(convert.timestamp(row.seen_us))
        messages.append(message)
    return messages


def _verdict(health: cluster_service_pb2.ClusterHealth) -> str:
    """The worst thing first."""
    if not health.postgres_reachable:
        return "Postgres is out of reach: nothing is granted until it is back; what runs goes on."
    if not health.etcd_reachable:
        return "etcd is out of reach: dispatch goes on, but no shard can move to another timer."
    if health.halted_reason:
        return f"Grants stand still: {health.halted_reason}"
    if not health.timer_count:
        return "No timer is running: nothing is fired. Start one."
    if health.unowned_shards:
        return f"{len(health.unowned_shards)} of {health.shard_count} shards have no owner at this moment."
    if not health.leader:
        return "No coordinator leads at this moment: shards stay where they are."
    return f"All is well: {health.timer_count} timers own {health.shard_count} shards."
