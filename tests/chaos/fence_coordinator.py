"""A coordinator of the fence rig: pauses, resumes, updates and cancels in transactions that hold row locks.

Run as `python -m tests.chaos.fence_coordinator URL NAME SEED`, until SIGTERM. It thinks while it holds its
locks, so that a SIGSTOP often finds it with some.
"""

from __future__ import annotations

import signal
import sys
import time
from random import Random
from typing import Any

import psycopg
from tests.chaos.fence_ledger import PERIOD_US

from tickwheel.domain.timer_rows import NEVER_US

_PICK = "SELECT shard_id, ref FROM timer WHERE kind = %s ORDER BY random() LIMIT %s"
_LOCK = "SELECT decided_us, schedule_us FROM timer WHERE shard_id = %s AND ref = %s AND kind = 1 FOR UPDATE"
_MOVE = """
UPDATE timer SET decided_us = %s, schedule_us = %s, due_us = %s, version = version + 1
 WHERE shard_id = %s AND ref = %s"""


def _rewrite_schedules(connection: psycopg.Connection[Any], random: Random) -> None:
    """Pause, resume or update: every one rewrites the timer row in its transaction."""
    keys = sorted(connection.execute(_PICK, (1, random.randint(1, 4))).fetchall())
    pause = random.random() < 0.2
    with connection.transaction():
        for shard, ref in keys:
            found = connection.execute(_LOCK, (shard, ref)).fetchone()
            assert found is not None
            decided_us = found[0] + random.choice((0, 0, 2)) * PERIOD_US
            next_us = NEVER_US if pause else decided_us + PERIOD_US
            _think(random)
            connection.execute(_MOVE, (decided_us, next_us, next_us, shard, ref))
        _think(random)


def _cancel_waiting(connection: psycopg.Connection[Any], random: Random) -> None:
    picked = connection.execute(_PICK, (2, 1)).fetchone()
    if picked is None:
        return
    with connection.transaction():
        gone = connection.execute(
            "SELECT FROM timer WHERE shard_id = %s AND ref = %s FOR UPDATE", picked
        ).fetchone()
        _think(random)
        if gone is not None:
            connection.execute("DELETE FROM timer WHERE shard_id = %s AND ref = %s", picked)
            connection.execute(
                "UPDATE run SET state = 8, end_us = %s WHERE shard_id = %s AND id = %s",
                (time.time_ns() // 1_000, *picked),
            )


def _cancel_leased(connection: psycopg.Connection[Any], random: Random) -> None:
    picked = connection.execute("SELECT shard_id, run FROM lease ORDER BY random() LIMIT 1").fetchone()
    if picked is None:
        return
    with connection.transaction():
        connection.execute(
            "UPDATE lease SET cancel_us = 1, cancel_until_us = 2, cancel_reason = 'rig'"
            " WHERE shard_id = %s AND run = %s",
            picked,
        )
        _think(random)


def _think(random: Random) -> None:
    time.sleep(random.choice((0, 0.01, 0.05)))


def main(url: str, name: str, seed: str) -> None:
    random = Random(f"{seed} {name}")
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
    while not stopped:
        try:
            with psycopg.connect(
                url, autocommit=True, application_name=name, connect_timeout=2
            ) as connection:
                while not stopped:
                    random.choice((_rewrite_schedules, _rewrite_schedules, _cancel_waiting, _cancel_leased))(
                        connection, random
                    )
                    time.sleep(random.random() * 0.05)
        except psycopg.Error:
            time.sleep(0.02)


if __name__ == "__main__":
    main(*sys.argv[1:])
