"""A folder that one embedded part owns: who may use it, and whether anything still runs in it.

Two lock files answer two questions, and neither trusts a process id, which the kernel may have given to
somebody else:

* `owner.lock` is held by this object. A second owner is refused at once (a second etcd on one folder hangs in
  silence).
* `running.lock` is held by the *children*, which inherit it and pass it on to theirs. It is free exactly when
  the last of them is gone, whoever killed whom: that is how the last backends of a killed postmaster are
  waited for.
"""

from __future__ import annotations

import fcntl
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tickwheel.embedded.errors import FolderBusy, FolderUnusable, PortBusy

LOG_END_BYTES_MAX = 4_000
ORPHANS_SECONDS_MAX = 3.0
FREE_PORT_LOW = 15_000
FREE_PORT_TRIES_MAX = 100
POLL_SECONDS = 0.01


class Folder:
    """`path`, made if it is missing (mode 0700). `acquire` before use, `release` after."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        self._owner_fd: int | None = None

    def acquire(self) -> None:
        """Raises FolderUnusable, FolderBusy."""
        if self._owner_fd is not None:
            return
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(self.path / "owner.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            hint = "choose a folder that you may write to"
            raise FolderUnusable(self.path, error.strerror or str(error), hint) from error
        if not _try_lock(fd):
            holder = os.pread(fd, 100, 0).decode(errors="replace").strip() or "another process"
            os.close(fd)
            raise FolderBusy(self.path, holder)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"process {os.getpid()}\n".encode(), 0)
        self._owner_fd = fd

    def release(self) -> None:
        if self._owner_fd is not None:
            os.ftruncate(self._owner_fd, 0)
            os.close(self._owner_fd)
            self._owner_fd = None

    @contextmanager
    def lock_for_children(self) -> Iterator[int]:
        """The descriptor that a child must inherit. Raises FolderBusy while an earlier child lives."""
        fd = os.open(self.path / "running.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if not _try_lock(fd):
                raise FolderBusy(self.path, "a process that was started in it earlier")
            yield fd
        finally:
            os.close(
                fd
            )  # The children's copies keep the lock: it belongs to the open file, not to a process.

    def is_quiet(self) -> bool:
        """Nothing that was started in this folder lives."""
        try:
            with self.lock_for_children():
                return True
        except FolderBusy:
            return False

    def wait_quiet(self, timeout_seconds: float) -> bool:
        return wait_until(self.is_quiet, timeout_seconds)

    def end_leftovers(
        self,
        working_folder: Path,
        leader: int | None,
        signals: tuple[signal.Signals, ...],
        timeout_seconds: float,
    ) -> None:
        """Ends what an earlier owner left running in `working_folder`, and returns when nothing is left.

        `leader` gets each signal in turn, if it is one of those processes, with `timeout_seconds` of patience
        for each; without a leader the others are only waited for. At last all are killed. Raises FolderBusy
        if one stays.
        """

        def all_gone() -> bool:
            return self.is_quiet() and not processes_in(working_folder)

        if all_gone():
            return
        if leader is not None and leader in processes_in(working_folder):
            for wanted in signals:
                signal_process(leader, wanted)
                if wait_until(all_gone, timeout_seconds):
                    return
        elif wait_until(all_gone, min(timeout_seconds, ORPHANS_SECONDS_MAX)):
            return
        for pid in processes_in(working_folder):
            signal_process(pid, signal.SIGKILL)
        if not wait_until(all_gone, timeout_seconds):
            left = processes_in(working_folder)
            raise FolderBusy(self.path, f"process {left[0]}" if left else "a process that does not end")


def processes_in(working_folder: Path) -> list[int]:
    """The processes whose working folder is this one, in order of their ids; empty where there is no /proc.

    Postgres and its backends, and our etcd, work in their data folder; so this also finds what a person
    started by hand.
    """
    found: list[int] = []
    target = os.path.realpath(working_folder)
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(entry / "cwd") == target and (entry / "stat").read_text().split()[2] != "Z":
                found.append(int(entry.name))
        except OSError:  # It ended meanwhile, or is not ours to look at.
            continue
    return sorted(found)


def wait_until(condition: Callable[[], bool], timeout_seconds: float) -> bool:
    """Whether `condition` came true in time."""
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def free_port() -> int:
    """A TCP port of 127.0.0.1 that was free a moment ago.

    It lies outside the range from which outgoing connections get theirs: there a client that keeps calling a
    server which is away connects to *itself* sooner or later, and then holds the port when the server comes
    back.
    """
    for _ in range(FREE_PORT_TRIES_MAX):
        port = random.SystemRandom().randrange(FREE_PORT_LOW, _outgoing_port_low())
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _outgoing_port_low() -> int:
    try:
        low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        low = 32768
    return low if low > FREE_PORT_LOW else 65536


def require_free_port(name: str, port: int) -> None:
    """Raises PortBusy while something listens on 127.0.0.1:`port`."""
    with socket.socket() as probe:
        # As servers do: connections in TIME_WAIT do not count, a listener does.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise PortBusy(name, port) from error


def log_end(log: Path) -> str:
    """The last lines of a log, at most 4,000 bytes."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LOG_END_BYTES_MAX))
            return file.read().decode(errors="replace").strip()
    except OSError as error:
        return f"(no log: {error.strerror})"


def end_child(
    child: subprocess.Popen[bytes], signals: tuple[signal.Signals, ...], timeout_seconds: float
) -> int:
    """Signals the child, each signal with its patience, SIGKILL at last; reaps it. Gives its exit code."""
    for wanted in (*signals, signal.SIGKILL):
        if child.poll() is not None:
            break
        child.send_signal(wanted)
        child.send_signal(signal.SIGCONT)  # A frozen process would not see the first signal.
        try:
            child.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            continue
    return child.wait(timeout_seconds)


def signal_process(pid: int, wanted: signal.Signals) -> None:
    """Signals it, and wakes it if it is frozen; nothing if it is gone."""
    try:
        os.kill(pid, wanted)
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        pass


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
