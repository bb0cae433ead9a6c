"""Every hot statement goes by index, nested, whatever the tables hold: none, little, or stale statistics.

auto_explain says what the server really ran, inside the functions too.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import psycopg
import pytest
from tests.integration.timer_world import (
    EPOCH,
    NEVER_US,
    NOW_US,
    End,
    Grant,
    Move,
    TimerWorld,
    halves,
    moves_of,
    new_run,
)

from tickwheel.domain.run import AttemptState, RunState
from tickwheel.postgres import arrays, statements
from tickwheel.postgres.timer_store import Connection

TABLES = "timer, lease, run, attempt, decision, dead_letter, schedule"
WATCH = [
    "LOAD 'auto_explain'",
    "SET auto_explain.log_min_duration = 0",
    "SET auto_explain.log_nested_statements = on",
    "SET auto_explain.log_format = json",
    "SET auto_explain.log_level = notice",
]
HOT = re.compile(r"timer|lease|run(_c\d+_d\d+)?|attempt(_c\d+_d\d+)?|schedule|schedule_revision")
FORBIDDEN = {"Seq Scan", "Hash Join", "Merge Join", "Bitmap Heap Scan"}
STATISTICS = {
    "never analysed": "SELECT 1",
    "analysed when empty": f"ANALYZE {TABLES}",
}


class Watched:
    """What auto_explain has said on one connection."""

    def __init__(self) -> None:
        self.plans: list[dict[str, Any]] = []

    def hear(self, diagnostic: psycopg.errors.Diagnostic) -> None:
        _, found, plan = (diagnostic.message_primary or "").partition("plan:\n")
        if found:
            self.plans.append(json.loads(plan))

    def nodes(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for plan in self.plans:
            waiting = [plan["Plan"]]
            while waiting:
                node = waiting.pop()
                yield plan["Query Text"], node
                waiting += node.get("Plans", [])


async def _watch(connection: Connection) -> Watched:
    watched = Watched()
    raw = await connection._connect()
    for statement in WATCH:
        await raw.execute(statement.encode())
    raw.add_notice_handler(watched.hear)
    return watched


def _check(watched: Watched) -> None:
    assert watched.plans, "auto_explain said nothing"
    for query, node in watched.nodes():
        table = node.get("Relation Name", "")
        kind = node["Node Type"]
        where = f"{kind} of {table or 'a join'} in: {query[:200]}"
        assert kind not in FORBIDDEN - {"Seq Scan"}, where
        assert not (kind == "Seq Scan" and HOT.fullmatch(table)), where


@pytest.fixture(params=STATISTICS)
async def world(request: pytest.FixtureRequest, migrated_url: str) -> AsyncIterator[TimerWorld]:
    world = TimerWorld(migrated_url)
    world.connection.execute(STATISTICS[request.param].encode())
    yield world
    await world.close()


def _fill(world: TimerWorld, count: int) -> tuple[list[uuid.UUID], list[uuid.UUID], list[Any], list[Any]]:
    schedules = sorted(world.schedule(1) for _ in range(count))
    waiting = sorted(world.waiting(1) for _ in range(count))
    new = sorted(world.lease(1) for _ in range(count))
    old = sorted(world.lease(1, row_exists=True) for _ in range(count))
    return schedules, waiting, new, old


def _ends(leases: list[Any], row_exists: bool) -> list[End]:
    states = (
        (AttemptState.SUCCEEDED, RunState.SUCCEEDED, 0),
        (AttemptState.FAILED, RunState.SCHEDULED, 5_000),
        (AttemptState.FAILED, RunState.DEAD_LETTERED, 0),
        (AttemptState.OUTCOME_UNKNOWN, RunState.HELD, NEVER_US),
    )
    return [End(1, run, token, row_exists, *states[n % len(states)]) for n, (run, token) in enumerate(leases)]


async def test_a_batch_goes_by_index_in_every_part(world: TimerWorld) -> None:
    schedules, waiting, new, old = _fill(world, 40)
    watched = await _watch(world.store._writers[0])
    moves = [
        Move(1, ref, action=n % 3, exclusive=True, run=new_run(1), new_decided_us=2_000, next_us=3_000)
        for n, ref in enumerate(schedules)
    ]
    ends = sorted(_ends(new, False) + _ends(old, True), key=lambda end: end.run)
    written = await world.write(
        moves=moves_of(moves, catch_up=[(0, 2_000)], why=[(1, 2_000, 2_000, 1, 5)]),
        ends=ends,
        grants=[Grant(1, run) for run in waiting],
    )
    assert (len(written.moves), len(written.outcomes), len(written.grants)) == (40, 80, 40)
    _check(watched)
    tables = {node["Index Name"] for _, node in watched.nodes() if "Index Name" in node}
    assert {"timer_pkey", "lease_pkey", "timer_waiting"} <= tables


async def test_what_is_read_and_set_aside_goes_by_index(world: TimerWorld) -> None:
    schedules, waiting, new, _ = _fill(world, 30)
    for uid in schedules:
        world.schedule_row(uid)
    store = world.store
    reading, detailing = await _watch(store._reader), await _watch(store._details)
    zero = np.zeros(1, dtype=np.uint64)
    for raised in (False, True):
        await store.load_timers([1], [1], [-1], (zero, zero), [NEVER_US], 10, raised=raised)
    rows = await store.peek_timers([1] * 60, *halves(schedules + waiting))
    assert len(rows) == 60
    await store.list_tenants([1, 2])
    assert len(await store.load_leases([1])) == 60
    await store.load_cancels([1])
    await store.load_run_details([1] * 30, *halves(waiting))
    await store.load_schedule_heads(*halves(schedules), [1] * 30)
    await store.load_misfire_rules(*halves(schedules), [1] * 30)
    await store.outcome_states([1] * 30, *halves([run for run, _ in new]), [1] * 30)
    fence = world.fence({1: EPOCH})
    order = np.lexsort((rows.ref_lo, rows.ref_hi, rows.shard))
    rows = rows.pick(order)
    await store.quarantine(fence, NOW_US, rows.pick(rows.kind == 1), ["bad"] * 30)
    ending = rows.pick(rows.kind == 2)
    await store.end_waiting(fence, NOW_US, ending, np.full(30, RunState.EXPIRED), [None] * 30)
    run, token = [run for run, _ in new], [token for _, token in new]
    await store.progress(fence, np.ones(30, dtype=np.int64), halves(run), halves(token), [b"x"] * 30)
    _check(reading)
    _check(detailing)
    assert world.rows("timer", "due_us < %s", NEVER_US) == []


@pytest.mark.parametrize(
    ("name", "key", "index"),
    [("list_rows", "tenant", "run_list"), ("list_rows_of_schedule", "schedule", "run_of_schedule")],
)
async def test_runs_are_listed_newest_first_by_index_and_sorted_only_within_one_instant(
    world: TimerWorld, name: str, key: str, index: str
) -> None:
    """On an ordinary connection, with statistics: what a coordinator has."""
    run = new_run(1)
    world.run_row(run, 1, uuid.uuid4())
    world.connection.execute(f"ANALYZE {TABLES}".encode())
    values = {
        "tenant": 1,
        "schedule": uuid.uuid4(),
        "before_us": NOW_US,
        "before_id": run,
        "id_bound": uuid.UUID(int=(1 << 128) - 1),
        "scan_max": 100,
        "by_state": False,
    }
    with psycopg.connect(world.url) as connection:
        connection.execute("SET enable_seqscan = off; SET enable_sort = off")
        query = "EXPLAIN (FORMAT JSON) " + statements.load("runs.sql")[name]
        row = connection.execute(query.encode(), values).fetchone()
    assert row is not None
    plan = json.dumps(row[0])
    assert index in re.sub(r"run_c\d+_d\d+_\w+", lambda found: _parent(world, found[0]), plan)
    assert '"Node Type": "Sort"' not in plan
    assert not re.search(r'"Seq Scan"[^{}]*"Relation Name": "run', plan)


def _parent(world: TimerWorld, index: str) -> str:
    query = "SELECT inhparent::regclass::text AS parent FROM pg_inherits WHERE inhrelid = %s::regclass"
    row = world.connection.execute(query.encode(), (index,)).fetchone()
    return str(row["parent"]) if row else index


def test_the_hot_session_leaves_no_other_way_than_nested_loops_by_index() -> None:
    for path in ("hashjoin", "mergejoin", "seqscan", "bitmapscan"):
        assert f"enable_{path} = off" in arrays.HOT_SESSION
    assert "force_generic_plan" in arrays.HOT_SESSION
