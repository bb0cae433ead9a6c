"""The timer's calls to Postgres: fenced batches out, columns in.

Three kinds of connection, so that none waits behind another: `write` (one a lane, a batch at a time),
`read` (loads and details) and `control` (takes, re-takes and proofs, with a lock_timeout). Every connection
is made anew after a failure, with a bounded backoff.

A write whose connection died before its answer has an *unknown* result: it raises `CommitUnknown`, and the
owner takes its shards again before it relies on anything (design, section 6). A write that the server
refused raises `BatchRefused`: nothing of it took effect.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import psycopg
from psycopg import sql
from psycopg.pq import TransactionStatus

from tickwheel.domain.timer_rows import TimerRows
from tickwheel.errors import StoreUnavailable, TickwheelError
from tickwheel.ports import ClusterFacts
from tickwheel.postgres import arrays, statements
from tickwheel.postgres.history import read_facts

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

TAKE_LOCK_TIMEOUT_MS: Final = 500
CONNECT_TIMEOUT_S: Final = 5

_SQL: Final = statements.load("timer.sql")
_WRITE_PARAMETERS: Final = 52
_WRITE: Final = (
    "SELECT lost, o_done, m_done, m_busy, r_done FROM tw_write(" + ", ".join(["%s"] * _WRITE_PARAMETERS) + ")"
)

_NO_U64: Final = np.empty(0, dtype=np.uint64)
_E_INT2: Final = arrays.int2([])
_E_INT4: Final = arrays.int4([])
_E_INT8: Final = arrays.int8([])
_E_BOOL: Final = arrays.boolean([])
_E_UUID: Final = arrays.uuid(_NO_U64, _NO_U64)
_E_BYTEA: Final = arrays.bytea([])
_E_TEXT: Final = arrays.text([])


class CommitUnknown(TickwheelError):
    """The connection died before the answer: the write may have been committed, or not."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"a batch was sent and not answered: {reason}")


class BatchRefused(TickwheelError):
    """The server refused a batch for its data: nothing of it took effect. Halve it, or set the row aside."""

    def __init__(self, sqlstate: str, reason: str) -> None:
        self.sqlstate = sqlstate
        self.reason = reason
        super().__init__(f"a batch was refused ({sqlstate}): {reason}")


class ShardBusy(TickwheelError):
    """A shard's fence was not given within the lock timeout: somebody holds it."""


@dataclass(frozen=True, slots=True)
class Fence:
    """The shards of a call, sorted, and the epochs under which the caller holds them."""

    shards: npt.NDArray[np.int16]
    epochs: I64


@dataclass(slots=True)
class LeaseRows:
    """Rows of `lease`, one array a column."""

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
    lease_ms: npt.NDArray[np.int32]
    spent: npt.NDArray[np.int32]
    schedule_us: I64
    due_us: I64
    lease_us: I64
    worker: npt.NDArray[np.int32]
    priority: npt.NDArray[np.int16]
    cancel_until_us: I64

    def __len__(self) -> int:
        return len(self.fence)


@dataclass(slots=True)
class Outcomes:
    """Attempts that have ended. Sorted by (shard, run). States are those of `domain.run`."""

    shard: npt.NDArray[np.int16]
    run_hi: U64
    run_lo: U64
    token_hi: U64
    token_lo: U64
    attempt_state: npt.NDArray[np.int16]
    run_state: npt.NDArray[np.int16]
    next_us: I64
    row_exists: npt.NDArray[np.bool_]
    results: Sequence[bytes | None] | None = None
    result_types: Sequence[str | None] | None = None
    failures: Sequence[bytes | None] | None = None
    fingerprints: Sequence[str | None] | None = None


@dataclass(slots=True)
class Moves:
    """Occurrences that are decided. Sorted by (shard, ref). `action`: 0 nothing, 1 lease, 2 a waiting run."""

    shard: npt.NDArray[np.int16]
    ref_hi: U64
    ref_lo: U64
    due_us: I64
    version: I64
    decided_us: I64
    next_due_us: I64
    next_schedule_us: I64
    new_decided_us: I64
    run_count: npt.NDArray[np.int32]
    action: npt.NDArray[np.int16]
    exclusive: npt.NDArray[np.bool_]
    run_hi: U64
    run_lo: U64
    fence: I64
    token_hi: U64
    token_lo: U64
    worker: npt.NDArray[np.int32]
    lease_ms: npt.NDArray[np.int32]
    flags: npt.NDArray[np.int32]
    # Catch-up: further waiting runs of move `more_of` (0-based).
    more_of: list[int] = field(default_factory=list)
    more_run_hi: list[int] = field(default_factory=list)
    more_run_lo: list[int] = field(default_factory=list)
    more_schedule_us: list[int] = field(default_factory=list)
    more_flags: list[int] = field(default_factory=list)
    # Decisions of move `why_of` (0-based).
    why_of: list[int] = field(default_factory=list)
    why_from_us: list[int] = field(default_factory=list)
    why_until_us: list[int] = field(default_factory=list)
    why_count: list[int] = field(default_factory=list)
    why_reason: list[int] = field(default_factory=list)


@dataclass(slots=True)
class RunGrants:
    """Waiting runs that are leased. Sorted by (shard, ref)."""

    shard: npt.NDArray[np.int16]
    ref_hi: U64
    ref_lo: U64
    due_us: I64
    attempt: npt.NDArray[np.int16]
    fence: I64
    token_hi: U64
    token_lo: U64
    worker: npt.NDArray[np.int32]
    lease_ms: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Written:
    """What took effect: 0-based row numbers of each group, and the shards that were lost."""

    lost: list[int]
    outcomes: I64
    moves: I64
    busy: I64
    grants: I64


def _ordinals(values: list[int] | None) -> I64:
    return np.array(values or [], dtype=np.int64) - 1


Known = tuple[ClusterFacts | None, int]
"""What the registry knew of Postgres at one moment, and its incarnation."""


class Guard(Protocol):
    """Says which connections may be used. `admit` and `check` raise StoreUnavailable where one may not."""

    def admit(self) -> None:
        """Before a connection is made or used."""
        ...

    async def known(self) -> Known:
        """Before one is made: what it will be compared with. Read first, for a log only grows."""
        ...

    def check(self, known: Known, found: ClusterFacts) -> None:
        """After it was made, with what is behind it."""
        ...


def is_connection_loss(error: psycopg.Error) -> bool:
    """Whether the answer never came: the server may have committed what was sent.

    57P.. is the server going away under the call: its answer does not prove that the commit did not happen.
    """
    state = error.sqlstate
    return state is None or state.startswith(("08", "57P"))


class Connection:
    """One connection of a timer: made when it is needed, dropped after a failure, used by one call at a
    time."""

    def __init__(self, url: str, name: str, setup: Sequence[str] = ()) -> None:
        self._url = url
        self._name = name
        self._setup = setup
        self.guard: Guard | None = None
        self._lock = asyncio.Lock()
        self._connection: psycopg.AsyncConnection[Any] | None = None
        self._failures = 0
        self.pid = 0

    async def _connect(self) -> psycopg.AsyncConnection[Any]:
        if self.guard is not None:
            self.guard.admit()
        if self._connection is not None and not self._connection.closed:
            return self._connection
        if self._failures:
            await asyncio.sleep(min(0.05 * 2 ** min(self._failures, 5), 1.0))
        self._failures += 1
        known = await self.guard.known() if self.guard is not None else (None, 0)
        try:
            connection = await psycopg.AsyncConnection.connect(
                self._url,
                autocommit=True,
                connect_timeout=CONNECT_TIMEOUT_S,
                application_name=self._name[:60],
                prepare_threshold=1,
                keepalives_idle=5,
                keepalives_interval=2,
                keepalives_count=3,
                tcp_user_timeout=10_000,
            )
            await arrays.prepare_hot_connection(connection)
            for statement in self._setup:
                await connection.execute(sql.SQL(statement))
            if self.guard is not None:
                try:
                    self.guard.check(known, await read_facts(connection))
                except BaseException:
                    await connection.close()
                    raise
        except (psycopg.Error, OSError) as error:
            raise StoreUnavailable("Postgres", str(error).strip() or type(error).__name__) from error
        self._connection = connection
        self._failures = 0
        self.pid = connection.info.backend_pid
        return connection

    async def run(self, query: str, parameters: Any = None, *, raw: bool = False) -> Any:
        """Rows, or with `raw` the bytes of the single row's columns.

        Raises:
            StoreUnavailable: nothing was sent.
            CommitUnknown: it was sent, and the answer did not come.
            BatchRefused: the server refused it.
        """
        async with self._lock:
            connection = await self._connect()
            try:
                cursor = connection.cursor(binary=True)
                await cursor.execute(query, parameters, prepare=True)
                if raw:
                    result = cursor.pgresult
                    assert result is not None
                    if result.ntuples == 0:
                        return [None] * result.nfields
                    return [result.get_value(0, column) for column in range(result.nfields)]
                return await cursor.fetchall() if cursor.description else []
            except psycopg.Error as error:
                if is_connection_loss(error) or connection.info.transaction_status in (
                    TransactionStatus.UNKNOWN,
                    TransactionStatus.ACTIVE,
                ):
                    await self._drop()
                    raise CommitUnknown(str(error).strip() or type(error).__name__) from error
                raise BatchRefused(error.sqlstate or "", str(error).strip()) from error
            except asyncio.CancelledError:
                await self._drop()
                raise

    async def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    async def close(self) -> None:
        await self._drop()

    async def renew(self) -> None:
        """The next call makes a connection of its own; one that is under way comes to its end before."""
        async with self._lock:
            await self._drop()


class TimerStore:
    """All that a timer asks of Postgres. Methods raise as `Connection.run` does."""

    def __init__(self, url: str, timer_id: str, lane_count: int) -> None:
        self._url = url
        self.timer_id = timer_id
        self._writers = [Connection(url, f"{timer_id} lane {n}") for n in range(lane_count)]
        self._reader = Connection(url, f"{timer_id} read")
        self._details = Connection(url, f"{timer_id} details")
        self._control = Connection(
            url, f"{timer_id} control", [f"SET lock_timeout = '{TAKE_LOCK_TIMEOUT_MS}ms'"]
        )
        self._stamper = Connection(url, f"{timer_id} proof")

    @property
    def _connections(self) -> tuple[Connection, ...]:
        return (*self._writers, self._reader, self._details, self._control, self._stamper)

    async def close(self) -> None:
        for connection in self._connections:
            await connection.close()

    def watch(self, guard: Guard) -> None:
        """From now on `guard` admits each call, and is given what is behind each new connection."""
        for connection in self._connections:
            connection.guard = guard

    async def renew(self) -> None:
        """Closes every connection, once what is under way on it has ended: what comes next is checked."""
        for connection in self._connections:
            await connection.renew()

    async def probe(self) -> ClusterFacts:
        """What is behind a connection that is made now, unchecked, and closed. Raises StoreUnavailable."""
        try:
            async with await psycopg.AsyncConnection.connect(
                self._url, autocommit=True, connect_timeout=CONNECT_TIMEOUT_S
            ) as connection:
                return await read_facts(connection)
        except (psycopg.Error, OSError) as error:
            raise StoreUnavailable("Postgres", str(error).strip() or type(error).__name__) from error

    # Fenced writes.

    async def write(
        self,
        lane: int,
        fence: Fence,
        now_us: int,
        outcomes: Outcomes | None,
        moves: Moves | None,
        grants: RunGrants | None,
    ) -> Written:
        """One batch: one call, committed by itself, and all or part of it effective, as the answer says."""
        parameters = [
            arrays.int2(fence.shards),
            arrays.int8(fence.epochs),
            self.timer_id,
            now_us,
            False,
            *_outcome_parameters(outcomes, now_us),
            *_move_parameters(moves),
            *_grant_parameters(grants),
        ]
        rows = await self._writers[lane].run(_WRITE, parameters)
        lost, o_done, m_done, m_busy, r_done = rows[0]
        return Written(
            list(lost or []), _ordinals(o_done), _ordinals(m_done), _ordinals(m_busy), _ordinals(r_done)
        )

    async def stamp(self, fence: Fence, now_us: int) -> list[int]:
        """Proves that the shards are ours still, and says so in `timer_node`. Returns those that are lost."""
        parameters = [
            arrays.int2(fence.shards),
            arrays.int8(fence.epochs),
            self.timer_id,
            now_us,
            True,
            *_outcome_parameters(None, now_us),
            *_move_parameters(None),
            *_grant_parameters(None),
        ]
        rows = await self._stamper.run(_WRITE, parameters)
        return list(rows[0][0] or [])

    async def quarantine(
        self, fence: Fence, now_us: int, rows: TimerRows, reasons: Sequence[str]
    ) -> list[int]:
        """Sets schedules aside (I11). Returns the shards that were lost."""
        found = await self._reader.run(
            "SELECT lost FROM tw_quarantine(%s, %s, %s, %s, %s, %s, %s)",
            [
                arrays.int2(fence.shards),
                arrays.int8(fence.epochs),
                now_us,
                arrays.int2(rows.shard),
                arrays.uuid(rows.ref_hi, rows.ref_lo),
                arrays.int8(rows.version),
                arrays.text(reasons),
            ],
        )
        return list(found[0][0] or [])

    async def end_waiting(
        self, fence: Fence, now_us: int, rows: TimerRows, states: I64, failures: Sequence[bytes | None]
    ) -> list[int]:
        """Ends runs that wait: too late to start, or not to be granted at all. Returns the lost shards."""
        found = await self._reader.run(
            "SELECT lost FROM tw_end_waiting(%s, %s, %s, %s, %s, %s, %s, %s, %s)",
            [
                arrays.int2(fence.shards),
                arrays.int8(fence.epochs),
                now_us,
                arrays.int2(rows.shard),
                arrays.uuid(rows.ref_hi, rows.ref_lo),
                arrays.int8(rows.due_us),
                arrays.int2(rows.attempt),
                arrays.int2(states),
                arrays.bytea(failures),
            ],
        )
        return list(found[0][0] or [])

    async def progress(
        self, fence: Fence, shards: I64, run: tuple[U64, U64], token: tuple[U64, U64], bodies: Sequence[bytes]
    ) -> list[int]:
        found = await self._reader.run(
            "SELECT tw_progress(%s, %s, %s, %s, %s, %s)",
            [
                arrays.int2(fence.shards),
                arrays.int8(fence.epochs),
                arrays.int2(shards),
                arrays.uuid(*run),
                arrays.uuid(*token),
                arrays.bytea(bodies),
            ],
        )
        return list(found[0][0] or [])

    # Taking shards.

    async def take(self, generations: Mapping[int, int], now_us: int) -> dict[int, int]:
        """Takes shards, or takes its own again. Returns the epochs of those that were taken.

        Raises:
            ShardBusy: a fence was not given in time. Nothing was taken; end the blockers and try again.
        """
        shards = sorted(generations)
        try:
            rows = await self._control.run(
                _SQL["take"],
                {
                    "shard": arrays.int2(shards),
                    "generation": arrays.int8([generations[shard] for shard in shards]),
                    "owner": self.timer_id,
                    "now": now_us,
                },
            )
        except BatchRefused as error:
            if error.sqlstate == "55P03":
                raise ShardBusy(str(error)) from error
            raise
        taken, epochs = rows[0]
        return dict(zip(taken, epochs, strict=True))

    async def end_blockers(self, shards: Sequence[int]) -> list[int]:
        """Terminates the backends that hold these fences, shared and granted. Returns their pids."""
        async with await psycopg.AsyncConnection.connect(
            self._url, autocommit=True, connect_timeout=CONNECT_TIMEOUT_S
        ) as connection:
            arrays.register(connection)
            found = await connection.execute(_SQL["fence_blockers"], {"shard": arrays.int4(shards)})
            pids = [row[0] for row in await found.fetchall()]
            for pid in pids:
                await connection.execute("SELECT pg_terminate_backend(%s)", [pid])
        return pids

    # Reads.

    async def load_timers(
        self,
        shard: npt.ArrayLike,
        tenant: npt.ArrayLike,
        after_due_us: npt.ArrayLike,
        after_ref: tuple[U64, U64],
        until_due_us: npt.ArrayLike,
        page_max: int,
        *,
        raised: bool = False,
    ) -> TimerRows:
        """The rows due in each (shard, tenant)'s window, at most `page_max` of each."""
        wire = await self._reader.run(
            _SQL["load_raised" if raised else "load_timers"],
            {
                "shard": arrays.int2(shard),
                "tenant": arrays.int4(tenant),
                "after_due": arrays.int8(after_due_us),
                "after_ref": arrays.uuid(*after_ref),
                "until_due": arrays.int8(until_due_us),
                "page_max": page_max,
            },
            raw=True,
        )
        return _timer_rows(wire)

    async def peek_timers(self, shard: npt.ArrayLike, ref_hi: U64, ref_lo: U64) -> TimerRows:
        wire = await self._reader.run(
            _SQL["peek_timers"],
            {"shard": arrays.int2(shard), "ref": arrays.uuid(ref_hi, ref_lo)},
            raw=True,
        )
        return _timer_rows(wire)

    async def list_tenants(
        self, shards: npt.ArrayLike
    ) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int32]]:
        """(shard, tenant) pairs that have timers."""
        wire = await self._reader.run(_SQL["list_tenants"], {"shard": arrays.int2(shards)}, raw=True)
        return arrays.read_int2(wire[0]), arrays.read_int4(wire[1])

    async def load_leases(self, shards: npt.ArrayLike) -> LeaseRows:
        wire = await self._reader.run(_SQL["load_leases"], {"shard": arrays.int2(shards)}, raw=True)
        columns: list[Any] = [arrays.read_int2(wire[0])]
        columns += arrays.read_uuid(wire[1])
        columns += arrays.read_uuid(wire[2])
        columns += [arrays.read_int8(wire[3]), arrays.read_int2(wire[4])]
        columns += arrays.read_uuid(wire[5])
        columns += [arrays.read_int8(column) for column in wire[6:8]]
        columns += [arrays.read_int4(column) for column in wire[8:13]]
        columns += [arrays.read_int8(column) for column in wire[13:16]]
        columns += [arrays.read_int4(wire[16]), arrays.read_int2(wire[17]), arrays.read_int8(wire[18])]
        return LeaseRows(*columns)

    async def load_cancels(self, shards: npt.ArrayLike) -> list[tuple[int, Any, Any, int, str]]:
        rows: list[tuple[int, Any, Any, int, str]] = await self._reader.run(
            _SQL["load_cancels"], {"shard": arrays.int2(shards)}
        )
        return rows

    async def load_definitions(
        self, triggers: Sequence[int], templates: Sequence[int]
    ) -> tuple[dict[int, bytes], dict[int, bytes]]:
        rows = await self._details.run(
            _SQL["load_definitions"],
            {"trigger": arrays.int8(list(triggers)), "template": arrays.int8(list(templates))},
        )
        found: tuple[dict[int, bytes], dict[int, bytes]] = ({}, {})
        for key, body, kind in rows:
            found[kind - 1][key] = body
        return found

    async def load_schedule_heads(
        self, hi: U64, lo: U64, version: npt.ArrayLike
    ) -> list[tuple[Any, int, str, bytes, str, str]]:
        rows: list[tuple[Any, int, str, bytes, str, str]] = await self._details.run(
            _SQL["load_schedule_heads"], {"uid": arrays.uuid(hi, lo), "version": arrays.int8(version)}
        )
        return rows

    async def load_misfire_rules(
        self, hi: U64, lo: U64, version: npt.ArrayLike
    ) -> list[tuple[Any, int, dict[str, Any] | None]]:
        """(uid, version, the `misfire` of the spec as it was typed) of each."""
        rows: list[tuple[Any, int, dict[str, Any] | None]] = await self._details.run(
            _SQL["load_misfire_rules"], {"uid": arrays.uuid(hi, lo), "version": arrays.int8(version)}
        )
        return rows

    async def load_run_details(self, shard: npt.ArrayLike, hi: U64, lo: U64) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = await self._details.run(
            _SQL["load_run_details"], {"shard": arrays.int2(shard), "run": arrays.uuid(hi, lo)}
        )
        return rows

    async def load_tenants(self, tenants: Sequence[int]) -> list[tuple[int, str, int]]:
        rows: list[tuple[int, str, int]] = await self._details.run(
            _SQL["load_tenants"], {"tenant": arrays.int4(list(tenants))}
        )
        return rows

    async def find_tenants(self, names: Sequence[str]) -> list[tuple[int, str, int]]:
        rows: list[tuple[int, str, int]] = await self._details.run(
            _SQL["find_tenants"], {"name": arrays.text(list(names))}
        )
        return rows

    async def load_routes(self, after: int) -> list[tuple[int, str, str]]:
        rows: list[tuple[int, str, str]] = await self._details.run(_SQL["load_routes"], {"after": after})
        return rows

    async def outcome_states(
        self, shard: npt.ArrayLike, hi: U64, lo: U64, attempt: npt.ArrayLike
    ) -> list[tuple[int, int, int, int, Any, int]]:
        """For each (run, attempt): (ordinal from 1, the run's state, its last fence, that attempt's
        fence, the token of its live lease or None, that attempt's state); 0 where there is no row."""
        rows: list[tuple[int, int, int, int, Any, int]] = await self._details.run(
            _SQL["outcome_state"],
            {"shard": arrays.int2(shard), "run": arrays.uuid(hi, lo), "attempt": arrays.int2(attempt)},
        )
        return rows

    async def register_worker(self, worker_id: str, pool: str, host: str, now_us: int) -> int:
        rows = await self._details.run(
            _SQL["register_worker"], {"worker_id": worker_id, "pool": pool, "host": host, "now": now_us}
        )
        return int(rows[0][0])

    async def register_timer(self, node_name: str, address: str, now_us: int) -> None:
        await self._details.run(
            _SQL["register_timer"],
            {"timer_id": self.timer_id, "node_name": node_name, "address": address, "now": now_us},
        )

    async def forget_timer(self) -> None:
        await self._details.run(_SQL["forget_timer"], {"timer_id": self.timer_id})

    async def clock_us(self) -> int:
        """The cluster's time by Postgres, microseconds since 1970."""
        rows = await self._stamper.run(_SQL["clock"])
        return int(rows[0][0])

    async def cluster(self) -> tuple[Any, int, int, int]:
        """(cluster id, number of shards, incarnation, clock offset in us)."""
        rows = await self._details.run(_SQL["cluster"])
        return tuple(rows[0])


def _timer_rows(wire: list[bytes | None]) -> TimerRows:
    columns: list[Any] = [arrays.read_int2(wire[0]), arrays.read_int2(wire[1]).astype(np.int8)]
    columns += arrays.read_uuid(wire[2])
    columns += [arrays.read_int8(column) for column in wire[3:9]]
    columns += arrays.read_uuid(wire[9])
    columns += [arrays.read_int4(column) for column in wire[10:15]]
    columns += [arrays.read_int2(wire[15]).astype(np.int8), arrays.read_int2(wire[16])]
    return TimerRows(*columns)


_NO_OUTCOMES: Final = [
    _E_INT2,
    _E_UUID,
    _E_UUID,
    _E_INT2,
    _E_INT2,
    _E_INT8,
    _E_INT8,
    _E_BYTEA,
    _E_TEXT,
    _E_BYTEA,
    _E_TEXT,
    False,
    False,
]


def _outcome_parameters(o: Outcomes | None, now_us: int) -> list[Any]:
    if o is None or len(o.shard) == 0:
        return _NO_OUTCOMES
    count = len(o.shard)
    return [
        arrays.int2(o.shard),
        arrays.uuid(o.run_hi, o.run_lo),
        arrays.uuid(o.token_hi, o.token_lo),
        arrays.int2(o.attempt_state),
        arrays.int2(o.run_state),
        arrays.int8(np.full(count, now_us, dtype=np.int64)),
        arrays.int8(o.next_us),
        arrays.bytea_nulls(count) if o.results is None else arrays.bytea(o.results),
        arrays.text_nulls(count) if o.result_types is None else arrays.text(o.result_types),
        arrays.bytea_nulls(count) if o.failures is None else arrays.bytea(o.failures),
        arrays.text_nulls(count) if o.fingerprints is None else arrays.text(o.fingerprints),
        bool(o.row_exists.any()),
        bool((~o.row_exists).any()),
    ]


_NO_MOVES: Final = [
    _E_INT2,
    _E_UUID,
    *[_E_INT8] * 6,
    _E_INT4,
    _E_INT2,
    _E_BOOL,
    _E_UUID,
    _E_INT8,
    _E_UUID,
    _E_INT4,
    _E_INT4,
    _E_INT4,
    *(_E_INT4, _E_UUID, _E_INT8, _E_INT4),
    *(_E_INT4, _E_INT8, _E_INT8, _E_INT8, _E_INT2),
]


def _move_parameters(m: Moves | None) -> list[Any]:
    if m is None or len(m.shard) == 0:
        return _NO_MOVES
    more = [
        arrays.int4(np.array(m.more_of, dtype=np.int32) + 1),
        arrays.uuid(np.array(m.more_run_hi, dtype=np.uint64), np.array(m.more_run_lo, dtype=np.uint64)),
        arrays.int8(m.more_schedule_us),
        arrays.int4(m.more_flags),
    ]
    why = [
        arrays.int4(np.array(m.why_of, dtype=np.int32) + 1),
        arrays.int8(m.why_from_us),
        arrays.int8(m.why_until_us),
        arrays.int8(m.why_count),
        arrays.int2(m.why_reason),
    ]
    return [
        arrays.int2(m.shard),
        arrays.uuid(m.ref_hi, m.ref_lo),
        arrays.int8(m.due_us),
        arrays.int8(m.version),
        arrays.int8(m.decided_us),
        arrays.int8(m.next_due_us),
        arrays.int8(m.next_schedule_us),
        arrays.int8(m.new_decided_us),
        arrays.int4(m.run_count),
        arrays.int2(m.action),
        arrays.boolean(m.exclusive),
        arrays.uuid(m.run_hi, m.run_lo),
        arrays.int8(m.fence),
        arrays.uuid(m.token_hi, m.token_lo),
        arrays.int4(m.worker),
        arrays.int4(m.lease_ms),
        arrays.int4(m.flags),
        *(more if m.more_of else (_E_INT4, _E_UUID, _E_INT8, _E_INT4)),
        *(why if m.why_of else (_E_INT4, _E_INT8, _E_INT8, _E_INT8, _E_INT2)),
    ]


_NO_GRANTS: Final = [_E_INT2, _E_UUID, _E_INT8, _E_INT2, _E_INT8, _E_UUID, _E_INT4, _E_INT4]


def _grant_parameters(r: RunGrants | None) -> list[Any]:
    if r is None or len(r.shard) == 0:
        return _NO_GRANTS
    return [
        arrays.int2(r.shard),
        arrays.uuid(r.ref_hi, r.ref_lo),
        arrays.int8(r.due_us),
        arrays.int2(r.attempt),
        arrays.int8(r.fence),
        arrays.uuid(r.token_hi, r.token_lo),
        arrays.int4(r.worker),
        arrays.int4(r.lease_ms),
    ]
