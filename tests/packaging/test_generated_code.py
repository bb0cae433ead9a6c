"""The generated code is what the contract says, and the runtime that is asked for can run it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

TOP = Path(__file__).resolve().parents[2]
GENERATE = TOP / "proto" / "generate.py"
BUF = Path(sysconfig.get_path("scripts")) / "buf"


def generated(libs: Path) -> dict[str, str]:
    packages = ("tickwheel/v1", "tickwheel/internal/v1")
    return {
        str(file.relative_to(libs)): file.read_text()
        for package in packages
        for file in sorted((libs / package).glob("*_pb2*"))
        if file.suffix in (".py", ".pyi")
    }


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, cwd=TOP)


def test_generating_again_makes_no_difference(tmp_path: Path) -> None:
    done = run(sys.executable, GENERATE, "--into", tmp_path)
    assert done.returncode == 0, done.stderr
    committed, fresh = generated(TOP / "libs"), generated(tmp_path)
    assert committed.keys() == fresh.keys()
    different = [name for name in fresh if fresh[name] != committed[name]]
    assert not different, "run `make proto` and commit what it writes"


def test_only_files_with_services_have_grpc_code() -> None:
    for file in (TOP / "proto").glob("tickwheel/**/*.proto"):
        name = file.relative_to(TOP / "proto").with_suffix("")
        has_service = re.search(r"^service ", file.read_text(), re.MULTILINE) is not None
        assert (TOP / "libs" / f"{name}_pb2_grpc.py").exists() == has_service, name


def test_the_runtime_floors_are_the_stamps_of_the_generated_code() -> None:
    # Older runtimes refuse the code at import, so a lower floor is an installation that cannot start.
    project = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]
    floors = {}
    for text in [*project["dependencies"], *project["optional-dependencies"]["server"]]:
        requirement = Requirement(text)
        floors[requirement.name] = next(
            (s.version for s in requirement.specifier if s.operator == ">="), None
        )
    sources = list(generated(TOP / "libs").values())
    protobuf_stamps = {m[1] for s in sources if (m := re.search(r"Protobuf Python Version: ([\d.]+)", s))}
    grpc_stamps = {m[1] for s in sources if (m := re.search(r"GRPC_GENERATED_VERSION = '([\d.]+)'", s))}
    assert protobuf_stamps == {floors["protobuf"]}
    assert grpc_stamps == {floors["grpcio"]}


def broken(tmp_path: Path, file: str, old: str, new: str) -> Path:
    """The image of a contract in which one file says something else."""
    copy = tmp_path / "proto"
    shutil.copytree(TOP / "proto", copy)
    text = (copy / file).read_text()
    assert old in text
    (copy / file).write_text(text.replace(old, new, 1))
    image = tmp_path / "broken.binpb"
    done = run(sys.executable, copy / "generate.py", "--image", image)
    assert done.returncode == 0, done.stderr
    return image


@pytest.mark.parametrize(
    ("new", "complaint"),
    [
        ("int64 page_size = 2;", "changed type"),
        ("int32 size_of_page = 2;", "changed name"),
        ("", 'field "2" with name "page_size"'),
    ],
)
def test_an_incompatible_change_is_refused(tmp_path: Path, new: str, complaint: str) -> None:
    image = broken(tmp_path, "tickwheel/v1/schedule_service.proto", "int32 page_size = 2;", new)
    baseline = TOP / "proto" / "tickwheel.binpb"
    done = run(BUF, "breaking", image, "--against", baseline, "--config", TOP / "proto" / "buf.yaml")
    assert done.returncode != 0
    assert complaint in done.stdout


def test_a_badly_named_field_is_refused(tmp_path: Path) -> None:
    file = "tickwheel/v1/schedule_service.proto"
    image = broken(tmp_path, file, "int32 page_size = 2;", "int32 pageSize = 2;")
    done = run(BUF, "lint", image, "--config", TOP / "proto" / "buf.yaml")
    assert done.returncode != 0
    assert "pageSize" in done.stdout
