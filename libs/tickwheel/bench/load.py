"""How fast does a new owner read cells into memory, and how fast is a schedule created?"""

import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import psycopg
from google.protobuf.duration_pb2 import Duration

from tickwheel.bench import cluster as bench
from tickwheel.clock import mono_us
from tickwheel.embedded.cluster import DATABASE
from tickwheel.embedded.etcd import EmbeddedEtcd
from tickwheel.embedded.postgres import EmbeddedPostgres
from tickwheel.etcd.client import EtcdClient, EtcdSettings
from tickwheel.etcd.registry import EtcdRegistry
from tickwheel.postgres.migrate import migrate
from tickwheel.postgres.timer_store import TimerStore
from tickwheel.rpc.channel import open_channel
from tickwheel.runtime.config import TimerSettings, load_settings
from tickwheel.runtime.telemetry import Metrics
from tickwheel.v1 import job_pb2, schedule_pb2, schedule_service_pb2, schedule_service_pb2_grpc

CREATE_COUNT = 1_000


def cold_load(count: int = 1_000_000) -> dict[str, Any]:
    """Timers of the next minute, spread over it, from Postgres into entries and wheel: what a takeover
    does."""
    with tempfile.TemporaryDirectory(prefix="tw", dir="/tmp", ignore_cleanup_errors=True) as folder:
        postgres, etcd = EmbeddedPostgres(Path(folder) / "p"), EmbeddedEtcd(Path(folder) / "e")
        try:
            postgres.start()
            etcd.start()
            postgres.create_database(DATABASE)
            url = postgres.url(DATABASE)
            migrate(url, shard_count=bench.SHARD_COUNT)
            with psycopg.connect(url, autocommit=True) as connection:
                kind = bench.store_kind(connection)
                first_us = bench.now_us(connection) + 60_000_000
                bench.add_schedules(connection, kind, count, 60_000_000, first_us, "c", 600)
                connection.execute("VACUUM ANALYZE timer")
            rates = [asyncio.run(_load(url, etcd.url, count)) for _ in range(3)]
        finally:
            etcd.stop()
            postgres.stop()
    return {"timers": count, "timers_per_s": round(statistics.median(rates))}


async def _load(url: str, etcd_url: str, count: int) -> float:
    from tickwheel.services.timer.meters import Meters
    from tickwheel.services.timer.node import LANE_COUNT, TimerNode

    settings = load_settings(TimerSettings, postgres_url=url, tenant_share_count_max=10 * count)
    store = TimerStore(url, "bench", LANE_COUNT)
    client = EtcdClient(EtcdSettings(endpoints=(etcd_url,)))
    node = TimerNode(settings, "bench", store, EtcdRegistry(client, mono_us), Meters(Metrics()))
    try:
        await node.start()
        shards = list(range(bench.SHARD_COUNT))
        node.loading.update(shards)
        until_us = node.clock.now_us() + 600_000_000
        node.horizon_us = until_us
        await node.loader.find_tenants(shards)
        began = time.perf_counter()
        await node.loader.load(shards, 0, until_us)
        took_s = time.perf_counter() - began
        assert len(node.entries) == len(node.wheel) == count
        return count / took_s
    finally:
        await store.close()
        await client.close()


def create_schedules() -> dict[str, Any]:
    """CreateSchedule, one after the other."""
    with bench.running() as (cluster, _):
        taken = sorted(asyncio.run(_create(cluster.api_addresses[0])))
    return {
        "count": len(taken),
        "p50_ms": round(taken[len(taken) // 2] * 1e3, 2),
        "p99_ms": round(taken[len(taken) * 99 // 100] * 1e3, 2),
    }


async def _create(address: str) -> list[float]:
    taken: list[float] = []
    async with open_channel(address) as channel:
        stub = schedule_service_pb2_grpc.ScheduleServiceStub(channel)
        for number in range(CREATE_COUNT):
            request = schedule_service_pb2.CreateScheduleRequest(
                parent="tenants/default",
                schedule_id=f"b{number}",
                schedule=schedule_pb2.Schedule(
                    spec=schedule_pb2.ScheduleSpec(
                        triggers=[
                            schedule_pb2.Trigger(
                                interval=schedule_pb2.IntervalTrigger(duration=Duration(seconds=3_600))
                            )
                        ],
                        template=job_pb2.JobTemplate(kind="noop"),
                    )
                ),
            )
            began = time.perf_counter()
            await stub.CreateSchedule(request)
            taken.append(time.perf_counter() - began)
    return taken
