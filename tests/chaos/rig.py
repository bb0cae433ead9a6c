"""The fence rig: owners and coordinators as processes, one Postgres, and faults that a seed has planned.

Owners reach Postgres through a `Wire` that can be cut, delayed, or stop its owner when the next message goes
by, so that calls are met in the middle. What was committed is judged afterwards (`fence_ledger.judge`).
A seed fixes the plan, the choices of every process, and which transactions are slow; the machine's own timing
stays its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import psycopg
from tests.chaos import fence_ledger
from tests.chaos.fence_ledger import PERIOD_US, Verdict
from tests.chaos.fence_owner import SHARDS

OWNERS = ("owner-a", "owner-b", "owner-c")
COORDINATORS = ("coordinator-a", "coordinator-b")
SCHEDULES_PER_SHARD = 8
START_SECONDS = 60.0
GRACE_SECONDS = 10.0
ROOT = Path(__file__).resolve().parents[2]

_SCHEDULES = """
INSERT INTO timer (due_us, schedule_us, decided_us, version, trigger_id, template_id, ref, tenant_id,
                   route_id, flags, misfire_ms, countdown, shard_id, kind, priority, attempt)
SELECT %(period)s, %(period)s, 0, 1, 7, 8, gen_random_uuid(), 1, 1, 1, 60000, -1, n %% %(shards)s, 1, 0, 0
  FROM generate_series(1, %(count)s) AS n"""


@dataclass(frozen=True, slots=True)
class Fault:
    """At `at_ms`, `kind` happens to `target`, for `ms` where it lasts."""

    at_ms: int
    kind: str
    target: str
    ms: int


OWNER_FAULTS = ("freeze", "freeze_in_call", "cut", "cut_in_call", "delay_call", "terminate", "terminate_lane")
COORDINATOR_FAULTS = ("freeze", "terminate")


def plan(seed: int, seconds: float) -> list[Fault]:
    """The same faults for the same seed."""
    random = Random(seed)
    faults = []
    at_ms = 500
    while at_ms < seconds * 1_000:
        if random.random() < 0.8:
            kind, target = random.choice(OWNER_FAULTS), random.choice(OWNERS)
        else:
            kind, target = random.choice(COORDINATOR_FAULTS), random.choice(COORDINATORS)
        faults.append(Fault(at_ms, kind, target, random.choice((50, 200, 200, 800, 1_500))))
        at_ms += random.randint(20, 250)
    return faults


class Wire:
    """A TCP proxy of one owner's connections."""

    def __init__(self, upstream_port: int) -> None:
        self._upstream_port = upstream_port
        self._ends: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0
        self.next_call: Any = None
        """What happens when the next message of the client comes by: an async function of no arguments that
        returns whether to cut the connection once the message is passed on."""

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._upstream_port)
        except OSError:
            writer.close()
            return
        pair = {writer, up_writer}
        self._ends |= pair
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, up_writer, pair, from_client=True))
                group.create_task(self._pump(up_reader, writer, pair, from_client=False))
        except* OSError:
            pass
        finally:
            self._ends -= pair
            for end in pair:
                end.close()

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        pair: set[asyncio.StreamWriter],
        *,
        from_client: bool,
    ) -> None:
        while data := await reader.read(1 << 16):
            cut = False
            if from_client and self.next_call is not None:
                act, self.next_call = self.next_call, None
                cut = await act()
            writer.write(data)
            await writer.drain()
            if cut:
                break
        for end in pair:
            end.close()

    def cut(self) -> None:
        for end in list(self._ends):
            end.transport.abort()

    async def stop(self) -> None:
        self.next_call = None
        self.cut()
        self._server.close()
        await self._server.wait_closed()


class Rig:
    """One run over one database that is migrated and nobody else's."""

    def __init__(self, url: str, folder: Path, seed: int, broken_fence: str | None = None) -> None:
        self.url = url
        self.folder = folder
        self.seed = seed
        self.broken_fence = broken_fence
        self.done: Counter[str] = Counter()
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._wires: dict[str, Wire] = {}
        self._waking: set[asyncio.TimerHandle] = set()

    def prepare(self) -> None:
        with psycopg.connect(self.url, autocommit=True) as connection:
            count = SCHEDULES_PER_SHARD * len(SHARDS)
            connection.execute(
                _SCHEDULES.encode(), {"period": PERIOD_US, "shards": len(SHARDS), "count": count}
            )
            fence_ledger.install(connection, self.seed, 4 if self.broken_fence is None else 2)
            if self.broken_fence is not None:
                connection.execute(self.broken_fence.encode())

    async def run(self, seconds: float) -> Verdict:
        await asyncio.to_thread(self.prepare)
        async with self._everybody():
            started = asyncio.get_running_loop().time()
            for fault in plan(self.seed, seconds):
                await asyncio.sleep(started + fault.at_ms / 1_000 - asyncio.get_running_loop().time())
                await self._inflict(fault)
        return await asyncio.to_thread(self._judge)

    @contextlib.asynccontextmanager
    async def _everybody(self) -> AsyncIterator[None]:
        port = psycopg.conninfo.conninfo_to_dict(self.url)["port"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "libs"), str(ROOT)])}
        try:
            for name in OWNERS:
                self._wires[name] = Wire(int(str(port)))
                await self._wires[name].start()
                url = psycopg.conninfo.make_conninfo(self.url, port=self._wires[name].port)
                history = self.folder / f"{name}.jsonl"
                await self._start(name, "fence_owner", [url, name, str(self.seed), str(history)], environment)
            for name in COORDINATORS:
                await self._start(name, "fence_coordinator", [self.url, name, str(self.seed)], environment)
            async with asyncio.timeout(START_SECONDS):
                while not all((self.folder / f"{name}.jsonl").exists() for name in OWNERS):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            yield
        finally:
            await self._stop()

    async def _start(self, name: str, module: str, arguments: list[str], environment: dict[str, str]) -> None:
        self._processes[name] = await asyncio.create_subprocess_exec(
            sys.executable, "-m", f"tests.chaos.{module}", *arguments, env=environment, cwd=ROOT
        )

    async def _stop(self) -> None:
        """Lets everybody end what they are at; what does not is killed. Then waits for the last backend."""
        for handle in self._waking:
            handle.cancel()
        for name, process in self._processes.items():
            self._signal(name, signal.SIGCONT)
            if process.returncode is None:
                process.terminate()
        for process in self._processes.values():
            try:
                async with asyncio.timeout(GRACE_SECONDS):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
        for wire in self._wires.values():
            await wire.stop()
        await asyncio.to_thread(self._wait_for_backends)

    def _wait_for_backends(self) -> None:
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )

    # Faults.

    def _signal(self, name: str, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._processes[name].send_signal(number)

    def _freeze(self, name: str, ms: int) -> None:
        self._signal(name, signal.SIGSTOP)
        loop = asyncio.get_running_loop()
        self._waking.add(loop.call_later(ms / 1_000, self._signal, name, signal.SIGCONT))

    async def _inflict(self, fault: Fault) -> None:
        self.done[fault.kind] += 1
        wire = self._wires.get(fault.target)
        if fault.kind == "freeze":
            self._freeze(fault.target, fault.ms)
        elif fault.kind in ("terminate", "terminate_lane"):
            await asyncio.to_thread(self._terminate, fault)
        elif wire is None:
            raise AssertionError(f"{fault.kind} is for owners")
        elif fault.kind == "cut":
            wire.cut()
        else:
            wire.next_call = lambda: self._in_call(fault)

    async def _in_call(self, fault: Fault) -> bool:
        if fault.kind == "freeze_in_call":
            self._freeze(fault.target, fault.ms)
        elif fault.kind == "delay_call":
            await asyncio.sleep(fault.ms / 1_000)
        return fault.kind == "cut_in_call"

    def _terminate(self, fault: Fault) -> None:
        pattern = fault.target + (" lane%" if fault.kind == "terminate_lane" else "%")
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE %s",
                [pattern],
            )

    # The judgement.

    def _judge(self) -> Verdict:
        history: list[dict[str, Any]] = []
        for name in OWNERS:
            lines = (self.folder / f"{name}.jsonl").read_text().splitlines()
            history += [json.loads(line) for line in lines]
        with psycopg.connect(self.url, autocommit=True) as connection:
            verdict = fence_ledger.judge(fence_ledger.read(connection), history)
        for name, process in self._processes.items():
            if process.returncode not in (0, -signal.SIGTERM, -signal.SIGKILL):
                verdict.violations.append(f"{name} ended with {process.returncode}")
        return verdict
