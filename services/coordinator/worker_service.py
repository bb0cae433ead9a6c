"""WorkerService's unary methods, forwarded to the timer concerned: for workers that speak to coordinators
alone.

The run's id says the shard, and the shard's owner answers: what it says goes back as it is, errors included.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

import grpc

from tickwheel.domain import ids
from tickwheel.errors import FieldInvalid, ShardMoving
from tickwheel.ports import TimerRecord
from tickwheel.rpc import convert
from tickwheel.services.coordinator.calls import Context
from tickwheel.services.coordinator.node import Node
from tickwheel.v1 import worker_service_pb2, worker_service_pb2_grpc

FORWARD_TIMEOUT_S = 10.0
ACQUIRE_WAIT_MS_MAX = 30_000
ACQUIRE_TURN_MS = 1_000
"""How long one timer is waited for before the next one is asked."""
LEASE_COUNT_MAX = 1_000


class WorkerService(worker_service_pb2_grpc.WorkerServiceServicer):
    def __init__(self, node: Node) -> None:
        self._node = node
        self._turn = itertools.count()

    async def Work(
        self, request_iterator: AsyncIterator[worker_service_pb2.WorkRequest], context: Context
    ) -> AsyncIterator[worker_service_pb2.WorkResponse]:
        """Streams go to the timers themselves."""
        await context.abort(
            grpc.StatusCode.UNIMPLEMENTED,
            "timers serve Work: ClusterService.WatchTimers tells their addresses",
        )
        yield worker_service_pb2.WorkResponse()

    async def RenewLease(
        self, request: worker_service_pb2.RenewLeaseRequest, context: Context
    ) -> worker_service_pb2.RenewLeaseResponse:
        answer: worker_service_pb2.RenewLeaseResponse = await self._to_owner("RenewLease", request)
        return answer

    async def CompleteRun(
        self, request: worker_service_pb2.CompleteRunRequest, context: Context
    ) -> worker_service_pb2.CompleteRunResponse:
        answer: worker_service_pb2.CompleteRunResponse = await self._to_owner("CompleteRun", request)
        return answer

    async def FailRun(
        self, request: worker_service_pb2.FailRunRequest, context: Context
    ) -> worker_service_pb2.FailRunResponse:
        answer: worker_service_pb2.FailRunResponse = await self._to_owner("FailRun", request)
        return answer

    async def ReleaseLease(
        self, request: worker_service_pb2.ReleaseLeaseRequest, context: Context
    ) -> worker_service_pb2.ReleaseLeaseResponse:
        answer: worker_service_pb2.ReleaseLeaseResponse = await self._to_owner("ReleaseLease", request)
        return answer

    async def AcquireLeases(
        self, request: worker_service_pb2.AcquireLeasesRequest, context: Context
    ) -> worker_service_pb2.AcquireLeasesResponse:
        """Each timer in turn is asked, first without waiting; then each is waited for a while."""
        if not request.worker_id:
            raise FieldInvalid("worker_id", "it is required: any string that is this process's own")
        if not 0 <= request.lease_count_max <= LEASE_COUNT_MAX:
            raise FieldInvalid("lease_count_max", f"it is not between 1 and {LEASE_COUNT_MAX}")
        wait_ms = convert.duration_ms(
            request, "wait_duration_max", "", default=0, least=0, most=ACQUIRE_WAIT_MS_MAX
        )
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_ms / 1_000
        answer = await self._ask_each(request)
        while not answer.grants:
            left_ms = int((deadline - loop.time()) * 1_000)
            if left_ms <= 0:
                break
            answer = await self._ask_next(request, min(left_ms, ACQUIRE_TURN_MS))
        return answer

    async def _ask_each(
        self, request: worker_service_pb2.AcquireLeasesRequest
    ) -> worker_service_pb2.AcquireLeasesResponse:
        answer = worker_service_pb2.AcquireLeasesResponse()
        for _ in range(max(1, len(self._node.view.timers()))):
            answer = await self._ask_next(request, 0)
            if answer.grants:
                break
        return answer

    async def _ask_next(
        self, request: worker_service_pb2.AcquireLeasesRequest, wait_ms: int
    ) -> worker_service_pb2.AcquireLeasesResponse:
        timers = self._node.view.timers()
        if not timers:
            raise ShardMoving(0)
        forwarded = worker_service_pb2.AcquireLeasesRequest()
        forwarded.CopyFrom(request)
        forwarded.wait_duration_max.FromMilliseconds(wait_ms)
        chosen = timers[next(self._turn) % len(timers)]
        try:
            answer: worker_service_pb2.AcquireLeasesResponse = await self._call(
                chosen, "AcquireLeases", forwarded
            )
            return answer
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE or len(timers) == 1:
                raise
            # A timer that is just dying; the others still have work.
            await asyncio.sleep(min(wait_ms, 50) / 1_000)
            return worker_service_pb2.AcquireLeasesResponse()

    async def _to_owner(self, method: str, request: Any) -> Any:
        _, run = convert.run_of(request.run, "run")
        shard = ids.run_shard(run)
        owner = self._node.view.owner(shard)
        if owner is None:
            raise ShardMoving(shard)
        try:
            return await self._call(owner, method, request)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE and error.trailing_metadata() is None:
                raise ShardMoving(shard) from error
            raise

    async def _call(self, timer: TimerRecord, method: str, request: Any) -> Any:
        stub = worker_service_pb2_grpc.WorkerServiceStub(await self._node.channels.to(timer.address_internal))
        return await getattr(stub, method)(request, timeout=FORWARD_TIMEOUT_S)
