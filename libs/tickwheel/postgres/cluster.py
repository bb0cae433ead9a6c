"""What Postgres knows of the cluster: its shards, their owners and the timers that stamp it."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from tickwheel.errors import StoreUnavailable
from tickwheel.postgres import statements
from tickwheel.postgres.connections import Connection

_SQL = statements.load("common.sql")


@dataclass(frozen=True, slots=True)
class Cluster:
    cluster_id: uuid.UUID
    shard_count: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class ShardRow:
    """The fence: whoever holds `epoch` may write."""

    shard: int
    epoch: int
    owner: str
    generation: int


@dataclass(frozen=True, slots=True)
class TimerNodeRow:
    timer_id: str
    node_name: str
    address: str
    started_us: int
    seen_us: int


async def find(connection: Connection) -> Cluster:
    """Raises StoreUnavailable where nobody has migrated the database yet."""
    row = await (await connection.execute(_SQL["cluster"])).fetchone()
    if row is None:
        raise StoreUnavailable("Postgres", "the database has no cluster yet: run `tickwheel migrate`")
    return Cluster(row[0], row[1], row[2])


async def shards(connection: Connection) -> list[ShardRow]:
    rows = await (await connection.execute(_SQL["shards"])).fetchall()
    return [ShardRow(*row) for row in rows]


async def generations(connection: Connection) -> dict[int, int]:
    """Of each shard that was ever taken: the generation under which it was."""
    rows = await (await connection.execute(_SQL["generations"])).fetchall()
    return dict(rows)


async def timer_nodes(connection: Connection) -> dict[str, TimerNodeRow]:
    rows = await (await connection.execute(_SQL["timer_nodes"])).fetchall()
    return {row[0]: TimerNodeRow(*row) for row in rows}
