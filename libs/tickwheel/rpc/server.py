"""A gRPC server as every process of ours has it: reflection, health, channelz, errors as statuses, bounds.

It knows no service: whoever builds it registers its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

import grpc
import structlog
from grpc_channelz.v1 import channelz
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import _async as reflection_aio
from grpc_reflection.v1alpha import reflection_pb2
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tickwheel.errors import NodeDraining, TickwheelError, Unavailable
from tickwheel.rpc.channel import MESSAGE_BYTES_MAX
from tickwheel.rpc.status import abort

log = structlog.get_logger(__name__)
_tracer = trace.get_tracer("tickwheel.rpc")
_propagator = TraceContextTextMapPropagator()

REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"
REFLECTION_V1ALPHA = "grpc.reflection.v1alpha.ServerReflection"
CHANNELZ = "grpc.channelz.v1.Channelz"
CONCURRENT_RPCS_MAX = 10_000

_OPTIONS: tuple[tuple[str, int], ...] = (
    # Two processes on one port would share its connections in silence.
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Clients may ping as often as ours do, also while they call nothing.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
)


class PortUnavailable(TickwheelError):
    """The address cannot be listened on. Stop what listens there, or choose another port (0: any)."""

    def __init__(self, address: str, reason: str) -> None:
        self.address = address
        self.reason = reason
        super().__init__(f"cannot listen on {address}: {reason}; is another process there?")


class RpcServer:
    """A server and its health. Register services on `server` before `start`, and name them there."""

    def __init__(
        self, *, credentials: grpc.ServerCredentials | None = None, deadline_ms_max: int = 60_000
    ) -> None:
        self._credentials = credentials
        self.server = grpc.aio.server(
            options=_OPTIONS,
            interceptors=[ErrorInterceptor(deadline_ms_max)],
            maximum_concurrent_rpcs=CONCURRENT_RPCS_MAX,
        )
        self.health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.server)
        channelz.add_channelz_servicer(self.server)
        self._services: tuple[str, ...] = ()

    async def start(self, address: str, services: Iterable[str]) -> int:
        """Listens on `host:port` (port 0: any free one), and gives the port.

        `services` are the full names of what was registered, for reflection and health.
        """
        self._services = tuple(services)
        names = (*self._services, health.SERVICE_NAME, CHANNELZ)
        add_reflection(self.server, names)
        try:
            if self._credentials is None:
                port = self.server.add_insecure_port(address)
            else:
                port = self.server.add_secure_port(address, self._credentials)
        except RuntimeError as error:
            raise PortUnavailable(address, str(error)) from error
        if port == 0:
            raise PortUnavailable(address, "the port is in use")
        await self.server.start()
        await self.set_serving(True)
        return port

    async def set_serving(self, serving: bool) -> None:
        """What the health service answers, for the whole server and each service."""
        state = (
            health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for name in ("", *self._services):
            await self.health.set(name, state)

    async def stop(self, grace_ms: int) -> None:
        """Takes no new calls, lets those under way end for so long, then ends them."""
        await self.health.enter_graceful_shutdown()
        await self.server.stop(grace_ms / 1_000)


def add_reflection(server: grpc.aio.Server, names: Iterable[str]) -> None:
    """Reflection under both of its names: the two versions have the same messages on the wire."""
    names = (*names, REFLECTION_V1, REFLECTION_V1ALPHA)
    servicer = reflection_aio.ReflectionServicer(names)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        tuple(
            grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": handler})
            for name in (REFLECTION_V1, REFLECTION_V1ALPHA)
        )
    )


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns our errors into statuses; a bug becomes INTERNAL, with a log line that tells it, and no UNKNOWN.

    A unary call without a deadline, or with a longer one, gets `deadline_ms_max`.
    """

    def __init__(self, deadline_ms_max: int) -> None:
        self._deadline_s_max = deadline_ms_max / 1_000

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return handler
        method = handler_call_details.method
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(
                self._answer(method, handler.unary_unary),
                handler.request_deserializer,
                handler.response_serializer,
            )
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(
                self._stream(method, handler.unary_stream),
                handler.request_deserializer,
                handler.response_serializer,
            )
        if handler.stream_unary is not None:
            return grpc.stream_unary_rpc_method_handler(
                self._answer(method, handler.stream_unary),
                handler.request_deserializer,
                handler.response_serializer,
            )
        return grpc.stream_stream_rpc_method_handler(
            self._stream(method, handler.stream_stream),
            handler.request_deserializer,
            handler.response_serializer,
        )

    def _answer(
        self, method: str, behaviour: Callable[[Any, Any], Awaitable[Any]]
    ) -> Callable[[Any, Any], Any]:
        name = method.removeprefix("/")

        async def answer(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            # A refusal is an answer, not a fault of this process: only a bug marks the span.
            with _tracer.start_as_current_span(
                name,
                context=_caller(context),
                kind=trace.SpanKind.SERVER,
                record_exception=False,
                set_status_on_exception=False,
            ):
                return await bounded(request, context)

        async def bounded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            left_s = context.time_remaining()
            if left_s is not None and left_s < self._deadline_s_max:
                return await _guarded(method, behaviour(request, context), context)
            try:
                async with asyncio.timeout(self._deadline_s_max):
                    return await _guarded(method, behaviour(request, context), context)
            except TimeoutError:
                await context.abort(
                    grpc.StatusCode.DEADLINE_EXCEEDED, f"no answer within {self._deadline_s_max:g} s"
                )

        return answer

    def _stream(self, method: str, behaviour: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        async def stream(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            outcome = behaviour(request, context)
            if not hasattr(outcome, "__aiter__"):
                # A handler that writes to the context instead of yielding.
                await _guarded(method, outcome, context)
                return
            try:
                async for message in outcome:
                    yield message
            except Exception as error:
                await _end(method, error, context)

        return stream


def _caller(context: grpc.aio.ServicerContext[Any, Any]) -> Context:
    """The caller's trace, or none."""
    for key, value in context.invocation_metadata() or ():
        if key == "traceparent" and isinstance(value, str):
            return _propagator.extract({"traceparent": value}, Context())
    return Context()


async def _guarded(method: str, answer: Awaitable[Any], context: grpc.aio.ServicerContext[Any, Any]) -> Any:
    try:
        return await answer
    except Exception as error:
        await _end(method, error, context)


async def _end(method: str, error: Exception, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    """Ends the call with the error's status; what gRPC itself raised to end it passes."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, TickwheelError):
        if isinstance(error, Unavailable) and not isinstance(error, NodeDraining):
            log.warning("rpc_unavailable", method=method, error=str(error))
        await abort(context, error)
    if isinstance(error, grpc.aio.AioRpcError):
        # A call that was forwarded: its status and details go on as they are.
        await context.abort(error.code(), error.details() or "", tuple(error.trailing_metadata() or ()))
    log.error("rpc_failed", method=method, error=repr(error), exc_info=error)
    span = trace.get_current_span()
    span.record_exception(error)
    span.set_status(trace.StatusCode.ERROR)
    await abort(context, TickwheelError("an internal error; the server's log tells more"))
