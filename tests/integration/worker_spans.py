"""Run as a process of its own, since a tracer provider is set once in a process.

Runs handlers that succeed, fail and are cancelled under sampled and unsampled fires, and checks each span's
parent.
"""

from __future__ import annotations

import asyncio
import logging
import secrets

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tickwheel.v1 import worker_service_pb2 as pb
from tickwheel.worker.attempt import Attempt, Outcome
from tickwheel.worker.context import Context
from tickwheel.worker.executor import Executor
from tickwheel.worker.handlers import Handlers

COUNT = 300


async def main(exporter: InMemorySpanExporter) -> None:
    handlers = Handlers()
    seen: dict[str, int] = {}

    async def work(ctx: Context) -> None:
        await asyncio.sleep(0)
        seen[ctx.run] = trace.get_current_span().get_span_context().trace_id
        with trace.get_tracer("handler").start_as_current_span("inner"):
            await asyncio.sleep(0.01)
        if ctx.attempt % 3 == 1:
            raise ValueError("no")
        if ctx.attempt % 3 == 2:
            await asyncio.sleep(60)

    handlers.add("work", work)
    finished: list[tuple[Attempt, Outcome]] = []
    executor = Executor(
        handlers, capacity=COUNT, report=finished.extend, on_progress=lambda attempt, progress: None
    )
    attempts = []
    traces = {}
    for index in range(COUNT):
        trace_id = secrets.token_hex(16)
        sampled = index % 2
        grant = pb.Grant(
            run=f"tenants/t/runs/{index:032x}",
            attempt=index,
            kind="work",
            traceparent=f"00-{trace_id}-{secrets.token_hex(8)}-0{sampled}",
        )
        if sampled:
            traces[grant.run] = int(trace_id, 16)
        attempts.append(Attempt(grant, grant.run, index, 1, "00", 0, 1, 1, 1, None))
    # A span that is current where attempts are taken in is nobody's parent.
    with trace.get_tracer("test").start_as_current_span("outer"):
        executor._begin(attempts)
    async with asyncio.timeout(30):
        while len(seen) < COUNT or len(finished) < COUNT * 2 // 3:  # noqa: ASYNC110 - a deadline stands around
            await asyncio.sleep(0.01)
    executor._cancel([(attempt, "test", 0) for attempt in attempts])
    await executor.wait_idle()
    spans = [span for span in exporter.get_finished_spans() if span.name == "tickwheel.run"]
    assert len(finished) == COUNT, len(finished)
    assert len(spans) == COUNT // 2, len(spans)
    for span in spans:
        assert span.attributes is not None
        run = str(span.attributes["tickwheel.run"])
        assert span.context is not None
        assert span.context.trace_id == traces[run]
        assert seen[run] == traces[run]
    all_spans = exporter.get_finished_spans()
    inner = {span.context.trace_id for span in all_spans if span.name == "inner" and span.context}
    assert set(traces.values()) <= inner


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    trace.set_tracer_provider(provider)
    asyncio.run(main(spans))
