"""The acceptance cases of ``tests/data/cron.json``: expressions, zones and bases with the right instants.

Each is asked of the engine and of the command line, which must agree. ``or_error`` in the data lets a product
refuse the form; tickwheel refuses none of these, so that mark is not honoured here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tickwheel.cli.trigger import app, format_instant
from tickwheel.domain import trigger as triggers
from tickwheel.domain.trigger import Cron, Dialect, Trigger, TriggerSet
from tickwheel.errors import InvalidArgument

_DATA = Path(__file__).parent.parent / "data" / "cron.json"
CASES: list[dict[str, Any]] = json.loads(_DATA.read_text(encoding="utf-8"))["cases"]
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def instant_us(text: str) -> int:
    return (datetime.fromisoformat(text) - EPOCH) // timedelta(microseconds=1)


def compiled(case: dict[str, Any]) -> triggers.CompiledTrigger:
    trigger = Trigger(cron=Cron(case["expr"], Dialect(case["dialect"])), time_zone=case["tz"])
    return triggers.compile(TriggerSet((trigger,)))


def arguments(case: dict[str, Any], count: int) -> list[str]:
    return [
        "next",
        f"--cron={case['expr']}",
        f"--dialect={case['dialect']}",
        f"--time-zone={case['tz']}",
        f"--after={case['base']}",
        f"--count={count}",
        "--json",
    ]


def ids(cases: list[dict[str, Any]]) -> list[str]:
    return [case["id"] for case in cases]


FIRING = [case for case in CASES if not case.get("error")]
REFUSED = [case for case in CASES if case.get("error")]


def test_all_145_cases_are_here() -> None:
    assert len(CASES) == len(FIRING) + len(REFUSED) == 145


@pytest.mark.parametrize("case", FIRING, ids=ids(FIRING))
def test_a_trigger_names_the_expected_instants_one_after_the_other(case: dict[str, Any]) -> None:
    trigger, base_us, found = compiled(case), instant_us(case["base"]), []
    for _ in range(len(case["expected"]) + bool(case.get("exhausted"))):
        next_us = trigger.next_after(base_us)
        if next_us is None:
            break
        assert next_us > base_us
        found.append(format_instant(next_us))
        base_us = next_us
    assert found == case["expected"]


@pytest.mark.parametrize("case", FIRING, ids=ids(FIRING))
def test_enumerating_from_either_end_gives_the_same_instants(case: dict[str, Any]) -> None:
    trigger, base_us = compiled(case), instant_us(case["base"])
    count = len(case["expected"]) or 1
    oldest = trigger.between(base_us, triggers.NEVER_US, count)
    assert [format_instant(found_us) for found_us in oldest] == case["expected"]
    if oldest:
        assert trigger.latest_between(base_us, oldest[-1], count) == oldest[::-1]
        assert trigger.count_between(base_us, oldest[-1], 1_000) == len(oldest)


@pytest.mark.parametrize("case", FIRING, ids=ids(FIRING))
def test_the_command_line_prints_the_expected_instants(case: dict[str, Any]) -> None:
    result = CliRunner().invoke(app, arguments(case, len(case["expected"]) or 1))
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == case["expected"]


@pytest.mark.parametrize("case", REFUSED, ids=ids(REFUSED))
def test_a_bad_trigger_is_refused_with_its_field(case: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument) as refused:
        compiled(case)
    assert refused.value.field.startswith("triggers[0].")  # type: ignore[attr-defined]


@pytest.mark.parametrize("case", REFUSED, ids=ids(REFUSED))
def test_the_command_line_refuses_a_bad_trigger_with_the_field_and_exit_code_2(case: dict[str, Any]) -> None:
    result = CliRunner().invoke(app, arguments(case, 1))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith(("cron.", "time_zone:"))


def test_the_zone_of_the_process_does_not_matter() -> None:
    case = next(case for case in CASES if case["id"] == "cr-206")
    environment = {**os.environ, "TZ": "Australia/Sydney"}
    command = [sys.executable, "-m", "tickwheel.cli.trigger", *arguments(case, len(case["expected"]))]
    output = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert json.loads(output) == case["expected"]
