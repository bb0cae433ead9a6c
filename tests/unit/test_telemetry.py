"""Metrics are bounded, health is told from another thread, and traces cost nothing when they are off."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import numpy as np
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from prometheus_client import generate_latest

from tickwheel.runtime.telemetry import (
    Health,
    Metrics,
    MetricsPortBusy,
    MetricsServer,
    SeriesLimitExceeded,
    Tracing,
    current_traceparent,
    is_sampled,
    remote_context,
)

PATH = ":".join(sys.path)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def server(metrics: Metrics) -> Iterator[tuple[MetricsServer, Health]]:
    health = Health()
    server = MetricsServer(metrics, health, "127.0.0.1", 0)
    yield server, health
    server.close()


def get(server: MetricsServer, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def text(metrics: Metrics) -> str:
    return generate_latest(metrics.registry).decode()


def test_every_series_of_a_counter_exists_from_the_start(metrics: Metrics) -> None:
    metrics.counter("tickwheel_attempts_ended_total", "Ended.", {"state": ("SUCCEEDED", "FAILED")})
    assert 'tickwheel_attempts_ended_total{state="FAILED"} 0.0' in text(metrics)
    assert metrics.series_count == 2


def test_a_process_has_at_most_five_hundred_series(metrics: Metrics) -> None:
    metrics.counter(
        "tickwheel_a_total", "A.", {"x": [str(n) for n in range(20)], "y": [str(n) for n in range(24)]}
    )
    assert metrics.series_count == 480
    with pytest.raises(SeriesLimitExceeded, match="501 series, 500"):
        metrics.gauge("tickwheel_b", "B.", {"x": [str(n) for n in range(21)]})
    metrics.gauge("tickwheel_b", "B.", {"x": [str(n) for n in range(20)]})


def test_an_array_histogram_counts_like_one_that_takes_single_values(metrics: Metrics) -> None:
    seed = time.time_ns()
    print("seed", seed)
    values = np.random.default_rng(seed).exponential(0.1, 5_000)
    values[:3] = (0.001, 0.0, 1_000.0)  # On a bound, below all, above all.
    whole = metrics.array_histogram("tickwheel_whole_seconds", "Whole.")
    single = metrics.histogram("tickwheel_single_seconds", "Single.")
    for part in np.array_split(values, 7):
        whole.observe(part)
    whole.observe(np.array([]))
    for value in values:
        single.observe(value)
    lines = text(metrics).splitlines()

    def counts(name: str) -> list[str]:
        wanted = (f"{name}_bucket", f"{name}_count")
        return [line.removeprefix(name) for line in lines if line.startswith(wanted)]

    assert counts("tickwheel_whole_seconds") == counts("tickwheel_single_seconds")
    assert float(
        next(x for x in lines if x.startswith("tickwheel_whole_seconds_sum")).split()[1]
    ) == pytest.approx(values.sum())


def test_a_top_gauge_shows_the_largest_only_and_forgets_the_rest(metrics: Metrics) -> None:
    gauge = metrics.top_gauge("tickwheel_queue_lag_seconds", "Lag.", "queue", count_max=2)
    gauge.replace({"a": 1.0, "b": 3.0, "c": 2.0})
    assert 'queue="a"' not in text(metrics)
    assert 'tickwheel_queue_lag_seconds{queue="b"} 3.0' in text(metrics)
    gauge.replace({"a": 1.0})
    assert 'queue="b"' not in text(metrics)


def test_metrics_are_served(server: tuple[MetricsServer, Health], metrics: Metrics) -> None:
    metrics.counter("tickwheel_misfires_total", "Misfires.").inc(3)
    status, body = get(server[0], "/metrics")
    assert status == 200
    assert "tickwheel_misfires_total 3.0" in body
    assert get(server[0], "/other")[0] == 404


def test_health_names_each_problem(server: tuple[MetricsServer, Health]) -> None:
    assert get(server[0], "/healthz") == (200, '{"healthy": true, "problems": {}}')

    def broken() -> str | None:
        raise RuntimeError("oh")

    server[1].add("loop", lambda: "has not moved for 9 s")
    server[1].add("store", lambda: None)
    server[1].add("check", broken)
    status, body = get(server[0], "/healthz")
    assert status == 503
    assert set(json.loads(body)["problems"]) == {"loop", "check"}


def test_a_busy_metrics_port_is_named(metrics: Metrics) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(MetricsPortBusy, match=f"127.0.0.1:{port}"):
            MetricsServer(metrics, Health(), "127.0.0.1", port)


def test_without_an_endpoint_nothing_of_the_sdk_is_even_imported() -> None:
    program = (
        "import sys; from tickwheel.runtime.telemetry import Tracing; from opentelemetry import trace\n"
        "t = Tracing('', 1.0, process='timer', node_name='n', version='1')\n"
        "span = trace.get_tracer('x').start_span('fire')\n"
        "print(t.enabled, span.is_recording(), 'opentelemetry.sdk.trace' in sys.modules, t.shutdown(0))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={"PYTHONPATH": PATH}
    )
    assert done.stdout == "False False False True\n", done.stderr


def test_a_trace_goes_on_in_another_process() -> None:
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("test")
    with tracer.start_as_current_span("fire") as fire:
        sent = current_traceparent()
    assert is_sampled(sent)
    run = tracer.start_span("run", context=remote_context(sent))
    assert run.get_span_context().trace_id == fire.get_span_context().trace_id
    assert current_traceparent() == ""


def test_an_empty_traceparent_starts_a_trace_of_its_own_even_within_another_span() -> None:
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("test")
    with tracer.start_as_current_span("somebody else's") as other:
        span = tracer.start_span("run", context=remote_context(""))
    assert span.get_span_context().trace_id != other.get_span_context().trace_id
    assert trace.get_current_span().get_span_context().trace_id == 0


@pytest.mark.parametrize(
    ("traceparent", "sampled"),
    [
        ("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", True),
        ("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-03", True),
        ("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00", False),
        ("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-02", False),
        ("", False),
        ("1", False),
    ],
)
def test_whether_a_trace_is_recorded_is_read_from_its_flags(traceparent: str, sampled: bool) -> None:
    assert is_sampled(traceparent) == sampled


def test_a_collector_that_is_away_is_given_up_in_time() -> None:
    program = (
        "import time; from tickwheel.runtime.telemetry import Tracing; from opentelemetry import trace\n"
        "t = Tracing('http://127.0.0.1:9', 1.0, process='timer', node_name='n', version='1')\n"
        "for _ in range(500): trace.get_tracer('x').start_span('fire').end()\n"
        "started = time.monotonic(); t.shutdown(300); print(time.monotonic() - started)"
    )
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={"PYTHONPATH": PATH}
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1.0
    assert time.monotonic() - started < 5.0


def test_tracing_that_is_off_shuts_down_at_once() -> None:
    assert Tracing("", 1.0, process="timer", node_name="n", version="1").shutdown(0)
