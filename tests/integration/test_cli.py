"""The command line against a real cluster: what people see, what scripts get, and the exit codes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

import tickwheel.cli
from tickwheel.embedded.cluster import Cluster
from tickwheel.embedded.folder import processes_in

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def tick(api_cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `tickwheel …` in this process: (exit code, standard output, standard error)."""
    monkeypatch.setenv("TICKWHEEL_ADDRESS", api_cluster.api_addresses[0])
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["tickwheel", *arguments])
        code = 0
        try:
            tickwheel.cli.main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def fresh() -> str:
    return f"cli-{uuid.uuid4().hex[:12]}"


def test_a_schedule_from_its_creation_to_its_end(tick: Run) -> None:
    name = fresh()
    code, out, _ = tick(
        "schedule", "create", name, "--kind", "report", "--payload", '{"a": 1}', "--label", "team=x",
        "--cron", "0 9 * * MON-FRI", "--time-zone", "Europe/Berlin",
    )  # fmt: skip
    assert code == 0
    assert "ACTIVE" in out
    assert "0 9 * * MON-FRI Europe/Berlin" in out
    code, out, _ = tick("schedule", "list", "--filter", f'name = "{name}"')
    assert name in out
    assert "in " in out, "when it is due next, as people say it"
    code, out, _ = tick("schedule", "update", name, "--cron", "0 10 * * *", "--priority", "3")
    assert code == 0
    assert out.split("version")[1].split()[0] == "2"
    _, out, _ = tick("schedule", "pause", name, "--reason", "stock-taking", "--until", "2h")
    assert "PAUSED" in out
    assert "stock-taking" in out
    assert tick("schedule", "resume", name)[0] == 0
    assert tick("schedule", "run", name)[0] == 0
    assert tick("schedule", "delete", name)[0] == 0
    assert tick("schedule", "get", name)[0] == 1


def test_an_update_changes_what_is_named_and_nothing_else(tick: Run) -> None:
    name = fresh()
    tick("schedule", "create", name, "--kind", "a", "--every", "1h30m", "--payload", "text", "--label", "x=1")
    _, out, _ = tick("schedule", "update", name, "--kind", "b", "--label", "y=2", "--json")
    after = json.loads(out)
    assert after["spec"]["template"]["kind"] == "b"
    assert after["spec"]["template"]["payload"]["data"] == "dGV4dA=="
    assert after["spec"]["triggers"][0]["interval"]["duration"] == "5400s"
    assert after["labels"] == {"x": "1", "y": "2"}
    assert tick("schedule", "update", name)[0] == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ("schedule", "list"),
        ("run", "list"),
        ("dead-letter", "list"),
        ("cluster", "shards"),
        ("cluster", "timers"),
        ("health",),
    ],
)
def test_each_list_is_also_there_for_scripts(tick: Run, arguments: tuple[str, ...]) -> None:
    _, out, _ = tick(*arguments, "--json")
    assert isinstance(json.loads(out), list | dict)


def test_a_run_and_its_end(tick: Run, api_cluster: Cluster) -> None:
    code, out, _ = tick(
        "run", "create", "--kind", "mail", "--payload", '{"to": "x"}', "--due", "10m", "--json"
    )
    run = json.loads(out)
    assert code == 0
    assert run["state"] == "STATE_SCHEDULED"
    code, out, _ = tick("run", "get", run["name"])
    assert "SCHEDULED" in out
    assert "in 9 min" in out or "in 10 min" in out
    _, out, _ = tick("run", "list", "--limit", "5")
    assert run["name"].rpartition("/")[2] in out
    _, out, _ = tick("run", "cancel", run["name"], "--reason", "not needed")
    assert "CANCELLED" in out
    assert "not needed" in out
    code, out, _ = tick("run", "get", run["name"], "--attempts", "--json")
    assert json.loads(out)["attempts"] == []


def test_the_same_request_id_makes_one_run(tick: Run) -> None:
    request = fresh()
    first, second = (
        json.loads(tick("run", "create", "--kind", "mail", "--request-id", request, "--json")[1])
        for _ in range(2)
    )
    assert first == second


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("schedule", "create", "x", "--kind", "a", "--cron", "61 * * * *"), 2, "61"),
        (
            ("schedule", "create", "x", "--kind", "a", "--cron", "* * * * *", "--time-zone", "Mars/X"),
            2,
            "Mars/X",
        ),
        (("schedule", "create", "x", "--kind", "a"), 2, "--cron, --every, --at or --rrule"),
        (("schedule", "create", "x", "--kind", "a", "--every", "soon"), 2, "write 250ms, 90s"),
        (("schedule", "create", "x", "--kind", "a", "--cron", "* * * * *", "--label", "x"), 2, "KEY=VALUE"),
        (
            ("schedule", "create", "x", "--kind", "a", "--cron", "* * * * *", "--overlap", "MAYBE"),
            2,
            "BUFFER_ONE",
        ),
        (("run", "create", "--kind", "a", "--due", "2027-01-31T09:00:00"), 2, "UTC offset"),
        (("run", "get", "0" * 32), 1, "does not exist"),
        (("schedule", "list", "--filter", "colour = red"), 2, "cannot be asked for"),
        (("cluster", "drain", "nobody"), 1, "does not exist"),
    ],
)
def test_an_error_is_a_sentence_with_a_code(
    tick: Run, arguments: tuple[str, ...], code: int, said: str
) -> None:
    found, out, err = tick(*arguments)
    assert (found, out) == (code, "")
    assert err.startswith("error: ")
    assert said in err
    assert "Traceback" not in err


def test_what_is_typed_wrongly_exits_with_2(tick: Run) -> None:
    assert tick("nonsense")[0] == 2
    assert tick("run", "create")[0] == 2
    assert tick("schedule", "list", "--limit", "0")[0] == 2


def test_a_cluster_that_is_not_there_is_said_with_what_to_do(
    tick: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tickwheel.cli.options.RETRY_S_MAX", 0.2)
    code, _, err = tick("health", "--address", "127.0.0.1:1")
    assert code == 1
    assert "tickwheel up" in err


def test_a_cluster_without_timers_is_not_well(tick: Run) -> None:
    code, out, _ = tick("health")
    assert code == 1
    assert "No timer is running" in out


def test_help_names_every_command_without_importing_it(tick: Run) -> None:
    code, out, _ = tick("--help")
    assert code == 0
    for name in ("up", "migrate", "schedule", "run", "dead-letter", "cluster", "health", "trigger"):
        assert name in out


def test_looking_at_a_trigger_waits_for_no_grpc() -> None:
    code = (
        "import sys; sys.argv = ['tickwheel', 'trigger', 'next', '--cron', '0 9 * * *'];\n"
        "import tickwheel.cli\n"
        "try: tickwheel.cli.main()\n"
        "except SystemExit: pass\n"
        "print([name for name in ('grpc', 'numpy', 'psycopg') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_migrating_by_hand(tick: Run, api_cluster: Cluster) -> None:
    code, out, _ = tick("migrate", "--url", api_cluster.postgres_url)
    assert code == 0
    assert "the schema is" in out
    code, out, _ = tick("migrate", "--url", api_cluster.postgres_url, "--json")
    assert json.loads(out)["shard_count"] == 16
    assert tick("migrate", "--url", api_cluster.postgres_url, "--shard-count", "8")[0] == 2
    assert tick("migrate", "--url", "postgresql://127.0.0.1:1/x")[0] == 1


# --- up ---------------------------------------------------------------------------------------------------


def _up(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tickwheel.cli", "up", "--folder", str(folder), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"COLUMNS": "200"},
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _read_until(
    process: subprocess.Popen[str], wanted: Callable[[str], bool], timeout_s: float = 90
) -> list[str]:
    assert process.stdout is not None
    lines: list[str] = []
    deadline = time.monotonic() + timeout_s
    for line in process.stdout:
        lines.append(line)
        if wanted(line):
            return lines
        assert time.monotonic() < deadline, "".join(lines)
    raise AssertionError("it ended: " + "".join(lines))


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_up_fires_samples_survives_kill_9_and_keeps_its_data(short_folder: Path) -> None:
    folder, port = short_folder / "up", str(_free_port())
    process = _up(folder, "--port", port)
    try:
        greeting = "".join(_read_until(process, lambda line: "kill -9" in line))
        assert f"127.0.0.1:{port}" in greeting
        assert greeting.count("\n  ") >= 8, "addresses, and three commands to try"
        _read_until(process, lambda line: "SUCCEEDED  every-second" in line)
        victim = int(greeting.rpartition("kill -9 ")[2].split()[0])
        os.kill(victim, signal.SIGKILL)
        _read_until(process, lambda line: "timer-1 died" in line)
        _read_until(process, lambda line: "SUCCEEDED  every-second" in line)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
    password = (folder / "postgres" / "password").read_text()
    again = _up(folder, "--port", port, "--no-samples")
    try:
        _read_until(again, lambda line: "SUCCEEDED  every-second" in line)
        assert (folder / "postgres" / "password").read_text() == password
        again.terminate()
        assert again.wait(60) == 0
    finally:
        again.kill()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_up_ends_what_an_up_that_was_killed_left_running(short_folder: Path) -> None:
    folder, port = short_folder / "left", str(_free_port())
    killed = _up(folder, "--port", port)
    try:
        _read_until(killed, lambda line: "kill -9" in line)
    finally:
        killed.kill()
        killed.wait()
    again = _up(folder, "--port", port)
    try:
        _read_until(again, lambda line: "SUCCEEDED  every-second" in line)
        again.terminate()
        assert again.wait(60) == 0
    finally:
        again.kill()
    left = [pid for part in folder.rglob("*") if part.is_dir() for pid in processes_in(part)]
    assert left == []


@pytest.mark.timeout(120)
def test_up_says_in_a_sentence_why_it_cannot_start(short_folder: Path, api_cluster: Cluster) -> None:
    taken = api_cluster.api_addresses[0].rpartition(":")[2]
    busy = _up(short_folder / "busy", "--port", taken)
    out, _ = busy.communicate(timeout=60)
    assert busy.returncode == 1
    assert taken in out
    assert "Traceback" not in out
    (short_folder / "file").write_text("not a folder")
    unusable = _up(short_folder / "file", "--port", str(_free_port()))
    out, _ = unusable.communicate(timeout=60)
    assert unusable.returncode == 1
    assert "Traceback" not in out
    owned = _up(api_cluster.folder, "--port", str(_free_port()))
    out, _ = owned.communicate(timeout=60)
    assert owned.returncode == 1
    assert "in use" in out
