"""The pool of connections under cancellations, deadlines, restarts and killed backends."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psycopg
import pytest

from tickwheel.embedded.postgres import EmbeddedPostgres
from tickwheel.errors import StoreUnavailable
from tickwheel.postgres.connections import Connection, Database

NAME = "pool under test"
CONNECTIONS_MAX = 3


@pytest.fixture
async def database(postgres_url: str) -> AsyncIterator[Database]:
    database = Database(postgres_url, connections_max=CONNECTIONS_MAX, wait_timeout_ms=1_000, name=NAME)
    yield database
    await database.close()


async def one(connection: Connection) -> int:
    row = await (await connection.execute("SELECT 1")).fetchone()
    assert row is not None
    return int(row[0])


def backends(url: str) -> int:
    with psycopg.connect(url, autocommit=True) as connection:
        row = connection.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s", (NAME,)
        ).fetchone()
    assert row is not None
    return int(row[0])


async def usable_count(database: Database) -> int:
    """How many connections can be had at a time."""
    held = 0
    ready, go = asyncio.Event(), asyncio.Event()

    async def hold(connection: Connection) -> None:
        nonlocal held
        assert await one(connection) == 1
        held += 1
        if held == CONNECTIONS_MAX:
            ready.set()
        await go.wait()

    tasks = [asyncio.create_task(database.read(hold)) for _ in range(CONNECTIONS_MAX)]
    async with asyncio.timeout(10):
        await ready.wait()
    go.set()
    await asyncio.gather(*tasks)
    return held


async def test_g_o07_cancelled_callers_never_shrink_the_pool(database: Database) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for _ in range(50):
        waiting = [asyncio.create_task(database.read(one)) for _ in range(100)]
        for _ in range(chance.randrange(8)):
            await asyncio.sleep(0)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    assert await usable_count(database) == CONNECTIONS_MAX
    assert database.waiting_count == 0


async def test_g_o07_a_wait_for_a_connection_ends_in_time(database: Database) -> None:
    all_held, go = asyncio.Barrier(CONNECTIONS_MAX + 1), asyncio.Event()

    async def hold(connection: Connection) -> None:
        await all_held.wait()
        await go.wait()

    holding = [asyncio.create_task(database.read(hold)) for _ in range(CONNECTIONS_MAX)]
    await all_held.wait()
    started = time.monotonic()
    with pytest.raises(StoreUnavailable, match="were busy"):
        await database.read(one)
    assert 0.9 <= time.monotonic() - started <= 3
    go.set()
    await asyncio.gather(*holding)


async def test_g_o08_deadlines_that_pass_while_connecting_leak_nothing(
    database: Database, postgres_url: str
) -> None:
    for n in range(100):
        # Some pass before a connection is there, some after.
        try:
            async with asyncio.timeout(0.001 * (n % 20)):
                await database.read(one)
        except TimeoutError:
            pass
        if n % 10 == 0:
            assert backends(postgres_url) <= CONNECTIONS_MAX
    assert await usable_count(database) == CONNECTIONS_MAX
    assert backends(postgres_url) <= CONNECTIONS_MAX


async def test_a_statement_that_was_cut_off_gives_its_answer_to_nobody_else(database: Database) -> None:
    async def slow(connection: Connection) -> None:
        await connection.execute("SELECT pg_sleep(5)")

    for _ in range(CONNECTIONS_MAX + 1):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await database.read(slow)
    assert await usable_count(database) == CONNECTIONS_MAX


async def test_killed_backends_are_noticed_before_they_are_used(
    database: Database, postgres_url: str
) -> None:
    assert await usable_count(database) == CONNECTIONS_MAX
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = %s", (NAME,)
        )
    deadline = time.monotonic() + 10
    while backends(postgres_url):
        assert time.monotonic() < deadline
    for _ in range(CONNECTIONS_MAX):
        assert await database.read(one) == 1


async def test_a_transaction_that_breaks_before_its_commit_is_repeated(
    database: Database, postgres_url: str
) -> None:
    tries = 0

    async def work(connection: Connection) -> int:
        nonlocal tries
        tries += 1
        assert await one(connection) == 1
        if tries == 1:
            with psycopg.connect(postgres_url, autocommit=True) as other:
                other.execute("SELECT pg_terminate_backend(%s)", (connection.info.backend_pid,))
        return await one(connection)

    assert await database.transaction(work) == 1
    assert tries == 2


async def test_a_deadlock_is_resolved_by_repeating(database: Database) -> None:
    async def prepare(connection: Connection) -> None:
        await connection.execute("CREATE TABLE pair (id int PRIMARY KEY, value int)")
        await connection.execute("INSERT INTO pair VALUES (1, 0), (2, 0)")

    await database.transaction(prepare)
    both_hold = asyncio.Barrier(2)

    async def lock(first: int, second: int) -> None:
        met = False

        async def work(connection: Connection) -> None:
            nonlocal met
            await connection.execute("UPDATE pair SET value = value + 1 WHERE id = %s", (first,))
            if not met:
                met = True
                await both_hold.wait()
            await connection.execute("UPDATE pair SET value = value + 1 WHERE id = %s", (second,))

        await database.transaction(work)

    await asyncio.gather(lock(1, 2), lock(2, 1))

    async def values(connection: Connection) -> list[int]:
        rows = await (await connection.execute("SELECT value FROM pair ORDER BY id")).fetchall()
        return [row[0] for row in rows]

    assert await database.read(values) == [2, 2]


async def test_what_was_only_tried_leaves_nothing(database: Database) -> None:
    async def work(connection: Connection) -> str:
        await connection.execute("CREATE TABLE tried (id int)")
        return "would be"

    assert await database.transaction(work, try_only=True) == "would be"

    async def there(connection: Connection) -> bool:
        row = await (await connection.execute("SELECT to_regclass('tried') IS NOT NULL")).fetchone()
        assert row is not None
        return bool(row[0])

    assert not await database.read(there)


async def test_a_postgres_that_is_away_is_said_at_once_and_found_when_it_is_back(short_folder: Path) -> None:
    server = EmbeddedPostgres(short_folder / "pg-pool")
    try:
        server.start()
        database = Database(server.url(), connections_max=CONNECTIONS_MAX, wait_timeout_ms=1_000)
        assert await database.read(one) == 1
        server.kill9()
        with pytest.raises(StoreUnavailable):
            await database.read(one)
        server.start()
        assert await database.read(one) == 1
        assert await usable_count(database) == CONNECTIONS_MAX
        await database.close()
        with pytest.raises(StoreUnavailable, match="is ending"):
            await database.read(one)
    finally:
        server.stop("immediate")
