"""The lock names every dependency and no place to fetch it from."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

TOP = Path(__file__).resolve().parents[2]


def locked() -> dict[str, list[Version]]:
    found: dict[str, list[Version]] = {}
    for name, version in re.findall(
        r"^([\w.-]+)(?:\[.*\])?==([\w.]+)", (TOP / "requirements.lock").read_text(), re.MULTILINE
    ):
        found.setdefault(canonicalize_name(name), []).append(Version(version))
    return found


def test_every_dependency_is_locked_at_a_version_that_the_project_accepts() -> None:
    settings = tomllib.loads((TOP / "pyproject.toml").read_text())
    project = settings["project"]
    wanted = [*project["dependencies"], *settings["dependency-groups"]["dev"]]
    wanted += [text for group in project["optional-dependencies"].values() for text in group]
    versions = locked()
    for requirement in map(Requirement, wanted):
        found = versions.get(canonicalize_name(requirement.name))
        assert found, f"{requirement.name} is not locked: run `make lock`"
        assert all(requirement.specifier.contains(version) for version in found), requirement


def test_the_lock_names_no_registry() -> None:
    text = (TOP / "requirements.lock").read_text()
    assert "://" not in text
    assert "index-url" not in text


def test_every_locked_package_has_a_hash() -> None:
    text = (TOP / "requirements.lock").read_text()
    assert len(re.findall(r"^[\w.-]+==", text, re.MULTILINE)) == len(
        re.findall(r"^[\w.-]+==.* \\\n    --hash=", text, re.MULTILINE)
    )
