"""What does a timer say about itself in numbers? Every metric that the timer exports is made here."""

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tickwheel.domain.decision import DecisionReason
from tickwheel.domain.run import AttemptState, RunState
from tickwheel.domain.timer_rows import Bools, Int64s
from tickwheel.runtime.telemetry import Metrics

if TYPE_CHECKING:
    from tickwheel.services.timer.node import TimerNode

BATCH_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 4_000)


class Meters:
    """Once a batch at the most; nothing here is done for each row by Python."""

    def __init__(self, metrics: Metrics) -> None:
        self.due_lag = metrics.array_histogram("tickwheel_due_lag_seconds", "From due to leased.")
        self._commit = metrics.histogram("tickwheel_commit_seconds", "One fenced batch, from call to answer.")
        self._batch = metrics.histogram(
            "tickwheel_batch_rows", "Rows of one fenced batch.", buckets=BATCH_BUCKETS
        )
        self._granted = metrics.counter("tickwheel_grants_total", "Leases granted.")
        self._attempts = metrics.counter(
            "tickwheel_attempts_total",
            "Attempts that ended, by how.",
            {"state": tuple(state.name for state in AttemptState)},
        )
        self._dead = metrics.counter("tickwheel_dead_letters_total", "Runs that have no attempts left.")
        self._retries = metrics.counter("tickwheel_retries_total", "Runs that wait for another attempt.")
        self._misfires = metrics.counter("tickwheel_misfires_total", "Occurrences found too late.")
        self._skipped = metrics.counter(
            "tickwheel_overlap_skips_total", "Occurrences skipped because a run of the schedule lived."
        )
        self._fenced = metrics.counter("tickwheel_shards_lost_total", "Shards found under another epoch.")
        self._fenced_calls = metrics.counter(
            "tickwheel_fenced_writes_total", "Calls to Postgres that found one of their shards lost."
        )
        self._epochs = metrics.counter("tickwheel_epochs_total", "Epochs raised, by taking shards.")
        self._quarantined = metrics.counter("tickwheel_quarantined_total", "Schedules set aside.")
        self._swept = metrics.counter("tickwheel_swept_total", "Overdue rows that only a sweep found.")
        self._nudges_dropped = metrics.counter(
            "tickwheel_nudges_dropped_total", "Rows named by nudges that there was no room to read."
        )
        self._truncated = metrics.counter(
            "tickwheel_loads_truncated_total", "Loads that stopped at a tenant's share of memory."
        )
        self._halted = metrics.gauge(
            "tickwheel_halted", "1 while nothing is granted because Postgres has another history."
        )
        self._owned = metrics.gauge("tickwheel_shards_owned", "Shards that are ours.")
        self._ready = metrics.gauge("tickwheel_ready_rows", "Due rows that wait for a worker.")
        self._wheel = metrics.gauge("tickwheel_wheel_rows", "Timers in the wheel.")
        self._entries = metrics.gauge("tickwheel_entries_rows", "Rows in memory.")
        self._live = metrics.gauge("tickwheel_leases_live", "Live attempts.")
        self._sessions = metrics.gauge("tickwheel_worker_streams", "Open streams with workers.")
        self._credit = metrics.gauge("tickwheel_credit", "Grants that workers would take now.")
        self._queue_lag = metrics.top_gauge(
            "tickwheel_queue_lag_seconds",
            "Wait of the oldest due row, of the queues that wait most.",
            "queue",
        )
        self._tenant_lag = metrics.top_gauge(
            "tickwheel_tenant_lag_seconds", "As tickwheel_queue_lag_seconds, of tenants.", "tenant"
        )
        self._skew = metrics.gauge("tickwheel_clock_skew_seconds", "Wall clock here minus the cluster's.")
        self._uncertainty = metrics.gauge("tickwheel_clock_uncertainty_seconds", "Of the cluster clock here.")

    def committed(self, rows: int, took_us: int) -> None:
        self._commit.observe(took_us / 1e6)
        self._batch.observe(rows)

    def granted(self, lag_us: Int64s) -> None:
        self._granted.inc(len(lag_us))
        self.due_lag.observe(np.maximum(lag_us, 0) / 1e6)

    def outcomes(self, attempt_states: npt.NDArray[Any], run_states: npt.NDArray[Any]) -> None:
        states, counts = np.unique(attempt_states, return_counts=True)
        for state, count in zip(states.tolist(), counts.tolist(), strict=True):
            self._attempts.labels(AttemptState(state).name).inc(count)
        dead = int(np.count_nonzero(run_states == RunState.DEAD_LETTERED))
        if dead:
            self._dead.inc(dead)
        retried = int(np.count_nonzero(run_states == RunState.SCHEDULED))
        if retried:
            self._retries.inc(retried)

    def decided(self, moves: Any, done: Bools, busy: Bools) -> None:
        skipped = int(np.count_nonzero(busy)) + sum(
            count
            for of, count, reason in zip(moves.why_of, moves.why_count, moves.why_reason, strict=True)
            if reason == DecisionReason.OVERLAP and done[of]
        )
        if skipped:
            self._skipped.inc(skipped)
        missed = len(moves.more_of) + sum(
            count
            for count, reason in zip(moves.why_count, moves.why_reason, strict=True)
            if reason in (2, 3, 4, 5)
        )
        if missed:
            self._misfires.inc(missed)

    def fenced(self) -> None:
        self._fenced_calls.inc()

    def shards_lost(self, count: int) -> None:
        self._fenced.inc(count)

    def epochs_raised(self, count: int) -> None:
        self._epochs.inc(count)

    def quarantined(self, count: int) -> None:
        self._quarantined.inc(count)

    def swept(self, count: int) -> None:
        if count > 0:
            self._swept.inc(count)

    def nudges_dropped(self, count: int) -> None:
        self._nudges_dropped.inc(count)

    def truncated(self) -> None:
        self._truncated.inc()

    def halt(self, halted: bool) -> None:
        self._halted.set(halted)

    def owned(self, count: int) -> None:
        self._owned.set(count)

    def observe(self, node: "TimerNode") -> None:
        """Levels, once a second."""
        self._ready.set(sum(lane.ready.depth() for lane in node.lanes))
        self._wheel.set(len(node.wheel))
        self._entries.set(len(node.entries))
        self._live.set(len(node.leases))
        self._sessions.set(len(node.sessions))
        self._credit.set(sum(session.credit for session in node.sessions.values()))
        self._observe_lags(node)
        self._skew.set(node.clock.skew_us / 1e6)
        self._uncertainty.set(node.clock.uncertainty_us / 1e6)

    def _observe_lags(self, node: "TimerNode") -> None:
        """The longest waits, by queue and by tenant: of everything due here, nothing by its own name."""
        now_us = node.clock.now_us()
        catalog = node.catalog
        queues: dict[str, float] = {}
        tenants: dict[str, float] = {}
        for lane in node.lanes:
            by_route, by_tenant = lane.ready.oldest_of_each()
            for route, due_us in by_route.items():
                _keep_longest(queues, catalog.routes.get(route, ("", ""))[0], now_us - due_us)
            for tenant, due_us in by_tenant.items():
                _keep_longest(tenants, catalog.tenants.get(tenant, ""), now_us - due_us)
        self._queue_lag.replace(queues)
        self._tenant_lag.replace(tenants)


def _keep_longest(lags: dict[str, float], name: str, lag_us: int) -> None:
    if name:
        lags[name] = max(lags.get(name, 0.0), lag_us / 1e6)
