"""A migrated database with one timer's store on it, and short words for rows and batches."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psycopg
from psycopg.rows import dict_row

from tickwheel.domain import flags as bits
from tickwheel.domain.ids import DAY_US, run_id_head
from tickwheel.domain.run import AttemptState, RunState
from tickwheel.domain.shard import first_fence
from tickwheel.domain.timer_rows import NEVER_US
from tickwheel.postgres.timer_store import Fence, Moves, Outcomes, RunGrants, TimerStore, Written

PERIOD_US = 1_000
EPOCH = 5
NOW_US = 1_900_000_000_000_000
TIMER_ID = "timer-1"
SHARDS = (1, 2, 3)
TABLES = ("timer", "lease", "run", "attempt", "decision", "dead_letter", "schedule", "timer_node")
SUCCEEDED = (AttemptState.SUCCEEDED, RunState.SUCCEEDED)


def today_us() -> int:
    return time.time_ns() // 1_000


def new_run(shard: int, day_offset: int = 0) -> uuid.UUID:
    head = run_id_head(0, today_us() + day_offset * DAY_US, shard)
    return uuid.UUID(int=head << 64 | uuid.uuid4().int >> 64)


def halves(ids: Sequence[uuid.UUID]) -> tuple[Any, Any]:
    mask = (1 << 64) - 1
    return (
        np.array([i.int >> 64 for i in ids], dtype=np.uint64),
        np.array([i.int & mask for i in ids], dtype=np.uint64),
    )


def _column(values: Sequence[Any], kind: type[np.generic]) -> Any:
    return np.array(list(values), dtype=kind)


@dataclass(slots=True)
class Move:
    """One occurrence that is decided; as the row stands unless said otherwise."""

    shard: int
    ref: uuid.UUID
    due_us: int = PERIOD_US
    version: int = 1
    decided_us: int = 0
    new_decided_us: int = PERIOD_US
    next_us: int = 2 * PERIOD_US
    run_count: int = 1
    action: int = 1
    exclusive: bool = False
    run: uuid.UUID = field(default_factory=lambda: new_run(1))
    token: uuid.UUID = field(default_factory=uuid.uuid4)
    flags: int = 1 | 1 << bits.CAUSE_SHIFT


@dataclass(slots=True)
class End:
    """One attempt that has ended."""

    shard: int
    run: uuid.UUID
    token: uuid.UUID
    row_exists: bool
    attempt_state: int = AttemptState.SUCCEEDED
    run_state: int = RunState.SUCCEEDED
    next_us: int = 0
    result: bytes | None = None
    failure: bytes | None = None


@dataclass(slots=True)
class Grant:
    """One waiting run that is leased."""

    shard: int
    run: uuid.UUID
    due_us: int = PERIOD_US
    attempt: int = 0
    token: uuid.UUID = field(default_factory=uuid.uuid4)


def moves_of(moves: Sequence[Move], catch_up: Sequence[tuple[int, int]] = (), why: Any = ()) -> Moves:
    """catch_up: (move, schedule_us) of further runs. why: (move, from_us, until_us, count, reason)."""
    columns = Moves(
        shard=_column([m.shard for m in moves], np.int16),
        ref_hi=halves([m.ref for m in moves])[0],
        ref_lo=halves([m.ref for m in moves])[1],
        due_us=_column([m.due_us for m in moves], np.int64),
        version=_column([m.version for m in moves], np.int64),
        decided_us=_column([m.decided_us for m in moves], np.int64),
        next_due_us=_column([m.next_us for m in moves], np.int64),
        next_schedule_us=_column([m.next_us for m in moves], np.int64),
        new_decided_us=_column([m.new_decided_us for m in moves], np.int64),
        run_count=_column([m.run_count for m in moves], np.int32),
        action=_column([m.action for m in moves], np.int16),
        exclusive=_column([m.exclusive for m in moves], np.bool_),
        run_hi=halves([m.run for m in moves])[0],
        run_lo=halves([m.run for m in moves])[1],
        fence=first_fence(EPOCH) + 1 + np.arange(len(moves), dtype=np.int64),
        token_hi=halves([m.token for m in moves])[0],
        token_lo=halves([m.token for m in moves])[1],
        worker=np.ones(len(moves), dtype=np.int32),
        lease_ms=np.full(len(moves), 10_000, dtype=np.int32),
        flags=_column([m.flags for m in moves], np.int32),
    )
    for number, schedule_us in catch_up:
        run = new_run(moves[number].shard)
        columns.more_of.append(number)
        columns.more_run_hi.append(run.int >> 64)
        columns.more_run_lo.append(run.int & ((1 << 64) - 1))
        columns.more_schedule_us.append(schedule_us)
        columns.more_flags.append(2 << bits.CAUSE_SHIFT)
    for number, from_us, until_us, count, reason in why:
        columns.why_of.append(number)
        columns.why_from_us.append(from_us)
        columns.why_until_us.append(until_us)
        columns.why_count.append(count)
        columns.why_reason.append(reason)
    return columns


def outcomes_of(ends: Sequence[End]) -> Outcomes:
    return Outcomes(
        _column([end.shard for end in ends], np.int16),
        *halves([end.run for end in ends]),
        *halves([end.token for end in ends]),
        attempt_state=_column([end.attempt_state for end in ends], np.int16),
        run_state=_column([end.run_state for end in ends], np.int16),
        next_us=_column([end.next_us for end in ends], np.int64),
        row_exists=_column([end.row_exists for end in ends], np.bool_),
        results=[end.result for end in ends],
        result_types=[None if end.result is None else "text/plain" for end in ends],
        failures=[end.failure for end in ends],
        fingerprints=[None if end.failure is None else "print" for end in ends],
    )


def grants_of(grants: Sequence[Grant]) -> RunGrants:
    return RunGrants(
        _column([grant.shard for grant in grants], np.int16),
        *halves([grant.run for grant in grants]),
        due_us=_column([grant.due_us for grant in grants], np.int64),
        attempt=_column([grant.attempt for grant in grants], np.int16),
        fence=first_fence(EPOCH) + 1_000 + np.arange(len(grants), dtype=np.int64),
        token_hi=halves([grant.token for grant in grants])[0],
        token_lo=halves([grant.token for grant in grants])[1],
        worker=np.ones(len(grants), dtype=np.int32),
        lease_ms=np.full(len(grants), 10_000, dtype=np.int32),
    )


class TimerWorld:
    """Shards 1 to 3 are the store's at `EPOCH`, generation 7."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.store = TimerStore(url, TIMER_ID, 1)
        self.connection: psycopg.Connection[dict[str, Any]] = psycopg.connect(
            url, autocommit=True, row_factory=dict_row
        )
        for table in (
            "timer",
            "lease",
            "run",
            "attempt",
            "decision",
            "dead_letter",
            "schedule",
            "timer_node",
        ):
            self.connection.execute(f"DELETE FROM {table}".encode())
        self.connection.execute("UPDATE shard SET epoch = %s, owner = %s, generation = 7", (EPOCH, TIMER_ID))

    async def close(self) -> None:
        await self.store.close()
        self.connection.close()

    def rows(self, table: str, where: str = "true", *parameters: object) -> list[dict[str, Any]]:
        return self.connection.execute(f"SELECT * FROM {table} WHERE {where}".encode(), parameters).fetchall()

    def row(self, table: str, where: str, *parameters: object) -> dict[str, Any]:
        (found,) = self.rows(table, where, *parameters)
        return found

    def other(self) -> psycopg.Connection[Any]:
        """Another connection, such as a coordinator's, not in autocommit."""
        return psycopg.connect(self.url)

    # Rows.

    def schedule(self, shard: int = 1, *, countdown: int = -1, **columns: Any) -> uuid.UUID:
        """A schedule whose first occurrence, at `PERIOD_US`, is due."""
        return self._timer(shard, uuid.uuid4(), kind=1, countdown=countdown, misfire_ms=60_000, **columns)

    def waiting(self, shard: int = 1, *, day_offset: int = 0, **columns: Any) -> uuid.UUID:
        """A run that waits, with its row."""
        run = new_run(shard, day_offset)
        flags = columns.pop("flags", 0) | bits.RUN_ROW | 5 << bits.CAUSE_SHIFT
        self._timer(shard, run, kind=2, countdown=columns.pop("spent", 0), flags=flags, **columns)
        self.run_row(run, shard, columns.get("schedule"))
        return run

    def insert(self, table: str, row: dict[str, Any]) -> None:
        names, holes = ", ".join(row), ", ".join(["%s"] * len(row))
        self.connection.execute(
            f"INSERT INTO {table} ({names}) VALUES ({holes})".encode(), list(row.values())
        )

    def run_row(self, run: uuid.UUID, shard: int, schedule: uuid.UUID | None = None) -> None:
        row = {
            "id": run,
            "schedule": schedule,
            "template_id": 8,
            "version": 0,
            "schedule_us": 1_000,
            "create_us": 1,
            "due_us": 1_000,
            "tenant_id": 1,
            "route_id": 1,
            "shard_id": shard,
            "cause": 5,
            "state": RunState.SCHEDULED,
            "priority": 0,
            "attempt": 0,
        }
        self.insert("run", row)

    def schedule_row(self, uid: uuid.UUID) -> None:
        row = {
            "uid": uid,
            "shard_id": 1,
            "tenant_id": 1,
            "name": uid.hex,
            "version": 1,
            "revision": 4,
            "spec": "{}",
            "trigger_id": 7,
            "template_id": 8,
            "create_us": 1,
            "update_us": 1,
        }
        self.insert("schedule", row)

    def _timer(self, shard: int, ref: uuid.UUID, **columns: Any) -> uuid.UUID:
        row = {
            "shard_id": shard,
            "ref": ref,
            "due_us": PERIOD_US,
            "schedule_us": PERIOD_US,
            "decided_us": 0,
            "version": 1,
            "trigger_id": 7,
            "template_id": 8,
            "schedule": None,
            "tenant_id": 1,
            "route_id": 1,
            "flags": 1,
            "misfire_ms": 0,
            "priority": 0,
            "attempt": 0,
            **columns,
        }
        self.insert("timer", row)
        return ref

    def lease(
        self,
        shard: int = 1,
        *,
        row_exists: bool = False,
        run: uuid.UUID | None = None,
        attempt: int = 1,
        spent: int = 0,
        schedule: uuid.UUID | None = None,
    ) -> tuple[uuid.UUID, uuid.UUID]:
        """A live attempt: (run, token)."""
        run, token = run or new_run(shard), uuid.uuid4()
        row = {
            "run": run,
            "token": token,
            "schedule": schedule,
            "fence": first_fence(EPOCH) + 1,
            "template_id": 8,
            "version": 3,
            "schedule_us": 1_000,
            "due_us": 1_001,
            "create_us": 900,
            "lease_us": 1_002,
            "tenant_id": 1,
            "route_id": 1,
            "worker_no": 4,
            "lease_ms": 10_000,
            "spent": spent,
            "shard_id": shard,
            "attempt": attempt,
            "priority": 2,
            "flags": (bits.RUN_ROW if row_exists else 0) | 1 << bits.CAUSE_SHIFT,
        }
        self.insert("lease", row)
        if row_exists:
            self.run_row(run, shard, schedule)
        return run, token

    # Calls.

    def fence(self, epochs: dict[int, int] | None = None) -> Fence:
        held = epochs if epochs is not None else dict.fromkeys(SHARDS, EPOCH)
        return Fence(_column(sorted(held), np.int16), _column([held[s] for s in sorted(held)], np.int64))

    async def write(
        self,
        *,
        moves: Sequence[Move] | Moves | None = None,
        ends: Sequence[End] | None = None,
        grants: Sequence[Grant] | None = None,
        epochs: dict[int, int] | None = None,
    ) -> Written:
        return await self.store.write(
            0,
            self.fence(epochs),
            NOW_US,
            None if ends is None else outcomes_of(ends),
            moves if isinstance(moves, Moves) or moves is None else moves_of(moves),
            None if grants is None else grants_of(grants),
        )


__all__ = ["NEVER_US", "End", "Grant", "Move", "TimerWorld"]
