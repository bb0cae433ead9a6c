"""The fenced functions and the timer's statements, on every Postgres that is supported here."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pytest
from tests.integration.timer_world import (
    EPOCH,
    NEVER_US,
    NOW_US,
    PERIOD_US,
    SHARDS,
    TIMER_ID,
    End,
    Grant,
    Move,
    TimerWorld,
    halves,
    moves_of,
    new_run,
)

from tickwheel.domain import flags as bits
from tickwheel.domain.decision import DecisionReason as Reason
from tickwheel.domain.run import AttemptState, RunState
from tickwheel.embedded.postgres import EmbeddedPostgres
from tickwheel.errors import StoreUnavailable
from tickwheel.postgres.migrate import migrate
from tickwheel.postgres.timer_store import BatchRefused, CommitUnknown, ShardBusy, TimerStore

OLD_POSTGRES = Path("/usr/lib/postgresql/15/bin")


@pytest.fixture(scope="module", params=["this", "15"])
def world_url(request: pytest.FixtureRequest, postgres_bin_folder: Path | None) -> Iterator[str]:
    """A migrated database on the Postgres under test, and one on 15, the oldest, where it is at hand."""
    if request.param == "this":
        yield request.getfixturevalue("migrated_url")
        return
    if postgres_bin_folder is not None or not OLD_POSTGRES.exists():
        pytest.skip("PostgreSQL 15 is not installed, or another one was asked for")
    folder = Path(tempfile.mkdtemp(prefix="tw-", dir="/tmp"))
    server = EmbeddedPostgres(folder / "pg", bin_folder=OLD_POSTGRES)
    try:
        url = server.start().create_database("old")
        migrate(url, shard_count=16)
        yield url
    finally:
        server.stop("immediate")
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
async def world(world_url: str) -> AsyncIterator[TimerWorld]:
    world = TimerWorld(world_url)
    yield world
    await world.close()


# Occurrences.


async def test_an_occurrence_becomes_a_leased_run_and_its_schedule_moves_on(world: TimerWorld) -> None:
    ref = world.schedule(flags=1, priority=3)
    move = Move(1, ref)
    written = await world.write(moves=[move])
    assert (written.moves.tolist(), written.busy.tolist(), written.lost) == ([0], [], [])
    timer = world.row("timer", "ref = %s", ref)
    assert (timer["decided_us"], timer["due_us"], timer["schedule_us"]) == (PERIOD_US, 2_000, 2_000)
    lease = world.row("lease", "run = %s", move.run)
    assert (lease["schedule"], lease["token"], lease["attempt"], lease["spent"]) == (ref, move.token, 1, 0)
    assert (lease["schedule_us"], lease["due_us"], lease["create_us"]) == (PERIOD_US, PERIOD_US, NOW_US)
    assert (lease["version"], lease["template_id"], lease["priority"]) == (1, 8, 3)
    assert world.rows("run") == []


async def test_an_occurrence_that_nobody_took_becomes_a_waiting_run(world: TimerWorld) -> None:
    ref = world.schedule()
    move = Move(1, ref, action=2)
    assert (await world.write(moves=[move])).moves.tolist() == [0]
    run = world.row("run", "id = %s", move.run)
    assert (run["state"], run["schedule"], run["schedule_us"], run["end_us"]) == (1, ref, PERIOD_US, 0)
    timer = world.row("timer", "ref = %s", move.run)
    assert (timer["kind"], timer["schedule"], timer["attempt"]) == (2, ref, 0)
    assert timer["flags"] & bits.RUN_ROW
    assert world.rows("lease") == []


async def test_an_occurrence_that_becomes_nothing_moves_its_schedule_on(world: TimerWorld) -> None:
    ref = world.schedule()
    written = await world.write(moves=[Move(1, ref, action=0, next_us=NEVER_US)])
    assert written.moves.tolist() == [0]
    assert world.row("timer", "ref = %s", ref)["due_us"] == NEVER_US
    assert world.rows("lease") == world.rows("run") == []


@pytest.mark.parametrize("stale", [{"due_us": 999}, {"version": 2}, {"decided_us": -1}])
async def test_an_occurrence_of_another_due_time_version_or_decision_is_stale(
    world: TimerWorld, stale: dict[str, Any]
) -> None:
    ref = world.schedule()
    written = await world.write(moves=[Move(1, ref, **stale)])
    assert written.moves.tolist() == []
    assert world.row("timer", "ref = %s", ref)["decided_us"] == 0
    assert world.rows("lease") == []


async def test_a_waiting_run_is_no_occurrence_and_a_schedule_no_waiting_run(world: TimerWorld) -> None:
    ref, run = world.schedule(), world.waiting()
    written = await world.write(moves=[Move(1, run)], grants=[Grant(1, ref)])
    assert (written.moves.tolist(), written.grants.tolist()) == ([], [])


async def test_an_occurrence_that_stands_twice_in_a_batch_is_decided_once(world: TimerWorld) -> None:
    ref = world.schedule()
    written = await world.write(moves=[Move(1, ref), Move(1, ref)])
    assert len(written.moves) == 1
    assert len(world.rows("lease")) == 1


async def test_an_exclusive_occurrence_yields_to_a_run_that_waits_and_says_so(world: TimerWorld) -> None:
    refs = sorted([world.schedule(countdown=5), world.schedule(countdown=5)])
    for ref in refs:
        world.waiting(schedule=ref)
    written = await world.write(moves=[Move(1, refs[0], exclusive=True), Move(1, refs[1], exclusive=False)])
    assert (written.moves.tolist(), written.busy.tolist()) == ([0, 1], [0])
    decision = world.row("decision", "true")
    assert (decision["schedule"], decision["reason"], decision["count"]) == (refs[0], Reason.OVERLAP, 1)
    assert (decision["from_us"], decision["until_us"]) == (PERIOD_US, PERIOD_US)
    assert [lease["schedule"] for lease in world.rows("lease")] == [refs[1]]
    counts = {row["ref"]: row["countdown"] for row in world.rows("timer", "kind = 1")}
    assert counts == {refs[0]: 5, refs[1]: 4}


@pytest.mark.parametrize(("before", "run_count", "after"), [(5, 2, 3), (1, 3, 0), (-1, 3, -1)])
async def test_runs_count_down_to_zero_and_no_further(
    world: TimerWorld, before: int, run_count: int, after: int
) -> None:
    ref = world.schedule(countdown=before)
    await world.write(moves=[Move(1, ref, run_count=run_count)])
    assert world.row("timer", "ref = %s", ref)["countdown"] == after


async def test_a_catch_up_makes_further_runs_and_decisions_of_the_moves_that_took_effect(
    world: TimerWorld,
) -> None:
    good, stale = sorted([world.schedule(), world.schedule()])
    moves = [
        Move(1, good, new_decided_us=6_000, next_us=7_000),
        Move(1, stale, version=9, new_decided_us=6_000, next_us=7_000),
    ]
    batch = moves_of(
        moves,
        catch_up=[(0, 2_000), (0, 3_000), (1, 2_000)],
        why=[(0, 4_000, 6_000, 3, Reason.CATCHUP_COUNT), (1, 4_000, 6_000, 3, Reason.CATCHUP_COUNT)],
    )
    assert (await world.write(moves=batch)).moves.tolist() == [0]
    runs = sorted(world.rows("run"), key=lambda run: int(run["schedule_us"]))
    assert [(run["schedule"], run["schedule_us"], run["cause"]) for run in runs] == [
        (good, 2_000, 2),
        (good, 3_000, 2),
    ]
    timers = world.rows("timer", "kind = 2")
    assert {timer["schedule_us"] for timer in timers} == {2_000, 3_000}
    assert {timer["due_us"] for timer in timers} == {NOW_US}
    decision = world.row("decision", "true")
    assert (decision["schedule"], decision["count"], decision["reason"]) == (good, 3, Reason.CATCHUP_COUNT)
    assert (decision["from_us"], decision["until_us"]) == (4_000, 6_000)


# Waiting runs.


async def test_a_waiting_run_is_leased_with_the_next_attempt_and_what_it_spent(world: TimerWorld) -> None:
    run = world.waiting(attempt=2, spent=1, flags=bits.HAS_PAYLOAD)
    grant = Grant(1, run, attempt=2)
    assert (await world.write(grants=[grant])).grants.tolist() == [0]
    lease = world.row("lease", "run = %s", run)
    assert (lease["attempt"], lease["spent"], lease["token"]) == (3, 1, grant.token)
    assert lease["flags"] & bits.HAS_PAYLOAD
    assert world.rows("timer") == []


@pytest.mark.parametrize("stale", [{"due_us": 5}, {"attempt": 1}])
async def test_a_waiting_run_of_another_due_time_or_attempt_is_stale(
    world: TimerWorld, stale: dict[str, Any]
) -> None:
    run = world.waiting()
    assert (await world.write(grants=[Grant(1, run, **stale)])).grants.tolist() == []
    assert len(world.rows("timer")) == 1


async def test_a_waiting_run_that_stands_twice_in_a_batch_is_leased_once(world: TimerWorld) -> None:
    run = world.waiting()
    assert len((await world.write(grants=[Grant(1, run), Grant(1, run)])).grants) == 1


# Outcomes. Every end, for a first attempt of a schedule (no row yet) and for a run that has one.

ENDS = {
    "succeeds": (AttemptState.SUCCEEDED, RunState.SUCCEEDED, RunState.SUCCEEDED, 1),
    "is to be retried": (AttemptState.FAILED, RunState.SCHEDULED, RunState.CANCELLED, 1),
    "is handed back": (AttemptState.RELEASED, RunState.SCHEDULED, RunState.CANCELLED, 0),
    "is held": (AttemptState.OUTCOME_UNKNOWN, RunState.HELD, RunState.CANCELLED, 1),
    "fails for good": (AttemptState.FAILED, RunState.FAILED, RunState.CANCELLED, 1),
    "dies": (AttemptState.TIMED_OUT, RunState.DEAD_LETTERED, RunState.CANCELLED, 1),
    "is cancelled": (AttemptState.CANCELLED, RunState.CANCELLED, RunState.CANCELLED, 1),
}


def _end(name: str, run: uuid.UUID, token: uuid.UUID, row_exists: bool, shard: int = 1) -> End:
    attempt_state, run_state, _, _ = ENDS[name]
    next_us = {RunState.SCHEDULED: 9_000, RunState.HELD: NEVER_US}.get(run_state, 0)
    failed = run_state != RunState.SUCCEEDED
    return End(
        *(shard, run, token, row_exists, attempt_state, run_state, next_us),
        result=None if failed else b"result",
        failure=b"failure" if failed else None,
    )


@pytest.mark.parametrize("row_exists", [False, True])
@pytest.mark.parametrize("name", ENDS)
async def test_an_attempt_that(world: TimerWorld, name: str, row_exists: bool) -> None:
    schedule = uuid.uuid4()
    attempt = 2 if row_exists else 1
    run, token = world.lease(row_exists=row_exists, attempt=attempt, spent=attempt - 1, schedule=schedule)
    written = await world.write(ends=[_end(name, run, token, row_exists)])
    attempt_state, run_state, _, spent = ENDS[name]
    assert written.outcomes.tolist() == [0]
    assert world.rows("lease") == []
    row = world.row("run", "id = %s", run)
    waits = run_state in (RunState.SCHEDULED, RunState.HELD)
    assert (row["state"], row["end_us"]) == (run_state, 0 if waits else NOW_US)
    assert (row["spent"], row["attempt"]) == (attempt - 1 + spent, attempt)
    assert (row["worker_no"], row["lease_us"], row["due_us"]) == (4, 1_002, 1_001)
    succeeded = run_state == RunState.SUCCEEDED
    assert (row["result"], row["failure"]) == ((b"result", None) if succeeded else (None, b"failure"))
    timers = world.rows("timer")
    assert len(timers) == waits
    if waits:
        timer = timers[0]
        assert timer["due_us"] == (NEVER_US if run_state == RunState.HELD else 9_000)
        assert (timer["kind"], timer["ref"], timer["schedule"]) == (2, run, schedule)
        assert (timer["attempt"], timer["countdown"]) == (attempt, attempt - 1 + spent)
        assert timer["flags"] & bits.RUN_ROW
        assert timer["flags"] & bits.HAS_HISTORY
    history = world.rows("attempt")
    assert len(history) == (not (succeeded and attempt == 1))
    if history:
        assert (history[0]["number"], history[0]["state"]) == (attempt, attempt_state)
    letters = world.rows("dead_letter")
    assert [letter["run"] for letter in letters] == ([run] if run_state == RunState.DEAD_LETTERED else [])
    assert all((letter["failure"], letter["fingerprint"]) == (b"failure", "print") for letter in letters)


@pytest.mark.parametrize("row_exists", [False, True])
@pytest.mark.parametrize("name", ENDS)
async def test_a_run_that_was_asked_to_stop_is_not_tried_again_when_it(
    world: TimerWorld, name: str, row_exists: bool
) -> None:
    run, token = world.lease(row_exists=row_exists)
    world.connection.execute("UPDATE lease SET cancel_us = 5, cancel_until_us = 6, cancel_reason = 'why'")
    await world.write(ends=[_end(name, run, token, row_exists)])
    row = world.row("run", "id = %s", run)
    assert (row["state"], row["end_us"], row["cancel_reason"]) == (ENDS[name][2], NOW_US, "why")
    assert world.rows("timer") == world.rows("dead_letter") == world.rows("lease") == []


async def test_outcomes_with_and_without_a_row_share_a_batch(world: TimerWorld) -> None:
    leases = [(*world.lease(row_exists=exists), exists) for exists in (False, True, False, True)]
    leases.sort(key=lambda lease: lease[0])
    ends = [End(1, *lease) for lease in leases]
    assert sorted((await world.write(ends=ends)).outcomes.tolist()) == [0, 1, 2, 3]
    assert [run["state"] for run in world.rows("run")] == [RunState.SUCCEEDED] * 4


@pytest.mark.parametrize("row_exists", [False, True])
async def test_an_outcome_counts_once_and_only_with_its_token(world: TimerWorld, row_exists: bool) -> None:
    run, token = world.lease(row_exists=row_exists)
    forged = End(1, run, uuid.uuid4(), row_exists)
    honest = End(1, run, token, row_exists)
    assert (await world.write(ends=[forged])).outcomes.tolist() == []
    assert len((await world.write(ends=[honest, honest])).outcomes) == 1
    assert (await world.write(ends=[honest])).outcomes.tolist() == []
    states = await world.store.outcome_states([1], *halves([run]), [1])
    assert [state[:3] for state in states] == [(1, RunState.SUCCEEDED, world.row("run", "true")["fence"])]


@pytest.mark.parametrize("row_exists", [False, True])
async def test_an_outcome_of_a_kind_that_was_not_announced_keeps_its_lease(
    world: TimerWorld, row_exists: bool
) -> None:
    run, token = world.lease(row_exists=row_exists)
    assert (await world.write(ends=[End(1, run, token, not row_exists)])).outcomes.tolist() == []
    assert len(world.rows("lease")) == 1
    assert (await world.write(ends=[End(1, run, token, row_exists)])).outcomes.tolist() == [0]


async def test_a_retry_of_yesterdays_run_stays_in_yesterdays_partition(world: TimerWorld) -> None:
    old, token = world.lease(run=new_run(1, day_offset=-1), row_exists=True)
    new, new_token = world.lease(row_exists=True)
    ends = [_end("is to be retried", old, token, True), _end("is to be retried", new, new_token, True)]
    assert len((await world.write(ends=ends)).outcomes) == 2
    for table, key in (("run", "id"), ("attempt", "run")):
        query = f"SELECT {key}, tableoid::regclass::text AS part FROM {table}"
        found = world.connection.execute(query.encode())
        parts = {row[key]: int(row["part"].rsplit("d", 1)[1]) for row in found}
        assert parts[new] == parts[old] + 1


async def test_a_batch_for_a_partition_that_is_missing_is_refused_whole(world: TimerWorld) -> None:
    good = world.lease()
    bad = world.lease(run=new_run(1, day_offset=-30))
    ends = sorted([End(1, *good, False), End(1, *bad, False)], key=lambda end: end.run)
    with pytest.raises(BatchRefused) as refused:
        await world.write(ends=ends)
    assert refused.value.sqlstate == "23514"
    assert len(world.rows("lease")) == 2
    assert (await world.write(ends=[End(1, *good, False)])).outcomes.tolist() == [0]


# Batches.


async def test_a_batch_of_nothing_does_nothing(world: TimerWorld) -> None:
    written = await world.write()
    assert written.lost == []
    assert all(len(group) == 0 for group in (written.outcomes, written.moves, written.busy, written.grants))
    assert (await world.write(epochs={})).lost == []


async def test_two_thousand_rows_go_in_one_batch(world: TimerWorld) -> None:
    for _ in range(2_000):
        world.schedule(secrets.choice(SHARDS))
    rows = sorted((row["shard_id"], row["ref"]) for row in world.rows("timer"))
    moves = [Move(shard, ref, run=new_run(shard)) for shard, ref in rows]
    assert (await world.write(moves=moves)).moves.tolist() == list(range(2_000))
    ends = sorted((End(m.shard, m.run, m.token, False) for m in moves), key=lambda end: (end.shard, end.run))
    assert sorted((await world.write(ends=ends)).outcomes.tolist()) == list(range(2_000))
    assert len(world.rows("run")) == 2_000


async def test_a_batch_goes_on_without_the_shards_that_were_lost(world: TimerWorld) -> None:
    refs = {shard: world.schedule(shard) for shard in SHARDS}
    waiting = {shard: world.waiting(shard) for shard in SHARDS}
    leases = {shard: world.lease(shard) for shard in SHARDS}
    written = await world.write(
        moves=[Move(shard, refs[shard], run=new_run(shard)) for shard in SHARDS],
        grants=[Grant(shard, waiting[shard]) for shard in SHARDS],
        ends=[End(shard, *leases[shard], False) for shard in SHARDS],
        epochs={1: EPOCH, 2: EPOCH - 1, 3: EPOCH},
    )
    assert written.lost == [2]
    for group in (written.outcomes, written.moves, written.grants):
        assert sorted(group.tolist()) == [0, 2]
    assert [row["shard_id"] for row in world.rows("timer", "kind = 2")] == [2]
    assert world.row("timer", "ref = %s", refs[2])["decided_us"] == 0


# Coordinators hold rows.


async def test_a_batch_waits_for_no_locked_row_and_a_second_read_tells_locked_from_stale(
    world: TimerWorld,
) -> None:
    locked, stale, free = sorted(world.schedule() for _ in range(3))
    world.connection.execute("UPDATE timer SET version = 2 WHERE ref = %s", (stale,))
    run, lease, token = world.waiting(), *world.lease()
    with world.other() as coordinator:
        coordinator.execute("SELECT FROM timer WHERE ref = ANY (%s) FOR UPDATE", ([locked, run],))
        coordinator.execute("UPDATE lease SET cancel_us = 1 WHERE run = %s", (lease,))
        written = await asyncio.wait_for(
            world.write(
                moves=[Move(1, locked), Move(1, stale), Move(1, free)],
                grants=[Grant(1, run)],
                ends=[End(1, lease, token, False)],
            ),
            5,
        )
        seen = await world.store.peek_timers([1, 1], *halves([locked, stale]))
        coordinator.rollback()
    assert (written.moves.tolist(), written.grants.tolist(), written.outcomes.tolist()) == ([2], [], [])
    by_ref = dict(zip(seen.ref_lo.tolist(), seen.version.tolist(), strict=True))
    mask = (1 << 64) - 1
    assert by_ref == {locked.int & mask: 1, stale.int & mask: 2}
    states = await world.store.outcome_states([1], *halves([lease]), [1])
    assert states[0][4] == token, "the lease stands: the outcome is to be sent again"


@pytest.mark.parametrize("row_exists", [False, True])
async def test_an_outcome_that_a_cancel_overtakes_is_recorded_with_its_lease_gone_or_not_at_all(
    world: TimerWorld, row_exists: bool
) -> None:
    """A row that was changed after the batch's snapshot is locked in its newest version, which a delete by
    ctid does not see: what follows must follow from what was deleted."""
    leases = [world.lease(row_exists=row_exists) for _ in range(300)]
    leases.sort()
    ends = [_end("is to be retried", *lease, row_exists) for lease in leases]
    stopped = threading.Event()

    def cancel() -> None:
        with psycopg.connect(world.url, autocommit=True) as connection:
            while not stopped.is_set():
                for run, _ in reversed(leases):
                    connection.execute(
                        "UPDATE lease SET cancel_us = cancel_us + 1 WHERE shard_id = 1 AND run = %s", (run,)
                    )

    canceller = threading.Thread(target=cancel)
    canceller.start()
    try:
        done: set[int] = set()
        deadline = time.monotonic() + 30
        while len(done) < len(ends) and time.monotonic() < deadline:
            rest = [number for number in range(len(ends)) if number not in done]
            written = await world.write(ends=[ends[number] for number in rest])
            done |= {rest[place] for place in written.outcomes.tolist()}
            left = {row["run"] for row in world.rows("lease")}
            assert left.isdisjoint(leases[number][0] for number in done)
            assert len(left) + len(done) == len(ends)
    finally:
        stopped.set()
        canceller.join()
    assert len(done) == len(ends)
    assert len(world.rows("attempt")) == len(ends)


# The fence.


async def test_a_shard_is_taken_by_a_newer_assignment_or_again_by_its_owner(world: TimerWorld) -> None:
    stranger = TimerStore(world.url, "timer-2", 1)
    try:
        assert await stranger.take({1: 6, 2: 7, 3: 8}, NOW_US) == {3: EPOCH + 1}
        assert await world.store.take({1: 7, 3: 7}, NOW_US) == {1: EPOCH + 1}
        assert await stranger.take({3: 8}, NOW_US) == {3: EPOCH + 2}
        assert await world.store.take({}, NOW_US) == {}
    finally:
        await stranger.close()
    shard = world.row("shard", "shard_id = 3")
    assert (shard["owner"], shard["generation"], shard["taken_us"]) == ("timer-2", 8, NOW_US)


async def test_a_batch_that_waited_for_a_taker_reads_the_epoch_that_it_left(world: TimerWorld) -> None:
    ref = world.schedule(1)
    with world.other() as taker:
        taker.execute("SELECT tw_take('{1}', '{8}', 'timer-2', 1)")
        batch = asyncio.create_task(world.write(moves=[Move(1, ref)]))
        await _until_waiting(world, "ShareLock")
        taker.commit()
    written = await batch
    assert (written.lost, written.moves.tolist()) == ([1], [])


async def _until_waiting(world: TimerWorld, mode: str, count: int = 1) -> None:
    waiting = "locktype = 'advisory' AND NOT granted AND mode = %s"
    async with asyncio.timeout(10):
        while len(world.rows("pg_locks", waiting, mode)) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_taker_that_gets_no_fence_ends_its_holders_and_not_those_who_wait(world: TimerWorld) -> None:
    waiter = TimerStore(world.url, "timer-3", 1)
    holder = world.other()
    # A batch that stopped in its middle: the fence is held, shared.
    held = holder.execute("SELECT pg_backend_pid() AS pid, tw_fence('{1}', %s)", ([EPOCH],)).fetchone()
    assert held is not None
    patient = psycopg.connect(world.url, autocommit=True)

    def wait() -> None:
        patient.execute("SELECT pg_advisory_lock(27767, 1), pg_advisory_unlock(27767, 1)")

    waiting = asyncio.create_task(asyncio.to_thread(wait))
    try:
        await _until_waiting(world, "ExclusiveLock")
        with pytest.raises(ShardBusy):
            await waiter.take({1: 8}, NOW_US)
        assert await waiter.end_blockers([2]) == []
        assert await waiter.end_blockers([1, 2]) == [held[0]]
        await asyncio.wait_for(waiting, 10)
        assert await waiter.take({1: 8}, NOW_US) == {1: EPOCH + 1}
    finally:
        holder.close()
        patient.close()
        await waiter.close()


async def test_a_stamp_proves_the_shards_and_says_so_unless_one_is_lost(world: TimerWorld) -> None:
    await world.store.register_timer("node", "127.0.0.1:1", 1)
    assert await world.store.stamp(world.fence(), NOW_US) == []
    assert world.row("timer_node", "timer_id = %s", TIMER_ID)["seen_us"] == NOW_US
    assert await world.store.stamp(world.fence({1: EPOCH, 2: EPOCH + 1}), NOW_US + 5) == [2]
    assert world.row("timer_node", "timer_id = %s", TIMER_ID)["seen_us"] == NOW_US
    await world.store.forget_timer()
    assert world.rows("timer_node") == []


async def test_a_connection_that_dies_under_a_call_leaves_its_commit_unknown(world: TimerWorld) -> None:
    ref = world.schedule(1)
    with world.other() as taker:
        taker.execute("SELECT pg_advisory_xact_lock(27767, 1)")
        batch = asyncio.create_task(world.write(moves=[Move(1, ref)]))
        await _until_waiting(world, "ShareLock")
        world.connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = %s",
            (f"{TIMER_ID} lane 0",),
        )
        with pytest.raises(CommitUnknown):
            await batch
    assert (await world.write(moves=[Move(1, ref)])).moves.tolist() == [0]


async def test_where_no_server_listens_nothing_was_sent() -> None:
    store = TimerStore("postgresql://nobody@127.0.0.1:1/none", "timer-1", 1)
    with pytest.raises(StoreUnavailable):
        await store.take({1: 1}, 1)


# Setting aside.


async def test_a_schedule_that_cannot_be_computed_is_quarantined_with_its_reason(world: TimerWorld) -> None:
    bad, newer, lost = world.schedule(1), world.schedule(2), world.schedule(3)
    for uid in (bad, newer, lost):
        world.schedule_row(uid)
    rows = await world.store.peek_timers([1, 2, 3], *halves([bad, newer, lost]))
    world.connection.execute("UPDATE timer SET version = 2 WHERE ref = %s", (newer,))
    order = np.argsort(rows.shard)
    fence = world.fence({1: EPOCH, 2: EPOCH, 3: EPOCH + 1})
    assert await world.store.quarantine(fence, NOW_US, rows.pick(order), ["bad cron"] * 3) == [3]
    assert world.row("timer", "ref = %s", bad)["due_us"] == NEVER_US
    schedule = world.row("schedule", "uid = %s", bad)
    assert (schedule["quarantine_reason"], schedule["revision"]) == ("bad cron", 5)
    for uid in (newer, lost):
        assert world.row("timer", "ref = %s", uid)["due_us"] == PERIOD_US
        assert world.row("schedule", "uid = %s", uid)["quarantine_reason"] is None


async def test_a_waiting_run_is_ended_where_it_waits_for_that_instant_still(world: TimerWorld) -> None:
    late, dead, moved, lost = world.waiting(1), world.waiting(1), world.waiting(2), world.waiting(3)
    rows = await world.store.peek_timers([1, 1, 2, 3], *halves([late, dead, moved, lost]))
    world.connection.execute("UPDATE timer SET due_us = 77 WHERE ref = %s", (moved,))
    rows = rows.pick(np.lexsort((rows.ref_lo, rows.ref_hi, rows.shard)))
    dead_lo = dead.int & ((1 << 64) - 1)
    states = np.where(rows.ref_lo == np.uint64(dead_lo), RunState.DEAD_LETTERED, RunState.EXPIRED)
    fence = world.fence({1: EPOCH, 2: EPOCH, 3: EPOCH - 1})
    assert await world.store.end_waiting(fence, NOW_US, rows, states, [b"why"] * 4) == [3]
    assert {row["ref"] for row in world.rows("timer")} == {moved, lost}
    ended = {
        row["id"]: (row["state"], row["end_us"], row["failure"]) for row in world.rows("run", "state > 1")
    }
    assert ended == {
        late: (RunState.EXPIRED, NOW_US, b"why"),
        dead: (RunState.DEAD_LETTERED, NOW_US, b"why"),
    }
    assert [letter["run"] for letter in world.rows("dead_letter")] == [dead]


async def test_progress_is_kept_for_the_token_that_said_it(world: TimerWorld) -> None:
    (mine, token), (other, _), (lost, lost_token) = world.lease(1), world.lease(1), world.lease(2)
    reports = sorted([(1, mine, token), (1, other, uuid.uuid4()), (2, lost, lost_token)])
    found = await world.store.progress(
        world.fence({1: EPOCH, 2: EPOCH + 1}),
        np.array([shard for shard, _, _ in reports]),
        halves([run for _, run, _ in reports]),
        halves([token for _, _, token in reports]),
        [b"half"] * 3,
    )
    assert [row["run"] for row in world.rows("lease", "progress IS NOT NULL")] == [mine]
    assert list(found) == [2]


# What a timer reads.


async def test_a_load_reads_each_window_from_its_cursor_in_due_order_and_a_page_at_most(
    world: TimerWorld,
) -> None:
    for due_us in (30, 10, 20, 40):
        world.schedule(1, due_us=due_us)
    world.schedule(1, due_us=15, tenant_id=2)
    world.schedule(2, due_us=5, priority=9)
    zero, top = np.zeros(2, dtype=np.uint64), np.full(2, (1 << 64) - 1, dtype=np.uint64)
    rows = await world.store.load_timers([1, 2], [1, 1], [-1, -1], (zero, zero), [100, 100], 3)
    assert (rows.due_us.tolist(), rows.shard.tolist()) == ([10, 20, 30, 5], [1, 1, 1, 2])
    rows = await world.store.load_timers([1, 2], [1, 1], [20, 5], (top, top), [40, 40], 3)
    assert rows.due_us.tolist() == [30]
    rows = await world.store.load_timers([1, 2], [1, 1], [-1, -1], (zero, zero), [100, 100], 3, raised=True)
    assert (rows.due_us.tolist(), rows.priority.tolist()) == ([5], [9])
    shards, tenants = await world.store.list_tenants([1, 2, 3])
    assert sorted(zip(shards.tolist(), tenants.tolist(), strict=True)) == [(1, 1), (1, 2), (2, 1)]


async def test_leases_and_cancels_are_loaded_by_shard(world: TimerWorld) -> None:
    run, token = world.lease(1, attempt=3, spent=2)
    world.lease(2)
    world.connection.execute("UPDATE lease SET cancel_us = 5, cancel_until_us = 6 WHERE run = %s", (run,))
    found = await world.store.load_leases([1, 3])
    assert len(found) == 1
    assert (int(found.run_hi[0]) << 64 | int(found.run_lo[0])) == run.int
    assert (int(found.token_hi[0]) << 64 | int(found.token_lo[0])) == token.int
    assert (found.attempt[0], found.spent[0], found.cancel_until_us[0], found.worker[0]) == (3, 2, 6, 4)
    assert await world.store.load_cancels([1, 2]) == [(1, run, token, 6, "")]
    assert await world.store.load_cancels([2]) == []


async def test_definitions_heads_details_and_rules_are_found_by_key(world: TimerWorld) -> None:
    uid, run = world.schedule(), world.waiting()
    world.schedule_row(uid)
    revision = {
        "uid": uid,
        "version": 1,
        "shard_id": 1,
        "spec": '{"misfire": {"policy": "SKIP"}}',
        "trigger_id": 7,
        "template_id": 8,
        "payload": b"p",
        "content_type": "t",
        "principal": "me",
        "create_us": 1,
    }
    world.insert("schedule_revision", revision)
    world.connection.execute("INSERT INTO trigger_def VALUES (7, 'cron') ON CONFLICT DO NOTHING")
    world.connection.execute("INSERT INTO template_def VALUES (8, 'job') ON CONFLICT DO NOTHING")
    world.connection.execute("UPDATE run SET payload = 'own', content_type = 'c' WHERE id = %s", (run,))
    store = world.store
    assert await store.load_definitions([7, 99], [8]) == ({7: b"cron"}, {8: b"job"})
    assert await store.load_schedule_heads(*halves([uid]), [1]) == [(uid, 1, uid.hex, b"p", "t", "")]
    assert await store.load_misfire_rules(*halves([uid]), [1]) == [(uid, 1, {"policy": "SKIP"})]
    assert await store.load_run_details([1], *halves([run])) == [(run, b"own", "c", None, None, None)]


async def test_names_and_the_cluster_are_read_and_a_worker_keeps_its_number(world: TimerWorld) -> None:
    store = world.store
    world.connection.execute("INSERT INTO route (queue, kind) VALUES ('q', 'k') ON CONFLICT DO NOTHING")
    (tenant,) = await store.find_tenants(["default", "none"])
    assert await store.load_tenants([tenant[0], 999]) == [tenant]
    assert ("q", "k") in [route[1:] for route in await store.load_routes(0)]
    number = await store.register_worker("w", "pool", "host", 1)
    assert await store.register_worker("w", "pool", "host", 2) == number
    assert abs(await store.clock_us() - time.time_ns() // 1_000) < 60_000_000
    cluster: tuple[Any, ...] = await store.cluster()
    assert cluster[1:] == (16, 0, 0)
