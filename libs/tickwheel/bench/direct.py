"""How fast are direct runs created, and how fast does a burst of them drain that is due at one instant?"""

import asyncio
import time
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

from tickwheel.bench import cluster as bench
from tickwheel.rpc.channel import open_channel
from tickwheel.v1 import job_pb2, run_pb2, run_service_pb2, run_service_pb2_grpc

BATCH = 5_000
DRAIN_TIMEOUT_S = 120.0


def run(count: int = 100_000, workers: int = 1, capacity: int = 4_000) -> dict[str, Any]:
    """Creates `count` runs through BatchCreateRuns, all due at one instant, and waits until they have
    ended."""
    with bench.running(workers=workers, capacity=capacity) as (cluster, connection):
        # The first batch of a cluster interns templates and opens connections.
        asyncio.run(create(cluster.api_addresses[0], 1_000, bench.now_us(connection)))
        _wait_ended(connection, 1_000)
        due_us = bench.now_us(connection) + int(count / 8_000 + 4) * 1_000_000
        began = time.monotonic()
        asyncio.run(create(cluster.api_addresses[0], count, due_us))
        create_s = time.monotonic() - began
        late = bench.now_us(connection) > due_us
        while bench.now_us(connection) < due_us - 200_000:
            time.sleep(0.05)
        before = bench.usage()
        drained = _wait_ended(connection, 1_000 + count)
        after = bench.usage()
        row = connection.execute(
            """
            SELECT (max(end_us) - %(due)s) / 1e6, (max(lease_us) - %(due)s) / 1e6,
                   percentile_cont(0.5) WITHIN GROUP (ORDER BY lease_us - due_us) / 1e6, count(*)
              FROM run WHERE due_us = %(due)s AND state = 5
            """,
            {"due": due_us},
        ).fetchone()
        assert row is not None
        return {
            "count": count,
            "created_per_s": round(count / create_s),
            "created_before_due": not late,
            "drained": drained,
            "drained_per_s": round(row[3] / float(row[0])) if row[0] else 0,
            "last_start_s": round(float(row[1]), 3),
            "median_start_s": round(float(row[2]), 3),
            "cpu_us_each": bench.cpu_us_each(before, after, count),
            "memory_mib": {key: value >> 20 for key, value in sorted(after.memory_bytes.items())},
        }


async def create(address: str, count: int, due_us: int) -> None:
    """`count` runs in batches, a few batches under way at a time."""
    template = job_pb2.JobTemplate(kind="noop")
    due = Timestamp(seconds=due_us // 1_000_000, nanos=due_us % 1_000_000 * 1_000)
    one = run_service_pb2.CreateRunRequest(run=run_pb2.Run(template=template, due_time=due))
    full = run_service_pb2.BatchCreateRunsRequest(
        parent="tenants/default", requests=[one] * min(BATCH, count), names_only=True
    )
    gate = asyncio.Semaphore(3)
    async with open_channel(address) as channel:
        stub = run_service_pb2_grpc.RunServiceStub(channel)

        async def send() -> None:
            async with gate:
                await stub.BatchCreateRuns(full)

        async with asyncio.TaskGroup() as group:
            for _ in range(max(1, count // BATCH)):
                group.create_task(send())


def _wait_ended(connection: Any, count: int) -> bool:
    deadline = time.monotonic() + DRAIN_TIMEOUT_S
    while time.monotonic() < deadline:
        row = connection.execute(
            "SELECT (SELECT count(*) FROM timer WHERE kind = 2) + (SELECT count(*) FROM lease)"
        ).fetchone()
        if row[0] == 0:
            done = connection.execute("SELECT count(*) FROM run WHERE state = 5").fetchone()
            if done[0] >= count:
                return True
        time.sleep(0.1)
    return False
