"""The real parts that tests stand on: one Postgres and one etcd for the session, in folders of their own.

`TICKWHEEL_TEST_PG_BIN` names the `bin` folder of another Postgres than the wheel's.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from tickwheel.embedded.etcd import EmbeddedEtcd
from tickwheel.embedded.postgres import EmbeddedPostgres
from tickwheel.postgres.migrate import migrate

TEST_SHARD_COUNT = 16


def _exit_on_term(_number: int, _frame: FrameType | None) -> None:
    sys.exit("SIGTERM")


def pytest_sessionstart() -> None:
    # `timeout` ends a run with SIGTERM: without this no fixture is torn down, and servers stay behind.
    signal.signal(signal.SIGTERM, _exit_on_term)


@pytest.fixture(scope="session")
def postgres_bin_folder() -> Path | None:
    """Of the Postgres under test; None is the wheel's."""
    wanted = os.environ.get("TICKWHEEL_TEST_PG_BIN")
    return Path(wanted) if wanted else None


@pytest.fixture(scope="session")
def short_folder() -> Iterator[Path]:
    """A temporary folder whose path leaves room for a socket's name."""
    folder = Path(tempfile.mkdtemp(prefix="tw-", dir="/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def postgres_server(short_folder: Path, postgres_bin_folder: Path | None) -> Iterator[EmbeddedPostgres]:
    """Shared by the whole session: a test that kills its Postgres makes one of its own."""
    server = EmbeddedPostgres(short_folder / "pg", bin_folder=postgres_bin_folder)
    try:
        yield server.start()
    finally:
        server.stop("immediate")


@pytest.fixture(scope="module")
def postgres_url(postgres_server: EmbeddedPostgres) -> Iterator[str]:
    """The URL of an empty database made for this module, dropped after it."""
    name = f"test_{uuid.uuid4().hex[:12]}"
    yield postgres_server.create_database(name)
    postgres_server.drop_database(name)


@pytest.fixture(scope="session")
def migrated_template(postgres_server: EmbeddedPostgres) -> str:
    """The name of a migrated database, to be copied: that is much cheaper than to migrate again."""
    migrate(postgres_server.create_database("migrated_template"), shard_count=TEST_SHARD_COUNT)
    return "migrated_template"


@pytest.fixture(scope="module")
def migrated_url(postgres_server: EmbeddedPostgres, migrated_template: str) -> Iterator[str]:
    """The URL of a migrated database of 16 shards made for this module, dropped after it."""
    name = f"test_{uuid.uuid4().hex[:12]}"
    yield postgres_server.create_database(name, template=migrated_template)
    postgres_server.drop_database(name)


@pytest.fixture(scope="session")
def etcd_server(short_folder: Path) -> Iterator[EmbeddedEtcd]:
    """Shared by the whole session: a test that kills its etcd makes one of its own."""
    server = EmbeddedEtcd(short_folder / "etcd")
    try:
        yield server.start()
    finally:
        server.stop()


@pytest.fixture(scope="session")
def etcd_endpoint(etcd_server: EmbeddedEtcd) -> str:
    """`127.0.0.1:PORT`; tests keep apart by key prefixes of their own."""
    return etcd_server.endpoint
