"""How is what happened gathered? Diaries of workers, rows of Postgres, and a witness of every write.

The witness is a set of statement triggers: for each statement that touches rows of a shard it asks to whom
the shard belongs at that moment, and keeps what a stranger wrote (and each grant, so that an empty list
cannot mean a witness that was asleep).
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import psycopg
from tests.chaos.history import (
    AttemptRow,
    DecisionRow,
    History,
    LeaseRow,
    RunRow,
    ScheduleRow,
    Sighting,
    TimerRow,
    Write,
)

Connection = psycopg.Connection[Any]

_WITNESS = """
CREATE UNLOGGED TABLE chaos_write (shard integer, writer text, owner text, what text, at timestamptz);

CREATE FUNCTION chaos_witness() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    -- A timer names its connections "<timer id> <what for>"; coordinators may write to any shard.
    v_writer text := split_part(current_setting('application_name'), ' ', 1);
    v_is_grant boolean := TG_TABLE_NAME = 'lease' AND TG_OP = 'INSERT';
BEGIN
    IF v_writer NOT LIKE 'timer-%' THEN
        RETURN NULL;
    END IF;
    INSERT INTO chaos_write
    SELECT DISTINCT c.shard_id, v_writer, s.owner, TG_TABLE_NAME || ' ' || TG_OP, clock_timestamp()
      FROM changed c JOIN shard s ON s.shard_id = c.shard_id
     WHERE v_is_grant OR s.owner <> v_writer;
    RETURN NULL;
END $$;
"""
_WATCHED = ("timer", "lease", "run", "attempt", "decision", "dead_letter")
_TRIGGERS = (("INSERT", "NEW"), ("UPDATE", "NEW"), ("DELETE", "OLD"))

_BROKEN_FENCE = """
CREATE OR REPLACE FUNCTION tw_fence(p_shards smallint[], p_epochs bigint[]) RETURNS smallint[]
LANGUAGE sql AS $$ SELECT '{}'::smallint[] $$
"""


def install_witness(connection: Connection) -> None:
    """From now on every write of a timer is looked at."""
    connection.execute(_WITNESS)
    for table in _WATCHED:
        for operation, rows in _TRIGGERS:
            connection.execute(
                f"CREATE TRIGGER chaos_{operation.lower()} AFTER {operation} ON {table}"
                f" REFERENCING {rows} TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION chaos_witness()"
            )


def break_the_fence(connection: Connection) -> None:
    """A build whose fence locks nothing and finds every epoch right: what the judge has to notice."""
    connection.execute(_BROKEN_FENCE)


class Diaries:
    """What all worker processes of a folder wrote down. Each line is read once, however often one looks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}
        self._seen: list[Sighting] = []
        self._decode = msgspec.json.Decoder(Sighting).decode

    def read(self) -> Sequence[Sighting]:
        """Everything by now, in no certain order."""
        for path in self._folder.glob("worker-*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                data = file.read()
            # A line is whole when its end is there: a process that was killed may leave half of one.
            whole = data.rfind(b"\n") + 1
            self._offsets[path] = self._offsets.get(path, 0) + whole
            self._seen.extend(map(self._decode, data[:whole].splitlines()))
        return self._seen


def read_rows(connection: Connection) -> History:
    """All that Postgres knows; the rest of the history is empty. Call it in one transaction."""

    def select(statement: str) -> list[tuple[Any, ...]]:
        return connection.execute(statement).fetchall()

    return History(
        runs=[
            RunRow(run.hex, shard, _hex(schedule), _text(result), *others)
            for run, shard, schedule, result, *others in select(
                "SELECT id, shard_id, schedule, result, schedule_us, create_us, due_us, lease_us, state,"
                " attempt, fence, cause, spent FROM run"
            )
        ],
        leases=[
            LeaseRow(run.hex, shard, _hex(schedule), *others)
            for run, shard, schedule, *others in select(
                "SELECT run, shard_id, schedule, schedule_us, due_us, lease_us, attempt, fence,"
                " (flags >> 12) & 7 FROM lease"
            )
        ],
        attempts=[
            AttemptRow(run.hex, *others)
            for run, *others in select(
                "SELECT run, shard_id, number, fence, state, lease_us, end_us FROM attempt"
            )
        ],
        timers=[
            TimerRow(ref.hex, *others)
            for ref, *others in select("SELECT ref, shard_id, kind, due_us, decided_us FROM timer")
        ],
        decisions=[
            DecisionRow(schedule.hex, *others)
            for schedule, *others in select("SELECT schedule, from_us, until_us, reason FROM decision")
        ],
        schedules=[
            ScheduleRow(uid.hex, *others)
            for uid, *others in select(
                "SELECT uid, delete_us IS NOT NULL, quarantine_reason IS NOT NULL FROM schedule"
            )
        ],
        dead_letters={run.hex for (run,) in select("SELECT run FROM dead_letter")},
        writes=[
            Write(*row) for row in select("SELECT shard, writer, owner, what FROM chaos_write ORDER BY at")
        ],
    )


def _hex(uid: uuid.UUID | None) -> str:
    return uid.hex if uid is not None else ""


def _text(result: bytes | None) -> str:
    return (result or b"").decode(errors="replace")
