"""RunService: runs made directly, and all runs read, awaited, watched and cancelled."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tickwheel.domain import ids
from tickwheel.domain.job import JobTemplate, Payload, encode_template
from tickwheel.domain.record import NewRun, RunRecord
from tickwheel.domain.run import TERMINAL, Cause, RunState
from tickwheel.domain.shard import shard_of
from tickwheel.errors import FieldInvalid, FilterInvalid, LimitExceeded, NotFound
from tickwheel.postgres import requests, runs, schedules
from tickwheel.postgres.catalog import Tenant
from tickwheel.postgres.connections import Connection
from tickwheel.postgres.requests import Done
from tickwheel.rpc import convert
from tickwheel.services.coordinator import filters
from tickwheel.services.coordinator.calls import Context, PageTokens, call_of, page_size, traceparent_of
from tickwheel.services.coordinator.node import Node
from tickwheel.v1 import job_pb2, run_pb2, run_service_pb2, run_service_pb2_grpc

WAIT_DEFAULT_MS = 30_000
WAIT_MS_MAX = 300_000
GRACE_DEFAULT_MS = 30_000
GRACE_MS_MAX = 3_600_000
RUNS_PER_SHARD = 512
"""Of one batch: its rows lie on few shards, so that their owners write them in few batches."""
ROWS_PER_TURN = 1_000
"""Between two of these the event loop does other work."""
WATCH_INTERVAL_MS = 250
WATCH_RUNS_MAX = 1_000
_EMPTY = Payload()


@dataclass(frozen=True, slots=True)
class _Interned:
    """A template that many runs of a batch share."""

    template: JobTemplate
    body: bytes
    template_id: int
    route_id: int


class RunService(run_service_pb2_grpc.RunServiceServicer):
    def __init__(self, node: Node) -> None:
        self._node = node

    async def CreateRun(self, request: run_service_pb2.CreateRunRequest, context: Context) -> run_pb2.Run:
        batch = run_service_pb2.BatchCreateRunsRequest(parent=request.parent, requests=[request])
        tenant = await self._node.catalog.tenant(convert.tenant_of(request.parent))
        call = call_of(context, tenant.tenant_id, "CreateRun", request)
        new, interned = await self._read(batch, "")

        async def work(connection: Connection, now_us: int) -> Done:
            made = await self._insert(connection, tenant, new, interned, now_us, traceparent_of(context))
            nudge.append((made, now_us))
            answer = self._answer(tenant.name, new[0], made, 0, now_us, traceparent_of(context), full=True)
            return Done(answer.SerializeToString(), answer.name)

        nudge: list[tuple[runs.Inserted, int]] = []
        response, fresh = await requests.mutate(self._node.database, call, work)
        self._nudge(nudge, fresh and not call.validate_only)
        return run_pb2.Run.FromString(response)

    async def BatchCreateRuns(
        self, request: run_service_pb2.BatchCreateRunsRequest, context: Context
    ) -> run_service_pb2.BatchCreateRunsResponse:
        count, most = len(request.requests), self._node.settings.batch_runs_max
        if count > most:
            raise LimitExceeded("requests", most, count)
        if not count:
            raise FieldInvalid("requests", "at least one is required")
        tenant = await self._node.catalog.tenant(convert.tenant_of(request.parent))
        call = call_of(context, tenant.tenant_id, "BatchCreateRuns", request)
        new, interned = await self._read(request, "requests")
        nudge: list[tuple[runs.Inserted, int]] = []

        async def work(connection: Connection, now_us: int) -> Done:
            made = await self._insert(connection, tenant, new, interned, now_us, traceparent_of(context))
            nudge.append((made, now_us))
            answer = await self._batch_answer(tenant.name, new, made, now_us, names_only=request.names_only)
            return Done(answer.SerializeToString(), f"tenants/{tenant.name}/runs", changed=f"{count} runs")

        response, fresh = await requests.mutate(self._node.database, call, work)
        self._nudge(nudge, fresh and not call.validate_only)
        return run_service_pb2.BatchCreateRunsResponse.FromString(response)

    async def _read(
        self, request: run_service_pb2.BatchCreateRunsRequest, path: str
    ) -> tuple[list[NewRun], list[_Interned]]:
        """The runs of a batch and the template of each; `due_us` is 0 for "now"."""
        known: dict[bytes, _Interned] = {}
        new: list[NewRun] = []
        each: list[_Interned] = []
        for index, item in enumerate(request.requests):
            if index % ROWS_PER_TURN == ROWS_PER_TURN - 1:
                await asyncio.sleep(0)
            where = f"{path}[{index}].run" if path else "run"
            if item.parent and item.parent != request.parent:
                raise FieldInvalid(f"{path}[{index}].parent", f"it is not {request.parent}; leave it empty")
            run = item.run
            payload = _EMPTY
            if run.template.HasField("payload"):
                payload = convert.payload(run.template.payload, f"{where}.template.payload")
            interned = await self._intern(run.template, f"{where}.template", known)
            new.append(
                NewRun(
                    due_us=convert.time_us(run.due_time, f"{where}.due_time")
                    if run.HasField("due_time")
                    else 0,
                    template=interned.template,
                    template_body=interned.body,
                    template_id=interned.template_id,
                    payload=payload,
                    labels=convert.label_map(run.labels, f"{where}.labels") if run.labels else None,
                )
            )
            each.append(interned)
        return new, each

    async def _intern(
        self, message: job_pb2.JobTemplate, path: str, known: dict[bytes, _Interned]
    ) -> _Interned:
        bare = message
        if message.HasField("payload"):
            bare = job_pb2.JobTemplate()
            bare.CopyFrom(message)
            bare.ClearField("payload")
        key = bare.SerializeToString()
        found = known.get(key)
        if found is None:
            template = convert.template(bare, path)
            body = encode_template(template)
            found = known[key] = _Interned(
                template,
                body,
                await self._node.catalog.intern_template(template, body),
                await self._node.catalog.route_id(template.queue, template.kind),
            )
        return found

    async def _insert(
        self,
        connection: Connection,
        tenant: Tenant,
        new: Sequence[NewRun],
        interned: Sequence[_Interned],
        now_us: int,
        traceparent: str | None,
    ) -> runs.Inserted:
        shards = self._shards(tenant, len(new))
        return await runs.insert(
            connection,
            new,
            [each.route_id for each in interned],
            shards,
            tenant_id=tenant.tenant_id,
            now_us=now_us,
            origin=runs.Origin(),
            traceparent=traceparent,
        )

    def _shards(self, tenant: Tenant, count: int) -> NDArray[np.int64]:
        """A shard for each run of a batch, the same for RUNS_PER_SHARD of them."""
        spread = min(tenant.spread, self._node.shard_count)
        chosen = [
            shard_of(tenant.name, os.urandom(16), spread, self._node.shard_count)
            for _ in range(-(-count // RUNS_PER_SHARD))
        ]
        return np.repeat(np.array(chosen, dtype=np.int64), RUNS_PER_SHARD)[:count]

    def _nudge(self, made: list[tuple[runs.Inserted, int]], committed: bool) -> None:
        """A transaction that was repeated left the rows of its last try."""
        if committed and made:
            rows, now_us = made[-1]
            self._node.nudger.rows(rows.shards, rows.ids, rows.due_us, now_us)

    def _answer(
        self,
        tenant: str,
        new: NewRun,
        made: runs.Inserted,
        index: int,
        now_us: int,
        traceparent: str | None,
        *,
        full: bool,
    ) -> run_pb2.Run:
        due_us = int(made.due_us[index])
        record = RunRecord(
            run=made.ids[index].tobytes(),
            tenant=tenant,
            shard=int(made.shards[index]),
            state=RunState.SCHEDULED,
            cause=Cause.DIRECT,
            template=new.template,
            create_us=now_us,
            schedule_us=due_us,
            due_us=due_us,
            lease_us=0,
            end_us=0,
            spent_count=0,
            attempt=0,
            version=0,
            payload=new.payload,
            labels=new.labels or {},
            traceparent=traceparent or "",
        )
        return convert.run_message(record, full=full)

    async def _batch_answer(
        self, tenant: str, new: Sequence[NewRun], made: runs.Inserted, now_us: int, *, names_only: bool
    ) -> run_service_pb2.BatchCreateRunsResponse:
        response = run_service_pb2.BatchCreateRunsResponse()
        prefix = f"tenants/{tenant}/runs/"
        hexadecimal = made.ids.tobytes().hex()
        add = response.runs.add
        if names_only:
            for start in range(0, len(hexadecimal), 32):
                add(name=prefix + hexadecimal[start : start + 32])
            return response
        alike: dict[int, run_pb2.Run] = {}
        for index, run in enumerate(new):
            if index % ROWS_PER_TURN == ROWS_PER_TURN - 1:
                await asyncio.sleep(0)
            model = alike.get(run.template_id)
            if model is None:
                model = alike[run.template_id] = self._answer(
                    tenant, run, made, index, now_us, None, full=False
                )
            one = add()
            one.CopyFrom(model)
            key = hexadecimal[32 * index : 32 * index + 32]
            one.name, one.idempotency_key, one.shard = prefix + key, key, int(made.shards[index])
            due = convert.timestamp(int(made.due_us[index]))
            one.due_time.CopyFrom(due)
            one.schedule_time.CopyFrom(due)
            one.labels.clear()
            if run.labels:
                one.labels.update(run.labels)
        return response

    async def GetRun(self, request: run_service_pb2.GetRunRequest, context: Context) -> run_pb2.Run:
        tenant_name, run = convert.run_of(request.name)
        tenant = await self._node.catalog.tenant(tenant_name)
        full = request.view != job_pb2.RESOURCE_VIEW_BASIC
        record = await self._find(tenant, run, full=full)
        return convert.run_message(record, full=full)

    async def _find(self, tenant: Tenant, run: bytes, *, full: bool) -> RunRecord:
        async def ask(connection: Connection) -> RunRecord | None:
            return await runs.find(
                connection, self._node.catalog, tenant.tenant_id, tenant.name, run, full=full
            )

        found = await self._node.database.read(ask)
        if found is None:
            raise NotFound(ids.run_name(tenant.name, run))
        return found

    async def ListRuns(
        self, request: run_service_pb2.ListRunsRequest, context: Context
    ) -> run_service_pb2.ListRunsResponse:
        tenant = await self._node.catalog.tenant(convert.tenant_of(request.parent))
        size = page_size(request.page_size, self._node.settings.page_count_max)
        tokens = PageTokens("ListRuns", request.parent, request.filter)
        before = tokens.read(request.page_token)
        full = request.view == job_pb2.RESOURCE_VIEW_FULL

        async def ask(connection: Connection) -> tuple[list[RunRecord], tuple[int, bytes] | None]:
            wanted = await self._filter(connection, tenant, request.filter)
            page = await runs.list_page(connection, tenant.tenant_id, wanted, before=before, page_max=size)
            found = await runs.find_many(
                connection, self._node.catalog, tenant.tenant_id, tenant.name, page.runs, full=full
            )
            return [run for run in found if run is not None], page.next_before

        found, following = await self._node.database.read(ask)
        return run_service_pb2.ListRunsResponse(
            runs=[convert.run_message(record, full=full) for record in found],
            next_page_token=tokens.write(following),
        )

    async def _filter(self, connection: Connection, tenant: Tenant, text: str) -> runs.Filter:
        state: RunState | None = None
        schedule: bytes | None = None
        for term in filters.parse(text, ("schedule", "state")):
            if term.operator != "=":
                raise FilterInvalid("filter", f"{term.field} is compared with =")
            if term.field == "state":
                try:
                    state = RunState[term.value.removeprefix("STATE_")]
                except KeyError as error:
                    names = ", ".join(each.name for each in RunState)
                    raise FilterInvalid("filter", f"{term.value} is not one of {names}") from error
            else:
                name = term.value.removeprefix(f"tenants/{tenant.name}/schedules/")
                stored = await schedules.find(connection, tenant.tenant_id, tenant.name, name, full=False)
                if stored is None:
                    raise NotFound(ids.schedule_name(tenant.name, name))
                schedule = stored.record.uid
        return runs.Filter(state, schedule)

    async def CancelRun(self, request: run_service_pb2.CancelRunRequest, context: Context) -> run_pb2.Run:
        tenant_name, run = convert.run_of(request.name)
        reason = convert.text(request.reason, "reason", convert.REASON_CHARACTERS_MAX)
        grace_ms = convert.duration_ms(
            request, "grace_duration", "", default=GRACE_DEFAULT_MS, least=0, most=GRACE_MS_MAX
        )
        tenant = await self._node.catalog.tenant(tenant_name)
        call = call_of(context, tenant.tenant_id, "CancelRun", request)
        tell: list[bool] = []

        async def work(connection: Connection, now_us: int) -> Done:
            catalog = self._node.catalog
            if await runs.find(connection, catalog, tenant.tenant_id, tenant.name, run, full=False) is None:
                raise NotFound(request.name)
            tell.append(await runs.cancel(connection, run, reason, grace_ms * 1_000, now_us))
            after = await runs.find(connection, catalog, tenant.tenant_id, tenant.name, run, full=True)
            if after is None:
                raise NotFound(request.name)
            answer = convert.run_message(after, full=True)
            return Done(answer.SerializeToString(), request.name, reason=reason, changed="state")

        response, fresh = await requests.mutate(self._node.database, call, work)
        if fresh and tell and not call.validate_only:
            if tell[-1]:
                self._node.nudger.cancels([ids.run_shard(run)], [run])
            else:
                # Its row is gone: the owner need not keep it in memory until somebody wants to run it.
                self._node.nudger.row(ids.run_shard(run), run, 0, 0)
        return run_pb2.Run.FromString(response)

    async def ListAttempts(
        self, request: run_service_pb2.ListAttemptsRequest, context: Context
    ) -> run_service_pb2.ListAttemptsResponse:
        tenant_name, run = convert.run_of(request.parent, "parent")
        tenant = await self._node.catalog.tenant(tenant_name)
        await self._find(tenant, run, full=False)
        tokens = PageTokens("ListAttempts", request.parent)
        after = tokens.read(request.page_token)
        size = page_size(request.page_size, self._node.settings.page_count_max)
        found, following = await self._node.database.read(
            lambda connection: runs.attempts_page(
                connection, run, after=after[0] if after else 0, page_max=size
            )
        )
        return run_service_pb2.ListAttemptsResponse(
            attempts=[convert.attempt_message(record, tenant.name) for record in found],
            next_page_token=tokens.write(None if following is None else (following, b"")),
        )

    async def WaitRun(self, request: run_service_pb2.WaitRunRequest, context: Context) -> run_pb2.Run:
        tenant_name, run = convert.run_of(request.name)
        tenant = await self._node.catalog.tenant(tenant_name)
        wait_ms = convert.duration_ms(
            request, "wait_duration_max", "", default=WAIT_DEFAULT_MS, least=0, most=WAIT_MS_MAX
        )
        record = await self._find(tenant, run, full=True)
        if record.state not in TERMINAL and wait_ms:
            await self._node.waiters.wait(run, wait_ms)
            record = await self._find(tenant, run, full=True)
        return convert.run_message(record, full=True)

    async def WatchRuns(
        self, request: run_service_pb2.WatchRunsRequest, context: Context
    ) -> AsyncIterator[run_service_pb2.WatchRunsResponse]:
        """The newest WATCH_RUNS_MAX that match, and those of them that live, are looked at again and
        again.
        """
        tenant = await self._node.catalog.tenant(convert.tenant_of(request.parent))
        seen: dict[bytes, tuple[RunState, int, int]] = {}
        first = True
        while True:
            found = await self._node.database.read(
                lambda connection: self._look(connection, tenant, request.filter, seen)
            )
            changed: list[RunRecord] = []
            for record in found:
                mark = (record.state, record.attempt, record.due_us)
                if seen.get(record.run) != mark:
                    seen[record.run] = mark
                    changed.append(record)
            if changed or first:
                first = False
                yield run_service_pb2.WatchRunsResponse(
                    runs=[convert.run_message(record, full=False) for record in reversed(changed)]
                )
            while len(seen) > 4 * WATCH_RUNS_MAX:
                del seen[next(iter(seen))]
            await self._node.pause(WATCH_INTERVAL_MS / 1_000)

    async def _look(
        self,
        connection: Connection,
        tenant: Tenant,
        filter_text: str,
        seen: dict[bytes, tuple[RunState, int, int]],
    ) -> list[RunRecord]:
        wanted = await self._filter(connection, tenant, filter_text)
        page = await runs.list_page(
            connection, tenant.tenant_id, wanted, before=None, page_max=WATCH_RUNS_MAX
        )
        living = [run for run, (state, _, _) in seen.items() if state not in TERMINAL][-WATCH_RUNS_MAX:]
        keys = list(dict.fromkeys([*page.runs, *living]))
        done = [run for run in keys if run in seen and seen[run][0] in TERMINAL]
        keys = [run for run in keys if run not in set(done)]
        found = await runs.find_many(
            connection, self._node.catalog, tenant.tenant_id, tenant.name, keys, full=False
        )
        return [record for record in found if record is not None]
