"""What the services of one coordinator share."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from tickwheel.errors import NodeDraining
from tickwheel.etcd.election import EtcdElection
from tickwheel.etcd.registry import EtcdRegistry
from tickwheel.postgres.catalog import Catalog
from tickwheel.postgres.connections import Database
from tickwheel.runtime.config import CoordinatorSettings
from tickwheel.services.coordinator.history import HistoryKeeper
from tickwheel.services.coordinator.nudges import Nudger
from tickwheel.services.coordinator.shard_view import ShardView
from tickwheel.services.coordinator.timer_channels import TimerChannels
from tickwheel.services.coordinator.waiters import Waiters


@dataclass(frozen=True, slots=True)
class Node:
    node_id: str
    shard_count: int
    settings: CoordinatorSettings
    database: Database
    catalog: Catalog
    registry: EtcdRegistry
    election: EtcdElection
    view: ShardView
    channels: TimerChannels
    history: HistoryKeeper
    nudger: Nudger
    waiters: Waiters
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when this coordinator takes nothing new: who listens to it goes to another."""

    async def pause(self, seconds: float) -> None:
        """Between two rounds of a stream. Raises NodeDraining when this coordinator ends."""
        try:
            async with asyncio.timeout(seconds):
                await self.stopping.wait()
        except TimeoutError:
            return
        raise NodeDraining(self.node_id)
