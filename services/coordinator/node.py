"""What the services of one coordinator share."""

from __future__ import annotations

from dataclasses import dataclass

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
