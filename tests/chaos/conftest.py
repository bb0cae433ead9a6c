"""Each experiment has a cluster of its own, since it kills parts of it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

_OUTCOME = pytest.StashKey[pytest.TestReport]()


@pytest.fixture
def chaos_folder(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A folder with a short path. It stays where the test failed, and its name is printed: logs and diaries
    lie there."""
    folder = Path(tempfile.mkdtemp(prefix="twx-", dir="/tmp"))
    yield folder
    outcome = request.node.stash.get(_OUTCOME, None)
    if outcome is not None and outcome.failed:
        print(f"\nlogs and diaries: {folder}")
    else:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call":
        item.stash[_OUTCOME] = report
    return report
