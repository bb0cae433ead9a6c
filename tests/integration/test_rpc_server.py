"""What every server of ours has, looked at from outside."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from opentelemetry import trace

from tickwheel.errors import FieldInvalid, ShardMoving
from tickwheel.rpc.channel import open_channel
from tickwheel.rpc.server import REFLECTION_V1, REFLECTION_V1ALPHA, PortUnavailable, RpcServer
from tickwheel.rpc.status import from_rpc_error
from tickwheel.v1 import cluster_service_pb2, cluster_service_pb2_grpc

NAME = "tickwheel.v1.ClusterService"
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Service(cluster_service_pb2_grpc.ClusterServiceServicer):
    """Each method does what a test needs."""

    async def ListShards(self, request: Any, context: Any) -> cluster_service_pb2.ListShardsResponse:
        raise FieldInvalid("shard", "it is not there")

    async def ListTimers(self, request: Any, context: Any) -> cluster_service_pb2.ListTimersResponse:
        raise ZeroDivisionError("a bug, with a secret in it")

    async def DrainTimer(self, request: Any, context: Any) -> cluster_service_pb2.DrainTimerResponse:
        await asyncio.sleep(60)
        return cluster_service_pb2.DrainTimerResponse()

    async def WatchTimers(
        self, request: Any, context: Any
    ) -> AsyncIterator[cluster_service_pb2.WatchTimersResponse]:
        yield cluster_service_pb2.WatchTimersResponse()
        raise ShardMoving(7)

    async def GetClusterHealth(self, request: Any, context: Any) -> cluster_service_pb2.ClusterHealth:
        found = trace.get_current_span().get_span_context()
        return cluster_service_pb2.ClusterHealth(verdict=f"{found.trace_id:032x}")


@pytest.fixture
async def server() -> AsyncIterator[tuple[RpcServer, int]]:
    server = RpcServer(deadline_ms_max=300)
    cluster_service_pb2_grpc.add_ClusterServiceServicer_to_server(Service(), server.server)  # type: ignore[abstract]
    port = await server.start("127.0.0.1:0", [NAME])
    yield server, port
    await server.stop(0)


@pytest.fixture
async def channel(server: tuple[RpcServer, int]) -> AsyncIterator[grpc.aio.Channel]:
    async with open_channel(f"127.0.0.1:{server[1]}") as channel:
        yield channel


def stub(channel: grpc.aio.Channel) -> Any:
    return cluster_service_pb2_grpc.ClusterServiceStub(channel)


async def test_an_error_of_ours_keeps_its_class(channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub(channel).ListShards(cluster_service_pb2.ListShardsRequest())
    found = from_rpc_error(caught.value)
    assert isinstance(found, FieldInvalid)
    assert found.field == "shard"


async def test_a_bug_is_internal_and_tells_nothing_of_itself(channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub(channel).ListTimers(cluster_service_pb2.ListTimersRequest())
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in str(caught.value.details())


async def test_a_stream_ends_with_its_error(channel: grpc.aio.Channel) -> None:
    call = stub(channel).WatchTimers(cluster_service_pb2.WatchTimersRequest())
    assert await call.read()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert isinstance(from_rpc_error(caught.value), ShardMoving)


async def test_a_call_without_a_deadline_gets_one(channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub(channel).DrainTimer(cluster_service_pb2.DrainTimerRequest())
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_call_goes_on_with_its_callers_trace(channel: grpc.aio.Channel) -> None:
    answer = await stub(channel).GetClusterHealth(
        cluster_service_pb2.GetClusterHealthRequest(), metadata=(("traceparent", TRACEPARENT),)
    )
    assert answer.verdict == TRACEPARENT.split("-")[1]


@pytest.mark.parametrize("version", [REFLECTION_V1, REFLECTION_V1ALPHA])
async def test_reflection_lists_and_describes_under_both_of_its_names(
    channel: grpc.aio.Channel, version: str
) -> None:
    ask = channel.stream_stream(
        f"/{version}/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    requests = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol=NAME),
    ]
    answers = [answer async for answer in ask(iter(requests))]
    listed = {service.name for service in answers[0].list_services_response.service}
    assert {NAME, REFLECTION_V1, REFLECTION_V1ALPHA, "grpc.health.v1.Health"} <= listed
    assert answers[1].file_descriptor_response.file_descriptor_proto


async def test_health_follows_what_the_process_says(
    server: tuple[RpcServer, int], channel: grpc.aio.Channel
) -> None:
    health: Any = health_pb2_grpc.HealthStub(channel)
    for name in ("", NAME):
        answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    await server[0].set_serving(False)
    answer = await health.Check(health_pb2.HealthCheckRequest(service=NAME))
    assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_channelz_is_there(channel: grpc.aio.Channel) -> None:
    service: Any = channelz_pb2_grpc.ChannelzStub(channel)  # type: ignore[arg-type]
    answer = await service.GetServers(channelz_pb2.GetServersRequest())
    assert answer.server


async def test_two_servers_never_share_a_port(server: tuple[RpcServer, int]) -> None:
    other = RpcServer()
    with pytest.raises(PortUnavailable, match="is another process there"):
        await other.start(f"127.0.0.1:{server[1]}", [])
    await other.stop(0)


async def test_a_message_that_is_too_large_is_refused_not_lost(channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub(channel).DrainTimer(cluster_service_pb2.DrainTimerRequest(timer_id="x" * (5 << 20)))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
