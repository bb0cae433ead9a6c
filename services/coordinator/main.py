"""How does a coordinator start and end? `python -m tickwheel.services.coordinator`, settings from the
environment.
"""

from __future__ import annotations

import asyncio
import sys

import structlog
from google.longrunning import operations_pb2, operations_pb2_grpc

from tickwheel.clock import ClusterClock, mono_us
from tickwheel.errors import NodeDraining, StoreUnavailable
from tickwheel.etcd.client import EtcdClient, EtcdSettings
from tickwheel.etcd.election import EtcdElection
from tickwheel.etcd.lease import LeaseSettings, NodeLease
from tickwheel.etcd.registration import fresh_node_id
from tickwheel.etcd.registry import EtcdRegistry
from tickwheel.postgres import cluster
from tickwheel.postgres.catalog import Catalog
from tickwheel.postgres.connections import Connection, Database
from tickwheel.rpc.server import RpcServer
from tickwheel.runtime.config import ConfigurationInvalid, CoordinatorSettings, load_settings
from tickwheel.runtime.process import EXIT_CANNOT_START, Phase, Process, run_process
from tickwheel.services.coordinator.background import Background
from tickwheel.services.coordinator.calendar_service import CalendarService
from tickwheel.services.coordinator.cluster_service import ClusterService
from tickwheel.services.coordinator.dead_letter_service import DeadLetterService
from tickwheel.services.coordinator.history import HistoryKeeper
from tickwheel.services.coordinator.leader import maintain_partitions, resume_paused
from tickwheel.services.coordinator.node import Node
from tickwheel.services.coordinator.nudges import Nudger
from tickwheel.services.coordinator.operation_service import OperationService
from tickwheel.services.coordinator.reconciler import Reconciler, ReconcilerSettings
from tickwheel.services.coordinator.run_service import RunService
from tickwheel.services.coordinator.schedule_service import ScheduleService
from tickwheel.services.coordinator.shard_view import ShardView
from tickwheel.services.coordinator.timer_channels import TimerChannels
from tickwheel.services.coordinator.waiters import Waiters
from tickwheel.services.coordinator.worker_service import WorkerService
from tickwheel.v1 import (
    calendar_service_pb2,
    calendar_service_pb2_grpc,
    cluster_service_pb2,
    cluster_service_pb2_grpc,
    dead_letter_service_pb2,
    dead_letter_service_pb2_grpc,
    run_service_pb2,
    run_service_pb2_grpc,
    schedule_service_pb2,
    schedule_service_pb2_grpc,
    worker_service_pb2,
    worker_service_pb2_grpc,
)

log = structlog.get_logger(__name__)

START_RETRY_MS = 500
CLOCK_INTERVAL_MS = 5_000
CALL_DEADLINE_MS_MAX = 310_000
"""WaitRun may take five minutes; nothing takes longer."""


class Clock(ClusterClock):
    """As the reconciler wants it: both kinds of time from one object."""

    def mono_us(self) -> int:
        return mono_us()


async def serve(process: Process) -> None:
    """Brings the coordinator up, and says how each of its parts ends."""
    settings = process.settings
    assert isinstance(settings, CoordinatorSettings)
    database = Database(
        settings.postgres_url,
        connections_max=settings.postgres_pool_connections_max,
        connect_timeout_ms=settings.postgres_connect_timeout_ms,
        transaction_timeout_ms=settings.api_transaction_timeout_ms,
        name="tickwheel coordinator",
    )
    process.on_stop(Phase.CLOSE, "postgres", database.close)
    found = await _cluster(database)
    clock = Clock()
    await clock.sample(database.now_us)

    client = EtcdClient(etcd_settings(settings))
    process.on_stop(Phase.CLOSE, "etcd", client.close)
    node_id = fresh_node_id(settings.node_name)
    lease = NodeLease(client, LeaseSettings(ttl_ms=settings.etcd_lease_ttl_ms), clock.mono_us)
    registry = EtcdRegistry(client, clock.mono_us)
    election = EtcdElection(client, lease, node_id, clock.mono_us)
    process.on_stop(Phase.RELEASE, "leadership", election.resign)

    view = ShardView()
    channels = TimerChannels(view)
    process.on_stop(Phase.CLOSE, "timers", channels.close)
    catalog = Catalog(database)
    history = HistoryKeeper(settings.postgres_url, registry, election, database, catalog.forget)
    database.admit = history.admit
    nudger = Nudger(view, channels, timeout_ms=settings.nudge_timeout_ms, queue_max=settings.nudge_queue_max)
    waiters = Waiters(database)
    node = Node(
        node_id=node_id,
        shard_count=found.shard_count,
        settings=settings,
        database=database,
        catalog=catalog,
        history=history,
        registry=registry,
        election=election,
        view=view,
        channels=channels,
        nudger=nudger,
        waiters=waiters,
    )
    schedule_service = ScheduleService(node)
    calendar_service = CalendarService(node)
    background = Background(node, schedule_service, calendar_service)
    reconciler = Reconciler(
        registry,
        election,
        clock,
        ReconcilerSettings(
            shard_count=found.shard_count,
            lease_ttl_ms=settings.etcd_lease_ttl_ms,
            relist_ms=settings.reconcile_interval_ms,
        ),
        lambda: database.read(cluster.generations),
    )
    for name, work in (
        ("clock", clock.run(database.now_us, CLOCK_INTERVAL_MS)),
        ("lease", lease.run()),
        ("election", election.run()),
        ("reconciler", reconciler.run()),
        ("registry-view", registry.watch(view.hear)),
        ("history", history.run()),
        ("nudger", nudger.run()),
        ("waiters", waiters.run()),
        ("partitions", maintain_partitions(election, database, settings.postgres_url)),
        ("operations", background.run()),
        ("recompute-watch", background.watch()),
        ("resumes", resume_paused(election, database, schedule_service.resume_due)),
    ):
        process.spawn(work, name)
    _measure(process, node)

    server = RpcServer(deadline_ms_max=CALL_DEADLINE_MS_MAX)
    services = _register(server, node, schedule_service, calendar_service)
    port = await server.start(f"{settings.listen_host}:{settings.listen_port}", services)
    # The server's grace is what the phase leaves it.
    process.on_stop(Phase.STOP_TAKING, "rpc", lambda: server.stop(max(100, settings.exit_timeout_ms - 500)))
    process.on_stop(Phase.STOP_TAKING, "streams", lambda: _end_streams(node))
    log.info("serving", host=settings.listen_host, port=port, node_id=node_id, shards=found.shard_count)


async def _end_streams(node: Node) -> None:
    """Those who listen or wait here go to another coordinator at once."""
    node.stopping.set()
    node.waiters.end(NodeDraining(node.node_id))


async def _cluster(database: Database) -> cluster.Cluster:
    """What the database says of the cluster, as soon as it says something."""

    async def ask(connection: Connection) -> cluster.Cluster:
        return await cluster.find(connection)

    said = ""
    while True:
        try:
            return await database.read(ask)
        except StoreUnavailable as error:
            if str(error) != said:
                said = str(error)
                log.warning("waiting_for_postgres", error=said)
        await asyncio.sleep(START_RETRY_MS / 1_000)


def etcd_settings(settings: CoordinatorSettings) -> EtcdSettings:
    password = settings.etcd_password
    return EtcdSettings(
        endpoints=settings.etcd_endpoints,
        prefix=settings.etcd_prefix,
        ca_file=settings.etcd_ca_file,
        cert_file=settings.etcd_cert_file,
        key_file=settings.etcd_key_file,
        user=settings.etcd_user,
        password=None if password is None else password.get_secret_value(),
        call_timeout_ms=settings.etcd_call_timeout_ms,
    )


def _register(
    server: RpcServer, node: Node, schedule_service: ScheduleService, calendar_service: CalendarService
) -> list[str]:
    grpc_server = server.server
    schedule_service_pb2_grpc.add_ScheduleServiceServicer_to_server(schedule_service, grpc_server)
    calendar_service_pb2_grpc.add_CalendarServiceServicer_to_server(calendar_service, grpc_server)
    operations_pb2_grpc.add_OperationsServicer_to_server(OperationService(node), grpc_server)
    run_service_pb2_grpc.add_RunServiceServicer_to_server(RunService(node), grpc_server)
    dead_letter_service_pb2_grpc.add_DeadLetterServiceServicer_to_server(DeadLetterService(node), grpc_server)
    cluster_service_pb2_grpc.add_ClusterServiceServicer_to_server(ClusterService(node), grpc_server)
    worker_service_pb2_grpc.add_WorkerServiceServicer_to_server(WorkerService(node), grpc_server)
    return [
        service.full_name
        for module in (
            schedule_service_pb2,
            calendar_service_pb2,
            operations_pb2,
            run_service_pb2,
            dead_letter_service_pb2,
            cluster_service_pb2,
            worker_service_pb2,
        )
        for service in module.DESCRIPTOR.services_by_name.values()
    ]


def _measure(process: Process, node: Node) -> None:
    metrics = process.metrics
    leads = metrics.gauge("tickwheel_coordinator_leads", "1 while this coordinator leads.")
    leads.set_function(lambda: float(node.election.term() is not None))
    dropped = metrics.gauge("tickwheel_nudges_dropped", "Rows whose owners were not told, since the start.")
    dropped.set_function(lambda: float(node.nudger.dropped_count))
    halted = metrics.gauge(
        "tickwheel_halted", "1 while nothing is granted because Postgres has another history."
    )
    halted.set_function(lambda: float(bool(node.history.halted)))
    waiting = metrics.gauge("tickwheel_pool_waiting", "Callers that wait for a connection to Postgres.")
    waiting.set_function(lambda: float(node.database.waiting_count))


def main() -> None:
    try:
        settings = load_settings(CoordinatorSettings)
    except ConfigurationInvalid as error:
        print(error, file=sys.stderr)
        sys.exit(EXIT_CANNOT_START)
    sys.exit(run_process(settings, serve))
