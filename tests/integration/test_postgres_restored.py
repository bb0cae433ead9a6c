"""Postgres restored, etcd wiped, an owner that never noticed: real processes on real stores."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import psycopg
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.integration.witness_handlers import FILE_VARIABLE

import tickwheel
from tickwheel.client import BlockingClient, make_run, make_template
from tickwheel.domain.shard import EPOCH_TAKING_BITS, FENCE_GRANT_BITS
from tickwheel.embedded.cluster import Cluster
from tickwheel.errors import FailedPrecondition, TickwheelError
from tickwheel.services.coordinator.reconciler import GENERATION_LIFT

pytestmark = pytest.mark.slow

TOP = Path(tickwheel.__file__).resolve().parents[2]
WAIT_S = 60.0
HOLD = timedelta(seconds=3)
SCHEDULES = 4


def until(predicate: Callable[[], Any], what: str, seconds: float = WAIT_S) -> Any:
    """Waits for real processes to bring something about."""
    end_s = time.monotonic() + seconds
    while not (value := predicate()):
        assert time.monotonic() < end_s, f"within {seconds} s: {what}"
        time.sleep(0.05)
    return value


class World:
    """A cluster whose worker writes down what it runs, and its database."""

    def __init__(self, cluster: Cluster, witness_file: Path) -> None:
        self.cluster = cluster
        self._witness_file = witness_file

    def sql(self, statement: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.cluster.postgres_url, autocommit=True) as connection:
            found = connection.execute(statement.encode())
            return found.fetchall() if found.description else []

    @contextmanager
    def client(self) -> Iterator[BlockingClient]:
        client = BlockingClient(self.cluster.api_addresses, retry_s_max=10.0)
        try:
            yield client
        finally:
            client.close()

    def executed(self) -> list[tuple[str, int, int]]:
        """(run, attempt, fence) of each execution, as the worker saw them."""
        if not self._witness_file.exists():
            return []
        lines = (line.split() for line in self._witness_file.read_text().splitlines())
        return [(run, int(attempt), int(fence)) for run, attempt, fence in lines]

    def wait_for_more(self, count: int) -> None:
        before = len(self.executed())
        until(lambda: len(self.executed()) >= before + count, f"{count} more executions")

    def schedule(self, kind: str = "witness") -> None:
        with self.client() as client:
            for number in range(SCHEDULES):
                client.schedules.create(
                    f"every-second-{number}", kind=kind, every=timedelta(seconds=1), overlap="ALLOW_ALL"
                )

    def epochs(self) -> dict[int, int]:
        return {row[0]: row[1] for row in self.sql("SELECT shard_id, epoch FROM shard")}

    def halted_reason(self) -> str:
        try:
            with self.client() as client:
                return str(client.cluster.health().halted_reason)
        except TickwheelError:
            return ""

    def metric(self, member: str, name: str) -> float:
        port = self.cluster[member].environment["TICKWHEEL_METRICS_PORT"]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            for line in answer.read().decode().splitlines():
                if line.startswith(f"{name} "):
                    return float(line.split()[1])
        raise AssertionError(f"{member} has no metric {name}")

    def is_serving(self, member: str) -> bool:
        with grpc.insecure_channel(self.cluster[member].address) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            status = stub.Check(health_pb2.HealthCheckRequest(), timeout=5).status
        return bool(status == health_pb2.HealthCheckResponse.SERVING)

    def is_halted(self, timer: str) -> bool:
        return self.metric(timer, "tickwheel_halted") == 1 and not self.is_serving(timer)

    def log(self, member: str) -> str:
        return self.cluster[member].log.read_text()


@contextmanager
def started_world(postgres_bin_folder: Path | None) -> Iterator[World]:
    folder = Path(tempfile.mkdtemp(prefix="tw-", dir="/tmp"))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(FILE_VARIABLE, str(folder / "witness"))
        paths = filter(None, (str(TOP), os.environ.get("PYTHONPATH", "")))
        environment.setenv("PYTHONPATH", os.pathsep.join(paths))
        cluster = Cluster(
            folder / "c",
            timers=2,
            shard_count=8,
            worker_modules=("tests.integration.witness_handlers",),
            postgres_bin_folder=postgres_bin_folder,
        )
        try:
            yield World(cluster.start(), folder / "witness")
        finally:
            cluster.stop()
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def world(postgres_bin_folder: Path | None) -> Iterator[World]:
    """For a test that changes the history of its cluster."""
    with started_world(postgres_bin_folder) as world:
        world.schedule()
        yield world


@pytest.fixture(scope="module")
def unharmed_world(postgres_bin_folder: Path | None) -> Iterator[World]:
    """For tests that end with all as it was."""
    with started_world(postgres_bin_folder) as world:
        world.schedule()
        yield world


def tickwheel_command(world: World, *arguments: str) -> str:
    """What the command line says."""
    command = [sys.executable, "-c", "from tickwheel.cli import main; main()", *arguments]
    environment = os.environ | {
        "PYTHONPATH": str(TOP / "libs"),
        "TICKWHEEL_ADDRESS": world.cluster.api_addresses[0],
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def copy_folder(source: Path, target: Path) -> None:
    """With owners and modes: Postgres is particular about its own."""
    subprocess.run(["cp", "-a", str(source), str(target)], check=True)


def test_a_restored_postgres_stops_all_grants_until_somebody_resumes(world: World) -> None:
    postgres = world.cluster.postgres
    world.wait_for_more(8)

    # A copy, as a file-level backup is one; then the cluster goes on, and a restart alone halts nothing.
    postgres.stop()
    backup = world.cluster.folder / "backup"
    copy_folder(postgres.data_folder, backup)
    postgres.start()
    world.wait_for_more(12)
    assert world.halted_reason() == ""

    seen_fences = [fence for _, _, fence in world.executed()]
    seen_epochs = world.epochs()
    postgres.stop()
    shutil.rmtree(postgres.data_folder)
    copy_folder(backup, postgres.data_folder)
    restored_at = len(world.executed())
    postgres.start()

    reason = until(world.halted_reason, "the cluster says that it stands still")
    assert "restored" in reason
    for timer in ("timer-1", "timer-2"):
        until(partial(world.is_halted, timer), f"{timer} halts, and is NOT_SERVING")
        assert "timer_halted" in world.log(timer)
    with world.client() as client:
        health = client.cluster.health()
        assert not health.healthy
        assert "cluster resume" in health.verdict or reason in health.verdict
        # A mutation is taken still; nothing runs it.
        waiting = client.runs.create("witness")
    lost_epochs = world.epochs()
    assert any(lost_epochs[shard] < seen_epochs[shard] for shard in seen_epochs)
    handed_out = world.executed()[restored_at:]
    assert not handed_out, f"granted from a history that nobody accepted: {handed_out}"
    assert world.sql("SELECT state FROM run WHERE state = 1")

    with world.client() as client:
        resumed = client.cluster.resume(hold=HOLD)
        assert resumed.incarnation == 1
        until(lambda: not world.halted_reason(), "the cluster goes on")
        ended = client.runs.wait(waiting.name, timeout_s=WAIT_S)
    assert ended.attempt_count == 1
    world.wait_for_more(8)

    after = [fence for _, _, fence in world.executed()[restored_at:]]
    assert min(after) > max(seen_fences)
    epochs = world.epochs()
    assert all(epochs[shard] > seen_epochs[shard] for shard in epochs)
    assert {epoch >> EPOCH_TAKING_BITS for epoch in epochs.values()} == {1}
    (at_us,) = (row[0] for row in world.sql("SELECT min(lease_us) FROM run WHERE fence >> 53 = 1"))
    (resumed_us,) = (row[0] for row in world.sql("SELECT min(taken_us) FROM shard WHERE epoch >> 25 = 1"))
    assert at_us >= resumed_us + HOLD.total_seconds() * 1_000_000 - 500_000, "granted within the hold"
    for timer in ("timer-1", "timer-2"):
        assert world.metric(timer, "tickwheel_halted") == 0
        assert world.is_serving(timer)
    with world.client() as client, pytest.raises(FailedPrecondition, match="force"):
        client.cluster.resume()


def test_a_promoted_standby_is_waited_out_by_a_timer_that_starts_on_it(world: World) -> None:
    postgres = world.cluster.postgres
    world.wait_for_more(4)
    seen_fences = [fence for _, _, fence in world.executed()]
    postgres.stop()
    signal_file = postgres.data_folder / "standby.signal"
    signal_file.touch()
    owner = postgres.data_folder.stat()
    os.chown(signal_file, owner.st_uid, owner.st_gid)
    postgres.start()
    assert world.sql("SELECT pg_is_in_recovery()") == [(True,)]
    assert world.sql("SELECT pg_promote()") == [(True,)]

    reason = until(world.halted_reason, "the cluster says that it stands still")
    assert "timeline 2, was on 1" in reason
    halted_at = len(world.executed())
    late = world.cluster["timer-2"]
    late.kill9()
    late.start(wait=False)
    until(lambda: "timer_waits_for_its_history" in world.log("timer-2"), "it does not join")
    assert len(world.executed()) == halted_at, "granted from a history that nobody accepted"

    said = tickwheel_command(world, "cluster", "resume", "--yes", "--hold", "3s")
    assert "goes on as incarnation 1" in said
    late.wait_ready()
    until(lambda: world.sql("SELECT count(DISTINCT owner) FROM shard") == [(2,)], "it takes its share")
    world.wait_for_more(8)
    assert min(fence for _, _, fence in world.executed()[halted_at:]) > max(seen_fences)
    assert not world.sql("SELECT schedule, schedule_us FROM run GROUP BY 1, 2 HAVING count(*) > 1")


def test_a_fresh_cluster_and_a_crash_of_postgres_halt_nothing(unharmed_world: World) -> None:
    world = unharmed_world
    world.wait_for_more(4)
    world.cluster.postgres.kill9()
    world.cluster.postgres.start()
    world.wait_for_more(8)
    assert world.halted_reason() == ""
    for member in ("coordinator-1", "timer-1", "timer-2"):
        assert "halted" not in world.log(member)
        assert world.metric(member, "tickwheel_halted") == 0
    assert world.sql("SELECT incarnation FROM cluster") == [(0,)]


def test_a_wiped_etcd_gives_assignments_above_what_postgres_knows_and_nothing_runs_twice(
    unharmed_world: World,
) -> None:
    world = unharmed_world
    world.wait_for_more(8)
    before = {row[0]: row[1] for row in world.sql("SELECT shard_id, generation FROM shard")}
    world.cluster.etcd.stop()
    shutil.rmtree(world.cluster.etcd.folder / "data")
    world.wait_for_more(4)  # Nothing needs etcd to go on.
    world.cluster.etcd.start()

    def lifted() -> bool:
        rows = world.sql("SELECT shard_id, generation FROM shard")
        return all(generation >= before[shard] + GENERATION_LIFT for shard, generation in rows)

    until(lifted, "every shard is taken under a generation above all that were ever given")
    world.wait_for_more(8)
    assert world.halted_reason() == ""
    twice = [key for key, count in Counter((r, a) for r, a, _ in world.executed()).items() if count > 1]
    assert not twice
    assert not world.sql("SELECT run FROM attempt")
    occurrences = world.sql("SELECT schedule, schedule_us FROM run GROUP BY 1, 2 HAVING count(*) > 1")
    assert not occurrences


def test_an_owner_that_slept_through_a_resume_writes_nothing_under_its_old_epochs(world: World) -> None:
    world.wait_for_more(8)
    # Who wrote which fence, and when, by the clock of Postgres.
    world.sql(
        """
        CREATE TABLE seen (fence bigint, at timestamptz DEFAULT clock_timestamp());
        CREATE FUNCTION see() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN INSERT INTO seen (fence) VALUES (NEW.fence); RETURN NEW; END $$;
        CREATE TRIGGER see AFTER INSERT ON lease FOR EACH ROW EXECUTE FUNCTION see();
        """
    )
    until(lambda: world.sql("SELECT 1 FROM seen LIMIT 1"), "grants are seen")
    # A lease that outlives the default ones: no grant may come before it has run out, whoever remembers it.
    patient = make_template("witness")
    patient.lease_duration.FromTimedelta(timedelta(seconds=12))
    with world.client() as client:
        client.runs.wait(client.runs.create(run=make_run(template=patient)).name, timeout_s=WAIT_S)
    sleeper = world.cluster["timer-1"]
    sleeper.pause()
    try:
        with world.client() as client:
            resumed_as = client.cluster.resume(force=True)
        assert resumed_as.incarnation == 1
        assert resumed_as.hold_duration.ToTimedelta() == timedelta(seconds=12)
        ((resumed,),) = world.sql("SELECT clock_timestamp()")
    finally:
        sleeper.resume()
    until(lambda: "timer_goes_on" in world.log("timer-1"), "the sleeper finds out and takes its shards again")
    world.wait_for_more(8)
    old = f"fence >> {FENCE_GRANT_BITS + EPOCH_TAKING_BITS} = 0"
    assert not world.sql(f"SELECT * FROM seen WHERE {old} AND at > '{resumed}'")
    assert world.sql("SELECT min(epoch) >= 1 << 25 FROM shard") == [(True,)]
    by_both = world.sql("SELECT count(DISTINCT owner) FROM shard")
    assert by_both == [(2,)], "both timers own shards again"
    assert not world.halted_reason()
