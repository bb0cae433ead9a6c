"""The scenes of the experiments: a cluster for each module, mended after each test."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


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
