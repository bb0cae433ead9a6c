"""A TCP proxy with faults that no signal can make: a network that holds one process back, or that is cut just
after a request went through.

Threads and blocking sockets: an experiment has some tens of connections, and a held one must hold nothing
else up.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from enum import Enum
from types import TracebackType
from typing import Self

import psutil

CHUNK_BYTES = 1 << 18
HEAD_BYTES = 512
AFTERLIFE_S = 2.0
"""So long the server's side of a connection that was cut lives on: it finishes what it was asked."""


class Cut(Enum):
    """What becomes of a connection when its client has just sent something."""

    BEFORE = "the request is lost"
    AFTER = "the request arrives, its answer is lost"


class TcpProxy:
    """Forwards to `target` (asked at each connection). A context manager.

    held_pids: nothing passes to or from these processes, as if packets were dropped; what waits passes when
    they are let go. cut: asked for each piece that a client sends, with the head of all that it ever sent
    (which names it, in Postgres' protocol).
    """

    def __init__(self, target: Callable[[], tuple[str, int]]) -> None:
        self._target = target
        self.cut: Callable[[bytes, bytes], Cut | None] = lambda head, piece: None
        self.cut_count = 0
        self._held_pids: frozenset[int] = frozenset()
        self._changed = threading.Condition()
        self._is_closing = False
        self._sockets: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, name="chaos-proxy", daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._listener.close()
        for each in list(self._sockets):
            _close(each)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def hold(self, *pids: int) -> None:
        """Hold these processes back, and no others. None: all is well again."""
        with self._changed:
            self._held_pids = frozenset(pids)
            self._changed.notify_all()

    def _accept(self) -> None:
        while True:
            try:
                client, peer = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._connect, args=(client, peer[1]), daemon=True).start()

    def _connect(self, client: socket.socket, peer_port: int) -> None:
        pid = _pid_of(peer_port)
        self._wait_free(pid)
        try:
            server = socket.create_connection(self._target(), 5.0)
        except OSError:
            _close(client)
            return
        server.settimeout(None)
        for each in (client, server):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sockets |= {client, server}
        threading.Thread(target=self._pump_back, args=(server, client, pid), daemon=True).start()
        self._pump(client, server, pid)
        self._sockets -= {client, server}

    def _pump(self, client: socket.socket, server: socket.socket, pid: int) -> None:
        head = b""
        with contextlib.suppress(OSError):
            while piece := client.recv(CHUNK_BYTES):
                head += piece[: HEAD_BYTES - len(head)]
                self._wait_free(pid)
                cut = self.cut(head, piece)
                if cut is not None:
                    self.cut_count += 1
                if cut is Cut.BEFORE:
                    break
                server.sendall(piece)
                if cut is Cut.AFTER:
                    _close(client)
                    time.sleep(AFTERLIFE_S)
                    break
        _close(client)
        _close(server)

    def _pump_back(self, server: socket.socket, client: socket.socket, pid: int) -> None:
        with contextlib.suppress(OSError):
            while piece := server.recv(CHUNK_BYTES):
                self._wait_free(pid)
                client.sendall(piece)
        _close(client)

    def _wait_free(self, pid: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closing or pid not in self._held_pids)


def _close(each: socket.socket) -> None:
    with contextlib.suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
    each.close()


def _pid_of(port: int) -> int:
    """The process whose end of a connection has this port; 0 if it has gone."""
    # gRPC speaks IPv4 through sockets of IPv6.
    for connection in psutil.net_connections("tcp"):
        if connection.laddr and connection.laddr.port == port and connection.pid:
            return int(connection.pid)
    return 0
