"""What does one execution cost Postgres? `TimerStore.write` alone, batch after batch, on an embedded server.

recurring: a schedule's occurrence is leased, and its outcome recorded by the next call.
direct: a run that waits is leased, and its outcome recorded by the next call.

Figures are CPU microseconds an execution, of all processes of that server, and executions a second of one
connection. To try a change, write it as SQL on top of a migrated database and name it: `--variant
no_raised=drop.sql`. Each variant has a database of its own, and they take turns round by round, since a
shared machine is not the same from one minute to the next: compare medians of one run, never two runs.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import psycopg

from tickwheel.domain import flags as bits
from tickwheel.domain.ids import DAY_US, run_id_head
from tickwheel.domain.run import AttemptState, RunState
from tickwheel.embedded.postgres import EmbeddedPostgres
from tickwheel.postgres import arrays, partitions
from tickwheel.postgres.migrate import migrate
from tickwheel.postgres.timer_store import Fence, Moves, Outcomes, RunGrants, TimerStore

SHARD_COUNT = 128
PERIOD_US = 1_000
PARTITIONS_MIN = 5  # What `migrate` makes.

U64 = npt.NDArray[np.uint64]

_SCHEDULES = """
INSERT INTO timer (due_us, schedule_us, decided_us, version, trigger_id, template_id, ref, tenant_id,
                   route_id, flags, misfire_ms, countdown, shard_id, kind, priority, attempt)
SELECT %(period)s, %(period)s, 0, 1, 7, 8, gen_random_uuid(), 1, 1, 1, 60000, -1, n %% %(shards)s, 1, 0, 0
  FROM generate_series(1, %(count)s) AS n"""


@dataclass(slots=True)
class _Keys:
    """Rows to be worked on, in the order of their batches: shard and 128 bits of key."""

    shard: npt.NDArray[np.int16]
    hi: U64
    lo: U64


@dataclass(slots=True)
class Variant:
    """One database under test, and what was measured of it."""

    name: str
    url: str
    store: TimerStore
    fence: Fence
    rng: np.random.Generator
    keys: _Keys | None = None
    due_us: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    next_row: int = 0
    pending: Outcomes | None = None
    cpu_us: list[float] = field(default_factory=list)
    rate: list[float] = field(default_factory=list)


def _now_us() -> int:
    return time.time_ns() // 1_000


def _server_cpu_s(postmaster: psutil.Process) -> float:
    total = 0.0
    for process in (postmaster, *postmaster.children()):
        try:
            # schedstat counts nanoseconds; cpu_times counts ticks of ten milliseconds.
            total += int(Path(f"/proc/{process.pid}/schedstat").read_text().split()[0]) / 1e9
        except OSError:
            with contextlib.suppress(psutil.NoSuchProcess):
                total += sum(process.cpu_times()[:2])
    return total


def _prepare(url: str, partition_count: int, change: str | None) -> None:
    migrate(url, shard_count=SHARD_COUNT)
    with psycopg.connect(url, autocommit=True) as connection:
        now_us = _now_us()
        for days_back in range(0, partition_count - PARTITIONS_MIN, PARTITIONS_MIN):
            partitions.maintain(connection, now_us=now_us - (days_back + PARTITIONS_MIN) * DAY_US)
        if change is not None:
            connection.execute(change.encode())
        connection.execute("UPDATE shard SET epoch = 1, owner = 'bench'")
        connection.execute("ANALYZE shard")


def _sorted_batches(keys: _Keys, batch: int) -> _Keys:
    """A batch goes out sorted by (shard, key); the batches themselves are random rows."""
    shard, hi, lo = keys.shard.copy(), keys.hi.copy(), keys.lo.copy()
    for start in range(0, len(shard), batch):
        rows = slice(start, start + batch)
        order = np.lexsort((lo[rows], hi[rows], shard[rows]))
        shard[rows], hi[rows], lo[rows] = shard[rows][order], hi[rows][order], lo[rows][order]
    return _Keys(shard, hi, lo)


def _fill_schedules(variant: Variant, count: int, batch: int) -> None:
    with psycopg.connect(variant.url, autocommit=True) as connection:
        connection.execute(_SCHEDULES.encode(), {"period": PERIOD_US, "shards": SHARD_COUNT, "count": count})
        connection.execute("VACUUM ANALYZE timer")
        cursor = connection.cursor(binary=True)
        cursor.execute(
            "SELECT array_agg(shard_id), array_agg(ref) FROM (SELECT * FROM timer ORDER BY random()) AS t"
        )
        result = cursor.pgresult
        assert result is not None
        keys = _Keys(arrays.read_int2(result.get_value(0, 0)), *arrays.read_uuid(result.get_value(0, 1)))
    variant.keys = _sorted_batches(keys, batch)
    variant.due_us = np.full(count, PERIOD_US, dtype=np.int64)


def _random_bits(rng: np.random.Generator, count: int) -> U64:
    return rng.integers(0, 1 << 64, count, dtype=np.uint64)


def _run_ids(variant: Variant, shard: npt.NDArray[np.int16]) -> tuple[U64, U64]:
    heads = np.uint64(run_id_head(0, _now_us(), 0)) | (shard.astype(np.uint64) << np.uint64(32))
    return heads, _random_bits(variant.rng, len(shard))


def _outcomes_of(
    shard: npt.NDArray[np.int16], run: tuple[U64, U64], token: tuple[U64, U64], row_exists: bool
) -> Outcomes:
    count = len(shard)
    return Outcomes(
        shard,
        *run,
        *token,
        attempt_state=np.full(count, AttemptState.SUCCEEDED, dtype=np.int16),
        run_state=np.full(count, RunState.SUCCEEDED, dtype=np.int16),
        next_us=np.zeros(count, dtype=np.int64),
        row_exists=np.full(count, row_exists),
    )


async def _recurring_batch(variant: Variant, batch: int) -> int:
    keys = variant.keys
    assert keys is not None
    rows = slice(variant.next_row, variant.next_row + batch)
    variant.next_row = (variant.next_row + batch) % len(keys.shard)
    shard, due_us = keys.shard[rows], variant.due_us[rows]
    count = len(shard)
    run = _run_ids(variant, shard)
    token = (_random_bits(variant.rng, count), _random_bits(variant.rng, count))
    moves = Moves(
        shard=shard,
        ref_hi=keys.hi[rows],
        ref_lo=keys.lo[rows],
        due_us=due_us,
        version=np.ones(count, dtype=np.int64),
        decided_us=due_us - PERIOD_US,
        next_due_us=due_us + PERIOD_US,
        next_schedule_us=due_us + PERIOD_US,
        new_decided_us=due_us.copy(),
        run_count=np.ones(count, dtype=np.int32),
        action=np.ones(count, dtype=np.int16),
        exclusive=np.ones(count, dtype=np.bool_),
        run_hi=run[0],
        run_lo=run[1],
        fence=(1 << 28) + np.arange(count, dtype=np.int64),
        token_hi=token[0],
        token_lo=token[1],
        worker=np.ones(count, dtype=np.int32),
        lease_ms=np.full(count, 10_000, dtype=np.int32),
        flags=np.full(count, 1 | 1 << bits.CAUSE_SHIFT, dtype=np.int32),
    )
    written = await variant.store.write(0, variant.fence, _now_us(), variant.pending, moves, None)
    assert len(written.moves) == count
    assert variant.pending is None or len(written.outcomes) == len(variant.pending.shard)
    variant.due_us[rows] += PERIOD_US
    variant.pending = _outcomes_of(shard, run, token, False)
    return count


async def _direct_batch(variant: Variant, batch: int) -> int:
    keys = variant.keys
    assert keys is not None
    rows = slice(variant.next_row, variant.next_row + batch)
    variant.next_row += batch
    shard = keys.shard[rows]
    count = len(shard)
    token = (_random_bits(variant.rng, count), _random_bits(variant.rng, count))
    run = (keys.hi[rows], keys.lo[rows])
    grants = RunGrants(
        shard=shard,
        ref_hi=run[0],
        ref_lo=run[1],
        due_us=np.full(count, PERIOD_US, dtype=np.int64),
        attempt=np.zeros(count, dtype=np.int16),
        fence=(1 << 28) + np.arange(count, dtype=np.int64),
        token_hi=token[0],
        token_lo=token[1],
        worker=np.ones(count, dtype=np.int32),
        lease_ms=np.full(count, 10_000, dtype=np.int32),
    )
    written = await variant.store.write(0, variant.fence, _now_us(), variant.pending, None, grants)
    assert len(written.grants) == count
    assert variant.pending is None or len(written.outcomes) == len(variant.pending.shard)
    variant.pending = _outcomes_of(shard, run, token, True)
    return count


_RUNS = """
WITH n AS (SELECT * FROM unnest(%s, %s) AS a(shard, run)),
w AS (
    INSERT INTO timer (due_us, schedule_us, decided_us, version, trigger_id, template_id, ref, tenant_id,
                       route_id, flags, misfire_ms, countdown, shard_id, kind, priority, attempt)
    SELECT 1000, 1000, 1, 0, 0, 8, n.run, 1, 1, 64 | (5 << 12), 0, 0, n.shard, 2, 0, 0 FROM n)
INSERT INTO run (id, template_id, version, schedule_us, create_us, due_us, tenant_id, route_id, shard_id,
                 cause, state, priority, attempt)
SELECT n.run, 8, 0, 1000, %s, 1000, 1, 1, n.shard, 5, 1, 0, 0 FROM n"""


def _fill_runs(variant: Variant, count: int, batch: int) -> None:
    shard = variant.rng.integers(0, SHARD_COUNT, count).astype(np.int16)
    keys = _sorted_batches(_Keys(shard, *_run_ids(variant, shard)), batch)
    with psycopg.connect(variant.url, autocommit=True) as connection:
        arrays.register(connection)
        connection.execute(_RUNS, [arrays.int2(keys.shard), arrays.uuid(keys.hi, keys.lo), _now_us()])
        connection.execute("VACUUM ANALYZE timer")
        connection.execute("ANALYZE run")
    variant.keys = keys
    variant.next_row = 0


async def _measure(
    variants: list[Variant], postmaster: psutil.Process, path: str, batch: int, calls: int, rounds: int
) -> None:
    step: Callable[[Variant, int], Any] = _recurring_batch if path == "recurring" else _direct_batch
    for number in range(rounds + 1):
        for variant in variants if number % 2 else reversed(variants):
            done, cpu_s, began = 0, _server_cpu_s(postmaster), time.perf_counter()
            for _ in range(calls):
                done += await step(variant, batch)
            took_s, cpu_s = time.perf_counter() - began, _server_cpu_s(postmaster) - cpu_s
            if number:  # The first round warms up: plans, caches, the first pages.
                variant.cpu_us.append(cpu_s / done * 1e6)
                variant.rate.append(done / took_s)


async def _run(
    server: EmbeddedPostgres, options: argparse.Namespace, changes: dict[str, str | None]
) -> dict[str, Any]:
    variants = []
    for number, (name, change) in enumerate(changes.items()):
        url = server.create_database(f"sql_{number}")
        await asyncio.to_thread(_prepare, url, options.partitions, change)
        shards = np.arange(SHARD_COUNT, dtype=np.int16)
        fence = Fence(shards, np.ones(SHARD_COUNT, dtype=np.int64))
        variant = Variant(name, url, TimerStore(url, "bench", 1), fence, np.random.default_rng(1))
        if options.path == "recurring":
            await asyncio.to_thread(_fill_schedules, variant, options.rows, options.batch)
        else:
            total = options.batch * options.calls * (options.rounds + 1)
            await asyncio.to_thread(_fill_runs, variant, total, options.batch)
        variants.append(variant)
    postmaster = _postmaster(variants[0].url)
    await _measure(variants, postmaster, options.path, options.batch, options.calls, options.rounds)
    figures = {}
    for variant in variants:
        await variant.store.close()
        low, *_, high = (
            statistics.quantiles(variant.cpu_us, n=4) if options.rounds > 1 else variant.cpu_us * 2
        )
        figures[variant.name] = {
            "cpu_us_each": round(statistics.median(variant.cpu_us), 2),
            "cpu_us_each_quartiles": [round(low, 2), round(high, 2)],
            "executions_per_s": round(statistics.median(variant.rate)),
        }
    return figures


def _postmaster(url: str) -> psutil.Process:
    with psycopg.connect(url) as connection:
        parent = psutil.Process(connection.info.backend_pid).parent()
    assert parent is not None
    return parent


def run(
    path: str = "recurring",
    *,
    partition_count: int = PARTITIONS_MIN,
    batch: int = 1_000,
    rows: int = 200_000,
    calls: int = 20,
    rounds: int = 8,
    changes: dict[str, str | None] | None = None,
    settings: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Figures by variant; "as_is" is the schema of this version. `changes`: SQL by variant's name."""
    options = argparse.Namespace(
        path=path, partitions=partition_count, batch=batch, rows=rows, calls=calls, rounds=rounds
    )
    with tempfile.TemporaryDirectory(prefix="tw", dir="/tmp", ignore_cleanup_errors=True) as folder:
        server = EmbeddedPostgres(Path(folder) / "p", settings=settings or {})
        server.start()
        try:
            figures = asyncio.run(_run(server, options, {"as_is": None, **(changes or {})}))
        finally:
            server.stop()
    return {"path": path, "partitions": partition_count, "batch": batch, "variants": figures}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tickwheel.bench.sql", description=__doc__)
    parser.add_argument("--path", choices=("recurring", "direct"), default="recurring")
    parser.add_argument("--partitions", type=int, default=PARTITIONS_MIN, help="of run and attempt: days")
    parser.add_argument("--batch", type=int, default=1_000)
    parser.add_argument("--rows", type=int, default=200_000, help="schedules (recurring)")
    parser.add_argument("--calls", type=int, default=20, help="batches a variant and round")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--variant", action="append", default=[], metavar="NAME=FILE", help="SQL to try")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="of the server")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    changes = {name: Path(file).read_text() for name, _, file in (v.partition("=") for v in options.variant)}
    figures = run(
        options.path,
        partition_count=options.partitions,
        batch=options.batch,
        rows=options.rows,
        calls=options.calls,
        rounds=options.rounds,
        changes=dict(changes),
        settings=dict(setting.split("=", 1) for setting in options.set),
    )
    if options.json:
        print(json.dumps(figures))
        return
    print(f"{figures['path']}, {figures['partitions']} partitions, batches of {figures['batch']}")
    for name, found in figures["variants"].items():
        low, high = found["cpu_us_each_quartiles"]
        print(
            f"{name:28} {found['cpu_us_each']:7.2f} us ({low:.2f} to {high:.2f})"
            f" {found['executions_per_s']:8,}/s"
        )


if __name__ == "__main__":
    main()
