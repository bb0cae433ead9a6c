"""What a timer knows of a shard after it took it, whatever happened on the way."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from typing import Any

import psycopg
import pytest
from tests.fakes.shard_registry import MemoryShardRegistry

from tickwheel.domain import job
from tickwheel.errors import StoreUnavailable
from tickwheel.postgres.timer_store import TimerStore
from tickwheel.runtime.config import TimerSettings
from tickwheel.runtime.telemetry import Metrics
from tickwheel.services.timer.meters import Meters
from tickwheel.services.timer.node import LANE_COUNT, TimerNode

WAIT_S_MAX = 10.0


class FailingStore(TimerStore):
    """The real store, from which Postgres goes away when leases are read for the first time."""

    failures_left = 1

    async def load_leases(self, shards: Any) -> Any:
        if self.failures_left:
            self.failures_left -= 1
            raise StoreUnavailable("Postgres", "it went away")
        return await super().load_leases(shards)


@pytest.fixture
async def node(migrated_url: str, request: pytest.FixtureRequest) -> AsyncIterator[TimerNode]:
    """A timer without loops but that which takes shards."""
    timer_id = f"timer-{uuid.uuid4().hex[:8]}"
    store = request.param(migrated_url, timer_id, LANE_COUNT)
    settings = TimerSettings.model_validate({"postgres_url": migrated_url, "node_name": "timer"})
    node = TimerNode(settings, timer_id, store, MemoryShardRegistry(), Meters(Metrics()))
    await node.start()
    taking = asyncio.create_task(node.ownership.run())
    try:
        yield node
    finally:
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        await store.close()


async def until_known(node: TimerNode, shards: set[int]) -> None:
    """Until the shards are ours and what they hold is read."""
    async with asyncio.timeout(WAIT_S_MAX):
        while not shards <= node.loader.loaded_until_us.keys() & node.epochs.keys() - node.loading:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("node", [FailingStore], indirect=True)
async def test_a_shard_whose_leases_could_not_be_read_is_taken_again(node: TimerNode) -> None:
    node.ownership.want({3: 1, 4: 1})
    await until_known(node, {3, 4})
    assert isinstance(node.store, FailingStore)
    assert node.store.failures_left == 0


@pytest.mark.parametrize("node", [TimerStore], indirect=True)
@pytest.mark.parametrize(
    ("shard", "timeout_ms", "allowed_us"), [(5, 7_200_000, 7_200_000_000), (6, 0, 1 << 45)]
)
async def test_an_inherited_attempt_keeps_the_timeout_of_its_template(
    node: TimerNode, migrated_url: str, shard: int, timeout_ms: int, allowed_us: int
) -> None:
    template = job.JobTemplate(kind="long", timeouts=job.Timeouts(attempt_ms_max=timeout_ms))
    body = job.encode_template(template)
    token = uuid.uuid4()
    lease_us = node.clock.now_us() - 1_200_000_000
    with psycopg.connect(migrated_url, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO template_def (template_id, body) VALUES (%s, %s)", [job.content_id(body), body]
        )
        connection.execute(
            "INSERT INTO lease (run, token, fence, template_id, version, schedule_us, due_us, create_us,"
            " lease_us, tenant_id, route_id, flags, worker_no, lease_ms, spent, shard_id, attempt, priority)"
            " VALUES (%s, %s, 7, %s, 0, 0, 0, 0, %s, 1, 1, 64, 1, 600000, 0, %s, 1, 0)",
            [uuid.uuid4(), token, job.content_id(body), lease_us, shard],
        )
    node.ownership.want({shard: 1})
    await until_known(node, {shard})
    slot = node.leases.by_token[token.hex]
    assert node.leases.attempt_deadline_us[slot] - lease_us >= allowed_us
