"""The statement behind `tickwheel cluster resume`, against owners that hold epochs and fences."""

from __future__ import annotations

import asyncio

import numpy as np
import psycopg
import pytest

from tickwheel.domain.shard import first_epoch
from tickwheel.errors import FailedPrecondition
from tickwheel.ports import ClusterFacts
from tickwheel.postgres import history
from tickwheel.postgres.timer_store import CommitUnknown, Fence, TimerStore

SHARDS = 16


async def resume(url: str, incarnation: int) -> int:
    return await history.resume(url, incarnation, principal="ops", peer="test", reason="a drill")


async def test_an_owner_that_never_noticed_is_fenced_in_every_shard(migrated_url: str) -> None:
    store = TimerStore(migrated_url, "sleeper", 1)
    try:
        before = await store.probe()
        epochs = await store.take(dict.fromkeys(range(SHARDS), 1), 1)
        fence = Fence(np.arange(SHARDS, dtype=np.int16), np.array([epochs[s] for s in range(SHARDS)]))
        assert await store.stamp(fence, 2) == []
        number = history.next_incarnation(0, epochs, before)
        assert await resume(migrated_url, number) > 0
        assert sorted(await store.stamp(fence, 3)) == list(range(SHARDS))
        again = await store.take(dict.fromkeys(range(SHARDS), 1), 4)
        assert all(again[shard] > max(epochs[shard], first_epoch(number)) for shard in range(SHARDS))
        found = await store.probe()
        assert found.incarnation == number
        assert found.wal_position > before.wal_position
        assert found.system_identifier == before.system_identifier
    finally:
        await store.close()


async def test_an_incarnation_is_taken_once(migrated_url: str) -> None:
    async with await psycopg.AsyncConnection.connect(migrated_url) as connection:
        found = await history.read_facts(connection)
    number = history.next_incarnation(0, {}, found)
    await resume(migrated_url, number)
    for late in (number, number - 1):
        with pytest.raises(FailedPrecondition):
            await resume(migrated_url, late)


async def test_a_resume_is_audited_and_needs_no_partition_for_it(migrated_url: str) -> None:
    with psycopg.connect(migrated_url, autocommit=True) as connection:
        ask = "SELECT count(*) FROM audit WHERE method = 'ResumeCluster' AND reason = 'a drill'"
        before = connection.execute(ask).fetchone()
        row = connection.execute("SELECT incarnation FROM cluster").fetchone()
        assert before is not None
        assert row is not None
        await resume(migrated_url, row[0] + 1)
        assert connection.execute(ask).fetchone() == (before[0] + 1,)
        for (partition,) in connection.execute(
            "SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'audit'::regclass"
        ).fetchall():
            connection.execute(f"ALTER TABLE audit DETACH PARTITION {partition}".encode())
        await resume(migrated_url, row[0] + 2)
        assert connection.execute("SELECT incarnation FROM cluster").fetchone() == (row[0] + 2,)


async def test_a_role_without_privileges_can_tell_histories_apart(migrated_url: str) -> None:
    async with await psycopg.AsyncConnection.connect(migrated_url) as connection:
        ours = await history.read_facts(connection)
        await connection.execute(
            "CREATE ROLE tw_plain; GRANT SELECT ON cluster TO tw_plain; SET ROLE tw_plain"
        )
        theirs = await history.read_facts(connection)
        assert (theirs.system_identifier, theirs.timeline) == (ours.system_identifier, ours.timeline)
        await connection.rollback()


async def test_whoever_sits_on_a_fence_does_not_hold_up_a_resume(migrated_url: str) -> None:
    async with (
        await psycopg.AsyncConnection.connect(migrated_url) as holder,
        await psycopg.AsyncConnection.connect(migrated_url, autocommit=True) as reader,
    ):
        await holder.execute("SELECT pg_advisory_xact_lock_shared(27767, 3)")
        number = history.next_incarnation(0, {}, await history.read_facts(reader))
        async with asyncio.timeout(20):
            await resume(migrated_url, number)
        assert (await history.read_facts(reader)).incarnation == number
        with pytest.raises(psycopg.OperationalError):
            await holder.execute("SELECT 1")


class _Refusing:
    """A guard that finds every connection to be another Postgres."""

    def __init__(self) -> None:
        self.checked: list[ClusterFacts] = []

    def admit(self) -> None:
        pass

    async def known(self) -> tuple[ClusterFacts | None, int]:
        return ClusterFacts(1, 1, 1), 0

    def check(self, known: tuple[ClusterFacts | None, int], found: ClusterFacts) -> None:
        self.checked.append(found)
        raise history.HistoryChanged(history.difference(*known, found))


async def test_a_connection_that_is_refused_is_used_for_nothing(migrated_url: str) -> None:
    store = TimerStore(migrated_url, "guarded", 1)
    guard = _Refusing()
    try:
        store.watch(guard)
        for _ in range(2):
            with pytest.raises(history.HistoryChanged):
                await store.take({0: 99}, 1)
        assert len(guard.checked) == 2
        with psycopg.connect(migrated_url) as connection:
            row = connection.execute("SELECT count(*) FROM shard WHERE owner = 'guarded'").fetchone()
            assert row == (0,)
            found = connection.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'guarded%'"
            ).fetchone()
            assert found == (0,), "a refused connection is closed"
    except CommitUnknown as error:
        pytest.fail(f"it was sent: {error}")
    finally:
        await store.close()
