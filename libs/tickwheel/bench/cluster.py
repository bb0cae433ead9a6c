"""What does the whole system do on this machine? A real cluster of processes, loaded, and read from Postgres.

Figures come from rows that were committed (a run's `due_us`, `lease_us` and `end_us`), never from what
was offered. Everything shares the same cores, with fsync on.
"""

import contextlib
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import psycopg

from tickwheel.domain import job, trigger
from tickwheel.domain.trigger import Interval, Trigger, TriggerSet
from tickwheel.embedded.cluster import Cluster

SHARD_COUNT = 64
INSERT_CHUNK = 200_000


@dataclass(slots=True)
class Usage:
    """CPU seconds and peak resident bytes, by kind of process."""

    cpu_s: dict[str, float] = field(default_factory=dict)
    memory_bytes: dict[str, int] = field(default_factory=dict)


def kind_of(process: psutil.Process) -> str | None:
    """Which part of the cluster a process is, None for others."""
    try:
        name, line = process.name(), process.cmdline()
    except psutil.Error:
        return None
    if name.startswith("postgres"):
        return "postgres"
    if name.startswith("etcd"):
        return "etcd"
    for service in ("coordinator", "timer", "worker"):
        if f"tickwheel.services.{service}" in line:
            return service
    return None


def usage() -> Usage:
    """Of all parts that this process has started."""
    found = Usage()
    for process in psutil.Process().children(recursive=True):
        kind = kind_of(process)
        if kind is None:
            continue
        try:
            times, memory = process.cpu_times(), process.memory_info()
        except psutil.Error:
            continue
        found.cpu_s[kind] = found.cpu_s.get(kind, 0.0) + times.user + times.system
        found.memory_bytes[kind] = found.memory_bytes.get(kind, 0) + memory.rss
    return found


def cpu_us_each(before: Usage, after: Usage, count: int) -> dict[str, float]:
    """CPU microseconds of each part for each of `count` executions."""
    return {
        kind: round((after.cpu_s[kind] - before.cpu_s.get(kind, 0.0)) / max(1, count) * 1e6, 1)
        for kind in sorted(after.cpu_s)
    }


@contextlib.contextmanager
def running(
    *, timers: int = 1, workers: int = 1, capacity: int = 4_000, settings: Mapping[str, str] | None = None
) -> Iterator[tuple[Cluster, psycopg.Connection[Any]]]:
    """A cluster in a folder of its own, with a connection to its database."""
    with tempfile.TemporaryDirectory(prefix="tw", dir="/tmp", ignore_cleanup_errors=True) as folder:
        cluster = Cluster(
            Path(folder) / "c",
            timers=timers,
            workers=workers,
            shard_count=SHARD_COUNT,
            settings={"log_level": "warning", **(settings or {})},
            service_settings={"worker": {"capacity": str(capacity)}},
        )
        with cluster, psycopg.connect(cluster.postgres_url, autocommit=True) as connection:
            wait_for_owners(connection, timers)
            yield cluster, connection


def wait_for_owners(connection: psycopg.Connection[Any], timers: int, timeout_s: float = 60) -> None:
    """Until every shard has an owner, and there are `timers` of them."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        row = connection.execute(
            "SELECT count(*) FILTER (WHERE owner = ''), count(DISTINCT owner) FROM shard"
        ).fetchone()
        if row is not None and row[0] == 0 and row[1] >= timers:
            return
        time.sleep(0.1)
    raise TimeoutError(f"not all shards had one of {timers} owners within {timeout_s:g} s")


def now_us(connection: psycopg.Connection[Any]) -> int:
    row = connection.execute("SELECT (extract(epoch FROM clock_timestamp()) * 1e6)::bigint").fetchone()
    assert row is not None
    return int(row[0])


@dataclass(frozen=True, slots=True)
class Kind:
    """A template and its ids, stored."""

    template_id: int
    route_id: int
    tenant_id: int


def store_kind(connection: psycopg.Connection[Any], kind: str = "noop") -> Kind:
    """The template, route and tenant that the load uses."""
    body = job.encode_template(job.JobTemplate(kind=kind))
    template_id = job.content_id(body)
    connection.execute("INSERT INTO template_def VALUES (%s, %s) ON CONFLICT DO NOTHING", [template_id, body])
    connection.execute(
        "INSERT INTO route (queue, kind) VALUES ('default', %s) ON CONFLICT DO NOTHING", [kind]
    )
    row = connection.execute(
        "SELECT route_id, (SELECT tenant_id FROM tenant WHERE name = 'default') FROM route"
        " WHERE queue = 'default' AND kind = %s",
        [kind],
    ).fetchone()
    assert row is not None
    return Kind(template_id, row[0], row[1])


def add_schedules(
    connection: psycopg.Connection[Any],
    kind: Kind,
    count: int,
    interval_us: int,
    first_us: int,
    prefix: str,
    phases: int = 50,
) -> None:
    """`count` schedules of one interval, spread evenly over `phases` instants in it, from `first_us` on.

    Every schedule gets the rows that the API would have made.
    """
    anchors = [first_us + interval_us * phase // phases for phase in range(phases)]
    bodies = [
        trigger.canonical_bytes(
            TriggerSet((Trigger(interval=Interval(duration_us=interval_us, anchor_us=anchor % interval_us)),))
        )
        for anchor in anchors
    ]
    ids = [trigger.trigger_id(body) for body in bodies]
    connection.execute(
        "INSERT INTO trigger_def SELECT * FROM unnest(%s::bigint[], %s::bytea[]) ON CONFLICT DO NOTHING",
        [ids, bodies],
    )
    for start in range(0, count, INSERT_CHUNK):
        connection.execute(
            _ADD_SCHEDULES,
            {
                "from": start,
                "until": min(start + INSERT_CHUNK, count) - 1,
                "phases": phases,
                "triggers": ids,
                "anchors": anchors,
                "shards": SHARD_COUNT,
                "tenant": kind.tenant_id,
                "prefix": prefix,
                "template": kind.template_id,
                "route": kind.route_id,
                "first": first_us,
            },
        )


_ADD_SCHEDULES = """
WITH made AS MATERIALIZED (
    SELECT gen_random_uuid() AS uid, (n / %(phases)s %% %(shards)s)::smallint AS shard, n,
           (%(triggers)s::bigint[])[n %% %(phases)s + 1] AS trigger_id,
           (%(anchors)s::bigint[])[n %% %(phases)s + 1] AS due_us
      FROM generate_series(%(from)s::int, %(until)s::int) AS n),
s AS (
    INSERT INTO schedule (uid, shard_id, tenant_id, name, version, revision, spec, trigger_id, template_id,
                          create_us, update_us)
    SELECT uid, shard, %(tenant)s, %(prefix)s || '-' || n, 1, 1, '{}', trigger_id, %(template)s, %(first)s,
           %(first)s
      FROM made),
r AS (
    INSERT INTO schedule_revision (uid, version, shard_id, spec, trigger_id, template_id, payload,
                                   content_type, principal, create_us)
    SELECT uid, 1, shard, '{}', trigger_id, %(template)s, '', '', 'bench', %(first)s FROM made)
INSERT INTO timer (due_us, schedule_us, decided_us, version, trigger_id, template_id, ref, tenant_id,
                   route_id, flags, misfire_ms, countdown, shard_id, kind, priority, attempt)
SELECT due_us, due_us, due_us - 1, 1, trigger_id, %(template)s, uid, %(tenant)s, %(route)s, 1, 60000, -1,
       shard, 1, 0, 0
  FROM made
"""


@dataclass(frozen=True, slots=True)
class Window:
    """What was committed in a stretch of time: executions a second, and due -> leased in milliseconds."""

    executions: int
    seconds: float
    lag_p50_ms: float
    lag_p95_ms: float
    lag_p99_ms: float

    @property
    def rate(self) -> float:
        return self.executions / self.seconds


def window(connection: psycopg.Connection[Any], from_us: int, until_us: int) -> Window:
    """Of the runs that ended between two instants of the cluster clock."""
    row = connection.execute(
        """
        SELECT count(*), percentile_cont(ARRAY[0.5, 0.95, 0.99]) WITHIN GROUP (ORDER BY lease_us - due_us)
          FROM run WHERE state = 5 AND end_us >= %s AND end_us < %s
        """,
        [from_us, until_us],
    ).fetchone()
    assert row is not None
    lags = [round(value / 1_000, 2) for value in row[1] or (0, 0, 0)]
    return Window(row[0], (until_us - from_us) / 1e6, *lags)
