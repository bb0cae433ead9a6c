"""RunService and DeadLetterService against a real Postgres; what timers do to the rows is done by hand
here.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import grpc
import psycopg
import pytest

from tickwheel import errors
from tickwheel.client import BlockingClient, Client, make_run
from tickwheel.domain import flags
from tickwheel.domain.job import Failure, encode_failure
from tickwheel.embedded.cluster import Cluster
from tickwheel.v1 import job_pb2, run_pb2, run_service_pb2, run_service_pb2_grpc

State = run_pb2.Run.State


@pytest.fixture
def sql(api_cluster: Cluster) -> Iterator[psycopg.Connection]:
    with psycopg.connect(api_cluster.postgres_url, autocommit=True) as connection:
        yield connection


def key_of(run: run_pb2.Run) -> uuid.UUID:
    return uuid.UUID(run.name.rpartition("/")[2])


def lease(sql: psycopg.Connection, run: run_pb2.Run) -> None:
    """What a timer's grant does to a waiting run's rows."""
    sql.execute(
        "WITH t AS (DELETE FROM timer WHERE ref = %s RETURNING *)"
        " INSERT INTO lease (run, token, fence, template_id, version, schedule, schedule_us, due_us,"
        " create_us, lease_us, tenant_id, route_id, flags, worker_no, lease_ms, spent, shard_id,"
        " attempt, priority)"
        " SELECT ref, gen_random_uuid(), 7, template_id, version, schedule, schedule_us, due_us, decided_us,"
        " due_us + 5000, tenant_id, route_id, flags, 0, 10000, countdown, shard_id, attempt + 1, priority"
        " FROM t",
        (key_of(run),),
    )


def end(sql: psycopg.Connection, run: run_pb2.Run, state: int, result: bytes | None = None) -> None:
    """What a timer's outcome does to a leased run's rows."""
    sql.execute("DELETE FROM lease WHERE run = %s", (key_of(run),))
    sql.execute(
        "UPDATE run SET state = %s, end_us = create_us + 1, attempt = 1, spent = 1, result = %s, failure = %s"
        " WHERE id = %s",
        (
            state,
            result,
            encode_failure(Failure(type="Broken", message="no")) if state != 5 else None,
            key_of(run),
        ),
    )


async def test_a_run_waits_as_it_was_created(client: Client, sql: psycopg.Connection) -> None:
    due = datetime(2030, 1, 1, tzinfo=UTC)
    made = await client.runs.create("mail", payload={"to": "x"}, due=due, labels={"a": "b"}, priority=3)
    read = await client.runs.get(made.name)
    assert read == made
    assert read.state == State.STATE_SCHEDULED
    assert read.due_time.ToDatetime(UTC) == due
    assert read.cause == run_pb2.Run.CAUSE_DIRECT
    row = sql.execute(
        "SELECT kind, due_us, flags, priority, trigger_id FROM timer WHERE ref = %s", (key_of(made),)
    )
    kind, due_us, bits, priority, trigger_id = row.fetchone() or ()
    assert (kind, due_us, priority, trigger_id) == (2, int(due.timestamp() * 1e6), 3, 0)
    assert bits & flags.RUN_ROW
    assert bits & flags.HAS_PAYLOAD
    assert bits & flags.OWN_PAYLOAD


async def test_a_run_without_a_due_time_is_due_now(client: Client) -> None:
    made = await client.runs.create("mail")
    assert abs(made.due_time.ToDatetime(UTC) - datetime.now(UTC)) < timedelta(seconds=10)


async def test_the_life_of_a_run_as_its_rows_tell_it(client: Client, sql: psycopg.Connection) -> None:
    run = await client.runs.create("mail", payload=b"in")
    lease(sql, run)
    running = await client.runs.get(run.name)
    assert (running.state, running.attempt_count) == (State.STATE_RUNNING, 1)
    assert running.due_lag_duration.ToMilliseconds() == 5
    end(sql, run, 5, b"out")
    done = await client.runs.get(run.name)
    assert done.state == State.STATE_SUCCEEDED
    assert done.result.data == b"out"
    assert done.template.payload.data == b"in"
    (attempt,) = await client.runs.attempts(run.name)
    assert (attempt.number, attempt.state) == (1, run_pb2.Attempt.STATE_SUCCEEDED)


async def test_a_run_of_another_tenant_is_not_there(client: Client, api_cluster: Cluster) -> None:
    run = await client.runs.create("mail")
    with psycopg.connect(api_cluster.postgres_url, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO tenant (name, spread, create_us) VALUES ('other', 1, 0) ON CONFLICT DO NOTHING"
        )
    async with Client(api_cluster.api_addresses, tenant="other") as other:
        with pytest.raises(errors.NotFound):
            await other.runs.get(run.name.rpartition("/")[2])


@pytest.mark.parametrize(
    "name", ["runs/x", "tenants/default/runs/zz", "tenants/default/runs/" + "0" * 31, ""]
)
async def test_a_name_that_is_none_is_refused(client: Client, api_cluster: Cluster, name: str) -> None:
    async with grpc.aio.insecure_channel(api_cluster.api_addresses[0]) as channel:
        service = run_service_pb2_grpc.RunServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await service.GetRun(run_service_pb2.GetRunRequest(name=name))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_run_that_never_was_is_not_found(client: Client) -> None:
    for name in ("0" * 32, "f" * 32):
        with pytest.raises(errors.NotFound):
            await client.runs.get(name)


# --- Batches ----------------------------------------------------------------------------------------------


async def test_a_batch_is_created_in_order_and_once(client: Client, sql: psycopg.Connection) -> None:
    request_id = uuid.uuid4().hex
    runs = [make_run(f"kind-{n % 3}", payload=b"%d" % n, priority=n % 10) for n in range(1_500)]
    names = await client.runs.create_batch(runs, request_id=request_id)
    assert await client.runs.create_batch(runs, request_id=request_id) == names
    assert len(set(names)) == 1_500
    for index in (0, 511, 512, 1_499):
        read = await client.runs.get(names[index])
        assert read.template.kind == f"kind-{index % 3}"
        assert read.template.payload.data == b"%d" % index
        assert read.template.priority == index % 10
    shards = sql.execute(
        "SELECT count(DISTINCT shard_id) FROM timer WHERE ref = ANY (%s)",
        ([uuid.UUID(name.rpartition("/")[2]) for name in names],),
    ).fetchone()
    assert shards is not None
    assert shards[0] <= 3, "a batch lies on few shards"


async def test_a_batch_answers_in_full_unless_names_are_enough(client: Client, api_cluster: Cluster) -> None:
    request = run_service_pb2.BatchCreateRunsRequest(parent="tenants/default")
    for n in range(3):
        request.requests.add(
            run=make_run("mail", labels={"n": str(n)}, due=datetime(2030, 1, 1 + n, tzinfo=UTC))
        )
    async with grpc.aio.insecure_channel(api_cluster.api_addresses[0]) as channel:
        answer = await run_service_pb2_grpc.RunServiceStub(channel).BatchCreateRuns(request)
    for n, run in enumerate(answer.runs):
        assert run == await client.runs.get(run.name)
        assert run.labels["n"] == str(n)
        assert run.due_time.ToDatetime(UTC).day == 1 + n


async def test_a_batch_is_all_or_none_and_says_which_field_of_which_run(
    client: Client, sql: psycopg.Connection
) -> None:
    kind = f"kind-{uuid.uuid4().hex}"
    runs = [make_run(kind) for _ in range(10)]
    runs[7].template.priority = 11
    with pytest.raises(errors.FieldInvalid, match=r"requests\[7\]\.run\.template\.priority"):
        await client.runs.create_batch(runs)
    found = [run async for run in client.runs.list() if run.template.kind == kind]
    assert found == []


async def test_a_batch_that_is_too_large_is_refused(client: Client) -> None:
    with pytest.raises(errors.LimitExceeded) as caught:
        await client.runs.create_batch([make_run("mail")] * 10_001)
    assert (caught.value.limit, caught.value.actual) == (10_000, 10_001)
    assert caught.value.reason == "BATCH_TOO_LARGE"
    with pytest.raises(errors.FieldInvalid):
        await client.runs.create_batch([])


# --- Cancelling -------------------------------------------------------------------------------------------


async def test_cancelling_what_waits_ends_it_at_once(client: Client, sql: psycopg.Connection) -> None:
    run = await client.runs.create("mail", due=timedelta(hours=1))
    cancelled = await client.runs.cancel(run.name, "not needed")
    assert cancelled.state == State.STATE_CANCELLED
    assert cancelled.cancel_reason == "not needed"
    assert sql.execute("SELECT count(*) FROM timer WHERE ref = %s", (key_of(run),)).fetchone() == (0,)
    again = await client.runs.cancel(run.name, "another reason")
    assert again.cancel_reason == "not needed"


async def test_cancelling_what_runs_marks_its_lease(client: Client, sql: psycopg.Connection) -> None:
    run = await client.runs.create("mail")
    lease(sql, run)
    told = await client.runs.cancel(run.name, "stop", grace=timedelta(seconds=5))
    assert told.state == State.STATE_CANCELLING
    row = sql.execute(
        "SELECT cancel_until_us - cancel_us FROM lease WHERE run = %s", (key_of(run),)
    ).fetchone()
    assert row == (5_000_000,)
    again = await client.runs.cancel(run.name, "stop now", grace=timedelta(0))
    assert again.cancel_reason == "stop"


async def test_cancelling_what_has_ended_changes_nothing(client: Client, sql: psycopg.Connection) -> None:
    run = await client.runs.create("mail")
    lease(sql, run)
    end(sql, run, 5)
    assert (await client.runs.cancel(run.name, "late")).state == State.STATE_SUCCEEDED


async def test_a_cancel_that_meets_a_grant_finds_the_lease(client: Client, api_cluster: Cluster) -> None:
    run = await client.runs.create("mail")
    with psycopg.connect(api_cluster.postgres_url) as granting:
        lease(granting, run)
        cancelling = asyncio.create_task(client.runs.cancel(run.name, "stop"))
        done, _ = await asyncio.wait({cancelling}, timeout=0.3)
        assert not done, "it waits for the grant that holds the row"
        granting.commit()
    assert (await cancelling).state == State.STATE_CANCELLING


async def test_f_o12_a_negative_grace_is_refused(client: Client) -> None:
    run = await client.runs.create("mail")
    with pytest.raises(errors.FieldInvalid, match="grace_duration"):
        await client.runs.cancel(run.name, grace=timedelta(seconds=-1))


# --- Listing, waiting, watching ---------------------------------------------------------------------------


async def test_runs_are_listed_newest_first_with_those_that_have_no_row_yet(
    client: Client, sql: psycopg.Connection
) -> None:
    name = f"s-{uuid.uuid4().hex[:12]}"
    schedule = await client.schedules.create(name, kind="echo", cron="* * * * *")
    by_hand = await client.schedules.run(name)
    # A schedule's first attempt is its lease row only.
    born = uuid.UUID(bytes=key_of(by_hand).bytes[:15] + bytes([key_of(by_hand).bytes[15] ^ 1]))
    sql.execute(
        "INSERT INTO lease (run, token, fence, template_id, version, schedule, schedule_us, due_us,"
        " create_us, lease_us, tenant_id, route_id, flags, worker_no, lease_ms, spent, shard_id,"
        " attempt, priority)"
        " SELECT %s, gen_random_uuid(), 7, template_id, version, ref, schedule_us, schedule_us,"
        " (SELECT create_us + 10 FROM run WHERE id = %s), schedule_us, tenant_id, route_id, 4096, 0,"
        " 10000, 0, shard_id, 1, 0 FROM timer WHERE ref = %s",
        (born, key_of(by_hand), uuid.UUID(schedule.uid)),
    )
    found = [run async for run in client.runs.list(f'schedule = "{name}"')]
    assert [key_of(run) for run in found] == [born, key_of(by_hand)]
    assert [run.state for run in found] == [State.STATE_RUNNING, State.STATE_SCHEDULED]
    assert found[0].cause == run_pb2.Run.CAUSE_SCHEDULED
    assert found[0].schedule == schedule.name
    running = [run async for run in client.runs.list(f'schedule = "{name}" AND state = RUNNING')]
    assert [key_of(run) for run in running] == [born]
    waiting = [run async for run in client.runs.list(f'schedule = "{name}" AND state = SCHEDULED')]
    assert [key_of(run) for run in waiting] == [key_of(by_hand)]
    assert (await client.schedules.get(name)).status.last_run == found[0].name
    sql.execute("DELETE FROM lease WHERE run = %s", (born,))


async def test_pages_of_runs_miss_and_repeat_nothing(client: Client, api_cluster: Cluster) -> None:
    names = await client.runs.create_batch([make_run("page") for _ in range(95)])
    seen: list[str] = []
    request = run_service_pb2.ListRunsRequest(parent="tenants/default", page_size=10)
    async with grpc.aio.insecure_channel(api_cluster.api_addresses[0]) as channel:
        service = run_service_pb2_grpc.RunServiceStub(channel)
        while len(seen) < 95:
            page = await service.ListRuns(request)
            assert len(page.runs) == 10 or not page.next_page_token
            seen += [run.name for run in page.runs]
            request.page_token = page.next_page_token
    assert len(seen) == len(set(seen))
    assert set(names) <= set(seen[:100])


async def test_a_filter_by_state_goes_on_to_the_end(client: Client, sql: psycopg.Connection) -> None:
    run = await client.runs.create("mail")
    lease(sql, run)
    end(sql, run, 8)
    found = [each.name async for each in client.runs.list("state = CANCELLED")]
    assert run.name in found
    assert all(name.startswith("tenants/default/runs/") for name in found)


async def test_basic_views_hide_payloads(client: Client, api_cluster: Cluster) -> None:
    run = await client.runs.create("mail", payload=b"secret")
    async with grpc.aio.insecure_channel(api_cluster.api_addresses[0]) as channel:
        service = run_service_pb2_grpc.RunServiceStub(channel)
        basic = await service.GetRun(
            run_service_pb2.GetRunRequest(name=run.name, view=job_pb2.RESOURCE_VIEW_BASIC)
        )
    assert not basic.template.HasField("payload")
    (listed,) = [each async for each in client.runs.list() if each.name == run.name]
    assert not listed.template.HasField("payload")


async def test_a_wait_answers_when_the_run_has_ended(client: Client, sql: psycopg.Connection) -> None:
    runs = [await client.runs.create("mail") for _ in range(20)]
    waiting = [asyncio.create_task(client.runs.wait(run.name, timeout_s=30)) for run in runs]
    await asyncio.sleep(0)
    for run in runs:
        lease(sql, run)
        end(sql, run, 5, run.name.encode())
    done = await asyncio.gather(*waiting)
    assert [run.result.data for run in done] == [run.name.encode() for run in runs]


async def test_a_wait_that_is_over_gives_the_run_as_it_is(client: Client) -> None:
    run = await client.runs.create("mail", due=timedelta(hours=1))
    started = time.monotonic()
    assert (await client.runs.wait(run.name, timeout_s=0.3)).state == State.STATE_SCHEDULED
    assert 0.25 < time.monotonic() - started < 5


async def test_a_watch_tells_each_change(client: Client, sql: psycopg.Connection) -> None:
    run = await client.runs.create("mail")
    seen: list[Any] = []
    async with asyncio.timeout(20):
        async for change in client.runs.watch():
            if change.name != run.name:
                continue
            seen.append(change.state)
            if change.state == State.STATE_SCHEDULED:
                lease(sql, run)
            elif change.state == State.STATE_RUNNING:
                end(sql, run, 5)
            else:
                break
    assert seen == [State.STATE_SCHEDULED, State.STATE_RUNNING, State.STATE_SUCCEEDED]


@pytest.mark.parametrize("table", ["run", "run_of_schedule"])
def test_a_page_of_runs_is_read_from_its_index(sql: psycopg.Connection, table: str) -> None:
    column = "tenant_id = 1" if table == "run" else "schedule = '00000000-0000-0000-0000-000000000001'"
    index = "tenant_id_create_us" if table == "run" else "schedule_create_us"
    # What is left to sort is what has one create_us; of tables that are nearly empty any sort is cheap.
    sql.execute("SET enable_seqscan = off; SET enable_sort = off")
    plan = sql.execute(
        f"EXPLAIN SELECT shard_id, id FROM run WHERE {column} AND (create_us, id) < (5, %s)"
        " ORDER BY create_us DESC, id DESC LIMIT 50",
        (uuid.uuid4(),),
    ).fetchall()
    text = "\n".join(row[0] for row in plan)
    assert index in text
    assert "Sort" not in text.replace("Sort Key", "").replace("Incremental Sort", "")


# --- Dead letters -----------------------------------------------------------------------------------------


def bury(sql: psycopg.Connection, run: run_pb2.Run) -> str:
    """What a timer does to a run that has no attempts left. Gives the dead letter's name."""
    lease(sql, run)
    sql.execute(
        "INSERT INTO dead_letter (run, shard_id, tenant_id, route_id, schedule, create_us, spent, failure,"
        " fingerprint)"
        " SELECT run, shard_id, tenant_id, route_id, schedule, lease_us, 4, %s, 'print'"
        " FROM lease WHERE run = %s",
        (encode_failure(Failure(type="Broken", message="no")), key_of(run)),
    )
    end(sql, run, 7)
    return run.name.replace("/runs/", "/deadLetters/")


async def test_a_dead_letter_is_replayed_as_a_new_run_that_names_its_origin(
    client: Client, sql: psycopg.Connection
) -> None:
    run = await client.runs.create("mail", payload=b"once", labels={"a": "b"})
    name = bury(sql, run)
    letter = await client.dead_letters.get(name)
    assert (letter.run, letter.kind, letter.attempt_count) == (run.name, "mail", 4)
    assert letter.last_failure.type == "Broken"
    assert letter.payload.data == b"once"
    request_id = uuid.uuid4().hex
    replay = await client.dead_letters.replay(name, request_id=request_id)
    assert await client.dead_letters.replay(name, request_id=request_id) == replay
    assert replay.replayed_from == run.name
    assert replay.cause == run_pb2.Run.CAUSE_REPLAY
    assert replay.state == State.STATE_SCHEDULED
    assert replay.attempt_count == 0
    read = await client.runs.get(replay.name)
    assert read.template.payload.data == b"once"
    assert dict(read.labels) == {"a": "b"}
    letter = await client.dead_letters.get(name)
    assert (letter.replayed_by, letter.replay_count) == (replay.name, 1)


async def test_a_replay_may_have_another_payload(client: Client, sql: psycopg.Connection) -> None:
    name = bury(sql, await client.runs.create("mail", payload=b"bad"))
    replay = await client.dead_letters.replay(name, payload=b"good")
    assert (await client.runs.get(replay.name)).template.payload.data == b"good"


async def test_a_letter_that_dies_again_and_again_is_not_replayed_for_ever(
    client: Client, sql: psycopg.Connection
) -> None:
    run = await client.runs.create("mail")
    name = bury(sql, run)
    sql.execute("UPDATE dead_letter SET replay_count = 100 WHERE run = %s", (key_of(run),))
    with pytest.raises(errors.StateTransitionForbidden, match="100 times"):
        await client.dead_letters.replay(name)


async def test_dead_letters_are_listed_by_what_they_have_in_common(
    client: Client, sql: psycopg.Connection
) -> None:
    kind = f"kind-{uuid.uuid4().hex}"
    names = [bury(sql, await client.runs.create(kind)) for _ in range(3)]
    found = [letter.name async for letter in client.dead_letters.list(f'kind = "{kind}"')]
    assert sorted(found) == sorted(names)
    assert [letter async for letter in client.dead_letters.list('fingerprint = "none"')] == []


# --- The clients ------------------------------------------------------------------------------------------


def test_the_blocking_client_is_the_same_without_await(api_cluster: Cluster) -> None:
    with BlockingClient(api_cluster.api_addresses) as client:
        run = client.runs.create("mail", payload={"a": 1})
        assert client.runs.get(run.name) == run
        assert any(each.name == run.name for each in client.runs.list())
        assert client.runs.wait(run.name, timeout_s=0.1).name == run.name
        assert next(iter(client.runs.watch())).name
        assert client.cluster.health().postgres_reachable
        with pytest.raises(errors.NotFound):
            client.schedules.get("nothing-here")


def test_g_o05_the_blocking_client_works_in_children_that_were_forked(api_cluster: Cluster) -> None:
    client = BlockingClient(api_cluster.api_addresses)
    client.runs.create("before")
    for _ in range(5):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                status = 0 if client.runs.create("in-a-child").name else 2
            finally:
                os._exit(status)
        deadline = time.monotonic() + 20
        while True:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid or time.monotonic() > deadline:
                break
            time.sleep(0.01)
        if not pid:
            os.kill(child, 9)
            os.waitpid(child, 0)
        assert pid == child, "the child hung"
        assert status == 0
    assert client.runs.create("after").name
    client.close()


async def test_what_is_unavailable_is_tried_at_the_next_address(api_cluster: Cluster) -> None:
    addresses = ["127.0.0.1:1", api_cluster.api_addresses[0]]
    async with Client(addresses, retry_s_max=20) as client:
        for _ in range(3):
            assert (await client.runs.create("mail")).name


async def test_a_cluster_that_is_not_there_is_an_error_of_ours(api_cluster: Cluster) -> None:
    async with Client("127.0.0.1:1", retry_s_max=0.3) as client:
        with pytest.raises(errors.Unavailable):
            await client.cluster.health()
