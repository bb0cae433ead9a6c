"""What a process shows of itself: metrics, health and traces.

* **Metrics**: one registry a process, whose series are counted when a metric is made: each label has its
  possible values named in advance, so the number of series is known and bounded (500), whatever tenants and
  queues there are.
* **Health**: named checks, read by `/healthz` from a thread of its own, so that a stuck event loop can be
  told.
* **Traces**: nothing is set up unless an OTLP endpoint is set; the API's tracer then does nothing, at no
  cost. A collector that is away never holds up the process: neither work (spans are dropped) nor its end (the
  rest is given up).
"""

from __future__ import annotations

import itertools
import json
import math
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import GaugeMetricFamily, HistogramMetricFamily, Metric

from tickwheel.errors import TickwheelError

SERIES_COUNT_MAX = 500
TOP_COUNT_MAX = 20
SPAN_QUEUE_MAX = 8_192
EXPORT_TIMEOUT_MS = 2_000
HTTP_TIMEOUT_SECONDS = 5.0

LAG_BUCKETS_SECONDS = (
    0.001,
    0.002,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    60.0,
    600.0,
)
"""For lags and durations that should be milliseconds."""
SIZE_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1_000.0, 2_000.0, 5_000.0)
"""For the sizes of batches."""

Labels = Mapping[str, Sequence[str]]
"""The name of each label, with all the values that it can have."""


class SeriesLimitExceeded(TickwheelError):
    """A metric would make more series than a process may have. Our own bug: give it fewer labels."""

    def __init__(self, name: str, series_count: int) -> None:
        self.name = name
        self.series_count = series_count
        super().__init__(
            f"{name} would make {series_count} series, {SERIES_COUNT_MAX} are allowed for a process"
        )


class MetricsPortBusy(TickwheelError):
    def __init__(self, host: str, port: int, reason: str) -> None:
        self.host = host
        self.port = port
        super().__init__(
            f"metrics cannot be served on {host}:{port} ({reason}): set metrics_port to another one"
        )


class Metrics:
    """The metrics of one process. Names are `tickwheel_<thing>_<unit>`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.series_count = 0

    def counter(self, name: str, meaning: str, labels: Labels | None = None) -> Counter:
        """`name` ends in `_total`. Every series exists from the start, at 0."""
        self._reserve(name, labels, 1)
        counter = Counter(name, meaning, tuple(labels or ()), registry=self.registry)
        for values in _combinations(labels):
            counter.labels(*values)
        return counter

    def gauge(self, name: str, meaning: str, labels: Labels | None = None) -> Gauge:
        self._reserve(name, labels, 1)
        return Gauge(name, meaning, tuple(labels or ()), registry=self.registry)

    def histogram(
        self,
        name: str,
        meaning: str,
        buckets: Sequence[float] = LAG_BUCKETS_SECONDS,
        labels: Labels | None = None,
    ) -> Histogram:
        """For what is observed once a batch or a call; for rows see `array_histogram`."""
        self._reserve(name, labels, len(buckets) + 3)
        return Histogram(name, meaning, tuple(labels or ()), buckets=buckets, registry=self.registry)

    def array_histogram(
        self, name: str, meaning: str, buckets: Sequence[float] = LAG_BUCKETS_SECONDS
    ) -> ArrayHistogram:
        """For the hot path: one call takes a whole batch."""
        self._reserve(name, None, len(buckets) + 3)
        histogram = ArrayHistogram(name, meaning, buckets)
        self.registry.register(histogram)
        return histogram

    def top_gauge(self, name: str, meaning: str, label: str, count_max: int = TOP_COUNT_MAX) -> TopGauge:
        """For tenants and queues: only the largest `count_max` values are shown."""
        self._reserve(name, None, count_max)
        gauge = TopGauge(name, meaning, label, count_max)
        self.registry.register(gauge)
        return gauge

    def _reserve(self, name: str, labels: Labels | None, series_each: int) -> None:
        assert name.startswith("tickwheel_"), name
        wanted = self.series_count + series_each * math.prod(
            len(values) for values in (labels or {}).values()
        )
        if wanted > SERIES_COUNT_MAX:
            raise SeriesLimitExceeded(name, wanted)
        self.series_count = wanted


class ArrayHistogram:
    """A histogram that takes arrays: a batch costs some microseconds, not one call a row. For one thread."""

    def __init__(self, name: str, meaning: str, buckets: Sequence[float]) -> None:
        self._name = name
        self._meaning = meaning
        self._bounds = np.asarray(buckets, dtype=np.float64)
        self._counts = np.zeros(len(buckets) + 1, dtype=np.int64)
        self._sum = 0.0

    def observe(self, values: npt.NDArray[Any]) -> None:
        """`values`: any shape, in the unit of the name; a value on a bound counts as below it."""
        if values.size == 0:
            return
        slots = np.searchsorted(self._bounds, values.ravel(), side="left")
        self._counts += np.bincount(slots, minlength=len(self._counts))
        self._sum += float(values.sum())

    def describe(self) -> Iterable[Metric]:
        return [HistogramMetricFamily(self._name, self._meaning)]

    def collect(self) -> Iterable[Metric]:
        running = np.cumsum(self._counts)
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        buckets = [(name, float(count)) for name, count in zip(names, running, strict=True)]
        yield HistogramMetricFamily(self._name, self._meaning, buckets=buckets, sum_value=self._sum)


class TopGauge:
    """The largest values of something of which there may be very many."""

    def __init__(self, name: str, meaning: str, label: str, count_max: int) -> None:
        self._name = name
        self._meaning = meaning
        self._label = label
        self._count_max = count_max
        self._values: list[tuple[str, float]] = []

    def replace(self, values: Mapping[str, float]) -> None:
        """All that was shown before is gone."""
        largest = sorted(values.items(), key=lambda item: item[1], reverse=True)
        self._values = largest[: self._count_max]

    def describe(self) -> Iterable[Metric]:
        return [GaugeMetricFamily(self._name, self._meaning, labels=[self._label])]

    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(self._name, self._meaning, labels=[self._label])
        for key, value in self._values:
            family.add_metric([key], value)
        yield family


class Health:
    """Named checks.

    Each gives None, or a sentence that says what is wrong; it is called from another thread.
    """

    def __init__(self) -> None:
        self._checks: dict[str, Callable[[], str | None]] = {}

    def add(self, name: str, check: Callable[[], str | None]) -> None:
        self._checks[name] = check

    def problems(self) -> dict[str, str]:
        """Empty when all is well."""
        found: dict[str, str] = {}
        for name, check in list(self._checks.items()):
            try:
                problem = check()
            except Exception as error:
                problem = f"the check itself failed: {error!r}"
            if problem is not None:
                found[name] = problem
        return found


class MetricsServer:
    """`/metrics` and `/healthz` (200, or 503 with the problems), from threads that no event loop holds up."""

    def __init__(self, metrics: Metrics, health: Health, host: str, port: int) -> None:
        """Serves at once. Raises MetricsPortBusy."""

        class Handler(BaseHTTPRequestHandler):
            timeout = HTTP_TIMEOUT_SECONDS

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if path == "/metrics":
                    self._answer(200, CONTENT_TYPE_LATEST, generate_latest(metrics.registry))
                elif path == "/healthz":
                    problems = health.problems()
                    body = json.dumps({"healthy": not problems, "problems": problems}).encode()
                    self._answer(503 if problems else 200, "application/json", body)
                else:
                    self._answer(404, "text/plain", b"/metrics or /healthz\n")

            def _answer(self, status: int, kind: str, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass  # A scrape is no event.

        try:
            self._server = ThreadingHTTPServer((host, port), Handler)
        except OSError as error:
            raise MetricsPortBusy(host, port, error.strerror or str(error)) from error
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class ChosenIds:
    """Random ids, but for the next trace that begins after `choose`. For one thread.

    It has the methods of the SDK's `IdGenerator`, which is not imported by who traces nothing.
    """

    def __init__(self) -> None:
        self._trace_id = 0
        self._span_id = 0

    def choose(self, trace_id: int, span_id: int) -> None:
        """Of the root span that is started next. Neither may be 0."""
        self._trace_id, self._span_id = trace_id, span_id

    def generate_trace_id(self) -> int:
        chosen, self._trace_id = self._trace_id, 0
        return chosen or int.from_bytes(os.urandom(16), "big") or 1

    def generate_span_id(self) -> int:
        chosen, self._span_id = self._span_id, 0
        return chosen or int.from_bytes(os.urandom(8), "big") or 1

    def is_trace_id_random(self) -> bool:
        return True


class Tracing:
    """The process's traces. `shutdown` when it ends."""

    def __init__(
        self, endpoint: str, sample_ratio: float, *, process: str, node_name: str, version: str
    ) -> None:
        """An empty `endpoint` sets nothing up. Else this is the tracer provider of the whole process."""
        self._provider: Any = None
        self.ids = ChosenIds()
        if not endpoint:
            return
        # Imported here: whoever traces nothing pays nothing, in memory and at the start either.
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

        resource = Resource.create(
            {
                "service.name": f"tickwheel-{process}",
                "service.instance.id": node_name,
                "service.version": version,
            }
        )
        # Its own hook at exit waits for the collector without a bound; ours is `shutdown`.
        self._provider = TracerProvider(
            resource=resource,
            sampler=ParentBased(TraceIdRatioBased(sample_ratio)),
            id_generator=cast(Any, self.ids),
            shutdown_on_exit=False,
        )
        exporter = OTLPSpanExporter(
            endpoint=endpoint,
            insecure=not endpoint.startswith("https://"),
            timeout=EXPORT_TIMEOUT_MS // 1_000,
        )
        processor = BatchSpanProcessor(
            exporter, max_queue_size=SPAN_QUEUE_MAX, export_timeout_millis=EXPORT_TIMEOUT_MS
        )
        self._provider.add_span_processor(processor)
        trace.set_tracer_provider(self._provider)

    @property
    def enabled(self) -> bool:
        return self._provider is not None

    def shutdown(self, timeout_ms: int) -> bool:
        """Sends what waits.

        False when the time was too short: the rest is given up, nothing of it is waited for.
        """
        if self._provider is None:
            return True
        # The exporter sleeps between its tries and cannot be told to stop soon: a thread that we need not
        # join can.
        ending = threading.Thread(target=self._provider.shutdown, name="end-of-traces", daemon=True)
        ending.start()
        ending.join(timeout_ms / 1_000)
        return not ending.is_alive()


def _combinations(labels: Labels | None) -> Iterable[tuple[str, ...]]:
    return itertools.product(*labels.values()) if labels else ()


_PROPAGATOR = TraceContextTextMapPropagator()


def current_traceparent(context: Context | None = None) -> str:
    """The W3C `traceparent` of the current span (or the context's), to be sent on; empty without one."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, context)
    return carrier.get("traceparent", "")


def remote_context(traceparent: str) -> Context:
    """The parent for `tracer.start_span(name, context=…)`.

    Pass it; never attach it: a context that is attached in one task and detached in another is an error in
    the log for each, and one that is left attached becomes the parent of somebody else's spans.
    """
    return _PROPAGATOR.extract({"traceparent": traceparent} if traceparent else {}, Context())


def is_sampled(traceparent: str) -> bool:
    """Whether spans under it are recorded: the last field's lowest bit. Cheap enough for each grant."""
    return len(traceparent) == 55 and traceparent[-1] in "13579bdf"
