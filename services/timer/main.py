"""The timer process: what it is made of, and in which order it starts and ends."""

import asyncio
import sys

import structlog

import tickwheel
from tickwheel.clock import mono_us
from tickwheel.etcd.client import EtcdClient, EtcdSettings
from tickwheel.etcd.lease import LeaseSettings, NodeLease
from tickwheel.etcd.registration import Registration, fresh_node_id
from tickwheel.etcd.registry import EtcdRegistry
from tickwheel.internal.v1 import timer_service_pb2, timer_service_pb2_grpc
from tickwheel.ports import RegistryError, RegistrySnapshot, TimerRecord, ViewChange
from tickwheel.postgres.timer_store import TimerStore
from tickwheel.rpc.server import RpcServer
from tickwheel.runtime.config import TimerSettings, load_settings
from tickwheel.runtime.process import Phase, Process, collect_less_garbage, run_process
from tickwheel.services.timer.meters import Meters
from tickwheel.services.timer.node import LANE_COUNT, TimerNode
from tickwheel.services.timer.timer_service import TimerService
from tickwheel.services.timer.traces import Traces
from tickwheel.services.timer.worker_service import WorkerService, add_worker_service
from tickwheel.v1 import worker_service_pb2

log = structlog.get_logger()

STREAM_DEADLINE_MS = 45_000
SERVICES = (
    worker_service_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name,
    timer_service_pb2.DESCRIPTOR.services_by_name["TimerService"].full_name,
)


def etcd_settings(settings: TimerSettings) -> EtcdSettings:
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


async def serve(process: Process) -> None:
    """Starts a timer: Postgres, gRPC, then the registration that brings it shards."""
    settings = process.settings
    assert isinstance(settings, TimerSettings)
    timer_id = fresh_node_id(settings.node_name)
    structlog.contextvars.bind_contextvars(timer=timer_id)
    store = TimerStore(settings.postgres_url, timer_id, LANE_COUNT)
    process.on_stop(Phase.CLOSE, "postgres", store.close)
    client = EtcdClient(etcd_settings(settings))
    process.on_stop(Phase.CLOSE, "etcd", client.close)
    registry = EtcdRegistry(client, mono_us)
    node = TimerNode(settings, timer_id, store, registry, Meters(process.metrics))
    if process.tracing is not None and process.tracing.enabled:
        node.traces = Traces(node, process.tracing, settings.trace_sample_ratio)
    await node.start()

    server = RpcServer(deadline_ms_max=STREAM_DEADLINE_MS)
    add_worker_service(WorkerService(node), server.server)
    timer_service_pb2_grpc.add_TimerServiceServicer_to_server(TimerService(node), server.server)
    port = await server.start(f"{settings.listen_host}:{settings.listen_port}", SERVICES)
    internal = f"{settings.listen_host}:{port}"
    external = settings.external_address or internal
    process.on_stop(Phase.RELEASE, "grpc", lambda: server.stop(500))
    node.external_address = external
    await node.register_again()

    collect_less_garbage()
    for name, loop in node.loops().items():
        process.spawn(loop, name)
    lease = NodeLease(client, LeaseSettings(ttl_ms=settings.etcd_lease_ttl_ms), mono_us)
    registration = Registration(
        client, lease, TimerRecord(timer_id, internal, external, tickwheel.__version__, 1), mono_us
    )
    process.spawn(tell_health(node, server), "health")
    process.spawn(lease.run(), "lease")
    process.spawn(registration.run(), "registration")
    process.spawn(registry.watch(lambda view, change: take_view(node, view, change)), "assignments")
    process.health.add("postgres", node.problem)
    process.on_stop(Phase.RELEASE, "lease", lease.release)
    process.on_stop(Phase.RELEASE, "registration", registration.withdraw)
    process.on_stop(Phase.RELEASE, "timer row", store.forget_timer)
    process.on_stop(Phase.DRAIN, "shards", lambda: drain(node, registry))
    log.info("timer_started", timer_id=timer_id, address=external)


def take_view(node: TimerNode, view: RegistrySnapshot, change: ViewChange) -> None:
    """The registry has said something: which shards should be ours."""
    if change is ViewChange.BROKEN:
        return
    node.peers = frozenset(view.timers) - {node.timer_id} - view.drains
    if not node.peers:
        node.emptied.set()
    node.ownership.want(
        {
            shard: assignment.generation
            for shard, assignment in view.assignments.items()
            if assignment.timer_id == node.timer_id
        }
    )


async def tell_health(node: TimerNode, server: RpcServer) -> None:
    """NOT_SERVING while the timer is halted."""
    while True:
        await node.halt_changed.wait()
        node.halt_changed.clear()
        await server.set_serving(not node.halted)


async def drain(node: TimerNode, registry: EtcdRegistry) -> None:
    """Asks the leader to move the shards away, and serves them until each is another's."""
    try:
        await registry.request_drain(node.timer_id)
    except RegistryError as error:
        log.warning("drain_not_asked", reason=str(error))
        return
    # With nobody to move to, waiting would only delay the end; the lease's release tells the next timer.
    while node.epochs and node.peers:
        node.emptied.clear()
        await node.emptied.wait()
    node.drain_streams()
    # Workers hear where their attempts have gone before the streams end.
    await asyncio.sleep(0.2)


def main() -> None:
    sys.exit(run_process(load_settings(TimerSettings), serve))
