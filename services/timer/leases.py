"""Which attempts are live here, until when, and who holds them? The owner's memory of its lease rows, in
columns.

The rows decide; this table mirrors them while the epoch is ours, because nobody but the owner inserts or
deletes one. What the rows do not hold stands here alone: deadlines on the monotonic clock, and the stream
that each attempt is held on. A handle is `generation << 32 | slot`, so that one that waits in the expiry
wheel is not taken for its successor.

A renewal is one number for a whole stream, not one a lease: a lease's deadline is the later of its own and
of its stream's last renewal plus the TTL.
"""

from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
Bools = npt.NDArray[np.bool_]

FREE: Final = 0
LIVE: Final = 1
ENDING: Final = 2
"""In an outcome batch: no longer renewable, and in no other batch."""
ENDING_BY_OWNER: Final = 3
"""In an expiry or cancel batch, likewise; and its shard is left out of its stream's renewals meanwhile."""

NO_STREAM: Final = -1
STREAM_COUNT_MAX: Final = 1 << 16

_COLUMNS: Final[dict[str, type[np.generic]]] = {
    "shard": np.int16,
    "run_hi": np.uint64,
    "run_lo": np.uint64,
    "token_hi": np.uint64,
    "token_lo": np.uint64,
    "fence": np.int64,
    "attempt": np.int16,
    "schedule_hi": np.uint64,
    "schedule_lo": np.uint64,
    "version": np.int64,
    "template": np.int64,
    "tenant": np.int32,
    "route": np.int32,
    "flags": np.int32,
    "ttl_us": np.int64,
    "spent": np.int32,
    "schedule_us": np.int64,
    "due_us": np.int64,
    "lease_us": np.int64,
    "worker": np.int32,
    "priority": np.int8,
    "cancel_until_us": np.int64,
    "deadline_mono_us": np.int64,
    "attempt_deadline_us": np.int64,
    "stream": np.int32,
    "sequence": np.int64,
    "granted_here": np.bool_,
    "state": np.int8,
}


class LeaseTable:
    """Columns are attributes (`table.shard[slots]`); their length is the capacity, which doubles."""

    shard: npt.NDArray[np.int16]
    run_hi: U64
    run_lo: U64
    token_hi: U64
    token_lo: U64
    fence: I64
    attempt: npt.NDArray[np.int16]
    schedule_hi: U64
    schedule_lo: U64
    version: I64
    template: I64
    tenant: npt.NDArray[np.int32]
    route: npt.NDArray[np.int32]
    flags: npt.NDArray[np.int32]
    ttl_us: I64
    spent: npt.NDArray[np.int32]
    schedule_us: I64
    due_us: I64
    lease_us: I64
    worker: npt.NDArray[np.int32]
    priority: npt.NDArray[np.int8]
    cancel_until_us: I64
    deadline_mono_us: I64
    attempt_deadline_us: I64
    stream: npt.NDArray[np.int32]
    sequence: I64
    granted_here: Bools
    """Granted by this process; others were found in their rows, and may still be on their way to a worker."""
    state: npt.NDArray[np.int8]

    def __init__(self, capacity: int = 1024) -> None:
        self._capacity = capacity
        for name, kind in _COLUMNS.items():
            setattr(self, name, np.zeros(capacity, dtype=kind))
        self._generation = np.zeros(capacity, dtype=np.int64)
        self._free: list[int] = list(range(capacity - 1, -1, -1))
        self.by_token: dict[str, int] = {}
        """From a lease token to its slot. 32 hexadecimal digits."""
        self.tokens: list[str] = [""] * capacity
        self._busy: dict[int, int] = {}
        # Index `stream` -> when its last valid heartbeat was received. -1 (no stream) reads the last element.
        self.renewed_mono_us = np.zeros(STREAM_COUNT_MAX, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.by_token)

    def _grow(self, needed: int) -> None:
        old = self._capacity
        new = max(old * 2, old + needed)
        for name in _COLUMNS:
            column = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros(new - old, dtype=column.dtype)]))
        self._generation = np.concatenate([self._generation, np.zeros(new - old, dtype=np.int64)])
        self.tokens.extend([""] * (new - old))
        self._free.extend(range(new - 1, old - 1, -1))
        self._capacity = new

    def add(self, tokens: list[str], columns: dict[str, npt.ArrayLike]) -> I64:
        """Puts live leases in. `columns` gives any of the columns, an array or one value for all; the rest
        is zero.

        Returns their slots, int64[n].
        """
        count = len(tokens)
        if count > len(self._free):
            self._grow(count)
        taken = self._free[-count:] if count else []
        del self._free[len(self._free) - count :]
        slots = np.array(taken, dtype=np.int64)
        for name in _COLUMNS:
            getattr(self, name)[slots] = columns.get(name, 0)
        self.state[slots] = LIVE
        if "stream" not in columns:
            self.stream[slots] = NO_STREAM
        for token, slot in zip(tokens, taken, strict=True):
            self.tokens[slot] = token
        self.by_token.update(zip(tokens, taken, strict=True))
        busy = self._busy
        for schedule in self.schedule_lo[slots].tolist():
            if schedule:
                busy[schedule] = busy.get(schedule, 0) + 1
        return slots

    def remove(self, slots: I64) -> None:
        """Forgets leases whose rows are gone (or are another owner's business now)."""
        self.state[slots] = FREE
        self.stream[slots] = NO_STREAM
        self._generation[slots] += 1
        indexes: list[int] = slots.tolist()
        tokens = self.tokens
        by_token = self.by_token
        for slot in indexes:
            by_token.pop(tokens[slot], None)
            tokens[slot] = ""
        busy = self._busy
        for schedule in self.schedule_lo[slots].tolist():
            if schedule:
                left = busy.get(schedule, 0) - 1
                if left > 0:
                    busy[schedule] = left
                else:
                    busy.pop(schedule, None)
        self._free.extend(indexes)

    def handles(self, slots: I64) -> I64:
        return (self._generation[slots] << 32) | slots

    def live(self, handles: I64) -> I64:
        """The slots of those handles whose lease is LIVE still."""
        slots = handles & 0xFFFFFFFF
        alive: I64 = slots[(self._generation[slots] == handles >> 32) & (self.state[slots] == LIVE)]
        return alive

    def held(self, handles: I64) -> Bools:
        """Whether each handle still names its lease, live or ending."""
        slots = handles & 0xFFFFFFFF
        held: Bools = (self._generation[slots] == handles >> 32) & (self.state[slots] != FREE)
        return held

    def is_busy(self, schedule_lo: int) -> bool:
        """Whether a run of the schedule has a live attempt."""
        return schedule_lo in self._busy

    def busy_mask(self, schedule_lo: U64) -> Bools:
        busy = self._busy
        if not busy:
            return np.zeros(len(schedule_lo), dtype=np.bool_)
        return np.fromiter((s in busy for s in schedule_lo.tolist()), dtype=np.bool_, count=len(schedule_lo))

    def deadlines(self, slots: I64) -> I64:
        """When each lease may be given away, on the timer's monotonic clock."""
        stream = self.stream[slots]
        renewed = np.where(stream >= 0, self.renewed_mono_us[stream] + self.ttl_us[slots], 0)
        deadlines: I64 = np.maximum(self.deadline_mono_us[slots], renewed)
        return deadlines

    def detach(self, slots: I64) -> None:
        """The stream is gone, or does not hold them: what it renewed so far stays, and no more comes."""
        self.deadline_mono_us[slots] = self.deadlines(slots)
        self.stream[slots] = NO_STREAM

    def of_stream(self, stream: int) -> I64:
        return np.flatnonzero((self.stream == stream) & (self.state != FREE)).astype(np.int64)

    def withheld(self) -> dict[int, set[int]]:
        """Stream -> shards of which it holds an attempt that its owner is ending at this moment."""
        found: dict[int, set[int]] = {}
        ending = np.flatnonzero(self.state == ENDING_BY_OWNER)
        for stream, shard in zip(self.stream[ending].tolist(), self.shard[ending].tolist(), strict=True):
            found.setdefault(stream, set()).add(shard)
        return found

    def of_shards(self, shards: Iterable[int]) -> I64:
        wanted = np.fromiter(shards, dtype=np.int16)
        return np.flatnonzero(np.isin(self.shard, wanted) & (self.state != FREE)).astype(np.int64)
