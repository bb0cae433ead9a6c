"""A call that a coordinator forwards ends with the status that the timer gave it."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from tickwheel.errors import LeaseSuperseded
from tickwheel.rpc.server import RpcServer
from tickwheel.rpc.status import from_rpc_error
from tickwheel.v1 import worker_service_pb2 as pb
from tickwheel.v1 import worker_service_pb2_grpc as pb_grpc


class _Owner(pb_grpc.WorkerServiceServicer):
    async def CompleteRun(self, request: pb.CompleteRunRequest, context: Any) -> pb.CompleteRunResponse:
        raise LeaseSuperseded(request.run, request.attempt, "its lease lapsed")


class _Forwarder(pb_grpc.WorkerServiceServicer):
    def __init__(self, stub: Any) -> None:
        self._stub = stub

    async def CompleteRun(self, request: pb.CompleteRunRequest, context: Any) -> pb.CompleteRunResponse:
        answer = await self._stub.CompleteRun(request)
        assert isinstance(answer, pb.CompleteRunResponse)
        return answer


async def test_a_forwarded_refusal_arrives_with_its_reason() -> None:
    owner, forwarder = RpcServer(), RpcServer()
    pb_grpc.add_WorkerServiceServicer_to_server(_Owner(), owner.server)  # type: ignore[abstract]
    owner_port = await owner.start("127.0.0.1:0", ())
    async with grpc.aio.insecure_channel(f"127.0.0.1:{owner_port}") as to_owner:
        stub: Any = pb_grpc.WorkerServiceStub(to_owner)
        pb_grpc.add_WorkerServiceServicer_to_server(_Forwarder(stub), forwarder.server)  # type: ignore[abstract]
        port = await forwarder.start("127.0.0.1:0", ())
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            caller: Any = pb_grpc.WorkerServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await caller.CompleteRun(pb.CompleteRunRequest(run="tenants/default/runs/x", attempt=3))
    await forwarder.stop(0)
    await owner.stop(0)
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    error = from_rpc_error(refused.value)
    assert isinstance(error, LeaseSuperseded)
    assert error.attempt == 3
