"""What a user installs: everything of ours under `tickwheel`, and nothing beside it."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[2]


def build(source: Path, into: Path, kind: str) -> Path:
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", kind, "--directory", str(into)],
        cwd=source,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (made,) = into.iterdir()
    return made


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    with zipfile.ZipFile(build(TOP, tmp_path_factory.mktemp("wheel"), "wheel")) as archive:
        return set(archive.namelist())


def files(folder: Path, *suffixes: str) -> set[str]:
    """The files below `libs`, the services through their link, as a wheel names them."""
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.suffix in suffixes}
    services = folder / "tickwheel" / "services"
    found |= {
        (Path("tickwheel/services") / path.relative_to(services.resolve())).as_posix()
        for path in services.resolve().rglob("*")
        if path.suffix in suffixes
    }
    return {name for name in found if "__pycache__" not in name}


def test_the_wheel_has_every_module_statement_and_service(wheel_names: set[str]) -> None:
    assert files(TOP / "libs", ".py", ".sql", ".typed") <= wheel_names
    assert "tickwheel/services/timer/wheel.py" in wheel_names
    assert "tickwheel/py.typed" in wheel_names


def test_the_wheel_puts_nothing_beside_our_package(wheel_names: set[str]) -> None:
    assert {name.split("/")[0].partition("-")[0] for name in wheel_names} == {"tickwheel"}


def test_a_wheel_from_the_source_archive_is_the_same(tmp_path: Path, wheel_names: set[str]) -> None:
    archive = build(TOP, tmp_path / "sdist", "sdist")
    with tarfile.open(archive) as unpacked:
        unpacked.extractall(tmp_path / "unpacked", filter="data")
    (source,) = (tmp_path / "unpacked").iterdir()
    with zipfile.ZipFile(build(source, tmp_path / "wheel", "wheel")) as again:
        assert set(again.namelist()) == wheel_names
