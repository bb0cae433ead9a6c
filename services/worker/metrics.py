"""What does the worker process show in `/metrics`? Read from the SDK's counters when it is scraped."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tickwheel.worker import Worker


class WorkerCollector(Collector):
    """Costs the hot path nothing. Its series are fixed, some twenty."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def describe(self) -> Iterator[Metric]:
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        streams = self._worker.stream_stats
        executor = self._worker.executor_stats
        for name, meaning, value in (
            ("streams_welcomed", "Timers that know this worker.", streams.streams_welcomed),
            ("attempts_held", "Attempts whose outcome is not recorded yet.", streams.held),
            ("attempts_running", "Handlers that run.", self._worker.running_count),
            ("capacity", "Attempts that may be held.", self._worker.capacity),
            ("loop_lag_seconds", "How late the handlers' loop answers the streams'.", executor.loop_lag_s),
        ):
            yield GaugeMetricFamily(f"tickwheel_worker_{name}", meaning, value=value)
        for name, meaning, count in (
            ("grants", "Grants taken in.", streams.grants),
            ("recorded", "Outcomes that a timer recorded.", streams.recorded),
            ("refused", "Outcomes that no timer takes: the lease had ended.", streams.refused),
            ("moved", "Attempts whose shard has another owner.", streams.moved),
            ("outcomes_dropped", "Outcomes of attempts that had been abandoned.", streams.outcomes_dropped),
            ("attempts_lapsed", "Attempts that were stopped: no renewal came in time.", executor.lapsed),
            (
                "attempts_abandoned",
                "Attempts that were stopped: the lease was given away.",
                executor.abandoned,
            ),
            ("kinds_unknown", "Runs of a kind that has no handler here.", executor.kinds_unknown),
            ("handlers_started", "Handlers begun.", executor.started),
            ("streams_opened", "Streams opened.", streams.streams_opened),
            ("streams_failed", "Streams that broke.", streams.streams_failed),
            ("requests", "Messages sent.", streams.requests),
            ("responses", "Messages received.", streams.responses),
        ):
            yield CounterMetricFamily(f"tickwheel_worker_{name}", meaning, value=count)
