"""What does a worker meet in benchmarks and tests of the SDK? A scripted peer: timers without a wheel.

It speaks the worker protocol, serves the timers' list, and keeps leases in a dictionary. It is no timer:
nothing is durable, nothing is fair, and a test tells it which shard belongs to whom.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc

from tickwheel.domain.lease import HeldDigest, HeldHistory
from tickwheel.v1 import cluster_service_pb2 as cluster_pb
from tickwheel.v1 import worker_service_pb2 as pb

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

SHARD_COUNT = 8
_HISTORY_MAX = 100_000


@dataclass(frozen=True, slots=True)
class Lease:
    """A live lease of the scripted cluster."""

    run: str
    attempt: int
    fence: int
    token: str
    shard: int


@dataclass
class PeerCluster:
    """What the peers share. recorded: token to the outcomes that were taken, one each if all is well."""

    lease_us: int = 3_000_000
    heartbeat_us: int = 1_000_000
    owner: dict[int, str] = field(default_factory=dict)
    leases: dict[str, Lease] = field(default_factory=dict)
    recorded: dict[str, pb.Outcome] = field(default_factory=dict)
    keep_recorded: bool = True
    recorded_count: int = 0
    granted_runs: Counter[str] = field(default_factory=Counter)
    timers: dict[str, Peer] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _fence: int = 0

    def assign(self, shards: Iterable[int], peer: Peer) -> None:
        for shard in shards:
            self.owner[shard] = peer.timer_id

    def expire(self, token: str) -> None:
        del self.leases[token]

    def next_fence(self) -> int:
        self._fence += 1
        return self._fence

    def changed(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class PeerStream:
    """One worker's stream at one peer."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.hello: pb.Hello | None = None
        self.goodbye = False
        self.draining = False
        self.granted = 0
        self.grant_count_max = 0
        self.sequence = 0
        self.held: dict[str, Lease] = {}
        self.history = HeldHistory(HeldDigest(), _HISTORY_MAX)
        self.heartbeats: list[pb.Heartbeat] = []
        self.outcome_count = 0
        self.resync_count = 0
        self.wake = asyncio.Event()
        self.out = pb.WorkResponse()
        self._added: list[str] = []
        self._removed: list[str] = []

    def take(self, request: pb.WorkRequest) -> None:
        """In the order of the fields."""
        if request.HasField("hello"):
            self._hello(request.hello)
        for outcome in request.outcomes:
            self._outcome(outcome)
        if request.HasField("heartbeat"):
            self._heartbeat(request.heartbeat)
        if request.HasField("grant_count_max"):
            self.grant_count_max = request.grant_count_max
        if request.HasField("goodbye"):
            self.goodbye = True
        self.peer.on_credit(self)
        self.wake.set()

    def _hello(self, hello: pb.Hello) -> None:
        self.hello = hello
        self.grant_count_max = hello.grant_count_max
        welcome = self.out.welcome
        welcome.protocol_version = 1
        welcome.timer_id = self.peer.timer_id
        welcome.lease_duration.FromMicroseconds(self.peer.cluster.lease_us)
        welcome.heartbeat_interval_duration.FromMicroseconds(self.peer.cluster.heartbeat_us)
        welcome.message_bytes_max = 1 << 20
        tokens = [held.lease_token for held in hello.held]
        self.history = HeldHistory(HeldDigest.of(tokens), _HISTORY_MAX)
        self._named(hello.held)

    def _named(self, named: Iterable[pb.HeldAttempt]) -> None:
        cluster = self.peer.cluster
        self.held = {}
        for attempt in named:
            lease = cluster.leases.get(attempt.lease_token)
            if lease is None:
                if attempt.lease_token in cluster.recorded:
                    self._forget(attempt.lease_token, recorded=True)
                else:
                    self._refuse(attempt, pb.Refusal.REASON_SUPERSEDED)
            elif cluster.owner[lease.shard] != self.peer.timer_id:
                self._refuse(attempt, pb.Refusal.REASON_MOVED)
            else:
                self.held[lease.token] = lease

    def _refuse(self, attempt: pb.HeldAttempt | pb.Outcome, reason: pb.Refusal.Reason.ValueType) -> None:
        self.out.refusals.add(
            run=attempt.run, attempt=attempt.attempt, lease_token=attempt.lease_token, reason=reason
        )
        self.held.pop(attempt.lease_token, None)
        self._removed.append(attempt.lease_token)

    def _forget(self, token: str, *, recorded: bool) -> None:
        self.held.pop(token, None)
        self._removed.append(token)
        if recorded:
            self.out.recorded.append(token)

    def _outcome(self, outcome: pb.Outcome) -> None:
        cluster = self.peer.cluster
        token = outcome.lease_token
        lease = cluster.leases.get(token)
        self.outcome_count += 1
        if lease is None:
            if token in cluster.recorded:
                self.out.recorded.append(token)
            else:
                self._refuse(outcome, pb.Refusal.REASON_SUPERSEDED)
        elif cluster.owner[lease.shard] != self.peer.timer_id:
            self._refuse(outcome, pb.Refusal.REASON_MOVED)
        elif lease.shard not in self.peer.loading and self.peer.recording:
            del cluster.leases[token]
            cluster.recorded_count += 1
            if cluster.keep_recorded:
                cluster.recorded[token] = outcome
            self._forget(token, recorded=True)

    def _heartbeat(self, heartbeat: pb.Heartbeat) -> None:
        self.heartbeats.append(heartbeat)
        del self.heartbeats[:-1000]
        digest = HeldDigest(heartbeat.held_count, heartbeat.held_digest)
        if heartbeat.held_complete:
            self.history.resolve(heartbeat.last_sequence, digest)
            self._named(heartbeat.held)
        elif not self.history.agrees(heartbeat.last_sequence, digest):
            self.resync_count += 1
            self.out.resync = True
            return
        if self.peer.renewing:
            renewed = self.out.renewed
            renewed.sent_us = heartbeat.sent_us
            renewed.sequence = heartbeat.last_sequence
            del renewed.shards[:]
            renewed.shards.extend(self.peer.shards())

    def grant(self, shard: int, kind: str, data: bytes = b"", **fields: object) -> Lease | None:
        """Grant one new run, if there is credit."""
        if self.hello is None or self.goodbye or self.granted >= self.grant_count_max:
            return None
        run = f"tenants/default/runs/{secrets.token_hex(16)}"
        lease = Lease(run, 1, self.peer.cluster.next_fence(), secrets.token_hex(16), shard)
        self.grant_lease(lease, kind, data, **fields)
        return lease

    def grant_lease(self, lease: Lease, kind: str, data: bytes = b"", **fields: object) -> None:
        if not self.out.grants:
            self.out.grant_clock_us = self.peer.clock_us()
        grant = self.out.grants.add(
            run=lease.run,
            attempt=lease.attempt,
            fence=lease.fence,
            lease_token=lease.token,
            shard=lease.shard,
            kind=kind,
            idempotency_key=lease.run,
            attempt_count_max=4,
            queue="default",
            **fields,
        )
        if data:
            grant.payload.data = data
            grant.payload.content_type = "application/json"
        self.granted += 1
        self.held[lease.token] = lease
        self._added.append(lease.token)
        self.peer.cluster.leases[lease.token] = lease
        if self.peer.cluster.keep_recorded:
            self.peer.cluster.granted_runs[lease.run] += 1
        self.wake.set()

    def next_response(self) -> pb.WorkResponse | None:
        if self.peer.silent or not self.out.ByteSize():
            return None
        self.sequence += 1
        if self._added or self._removed:
            known = set(self._removed)
            added = [token for token in self._added if token not in known]
            gone = [token for token in self._removed if token not in set(self._added)]
            self.history.note(self.sequence, added, gone)
            self._added, self._removed = [], []
        response, self.out = self.out, pb.WorkResponse()
        response.sequence = self.sequence
        response.clock_us = self.peer.clock_us()
        response.backlog_count = self.peer.backlog_count
        return response


class Peer:
    """One scripted timer, which also serves the timers' list. Its knobs may be turned at any time.

    renewing: answer heartbeats. recording: take outcomes. silent: send nothing at all, as if frozen.
    """

    def __init__(self, cluster: PeerCluster) -> None:
        self.cluster = cluster
        self.timer_id = f"timer-{secrets.token_hex(4)}"
        self.address = ""
        self.renewing = True
        self.recording = True
        self._silent = False
        self.loading: set[int] = set()
        self.backlog_count = 0
        self.streams: list[PeerStream] = []
        self.opened_count = 0
        self.rate: RateGranter | None = None
        self._server: grpc.aio.Server | None = None
        # Another zero than the worker's.
        self._clock_zero_us = secrets.randbelow(1_000_000_000_000)

    @property
    def silent(self) -> bool:
        return self._silent

    @silent.setter
    def silent(self, silent: bool) -> None:
        self._silent = silent
        for stream in self.streams:
            stream.wake.set()

    def clock_us(self) -> int:
        return time.monotonic_ns() // 1000 + self._clock_zero_us

    def shards(self) -> list[int]:
        owner = self.cluster.owner
        return [s for s, o in owner.items() if o == self.timer_id and s not in self.loading]

    async def start(self, port: int = 0) -> None:
        """Listen, and appear in the timers' list."""
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        self._server.add_generic_rpc_handlers(self._methods())
        self.address = f"127.0.0.1:{self._server.add_insecure_port(f'127.0.0.1:{port}')}"
        await self._server.start()
        self.cluster.timers[self.timer_id] = self
        self.cluster.changed()

    def _methods(self) -> tuple[grpc.GenericRpcHandler, ...]:
        """Only what a worker's stream needs; the unary twins are the real timer's."""
        work = grpc.stream_stream_rpc_method_handler(
            self.work,
            request_deserializer=pb.WorkRequest.FromString,
            response_serializer=pb.WorkResponse.SerializeToString,
        )
        watch = grpc.unary_stream_rpc_method_handler(
            self.watch_timers,
            request_deserializer=cluster_pb.WatchTimersRequest.FromString,
            response_serializer=cluster_pb.WatchTimersResponse.SerializeToString,
        )
        listing = grpc.unary_unary_rpc_method_handler(
            self.list_timers,
            request_deserializer=cluster_pb.ListTimersRequest.FromString,
            response_serializer=cluster_pb.ListTimersResponse.SerializeToString,
        )
        return (
            grpc.method_handlers_generic_handler("tickwheel.v1.WorkerService", {"Work": work}),
            grpc.method_handlers_generic_handler(
                "tickwheel.v1.ClusterService", {"WatchTimers": watch, "ListTimers": listing}
            ),
        )

    async def stop(self, *, unlist: bool = True) -> None:
        """As if killed: every stream breaks."""
        assert self._server is not None
        await self._server.stop(None)
        if unlist:
            self.cluster.timers.pop(self.timer_id, None)
            self.cluster.changed()

    def on_credit(self, stream: PeerStream) -> None:
        if self.rate is not None:
            self.rate.fill(stream)

    async def work(
        self, request_iterator: AsyncIterator[pb.WorkRequest], context: Context
    ) -> AsyncIterator[pb.WorkResponse]:
        stream = PeerStream(self)
        self.streams.append(stream)
        self.opened_count += 1

        async def read() -> None:
            async for request in request_iterator:
                stream.take(request)

        reader = asyncio.ensure_future(read())
        reader.add_done_callback(lambda _: stream.wake.set())
        try:
            while not reader.done():
                response = stream.next_response()
                if response is None:
                    stream.wake.clear()
                    await stream.wake.wait()
                    continue
                yield response
        finally:
            reader.cancel()
            self.streams.remove(stream)

    async def watch_timers(
        self, request: cluster_pb.WatchTimersRequest, context: Context
    ) -> AsyncIterator[cluster_pb.WatchTimersResponse]:
        while True:
            changed = self.cluster._changed
            yield cluster_pb.WatchTimersResponse(timers=self._timers())
            await changed.wait()

    async def list_timers(
        self, request: cluster_pb.ListTimersRequest, context: Context
    ) -> cluster_pb.ListTimersResponse:
        return cluster_pb.ListTimersResponse(timers=self._timers())

    def _timers(self) -> list[cluster_pb.Timer]:
        return [
            cluster_pb.Timer(timer_id=peer.timer_id, address=peer.address)
            for peer in self.cluster.timers.values()
        ]


class RateGranter:
    """Grants no-op runs at a steady rate while there is credit. For benchmarks."""

    def __init__(self, per_second: int, kind: str) -> None:
        self.per_second = per_second
        self.kind = kind
        self.granted = 0
        self.short_count = 0
        self._template = [secrets.token_hex(16) for _ in range(4096)]

    def fill(self, stream: PeerStream) -> None:
        """Credit came: nothing to do, the pace decides."""

    async def run(self, peer: Peer, seconds: float, *, step_s: float = 0.004) -> None:
        """Grant for so long, in batches of a step."""
        began = time.monotonic()
        shards = peer.shards()
        while (elapsed := time.monotonic() - began) < seconds:
            wanted = int(elapsed * self.per_second)
            while self.granted < wanted:
                stream = peer.streams[self.granted % len(peer.streams)] if peer.streams else None
                if stream is None or stream.grant(shards[self.granted % len(shards)], self.kind) is None:
                    self.short_count += 1
                    break
                self.granted += 1
            await asyncio.sleep(step_s)
