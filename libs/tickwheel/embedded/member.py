"""One of our own processes (a coordinator, a timer, a worker) under the hand of whoever started it."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import tickwheel
from tickwheel.embedded.errors import StartFailed
from tickwheel.embedded.folder import Folder, end_child, log_end, processes_in, require_free_port, wait_until

HEALTH_TIMEOUT_SECONDS = 1.0
LEFTOVER_SECONDS_MAX = 10.0


class Member:
    """`python -m tickwheel.services.<service>` in a folder of its own, which holds `log`.

    `environment` is what it gets beside this process's own. `port` is that of its gRPC, None where it has
    none; `health_port` that of its `/healthz`, which says when it is ready. Ports stay the same over
    restarts. Not safe for use by several threads at once.
    """

    def __init__(
        self,
        name: str,
        service: str,
        folder: Path,
        *,
        environment: Mapping[str, str],
        port: int | None,
        health_port: int,
        arguments: Sequence[str] = (),
        start_timeout_seconds: float = 60.0,
        stop_timeout_seconds: float = 30.0,
    ) -> None:
        self.name = name
        self.port = port
        self.health_port = health_port
        self.environment = dict(environment)
        self._command = [sys.executable, "-m", f"tickwheel.services.{service}", *arguments]
        self._folder = Folder(folder)
        self._start_timeout_seconds = start_timeout_seconds
        self._stop_timeout_seconds = stop_timeout_seconds
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        """Its standard output and errors, of all its starts."""
        return self._folder.path / "log"

    @property
    def address(self) -> str:
        """`host:port` of its gRPC."""
        assert self.port is not None, f"{self.name} has no port"
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int | None:
        """None while it does not run."""
        return self._child.pid if self._child is not None and self._child.poll() is None else None

    @property
    def alive(self) -> bool:
        return self.pid is not None

    @property
    def exit_code(self) -> int | None:
        """Of its last end, negative for a signal; None while it runs or was never started."""
        return self._child.poll() if self._child is not None else None

    def ready(self) -> bool:
        """It runs, has started, and its loop moves."""
        if not self.alive:
            return False
        connection = http.client.HTTPConnection("127.0.0.1", self.health_port, timeout=HEALTH_TIMEOUT_SECONDS)
        try:
            connection.request("GET", "/healthz")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def start(self, *, wait: bool = True) -> Self:
        """Starts it, and waits until it is ready. At once if it runs already.

        Raises FolderUnusable, FolderBusy, PortBusy, StartFailed.
        """
        if self.alive:
            return self
        self._folder.acquire()
        leader = next(iter(processes_in(self._folder.path)), None)
        self._folder.end_leftovers(self._folder.path, leader, (signal.SIGTERM,), LEFTOVER_SECONDS_MAX)
        if self.port is not None:
            require_free_port(self.name, self.port)
        with self._folder.lock_for_children() as lock, self.log.open("ab") as log:
            self._child = subprocess.Popen(
                self._command,
                cwd=self._folder.path,
                env=_environment() | self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ctrl-C is for whoever started it; that one stops its members in order.
                start_new_session=True,
                pass_fds=(lock,),
            )
        if wait:
            self.wait_ready()
        return self

    def wait_ready(self) -> None:
        """Raises StartFailed, with the end of its log."""
        assert self._child is not None, f"{self.name} was not started"
        child = self._child
        started = time.monotonic()
        wait_until(lambda: self.ready() or child.poll() is not None, self._start_timeout_seconds)
        if not self.ready():
            waited_ms = int((time.monotonic() - started) * 1_000)
            exit_code = child.poll()
            self.kill9()
            raise StartFailed(self.name, exit_code, waited_ms, self.log, log_end(self.log))

    def terminate(self) -> None:
        """SIGTERM, and no waiting: to stop several at a time."""
        if self.alive and self._child is not None:
            self._child.send_signal(signal.SIGTERM)
            self._child.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """SIGTERM, patience, SIGKILL; reaps it and lets its folder go."""
        if self._child is not None:
            end_child(self._child, (signal.SIGTERM,), self._stop_timeout_seconds)
        self._folder.release()

    def kill9(self) -> None:
        """Kills it at once and reaps it."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()

    def restart(self) -> None:
        """An orderly end and a new start, on the same port."""
        if self._child is not None:
            end_child(self._child, (signal.SIGTERM,), self._stop_timeout_seconds)
        self.start()

    def pause(self) -> None:
        """SIGSTOP: its connections stay open, nothing is answered."""
        if self._child is not None:
            self._child.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        if self._child is not None:
            self._child.send_signal(signal.SIGCONT)


def _environment() -> dict[str, str]:
    """This process's own, without settings of ours that are meant for another cluster; and where our code
    is.
    """
    own = {key: value for key, value in os.environ.items() if not key.startswith("TICKWHEEL_")}
    source_root = str(Path(tickwheel.__file__).resolve().parent.parent)
    paths = [source_root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return own | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "PYTHONUNBUFFERED": "1"}
