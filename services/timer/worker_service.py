"""What do workers call? The stream `Work`, and its unary twins, on this timer's sessions."""

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Final

import grpc
import structlog
from google.protobuf import message_factory

from tickwheel.clock import mono_us
from tickwheel.domain.ids import parse_run_id, run_shard
from tickwheel.errors import FieldInvalid, LeaseSuperseded, NodeDraining, ShardMoving
from tickwheel.rpc import convert
from tickwheel.services.timer.frames import duration, encoded
from tickwheel.services.timer.leases import LIVE
from tickwheel.services.timer.streams import Stream
from tickwheel.v1 import worker_service_pb2 as pb
from tickwheel.v1 import worker_service_pb2_grpc

if TYPE_CHECKING:
    from tickwheel.services.timer.node import TimerNode

log = structlog.get_logger()

PROTOCOL_VERSION: Final = 1
ACQUIRE_COUNT_MAX: Final = 1_000
ACQUIRE_WAIT_S_MAX: Final = 30.0
OUTCOME_TIMEOUT_S: Final = 15.0
SETTLE_TIMEOUT_S: Final = 3.0


def add_worker_service(service: "WorkerService", server: grpc.aio.Server) -> None:
    """Registers it as the generated code would, but for the stream's serializer: it lets encoded messages
    pass."""
    methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Work": grpc.stream_stream_rpc_method_handler(
            service.Work, request_deserializer=pb.WorkRequest.FromString, response_serializer=encoded
        )
    }
    for method in pb.DESCRIPTOR.services_by_name["WorkerService"].methods:
        if method.name not in methods:
            request: Any = message_factory.GetMessageClass(method.input_type)
            methods[method.name] = grpc.unary_unary_rpc_method_handler(
                getattr(service, method.name),
                request_deserializer=request.FromString,
                response_serializer=encoded,
            )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("tickwheel.v1.WorkerService", methods),)
    )


class WorkerService(worker_service_pb2_grpc.WorkerServiceServicer):
    """`tickwheel.v1.WorkerService` on a timer."""

    def __init__(self, node: "TimerNode") -> None:
        self._node = node

    async def Work(  # type: ignore[override]  # It yields what is encoded already.
        self, request_iterator: AsyncIterator[pb.WorkRequest], context: Any
    ) -> AsyncIterator[bytes]:
        """One stream: this generator is its only writer, a task of its own the only reader."""
        node = self._node
        try:
            first = await anext(request_iterator)
        except StopAsyncIteration:
            return
        hello = first.hello
        if not first.HasField("hello") or not hello.worker_id:
            raise FieldInvalid("hello", "the first request carries it, with worker_id")
        if hello.protocol_version != PROTOCOL_VERSION:
            raise FieldInvalid("hello.protocol_version", f"this timer speaks version {PROTOCOL_VERSION}")
        if node.draining:
            raise NodeDraining(node.timer_id)
        stream = await node.streams.open(hello)
        log.info("worker_connected", worker=hello.worker_id, capacity=hello.capacity, held=len(hello.held))
        first.ClearField("hello")
        node.streams.take(stream, first)
        reader = asyncio.create_task(self._read(stream, request_iterator))
        reader.add_done_callback(lambda _: stream.wake.set())
        try:
            while not stream.session.closed and not reader.done():
                stream.wake.clear()
                frame = stream.session.take_frame()
                if frame is None:
                    await stream.wake.wait()
                else:
                    yield node.frames.response(frame)
        finally:
            reader.cancel()
            node.streams.close(stream)
            log.info("worker_disconnected", worker=hello.worker_id)

    async def _read(self, stream: Stream, requests: AsyncIterator[pb.WorkRequest]) -> None:
        try:
            async for request in requests:
                self._node.streams.take(stream, request)
        except grpc.RpcError:
            pass
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("worker_stream_failed", worker=stream.session.worker_id)

    async def AcquireLeases(self, request: pb.AcquireLeasesRequest, context: Any) -> pb.AcquireLeasesResponse:
        node = self._node
        if not request.worker_id:
            raise FieldInvalid("worker_id", "it must be set, and unique to this start of the worker")
        if node.draining:
            raise NodeDraining(node.timer_id)
        wanted = max(1, min(request.lease_count_max or 1, ACQUIRE_COUNT_MAX))
        wait_s = min(request.wait_duration_max.ToTimedelta().total_seconds(), ACQUIRE_WAIT_S_MAX)
        hello = pb.Hello(
            worker_id=request.worker_id,
            host=request.host,
            queues=request.queues,
            tenants=request.tenants,
            kinds=request.kinds,
            grant_count_max=wanted,
        )
        stream = await node.streams.open(hello, unary=True)
        session = stream.session
        grants: list[pb.Grant] = []
        try:
            deadline = asyncio.get_running_loop().time() + max(0.05, wait_s)
            while not grants or len(grants) < session.granted_count:
                frame = session.take_frame()
                if frame is not None:
                    grants.extend(pb.WorkResponse.FromString(b"".join(frame.grants)).grants)
                    continue
                session.heard_mono_us = mono_us()
                stream.wake.clear()
                try:
                    async with asyncio.timeout_at(deadline):
                        await stream.wake.wait()
                except TimeoutError:
                    if session.granted_count <= len(grants):
                        break
                    # A batch is on its way for us: no more credit, but what it brings is ours.
                    session.leaving = True
                    deadline = asyncio.get_running_loop().time() + SETTLE_TIMEOUT_S
        finally:
            session.leaving = True
            node.streams.close(stream)
        return pb.AcquireLeasesResponse(
            grants=grants, lease_duration=duration(node.settings.attempt_lease_ttl_ms)
        )

    async def RenewLease(self, request: pb.RenewLeaseRequest, context: Any) -> pb.RenewLeaseResponse:
        node = self._node
        leases = node.leases
        received = mono_us()
        slot = leases.by_token.get(request.lease_token)
        if slot is None or leases.state[slot] != LIVE:
            self._absent(request.run, request.attempt, request.lease_token)
        assert slot is not None
        if request.percent or request.message or request.checkpoint:
            node.take_progress(
                [
                    pb.AttemptProgress(
                        run=request.run,
                        attempt=request.attempt,
                        lease_token=request.lease_token,
                        percent=request.percent,
                        message=request.message,
                        checkpoint=request.checkpoint,
                    )
                ]
            )
        shard = int(leases.shard[slot])
        # It holds for the timer from now; the caller hears so only after a proof that begins later.
        leases.deadline_mono_us[slot] = max(
            int(leases.deadline_mono_us[slot]), received + int(leases.ttl_us[slot])
        )
        if shard not in await node.proof_after(received):
            raise ShardMoving(shard)
        if leases.by_token.get(request.lease_token) != slot:
            raise LeaseSuperseded(request.run, request.attempt, "the lease was given away")
        return pb.RenewLeaseResponse(
            lease_duration=duration(int(leases.ttl_us[slot]) // 1_000),
            cancel_requested=bool(leases.cancel_until_us[slot]),
        )

    async def CompleteRun(self, request: pb.CompleteRunRequest, context: Any) -> pb.CompleteRunResponse:
        outcome = self._outcome(request)
        if request.cancelled:
            outcome.cancelled.SetInParent()
        else:
            outcome.success.SetInParent()
            if request.HasField("result"):
                plain = convert.payload(request.result, "result")
                outcome.success.result.CopyFrom(convert.payload_message(plain))
        await self._record(outcome)
        return pb.CompleteRunResponse()

    async def FailRun(self, request: pb.FailRunRequest, context: Any) -> pb.FailRunResponse:
        outcome = self._outcome(request)
        outcome.failure.CopyFrom(request.failure)
        await self._record(outcome)
        return pb.FailRunResponse()

    async def ReleaseLease(self, request: pb.ReleaseLeaseRequest, context: Any) -> pb.ReleaseLeaseResponse:
        outcome = self._outcome(request)
        outcome.release.reason = request.reason
        outcome.release.not_before_duration.CopyFrom(request.not_before_duration)
        await self._record(outcome)
        return pb.ReleaseLeaseResponse()

    def _outcome(self, request: Any) -> pb.Outcome:
        if not request.lease_token:
            raise FieldInvalid("lease_token", "it must be the one that came with the grant")
        slot = self._node.leases.by_token.get(request.lease_token)
        fence = 0 if slot is None else int(self._node.leases.fence[slot])
        return pb.Outcome(
            run=request.run, attempt=request.attempt, lease_token=request.lease_token, fence=fence
        )

    async def _record(self, outcome: pb.Outcome) -> None:
        try:
            answer = await self._node.streams.take_outcome(outcome, OUTCOME_TIMEOUT_S)
        except TimeoutError:
            raise ShardMoving(_shard(outcome.run)) from None
        if answer == "moved":
            raise ShardMoving(_shard(outcome.run))
        if answer != "recorded":
            raise LeaseSuperseded(outcome.run, outcome.attempt, "the lease was given away or has ended")

    def _absent(self, run: str, attempt: int, token: str) -> None:
        shard = _shard(run)
        if shard not in self._node.epochs:
            raise ShardMoving(shard)
        raise LeaseSuperseded(run, attempt, "the lease was given away or has ended")


def _shard(run_name: str) -> int:
    run = parse_run_id(run_name.rpartition("/")[2])
    if run is None:
        raise FieldInvalid("run", "it must be tenants/{t}/runs/{32 hexadecimal digits}")
    return run_shard(run)
