"""Names and ids.

A run's id is 128 bits: retention class (4) | UTC day of creation (16) | shard (12) | random (96), written
as 32 hexadecimal digits. The leading 20 bits choose the partition that holds the run, so a point read
touches one partition, and the shard says which timer owns it. A schedule's uid is 128 random bits.
"""

import re
from typing import NewType

RunId = NewType("RunId", bytes)
ScheduleUid = NewType("ScheduleUid", bytes)

USER_ID_PATTERN = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
KIND_PATTERN = re.compile(r"[a-zA-Z0-9_.:/-]{1,128}")
RUN_ID_PATTERN = re.compile(r"[0-9a-f]{32}")

SHARD_COUNT_MAX = 4096
RETENTION_CLASS_MAX = 15
DAY_US = 86_400_000_000
SCHEDULED_RUN_CLASS = 0
"""The retention class of runs that are born from a schedule: a first success is written once, at its end."""
DIRECT_RUN_CLASS = 1
"""Of runs that a caller makes: each has a row from the start, that its end updates in place."""

NO_UUID = bytes(16)


def run_id_prefix(retention_class: int, day: int, shard: int) -> int:
    """The first 32 bits of a run's id. `day` counts from 1970-01-01."""
    assert 0 <= retention_class <= RETENTION_CLASS_MAX
    assert 0 <= day < 1 << 16
    assert 0 <= shard < SHARD_COUNT_MAX
    return (retention_class << 28) | (day << 12) | shard


def run_id_head(retention_class: int, now_us: int, shard: int) -> int:
    """The first 64 bits of the id of a run that is created at `now_us`; the rest is random.

    The time of day stands after the shard, so the ids that a shard makes lie side by side in an index.
    """
    day, us_of_day = divmod(now_us, DAY_US)
    return (run_id_prefix(retention_class, day, shard) << 32) | (us_of_day >> 5)


def run_id(retention_class: int, now_us: int, shard: int, random_64: bytes) -> RunId:
    """A new run's id; `random_64` are 8 random bytes."""
    assert len(random_64) == 8
    return RunId(run_id_head(retention_class, now_us, shard).to_bytes(8, "big") + random_64)


def run_retention_class(run: bytes) -> int:
    return run[0] >> 4


def run_day(run: bytes) -> int:
    return (int.from_bytes(run[:4], "big") >> 12) & 0xFFFF


def run_shard(run: bytes) -> int:
    return int.from_bytes(run[2:4], "big") & 0xFFF


def parse_run_id(text: str) -> RunId | None:
    """The id behind 32 hexadecimal digits, or None where the text is no such id."""
    return RunId(bytes.fromhex(text)) if RUN_ID_PATTERN.fullmatch(text) else None


def tenant_name(tenant: str) -> str:
    return f"tenants/{tenant}"


def schedule_name(tenant: str, schedule: str) -> str:
    return f"tenants/{tenant}/schedules/{schedule}"


def run_name(tenant: str, run: bytes) -> str:
    return f"tenants/{tenant}/runs/{run.hex()}"
