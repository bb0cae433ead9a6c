"""A nudge only makes it sooner: what a timer was never told of, its sweep finds."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tickwheel.client import BlockingClient, make_run
from tickwheel.embedded.cluster import Cluster
from tickwheel.v1 import run_pb2

COUNT = 50
FOUND_S_MAX = 20.0
"""The sweep looks once a second for what is overdue by a second; the rest is this machine's."""


@pytest.mark.slow
def test_runs_of_which_no_timer_was_told_are_found_by_the_sweep(
    short_folder: Path, postgres_bin_folder: Path | None
) -> None:
    # No nudge of a batch finds room in the queue: as if coordinators and timers were cut off from each other.
    with (
        Cluster(
            short_folder / "nudge",
            timers=1,
            service_settings={"coordinator": {"nudge_queue_max": "1"}},
            postgres_bin_folder=postgres_bin_folder,
        ) as cluster,
        BlockingClient(cluster.api_addresses) as client,
    ):
        names = client.runs.create_batch(make_run("noop") for _ in range(COUNT))
        deadline = time.monotonic() + FOUND_S_MAX
        ended = [client.runs.wait(name, timeout_s=max(0.0, deadline - time.monotonic())) for name in names]
        assert {run.state for run in ended} == {run_pb2.Run.STATE_SUCCEEDED}
        # Found by the sweep and by nothing else: each was overdue by a second.
        assert min(run.due_lag_duration.ToMilliseconds() for run in ended) >= 900
