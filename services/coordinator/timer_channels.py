"""Channels to timers: one for each address, for as long as the timer lives."""

from __future__ import annotations

import grpc

from tickwheel.rpc.channel import open_channel
from tickwheel.services.coordinator.shard_view import ShardView

CHANNELS_KEPT_MAX = 64
"""Beyond it, channels to timers that are gone are closed."""


class TimerChannels:
    def __init__(self, view: ShardView) -> None:
        self._view = view
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def to(self, address: str) -> grpc.aio.Channel:
        """The channel to `host:port`."""
        channel = self._channels.get(address)
        if channel is None:
            if len(self._channels) >= CHANNELS_KEPT_MAX:
                await self._close_gone()
            channel = self._channels[address] = open_channel(address)
        return channel

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()

    async def _close_gone(self) -> None:
        alive = {record.address_internal for record in self._view.timers()}
        for address in [each for each in self._channels if each not in alive]:
            await self._channels.pop(address).close()
