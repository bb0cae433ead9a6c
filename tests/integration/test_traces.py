"""Traces of three real processes, as a real OTLP receiver gets them (H-O02, H-O03)."""

from __future__ import annotations

import json
import secrets
import shutil
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import psycopg
import pytest
from google.protobuf import duration_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2

from tickwheel.client import BlockingClient, make_run, make_spec, make_template
from tickwheel.embedded.cluster import Cluster
from tickwheel.v1 import (
    job_pb2,
    run_service_pb2,
    run_service_pb2_grpc,
    schedule_pb2,
    schedule_service_pb2,
    schedule_service_pb2_grpc,
)

pytestmark = pytest.mark.slow

WAIT_S = 60.0
ERROR = trace_pb2.Status.STATUS_CODE_ERROR


def until(predicate: Callable[[], Any], what: str, seconds: float = WAIT_S) -> Any:
    end_s = time.monotonic() + seconds
    while not (value := predicate()):
        assert time.monotonic() < end_s, f"within {seconds} s: {what}"
        time.sleep(0.05)
    return value


@dataclass(frozen=True, slots=True)
class Seen:
    """A span as it came in, with the service that sent it."""

    service: str
    span: trace_pb2.Span

    @property
    def trace_id(self) -> str:
        return self.span.trace_id.hex()

    @property
    def attributes(self) -> dict[str, Any]:
        return {
            item.key: item.value.int_value or item.value.string_value
            for item in self.span.attributes  # Those of ours are texts and numbers.
        }


@dataclass(slots=True)
class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """An OTLP collector that keeps what it gets."""

    spans: list[Seen] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: Any
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        with self._lock:
            for part in request.resource_spans:
                service = next(
                    item.value.string_value for item in part.resource.attributes if item.key == "service.name"
                )
                self.spans.extend(Seen(service, span) for scope in part.scope_spans for span in scope.spans)
        return trace_service_pb2.ExportTraceServiceResponse()

    def trace(self, trace_id: str) -> list[Seen]:
        with self._lock:
            return [seen for seen in self.spans if seen.trace_id == trace_id]

    def wait_for(self, trace_id: str, count: int) -> list[Seen]:
        until(lambda: len(self.trace(trace_id)) >= count, f"{count} spans of trace {trace_id}")
        return self.trace(trace_id)

    def all(self) -> list[Seen]:
        with self._lock:
            return list(self.spans)


@dataclass(frozen=True, slots=True)
class World:
    cluster: Cluster
    receiver: Receiver

    def channel(self) -> grpc.Channel:
        return grpc.insecure_channel(self.cluster.api_addresses[0])

    def sql(self, statement: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.cluster.postgres_url) as connection:
            return connection.execute(statement.encode()).fetchall()

    def errors(self) -> list[str]:
        """What was logged at ERROR by anybody, and lines that are no log lines of ours."""
        lines = [
            line for member in self.cluster.members.values() for line in member.log.read_text().splitlines()
        ]
        return [line for line in lines if line and (line[0] != "{" or json.loads(line)["level"] == "error")]


@pytest.fixture(scope="module")
def world(postgres_bin_folder: Path | None) -> Iterator[World]:
    folder = Path(tempfile.mkdtemp(prefix="tw-", dir="/tmp"))
    receiver = Receiver()
    server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
    add_service: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server  # Without types.
    add_service(receiver, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    cluster = Cluster(
        folder / "c",
        timers=1,
        shard_count=4,
        settings={"otlp_endpoint": f"http://127.0.0.1:{port}", "trace_sample_ratio": "1"},
        postgres_bin_folder=postgres_bin_folder,
    )
    try:
        cluster.start()
        yield World(cluster, receiver)
    finally:
        cluster.stop()
        server.stop(None)
        shutil.rmtree(folder, ignore_errors=True)


def fails_once(payload: dict[str, int] | None = None) -> job_pb2.JobTemplate:
    template = make_template("fail", payload=payload or {"times": 1}, attempt_count_max=3)
    template.retry.initial_backoff_duration.CopyFrom(duration_pb2.Duration(nanos=100_000_000))
    return template


def by_name(spans: list[Seen]) -> dict[str, list[Seen]]:
    """In the order of their attempts."""
    found: defaultdict[str, list[Seen]] = defaultdict(list)
    for seen in sorted(spans, key=lambda seen: seen.attributes.get("tickwheel.attempt", 0)):
        found[seen.span.name].append(seen)
    return found


def check_attempts(spans: list[Seen], grants: list[Seen]) -> None:
    """Of a run that failed once and was tried again: each grant has a handler's span and an outcome's."""
    found = by_name(spans)
    runs, records = found["tickwheel.run"], found["tickwheel.record"]
    assert [seen.attributes["tickwheel.attempt"] for seen in grants] == [1, 2]
    for index, (grant, run, record) in enumerate(zip(grants, runs, records, strict=True)):
        assert grant.service == record.service == "tickwheel-timer"
        assert run.service == "tickwheel-worker"
        assert run.span.parent_span_id == record.span.parent_span_id == grant.span.span_id
        assert grant.span.end_time_unix_nano >= grant.span.start_time_unix_nano
        failed = index == 0
        assert (run.span.status.code == ERROR) == (record.span.status.code == ERROR) == failed
        assert [event.name for event in run.span.events] == (["exception"] if failed else [])
        assert record.attributes["tickwheel.attempt_state"] == ("FAILED" if failed else "SUCCEEDED")
        assert record.attributes["tickwheel.run_state"] == ("SCHEDULED" if failed else "SUCCEEDED")
        assert run.attributes["tickwheel.fence"] == grant.attributes["tickwheel.fence"]
    assert "RuntimeError: attempt 1 fails" in records[0].span.status.message


def test_one_trace_leads_from_the_api_call_to_the_outcome_of_the_retry(world: World) -> None:
    trace_id, caller = secrets.token_hex(16), secrets.token_hex(8)
    with world.channel() as channel:
        stub = run_service_pb2_grpc.RunServiceStub(channel)
        run = stub.CreateRun(
            run_service_pb2.CreateRunRequest(
                parent="tenants/default", run=make_run(template=fails_once()), request_id=secrets.token_hex(8)
            ),
            metadata=(("traceparent", f"00-{trace_id}-{caller}-01"),),
            timeout=10,
        )
        assert run.traceparent.split("-")[1] == trace_id
    spans = world.receiver.wait_for(trace_id, 7)
    found = by_name(spans)
    assert {name: len(each) for name, each in found.items()} == {
        "tickwheel.v1.RunService/CreateRun": 1,
        "tickwheel.grant": 2,
        "tickwheel.run": 2,
        "tickwheel.record": 2,
    }
    (call,) = found["tickwheel.v1.RunService/CreateRun"]
    assert call.service == "tickwheel-coordinator"
    assert call.span.parent_span_id.hex() == caller
    assert run.traceparent.split("-")[2] == call.span.span_id.hex()
    for grant in found["tickwheel.grant"]:
        assert grant.span.parent_span_id == call.span.span_id
    check_attempts(spans, found["tickwheel.grant"])


def test_each_fire_is_a_trace_of_its_own_that_links_to_the_schedules_creation(world: World) -> None:
    trace_id, caller = secrets.token_hex(16), secrets.token_hex(8)
    spec = make_spec(template=fails_once(), every=timedelta(seconds=1), overlap="ALLOW_ALL")
    with world.channel() as channel:
        stub = schedule_service_pb2_grpc.ScheduleServiceStub(channel)
        stub.CreateSchedule(
            schedule_service_pb2.CreateScheduleRequest(
                parent="tenants/default",
                schedule_id="traced",
                schedule=schedule_pb2.Schedule(spec=spec),
                request_id=secrets.token_hex(8),
            ),
            metadata=(("traceparent", f"00-{trace_id}-{caller}-01"),),
            timeout=10,
        )
    runs = until(
        lambda: (
            rows
            if len(rows := world.sql("SELECT id FROM run WHERE schedule IS NOT NULL AND state = 5 LIMIT 3"))
            == 3
            else None
        ),
        "three runs that have ended",
    )
    for (run_id,) in runs:
        spans = world.receiver.wait_for(run_id.hex, 6)
        found = by_name(spans)
        (fire,) = found["tickwheel.fire"]
        (retry,) = found["tickwheel.grant"]
        assert fire.span.parent_span_id == b""
        assert retry.span.parent_span_id == fire.span.span_id
        (link,) = fire.span.links
        assert link.trace_id.hex() == trace_id
        (call,) = world.receiver.trace(trace_id)
        assert link.span_id == call.span.span_id
        assert call.span.name == "tickwheel.v1.ScheduleService/CreateSchedule"
        assert fire.attributes["tickwheel.schedule"] == "tenants/default/schedules/traced"
        check_attempts(spans, [fire, retry])
    with BlockingClient(world.cluster.api_addresses) as client:
        client.schedules.delete("traced")


def test_many_fires_mix_no_spans_up_and_log_no_errors(world: World) -> None:
    with BlockingClient(world.cluster.api_addresses) as client:
        names = client.runs.create_batch(make_run("noop") for _ in range(300))
        last = client.runs.wait(names[-1], timeout_s=WAIT_S)
    assert last.attempt_count == 1
    until(
        lambda: sum(seen.span.name == "tickwheel.run" for seen in world.receiver.all()) >= 300, "their spans"
    )
    grants = {
        seen.span.span_id: seen
        for seen in world.receiver.all()
        if seen.span.name in ("tickwheel.fire", "tickwheel.grant")
    }
    handled = [seen for seen in world.receiver.all() if seen.span.name == "tickwheel.run"]
    for seen in handled:
        grant = grants[seen.span.parent_span_id]
        assert grant.trace_id == seen.trace_id
        assert grant.attributes["tickwheel.run"] == seen.attributes["tickwheel.run"], "another job's span"
    # The batch was one call of one trace.
    assert len({seen.trace_id for seen in handled if seen.attributes["tickwheel.run"] in set(names)}) == 1
    assert not world.errors()


def test_a_worker_that_goes_away_leaves_no_errors_about_contexts(world: World) -> None:
    """H-O02: streams that are cancelled with spans under way."""
    with BlockingClient(world.cluster.api_addresses) as client:
        names = client.runs.create_batch(make_run("sleep", payload={"seconds": 0.5}) for _ in range(50))
        world.cluster["worker-1"].restart()
        until(lambda: client.runs.get(names[0]).attempt_count >= 1, "it runs")
        client.runs.wait(names[-1], timeout_s=WAIT_S)
    assert not [line for line in world.errors() if "detach" in line or "context" in line]
