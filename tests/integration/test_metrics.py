"""What three real processes show in `/metrics`, before and after a good deal of work (H-O04)."""

from __future__ import annotations

import re
import shutil
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tickwheel.client import BlockingClient, make_run
from tickwheel.embedded.cluster import Cluster

pytestmark = pytest.mark.slow

WAIT_S = 60.0
SERIES_MAX = 500
MEMBERS = ("coordinator-1", "timer-1", "worker-1")

# Design, section 12, and the name under which a timer shows each. All processes show their loop's lag.
OF_A_TIMER = {
    "due lag": "tickwheel_due_lag_seconds",
    "ready depth": "tickwheel_ready_rows",
    "wheel size": "tickwheel_wheel_rows",
    "batch sizes": "tickwheel_batch_rows",
    "commit time": "tickwheel_commit_seconds",
    "credits": "tickwheel_credit",
    "fenced writes": "tickwheel_fenced_writes",
    "misfires": "tickwheel_misfires",
    "retries": "tickwheel_retries",
    "dead letters": "tickwheel_dead_letters",
    "skew": "tickwheel_clock_skew_seconds",
    "epoch changes": "tickwheel_epochs",
    "a queue's lag": "tickwheel_queue_lag_seconds",
    "a tenant's lag": "tickwheel_tenant_lag_seconds",
}
LABELS = {"le", "state", "queue", "tenant"}
"""Every name that a label may have. None of them can hold an id, a time, a number or a text of an error."""
NAMED_ABOVE = ("tickwheel_queue_lag_seconds", "tickwheel_tenant_lag_seconds")
"""Gauges of the 20 that wait longest: their series come and go, within their bound."""


def until(predicate: Callable[[], Any], what: str, seconds: float = WAIT_S) -> Any:
    end_s = time.monotonic() + seconds
    while not (value := predicate()):
        assert time.monotonic() < end_s, f"within {seconds} s: {what}"
        time.sleep(0.05)
    return value


Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(cluster: Cluster, member: str) -> tuple[set[str], Series]:
    """The names of all metrics, and the value of each series."""
    port = cluster[member].environment["TICKWHEEL_METRICS_PORT"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    series = {
        (sample.name, tuple(sorted(sample.labels.items()))): float(sample.value)
        for family in families
        for sample in family.samples
    }
    return {family.name for family in families}, series


def steady(series: Series) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
    return {key for key in series if key[0] not in NAMED_ABOVE}


@pytest.fixture(scope="module")
def cluster(postgres_bin_folder: Path | None) -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="tw-", dir="/tmp"))
    cluster = Cluster(folder / "c", timers=1, shard_count=4, postgres_bin_folder=postgres_bin_folder)
    try:
        yield cluster.start()
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)


def work(client: BlockingClient, schedule: str, run_count: int) -> None:
    """Runs that succeed, one that is retried, one that ends as a dead letter, fires of a schedule."""
    client.schedules.create(schedule, kind="noop", every=timedelta(seconds=1))
    names = client.runs.create_batch(make_run("noop", queue="") for _ in range(run_count))
    names.append(client.runs.create("fail", attempt_count_max=1).name)
    for name in (names[0], names[-1]):
        client.runs.wait(name, timeout_s=WAIT_S)


def test_series_are_bounded_and_stay_the_same_and_name_no_id(cluster: Cluster) -> None:
    with (
        BlockingClient(cluster.api_addresses) as client,
        psycopg.connect(cluster.postgres_url, autocommit=True) as connection,
    ):

        def ended(count: int) -> bool:
            row = connection.execute("SELECT count(*) FROM run WHERE end_us > 0").fetchone()
            return row is not None and row[0] >= count

        work(client, "first", 300)
        until(lambda: ended(301), "300 runs and a dead letter")
        before = {member: scrape(cluster, member) for member in MEMBERS}
        for number in range(10):
            work(client, f"more-{number}", 200)
        until(lambda: ended(301 + 10 * 201), "2,010 more")
        after = {member: scrape(cluster, member) for member in MEMBERS}

    for member in MEMBERS:
        (names, first), (_, second) = before[member], after[member]
        assert len(second) < SERIES_MAX, member
        assert steady(first) == steady(second), f"{member}: series that came or went with the work"
        assert "tickwheel_loop_lag_seconds" in names, member
        for name, labels in second:
            assert {key for key, _ in labels} <= LABELS, name
            for key, value in labels:
                if key != "le":
                    assert not re.search(r"[0-9a-f]{8}|\d{4}", value), f"{name}: {key}={value} holds an id"
    names, series = after["timer-1"]
    assert not {subject: name for subject, name in OF_A_TIMER.items() if name not in names}
    assert series["tickwheel_grants_total", ()] >= 2_311
    assert series["tickwheel_due_lag_seconds_count", ()] == series["tickwheel_grants_total", ()]
    assert series["tickwheel_dead_letters_total", ()] == 11
    assert series["tickwheel_attempts_total", (("state", "FAILED"),)] == 11


def test_what_waits_for_a_worker_shows_under_its_queue_and_tenant(cluster: Cluster) -> None:
    with BlockingClient(cluster.api_addresses) as client:
        run = client.runs.create("nobody-handles-this", queue="orphans")
        lag = ("tickwheel_queue_lag_seconds", (("queue", "orphans"),))
        until(lambda: scrape(cluster, "timer-1")[1].get(lag, 0) > 1, "the queue's lag")
        assert scrape(cluster, "timer-1")[1]["tickwheel_tenant_lag_seconds", (("tenant", "default"),)] > 1
        client.runs.cancel(run.name)
        until(lambda: lag not in scrape(cluster, "timer-1")[1], "the lag goes with what waited")
