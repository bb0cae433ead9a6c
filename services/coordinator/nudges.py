"""Tells the owners of shards what was committed inside the horizon that they have loaded.

Best effort: what is not told is found by the owner's sweep a second later. So nudges never hold up an
answer, wait in a bounded queue, and are dropped when it is full.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc
import numpy as np
import structlog
from numpy.typing import NDArray

from tickwheel.internal.v1 import timer_service_pb2, timer_service_pb2_grpc
from tickwheel.services.coordinator.shard_view import ShardView
from tickwheel.services.coordinator.timer_channels import TimerChannels

log = structlog.get_logger(__name__)

HORIZON_US = 150 * 1_000_000
"""What is due later is loaded by the owner in time, without a nudge."""
ROWS_MAX = 20_000
"""In one message."""


@dataclass(slots=True)
class _Waiting:
    shards: list[NDArray[np.int64]] = field(default_factory=list)
    refs: list[bytes] = field(default_factory=list)
    due_us: list[NDArray[np.int64]] = field(default_factory=list)
    cancel_shards: list[int] = field(default_factory=list)
    cancel_runs: list[bytes] = field(default_factory=list)
    count: int = 0


class Nudger:
    """`run` sends; the rest is called after commits, and returns at once."""

    def __init__(self, view: ShardView, channels: TimerChannels, *, timeout_ms: int, queue_max: int) -> None:
        self._view = view
        self._channels = channels
        self._timeout_s = timeout_ms / 1_000
        self._queue_max = queue_max
        self._waiting = _Waiting()
        self._wake = asyncio.Event()
        self.dropped_count = 0
        """Rows that found the queue full, or their owner out of reach."""

    def rows(
        self, shards: NDArray[np.int64], refs: NDArray[np.uint8], due_us: NDArray[np.int64], now_us: int
    ) -> None:
        """Timer rows that were committed. `refs` is uint8[n, 16]; all others are int64[n]."""
        near = due_us < now_us + HORIZON_US
        if not near.all():
            shards, refs, due_us = shards[near], refs[near], due_us[near]
        if not len(shards) or not self._has_room(len(shards)):
            return
        self._waiting.shards.append(shards)
        self._waiting.refs.append(refs.tobytes())
        self._waiting.due_us.append(due_us)
        self._wake.set()

    def row(self, shard: int, ref: bytes, due_us: int, now_us: int) -> None:
        self.rows(
            np.array([shard], dtype=np.int64),
            np.frombuffer(ref, dtype=np.uint8).reshape(1, 16),
            np.array([due_us], dtype=np.int64),
            now_us,
        )

    def cancels(self, shards: Sequence[int], runs: Sequence[bytes]) -> None:
        """Leased runs that were marked to be cancelled."""
        if runs and self._has_room(len(runs)):
            self._waiting.cancel_shards.extend(shards)
            self._waiting.cancel_runs.extend(runs)
            self._wake.set()

    def _has_room(self, count: int) -> bool:
        if self._waiting.count + count > self._queue_max:
            self.dropped_count += count
            return False
        self._waiting.count += count
        return True

    async def run(self) -> None:
        """Sends what waits, until cancelled: one message to each owner at a time."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            batch, self._waiting = self._waiting, _Waiting()
            await asyncio.gather(*self._messages(batch))

    def _messages(self, batch: _Waiting) -> list[asyncio.Task[None]]:
        tasks: list[asyncio.Task[None]] = []
        if batch.shards:
            shards, due_us = np.concatenate(batch.shards), np.concatenate(batch.due_us)
            refs = np.frombuffer(b"".join(batch.refs), dtype=np.uint8).reshape(-1, 16)
            for address, rows in self._by_owner(shards).items():
                for start in range(0, len(rows), ROWS_MAX):
                    part = rows[start : start + ROWS_MAX]
                    request = timer_service_pb2.NudgeRequest(
                        shards=shards[part].tolist(),
                        refs=refs[part].tobytes(),
                        due_times_us=due_us[part].tolist(),
                    )
                    tasks.append(asyncio.create_task(self._send(address, "Nudge", request, len(part))))
        if batch.cancel_runs:
            shards = np.array(batch.cancel_shards, dtype=np.int64)
            for address, rows in self._by_owner(shards).items():
                cancel = timer_service_pb2.NudgeCancelRequest(
                    shards=shards[rows].tolist(), runs=b"".join(batch.cancel_runs[row] for row in rows)
                )
                tasks.append(asyncio.create_task(self._send(address, "NudgeCancel", cancel, len(rows))))
        return tasks

    def _by_owner(self, shards: NDArray[np.int64]) -> dict[str, NDArray[np.intp]]:
        """Positions by the internal address of their shards' owners; those without one are dropped."""
        parts: dict[str, list[NDArray[np.intp]]] = defaultdict(list)
        order = np.argsort(shards, kind="stable")
        distinct, starts = np.unique(shards[order], return_index=True)
        ends = [*starts[1:].tolist(), len(order)]
        for shard, start, end in zip(distinct.tolist(), starts.tolist(), ends, strict=True):
            owner = self._view.owner(shard)
            if owner is None:
                self.dropped_count += end - start
            else:
                parts[owner.address_internal].append(order[start:end])
        return {address: np.concatenate(rows) for address, rows in parts.items()}

    async def _send(
        self,
        address: str,
        method: str,
        request: timer_service_pb2.NudgeRequest | timer_service_pb2.NudgeCancelRequest,
        count: int,
    ) -> None:
        stub = timer_service_pb2_grpc.TimerServiceStub(await self._channels.to(address))
        try:
            await getattr(stub, method)(request, timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            self.dropped_count += count
            log.debug("nudge_lost", address=address, rows=count, code=error.code().name)
