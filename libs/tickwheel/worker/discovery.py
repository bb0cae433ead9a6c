"""Which timers are there now? Asked of any of several coordinators, for as long as the worker lives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import grpc
import structlog

from tickwheel.v1 import cluster_service_pb2 as pb
from tickwheel.v1 import cluster_service_pb2_grpc
from tickwheel.worker.backoff import Backoff
from tickwheel.worker.channel import ChannelOptions, open_channel

QUIET_S_MAX = 20.0
"""A watch that went quiet says nothing about itself: after so long the coordinator is asked again."""

ASK_TIMEOUT_S = 3.0

_logger = structlog.get_logger("tickwheel.worker")


class Discovery:
    """Watches the timers at one coordinator, and goes on at the next one when that fails.

    on_timers: called with {timer_id: (address, draining)} whenever an answer comes, on this loop.
    """

    def __init__(
        self,
        coordinators: Sequence[str],
        options: ChannelOptions,
        on_timers: Callable[[Mapping[str, tuple[str, bool]]], None],
    ) -> None:
        if not coordinators:
            raise ValueError("no coordinator: give at least one address, such as 127.0.0.1:7600")
        self._addresses = list(coordinators)
        self._options = options
        self._on_timers = on_timers

    async def run(self) -> None:
        """Until cancelled. One channel to each coordinator, for the whole life."""
        channels = [open_channel(address, self._options) for address in self._addresses]
        stubs = [cluster_service_pb2_grpc.ClusterServiceStub(channel) for channel in channels]
        backoff = Backoff()
        turn = 0
        try:
            while True:
                address = self._addresses[turn % len(stubs)]
                try:
                    await self._watch(stubs[turn % len(stubs)], backoff)
                    _logger.info("timers_watch_ended", coordinator=address)
                except grpc.aio.AioRpcError as error:
                    _logger.warning(
                        "timers_watch_failed",
                        coordinator=address,
                        code=error.code().name,
                        details=error.details(),
                    )
                turn += 1
                # The others are tried at once; after a round of them, with a pause.
                if turn % len(stubs) == 0 or backoff.failure_count == 0:
                    await asyncio.sleep(backoff.next_delay_s())
        finally:
            for channel in channels:
                await channel.close(None)

    async def _watch(self, stub: cluster_service_pb2_grpc.ClusterServiceAsyncStub, backoff: Backoff) -> None:
        call = stub.WatchTimers(pb.WatchTimersRequest(), metadata=self._options.metadata)
        read: asyncio.Task[object] | None = None
        try:
            while True:
                if read is None:
                    read = asyncio.ensure_future(call.read())
                # When this `wait` is over the read goes on; a timeout around the read would end the call.
                done, _ = await asyncio.wait({read}, timeout=QUIET_S_MAX)
                if not done:
                    response = await stub.ListTimers(
                        pb.ListTimersRequest(), timeout=ASK_TIMEOUT_S, metadata=self._options.metadata
                    )
                    self._tell(response.timers)
                    continue
                answer = read.result()
                read = None
                if not isinstance(answer, pb.WatchTimersResponse):
                    return
                backoff.reset()
                self._tell(answer.timers)
        finally:
            if read is not None:
                read.cancel()
            call.cancel()

    def _tell(self, timers: Sequence[pb.Timer]) -> None:
        self._on_timers({timer.timer_id: (timer.address, timer.draining) for timer in timers})
