"""What the timer tells of its grants, without a process."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import Decision, ParentBased, TraceIdRatioBased

from tickwheel.runtime.telemetry import ChosenIds, Tracing, is_sampled
from tickwheel.services.timer.leases import LeaseTable
from tickwheel.services.timer.traces import Traces
from tickwheel.v1 import worker_service_pb2 as pb

DUE_US = 1_800_000_000_000_000


def traces_with(ratio: float) -> tuple[Traces, LeaseTable, InMemorySpanExporter]:
    """A timer's traces that end in memory."""
    ids = ChosenIds()
    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler=ParentBased(TraceIdRatioBased(ratio)), id_generator=cast(Any, ids))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    leases = LeaseTable()
    node = SimpleNamespace(
        leases=leases,
        catalog=SimpleNamespace(heads={}),
        clock=SimpleNamespace(now_us=lambda: DUE_US + 3_000),
        run_name=lambda slot: "tenants/t/runs/x",
    )
    traces = Traces(cast(Any, node), cast(Tracing, SimpleNamespace(ids=ids)), ratio)
    traces._tracer = provider.get_tracer("test")
    return traces, leases, exporter


def lease(leases: LeaseTable, run_lo: list[int], attempt: int = 1) -> tuple[list[pb.Grant], Any]:
    tokens = [f"{number:032x}" for number in range(1, len(run_lo) + 1)]
    columns = {
        "run_hi": np.full(len(run_lo), 7, dtype=np.uint64),
        "run_lo": np.array(run_lo, dtype=np.uint64),
        "due_us": DUE_US,
        "attempt": attempt,
    }
    slots = leases.add(tokens, cast(Any, columns))
    grants = [
        pb.Grant(run=f"{low:x}", attempt=attempt, lease_token=token)
        for low, token in zip(run_lo, tokens, strict=True)
    ]
    return grants, slots


@pytest.mark.parametrize("ratio", [0.0, 0.01, 0.5, 1.0])
def test_the_runs_id_alone_says_whether_it_is_recorded_as_the_sdks_sampler_would(ratio: float) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chosen = random.Random(seed)
    lows = [chosen.randrange(1, 1 << 64) for _ in range(2_000)] + [1, (1 << 64) - 1]
    traces, leases, exporter = traces_with(ratio)
    grants, slots = lease(leases, lows)
    traces.granted(grants, slots)
    sampler = TraceIdRatioBased(ratio)
    for low, grant in zip(lows, grants, strict=True):
        decision = sampler.should_sample(None, 7 << 64 | low, "x").decision
        assert is_sampled(grant.traceparent) == (decision is Decision.RECORD_AND_SAMPLE)
    assert len(exporter.get_finished_spans()) == sum(bool(grant.traceparent) for grant in grants)


def test_a_retry_that_another_timer_grants_finds_the_fire_of_the_first() -> None:
    first, leases, exporter = traces_with(1.0)
    grants, slots = lease(leases, [5])
    first.granted(grants, slots)
    (fire,) = exporter.get_finished_spans()
    assert fire.name == "tickwheel.fire"
    assert fire.parent is None
    assert fire.context is not None
    assert fire.context.trace_id == 7 << 64 | 5
    assert (fire.start_time, fire.end_time) == (DUE_US * 1_000, (DUE_US + 3_000) * 1_000)
    second, leases, exporter = traces_with(1.0)
    grants, slots = lease(leases, [5], attempt=2)
    second.granted(grants, slots)
    (retry,) = exporter.get_finished_spans()
    assert retry.name == "tickwheel.grant"
    assert retry.parent is not None
    assert (retry.parent.trace_id, retry.parent.span_id) == (fire.context.trace_id, fire.context.span_id)


def test_a_stored_trace_that_is_not_recorded_is_passed_on_as_it_is() -> None:
    traces, leases, exporter = traces_with(1.0)
    grants, slots = lease(leases, [5])
    grants[0].traceparent = f"00-{1:032x}-{2:016x}-00"
    traces.granted(grants, slots)
    assert grants[0].traceparent == f"00-{1:032x}-{2:016x}-00"
    assert not exporter.get_finished_spans()
