"""How a process ends: in order, in time, with the right code. Each test runs a real one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

PRELUDE = """
import asyncio, sys, threading, time
from opentelemetry import trace
from tickwheel.errors import TickwheelError
from tickwheel.runtime.config import WorkerSettings, load_settings
from tickwheel.runtime.process import Phase, Process, run_process

def say(text):
    print(text, flush=True)

def step(text, seconds=0.0):
    async def run():
        say(text)
        await asyncio.sleep(seconds)
    return run

async def for_ever():
    await asyncio.Event().wait()
"""
ENDING = """
sys.exit(run_process(load_settings(WorkerSettings, log_format="json", **SETTINGS), serve))
"""


class Program:
    """A process under test: what it says on standard output, one line at a time, and its log."""

    def __init__(self, body: str, **settings: object) -> None:
        source = PRELUDE + f"SETTINGS = {settings!r}\n" + textwrap.dedent(body) + ENDING
        env = {key: value for key, value in os.environ.items() if not key.startswith("TICKWHEEL_")}
        self.child = subprocess.Popen(
            [sys.executable, "-c", source],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**env, "PYTHONPATH": os.pathsep.join(sys.path)},
        )

    def wait_for(self, line: str) -> None:
        assert self.child.stdout is not None
        assert self.child.stdout.readline().strip() == line

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.child.send_signal(number)

    def end(self) -> tuple[int, list[str], list[dict[str, Any]]]:
        """Exit code, what else it said, its log."""
        said, logged = self.child.communicate(timeout=30)
        return self.child.returncode, said.splitlines(), [json.loads(line) for line in logged.splitlines()]


@pytest.fixture
def programs() -> Iterator[list[Program]]:
    started: list[Program] = []
    yield started
    for program in started:
        program.child.kill()
        program.child.communicate()


def start(programs: list[Program], body: str, **settings: object) -> Program:
    programs.append(Program(body, **settings))
    return programs[-1]


ALL_PHASES = """
async def serve(process):
    for phase in reversed(Phase):
        process.on_stop(phase, "first", step(f"{phase.name} 1"))
        process.on_stop(phase, "second", step(f"{phase.name} 2"))
    process.spawn(for_ever(), "work")
    say("ready")
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_in_the_documented_order(programs: list[Program], number: signal.Signals) -> None:
    program = start(programs, ALL_PHASES)
    program.wait_for("ready")
    program.signal(number)
    code, said, _ = program.end()
    assert code == 0
    phases = ("STOP_TAKING", "DRAIN", "RELEASE", "CLOSE")
    assert said == [f"{phase} {number}" for phase in phases for number in (2, 1)]


def test_a_second_signal_ends_the_draining(programs: list[Program]) -> None:
    body = """
    async def serve(process):
        process.on_stop(Phase.DRAIN, "slow", step("draining", 25))
        process.on_stop(Phase.RELEASE, "leases", step("released"))
        say("ready")
    """
    program = start(programs, body, drain_timeout_ms=25_000)
    program.wait_for("ready")
    program.signal()
    program.wait_for("draining")
    started = time.monotonic()
    program.signal()
    code, said, _ = program.end()
    assert (code, said) == (0, ["released"])
    assert time.monotonic() - started < 5


def test_a_third_signal_ends_it_at_once(programs: list[Program]) -> None:
    body = """
    async def serve(process):
        process.on_stop(Phase.RELEASE, "slow", step("releasing", 25))
        say("ready")
    """
    program = start(programs, body, exit_timeout_ms=25_000)
    program.wait_for("ready")
    program.signal()
    program.wait_for("releasing")
    program.signal()
    time_limit = time.monotonic() + 10
    while program.child.poll() is None and time.monotonic() < time_limit:
        program.signal(signal.SIGINT)
    assert program.end()[0] in (128 + signal.SIGINT, 128 + signal.SIGTERM)


def test_a_step_that_fails_or_hangs_does_not_keep_the_next_from_its_turn(programs: list[Program]) -> None:
    body = """
    async def hang():
        say("hanging")
        while True:
            try:
                await for_ever()
            except asyncio.CancelledError:
                pass

    async def fail():
        raise ValueError("no")

    async def serve(process):
        process.on_stop(Phase.CLOSE, "last", step("closed"))
        process.on_stop(Phase.RELEASE, "leases", step("released"))
        process.on_stop(Phase.RELEASE, "failing", fail)
        process.on_stop(Phase.DRAIN, "hanging", hang)
        say("ready")
    """
    program = start(programs, body, drain_timeout_ms=100, exit_timeout_ms=500)
    program.wait_for("ready")
    program.signal()
    code, said, logged = program.end()
    assert said == ["hanging", "released", "closed"]
    assert code == 70, "a task that swallows its cancellation keeps the loop from closing"
    events = {line["event"] for line in logged}
    assert {"stop_step_late", "stop_step_failed"} <= events


def test_a_part_that_fails_ends_the_process_after_releasing(programs: list[Program]) -> None:
    body = """
    async def work():
        raise RuntimeError("the part broke")

    async def serve(process):
        process.on_stop(Phase.DRAIN, "drain", step("drained", 30))
        process.on_stop(Phase.RELEASE, "leases", step("released"))
        process.spawn(work(), "loader")
    """
    code, said, logged = start(programs, body, drain_timeout_ms=60_000).end()
    assert code == 1
    assert said[-1:] == ["released"]
    (failure,) = (line for line in logged if line["event"] == "part_failed")
    assert failure["part"] == "loader"
    assert failure["exception"][0]["exc_value"] == "the part broke"


def test_what_cannot_start_says_why_in_one_sentence(programs: list[Program]) -> None:
    body = """
    async def serve(process):
        process.on_stop(Phase.CLOSE, "pool", step("closed"))
        raise TickwheelError("the port is busy: choose another")
    """
    code, said, logged = start(programs, body).end()
    assert (code, said) == (2, ["closed"])
    (failure,) = (line for line in logged if line["level"] == "error")
    assert (failure["event"], failure["reason"]) == ("cannot_start", "the port is busy: choose another")
    assert "exception" not in failure


def test_a_signal_during_the_start_ends_it(programs: list[Program]) -> None:
    body = """
    async def serve(process):
        process.on_stop(Phase.CLOSE, "pool", step("closed"))
        say("starting")
        await for_ever()
    """
    program = start(programs, body)
    program.wait_for("starting")
    program.signal()
    assert program.end()[:2] == (0, ["closed"])


def test_a_thread_that_blocks_does_not_keep_it_alive(programs: list[Program]) -> None:
    body = """
    async def serve(process):
        asyncio.get_running_loop().run_in_executor(None, time.sleep, 60)
        say("ready")
    """
    program = start(programs, body, exit_timeout_ms=300)
    program.wait_for("ready")
    started = time.monotonic()
    program.signal()
    assert program.end()[0] == 70
    assert time.monotonic() - started < 5


def test_a_collector_that_is_away_keeps_neither_leases_nor_the_process(programs: list[Program]) -> None:
    body = """
    async def serve(process):
        async def release():
            say(f"released {time.monotonic()}")
        process.on_stop(Phase.RELEASE, "leases", release)
        for _ in range(500):
            trace.get_tracer("test").start_span("fire").end()
        say("ready")
    """
    program = start(programs, body, otlp_endpoint="http://127.0.0.1:9", trace_sample_ratio=1.0)
    program.wait_for("ready")
    started = time.monotonic()
    program.signal()
    code, said, _ = program.end()
    assert time.monotonic() - started <= 5
    assert code == 0
    assert float(said[0].removeprefix("released ")) - started < 1


def healthz(port: int) -> tuple[int, dict[str, str]]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=5) as answer:
            return answer.status, json.loads(answer.read())["problems"]
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())["problems"]


def test_a_stuck_loop_is_not_healthy_and_recovers(programs: list[Program]) -> None:
    body = """
    async def serve(process):
        async def obey():
            while True:
                line = await asyncio.to_thread(sys.stdin.readline)
                say("stuck")
                sys.stdin.readline()
                say("free")
        say(process.metrics_port)
        process.spawn(obey(), "obey")
    """
    program = start(programs, body, metrics_port=0, loop_lag_stuck_ms=300)
    assert program.child.stdin is not None
    assert program.child.stdout is not None
    port = int(program.child.stdout.readline())
    assert _eventually(lambda: healthz(port)[0] == 200)
    program.child.stdin.write("\n")
    program.child.stdin.flush()
    program.wait_for("stuck")
    assert _eventually(lambda: "loop" in healthz(port)[1])
    program.child.stdin.write("\n")
    program.child.stdin.flush()
    program.wait_for("free")
    assert _eventually(lambda: healthz(port)[0] == 200)


def _eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if condition():
            return True
    return False
