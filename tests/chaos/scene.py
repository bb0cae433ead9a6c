"""One experiment: a cluster of real processes, its clients, and everything that is needed to judge it.

    with Scene(folder, timers=2) as scene:
        with scene.load(run_rate=300):
            scene.cluster["timer-1"].kill9()
        scene.judge()

Faults on workers go through the scene, so that the judge knows when a process could not run.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psycopg
from tests.chaos import evidence
from tests.chaos.handlers import FOLDER_VARIABLE
from tests.chaos.history import FOREVER_US, Absence, Complaint, Event, History, Sighting, judge
from tests.chaos.load import EDGE_US, LEASE_MS, Clients, Load, wall_us
from tests.chaos.proxy import TcpProxy

import tickwheel
from tickwheel.embedded.cluster import Cluster, Service
from tickwheel.embedded.member import Member

TOP = Path(tickwheel.__file__).resolve().parents[2]
HANDLERS = "tests.chaos.handlers"
POLL_S = 0.05
STANDSTILL_S = 1.0
"""A machine that does not let a thread run for so long cannot keep times."""

ETCD_LEASE_TTL_MS = 2_000
SHORT_LEASES = {
    "attempt_lease_ttl_ms": str(LEASE_MS),
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
    """Waits for real processes to bring something about; gives how many seconds it took.

    A time in which the whole machine stood still does not count.
    """
    began = last = time.monotonic()
    lived = 0.0
    while not predicate():
        assert lived < seconds, f"not within {seconds} s: {what}"
        time.sleep(POLL_S)
        last, before = time.monotonic(), last
        lived += min(last - before, STANDSTILL_S)
    return time.monotonic() - began


class StandstillWatch:
    """Notices when the machine stands still: a virtual one that is suspended, or starved of its cores."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        """Since it was set to 0."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="chaos-standstill", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        last = boot_us()
        while not self._stop.wait(POLL_S):
            now = boot_us()
            self.longest_s = max(self.longest_s, (now - last) / 1e6)
            last = now


class HistoryBroken(AssertionError):
    """A promise was broken. No standstill of the machine excuses that."""


class Scene:
    """A cluster with the handlers of the tests, started on entering, stopped on leaving.

    timer_settings: beside SHORT_LEASES. worker_proxy: workers reach the first timer through `worker_proxy`;
    postgres_proxy: timers reach Postgres through `postgres_proxy`. fence_is_broken: a build to be found out.
    """

    def __init__(
        self,
        folder: Path,
        *,
        coordinators: int = 1,
        timers: int = 2,
        workers: int = 1,
        timer_settings: Mapping[str, str] | None = None,
        worker_settings: Mapping[str, str] | None = None,
        postgres_bin_folder: Path | None = None,
        worker_proxy: bool = False,
        postgres_proxy: bool = False,
        fence_is_broken: bool = False,
    ) -> None:
        self.folder = folder
        self.diaries = folder / "diaries"
        self._diaries = evidence.Diaries(self.diaries)
        self._counts: dict[Service, int] = {"timer": timers, "coordinator": coordinators, "worker": workers}
        self._timer_settings = SHORT_LEASES | dict(timer_settings or {})
        service_settings: dict[Service, Mapping[str, str]] = {
            "coordinator": {key: SHORT_LEASES[key] for key in ("etcd_lease_ttl_ms", "etcd_call_timeout_ms")},
            "worker": dict(worker_settings or {}),
        }
        self.cluster = Cluster(
            folder,
            coordinators=0,
            timers=0,
            workers=0,
            service_settings=service_settings,
            worker_modules=(HANDLERS,),
            postgres_bin_folder=postgres_bin_folder,
        )
        self.worker_proxy = TcpProxy(lambda: ("127.0.0.1", self.cluster["timer-1"].port or 0))
        self.postgres_proxy = TcpProxy(lambda: ("127.0.0.1", self.cluster.postgres.port))
        self._use_worker_proxy = worker_proxy
        self._use_postgres_proxy = postgres_proxy
        self.absences: list[Absence] = []
        self._known: set[Complaint] = set()
        self._fence_is_broken = fence_is_broken
        self._connection: psycopg.Connection[Any] | None = None
        self.clients: Clients

    def __enter__(self) -> Self:
        self.diaries.mkdir(parents=True)
        with ExitStack() as stack:
            stack.enter_context(self.worker_proxy)
            stack.enter_context(self.postgres_proxy)
            stack.callback(self.cluster.stop)
            self.cluster.start_stores()
            evidence.install_witness(self.sql)
            if self._fence_is_broken:
                evidence.break_the_fence(self.sql)
            # Timers first: the leader then finds all of them when it assigns shards for the first time.
            for service, count in self._counts.items():
                for _ in range(count):
                    self.add(service).start(wait=service == "coordinator")
            self.clients = Clients(self.cluster.api_addresses, self.decided_us)
            stack.callback(self.clients.close)
            self.wait_served()
            self._stack = stack.pop_all()
        return self

    def add(self, service: Service, **settings: str) -> Member:
        """One more process, not started yet."""
        if service == "timer":
            settings = self._timer_settings | settings
            if self._use_postgres_proxy:
                direct, through = f":{self.cluster.postgres.port}/", f":{self.postgres_proxy.port}/"
                settings["postgres_url"] = self.cluster.postgres_url.replace(direct, through)
            if self._use_worker_proxy:
                settings["external_address"] = self.worker_proxy.address
        member = self.cluster.add(service, **settings)
        member.environment[FOLDER_VARIABLE] = str(self.diaries)
        member.environment["PYTHONPATH"] = os.pathsep.join((str(TOP), str(TOP / "libs")))
        return member

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._connection is not None:
            self._connection.close()
        self._stack.close()

    def recover(self, seconds: float = 30.0) -> None:
        """Mends everything, for the next test."""
        self.worker_proxy.hold()
        self.postgres_proxy.cut = lambda head, piece: None
        self.cluster.postgres.start()
        self.cluster.etcd.start()
        for member in self.cluster.members.values():
            member.resume()
            member.start()
        self.wait_served(seconds)
        # Those of a test that failed on its way.
        self.stop_schedules()

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

    def worker_at(self, pid: int) -> Member:
        """The worker process with this pid."""
        return next(member for member in self.cluster.of("worker") if member.pid == pid)

    def epochs(self) -> dict[int, int]:
        return dict(self.rows("SELECT shard_id, epoch FROM shard"))

    def wait_served(self, seconds: float = 30.0) -> None:
        """Until each timer that runs owns shards, and each worker has had a stream to each."""
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
        found = [
            seen for seen in self._diaries.read() if event in (None, seen.event) and run in (None, seen.run)
        ]
        return sorted(found, key=lambda seen: seen.boot_us)

    def wait_sighted(self, event: Event, run: str, seconds: float, attempt: int = 1) -> Sighting:
        """Until a worker has seen this of the run's attempt."""
        found: list[Sighting] = []

        def looked() -> bool:
            found[:] = [seen for seen in self.sightings(event, run) if seen.attempt == attempt]
            return bool(found)

        until(looked, seconds, f"attempt {attempt} of run {run} is {event.value}")
        return found[0]

    def wait_all_sighted(self, event: Event, runs: Sequence[str], seconds: float) -> None:
        """Until a worker has seen this of each of the runs."""
        wanted = set(runs)
        until(
            lambda: wanted <= {seen.run for seen in self._diaries.read() if seen.event is event},
            seconds,
            f"{len(runs)} runs are {event.value}",
        )

    # Faults of workers, of which the judge has to know.

    def kill_worker(self, name: str) -> None:
        pid = self.cluster[name].pid
        assert pid is not None, f"{name} does not run"
        self.cluster[name].kill9()
        self.absences.append(Absence(pid, boot_us(), FOREVER_US))

    def note_death(self, pid: int, at_us: int) -> None:
        """A worker process ended by itself."""
        self.absences.append(Absence(pid, at_us, FOREVER_US))

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
        """Deletes what still fires, so that the end comes; first lets it catch up, since what is deleted
        while it is overdue is gone without a word."""
        overdue = "SELECT NOT EXISTS (SELECT FROM timer WHERE kind = 1 AND due_us < %s)"
        until(lambda: self.rows(overdue, wall_us() - EDGE_US // 2) == [(True,)], 30, "schedules catch up")
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
        history.sightings = self.sightings()
        return history

    def judge(self, settle_seconds: float = 30.0) -> History:
        """Lets everything end, and fails with what the judge complains about."""
        self.stop_schedules()
        self.settle(settle_seconds)
        history = self.history()
        # What was complained about once is not held against the tests that follow.
        complaints = [each for each in judge(history) if each not in self._known]
        self._known.update(complaints)
        if complaints:
            raise HistoryBroken("\n".join(map(str, complaints)))
        assert history.writes, "the witness saw no grant: it was asleep"
        return history
