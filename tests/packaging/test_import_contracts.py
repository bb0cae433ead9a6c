"""The contracts of who may import whom name every package, and each of them can turn red."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
import tomllib
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[2]
LINT_IMPORTS = Path(sysconfig.get_path("scripts")) / "lint-imports"
GENERATED = {"v1", "internal"}


def contracts() -> dict[str, dict[str, object]]:
    settings = tomllib.loads((TOP / "pyproject.toml").read_text())["tool"]["importlinter"]
    return {contract["id"]: contract for contract in settings["contracts"]}


def lint(top: Path, *names: str) -> subprocess.CompletedProcess[str]:
    chosen = [part for name in names for part in ("--contract", name)]
    return subprocess.run(
        [LINT_IMPORTS, "--no-cache", *chosen, str(TOP / "pyproject.toml")],
        capture_output=True,
        text=True,
        cwd=top,
        env={**os.environ, "PYTHONPATH": str(top / "libs"), "COLUMNS": "200"},
    )


def test_all_contracts_are_kept() -> None:
    done = lint(TOP, *contracts())
    assert done.returncode == 0, done.stdout


def test_every_package_stands_in_a_layer() -> None:
    layers = contracts()["layers"]["layers"]
    assert isinstance(layers, list)
    named = set(re.findall(r"\w+", " ".join(layers)))
    library = TOP / "libs" / "tickwheel"
    packages = {path.parent.name for path in library.glob("*/__init__.py")}
    modules = {path.stem for path in library.glob("*.py")} - {"__init__"}
    assert (packages | modules) - GENERATED <= named


def test_every_service_is_kept_apart() -> None:
    services = {f"tickwheel.services.{path.parent.name}" for path in (TOP / "services").glob("*/__init__.py")}
    assert services == set(contracts()["services-apart"]["modules"])  # type: ignore[call-overload]


def test_nothing_of_ours_is_missing_from_what_the_wheel_may_not_import() -> None:
    forbidden = contracts()["wheel-alone"]["forbidden_modules"]
    assert isinstance(forbidden, list)
    library = TOP / "libs" / "tickwheel"
    ours = {f"tickwheel.{path.parent.name}" for path in library.glob("*/__init__.py")} - {
        "tickwheel.services"
    }
    ours |= {f"tickwheel.{path.stem}" for path in library.glob("*.py")} - {"tickwheel.__init__"}
    ours -= {
        "tickwheel.services"
    }  # Its own parent, which cannot be forbidden: its siblings are named one by one.
    assert ours <= set(forbidden)


@pytest.mark.parametrize(
    ("contract", "file", "bad_import"),
    [
        ("layers", "libs/tickwheel/domain/__init__.py", "import tickwheel.postgres"),
        ("layers", "libs/tickwheel/runtime/__init__.py", "import tickwheel.services.timer"),
        ("layers", "libs/tickwheel/postgres/__init__.py", "import tickwheel.etcd"),
        ("services-apart", "services/timer/__init__.py", "import tickwheel.services.coordinator"),
        ("pure", "libs/tickwheel/domain/__init__.py", "import time"),
        ("pure", "services/timer/wheel.py", "import asyncio"),
        ("pure", "libs/tickwheel/domain/__init__.py", "import google.protobuf"),
        ("wheel-alone", "services/timer/wheel.py", "import tickwheel.domain"),
        ("protobuf-at-the-edge", "libs/tickwheel/postgres/__init__.py", "import tickwheel.v1.run_pb2"),
        ("sdk-light", "libs/tickwheel/worker/__init__.py", "import psycopg"),
        ("sdk-light", "libs/tickwheel/worker/__init__.py", "import tickwheel.etcd"),
    ],
)
def test_a_forbidden_import_turns_its_contract_red(
    tmp_path: Path, contract: str, file: str, bad_import: str
) -> None:
    for name in ("libs", "services"):
        shutil.copytree(TOP / name, tmp_path / name, symlinks=True)
    with (tmp_path / file).open("a") as module:
        module.write(f"\n{bad_import}\n")
    done = lint(tmp_path, contract)
    assert done.returncode == 1, done.stdout
    assert bad_import.removeprefix("import ").split(".")[0] in done.stdout
    assert "BROKEN" in done.stdout


def test_every_contract_is_broken_by_one_of_these() -> None:
    mark = test_a_forbidden_import_turns_its_contract_red.pytestmark[0]  # type: ignore[attr-defined]
    assert {case[0] for case in mark.args[1]} == set(contracts())
