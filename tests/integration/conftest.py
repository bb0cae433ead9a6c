"""Clusters of real processes, for tests that speak to the API."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tickwheel.client import Client
from tickwheel.embedded.cluster import Cluster


@pytest.fixture(scope="session")
def api_cluster(short_folder: Path, postgres_bin_folder: Path | None) -> Iterator[Cluster]:
    """Postgres, etcd and a coordinator, without timers: what is created stays as it was created."""
    cluster = Cluster(
        short_folder / "api", coordinators=1, timers=0, workers=0, postgres_bin_folder=postgres_bin_folder
    )
    try:
        yield cluster.start()
    finally:
        cluster.stop()


@pytest.fixture
async def client(api_cluster: Cluster) -> AsyncIterator[Client]:
    async with Client(api_cluster.api_addresses, retry_s_max=10.0) as client:
        yield client
