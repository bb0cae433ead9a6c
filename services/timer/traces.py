"""Which runs are traced, and what does the timer tell of them? Nothing here runs unless traces go somewhere.

A run that was created under a sampled trace belongs to that trace: its `traceparent` stands in its row. Every
other run is a trace of its own, whose id is the run's id: so nothing has to be stored, every attempt, timer
and failover agrees on it, and whoever knows the run finds the trace. Whether it is recorded is read off the
low half of the id, which is random, as OpenTelemetry's own sampler does it.

    trace of its own                          trace of the API call
    tickwheel.fire   due -> leased  (root)    tickwheel.v1.RunService/CreateRun
      tickwheel.run      at the worker          tickwheel.grant   due -> leased
      tickwheel.record   the outcome              tickwheel.run
      tickwheel.grant    a retry                  tickwheel.record
        tickwheel.run                           tickwheel.grant   a retry ...
        tickwheel.record

The root's span id is the low half of the run's id, so that a retry finds its parent wherever it is granted.
The fire of a schedule links to the trace in which the schedule was created.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from tickwheel.domain import job
from tickwheel.domain.run import AttemptState, RunState
from tickwheel.domain.timer_rows import Bools, Int64s, Uint64s
from tickwheel.runtime.telemetry import Tracing, is_sampled, remote_context
from tickwheel.v1 import worker_service_pb2 as pb

if TYPE_CHECKING:
    from tickwheel.services.timer.node import TimerNode

LIVE_MAX: Final = 50_000
"""Sampled attempts whose outcome is awaited; beyond it the oldest are told without one."""
SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)
_ERRORS: Final = (AttemptState.FAILED, AttemptState.TIMED_OUT, AttemptState.OUTCOME_UNKNOWN)


class Traces:
    """The spans of one timer. For its event loop alone."""

    def __init__(self, node: "TimerNode", tracing: Tracing, sample_ratio: float) -> None:
        self._node = node
        self._ids = tracing.ids
        self._tracer = trace.get_tracer("tickwheel.timer")
        self._bound = round(sample_ratio * (1 << 64))
        self._live: dict[str, SpanContext] = {}
        """The grant's span of each sampled attempt that was granted here, by token."""

    def _own(self, run_lo: Uint64s) -> Bools:
        """Which of these runs are recorded, if they are traces of their own."""
        own: Bools = run_lo != 0
        if self._bound <= 0xFFFF_FFFF_FFFF_FFFF:
            own &= run_lo < np.uint64(self._bound)
        return own

    def granted(self, grants: Sequence[pb.Grant], slots: Int64s) -> None:
        """Committed grants before they are sent: each that is recorded gets its span, and carries it on."""
        own = self._own(self._node.leases.run_lo[slots]).tolist()
        for place, grant in enumerate(grants):
            if is_sampled(grant.traceparent) if grant.traceparent else own[place]:
                self._grant(grant, int(slots[place]))

    def _grant(self, grant: pb.Grant, slot: int) -> None:
        node = self._node
        leases = node.leases
        name = "tickwheel.grant"
        links: list[Link] = []
        if grant.traceparent:
            parent = remote_context(grant.traceparent)
        elif grant.attempt > 1:
            parent = _context(_root(int(leases.run_hi[slot]), int(leases.run_lo[slot])))
        else:
            name, parent = "tickwheel.fire", Context()
            root = _root(int(leases.run_hi[slot]), int(leases.run_lo[slot]))
            self._ids.choose(root.trace_id, root.span_id)
            links = self._links(slot)
        span = self._tracer.start_span(
            name,
            context=parent,
            kind=SpanKind.PRODUCER,
            links=links,
            start_time=int(leases.due_us[slot]) * 1_000,
            attributes={
                "tickwheel.run": grant.run,
                "tickwheel.attempt": grant.attempt,
                "tickwheel.fence": grant.fence,
                "tickwheel.kind": grant.kind,
                "tickwheel.queue": grant.queue,
                "tickwheel.schedule": grant.schedule,
            },
        )
        span.end(max(node.clock.now_us(), int(leases.due_us[slot])) * 1_000)
        context = span.get_span_context()
        grant.traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
        while len(self._live) >= LIVE_MAX:
            del self._live[next(iter(self._live))]
        self._live[grant.lease_token] = context

    def _links(self, slot: int) -> list[Link]:
        leases = self._node.leases
        head = self._node.catalog.heads.get((int(leases.schedule_lo[slot]), int(leases.version[slot])))
        if head is None or not head.traceparent:
            return []
        created = trace.get_current_span(remote_context(head.traceparent)).get_span_context()
        return [Link(created, {"tickwheel.link": "schedule"})] if created.is_valid else []

    def recorded(
        self,
        slots: Int64s,
        attempt_states: npt.NDArray[Any],
        run_states: npt.NDArray[Any],
        failures: Sequence[bytes | None] | None,
        sent_us: int,
    ) -> None:
        """Outcomes that are committed, before their leases are forgotten. `sent_us`: when their batch was."""
        leases = self._node.leases
        own = self._own(leases.run_lo[slots])
        if not self._live and not own.any():
            return
        now_ns = self._node.clock.now_us() * 1_000
        for place, slot in enumerate(slots.tolist()):
            parent = self._live.pop(leases.tokens[slot], None)
            if parent is None:
                if not own[place]:
                    continue
                # Granted by an owner before us.
                parent = _root(int(leases.run_hi[slot]), int(leases.run_lo[slot]))
            state = AttemptState(int(attempt_states[place]))
            span = self._tracer.start_span(
                "tickwheel.record",
                context=_context(parent),
                kind=SpanKind.CONSUMER,
                start_time=sent_us * 1_000,
                attributes={
                    "tickwheel.run": self._node.run_name(slot),
                    "tickwheel.attempt": int(leases.attempt[slot]),
                    "tickwheel.fence": int(leases.fence[slot]),
                    "tickwheel.attempt_state": state.name,
                    "tickwheel.run_state": RunState(int(run_states[place])).name,
                },
            )
            if state in _ERRORS:
                span.set_status(Status(StatusCode.ERROR, _why(failures, place)))
            span.end(max(now_ns, sent_us * 1_000))


def _why(failures: Sequence[bytes | None] | None, place: int) -> str:
    body = failures[place] if failures is not None else None
    if body is None:
        return ""
    failure = job.decode_failure(body)
    return f"{failure.type}: {failure.message}"


def _root(run_hi: int, run_lo: int) -> SpanContext:
    """The fire of a run that is a trace of its own."""
    return SpanContext(run_hi << 64 | run_lo, run_lo, is_remote=True, trace_flags=SAMPLED)


def _context(parent: SpanContext) -> Context:
    return trace.set_span_in_context(NonRecordingSpan(parent), Context())
