"""Partitions: made ahead of need, and dropped when their retention is over and nothing in them lives.

`run` and `attempt` have one partition for each (retention class, UTC day of creation), since the leading 20
bits of a run's id say both; `audit` has one a month.

Creating is CREATE TABLE (LIKE …) and ATTACH, never CREATE … PARTITION OF: that one waits behind any reader,
and all others wait behind it. Whatever needs a lock on the parent gives up after `lock_timeout_ms`, until the
next round.

Retention never loses a run that lives. A partition past its retention is emptied of what has ended in bounded
steps; once no run in it waits, is held, is leased or has a dead letter, it is detached, looked at again, and
dropped.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta

import psycopg
from psycopg import sql

from tickwheel.domain.ids import DAY_US, DIRECT_RUN_CLASS, SCHEDULED_RUN_CLASS, run_id_prefix
from tickwheel.postgres import statements

DAYS_AHEAD = 3
DAYS_BACK = 1
MONTHS_AHEAD = 2
RUN_RETENTION_DAYS: dict[int, int] = {SCHEDULED_RUN_CLASS: 30, DIRECT_RUN_CLASS: 30}
RUN_FILL_FACTORS: dict[int, int] = {SCHEDULED_RUN_CLASS: 95, DIRECT_RUN_CLASS: 50}
"""Room in the page for the one update of a run (HOT), where a run has one."""
DEAD_LETTER_RETENTION_DAYS = 90
AUDIT_RETENTION_DAYS = 366
IDEMPOTENCY_RETENTION_DAYS = 7
DELETE_ROWS_MAX = 5_000
"""In one statement: it takes well under a second, and vacuum keeps up."""
STEPS_MAX = 200
"""In one round: a round ends, so that its leader can notice that it leads no more."""
LOCK_TIMEOUT_MS = 2_000
_MAINTENANCE_LOCK = (27767, -2)
_RUN_TABLES = ("run", "attempt")
_EPOCH = date(1970, 1, 1)

_SQL = statements.load("partitions.sql")


@dataclass(slots=True)
class Maintained:
    """What one round did. `blocked` are partitions that a lock kept away; the next round tries again."""

    created: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    blocked: list[str] = field(default_factory=list)
    analyzed: list[str] = field(default_factory=list)
    deleted_count: int = 0
    skipped: bool = False
    """Another session was at it."""


def day_bounds(retention_class: int, day: int) -> tuple[uuid.UUID, uuid.UUID]:
    """The first id of (class, day) and the first one after it. `day` counts from 1970-01-01."""

    def lowest(prefix: int) -> uuid.UUID:
        return uuid.UUID(bytes=(prefix & 0xFFFF_FFFF).to_bytes(4, "big") + bytes(12))

    start = run_id_prefix(retention_class, day, 0)
    return lowest(start), lowest(start + (1 << 12))


def month_bounds(year: int, month: int) -> tuple[int, int]:
    """The month's first microsecond and the next month's."""
    following = (year + 1, 1) if month == 12 else (year, month + 1)
    return (date(year, month, 1) - _EPOCH).days * DAY_US, (date(*following, 1) - _EPOCH).days * DAY_US


def maintain(
    connection: psycopg.Connection,
    *,
    now_us: int,
    lock_timeout_ms: int = LOCK_TIMEOUT_MS,
    run_retention_days: dict[int, int] | None = None,
) -> Maintained:
    """One round: create ahead, then let go of what is over. `connection` is in autocommit mode.

    Safe to run from several processes: one does it, the others answer `skipped`.
    """
    assert connection.autocommit, "DETACH CONCURRENTLY runs outside transactions"
    done = Maintained()
    row = connection.execute("SELECT pg_try_advisory_lock(%s, %s)", _MAINTENANCE_LOCK).fetchone()
    assert row is not None
    if not row[0]:
        done.skipped = True
        return done
    try:
        connection.execute("SELECT set_config('lock_timeout', %s, false)", (f"{lock_timeout_ms}ms",))
        _create_ahead(connection, now_us, done)
        _analyze_grown(connection, now_us, done)
        _retain(connection, now_us, run_retention_days or RUN_RETENTION_DAYS, done)
    finally:
        if not connection.closed:
            connection.execute("RESET lock_timeout")
            connection.execute("SELECT pg_advisory_unlock(%s, %s)", _MAINTENANCE_LOCK)
    return done


def _create_ahead(connection: psycopg.Connection, now_us: int, done: Maintained) -> None:
    today = now_us // DAY_US
    for retention_class in RUN_RETENTION_DAYS:
        for day in range(today - DAYS_BACK, today + DAYS_AHEAD + 1):
            low, high = day_bounds(retention_class, day)
            for parent in _RUN_TABLES:
                name = f"{parent}_c{retention_class}_d{day}"
                fill_factor = RUN_FILL_FACTORS.get(retention_class, 50)
                _create(
                    connection, parent, name, sql.Literal(str(low)), sql.Literal(str(high)), done, fill_factor
                )
    for year, month in _months_around(now_us):
        start_us, end_us = month_bounds(year, month)
        _create(
            connection, "audit", f"audit_{year}_{month:02}", sql.Literal(start_us), sql.Literal(end_us), done
        )


def _months_around(now_us: int) -> Iterator[tuple[int, int]]:
    today = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=now_us - DAYS_BACK * DAY_US)
    year, month = today.year, today.month
    for _ in range(MONTHS_AHEAD + 1):
        yield year, month
        year, month = (year + 1, 1) if month == 12 else (year, month + 1)


def _create(
    connection: psycopg.Connection,
    parent: str,
    name: str,
    low: sql.Literal,
    high: sql.Literal,
    done: Maintained,
    fill_factor: int = 100,
) -> None:
    if connection.execute(_SQL["is_attached"], {"parent": parent, "name": name}).fetchone():
        return
    table, above = sql.Identifier(name), sql.Identifier(parent)
    try:
        with connection.transaction():
            connection.execute(
                sql.SQL(
                    "CREATE TABLE IF NOT EXISTS {}"
                    " (LIKE {} INCLUDING DEFAULTS INCLUDING CONSTRAINTS INCLUDING STORAGE)"
                ).format(table, above)
            )
            if parent == "run":
                # Payloads out of the way of what the hot path reads and writes.
                connection.execute(
                    sql.SQL("ALTER TABLE {} SET (fillfactor = {}, toast_tuple_target = 128)").format(
                        table, sql.Literal(fill_factor)
                    )
                )
                connection.execute(
                    sql.SQL(
                        "ALTER TABLE {} ALTER COLUMN payload SET STORAGE EXTERNAL,"
                        " ALTER COLUMN result SET STORAGE EXTERNAL"
                    ).format(table)
                )
            connection.execute(
                sql.SQL("ALTER TABLE {} ATTACH PARTITION {} FOR VALUES FROM ({}) TO ({})").format(
                    above, table, low, high
                )
            )
    except psycopg.errors.LockNotAvailable:
        done.blocked.append(name)
        return
    connection.execute(sql.SQL("ANALYZE {}").format(table))
    done.created.append(name)


def _analyze_grown(connection: psycopg.Connection, now_us: int, done: Maintained) -> None:
    """Partitions that grew since their last ANALYZE: autovacuum may be minutes late, and plans go wrong."""
    names = [row[0] for row in connection.execute(_SQL["grown"], {"names": _recent(now_us)})]
    for name in names:
        connection.execute(sql.SQL("ANALYZE {}").format(sql.Identifier(name)))
    done.analyzed.extend(names)


def _recent(now_us: int) -> list[str]:
    today = now_us // DAY_US
    return [
        f"{parent}_c{retention_class}_d{day}"
        for parent in _RUN_TABLES
        for retention_class in RUN_RETENTION_DAYS
        for day in (today - 1, today)
    ]


def _retain(
    connection: psycopg.Connection, now_us: int, run_retention_days: dict[int, int], done: Maintained
) -> None:
    steps_left = STEPS_MAX
    for statement, days in (
        ("delete_idempotency", IDEMPOTENCY_RETENTION_DAYS),
        ("delete_dead_letters", DEAD_LETTER_RETENTION_DAYS),
    ):
        steps_left = _delete_in_steps(
            connection, statement, {"before": now_us - days * DAY_US}, steps_left, done
        )
    for name in _audit_over(connection, now_us):
        _detach_and_drop(connection, "audit", name, None, done)
    for retention_class, days in run_retention_days.items():
        day_over = now_us // DAY_US - days
        for day in _run_days(connection, retention_class):
            if day < day_over and steps_left > 0:
                steps_left = _retain_day(connection, retention_class, day, steps_left, done)


def _run_days(connection: psycopg.Connection, retention_class: int) -> list[int]:
    """The days that have a partition of `run`, attached or not, oldest first."""
    prefix = f"run_c{retention_class}_d"
    rows = connection.execute(_SQL["partition_tables"], {"pattern": f"^{prefix}[0-9]+$"})
    return sorted(int(row[0].removeprefix(prefix)) for row in rows)


def _retain_day(
    connection: psycopg.Connection, retention_class: int, day: int, steps_left: int, done: Maintained
) -> int:
    run, attempt = (f"{parent}_c{retention_class}_d{day}" for parent in _RUN_TABLES)
    low, high = day_bounds(retention_class, day)
    bounds = {"low": low, "high": high}
    if not _has_living(connection, run, bounds):
        # Attempts go first: without their run they say nothing.
        if _detach_and_drop(connection, "attempt", attempt, None, done):
            _detach_and_drop(connection, "run", run, bounds, done)
        return steps_left
    statement = sql.SQL(_SQL["delete_ended_runs"]).format(run=sql.Identifier(run))
    while steps_left > 0:
        deleted = connection.execute(statement, {**bounds, "rows_max": DELETE_ROWS_MAX}).rowcount
        done.deleted_count += deleted
        steps_left -= 1
        if deleted < DELETE_ROWS_MAX:
            break
    if not _exists(connection, attempt):
        return steps_left
    statement = sql.SQL(_SQL["delete_orphaned_attempts"]).format(
        run=sql.Identifier(run), attempt=sql.Identifier(attempt)
    )
    while steps_left > 0:
        deleted = connection.execute(statement, {**bounds, "rows_max": DELETE_ROWS_MAX}).rowcount
        done.deleted_count += deleted
        steps_left -= 1
        if deleted < DELETE_ROWS_MAX:
            break
    return steps_left


def _has_living(connection: psycopg.Connection, run: str, bounds: dict[str, uuid.UUID]) -> bool:
    """Whether a run waits, is held, is leased (then it may have no row yet) or has a dead letter."""
    statement = sql.SQL(_SQL["has_living"]).format(run=sql.Identifier(run))
    row = connection.execute(statement, bounds).fetchone()
    assert row is not None
    return bool(row[0])


def _exists(connection: psycopg.Connection, name: str) -> bool:
    return connection.execute(_SQL["partition_tables"], {"pattern": f"^{name}$"}).fetchone() is not None


def _detach_and_drop(
    connection: psycopg.Connection,
    parent: str,
    name: str,
    bounds: dict[str, uuid.UUID] | None,
    done: Maintained,
) -> bool:
    """`bounds` are those of a partition of `run`: it is dropped only if, detached, nothing in it lives."""
    if not _exists(connection, name):
        return True
    table, above = sql.Identifier(name), sql.Identifier(parent)
    try:
        attached = connection.execute(_SQL["is_attached"], {"parent": parent, "name": name}).fetchone()
        if attached and attached[0]:
            # A detach that was interrupted is finished first.
            connection.execute(sql.SQL("ALTER TABLE {} DETACH PARTITION {} FINALIZE").format(above, table))
        elif attached:
            connection.execute(
                sql.SQL("ALTER TABLE {} DETACH PARTITION {} CONCURRENTLY").format(above, table)
            )
        if bounds is not None and _has_living(connection, name, bounds):
            low, high = sql.Literal(str(bounds["low"])), sql.Literal(str(bounds["high"]))
            connection.execute(
                sql.SQL("ALTER TABLE {} ATTACH PARTITION {} FOR VALUES FROM ({}) TO ({})").format(
                    above, table, low, high
                )
            )
            return False
        connection.execute(sql.SQL("DROP TABLE {}").format(table))
    except psycopg.errors.LockNotAvailable:
        done.blocked.append(name)
        return False
    done.dropped.append(name)
    return True


def _audit_over(connection: psycopg.Connection, now_us: int) -> list[str]:
    over: list[str] = []
    for row in connection.execute(_SQL["partition_tables"], {"pattern": "^audit_[0-9]{4}_[0-9]{2}$"}):
        _, year, month = row[0].split("_")
        if month_bounds(int(year), int(month))[1] < now_us - AUDIT_RETENTION_DAYS * DAY_US:
            over.append(row[0])
    return over


def _delete_in_steps(
    connection: psycopg.Connection,
    statement: str,
    parameters: dict[str, int],
    steps_left: int,
    done: Maintained,
) -> int:
    while steps_left > 0:
        deleted = connection.execute(_SQL[statement], {**parameters, "rows_max": DELETE_ROWS_MAX}).rowcount
        done.deleted_count += deleted
        steps_left -= 1
        if deleted < DELETE_ROWS_MAX:
            break
    return steps_left
