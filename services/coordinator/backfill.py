"""Runs for occurrences of the past that have none. How it begins, and one transaction of it.

I2: an occurrence becomes at most one run. A backfill takes only what was decided, at or before the timer
row's `decided_us` as it stands under that row's lock: the owner of the shard decides nothing at or before it
any more. Of these it leaves out what has a run, and claims the rest in a table whose key is one for all time.
"""

from __future__ import annotations

import secrets
from typing import Any

from tickwheel.domain import flags, ids
from tickwheel.domain.ids import DAY_US, DIRECT_RUN_CLASS, SCHEDULED_RUN_CLASS
from tickwheel.domain.job import UnknownOutcomePolicy
from tickwheel.domain.operation import Operation, OperationKind, Progress, Step
from tickwheel.domain.run import Cause
from tickwheel.errors import FieldInvalid, NotFound
from tickwheel.postgres import operations, schedules
from tickwheel.postgres.connections import Connection
from tickwheel.postgres.partitions import RUN_RETENTION_DAYS
from tickwheel.postgres.schedules import Stored
from tickwheel.rpc import convert
from tickwheel.services.coordinator.node import Node
from tickwheel.services.coordinator.touched import Touched
from tickwheel.v1 import schedule_service_pb2

CONCURRENCY_MAX = 1_000
PAGE_MAX = 500
"""Occurrences that are looked at in one transaction."""
WAIT_US = 300_000
"""How often it is looked whether runs have ended, while as many live as may."""
KEPT_US = (RUN_RETENTION_DAYS[SCHEDULED_RUN_CLASS] - 1) * DAY_US
"""Of what is older it is not known any more whether it ran."""


async def begin(
    connection: Connection,
    request: schedule_service_pb2.BackfillScheduleRequest,
    stored: Stored,
    tenant_id: int,
    principal: str,
    now_us: int,
) -> Operation:
    """The operation, with its interval frozen. The schedule is locked.

    Raises:
        FieldInvalid: the interval is none, or not over.
    """
    record = stored.record
    start_us = convert.time_us(request.start_time, "start_time")
    end_us = convert.time_us(request.end_time, "end_time")
    if not request.HasField("start_time"):
        raise FieldInvalid("start_time", "it is required")
    if end_us <= start_us:
        raise FieldInvalid("end_time", "it is not after start_time")
    if end_us > now_us:
        raise FieldInvalid("end_time", "it is in the future: what comes then is the schedule's own")
    if not 0 <= request.concurrency_max <= CONCURRENCY_MAX:
        raise FieldInvalid("concurrency_max", f"it is not between 1 and {CONCURRENCY_MAX}")
    decided_us = record.timer.decided_us if record.timer is not None else now_us
    wanted: dict[str, Any] = {
        "schedule": record.uid.hex(),
        "tenant": record.tenant,
        "name": record.name,
        "until_us": min(end_us - 1, decided_us),
        "concurrency_max": request.concurrency_max or 1,
    }
    return await operations.begin(
        connection,
        OperationKind.BACKFILL,
        tenant_id=tenant_id,
        resource=ids.schedule_name(record.tenant, record.name),
        request=wanted,
        cursors=[{"after_us": start_us - 1}],
        principal=principal,
        now_us=now_us,
    )


class Backfiller:
    """Takes a backfill further."""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def step(
        self, connection: Connection, operation: Operation, step: Step, now_us: int
    ) -> tuple[Progress, Touched]:
        """One page of occurrences, as many runs as there is room for. Done when the last of them ended."""
        wanted = operation.request
        uid = bytes.fromhex(wanted["schedule"])
        stored = await schedules.find(
            connection, operation.tenant_id, wanted["tenant"], wanted["name"], full=True
        )
        if stored is None or stored.record.uid != uid:
            raise NotFound(operation.resource)
        record = stored.record
        decided_us = await operations.lock_timer(connection, record.shard, uid)
        if decided_us is None:
            raise NotFound(operation.resource)
        live_count = await operations.live_claims(connection, operation.operation_id, record.shard)
        after_us, until_us = step.cursor["after_us"], min(wanted["until_us"], decided_us)
        if after_us >= until_us:
            waits = live_count > 0
            return Progress(step.cursor, is_done=not waits, wait_us=WAIT_US if waits else 0), Touched()
        room = min(wanted["concurrency_max"] - live_count, PAGE_MAX)
        if room <= 0:
            return Progress(step.cursor, wait_us=WAIT_US), Touched()
        compiled = self._node.catalog.compiled(record.trigger_id, stored.trigger_body)
        page = compiled.between(after_us, until_us, PAGE_MAX)
        if not page:
            return Progress({"after_us": until_us}), Touched()
        # What was dropped with its day: it may have run, so it is left alone.
        known = [each for each in page if each < record.create_us or each >= now_us - KEPT_US]
        born: set[int] = set()
        if known:
            born = await operations.already_born(connection, record.shard, uid, known)
        free = [each for each in known if each not in born]
        if len(free) > room:
            page = [each for each in page if each < free[room]]
            free = free[:room]
        made = await self._insert(connection, operation, stored, free, now_us)
        touched = Touched()
        for run in made:
            touched.add(record.shard, run, now_us)
        progress = Progress({"after_us": page[-1]}, len(page), len(made), len(page) - len(made))
        return progress, touched

    async def _insert(
        self,
        connection: Connection,
        operation: Operation,
        stored: Stored,
        instants_us: list[int],
        now_us: int,
    ) -> list[bytes]:
        """Claims occurrences and makes their runs; gives the runs."""
        record = stored.record
        if not instants_us:
            return []
        runs = {
            instant_us: bytes(ids.run_id(DIRECT_RUN_CLASS, now_us, record.shard, secrets.token_bytes(8)))
            for instant_us in instants_us
        }
        claimed = await operations.claim(
            connection, operation.operation_id, record.uid, instants_us, list(runs.values())
        )
        mine = sorted(claimed)
        if not mine:
            return []
        spec, _ = convert.schedule_spec(
            convert.spec_message(record.verbatim, record.payload),
            path="spec",
            name=operation.resource,
            default_anchor_us=record.create_us,
        )
        bits = flags.RUN_ROW | flags.OWN_PAYLOAD | int(Cause.BACKFILL) << flags.CAUSE_SHIFT
        if spec.payload.data:
            bits |= flags.HAS_PAYLOAD
        if spec.template.on_unknown_outcome is UnknownOutcomePolicy.HOLD:
            bits |= flags.HOLD_UNKNOWN
        made = operations.BackfilledRuns(
            runs=[runs[each] for each in mine],
            instants_us=mine,
            schedule=record.uid,
            shard=record.shard,
            tenant_id=operation.tenant_id,
            version=record.version,
            template_id=record.template_id,
            route_id=await self._node.catalog.route_id_in(
                connection, spec.template.queue, spec.template.kind
            ),
            priority=spec.template.priority,
            flags=bits,
            cause=int(Cause.BACKFILL),
            payload=spec.payload.data,
            content_type=spec.payload.content_type,
        )
        await operations.insert_backfilled(connection, made, now_us)
        return list(made.runs)
