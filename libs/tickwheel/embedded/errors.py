"""What can stand in the way of a part that we start ourselves, as one class per thing a person can act on.

EmbeddedError
├── BinaryMissing       no wheel for this platform, and nothing on PATH
├── FolderUnusable      not writable, not reachable by the user that must own it, or of another version
├── FolderBusy          somebody else runs on it now
├── PortBusy            another process listens there
├── SocketPathTooLong   a Unix socket's path has room for 107 bytes
├── NoUnprivilegedUser  root must not run it, and there is nobody else to run it
└── StartFailed         it ended, or was not ready in time; carries the end of its log
"""

from __future__ import annotations

from pathlib import Path

from tickwheel.errors import TickwheelError


class EmbeddedError(TickwheelError):
    """An embedded part cannot be started or used. The message says what to do."""


class BinaryMissing(EmbeddedError):
    def __init__(self, name: str, wheel: str, looked_in: tuple[str, ...], hint: str) -> None:
        self.name = name
        self.wheel = wheel
        self.looked_in = looked_in
        super().__init__(
            f"no {name} binary: looked in {', '.join(looked_in)}. "
            f"The `{wheel}` wheel exists for Linux with glibc only; {hint}"
        )


class FolderUnusable(EmbeddedError):
    def __init__(self, folder: Path, why: str, hint: str) -> None:
        self.folder = folder
        self.why = why
        super().__init__(f"the folder {folder} cannot be used: {why}; {hint}")


class FolderBusy(EmbeddedError):
    def __init__(self, folder: Path, holder: str) -> None:
        self.folder = folder
        self.holder = holder
        super().__init__(
            f"the folder {folder} is in use by {holder}: stop that first, or choose another folder"
        )


class PortBusy(EmbeddedError):
    def __init__(self, name: str, port: int) -> None:
        self.name = name
        self.port = port
        super().__init__(
            f"{name} cannot listen on 127.0.0.1:{port}: another process does; "
            "stop that process, or choose another port"
        )


class SocketPathTooLong(EmbeddedError):
    def __init__(self, path: str, byte_count_max: int) -> None:
        self.path = path
        self.byte_count_max = byte_count_max
        super().__init__(
            f"the socket path {path} has {len(path.encode())} bytes, {byte_count_max} are possible: "
            "set TMPDIR to a shorter folder"
        )


class NoUnprivilegedUser(EmbeddedError):
    def __init__(self, why: str) -> None:
        self.why = why
        super().__init__(
            f"Postgres refuses to run as root, and {why}: run this as an ordinary user, "
            "or allow user namespaces, or make a user named `postgres`"
        )


class StartFailed(EmbeddedError):
    """It ended by itself (`exit_code` set) or was not ready within `waited_ms` (`exit_code` is None)."""

    def __init__(self, name: str, exit_code: int | None, waited_ms: int, log: Path, log_end: str) -> None:
        self.name = name
        self.exit_code = exit_code
        self.waited_ms = waited_ms
        self.log = log
        self.log_end = log_end
        what = f"was not ready after {waited_ms} ms" if exit_code is None else f"ended with code {exit_code}"
        super().__init__(f"{name} {what}; the end of {log}:\n{log_end}")
