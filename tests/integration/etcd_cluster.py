"""A real etcd of three members, any of which can be killed."""

from __future__ import annotations

import asyncio
import subprocess
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc.aio
from aetcd import rpc

from tickwheel.embedded.etcd import find_etcd_binary
from tickwheel.embedded.folder import free_port

MEMBERS = 3
_START_SECONDS_MAX = 30.0


class EtcdCluster:
    """Three processes on 127.0.0.1, their folders below `folder`; killed at the end, whatever happens."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ports = [(free_port(), free_port()) for _ in range(MEMBERS)]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._stack = ExitStack()

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{client}" for client, _ in self._ports]

    async def __aenter__(self) -> Self:
        try:
            self._start()
            async with asyncio.timeout(_START_SECONDS_MAX):
                await self._elected()
        except BaseException:
            self._end()
            raise
        return self

    async def _elected(self) -> None:
        while await self.leader() is None:  # noqa: ASYNC110 (other processes decide this)
            await asyncio.sleep(0.05)

    def _start(self) -> None:
        self._folder.mkdir(parents=True)
        peers = ",".join(f"m{number}=http://127.0.0.1:{peer}" for number, (_, peer) in enumerate(self._ports))
        for number, (client, peer) in enumerate(self._ports):
            log = self._stack.enter_context((self._folder / f"m{number}.log").open("wb"))
            client_url, peer_url = f"http://127.0.0.1:{client}", f"http://127.0.0.1:{peer}"
            command = [
                str(find_etcd_binary()),
                *("--name", f"m{number}", "--data-dir", str(self._folder / f"m{number}")),
                *("--listen-client-urls", client_url, "--advertise-client-urls", client_url),
                *("--listen-peer-urls", peer_url, "--initial-advertise-peer-urls", peer_url),
                *("--initial-cluster", peers, "--logger", "zap", "--log-level", "warn"),
            ]
            self._processes.append(subprocess.Popen(command, stdout=log, stderr=log))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    def kill(self, number: int) -> None:
        self._processes[number].kill()
        self._processes[number].wait()

    async def leader(self) -> int | None:
        """The member that all living ones call their leader."""
        leaders, ids = set(), {}
        for number, (client, _) in enumerate(self._ports):
            if self._processes[number].poll() is not None:
                continue
            async with grpc.aio.insecure_channel(f"127.0.0.1:{client}") as channel:
                try:
                    status = await rpc.MaintenanceStub(channel).Status(rpc.StatusRequest(), timeout=1)
                except grpc.aio.AioRpcError:
                    return None
            leaders.add(status.leader)
            ids[status.header.member_id] = number
        return ids.get(leaders.pop()) if len(leaders) == 1 else None

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self._stack.close()
