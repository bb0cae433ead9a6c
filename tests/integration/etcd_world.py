"""Nodes on a real etcd, for tests: made in one line, ended whatever happens."""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from tickwheel.etcd.client import EtcdClient, EtcdSettings
from tickwheel.etcd.election import EtcdElection
from tickwheel.etcd.lease import LeaseSettings, NodeLease
from tickwheel.etcd.registration import Registration, fresh_node_id
from tickwheel.etcd.registry import EtcdRegistry
from tickwheel.ports import TimerRecord

TTL_MS = 3_000
_numbers = itertools.count()


def mono_us() -> int:
    return time.monotonic_ns() // 1_000


def fresh_prefix() -> str:
    """A key prefix that no other test uses."""
    return f"/test-{uuid.uuid4().hex[:8]}/"


async def until(predicate: Callable[[], bool], seconds: float, what: str) -> float:
    """Wait for a real process to bring something about; give how many seconds it took."""
    started = time.monotonic()
    while not predicate():
        assert time.monotonic() - started < seconds, f"not within {seconds} s: {what}"
        await asyncio.sleep(0.01)
    return time.monotonic() - started


@asynccontextmanager
async def running(*coroutines: Coroutine[Any, Any, Any]) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Run tasks for the length of the block; a task that fails fails the test, unless it was looked at."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result


@asynccontextmanager
async def client_at(*urls: str, prefix: str, **settings: Any) -> AsyncIterator[EtcdClient]:
    client = EtcdClient(EtcdSettings(endpoints=urls, prefix=prefix, **settings))
    try:
        yield client
    finally:
        await client.close()


@dataclass(frozen=True)
class Node:
    """A process as far as etcd is concerned: one lease, an election and a registration on it."""

    node_id: str
    client: EtcdClient
    lease: NodeLease
    election: EtcdElection
    registration: Registration
    registry: EtcdRegistry


@asynccontextmanager
async def node_at(
    *urls: str, prefix: str, name: str = "node", stand: bool = True, register: bool = True
) -> AsyncIterator[Node]:
    """A process that is a timer (`register`) and stands for election (`stand`); ends without a goodbye."""
    async with client_at(*urls, prefix=prefix) as client:
        node_id = fresh_node_id(name)
        lease = NodeLease(client, LeaseSettings(TTL_MS), mono_us)
        record = TimerRecord(node_id, f"127.0.0.1:{next(_numbers)}", "", "test", 1)
        election = EtcdElection(client, lease, node_id, mono_us)
        registration = Registration(client, lease, record, mono_us)
        node = Node(node_id, client, lease, election, registration, EtcdRegistry(client, mono_us))
        parts = [lease.run()]
        if register:
            parts.append(registration.run())
        if stand:
            parts.append(election.run())
        async with running(*parts):
            yield node
