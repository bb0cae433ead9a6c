"""DeadLetterService: what has no attempts left, looked at and replayed as new runs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tickwheel.domain import ids
from tickwheel.domain.job import encode_template
from tickwheel.domain.record import NewRun
from tickwheel.domain.run import Cause
from tickwheel.errors import FilterInvalid, NotFound, StateTransitionForbidden
from tickwheel.postgres import dead_letters, requests, runs
from tickwheel.postgres.connections import Connection
from tickwheel.postgres.dead_letters import Source
from tickwheel.postgres.requests import Done
from tickwheel.rpc import convert
from tickwheel.services.coordinator import filters
from tickwheel.services.coordinator.calls import Context, PageTokens, call_of, page_size, traceparent_of
from tickwheel.services.coordinator.node import Node
from tickwheel.v1 import dead_letter_service_pb2, dead_letter_service_pb2_grpc, run_pb2

REPLAY_COUNT_MAX = 100
"""A letter that dies so often again is not mended by another replay: a loop is more likely."""


class DeadLetterService(dead_letter_service_pb2_grpc.DeadLetterServiceServicer):
    def __init__(self, node: Node) -> None:
        self._node = node

    async def GetDeadLetter(
        self, request: dead_letter_service_pb2.GetDeadLetterRequest, context: Context
    ) -> run_pb2.DeadLetter:
        tenant_name, run = convert.run_of(request.name, collection="deadLetters")
        tenant = await self._node.catalog.tenant(tenant_name)

        async def ask(connection: Connection) -> Source | None:
            return await dead_letters.find(connection, tenant.tenant_id, tenant.name, run)

        found = await self._node.database.read(ask)
        if found is None:
            raise NotFound(request.name)
        return convert.dead_letter_message(found.record)

    async def ListDeadLetters(
        self, request: dead_letter_service_pb2.ListDeadLettersRequest, context: Context
    ) -> dead_letter_service_pb2.ListDeadLettersResponse:
        tenant = await self._node.catalog.tenant(convert.tenant_of(request.parent))
        size = page_size(request.page_size, self._node.settings.page_count_max)
        tokens = PageTokens("ListDeadLetters", request.parent, request.filter)
        before = tokens.read(request.page_token)
        wanted = _filter(request.filter)
        page = await self._node.database.read(
            lambda connection: dead_letters.list_page(
                connection, tenant.tenant_id, tenant.name, wanted, before=before, page_max=size
            )
        )
        return dead_letter_service_pb2.ListDeadLettersResponse(
            dead_letters=[convert.dead_letter_message(record) for record in page.found],
            next_page_token=tokens.write(page.next_before),
        )

    async def ReplayDeadLetter(
        self, request: dead_letter_service_pb2.ReplayDeadLetterRequest, context: Context
    ) -> run_pb2.Run:
        tenant_name, run = convert.run_of(request.name, collection="deadLetters")
        own = convert.payload(request.payload, "payload") if request.HasField("payload") else None
        tenant = await self._node.catalog.tenant(tenant_name)
        call = call_of(context, tenant.tenant_id, "ReplayDeadLetter", request)
        made: list[tuple[runs.Inserted, int]] = []

        async def work(connection: Connection, now_us: int) -> Done:
            replay_count = await dead_letters.lock(connection, tenant.tenant_id, run)
            source = await dead_letters.find(connection, tenant.tenant_id, tenant.name, run)
            if replay_count is None or source is None:
                raise NotFound(request.name)
            if replay_count >= REPLAY_COUNT_MAX:
                state = f"replayed {replay_count} times"
                raise StateTransitionForbidden(state, "ReplayDeadLetter", request.name)
            templates = await self._node.catalog.templates(connection, [source.template_id])
            template = templates[source.template_id]
            assert source.record.payload is not None
            new = NewRun(
                due_us=now_us,
                template=template,
                template_body=encode_template(template),
                template_id=source.template_id,
                payload=own or source.record.payload,
                labels=source.labels or None,
            )
            # Beside its schedule's other runs, which is where its overlap policy looks.
            shard = ids.run_shard(run)
            rows = await runs.insert(
                connection,
                [new],
                [await self._node.catalog.route_id_in(connection, template.queue, template.kind)],
                np.array([shard], dtype=np.int64),
                tenant_id=tenant.tenant_id,
                now_us=now_us,
                origin=runs.Origin(
                    cause=Cause.REPLAY, schedule=source.schedule, version=source.version, replayed_from=run
                ),
                traceparent=traceparent_of(context),
            )
            replay = rows.ids[0].tobytes()
            await dead_letters.mark_replayed(connection, run, replay)
            made.append((rows, now_us))
            found = await runs.find(
                connection, self._node.catalog, tenant.tenant_id, tenant.name, replay, full=True
            )
            assert found is not None
            answer = convert.run_message(found, full=True)
            return Done(answer.SerializeToString(), request.name, changed=answer.name)

        response, fresh = await requests.mutate(self._node.database, call, work)
        if fresh and not call.validate_only:
            rows, now_us = made[-1]
            self._node.nudger.rows(rows.shards, rows.ids, rows.due_us, now_us)
        return run_pb2.Run.FromString(response)


def _filter(text: str) -> dead_letters.Filter:
    found = dead_letters.Filter()
    for term in filters.parse(text, ("schedule", "kind", "fingerprint")):
        if term.operator != "=":
            raise FilterInvalid("filter", f"{term.field} is compared with =")
        value = term.value.rpartition("/schedules/")[2] if term.field == "schedule" else term.value
        found = replace(found, **{term.field: value})
    return found
