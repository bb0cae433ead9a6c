"""The embedded Postgres, through everything that a development machine does to it."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from tickwheel.embedded.errors import (
    BinaryMissing,
    EmbeddedError,
    FolderBusy,
    FolderUnusable,
    PortBusy,
    SocketPathTooLong,
    StartFailed,
)
from tickwheel.embedded.folder import processes_in, wait_until
from tickwheel.embedded.postgres import EmbeddedPostgres, find_postgres_bin_folder

only_root = pytest.mark.skipif(os.geteuid() != 0, reason="about running as root")


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="twp-", dir="/tmp"))
    path.chmod(0o755)
    yield path / "pg"
    assert not processes_in(path / "pg" / "data"), "the test left a Postgres behind"
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def server(folder: Path, postgres_bin_folder: Path | None) -> Iterator[EmbeddedPostgres]:
    server = EmbeddedPostgres(folder, bin_folder=postgres_bin_folder)
    try:
        yield server
    finally:
        server.stop("immediate")


def scalar(url: str, statement: str) -> object:
    with psycopg.connect(url, autocommit=True) as connection:
        row = connection.execute(statement).fetchone()
    assert row is not None
    return row[0]


def write_mark(server: EmbeddedPostgres) -> None:
    with psycopg.connect(server.url(), autocommit=True) as connection:
        connection.execute("CREATE TABLE mark (value int)")
        connection.execute("INSERT INTO mark VALUES (7)")


def test_it_is_durable_local_and_closed_to_strangers(server: EmbeddedPostgres) -> None:
    server.start()
    for setting, wanted in {
        "fsync": "on",
        "synchronous_commit": "on",
        "full_page_writes": "on",
        "listen_addresses": "127.0.0.1",
        "jit": "off",
        "max_connections": "100",
    }.items():
        assert scalar(server.url(), f"SHOW {setting}") == wanted
    with pytest.raises(psycopg.OperationalError, match="password"):
        psycopg.connect(f"postgresql://tickwheel:wrong@127.0.0.1:{server.port}/postgres")
    assert (server.folder / "password").stat().st_mode & 0o077 == 0


def test_no_process_of_it_runs_as_root(server: EmbeddedPostgres) -> None:
    server.start()
    answer = scalar(server.url(), "SELECT pg_read_file('/proc/self/status')")
    assert isinstance(answer, str)
    seen_uid = next(line for line in answer.splitlines() if line.startswith("Uid:")).split()[1]
    assert seen_uid != "0"


def test_data_and_port_survive_a_restart(server: EmbeddedPostgres) -> None:
    server.start()
    write_mark(server)
    port = server.port
    server.restart()
    assert server.port == port
    assert scalar(server.url(), "SELECT value FROM mark") == 7


def test_a_killed_postmaster_starts_again_after_its_last_backend_is_gone(server: EmbeddedPostgres) -> None:
    server.start()
    write_mark(server)
    with psycopg.connect(server.url(), autocommit=True) as connection:
        pid = connection.info.backend_pid
        # A frozen backend is one that cannot notice that its postmaster is gone.
        os.kill(pid, signal.SIGSTOP)
        server.kill9()
        assert not server.alive
        assert server.exit_code == -signal.SIGKILL
        assert pid in processes_in(server.data_folder)
        os.kill(pid, signal.SIGCONT)
    server.start()
    assert pid not in processes_in(server.data_folder)
    assert scalar(server.url(), "SELECT value FROM mark") == 7


def test_a_backend_that_is_too_busy_to_notice_is_ended_before_the_next_start(
    server: EmbeddedPostgres,
) -> None:
    server.start()
    write_mark(server)
    with closing(psycopg.connect(server.url(), autocommit=True)) as connection:
        pid = connection.info.backend_pid
        # Sent, not waited for: it counts for minutes, and looks at nothing else meanwhile.
        connection.pgconn.send_query(b"SELECT count(*) FROM generate_series(1, 1000000000000::bigint)")
        server.kill9()
        assert pid in processes_in(server.data_folder)
        started = time.monotonic()
        server.start()
        assert time.monotonic() - started < 15
    assert pid not in processes_in(server.data_folder)
    assert scalar(server.url(), "SELECT value FROM mark") == 7


def test_a_stale_pid_file_that_names_a_living_stranger_does_not_stop_it(server: EmbeddedPostgres) -> None:
    server.start()
    pid_file = server.data_folder / "postmaster.pid"
    lines = pid_file.read_text().splitlines()
    server.stop()
    pid_file.write_text("\n".join([str(os.getpid()), *lines[1:]]) + "\n")
    server.start()
    assert server.ready()


def test_what_a_killed_owner_left_running_is_stopped_first(server: EmbeddedPostgres, folder: Path) -> None:
    bin_folder = find_postgres_bin_folder(server._bin_folder)
    program = textwrap.dedent(f"""
        import os, signal
        from tickwheel.embedded.postgres import EmbeddedPostgres
        server = EmbeddedPostgres({str(folder)!r}, bin_folder={str(bin_folder)!r}).start()
        print(server.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=_env())
    left_pid = int(answer.stdout)
    assert left_pid in processes_in(server.data_folder)
    server.start()
    assert left_pid not in processes_in(server.data_folder)
    assert server.ready()


def test_a_second_owner_is_refused(server: EmbeddedPostgres, folder: Path) -> None:
    server.start()
    with pytest.raises(FolderBusy, match=f"process {os.getpid()}"):
        EmbeddedPostgres(folder).start()
    assert server.ready()


def test_an_owner_that_failed_lets_the_folder_go(folder: Path, postgres_bin_folder: Path | None) -> None:
    failing = EmbeddedPostgres(
        folder, bin_folder=postgres_bin_folder, settings={"shared_buffers": "nonsense"}
    )
    with pytest.raises(StartFailed, match="shared_buffers"):
        failing.start()
    with EmbeddedPostgres(folder, bin_folder=postgres_bin_folder) as server:
        assert server.ready()


def test_a_busy_port_is_named(folder: Path, postgres_bin_folder: Path | None) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(PortBusy, match=f"127.0.0.1:{port}"):
            EmbeddedPostgres(folder, port, bin_folder=postgres_bin_folder).start()


def test_a_folder_that_cannot_be_made_is_named() -> None:
    with pytest.raises(FolderUnusable, match="/proc/tickwheel"):
        EmbeddedPostgres("/proc/tickwheel").start()


def test_a_missing_binary_is_named(tmp_path: Path) -> None:
    with pytest.raises(BinaryMissing, match="initdb"):
        EmbeddedPostgres(tmp_path / "pg", bin_folder=tmp_path).start()


def test_a_cluster_of_another_version_is_refused(server: EmbeddedPostgres) -> None:
    server.start()
    server.stop()
    (server.data_folder / "PG_VERSION").write_text("12\n")
    with pytest.raises(FolderUnusable, match="made by PostgreSQL 12"):
        server.start()


def test_an_initdb_that_was_killed_half_way_leaves_nothing_to_trip_over(server: EmbeddedPostgres) -> None:
    unfinished = server.folder / "data.unfinished"
    unfinished.mkdir(parents=True)
    (unfinished / "rubbish").write_text("half a cluster")
    server.start()
    assert server.ready()


def test_a_deep_folder_gets_a_short_socket_path(folder: Path, postgres_bin_folder: Path | None) -> None:
    deep = folder / ("d" * 100)
    with EmbeddedPostgres(deep, bin_folder=postgres_bin_folder) as server:
        socket_folder = server.socket_folder
        assert len(str(socket_folder / f".s.PGSQL.{server.port}")) <= 107
        password = (deep / "password").read_text().strip()
        parts = f"host={socket_folder} port={server.port} user=tickwheel dbname=postgres password={password}"
        assert scalar(parts, "SELECT 1") == 1
    assert not socket_folder.exists()


def test_a_socket_path_that_cannot_be_short_is_refused(
    folder: Path, postgres_bin_folder: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = folder / ("t" * 100)
    long.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with pytest.raises(SocketPathTooLong, match="TMPDIR"):
        EmbeddedPostgres(folder / ("d" * 100), bin_folder=postgres_bin_folder).start()


def test_its_death_is_seen(server: EmbeddedPostgres) -> None:
    server.start()
    assert server.pid is not None
    os.kill(server.pid, signal.SIGQUIT)
    assert wait_until(lambda: not server.alive, 10)
    assert server.exit_code is not None
    assert not server.ready()


def test_a_database_is_copied_from_a_template(server: EmbeddedPostgres) -> None:
    server.start()
    with psycopg.connect(server.create_database("original"), autocommit=True) as connection:
        connection.execute("CREATE TABLE marked (value int)")
    url = server.create_database("copy", template="original")
    assert scalar(url, "SELECT count(*) FROM marked") == 0
    assert server.has_database("copy")
    server.drop_database("copy")
    assert not server.has_database("copy")


@only_root
def test_without_a_namespace_root_hands_the_folder_to_an_ordinary_user(
    folder: Path, postgres_bin_folder: Path | None
) -> None:
    server = EmbeddedPostgres(folder, bin_folder=postgres_bin_folder, namespace=False)
    try:
        server.start()
        owner = pwd.getpwuid(server.data_folder.stat().st_uid).pw_name
        assert owner in ("postgres", "nobody")
        write_mark(server)
    finally:
        server.stop()
    # And back: the same folder under a namespace, where root's files are wanted.
    with EmbeddedPostgres(folder, bin_folder=postgres_bin_folder) as again:
        assert scalar(again.url(), "SELECT value FROM mark") == 7


@only_root
def test_a_parent_folder_that_is_closed_to_that_user_is_named(
    folder: Path, postgres_bin_folder: Path | None
) -> None:
    folder.parent.chmod(0o700)
    with pytest.raises(FolderUnusable, match=f"may not enter {folder.parent}"):
        EmbeddedPostgres(folder, bin_folder=postgres_bin_folder, namespace=False).start()
    assert folder.parent.stat().st_mode & 0o777 == 0o700


def test_every_error_says_what_to_do() -> None:
    errors: list[EmbeddedError] = [
        PortBusy("Postgres", 5432),
        FolderBusy(Path("/tmp/x"), "process 7"),
        SocketPathTooLong("/tmp/x", 107),
    ]
    assert [str(error) for error in errors] == [
        "Postgres cannot listen on 127.0.0.1:5432: another process does; "
        "stop that process, or choose another port",
        "the folder /tmp/x is in use by process 7: stop that first, or choose another folder",
        "the socket path /tmp/x has 6 bytes, 107 are possible: set TMPDIR to a shorter folder",
    ]


def _env() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
