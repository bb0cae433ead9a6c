"""A gRPC proxy before etcd that can drop, hold, change or refuse single RPCs, which no signal can do."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

_PASSED_ON = ("token", "hasleader")


class EtcdProxy(grpc.GenericRpcHandler):
    """Forwards raw bytes between clients and one etcd. RPCs are known by their last name, such as `Watch`.

    drop: answers of these are swallowed. refuse: these fail with the status. hold: these wait for the event
    before the first request is passed on. rewrite: each answer's bytes go through the function.
    calls: how often each was opened; open: how many are open now.
    """

    def __init__(self, upstream: str, credentials: grpc.ServerCredentials | None = None) -> None:
        self._credentials = credentials
        self.drop: set[str] = set()
        self.refuse: dict[str, grpc.StatusCode] = {}
        self.hold: dict[str, asyncio.Event] = {}
        self.rewrite: dict[str, Callable[[bytes], bytes]] = {}
        self.calls: Counter[str] = Counter()
        self.open: Counter[str] = Counter()
        self._upstream = upstream
        self._live: dict[Any, str] = {}

    async def __aenter__(self) -> Self:
        self._channel = grpc.aio.insecure_channel(self._upstream)
        self._server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        self._server.add_generic_rpc_handlers((self,))
        if self._credentials is None:
            self.port = self._server.add_insecure_port("127.0.0.1:0")
        else:
            self.port = self._server.add_secure_port("127.0.0.1:0", self._credentials)
        await self._server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._server.stop(0)
        await self._channel.close()

    def sever(self, *names: str) -> None:
        """Refuse these from now on, and break those that are open: nothing reaches etcd any more."""
        self.refuse.update(dict.fromkeys(names, grpc.StatusCode.UNAVAILABLE))
        for call, name in list(self._live.items()):
            if name in names:
                call.cancel()

    async def cut(self) -> None:
        """Break every connection and accept no more."""
        await self._server.stop(0)

    @property
    def url(self) -> str:
        return f"http{'s' if self._credentials else ''}://127.0.0.1:{self.port}"

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        method = details.method
        name = method.rpartition("/")[2]

        async def forward(requests: Any, context: Any) -> AsyncIterator[bytes]:
            self.calls[name] += 1
            self.open[name] += 1
            call: Any = None
            try:
                if name in self.refuse:
                    await context.abort(self.refuse[name], "injected")
                if name in self.hold:
                    await self.hold[name].wait()
                metadata = [pair for pair in context.invocation_metadata() if pair[0] in _PASSED_ON]
                call = self._channel.stream_stream(method)(requests, metadata=metadata)
                self._live[call] = name
                async for response in call:
                    if name not in self.drop:
                        yield self.rewrite.get(name, bytes)(response)
                if name in self.drop:
                    await asyncio.Event().wait()  # the end is swallowed too: the client must give up itself
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details() or "")
            except asyncio.CancelledError:
                if name not in self.refuse:
                    raise
                await context.abort(self.refuse[name], "severed")
            finally:
                self.open[name] -= 1
                if call is not None:
                    self._live.pop(call, None)
                    call.cancel()

        return grpc.stream_stream_rpc_method_handler(forward)
