"""What becomes of occurrences that nobody could take in time, seen from outside.

One cluster serves all tests of the module; each has schedules of its own, so that their faults do not meet.
"""

import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import psycopg
import pytest
from google.protobuf.duration_pb2 import Duration

from tickwheel.domain.decision import DecisionReason
from tickwheel.embedded.cluster import Cluster
from tickwheel.v1 import (
    job_pb2,
    run_pb2,
    run_service_pb2,
    run_service_pb2_grpc,
    schedule_service_pb2,
    schedule_service_pb2_grpc,
)
from tickwheel.v1 import schedule_pb2 as pb

Overlap, Misfire = pb.OverlapPolicy, pb.MisfirePolicy


@pytest.fixture(scope="module")
def cluster(short_folder: Path, postgres_bin_folder: Path | None) -> Iterator[Cluster]:
    with Cluster(
        short_folder / "sem",
        timers=1,
        workers=1,
        postgres_bin_folder=postgres_bin_folder,
        service_settings={"timer": {"decide_after_ms": "1000"}},
    ) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def database(cluster: Cluster) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(cluster.postgres_url, autocommit=True) as connection:
        yield connection


@pytest.fixture(scope="module")
def channel(cluster: Cluster) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(cluster.api_addresses[0]) as channel:
        yield channel


def seconds(value: float) -> Duration:
    return Duration(seconds=int(value), nanos=int(value % 1 * 1e9))


def create(
    channel: grpc.Channel,
    name: str,
    *,
    kind: str = "noop",
    interval_s: float = 1.0,
    overlap: Any = Overlap.POLICY_ALLOW_ALL,
    misfire: pb.MisfirePolicy | None = None,
    template: job_pb2.JobTemplate | None = None,
) -> pb.Schedule:
    spec = pb.ScheduleSpec(
        triggers=[pb.Trigger(interval=pb.IntervalTrigger(duration=seconds(interval_s)))],
        overlap=pb.OverlapPolicy(policy=overlap),
        misfire=misfire,
        template=template or job_pb2.JobTemplate(kind=kind),
    )
    request = schedule_service_pb2.CreateScheduleRequest(
        parent="tenants/default", schedule_id=name, schedule=pb.Schedule(spec=spec)
    )
    made: pb.Schedule = schedule_service_pb2_grpc.ScheduleServiceStub(channel).CreateSchedule(request)
    return made


def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s"
        time.sleep(0.05)


def count(database: psycopg.Connection[Any], sql: str, *parameters: Any) -> int:
    row = database.execute(sql, parameters).fetchone()
    assert row is not None
    return int(row[0] or 0)


def now_us(database: psycopg.Connection[Any]) -> int:
    return count(database, "SELECT (extract(epoch FROM clock_timestamp()) * 1e6)::bigint")


def waiting(database: psycopg.Connection[Any], uid: str) -> int:
    return count(database, "SELECT count(*) FROM timer WHERE schedule = %s::uuid AND kind = 2", uid)


def decided(database: psycopg.Connection[Any], uid: str, reason: DecisionReason) -> int:
    return count(
        database,
        "SELECT sum(count) FROM decision WHERE schedule = %s::uuid AND reason = %s",
        uid,
        int(reason),
    )


def succeeded(database: psycopg.Connection[Any], uid: str) -> int:
    return count(database, "SELECT count(*) FROM run WHERE schedule = %s::uuid AND state = 5", uid)


def test_without_a_worker_each_occurrence_waits_where_runs_may_overlap_and_one_where_they_may_not(
    channel: grpc.Channel, database: psycopg.Connection[Any]
) -> None:
    # No worker knows this kind.
    free = create(channel, "pool-down-free", kind="nobody")
    alone = create(channel, "pool-down-alone", kind="nobody", overlap=Overlap.POLICY_SKIP)
    until(lambda: waiting(database, free.uid) >= 4)
    assert waiting(database, alone.uid) == 1
    until(lambda: decided(database, alone.uid, DecisionReason.OVERLAP) >= 2)
    named = database.execute(
        "SELECT schedule_us FROM timer WHERE schedule = %s::uuid ORDER BY 1", [free.uid]
    ).fetchall()
    gaps = {later[0] - earlier[0] for earlier, later in pairwise(named)}
    assert gaps == {1_000_000}, "an occurrence is missing or doubled"


def test_a_running_run_keeps_the_next_occurrence_of_an_exclusive_schedule_back(
    channel: grpc.Channel, database: psycopg.Connection[Any]
) -> None:
    template = job_pb2.JobTemplate(kind="sleep", payload=job_pb2.Payload(data=b'{"seconds": 2.5}'))
    template.payload.content_type = "application/json"
    slow = create(channel, "slow", overlap=Overlap.POLICY_SKIP, template=template)
    until(lambda: succeeded(database, slow.uid) >= 3, 30)
    overlapping = count(
        database,
        """
        SELECT count(*) FROM run a JOIN run b ON a.schedule = b.schedule AND a.id < b.id
         WHERE a.schedule = %s::uuid AND a.lease_us < b.end_us AND b.lease_us < a.end_us
        """,
        slow.uid,
    )
    assert overlapping == 0
    assert decided(database, slow.uid, DecisionReason.OVERLAP) >= 2


def test_buffered_occurrences_run_one_after_the_other(
    channel: grpc.Channel, database: psycopg.Connection[Any]
) -> None:
    template = job_pb2.JobTemplate(kind="sleep", payload=job_pb2.Payload(data=b'{"seconds": 1.5}'))
    template.payload.content_type = "application/json"
    one = create(channel, "buffer-one", overlap=Overlap.POLICY_BUFFER_ONE, template=template)
    until(lambda: succeeded(database, one.uid) >= 3, 30)
    assert waiting(database, one.uid) <= 1
    assert decided(database, one.uid, DecisionReason.OVERLAP) >= 1


def test_each_misfire_policy_gives_its_own_count_after_a_stop(
    cluster: Cluster, channel: grpc.Channel, database: psycopg.Connection[Any]
) -> None:
    def policy(value: Any) -> pb.MisfirePolicy:
        return pb.MisfirePolicy(policy=value, threshold_duration=seconds(1))

    schedules = {
        name: create(channel, f"misfire-{name}", misfire=policy(value))
        for name, value in (
            ("skip", Misfire.POLICY_SKIP),
            ("once", Misfire.POLICY_FIRE_ONCE),
            ("all", Misfire.POLICY_FIRE_ALL),
        )
    }
    until(lambda: all(succeeded(database, s.uid) >= 1 for s in schedules.values()))
    cluster["timer-1"].kill9()
    stopped = {
        name: count(database, "SELECT decided_us FROM timer WHERE ref = %s::uuid", s.uid)
        for name, s in schedules.items()
    }
    time.sleep(5)  # What the test is about: time passes, and nobody is there.
    cluster["timer-1"].start()
    until(
        lambda: all(
            count(database, "SELECT decided_us FROM timer WHERE ref = %s::uuid", s.uid)
            > stopped[name] + 6_000_000
            for name, s in schedules.items()
        ),
        30,
    )

    def caught_up(name: str) -> int:
        return count(
            database,
            "SELECT count(*) FROM run WHERE schedule = %s::uuid AND cause = 2 AND state = 5",
            schedules[name].uid,
        )

    until(lambda: caught_up("once") >= 1 and caught_up("all") >= 4)
    assert waiting(database, schedules["once"].uid) == 0
    assert (caught_up("skip"), caught_up("once")) == (0, 1)
    assert decided(database, schedules["skip"].uid, DecisionReason.MISFIRE_SKIPPED) >= 4
    assert decided(database, schedules["once"].uid, DecisionReason.MISFIRE_COLLAPSED) >= 3
    for schedule in schedules.values():
        twice = database.execute(
            "SELECT schedule_us FROM run WHERE schedule = %s::uuid GROUP BY 1 HAVING count(*) > 1",
            [schedule.uid],
        ).fetchall()
        assert twice == [], "an occurrence became two runs"


def test_the_run_count_ends_a_schedule(channel: grpc.Channel, database: psycopg.Connection[Any]) -> None:
    spec = pb.ScheduleSpec(
        triggers=[pb.Trigger(interval=pb.IntervalTrigger(duration=seconds(1)))],
        run_count_max=2,
        template=job_pb2.JobTemplate(kind="noop"),
    )
    stub = schedule_service_pb2_grpc.ScheduleServiceStub(channel)
    made = stub.CreateSchedule(
        schedule_service_pb2.CreateScheduleRequest(
            parent="tenants/default", schedule_id="twice", schedule=pb.Schedule(spec=spec)
        )
    )
    until(lambda: succeeded(database, made.uid) == 2)
    seen = stub.GetSchedule(schedule_service_pb2.GetScheduleRequest(name=made.name))
    assert seen.status.state == pb.ScheduleStatus.STATE_COMPLETED
    assert not seen.status.next_occurrences


def test_an_unknown_outcome_holds_a_run_that_must_not_run_twice(
    cluster: Cluster, channel: grpc.Channel, database: psycopg.Connection[Any]
) -> None:
    template = job_pb2.JobTemplate(
        kind="sleep",
        payload=job_pb2.Payload(data=b'{"seconds": 60}', content_type="application/json"),
        lease_duration=seconds(2),
        on_unknown_outcome=job_pb2.UNKNOWN_OUTCOME_POLICY_HOLD,
    )
    stub = run_service_pb2_grpc.RunServiceStub(channel)
    run = stub.CreateRun(
        run_service_pb2.CreateRunRequest(parent="tenants/default", run=run_pb2.Run(template=template))
    )

    def state() -> Any:
        return stub.GetRun(run_service_pb2.GetRunRequest(name=run.name)).state

    # A grant that is still on its way when its worker dies is handed back: this one has arrived.
    held = "SELECT count(*) FROM lease WHERE schedule IS NULL AND lease_us < %s"
    until(lambda: count(database, held, now_us(database) - 1_000_000) == 1)
    cluster["worker-1"].kill9()
    until(lambda: state() == run_pb2.Run.STATE_HELD)
    cluster["worker-1"].start()
    attempts = stub.ListAttempts(run_service_pb2.ListAttemptsRequest(parent=run.name)).attempts
    assert [attempt.state for attempt in attempts] == [run_pb2.Attempt.STATE_OUTCOME_UNKNOWN]
    assert stub.GetRun(run_service_pb2.GetRunRequest(name=run.name)).state == run_pb2.Run.STATE_HELD
