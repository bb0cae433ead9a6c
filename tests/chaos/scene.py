"""One experiment: a cluster of real processes, its clients, and everything that is needed to judge it.

    with Scene(folder, timers=2) as scene, scene.load(run_rate=300):
        scene.cluster["timer-1"].kill9()
    scene.judge()

Faults on workers go through the scene, so that the judge knows when a process could not run.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psycopg
from tests.chaos import evidence
from tests.chaos.handlers import FOLDER_VARIABLE
from tests.chaos.history import FOREVER_US, Absence, Event, History, Sighting, judge
from tests.chaos.load import Clients, Load, wall_us

import tickwheel
from tickwheel.embedded.cluster import Cluster, Service
from tickwheel.embedded.member import Member

TOP = Path(tickwheel.__file__).resolve().parents[2]
HANDLERS = "tests.chaos.handlers"
POLL_S = 0.05

ATTEMPT_LEASE_TTL_MS = 4_000
ETCD_LEASE_TTL_MS = 2_000
SHORT_LEASES = {
    "attempt_lease_ttl_ms": str(ATTEMPT_LEASE_TTL_MS),
    "heartbeat_interval_ms": "1000",
    "etcd_lease_ttl_ms": str(ETCD_LEASE_TTL_MS),
    "etcd_call_timeout_ms": "800",
    "takeover_ms_max": "1500",
    "seen_interval_ms": "500",
}
"""As short as the relations between the settings allow, so that tests wait less."""


def boot_us() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000


def until(predicate: Callable[[], bool], seconds: float, what: str) -> float:
    """Waits for real processes to bring something about; gives how many seconds it took."""
    began = time.monotonic()
    while not predicate():
        assert time.monotonic() - began < seconds, f"not within {seconds} s: {what}"
        time.sleep(POLL_S)
    return time.monotonic() - began


class Scene:
    """A cluster with the handlers of the tests, started on entering, stopped on leaving.

    settings: of every process; those of SHORT_LEASES apply to timers where nothing else is said.
    """

    def __init__(
        self,
        folder: Path,
        *,
        coordinators: int = 1,
        timers: int = 2,
        workers: int = 1,
        settings: Mapping[str, str] | None = None,
        timer_settings: Mapping[str, str] | None = None,
        worker_settings: Mapping[str, str] | None = None,
        postgres_bin_folder: Path | None = None,
        fence_is_broken: bool = False,
    ) -> None:
        self.folder = folder
        self.diaries = folder / "diaries"
        service_settings: dict[Service, Mapping[str, str]] = {
            "coordinator": {key: SHORT_LEASES[key] for key in ("etcd_lease_ttl_ms", "etcd_call_timeout_ms")},
            "timer": SHORT_LEASES | dict(timer_settings or {}),
            "worker": dict(worker_settings or {}),
        }
        self.cluster = Cluster(
            folder,
            coordinators=coordinators,
            timers=timers,
            workers=workers,
            settings=settings,
            service_settings=service_settings,
            worker_modules=(HANDLERS,),
            postgres_bin_folder=postgres_bin_folder,
        )
        self.absences: list[Absence] = []
        self._frozen: dict[str, tuple[int, int]] = {}
        self._fence_is_broken = fence_is_broken
        self._connection: psycopg.Connection[Any] | None = None
        self.clients: Clients

    def __enter__(self) -> Self:
        self.diaries.mkdir(parents=True)
        before = {name: os.environ.get(name) for name in (FOLDER_VARIABLE, "PYTHONPATH")}
        os.environ[FOLDER_VARIABLE] = str(self.diaries)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(TOP), before["PYTHONPATH"])))
        try:
            self.cluster.start_stores()
            evidence.install_witness(self.sql)
            self.cluster.start()
            if self._fence_is_broken:
                # Last: every start puts the functions in place again.
                evidence.break_the_fence(self.sql)
        finally:
            # Members that are started later take them from here, so they stand until the end.
            self._before = before
        self.clients = Clients(self.cluster.api_addresses, self.decided_us)
        try:
            self.wait_served()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self.clients.close()
        if self._connection is not None:
            self._connection.close()
        self.cluster.stop()
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    @property
    def sql(self) -> psycopg.Connection[Any]:
        """A connection of our own, made anew where Postgres was restarted under it."""
        if self._connection is None or self._connection.closed or self._connection.broken:
            self._connection = psycopg.connect(
                self.cluster.postgres_url, autocommit=True, application_name="chaos"
            )
        return self._connection

    def load(self, **options: Any) -> Load:
        return Load(self.clients, **options)

    # What is so.

    def rows(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Asked again where the connection had died meanwhile."""
        for _ in range(20):
            try:
                return self.sql.execute(statement, parameters).fetchall()
            except psycopg.OperationalError:
                self._connection = None
                time.sleep(0.2)
        return self.sql.execute(statement, parameters).fetchall()

    def decided_us(self, uid: str) -> int:
        return int(self.rows("SELECT decided_us FROM timer WHERE ref = %s::uuid", uid)[0][0])

    def owners(self) -> dict[int, str]:
        """Shard → node name of its owner, by the fence."""
        return {
            shard: owner.rpartition("-")[0] for shard, owner in self.rows("SELECT shard_id, owner FROM shard")
        }

    def epochs(self) -> dict[int, int]:
        return dict(self.rows("SELECT shard_id, epoch FROM shard"))

    def wait_served(self, seconds: float = 30.0) -> None:
        """Until every shard has an owner, each timer some shards, and each worker a stream to each timer."""
        names = {member.name for member in self.cluster.of("timer") if member.alive}
        until(lambda: set(self.owners().values()) == names, seconds, "every timer owns shards")
        for member in self.cluster.of("worker"):
            if member.alive:
                until(lambda: self.log_count(member, "stream_welcomed") >= len(names), seconds, "streams")  # noqa: B023

    def log_lines(self, member: Member, event: str) -> list[dict[str, Any]]:
        """The lines of a member's log with this event name, of all its starts."""
        found = []
        for line in member.log.read_text(errors="replace").splitlines():
            if event in line and line.startswith("{"):
                fields = json.loads(line)
                if fields.get("event") == event:
                    found.append(fields)
        return found

    def log_count(self, member: Member, event: str) -> int:
        return len(self.log_lines(member, event))

    def sightings(self, event: Event | None = None, run: str | None = None) -> list[Sighting]:
        return [
            seen
            for seen in evidence.read_sightings(self.diaries)
            if event in (None, seen.event) and run in (None, seen.run)
        ]

    def wait_sighted(self, event: Event, run: str, seconds: float, attempt: int = 1) -> Sighting:
        """Until a worker has seen this of the run's attempt."""
        found: list[Sighting] = []

        def looked() -> bool:
            found[:] = [seen for seen in self.sightings(event, run) if seen.attempt == attempt]
            return bool(found)

        until(looked, seconds, f"attempt {attempt} of run {run} is {event.value}")
        return found[0]

    # Faults of workers, of which the judge has to know.

    def kill_worker(self, name: str) -> None:
        pid = self.cluster[name].pid
        assert pid is not None, f"{name} does not run"
        self.cluster[name].kill9()
        self.absences.append(Absence(pid, boot_us(), FOREVER_US))

    def note_death(self, pid: int) -> None:
        """A worker process ended by itself."""
        self.absences.append(Absence(pid, boot_us(), FOREVER_US))

    @contextmanager
    def frozen_worker(self, name: str) -> Iterator[None]:
        """SIGSTOP for the length of the block."""
        pid = self.cluster[name].pid
        assert pid is not None, f"{name} does not run"
        began_us = boot_us()
        self.cluster[name].pause()
        try:
            yield
        finally:
            self.absences.append(Absence(pid, began_us, boot_us()))
            self.cluster[name].resume()

    # The end.

    def settle(self, seconds: float = 30.0) -> float:
        """Waits until nothing is leased and nothing waits that is due within a minute; gives how long that
        took."""

        def settled() -> bool:
            return self.rows(
                "SELECT NOT EXISTS (SELECT FROM timer WHERE due_us < %s) AND NOT EXISTS (SELECT FROM lease)",
                wall_us() + 60_000_000,
            ) == [(True,)]

        return until(settled, seconds, "everything drains")

    def stop_schedules(self) -> None:
        """Deletes what still fires, so that the end comes."""
        for name, standing in list(self.clients._standing.items()):
            if standing.paused_at is not None:
                self.clients.resume(name)
            self.clients.delete(name)

    def history(self, *, is_settled: bool = True) -> History:
        """Everything that is known by now."""
        acknowledged = self.clients.finish()
        with self.sql.transaction():
            # One snapshot for all tables: else a run moves between two reads.
            self.sql.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
            history = evidence.read_rows(self.sql)
        history.absences = list(self.absences)
        history.acknowledged = acknowledged
        history.is_settled = is_settled
        history.read_us = wall_us()
        history.sightings = evidence.read_sightings(self.diaries)
        return history

    def judge(self, settle_seconds: float = 30.0) -> History:
        """Lets everything end, and fails with what the judge complains about."""
        self.stop_schedules()
        self.settle(settle_seconds)
        history = self.history()
        complaints = judge(history)
        assert not complaints, "\n".join(map(str, complaints))
        assert history.writes, "the witness saw no grant: it was asleep"
        return history
