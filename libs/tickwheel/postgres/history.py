"""Which history is this Postgres in, and is it the one that we knew? (Design, section 6.)

A standby that was promoted, or a folder that was restored, may have lost commits that were acknowledged:
grants, outcomes, epochs, fences. Nothing in it says so. So the leader keeps in etcd what tells histories
apart (`ClusterFacts`), and whoever makes a connection compares what is found behind it with what is known.

* Another system identifier or timeline, or a log that is shorter than it was: another history. Nothing is
  granted until somebody accepts it (`tickwheel cluster resume`).
* Accepting it raises the incarnation, in etcd first and then in Postgres. So a Postgres of a lower one than
  etcd's is one that was restored from before an acceptance, or whose acceptance did not get through:
  another history too. One of a higher incarnation than etcd's says that *etcd* has lost something.

What this cannot see: a history that was restored while nothing of ours ran, and whose log grew beyond the old
one before anything of ours came back, on the same timeline. No usual way to restore does that (an archive
recovery begins a new timeline); who did it says `tickwheel cluster resume --force`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import psycopg

from tickwheel.domain.shard import EPOCH_TAKING_BITS, INCARNATION_MAX
from tickwheel.errors import FailedPrecondition, StoreUnavailable
from tickwheel.ports import ClusterFacts
from tickwheel.postgres import statements

RESUME_LOCK_TIMEOUT_MS: Final = 500
RESUME_TRIES_MAX: Final = 20

_SQL: Final = statements.load("history.sql")


class HistoryChanged(StoreUnavailable):
    """Behind this connection is another history than the one that is known. A person decides."""

    def __init__(self, reason: str) -> None:
        super().__init__("Postgres", f"its history is another one: {reason}", retry_after_ms=5_000)
        self.difference = reason


async def read_facts(connection: psycopg.AsyncConnection[Any]) -> ClusterFacts:
    """What is behind this connection. Raises psycopg.Error; a standby refuses it."""
    row = await (await connection.execute(_SQL["facts"])).fetchone()
    assert row is not None
    if row[3] is None:
        raise StoreUnavailable("Postgres", "the database has no cluster yet: run `tickwheel migrate`")
    # The identifier is an unsigned number that Postgres shows as a signed one.
    return ClusterFacts(int(row[0]) & (1 << 64) - 1, int(row[1]), int(row[2]), int(row[3]))


def difference(known: ClusterFacts | None, incarnation: int, found: ClusterFacts) -> str:
    """Why what was `found` is not the history that is `known`; empty when it is, or when nothing is known.

    `incarnation` is the registry's.
    """
    highest = max(incarnation, known.incarnation if known is not None else 0)
    if found.incarnation < highest:
        return (
            f"Postgres is of incarnation {found.incarnation}, the cluster of {highest}: "
            "it was restored from before a resume, or a resume did not get through to it"
        )
    if known is None or found.incarnation > known.incarnation:
        return ""
    if found.system_identifier != known.system_identifier:
        return (
            f"Postgres is another one: its system identifier is {found.system_identifier}, "
            f"it was {known.system_identifier}"
        )
    if found.timeline != known.timeline:
        return (
            f"Postgres was promoted or restored: it is on timeline {found.timeline}, was on {known.timeline}"
        )
    if found.wal_position < known.wal_position:
        return (
            f"Postgres was restored: its log ends {known.wal_position - found.wal_position} bytes before "
            f"the position {known.wal_position} that it had reached"
        )
    return ""


def next_incarnation(registry: int, epochs: Mapping[int, int], found: ClusterFacts) -> int:
    """A number above everything that was ever seen: by the registry, by any owner, by this Postgres.

    Raises FailedPrecondition when there are no more.
    """
    seen = max(epochs.values(), default=0) >> EPOCH_TAKING_BITS
    number = max(registry, seen, found.incarnation) + 1
    if number > INCARNATION_MAX:
        raise FailedPrecondition(f"incarnation {number} is beyond the last one, {INCARNATION_MAX}")
    return number


async def resume(url: str, incarnation: int, *, principal: str, peer: str, reason: str) -> int:
    """Raises the incarnation in Postgres, with every epoch, under all fences. Gives the cluster's time then.

    Who did it, from where and why goes into the audit.

    Whoever holds a fence for too long is ended: what waits for its answer takes its shards again.

    Raises:
        FailedPrecondition: this Postgres has such an incarnation already, or lacks the function.
        StoreUnavailable: out of reach, or the fences could not be had.
    """
    parameters = {"incarnation": incarnation, "principal": principal, "peer": peer, "reason": reason}
    try:
        async with await psycopg.AsyncConnection.connect(
            url, autocommit=True, connect_timeout=5
        ) as connection:
            await connection.execute(f"SET lock_timeout = '{RESUME_LOCK_TIMEOUT_MS}ms'")
            for _ in range(RESUME_TRIES_MAX):
                try:
                    row = await (await connection.execute(_SQL["resume"], parameters)).fetchone()
                except psycopg.errors.LockNotAvailable:
                    await _end(connection, await _holders(connection))
                    continue
                if row is None or row[0] is None:
                    raise FailedPrecondition(
                        f"Postgres is of incarnation {incarnation} or a later one already"
                    )
                return int(row[0])
    except psycopg.errors.UndefinedFunction as error:
        raise FailedPrecondition(
            "this Postgres is of an older version of tickwheel: run `tickwheel migrate` on it first"
        ) from error
    except (psycopg.Error, OSError) as error:
        raise StoreUnavailable("Postgres", str(error).strip() or type(error).__name__) from error
    raise StoreUnavailable("Postgres", "the fences of all shards could not be had at once")


async def _holders(connection: psycopg.AsyncConnection[Any]) -> list[int]:
    return [row[0] for row in await (await connection.execute(_SQL["fence_holders"])).fetchall()]


async def _end(connection: psycopg.AsyncConnection[Any], pids: Sequence[int]) -> None:
    for pid in pids:
        await connection.execute("SELECT pg_terminate_backend(%s)", [pid])


async def lease_ms_max(connection: psycopg.AsyncConnection[Any]) -> int:
    row = await (await connection.execute(_SQL["lease_ms_max"])).fetchone()
    return 0 if row is None else int(row[0])
