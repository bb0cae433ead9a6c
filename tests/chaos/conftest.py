"""The scenes of the experiments: a folder for each module, and patience with the machine."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from tests.chaos.scene import STANDSTILL_S, HistoryBroken, StandstillWatch

_WATCH = pytest.StashKey[StandstillWatch]()


@pytest.fixture(scope="module")
def chaos_folder(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A folder with a short path. Where a test failed it stays, and is named: logs and diaries lie there."""
    folder = Path(tempfile.mkdtemp(prefix="twx-", dir="/tmp"))
    failed_before = request.session.testsfailed
    yield folder
    if request.session.testsfailed > failed_before:
        print(f"\nlogs and diaries: {folder}")
    else:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def _standstill_watch(request: pytest.FixtureRequest) -> Iterator[None]:
    with StandstillWatch() as watch:
        request.node.stash[_WATCH] = watch
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that measured times while the machine stood still says so instead of failing.

    What the judge complains about is never excused: a standstill is one more fault to survive.
    """
    report = yield
    watch = item.stash.get(_WATCH, None)
    if (
        watch is not None
        and report.when == "call"
        and report.failed
        and watch.longest_s > STANDSTILL_S
        and call.excinfo is not None
        and not call.excinfo.errisinstance(HistoryBroken)
    ):
        path, line, _ = item.location
        why = f"the machine stood still for {watch.longest_s:.1f} s: {call.excinfo.exconly()[:300]}"
        report.outcome = "skipped"
        report.longrepr = (path, (line or 0) + 1, why)
    return report
