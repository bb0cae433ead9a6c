"""CalendarService: dates that schedules share. Every change is a new revision and an operation that computes
what depends on it again.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import date

from tickwheel.domain import calendar as rules
from tickwheel.domain import ids
from tickwheel.domain.calendar import CalendarRecord, CalendarSource
from tickwheel.domain.operation import Operation, OperationKind
from tickwheel.errors import CalendarInUse, EtagMismatch, FieldInvalid, NotFound
from tickwheel.postgres import calendars, operations, requests
from tickwheel.postgres.catalog import Tenant
from tickwheel.postgres.connections import Connection
from tickwheel.postgres.requests import Done
from tickwheel.rpc import convert
from tickwheel.services.coordinator.calls import Context, PageTokens, call_of, page_size, principal_of
from tickwheel.services.coordinator.node import Node
from tickwheel.services.coordinator.schedule_service import SYSTEM
from tickwheel.v1 import calendar_pb2, calendar_service_pb2, calendar_service_pb2_grpc

_MUTABLE = ("dates", "rules", "display_name", "labels")
_FIRST = {"after": ids.NO_UUID.hex()}


class CalendarService(calendar_service_pb2_grpc.CalendarServiceServicer):
    def __init__(self, node: Node) -> None:
        self._node = node

    # --- Reads --------------------------------------------------------------------------------------------

    async def GetCalendar(
        self, request: calendar_service_pb2.GetCalendarRequest, context: Context
    ) -> calendar_pb2.Calendar:
        tenant, name = await self._named(request.name)
        found = await self._node.database.read(
            lambda connection: calendars.find(
                connection, tenant.tenant_id, tenant.name, name, request.revision
            )
        )
        if found is None:
            raise NotFound(request.name)
        return convert.calendar_message(found)

    async def ListCalendars(
        self, request: calendar_service_pb2.ListCalendarsRequest, context: Context
    ) -> calendar_service_pb2.ListCalendarsResponse:
        tenant = await self._node.catalog.tenant(convert.tenant_of(request.parent))
        size = page_size(request.page_size, self._node.settings.page_count_max)
        tokens = PageTokens("ListCalendars", request.parent)
        after = tokens.read(request.page_token)
        found = await self._node.database.read(
            lambda connection: calendars.list_page(connection, tenant.tenant_id, tenant.name, after, size)
        )
        cursor = (found[-1].create_us, found[-1].uid) if len(found) == size else None
        return calendar_service_pb2.ListCalendarsResponse(
            calendars=[convert.calendar_message(each) for each in found],
            next_page_token=tokens.write(cursor),
        )

    async def ListCalendarRevisions(
        self, request: calendar_service_pb2.ListCalendarRevisionsRequest, context: Context
    ) -> calendar_service_pb2.ListCalendarRevisionsResponse:
        tenant, name = await self._named(request.name)
        size = page_size(request.page_size, self._node.settings.page_count_max)
        tokens = PageTokens("ListCalendarRevisions", request.name)
        before, _ = tokens.read(request.page_token) or (1 << 62, b"")
        found = await self._node.database.read(
            lambda connection: calendars.revisions_page(
                connection, tenant.tenant_id, tenant.name, name, before, size
            )
        )
        if not found and not request.page_token:
            raise NotFound(request.name)
        cursor = (found[-1].revision, b"") if len(found) == size else None
        return calendar_service_pb2.ListCalendarRevisionsResponse(
            calendars=[convert.calendar_message(each) for each in found],
            next_page_token=tokens.write(cursor),
        )

    async def ListCalendarDependents(
        self, request: calendar_service_pb2.ListCalendarDependentsRequest, context: Context
    ) -> calendar_service_pb2.ListCalendarDependentsResponse:
        tenant, name = await self._named(request.name)
        size = page_size(request.page_size, self._node.settings.page_count_max)
        tokens = PageTokens("ListCalendarDependents", request.name)
        _, after = tokens.read(request.page_token) or (0, ids.NO_UUID)

        async def ask(connection: Connection) -> list[tuple[bytes, str]]:
            found = await calendars.find(connection, tenant.tenant_id, tenant.name, name)
            if found is None:
                raise NotFound(request.name)
            return await calendars.dependents(connection, found.uid, after, size)

        found = await self._node.database.read(ask)
        return calendar_service_pb2.ListCalendarDependentsResponse(
            schedules=[ids.schedule_name(tenant.name, schedule) for _, schedule in found],
            next_page_token=tokens.write((0, found[-1][0]) if len(found) == size else None),
        )

    # --- Mutations ----------------------------------------------------------------------------------------

    async def CreateCalendar(
        self, request: calendar_service_pb2.CreateCalendarRequest, context: Context
    ) -> calendar_pb2.Calendar:
        tenant = await self._node.catalog.tenant(convert.tenant_of(request.parent))
        name = convert.user_id(request.calendar_id, "calendar_id")
        wanted = request.calendar
        source = convert.calendar_source(wanted, "calendar")
        call = call_of(context, tenant.tenant_id, "CreateCalendar", request)

        async def work(connection: Connection, now_us: int) -> Done:
            made = await _insert(connection, tenant, name, wanted, source, principal_of(context), now_us)
            answer = convert.calendar_message(made)
            return Done(answer.SerializeToString(), answer.name, etag_after=made.etag, changed="*")

        response, _ = await requests.mutate(self._node.database, call, work)
        return calendar_pb2.Calendar.FromString(response)

    async def UpdateCalendar(
        self, request: calendar_service_pb2.UpdateCalendarRequest, context: Context
    ) -> calendar_pb2.Calendar:
        wanted = request.calendar
        tenant, name = await self._named(wanted.name, "calendar.name")
        paths = _paths(request)
        convert.calendar_source(wanted, "calendar")
        call = call_of(context, tenant.tenant_id, "UpdateCalendar", request)

        async def work(connection: Connection, now_us: int) -> Done:
            before = await _locked(connection, tenant, name, wanted.etag, "calendar.etag")
            merged = convert.calendar_message(before)
            for path in paths:
                merged.ClearField(path)  # type: ignore[arg-type]
                if path == "labels":
                    merged.labels.update(wanted.labels)
                elif path == "display_name":
                    merged.display_name = wanted.display_name
                else:
                    getattr(merged, path).extend(getattr(wanted, path))
            source = convert.calendar_source(merged, "calendar")
            return await _revise(
                connection,
                tenant,
                before,
                replace(
                    before,
                    display_name=_title(merged),
                    labels=convert.label_map(merged.labels, "calendar.labels"),
                    source=source,
                ),
                principal_of(context),
                now_us,
                ",".join(paths),
            )

        response, _ = await requests.mutate(self._node.database, call, work)
        return calendar_pb2.Calendar.FromString(response)

    async def DeleteCalendar(
        self, request: calendar_service_pb2.DeleteCalendarRequest, context: Context
    ) -> calendar_pb2.Calendar:
        tenant, name = await self._named(request.name)
        call = call_of(context, tenant.tenant_id, "DeleteCalendar", request)

        async def work(connection: Connection, now_us: int) -> Done:
            before = await _locked(connection, tenant, name, request.etag)
            users = await calendars.dependents(connection, before.uid, ids.NO_UUID, 1)
            if users:
                raise CalendarInUse(request.name, ids.schedule_name(tenant.name, users[0][1]))
            await calendars.delete(connection, before, now_us)
            answer = convert.calendar_message(before)
            return Done(answer.SerializeToString(), request.name, "", before.etag, changed="deleted")

        response, _ = await requests.mutate(self._node.database, call, work)
        return calendar_pb2.Calendar.FromString(response)

    async def ImportCalendar(
        self, request: calendar_service_pb2.ImportCalendarRequest, context: Context
    ) -> calendar_pb2.Calendar:
        tenant, name = await self._named(request.name)
        source = rules.read_ics(request.ics)
        call = call_of(context, tenant.tenant_id, "ImportCalendar", request)

        async def work(connection: Connection, now_us: int) -> Done:
            before = await calendars.lock(connection, tenant.tenant_id, tenant.name, name)
            if before is None:
                made = await _insert(
                    connection, tenant, name, calendar_pb2.Calendar(), source, principal_of(context), now_us
                )
                answer = convert.calendar_message(made)
                return Done(answer.SerializeToString(), answer.name, etag_after=made.etag, changed="*")
            _check_etag(before, request.etag, "etag")
            wanted = rules.merged(before.source, source) if request.merge else source
            after = replace(before, source=wanted)
            return await _revise(connection, tenant, before, after, principal_of(context), now_us, "import")

        response, _ = await requests.mutate(self._node.database, call, work)
        return calendar_pb2.Calendar.FromString(response)

    async def RollbackCalendar(
        self, request: calendar_service_pb2.RollbackCalendarRequest, context: Context
    ) -> calendar_pb2.Calendar:
        tenant, name = await self._named(request.name)
        if request.revision < 1:
            raise FieldInvalid("revision", "it is required: 1 or more")
        call = call_of(context, tenant.tenant_id, "RollbackCalendar", request)

        async def work(connection: Connection, now_us: int) -> Done:
            before = await _locked(connection, tenant, name, request.etag)
            earlier = await calendars.find(connection, tenant.tenant_id, tenant.name, name, request.revision)
            if earlier is None:
                raise NotFound(f"{request.name}@{request.revision}")
            after = replace(
                before, display_name=earlier.display_name, labels=earlier.labels, source=earlier.source
            )
            changed = f"rollback to {request.revision}"
            return await _revise(connection, tenant, before, after, principal_of(context), now_us, changed)

        response, _ = await requests.mutate(self._node.database, call, work)
        return calendar_pb2.Calendar.FromString(response)

    async def extend(self, tenant_name: str, name: str) -> None:
        """Works the rules of a calendar out anew, further ahead; for the leader."""
        tenant = await self._node.catalog.tenant(tenant_name)

        async def work(connection: Connection, now_us: int) -> Done:
            before = await calendars.lock(connection, tenant.tenant_id, tenant.name, name)
            if before is None:
                raise NotFound(rules.calendar_name(tenant_name, name))
            return await _revise(connection, tenant, before, before, SYSTEM, now_us, "effective_year")

        call = requests.Call(tenant.tenant_id, SYSTEM, "UpdateCalendar", "", b"", "")
        await requests.mutate(self._node.database, call, work)

    async def _named(self, name: str, field: str = "name") -> tuple[Tenant, str]:
        tenant_name, calendar = convert.calendar_of(name, field)
        return await self._node.catalog.tenant(tenant_name), calendar


async def _insert(
    connection: Connection,
    tenant: Tenant,
    name: str,
    wanted: calendar_pb2.Calendar,
    source: CalendarSource,
    principal: str,
    now_us: int,
) -> CalendarRecord:
    dates, year = _resolved(source, now_us)
    return await calendars.insert(
        connection,
        tenant.tenant_id,
        tenant.name,
        name,
        _title(wanted),
        convert.label_map(wanted.labels, "calendar.labels"),
        source,
        dates,
        year,
        principal,
        now_us,
    )


async def _revise(
    connection: Connection,
    tenant: Tenant,
    before: CalendarRecord,
    after: CalendarRecord,
    principal: str,
    now_us: int,
    changed: str,
) -> Done:
    """Writes a revision and, where its dates are others, begins the operation that follows from them."""
    dates, year = _resolved(after.source, now_us)
    after = replace(after, revision=before.revision + 1, dates=dates, effective_year=year, update_us=now_us)
    await calendars.write(connection, after, principal, now_us)
    answer = convert.calendar_message(after)
    if dates != before.dates:
        begun = await begin_recompute(connection, tenant, after, principal, now_us)
        answer.recompute_operation = begun.name
    return Done(answer.SerializeToString(), answer.name, "", before.etag, after.etag, changed)


async def begin_recompute(
    connection: Connection, tenant: Tenant, record: CalendarRecord, principal: str, now_us: int
) -> Operation:
    """The operation that computes what depends on a calendar again. One that is under way already may have
    passed some of it with the revision before, so each revision has its own.
    """
    return await operations.begin(
        connection,
        OperationKind.CALENDAR_RECOMPUTE,
        tenant_id=tenant.tenant_id,
        resource=record.full_name,
        request={"calendar": record.uid.hex(), "revision": record.revision},
        cursors=[_FIRST],
        principal=principal,
        now_us=now_us,
    )


def _resolved(source: CalendarSource, now_us: int) -> tuple[frozenset[date], int]:
    year = rules.year_of(now_us) + rules.YEARS_AHEAD
    try:
        return rules.resolve(source, year), year
    except FieldInvalid as error:
        raise FieldInvalid(f"calendar.{error.field}", error.reason) from error


async def _locked(
    connection: Connection, tenant: Tenant, name: str, etag: str, field: str = "etag"
) -> CalendarRecord:
    found = await calendars.lock(connection, tenant.tenant_id, tenant.name, name)
    if found is None:
        raise NotFound(rules.calendar_name(tenant.name, name))
    _check_etag(found, etag, field)
    return found


def _check_etag(record: CalendarRecord, sent: str, field: str) -> None:
    if not sent:
        raise FieldInvalid(field, "it is required: send that of the revision that you have read")
    if sent != record.etag:
        raise EtagMismatch(record.full_name, sent, record.etag)


def _title(message: calendar_pb2.Calendar) -> str:
    return convert.text(message.display_name, "calendar.display_name", convert.DISPLAY_NAME_CHARACTERS_MAX)


def _paths(request: calendar_service_pb2.UpdateCalendarRequest) -> list[str]:
    """The fields to take from the request; an empty mask means all that is set."""
    paths = list(request.update_mask.paths)
    if "*" in paths:
        return list(_MUTABLE)
    for path in paths:
        if path not in _MUTABLE:
            raise FieldInvalid("update_mask", f"{path} cannot be set; {', '.join(_MUTABLE)} can")
    return paths or [name for name in _MUTABLE if getattr(request.calendar, name)]
