"""How does work in the background go on? The leader takes the open operations in turn, one bounded
transaction of one step each: what it did and how far it is are committed together.

So a coordinator that is killed at any moment loses nothing and repeats nothing, and a leader that does not
know yet that another one leads does no harm: the step's row is locked, and its cursor read under that lock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
import structlog

from tickwheel.domain import calendar as calendar_rules
from tickwheel.domain import ids
from tickwheel.domain.operation import Operation, OperationKind, OperationState, Progress, Step
from tickwheel.domain.schedule import TimerState, state_after
from tickwheel.domain.trigger import NEVER_US
from tickwheel.domain.zone import tzdata_version
from tickwheel.errors import InvalidArgument, NotFound, TickwheelError, Unavailable
from tickwheel.postgres import calendars, operations
from tickwheel.postgres.connections import Connection, cluster_now_us
from tickwheel.services.coordinator.backfill import Backfiller
from tickwheel.services.coordinator.calendar_service import CalendarService
from tickwheel.services.coordinator.node import Node
from tickwheel.services.coordinator.schedule_service import SYSTEM, ScheduleService
from tickwheel.services.coordinator.touched import Touched

log = structlog.get_logger(__name__)

IDLE_MS = 500
PACE_MS = 20
"""Between two transactions: mutations of users come in between."""
OPEN_MAX = 50
"""Operations that are looked at in a round; the oldest first."""
ATTEMPTS_MAX = 20
BACKOFF_US = 500_000
BACKOFF_US_MAX = 60_000_000
DEPENDENTS_PAGE = 20
"""Schedules that are computed again in one transaction."""
ITEM_ATTEMPTS_MAX = 3
"""After so many failures of a page its first item is tried alone, and then left out."""
SHARD_PAGE = 200
"""Timer rows that are looked at in one transaction."""
SHARD_PAUSE_US = 50_000
"""Between two such pages: at most 4,000 rows a second."""
WATCH_INTERVAL_MS = 5_000
OUTRUN_MAX = 20

Handler = Callable[[Connection, Operation, Step, int], Awaitable[tuple[Progress, Touched]]]


class Background:
    """One for each coordinator. Both loops run for ever; only the leader acts."""

    def __init__(self, node: Node, schedules: ScheduleService, calendar_service: CalendarService) -> None:
        self._node = node
        self._schedules = schedules
        self._calendars = calendar_service
        self._handlers: dict[OperationKind, Handler] = {
            OperationKind.BACKFILL: Backfiller(node).step,
            OperationKind.CALENDAR_RECOMPUTE: self._recompute_dependents,
            OperationKind.TZDATA_RECOMPUTE: self._recompute_shard,
        }
        self._said_older = ""

    async def run(self) -> None:
        """Takes operations further, until cancelled."""
        while True:
            busy = False
            if self._node.election.term() is not None:
                try:
                    busy = await self._round()
                except Unavailable as error:
                    log.info("operations_wait", error=str(error))
            await asyncio.sleep((PACE_MS if busy else IDLE_MS) / 1_000)

    async def _round(self) -> bool:
        """One transaction of each open operation that can go on; whether there was one."""

        async def ask(connection: Connection) -> tuple[list[operations.Open], int]:
            return await operations.open_ones(connection, OPEN_MAX), await cluster_now_us(connection)

        found, now_us = await self._node.database.read(ask)
        busy = False
        for each in found:
            if self._node.election.term() is None:
                return False
            if each.step is None or each.operation.cancel_us:
                await self._end(each.operation)
            elif each.not_before_us <= now_us:
                await self._step(each.operation, each.step)
                busy = True
                await asyncio.sleep(PACE_MS / 1_000)
        return busy

    async def _step(self, operation: Operation, number: int) -> None:
        handler = self._handlers[operation.kind]

        async def work(connection: Connection) -> tuple[Touched, int] | None:
            now_us = await cluster_now_us(connection)
            step = await operations.lock_step(connection, operation.operation_id, number)
            if step is None:
                return None
            progress, touched = await handler(connection, operation, step, now_us)
            await operations.advance(connection, operation.operation_id, number, progress, now_us)
            return touched, now_us

        try:
            done = await self._node.database.transaction(work)
        except Exception as error:
            # One that Postgres is too slow for must not hold up those behind it. Where Postgres is out of
            # reach, this cannot be written either, and the round ends here.
            await self._failed(operation, number, error)
            return
        if done is not None:
            touched, now_us = done
            if touched.refs:
                self._node.nudger.rows(
                    np.array(touched.shards, dtype=np.int64),
                    np.frombuffer(b"".join(touched.refs), dtype=np.uint8).reshape(-1, 16),
                    np.array(touched.due_us, dtype=np.int64),
                    now_us,
                )

    async def _failed(self, operation: Operation, number: int, error: Exception) -> None:
        """A step that failed is tried again, later and later; what the caller would have to mend, never."""
        log.warning(
            "operation_step_failed",
            operation=operation.name,
            kind=operation.kind.name,
            step=number,
            error=str(error),
            exc_info=not isinstance(error, TickwheelError),
        )

        async def work(connection: Connection) -> None:
            now_us = await cluster_now_us(connection)
            step = await operations.lock_step(connection, operation.operation_id, number)
            if step is not None:
                delay_us = min(BACKOFF_US << min(step.attempt_count, 10), BACKOFF_US_MAX)
                most = 1 if isinstance(error, InvalidArgument | NotFound) else ATTEMPTS_MAX
                if isinstance(error, Unavailable):
                    # A store that is out of reach comes back: no reason to give up.
                    most = step.attempt_count + 2
                await operations.fail_step(
                    connection,
                    operation.operation_id,
                    number,
                    f"{type(error).__name__}: {error}",
                    now_us + delay_us,
                    most,
                )

        await self._node.database.transaction(work)

    async def _end(self, operation: Operation) -> None:
        async def work(connection: Connection) -> OperationState | None:
            state = await operations.end(connection, operation.operation_id, await cluster_now_us(connection))
            if state is OperationState.SUCCEEDED and operation.kind is OperationKind.TZDATA_RECOMPUTE:
                await operations.record_tzdata(connection, operation.request["version"])
            return state

        state = await self._node.database.transaction(work)
        if state is None:
            return
        if state is OperationState.SUCCEEDED and operation.kind is OperationKind.TZDATA_RECOMPUTE:
            self._schedules.tzdata_version = operation.request["version"]
        totals = await self._node.database.read(
            lambda connection: operations.totals(connection, operation.operation_id)
        )
        log.info(
            "operation_ended",
            operation=operation.name,
            kind=operation.kind.name,
            resource=operation.resource,
            state=state.name,
            examined=totals.examined_count,
            changed=totals.changed_count,
            skipped=totals.skipped_count,
        )

    # --- Calendars that changed ---------------------------------------------------------------------------

    async def _recompute_dependents(
        self, connection: Connection, operation: Operation, step: Step, now_us: int
    ) -> tuple[Progress, Touched]:
        """A page of the schedules that name a calendar, by uid."""
        after = bytes.fromhex(step.cursor["after"])
        size = DEPENDENTS_PAGE if step.attempt_count == 0 else 1
        page = await operations.dependents_page(
            connection, bytes.fromhex(operation.request["calendar"]), after, size
        )
        touched = Touched()
        changed = skipped = 0
        for uid, tenant_name, name in page:
            if step.attempt_count > ITEM_ATTEMPTS_MAX:
                skipped += 1
                log.error("schedule_not_recomputed", schedule=f"tenants/{tenant_name}/schedules/{name}")
                continue
            tenant = await self._node.catalog.tenant(tenant_name)
            done = await self._schedules.recompute(connection, tenant, name, uid, now_us)
            if done is None:
                continue
            changed += not done.is_quarantined
            skipped += done.is_quarantined
            if done.after.schedule_us != done.before.schedule_us:
                await operations.insert_move(
                    connection, operation.operation_id, uid, done.before.schedule_us, done.after.schedule_us
                )
            touched.add(done.record.shard, uid, done.after.due_us)
        cursor = {"after": page[-1][0].hex()} if page else step.cursor
        return Progress(cursor, len(page), changed, skipped, is_done=len(page) < size), touched

    # --- Time-zone data that changed ----------------------------------------------------------------------

    async def _recompute_shard(
        self, connection: Connection, operation: Operation, step: Step, now_us: int
    ) -> tuple[Progress, Touched]:
        """A page of a shard's timer rows, by uid: step n is shard n."""
        shard = step.number
        page, next_after = await operations.shard_page(
            connection, shard, bytes.fromhex(step.cursor["after"]), SHARD_PAGE
        )
        touched = Touched()
        changed = skipped = 0
        for index, row in enumerate(page):
            if index % 20 == 19:
                await asyncio.sleep(0)
            try:
                state = self._planned(row, now_us)
            except InvalidArgument as error:
                # Its owner quarantines it when it comes to it.
                log.info("schedule_not_recomputed", uid=row.uid.hex(), error=str(error))
                skipped += 1
                continue
            if state == row.state:
                continue
            if not await operations.move_timer(connection, shard, row, state):
                # Its owner, or a user, was faster, and planned with data of its own time.
                skipped += 1
                continue
            changed += 1
            await operations.insert_move(
                connection, operation.operation_id, row.uid, row.state.schedule_us, state.schedule_us
            )
            touched.add(shard, row.uid, state.due_us)
        is_done = next_after is None
        cursor = step.cursor if next_after is None else {"after": next_after.hex()}
        return (
            Progress(cursor, len(page), changed, skipped, is_done, 0 if is_done else SHARD_PAUSE_US),
            touched,
        )

    def _planned(self, row: operations.PlannedRow, now_us: int) -> TimerState:
        """When it is due by the present data. What is due already, and what is never due, stays."""
        if row.state.due_us == NEVER_US or row.state.schedule_us <= now_us:
            return row.state
        compiled = self._node.catalog.compiled(row.trigger_id, row.trigger_body)
        state = state_after(compiled, row.uid, row.state.decided_us)
        if state.schedule_us <= now_us:
            # By the new data it would have been due by now: it is not run late for that.
            state = state_after(compiled, row.uid, max(row.state.decided_us, now_us))
        is_same = (state.due_us, state.schedule_us) == (row.state.due_us, row.state.schedule_us)
        return row.state if is_same else state

    # --- What makes such work necessary -------------------------------------------------------------------

    async def watch(self) -> None:
        """Looks, until cancelled, whether the time-zone data or the calendar year have moved on."""
        while True:
            try:
                await self._watch_tzdata()
                if self._node.election.term() is not None:
                    await self._extend_calendars()
            except Unavailable as error:
                log.info("watch_waits", error=str(error))
            await asyncio.sleep(WATCH_INTERVAL_MS / 1_000)

    async def _watch_tzdata(self) -> None:
        mine = tzdata_version()
        recorded, shard_count, has_schedules = await self._node.database.read(operations.recorded_tzdata)
        self._schedules.tzdata_version = recorded or mine
        if recorded == mine or self._node.election.term() is None:
            return
        if recorded > mine:
            if self._said_older != recorded:
                self._said_older = recorded
                log.warning("tzdata_is_older", recorded=recorded, mine=mine)
            return

        async def begin(connection: Connection) -> Operation | None:
            if not recorded and not has_schedules:
                await operations.record_tzdata(connection, mine)
                return None
            if await operations.is_open(connection, OperationKind.TZDATA_RECOMPUTE, ""):
                return None
            return await operations.begin(
                connection,
                OperationKind.TZDATA_RECOMPUTE,
                tenant_id=0,
                resource="",
                request={"from": recorded, "version": mine},
                cursors=[{"after": ids.NO_UUID.hex()}] * shard_count,
                principal=SYSTEM,
                now_us=await cluster_now_us(connection),
            )

        begun = await self._node.database.transaction(begin)
        if begun is not None:
            log.info("tzdata_changed", operation=begun.name, recorded=recorded, mine=mine)

    async def _extend_calendars(self) -> None:
        """Rules of calendars are worked out for some years: more of them when half are over."""
        now_us = await self._node.database.now_us()
        year = calendar_rules.year_of(now_us) + calendar_rules.YEARS_AHEAD_MIN
        for tenant, name in await self._node.database.read(
            lambda connection: calendars.outrun(connection, year, OUTRUN_MAX)
        ):
            try:
                await self._calendars.extend(tenant, name)
                log.info("calendar_extended", tenant=tenant, calendar=name)
            except (NotFound, InvalidArgument) as error:
                log.warning("calendar_not_extended", tenant=tenant, calendar=name, error=str(error))
