"""ScheduleService: every mutation rewrites the schedule's row and its timer row in one transaction."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, replace
from datetime import date
from typing import Any

import numpy as np
import structlog
from google.longrunning import operations_pb2
from google.protobuf import field_mask_pb2
from google.protobuf.message import Message

from tickwheel.domain import describe, ids
from tickwheel.domain import upcoming as upcoming_occurrences
from tickwheel.domain.decision import DecisionReason
from tickwheel.domain.job import content_id, encode_template
from tickwheel.domain.record import NewRun, RunRecord
from tickwheel.domain.run import Cause, RunState
from tickwheel.domain.schedule import (
    OverlapPolicy,
    Pause,
    ScheduleRecord,
    ScheduleSpec,
    ScheduleState,
    TimerState,
    first_state,
    jitter_us,
    state_after,
)
from tickwheel.domain.trigger import NEVER_US, CompiledTrigger, canonical_bytes, trigger_id
from tickwheel.domain.zone import tzdata_version
from tickwheel.errors import (
    EtagMismatch,
    FieldInvalid,
    FilterInvalid,
    InvalidArgument,
    NotFound,
    StateTransitionForbidden,
    TriggerNeverFires,
)
from tickwheel.postgres import calendars, operations, requests, runs, schedules
from tickwheel.postgres.calendars import SharedDates
from tickwheel.postgres.catalog import Tenant
from tickwheel.postgres.connections import Connection, cluster_now_us
from tickwheel.postgres.requests import Done
from tickwheel.postgres.schedules import Stored
from tickwheel.rpc import convert
from tickwheel.services.coordinator import backfill, filters
from tickwheel.services.coordinator.calls import (
    Context,
    PageTokens,
    call_of,
    page_size,
    principal_of,
    traceparent_of,
)
from tickwheel.services.coordinator.node import Node
from tickwheel.v1 import job_pb2, run_pb2, schedule_pb2, schedule_service_pb2, schedule_service_pb2_grpc

log = structlog.get_logger(__name__)

NEXT_OCCURRENCES_MAX = 10
PREVIEW_COUNT_DEFAULT = 10
PREVIEW_COUNT_MAX = 1_000
UPCOMING_COUNT_MAX = 1_000
ROWS_PER_TURN = 20
"""Schedules written to an answer between two turns of the event loop."""
PAUSE_CANCEL_GRACE_US = 30_000_000
COUNTED_MAX = 1_000_000
_MUTABLE = ("spec", "labels", "annotations")
_SPEC = "schedule.spec"


SYSTEM = "tickwheel"
"""The principal of what is done by itself."""


@dataclass(frozen=True, slots=True)
class Recomputed:
    """A schedule that was computed again, and when it was due before and is now."""

    record: ScheduleRecord
    before: TimerState
    after: TimerState
    is_quarantined: bool = False


@dataclass(frozen=True, slots=True)
class _Nudge:
    """What is told to the owner after the commit."""

    shard: int
    ref: bytes
    due_us: int
    now_us: int
    cancelled_runs: tuple[bytes, ...] = ()


class ScheduleService(schedule_service_pb2_grpc.ScheduleServiceServicer):
    def __init__(self, node: Node) -> None:
        self._node = node
        self.tzdata_version = tzdata_version()
        """The one that the cluster's due times are computed from, as last looked at."""

    # --- Reads --------------------------------------------------------------------------------------------

    async def GetSchedule(
        self, request: schedule_service_pb2.GetScheduleRequest, context: Context
    ) -> schedule_pb2.Schedule:
        tenant_name, name = convert.schedule_of(request.name)
        tenant = await self._node.catalog.tenant(tenant_name)
        full = request.view != job_pb2.RESOURCE_VIEW_BASIC

        async def ask(connection: Connection) -> tuple[Stored, tuple[bytes | None, int]] | None:
            found = await schedules.find(connection, tenant.tenant_id, tenant.name, name, full=full)
            if found is None:
                return None
            return found, await schedules.last_run(connection, found.record)

        answer = await self._node.database.read(ask)
        if answer is None:
            raise NotFound(request.name)
        found, (last_run, last_success_us) = answer
        message = self._message(found, full=full)
        if last_run is not None:
            message.status.last_run = ids.run_name(tenant.name, last_run)
        if last_success_us:
            message.status.last_success_time.CopyFrom(convert.timestamp(last_success_us))
        return message

    async def ListSchedules(
        self, request: schedule_service_pb2.ListSchedulesRequest, context: Context
    ) -> schedule_service_pb2.ListSchedulesResponse:
        tenant = await self._node.catalog.tenant(convert.tenant_of(request.parent))
        size = page_size(request.page_size, self._node.settings.page_count_max)
        tokens = PageTokens("ListSchedules", request.parent, request.filter, request.show_deleted)
        after = tokens.read(request.page_token)
        wanted = _filter(request.filter)
        full = request.view == job_pb2.RESOURCE_VIEW_FULL
        page = await self._node.database.read(
            lambda connection: schedules.list_page(
                connection,
                tenant.tenant_id,
                tenant.name,
                wanted,
                after=after,
                page_max=size,
                deleted=request.show_deleted,
                full=full,
            )
        )
        response = schedule_service_pb2.ListSchedulesResponse(next_page_token=tokens.write(page.next_after))
        for index, found in enumerate(page.found):
            if index % ROWS_PER_TURN == ROWS_PER_TURN - 1:
                await asyncio.sleep(0)
            response.schedules.append(self._message(found, full=full))
        return response

    async def PreviewTrigger(
        self, request: schedule_service_pb2.PreviewTriggerRequest, context: Context
    ) -> schedule_service_pb2.PreviewTriggerResponse:
        if not 0 <= request.count <= PREVIEW_COUNT_MAX:
            raise FieldInvalid("count", f"{request.count} is not between 1 and {PREVIEW_COUNT_MAX}")
        if request.HasField("after_time"):
            after_us = convert.time_us(request.after_time, "after_time")
        else:
            after_us = await self._node.database.now_us()
        named = await self._preview_calendars(request)
        _, compiled = convert.trigger_set(
            request.triggers,
            request.exclusions,
            path="",
            name=None,
            default_anchor_us=after_us,
            calendars={name: each.dates for name, each in named.items()},
        )
        seen = describe.preview(compiled, after_us, request.count or PREVIEW_COUNT_DEFAULT)
        return schedule_service_pb2.PreviewTriggerResponse(
            occurrences=[
                convert.occurrence_message(each, each.schedule_time_us) for each in seen.occurrences
            ],
            description=describe.describe(
                compiled.trigger_set,
                [each.title for each in named.values()],
                convert.excluded_dates(request.exclusions, ""),
            ),
            warnings=seen.warnings,
        )

    async def _preview_calendars(
        self, request: schedule_service_pb2.PreviewTriggerRequest
    ) -> dict[str, SharedDates]:
        names = [name for each in request.exclusions for name in each.calendars]
        if not names:
            return {}
        tenant_name, _ = convert.calendar_of(names[0], "exclusions")
        tenant = await self._node.catalog.tenant(tenant_name)
        return await self._node.database.read(
            lambda connection: self._calendars(connection, tenant, request.exclusions, "", locked=False)
        )

    async def BackfillSchedule(
        self, request: schedule_service_pb2.BackfillScheduleRequest, context: Context
    ) -> operations_pb2.Operation:
        tenant_name, name = convert.schedule_of(request.name)
        tenant = await self._node.catalog.tenant(tenant_name)
        call = call_of(context, tenant.tenant_id, "BackfillSchedule", request)

        async def work(connection: Connection, now_us: int) -> Done:
            stored = await self._locked(connection, tenant, name, "")
            begun = await backfill.begin(
                connection, request, stored, tenant.tenant_id, principal_of(context), now_us
            )
            totals = await operations.totals(connection, begun.operation_id)
            answer = convert.operation_message(begun, totals, ())
            return Done(answer.SerializeToString(), request.name, changed=begun.name)

        response, _ = await requests.mutate(self._node.database, call, work)
        return operations_pb2.Operation.FromString(response)

    async def ListUpcomingOccurrences(
        self, request: schedule_service_pb2.ListUpcomingOccurrencesRequest, context: Context
    ) -> schedule_service_pb2.ListUpcomingOccurrencesResponse:
        tenant_name, name = convert.schedule_of(request.name)
        size = page_size(request.page_size, UPCOMING_COUNT_MAX)
        bounds = [request.after_time.ToJsonString(), request.until_time.ToJsonString()]
        tokens = PageTokens("ListUpcomingOccurrences", request.name, *bounds, request.show_excluded)
        cursor = tokens.read(request.page_token)
        after_us = (
            convert.time_us(request.after_time, "after_time") if request.HasField("after_time") else None
        )
        until_us = NEVER_US
        if request.HasField("until_time"):
            until_us = convert.time_us(request.until_time, "until_time") - 1
        tenant = await self._node.catalog.tenant(tenant_name)

        async def ask(connection: Connection) -> tuple[Stored, dict[str, SharedDates], int]:
            found = await schedules.find(connection, tenant.tenant_id, tenant.name, name, full=False)
            if found is None:
                raise NotFound(request.name)
            exclusions = convert.spec_message(found.record.verbatim, None).exclusions
            wanted = {calendar for _, calendar in convert.named_calendars(exclusions, "spec", tenant.name)}
            named = await calendars.shared(connection, tenant.tenant_id, wanted, locked=False)
            return found, named, await cluster_now_us(connection)

        found, named, now_us = await self._node.database.read(ask)
        record = found.record
        exclusions = convert.spec_message(record.verbatim, None).exclusions
        own_dates = convert.excluded_dates(exclusions, "spec")
        compiled = self._node.catalog.compiled(record.trigger_id, found.trigger_body)
        left_count = record.countdown
        if cursor is not None:
            after_us, left_count = cursor[0], int.from_bytes(cursor[1], "big", signed=True)
        elif after_us is None:
            is_due = record.timer is not None and record.timer.schedule_us != NEVER_US
            after_us = record.timer.schedule_us - 1 if record.timer is not None and is_due else now_us
        else:
            # From an instant of the caller's choice it is not known how many will have run by then.
            left_count = -1
        upcoming = compiled.between(after_us, until_us, size)
        if left_count >= 0:
            upcoming = upcoming[:left_count]
        page: list[tuple[int, upcoming_occurrences.ExcludedOccurrence | None]] = [
            (schedule_us, None) for schedule_us in upcoming
        ]
        if request.show_excluded:
            last_us = upcoming[-1] if upcoming and len(upcoming) in (size, left_count) else until_us
            left_out = upcoming_occurrences.excluded(compiled, after_us, last_us, size)
            page += [(each.schedule_time_us, each) for each in left_out]
            page = sorted(page, key=lambda item: item[0])[:size]
        response = schedule_service_pb2.ListUpcomingOccurrencesResponse(
            description=describe.describe(
                compiled.trigger_set, [each.title for each in named.values()], own_dates
            )
        )
        for index, (schedule_us, missing) in enumerate(page):
            if index % ROWS_PER_TURN == ROWS_PER_TURN - 1:
                await asyncio.sleep(0)
            response.occurrences.append(
                _occurrence(compiled, record.uid, schedule_us)
                if missing is None
                else convert.excluded_message(missing, _exclusion(missing.day, own_dates, named))
            )
        if page:
            response.warnings.extend(describe.clock_change_warnings(compiled, after_us, page[-1][0]))
        if left_count >= 0:
            left_count -= sum(missing is None for _, missing in page)
        if len(page) == size and left_count:
            key = left_count.to_bytes(8, "big", signed=True)
            response.next_page_token = tokens.write((page[-1][0], key))
        return response

    # --- Create, update, delete ---------------------------------------------------------------------------

    async def CreateSchedule(
        self, request: schedule_service_pb2.CreateScheduleRequest, context: Context
    ) -> schedule_pb2.Schedule:
        tenant_name = convert.tenant_of(request.parent)
        name = convert.user_id(request.schedule_id, "schedule_id")
        tenant = await self._node.catalog.tenant(tenant_name)

        async def change(connection: Connection, now_us: int) -> tuple[Done, _Nudge | None]:
            return await self._create(connection, tenant, name, request.schedule, context, now_us)

        return await self._mutate(tenant, "CreateSchedule", request, context, change)

    async def _create(
        self,
        connection: Connection,
        tenant: Tenant,
        name: str,
        schedule: schedule_pb2.Schedule,
        context: Context,
        now_us: int,
    ) -> tuple[Done, _Nudge | None]:
        full_name = ids.schedule_name(tenant.name, name)
        named = await self._calendars(connection, tenant, schedule.spec.exclusions, _SPEC, locked=True)
        spec, compiled = convert.schedule_spec(
            schedule.spec,
            path=_SPEC,
            name=full_name,
            default_anchor_us=now_us,
            calendars={calendar: each.dates for calendar, each in named.items()},
        )
        labels = convert.label_map(schedule.labels, "schedule.labels")
        annotations = convert.annotation_map(schedule.annotations, "schedule.annotations")
        uid = secrets.token_bytes(16)
        try:
            state = first_state(compiled, uid, now_us)
        except TriggerNeverFires as error:
            raise error.under(_SPEC) from error
        stored = await schedules.insert(
            connection,
            tenant_id=tenant.tenant_id,
            tenant=tenant.name,
            name=name,
            uid=uid,
            shard_count=self._node.shard_count,
            spec=spec,
            state=state,
            route_id=await self._node.catalog.route_id_in(
                connection, spec.template.queue, spec.template.kind
            ),
            labels=labels,
            annotations=annotations,
            principal=principal_of(context),
            traceparent=traceparent_of(context),
            now_us=now_us,
        )
        if named:
            await calendars.link(connection, uid, named.values())
        message = self._message(stored, full=True, compiled=compiled, spec=spec)
        done = Done(message.SerializeToString(), full_name, etag_after=stored.record.etag, changed="*")
        return done, _Nudge(stored.record.shard, uid, state.due_us, now_us)

    async def UpdateSchedule(
        self, request: schedule_service_pb2.UpdateScheduleRequest, context: Context
    ) -> schedule_pb2.Schedule:
        tenant_name, name = convert.schedule_of(request.schedule.name, "schedule.name")
        paths = _mask_paths(request)
        tenant = await self._node.catalog.tenant(tenant_name)

        async def change(connection: Connection, now_us: int) -> tuple[Done, _Nudge | None]:
            stored = await schedules.lock(connection, tenant.tenant_id, tenant.name, name)
            if stored is not None:
                return await self._update(
                    connection, tenant, stored, request.schedule, paths, context, now_us
                )
            if not request.allow_missing:
                raise NotFound(request.schedule.name)
            return await self._create(connection, tenant, name, request.schedule, context, now_us)

        return await self._mutate(tenant, "UpdateSchedule", request, context, change)

    async def _update(
        self,
        connection: Connection,
        tenant: Tenant,
        stored: Stored,
        wanted: schedule_pb2.Schedule,
        paths: list[str],
        context: Context,
        now_us: int,
    ) -> tuple[Done, _Nudge | None]:
        before = stored.record
        _check_etag(before, wanted.etag)
        current = schedule_pb2.Schedule(
            spec=convert.spec_message(before.verbatim, before.payload),
            labels=before.labels,
            annotations=before.annotations,
        )
        merged = _merge(current, wanted, paths)
        after = replace(
            before,
            labels=convert.label_map(merged.labels, "schedule.labels"),
            annotations=convert.annotation_map(merged.annotations, "schedule.annotations"),
            update_us=now_us,
        )
        spec_changed = merged.spec != current.spec
        if not spec_changed and (after.labels, after.annotations) == (before.labels, before.annotations):
            message = self._message(stored, full=True)
            return Done(message.SerializeToString(), wanted.name, before.etag, before.etag), None
        nudge: _Nudge | None = None
        trigger_body = stored.trigger_body
        if spec_changed:
            named = await self._calendars(connection, tenant, merged.spec.exclusions, _SPEC, locked=True)
            spec, compiled = convert.schedule_spec(
                merged.spec,
                path=_SPEC,
                name=wanted.name,
                default_anchor_us=before.create_us,
                calendars={calendar: each.dates for calendar, each in named.items()},
            )
            if named or _names_calendars(current.spec):
                await calendars.link(connection, before.uid, named.values())
            trigger_body = canonical_bytes(spec.triggers)
            after = await self._new_version(
                connection, tenant, stored, after, spec, compiled, principal_of(context), now_us
            )
            assert after.timer is not None
            nudge = _Nudge(after.shard, after.uid, after.timer.due_us, now_us)
        await schedules.write(connection, after, now_us)
        after = replace(after, revision=before.revision + 1)
        message = self._message(Stored(after, trigger_body), full=True)
        done = Done(
            message.SerializeToString(),
            wanted.name,
            etag_before=before.etag,
            etag_after=after.etag,
            changed=",".join(paths),
        )
        return done, nudge

    async def _new_version(
        self,
        connection: Connection,
        tenant: Tenant,
        stored: Stored,
        after: ScheduleRecord,
        spec: ScheduleSpec,
        compiled: CompiledTrigger,
        principal: str,
        now_us: int,
    ) -> ScheduleRecord:
        """Writes the version and, where the triggers say otherwise, when it is due."""
        before = stored.record
        body = canonical_bytes(spec.triggers)
        countdown = _countdown(stored, spec)
        after = replace(
            after,
            version=before.version + 1,
            observed_version=before.version + 1,
            verbatim=spec.verbatim,
            trigger_id=trigger_id(body),
            template_id=_template_id(spec),
            countdown=countdown,
            payload=spec.payload,
            quarantine_reason=None,
        )
        route_id = await self._node.catalog.route_id_in(connection, spec.template.queue, spec.template.kind)
        await schedules.insert_version(
            connection,
            after,
            spec,
            route_id=route_id,
            countdown=countdown,
            principal=principal,
            now_us=now_us,
        )
        old = before.timer or TimerState(NEVER_US, NEVER_US, now_us)
        mended = before.quarantine_reason is not None
        revived = before.countdown == 0 and countdown != 0
        if after.trigger_id == before.trigger_id and not mended and not revived:
            return replace(after, timer=old)
        await self._supersede(connection, tenant, stored, now_us)
        state = state_after(compiled, before.uid, max(old.decided_us, now_us))
        if state.due_us == NEVER_US and after.trigger_id != before.trigger_id:
            raise TriggerNeverFires(f"{_SPEC}.triggers", "no occurrence lies in the future")
        if before.pause is not None or countdown == 0:
            state = state.never()
        await schedules.write_timer(connection, after, state)
        return replace(after, timer=state)

    async def _supersede(self, connection: Connection, tenant: Tenant, stored: Stored, now_us: int) -> None:
        """Says of what was overdue and undecided that it will not run: its triggers are gone."""
        timer = stored.record.timer
        if timer is None or timer.due_us == NEVER_US or timer.schedule_us > now_us:
            return
        if stored.record.pause is not None:
            return
        await self._record_dropped(
            connection, tenant, stored, DecisionReason.SUPERSEDED, timer.schedule_us - 1, now_us, now_us
        )

    async def _record_dropped(
        self,
        connection: Connection,
        tenant: Tenant,
        stored: Stored,
        reason: DecisionReason,
        after_us: int,
        until_us: int,
        now_us: int,
    ) -> None:
        """One decision for all occurrences in (after_us, until_us], if there are any."""
        try:
            compiled = self._node.catalog.compiled(stored.record.trigger_id, stored.trigger_body)
            first = compiled.between(after_us, until_us, 1)
            if not first:
                return
            last = compiled.latest_between(after_us, until_us, 1)
            count = compiled.count_between(after_us, until_us, COUNTED_MAX)
        except InvalidArgument as error:
            # The old triggers cannot be computed any more: there is nothing to count by.
            log.info("dropped_occurrences_unknown", schedule=stored.record.name, error=str(error))
            return
        await schedules.insert_decision(
            connection, stored.record, tenant.tenant_id, reason, first[0], last[0], count, now_us
        )

    async def DeleteSchedule(
        self, request: schedule_service_pb2.DeleteScheduleRequest, context: Context
    ) -> schedule_pb2.Schedule:
        tenant_name, name = convert.schedule_of(request.name)
        tenant = await self._node.catalog.tenant(tenant_name)

        async def change(connection: Connection, now_us: int) -> tuple[Done, _Nudge | None]:
            stored = await schedules.lock(connection, tenant.tenant_id, tenant.name, name)
            if stored is None:
                if not request.allow_missing:
                    raise NotFound(request.name)
                missing = schedule_pb2.Schedule(name=request.name)
                return Done(missing.SerializeToString(), request.name), None
            _check_etag(stored.record, request.etag)
            await self._supersede(connection, tenant, stored, now_us)
            await schedules.delete(connection, stored.record, now_us)
            if _names_calendars(convert.spec_message(stored.record.verbatim, None)):
                await calendars.link(connection, stored.record.uid, ())
            after = replace(
                stored.record,
                delete_us=now_us,
                update_us=now_us,
                revision=stored.record.revision + 1,
                timer=None,
            )
            message = self._message(replace(stored, record=after), full=True)
            done = Done(
                message.SerializeToString(), request.name, etag_before=stored.record.etag, changed="deleted"
            )
            return done, None

        return await self._mutate(tenant, "DeleteSchedule", request, context, change)

    # --- Pause, resume, run -------------------------------------------------------------------------------

    async def PauseSchedule(
        self, request: schedule_service_pb2.PauseScheduleRequest, context: Context
    ) -> schedule_pb2.Schedule:
        tenant_name, name = convert.schedule_of(request.name)
        reason = convert.text(request.reason.strip(), "reason", convert.REASON_CHARACTERS_MAX)
        if not reason:
            raise FieldInvalid("reason", "it is required: say why, for those who find it paused")
        tenant = await self._node.catalog.tenant(tenant_name)

        async def change(connection: Connection, now_us: int) -> tuple[Done, _Nudge | None]:
            resume_us = 0
            if request.HasField("resume_time"):
                resume_us = convert.time_us(request.resume_time, "resume_time")
                if resume_us <= now_us:
                    raise FieldInvalid("resume_time", "it is not in the future")
            stored = await self._locked(connection, tenant, name, request.etag)
            before = stored.record
            state = (before.timer or TimerState(NEVER_US, NEVER_US, now_us)).never()
            pause = Pause(reason, principal_of(context), now_us, resume_us)
            after = replace(before, pause=pause, update_us=now_us, timer=state)
            await schedules.write_timer(connection, after, state)
            await schedules.write(connection, after, now_us)
            cancelled: tuple[bytes, ...] = ()
            if request.live_runs == schedule_service_pb2.PauseScheduleRequest.LIVE_RUNS_CANCEL:
                cancelled = await self._cancel_live(connection, before, reason, now_us)
            return self._changed(stored, after, request.name, "pause", reason), _Nudge(
                after.shard, after.uid, NEVER_US, now_us, cancelled
            )

        return await self._mutate(tenant, "PauseSchedule", request, context, change)

    async def _cancel_live(
        self, connection: Connection, record: ScheduleRecord, reason: str, now_us: int
    ) -> tuple[bytes, ...]:
        live = await schedules.live_runs(connection, record)
        return tuple(
            [run for run in live if await runs.cancel(connection, run, reason, PAUSE_CANCEL_GRACE_US, now_us)]
        )

    async def ResumeSchedule(
        self, request: schedule_service_pb2.ResumeScheduleRequest, context: Context
    ) -> schedule_pb2.Schedule:
        tenant_name, name = convert.schedule_of(request.name)
        tenant = await self._node.catalog.tenant(tenant_name)

        async def change(connection: Connection, now_us: int) -> tuple[Done, _Nudge | None]:
            stored = await self._locked(connection, tenant, name, request.etag)
            return await self.resume(
                connection, tenant, stored, request.name, request.missed_occurrences, now_us
            )

        return await self._mutate(tenant, "ResumeSchedule", request, context, change)

    async def resume(
        self, connection: Connection, tenant: Tenant, stored: Stored, name: str, missed: int, now_us: int
    ) -> tuple[Done, _Nudge | None]:
        """Resumes a locked schedule; one that is not paused stays as it is."""
        before = stored.record
        if before.pause is None:
            message = self._message(stored, full=True)
            return Done(message.SerializeToString(), name, before.etag, before.etag), None
        decided_us = before.timer.decided_us if before.timer is not None else now_us
        if missed != schedule_service_pb2.ResumeScheduleRequest.MISSED_OCCURRENCES_MISFIRE_POLICY:
            await self._record_dropped(
                connection, tenant, stored, DecisionReason.PAUSED, decided_us, now_us, now_us
            )
            decided_us = max(decided_us, now_us)
        if before.quarantine_reason is not None or before.countdown == 0:
            state = TimerState(NEVER_US, NEVER_US, decided_us)
        else:
            compiled = self._node.catalog.compiled(before.trigger_id, stored.trigger_body)
            state = state_after(compiled, before.uid, decided_us)
        after = replace(before, pause=None, update_us=now_us, timer=state)
        await schedules.write_timer(connection, after, state)
        await schedules.write(connection, after, now_us)
        done = self._changed(stored, after, name, "pause", "")
        return done, _Nudge(after.shard, after.uid, state.due_us, now_us)

    async def RunSchedule(
        self, request: schedule_service_pb2.RunScheduleRequest, context: Context
    ) -> run_pb2.Run:
        tenant_name, name = convert.schedule_of(request.name)
        own = convert.payload(request.payload, "payload") if request.HasField("payload") else None
        tenant = await self._node.catalog.tenant(tenant_name)
        call = call_of(context, tenant.tenant_id, "RunSchedule", request)
        nudges: list[_Nudge] = []

        async def work(connection: Connection, now_us: int) -> Done:
            stored = await self._locked(connection, tenant, name, "")
            record = stored.record
            spec, _ = convert.schedule_spec(
                convert.spec_message(record.verbatim, record.payload),
                path="spec",
                name=request.name,
                default_anchor_us=record.create_us,
            )
            if spec.overlap is OverlapPolicy.SKIP and not request.ignore_overlap:
                live = await schedules.live_runs(connection, record)
                if live:
                    busy = ids.run_name(tenant.name, live[0])
                    raise StateTransitionForbidden(
                        f"busy with {busy}", "RunSchedule without ignore_overlap", request.name
                    )
            new = NewRun(
                due_us=now_us,
                template=spec.template,
                template_body=encode_template(spec.template),
                template_id=record.template_id,
                payload=own or spec.payload,
            )
            made = await self._insert_manual(
                connection, tenant, record, new, own is not None, request, now_us, traceparent_of(context)
            )
            run = made.ids[0].tobytes()
            nudges.append(_Nudge(record.shard, run, now_us, now_us))
            answer = convert.run_message(
                RunRecord(
                    run=run,
                    tenant=tenant.name,
                    shard=record.shard,
                    state=RunState.SCHEDULED,
                    cause=Cause.MANUAL,
                    template=spec.template,
                    create_us=now_us,
                    schedule_us=now_us,
                    due_us=now_us,
                    lease_us=0,
                    end_us=0,
                    spent_count=0,
                    attempt=0,
                    version=record.version,
                    schedule=name,
                    payload=new.payload,
                    traceparent=traceparent_of(context) or "",
                ),
                full=True,
            )
            return Done(answer.SerializeToString(), request.name, changed=answer.name)

        response, fresh = await requests.mutate(self._node.database, call, work)
        if fresh and not call.validate_only:
            self._nudge(nudges[-1])
        return run_pb2.Run.FromString(response)

    async def _insert_manual(
        self,
        connection: Connection,
        tenant: Tenant,
        record: ScheduleRecord,
        new: NewRun,
        own_payload: bool,
        request: schedule_service_pb2.RunScheduleRequest,
        now_us: int,
        traceparent: str | None,
    ) -> runs.Inserted:
        route_id = await self._node.catalog.route_id_in(connection, new.template.queue, new.template.kind)
        return await runs.insert(
            connection,
            [new],
            [route_id],
            np.array([record.shard], dtype=np.int64),
            tenant_id=tenant.tenant_id,
            now_us=now_us,
            origin=runs.Origin(
                cause=Cause.MANUAL,
                schedule=record.uid,
                version=record.version,
                ignore_overlap=request.ignore_overlap,
                own_payload=own_payload,
            ),
            traceparent=traceparent,
        )

    # --- What they share ----------------------------------------------------------------------------------

    async def _mutate(
        self, tenant: Tenant, method: str, request: Any, context: Context, change: Any
    ) -> schedule_pb2.Schedule:
        """Runs a change once for each request_id, and tells the owner after the commit."""
        call = call_of(context, tenant.tenant_id, method, request)
        nudges: list[_Nudge | None] = []

        async def work(connection: Connection, now_us: int) -> Done:
            done, nudge = await change(connection, now_us)
            # A transaction that was repeated left those of its earlier tries.
            nudges[:] = [nudge]
            assert isinstance(done, Done)
            return done

        response, fresh = await requests.mutate(self._node.database, call, work)
        if fresh and not call.validate_only and nudges and nudges[0] is not None:
            self._nudge(nudges[0])
        return schedule_pb2.Schedule.FromString(response)

    def _nudge(self, nudge: _Nudge) -> None:
        self._node.nudger.row(nudge.shard, nudge.ref, nudge.due_us, nudge.now_us)
        if nudge.cancelled_runs:
            shards = [ids.run_shard(run) for run in nudge.cancelled_runs]
            self._node.nudger.cancels(shards, nudge.cancelled_runs)

    async def resume_due(self, tenant_name: str, name: str, uid: bytes) -> None:
        """Resumes a schedule whose time has come; for the leader. What changed meanwhile is left alone."""
        tenant = await self._node.catalog.tenant(tenant_name)
        full_name = ids.schedule_name(tenant_name, name)
        nudges: list[_Nudge | None] = []

        async def work(connection: Connection, now_us: int) -> Done:
            stored = await schedules.lock(connection, tenant.tenant_id, tenant.name, name)
            if stored is None or stored.record.uid != uid:
                raise NotFound(full_name)
            pause = stored.record.pause
            if pause is None or not 0 < pause.resume_us <= now_us:
                raise StateTransitionForbidden("not due to resume", "ResumeSchedule", full_name)
            done, nudge = await self.resume(connection, tenant, stored, full_name, 0, now_us)
            nudges[:] = [nudge]
            return replace(done, reason="resume_time came")

        call = requests.Call(tenant.tenant_id, SYSTEM, "ResumeSchedule", "", b"", "")
        await requests.mutate(self._node.database, call, work)
        if nudges and nudges[0] is not None:
            self._nudge(nudges[0])

    async def _calendars(
        self, connection: Connection, tenant: Tenant, exclusions: Any, path: str, *, locked: bool
    ) -> dict[str, SharedDates]:
        """The calendars that exclusions name, by id. `locked`: none of them changes before the transaction
        ends.
        """
        wanted = convert.named_calendars(exclusions, path, tenant.name)
        names = {calendar for _, calendar in wanted}
        found = await calendars.shared(connection, tenant.tenant_id, names, locked=locked)
        for field, calendar in wanted:
            if calendar not in found:
                raise FieldInvalid(field, f"there is no calendar {calendar}; create it first")
        return found

    async def recompute(
        self, connection: Connection, tenant: Tenant, name: str, uid: bytes, now_us: int
    ) -> Recomputed | None:
        """Computes a schedule again from its spec and its calendars as they stand; for background work.

        What was due already stays due: it was right when it came. None: nothing had to change, or it is gone.
        """
        stored = await schedules.lock(connection, tenant.tenant_id, tenant.name, name)
        if stored is None or stored.record.uid != uid:
            return None
        before = stored.record
        old = before.timer or TimerState(NEVER_US, NEVER_US, now_us)
        message = convert.spec_message(before.verbatim, before.payload)
        try:
            named = await self._calendars(connection, tenant, message.exclusions, "spec", locked=True)
            spec, compiled = convert.schedule_spec(
                message,
                path="spec",
                name=ids.schedule_name(tenant.name, name),
                default_anchor_us=before.create_us,
                calendars={calendar: each.dates for calendar, each in named.items()},
            )
        except InvalidArgument as error:
            after = replace(before, quarantine_reason=str(error), update_us=now_us, timer=old.never())
            await schedules.write_timer(connection, after, old.never())
            await schedules.write(connection, after, now_us)
            return Recomputed(after, old, old.never(), is_quarantined=True)
        body = canonical_bytes(spec.triggers)
        if trigger_id(body) == before.trigger_id and before.quarantine_reason is None:
            return None
        after = replace(
            before,
            version=before.version + 1,
            observed_version=before.version + 1,
            trigger_id=trigger_id(body),
            quarantine_reason=None,
            update_us=now_us,
        )
        await schedules.insert_version(
            connection,
            after,
            spec,
            route_id=await self._node.catalog.route_id_in(
                connection, spec.template.queue, spec.template.kind
            ),
            countdown=before.countdown,
            principal=SYSTEM,
            now_us=now_us,
        )
        is_overdue = old.due_us != NEVER_US and old.schedule_us <= now_us
        state = old
        if not is_overdue and before.pause is None and before.countdown != 0:
            state = state_after(compiled, uid, max(old.decided_us, now_us))
            await schedules.write_timer(connection, after, state)
        await schedules.write(connection, after, now_us)
        return Recomputed(replace(after, timer=state), old, state)

    async def _locked(self, connection: Connection, tenant: Tenant, name: str, etag: str) -> Stored:
        stored = await schedules.lock(connection, tenant.tenant_id, tenant.name, name)
        if stored is None:
            raise NotFound(ids.schedule_name(tenant.name, name))
        _check_etag(stored.record, etag)
        return stored

    def _changed(self, stored: Stored, after: ScheduleRecord, name: str, changed: str, reason: str) -> Done:
        """The answer after a mutation that left the spec alone."""
        before = stored.record
        after = replace(after, revision=before.revision + 1)
        message = self._message(replace(stored, record=after), full=True)
        return Done(message.SerializeToString(), name, reason, before.etag, after.etag, changed)

    def _message(
        self,
        stored: Stored,
        *,
        full: bool,
        compiled: CompiledTrigger | None = None,
        spec: ScheduleSpec | None = None,
    ) -> schedule_pb2.Schedule:
        """The schedule as it is answered; `full`: with its payload, its effective spec and all next
        occurrences.
        """
        record = stored.record
        message = convert.schedule_message(record)
        status = message.status
        status.tzdata_version = self.tzdata_version
        if record.timer is not None and record.timer.decided_us > record.create_us:
            status.last_schedule_time.CopyFrom(convert.timestamp(record.timer.decided_us))
        try:
            if full:
                if spec is None:
                    # Without the dates of its calendars: what it is due by is the stored form.
                    spec, _ = convert.schedule_spec(
                        message.spec, path="spec", name=message.name, default_anchor_us=record.create_us
                    )
                message.effective_spec.CopyFrom(convert.effective_spec(message.spec, spec))
            if record.state is not ScheduleState.ACTIVE or record.timer is None:
                return message
            if compiled is None:
                compiled = self._node.catalog.compiled(record.trigger_id, stored.trigger_body)
            count = NEXT_OCCURRENCES_MAX if full else 1
            if record.countdown >= 0:
                count = min(count, record.countdown)
            for schedule_us in compiled.between(record.timer.schedule_us - 1, NEVER_US, count):
                status.next_occurrences.append(_occurrence(compiled, record.uid, schedule_us))
        except InvalidArgument as error:
            # A poison row can still be looked at; its quarantine says the rest.
            log.info("schedule_cannot_be_computed", schedule=record.name, error=str(error))
        return message


def _names_calendars(spec: schedule_pb2.ScheduleSpec) -> bool:
    return any(each.calendars for each in spec.exclusions)


def _exclusion(day: date, own_dates: frozenset[date], named: dict[str, SharedDates]) -> str:
    """Which exclusion a local date owes its silence to."""
    if day in own_dates:
        return f"the date {day} is excluded"
    for name, calendar in named.items():
        if day in calendar.dates:
            return f"{day} is in the calendar {name}"
    return f"{day} was in a calendar; the schedule has not been computed again yet"


def _template_id(spec: ScheduleSpec) -> int:
    return content_id(encode_template(spec.template))


def _check_etag(record: ScheduleRecord, sent: str) -> None:
    if sent and sent != record.etag:
        raise EtagMismatch(ids.schedule_name(record.tenant, record.name), sent, record.etag)


def _countdown(stored: Stored, spec: ScheduleSpec) -> int:
    """Occurrences that may still become runs: those of the new limit less those that the old one counted."""
    if not spec.run_count_max:
        return -1
    before = stored.record
    old_limit = convert.spec_message(before.verbatim, None).run_count_max
    spent = old_limit - before.countdown if old_limit and before.countdown >= 0 else 0
    return max(0, spec.run_count_max - spent)


def _occurrence(compiled: CompiledTrigger, uid: bytes, schedule_us: int) -> schedule_pb2.Occurrence:
    due_us = schedule_us + jitter_us(compiled, uid, schedule_us)
    return convert.occurrence_message(describe.occurrence(compiled, schedule_us), due_us)


def _mask_paths(request: schedule_service_pb2.UpdateScheduleRequest) -> list[str]:
    """The fields to take from the request; an empty mask means all that is set."""
    wanted = request.schedule
    if not request.update_mask.paths:
        paths = (
            [f"spec.{field.name}" for field, _ in wanted.spec.ListFields()] if wanted.HasField("spec") else []
        )
        return paths + [name for name in ("labels", "annotations") if getattr(wanted, name)]
    paths = []
    for path in request.update_mask.paths:
        if path == "*":
            return list(_MUTABLE)
        mask = field_mask_pb2.FieldMask(paths=[path])
        if not mask.IsValidForDescriptor(schedule_pb2.Schedule.DESCRIPTOR):
            raise FieldInvalid("update_mask", f"{path} is not a field of a schedule")
        if path.partition(".")[0] not in _MUTABLE:
            raise FieldInvalid("update_mask", f"{path} cannot be set; {', '.join(_MUTABLE)} can")
        paths.append(path)
    return paths


def _merge(
    current: schedule_pb2.Schedule, wanted: schedule_pb2.Schedule, paths: list[str]
) -> schedule_pb2.Schedule:
    """What `current` becomes with the fields of `wanted` that the paths name; one that is unset there is
    cleared.
    """
    merged = schedule_pb2.Schedule()
    merged.CopyFrom(current)
    for path in paths:
        _take(merged, wanted, path.split("."))
    return merged


def _take(into: Message, source: Message, path: list[str]) -> None:
    *parents, last = path
    for name in parents:
        into = getattr(into, name)
        source = getattr(source, name)
    field = into.DESCRIPTOR.fields_by_name[last]
    into.ClearField(last)
    if field.is_repeated:
        getattr(into, last).MergeFrom(getattr(source, last))
    elif field.message_type is not None:
        if source.HasField(last):
            getattr(into, last).CopyFrom(getattr(source, last))
    else:
        setattr(into, last, getattr(source, last))


def _filter(text: str) -> schedules.Filter:
    found = schedules.Filter()
    for term in filters.parse(text, ("state", "labels", "queue", "kind", "name")):
        if term.field == "state":
            try:
                state = ScheduleState[term.value.removeprefix("STATE_")]
            except KeyError as error:
                names = ", ".join(each.name for each in ScheduleState)
                raise FilterInvalid("filter", f"{term.value} is not one of {names}") from error
            found = replace(found, state=state)
        elif term.field == "labels":
            found = replace(found, labels={**(found.labels or {}), term.key: term.value})
        elif term.field == "name":
            name = term.value.rpartition("/")[2]
            if term.operator == "=" and not name.endswith("*"):
                found = replace(found, name=name)
            else:
                found = replace(found, name_prefix=name.removesuffix("*"))
        else:
            found = (
                replace(found, queue=term.value) if term.field == "queue" else replace(found, kind=term.value)
            )
    return found
