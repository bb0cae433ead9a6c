"""A whole cluster on this machine: Postgres, etcd, and our processes, in one folder.

    with Cluster("/tmp/tw", timers=2) as cluster:
        cluster["timer-1"].kill9()
        cluster["timer-1"].start()

Every part keeps its port and its data for as long as the folder lives, so clients find their way back
after any restart. Members are named `coordinator-1`, `timer-1`, `worker-1` and so on. Logs:
`<folder>/<name>/log`.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from tickwheel.embedded.etcd import EmbeddedEtcd
from tickwheel.embedded.folder import Folder, free_port, processes_in, require_free_port, signal_process
from tickwheel.embedded.member import LEFTOVER_SECONDS_MAX, Member
from tickwheel.embedded.postgres import EmbeddedPostgres
from tickwheel.postgres.migrate import migrate

DATABASE = "tickwheel"
SHARD_COUNT_DEFAULT = 16
"""A cluster on one machine moves faster with few; a real one has 256."""

Service = Literal["coordinator", "timer", "worker"]
SERVICES: tuple[Service, ...] = ("coordinator", "timer", "worker")


class Cluster:
    """Not safe for use by several threads at once.

    `settings` are settings of ours for every process (`attempt_lease_ttl_ms="4000"`), `service_settings`
    for those of one service; `api_port` is the first coordinator's (None: any free one).
    `postgres_bin_folder`: of another Postgres than the wheel's. As a context manager it starts, and stops
    whatever happens.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        coordinators: int = 1,
        timers: int = 2,
        workers: int = 1,
        shard_count: int = SHARD_COUNT_DEFAULT,
        settings: Mapping[str, str] | None = None,
        service_settings: Mapping[Service, Mapping[str, str]] | None = None,
        worker_modules: tuple[str, ...] = (),
        api_port: int | None = None,
        postgres_bin_folder: Path | None = None,
        postgres_settings: Mapping[str, str | int] | None = None,
    ) -> None:
        self._folder = Folder(folder)
        self._counts: dict[Service, int] = {"coordinator": coordinators, "timer": timers, "worker": workers}
        self._shard_count = shard_count
        self._settings = dict(settings or {})
        self._service_settings = {key: dict(value) for key, value in (service_settings or {}).items()}
        self._worker_modules = worker_modules
        self._api_port = api_port
        self.postgres = EmbeddedPostgres(
            self.folder / "postgres", bin_folder=postgres_bin_folder, settings=postgres_settings
        )
        self.etcd = EmbeddedEtcd(self.folder / "etcd")
        self.members: dict[str, Member] = {}

    @property
    def folder(self) -> Path:
        return self._folder.path

    @property
    def postgres_url(self) -> str:
        return self.postgres.url(DATABASE)

    @property
    def api_addresses(self) -> list[str]:
        """`host:port` of every coordinator."""
        return [member.address for member in self.of("coordinator")]

    def __getitem__(self, name: str) -> Member:
        return self.members[name]

    def of(self, service: Service) -> list[Member]:
        """The members of one service, in the order of their numbers."""
        return [member for name, member in self.members.items() if name.startswith(f"{service}-")]

    def start(self, *, wait: bool = True) -> Self:
        """Returns when everything is ready. What has stopped meanwhile is started again.

        Raises what EmbeddedPostgres, EmbeddedEtcd and Member raise to say why they cannot start.
        """
        self._folder.acquire()
        try:
            if not self.members:
                self._end_leftovers()
            if self._api_port is not None and not self.members:
                require_free_port("the API", self._api_port)
            self.start_stores()
            self._make_members()
            for service in SERVICES:
                for member in self.of(service):
                    member.start(wait=False)
                # A worker that finds no coordinator yet comes back by itself, but later.
                if wait or service == "coordinator":
                    for member in self.of(service):
                        member.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def _end_leftovers(self) -> None:
        """Members that an earlier owner of the folder left running: it was killed, and they went on."""
        folders = sorted(path for path in self.folder.glob("*-*") if path.is_dir())
        for path in folders:
            for pid in processes_in(path):
                signal_process(pid, signal.SIGTERM)
        for path in folders:
            leader = next(iter(processes_in(path)), None)
            Folder(path).end_leftovers(path, leader, (signal.SIGTERM,), LEFTOVER_SECONDS_MAX)

    def start_stores(self) -> None:
        """Postgres, migrated, and etcd."""
        self._folder.acquire()
        self.postgres.start()
        self.etcd.start()
        if not self.postgres.has_database(DATABASE):
            self.postgres.create_database(DATABASE)
            migrate(self.postgres_url, shard_count=self._shard_count)
        else:
            migrate(self.postgres_url)

    def stop(self) -> None:
        """Workers first, so that they hand back what they hold; the stores last."""
        with ExitStack() as stack:
            # In reverse order, and each whatever happens to the others.
            stack.callback(self._folder.release)
            stack.callback(self.etcd.stop)
            stack.callback(self.postgres.stop)
            for service in SERVICES:
                for member in self.of(service):
                    stack.callback(member.stop)
                for member in self.of(service):
                    stack.callback(member.terminate)

    def add(self, service: Service, **settings: str) -> Member:
        """One more process of a service, with settings of its own; not started yet."""
        number = 1 + max((int(name.rpartition("-")[2]) for name in self._names(service)), default=0)
        name = f"{service}-{number}"
        own = self._api_port if name == "coordinator-1" else None
        port = None if service == "worker" else own or free_port()
        health_port = free_port()
        values = {"node_name": name, "log_format": "json", "metrics_port": str(health_port)}
        if service == "worker":
            # Every coordinator that is known by now.
            values["coordinators"] = ",".join(self.api_addresses)
        else:
            values |= {
                "postgres_url": self.postgres_url,
                "etcd_endpoints": self.etcd.url,
                "listen_port": str(port),
            }
        if service == "coordinator":
            values["shard_count"] = str(self._shard_count)
        values |= self._settings | self._service_settings.get(service, {}) | settings
        member = Member(
            name,
            service,
            self.folder / name,
            environment={f"TICKWHEEL_{key.upper()}": value for key, value in values.items()},
            port=port,
            health_port=health_port,
            arguments=[part for module in self._worker_modules for part in ("--module", module)]
            if service == "worker"
            else (),
        )
        self.members[name] = member
        return member

    def _names(self, service: Service) -> Iterator[str]:
        return (name for name in self.members if name.startswith(f"{service}-"))

    def _make_members(self) -> None:
        if self.members:
            return
        for service in SERVICES:
            for _ in range(self._counts[service]):
                self.add(service)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()
