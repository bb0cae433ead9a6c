"""The SDK's client: schedules, runs, dead letters and the cluster, asynchronously or blocking.

    async with Client("127.0.0.1:7070") as client:
        await client.schedules.create("nightly", kind="report", cron="0 9 * * MON-FRI",
        time_zone="Europe/Berlin") run = await client.runs.create("report", payload={"day": "2027-01-31"})
        run = await client.runs.wait(run.name)

    client = BlockingClient("127.0.0.1:7070")          # the same, without await; safe across fork()
    client.runs.create("report")

Answers are the messages of `tickwheel.v1`; errors are those of `tickwheel.errors`. Every mutation carries
a request_id (made here unless you give one), so it can be sent again without doing anything twice: what is
UNAVAILABLE is tried again, at the next address, until `retry_s_max` is over. Give a `request_id` of your
own where the *caller* may come again, such as the id of the row in your outbox.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

import grpc
from google.longrunning import operations_pb2, operations_pb2_grpc
from google.protobuf import duration_pb2, timestamp_pb2
from google.protobuf.message import Message

from tickwheel.errors import FieldInvalid, TickwheelError, Unavailable
from tickwheel.rpc.channel import OPTIONS
from tickwheel.rpc.status import from_rpc_error
from tickwheel.v1 import (
    calendar_pb2,
    calendar_service_pb2,
    calendar_service_pb2_grpc,
    cluster_service_pb2,
    cluster_service_pb2_grpc,
    dead_letter_service_pb2,
    dead_letter_service_pb2_grpc,
    job_pb2,
    run_pb2,
    run_service_pb2,
    run_service_pb2_grpc,
    schedule_pb2,
    schedule_service_pb2,
    schedule_service_pb2_grpc,
)

DEFAULT_ADDRESS = "127.0.0.1:7070"
TIMEOUT_S_DEFAULT = 10.0
RETRY_S_MAX_DEFAULT = 30.0
BACKOFF_S_FIRST = 0.05
BACKOFF_S_MAX = 2.0
PAGE_SIZE = 500
WAIT_S_MAX = 290.0
"""Of one WaitRun; longer waits are made of several."""

P = ParamSpec("P")
R = TypeVar("R")
JsonObject = Mapping[str, Any]
PayloadLike = JsonObject | bytes | job_pb2.Payload
Stubs = dict[str, Any]

_STUBS: dict[str, Callable[[Any], Any]] = {
    "schedules": schedule_service_pb2_grpc.ScheduleServiceStub,
    "calendars": calendar_service_pb2_grpc.CalendarServiceStub,
    "operations": operations_pb2_grpc.OperationsStub,
    "runs": run_service_pb2_grpc.RunServiceStub,
    "dead_letters": dead_letter_service_pb2_grpc.DeadLetterServiceStub,
    "cluster": cluster_service_pb2_grpc.ClusterServiceStub,
}
_TERMINAL = frozenset(
    {
        run_pb2.Run.STATE_SUCCEEDED,
        run_pb2.Run.STATE_FAILED,
        run_pb2.Run.STATE_DEAD_LETTERED,
        run_pb2.Run.STATE_CANCELLED,
        run_pb2.Run.STATE_EXPIRED,
    }
)


# --- Requests: one function for each call, pure; both clients send what these give
# ---------------------------


@dataclass(frozen=True, slots=True)
class Call(Generic[R]):
    """A request and where it goes. `answer` makes the result of the response."""

    service: str
    method: str
    request: Message
    answer: Callable[[Any], R]
    timeout_s: float | None = None


def payload_message(value: PayloadLike | None) -> job_pb2.Payload | None:
    """A JSON object, or bytes; None for no payload."""
    if value is None or isinstance(value, job_pb2.Payload):
        return value
    if isinstance(value, bytes | bytearray):
        return job_pb2.Payload(data=bytes(value), content_type="application/octet-stream")
    # As text, not as a Struct: numbers beyond 2^53 and the difference between 1 and 1.0 survive.
    return job_pb2.Payload(data=json.dumps(value).encode(), content_type="application/json")


def timestamp_message(value: datetime) -> timestamp_pb2.Timestamp:
    """Of an aware datetime: a naive one has no place in time."""
    if value.tzinfo is None:
        raise FieldInvalid("time", f"{value!r} has no time zone; use datetime.now(UTC) or add tzinfo")
    message = timestamp_pb2.Timestamp()
    message.FromDatetime(value.astimezone(UTC))
    return message


def duration_message(value: timedelta) -> duration_pb2.Duration:
    message = duration_pb2.Duration()
    message.FromTimedelta(value)
    return message


def make_template(
    kind: str,
    *,
    queue: str = "",
    payload: PayloadLike | None = None,
    priority: int = 0,
    attempt_count_max: int | None = None,
    attempt_timeout: timedelta | None = None,
) -> job_pb2.JobTemplate:
    """The commonest parts of a job template; set others on what it gives."""
    template = job_pb2.JobTemplate(
        kind=kind, queue=queue, payload=payload_message(payload), priority=priority
    )
    if attempt_count_max is not None:
        template.retry.attempt_count_max = attempt_count_max
    if attempt_timeout is not None:
        template.timeouts.attempt_duration_max.CopyFrom(duration_message(attempt_timeout))
    return template


def make_spec(
    kind: str = "",
    *,
    template: job_pb2.JobTemplate | None = None,
    cron: str = "",
    every: timedelta | None = None,
    at: datetime | Sequence[datetime] | None = None,
    rrule: str = "",
    time_zone: str = "",
    queue: str = "",
    payload: PayloadLike | None = None,
    priority: int = 0,
    jitter: timedelta | None = None,
    attempt_count_max: int | None = None,
    overlap: str = "",
    misfire: str = "",
) -> schedule_pb2.ScheduleSpec:
    """A spec with one trigger: `cron`, `every`, `at` or `rrule`. `overlap` and `misfire` by name, such as
    "SKIP".
    """
    trigger = schedule_pb2.Trigger(time_zone=time_zone)
    if sum(bool(each) for each in (cron, every, at, rrule)) != 1:
        raise FieldInvalid("spec.triggers", "give one of cron, every, at and rrule")
    if cron:
        trigger.cron.expression = cron
    elif every is not None:
        trigger.interval.duration.CopyFrom(duration_message(every))
    elif at is not None:
        times = [at] if isinstance(at, datetime) else at
        trigger.instants.times.extend(timestamp_message(each) for each in times)
    else:
        trigger.rrule.rule = rrule
    if template is None:
        template = make_template(
            kind, queue=queue, payload=payload, priority=priority, attempt_count_max=attempt_count_max
        )
    spec = schedule_pb2.ScheduleSpec(triggers=[trigger], template=template)
    if jitter is not None:
        spec.jitter_duration.CopyFrom(duration_message(jitter))
    if overlap:
        spec.overlap.policy = _named(schedule_pb2.OverlapPolicy.Policy, "POLICY_", overlap, "overlap")
    if misfire:
        spec.misfire.policy = _named(schedule_pb2.MisfirePolicy.Policy, "POLICY_", misfire, "misfire")
    return spec


def _named(enum: Any, prefix: str, name: str, field: str) -> Any:
    full = prefix + name.upper().removeprefix(prefix)
    if full not in enum.keys():  # noqa: SIM118  (an enum wrapper is no dict)
        known = ", ".join(key.removeprefix(prefix) for key in enum.keys() if not key.endswith("UNSPECIFIED"))  # noqa: SIM118
        raise FieldInvalid(field, f"{name!r} is not one of {known}")
    return enum.Value(full)


def schedule_path(tenant: str, schedule: str) -> str:
    """The full name of a schedule that is given by its id or its full name."""
    return schedule if "/" in schedule else f"tenants/{tenant}/schedules/{schedule}"


def run_path(tenant: str, run: str) -> str:
    return run if "/" in run else f"tenants/{tenant}/runs/{run}"


def dead_letter_path(tenant: str, name: str) -> str:
    """By its name, its id, or the run that died."""
    return f"tenants/{tenant}/deadLetters/{name.rpartition('/')[2]}"


def _itself(response: Any) -> Any:
    return response


def _id(request_id: str) -> str:
    return request_id or str(uuid.uuid4())


def _create_schedule(
    tenant: str,
    /,
    schedule_id: str,
    spec: schedule_pb2.ScheduleSpec | None = None,
    *,
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
    request_id: str = "",
    validate_only: bool = False,
    **fields: Any,
) -> Call[schedule_pb2.Schedule]:
    """Creates a schedule from a spec, or from the fields of `make_spec`. Raises AlreadyExists,
    TriggerInvalid, …
    """
    request = schedule_service_pb2.CreateScheduleRequest(
        parent=f"tenants/{tenant}",
        schedule_id=schedule_id,
        schedule=schedule_pb2.Schedule(
            spec=spec or make_spec(**fields), labels=labels or {}, annotations=annotations or {}
        ),
        request_id=_id(request_id),
        validate_only=validate_only,
    )
    return Call("schedules", "CreateSchedule", request, _itself)


def _get_schedule(tenant: str, schedule: str) -> Call[schedule_pb2.Schedule]:
    """Raises NotFound."""
    request = schedule_service_pb2.GetScheduleRequest(name=schedule_path(tenant, schedule))
    return Call("schedules", "GetSchedule", request, _itself)


def _update_schedule(
    tenant: str,
    schedule: schedule_pb2.Schedule,
    *,
    update_mask: Sequence[str] = (),
    allow_missing: bool = False,
    request_id: str = "",
    validate_only: bool = False,
) -> Call[schedule_pb2.Schedule]:
    """Changes what the mask names (without one: all that is set). With an etag in it: raises EtagMismatch."""
    request = schedule_service_pb2.UpdateScheduleRequest(
        schedule=schedule,
        allow_missing=allow_missing,
        request_id=_id(request_id),
        validate_only=validate_only,
    )
    request.schedule.name = schedule_path(tenant, schedule.name)
    request.update_mask.paths.extend(update_mask)
    return Call("schedules", "UpdateSchedule", request, _itself)


def _ensure_schedule(
    tenant: str,
    /,
    schedule_id: str,
    spec: schedule_pb2.ScheduleSpec | None = None,
    *,
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
    request_id: str = "",
    **fields: Any,
) -> Call[schedule_pb2.Schedule]:
    """Creates it, or makes it so: for deployments that declare their schedules. It never un-pauses."""
    schedule = schedule_pb2.Schedule(
        name=schedule_id, spec=spec or make_spec(**fields), labels=labels or {}, annotations=annotations or {}
    )
    return _update_schedule(
        tenant,
        schedule,
        update_mask=("spec", "labels", "annotations"),
        allow_missing=True,
        request_id=request_id,
    )


def _pause_schedule(
    tenant: str,
    schedule: str,
    reason: str,
    *,
    resume_time: datetime | None = None,
    cancel_live_runs: bool = False,
    etag: str = "",
    request_id: str = "",
) -> Call[schedule_pb2.Schedule]:
    """After the answer nothing of it is granted until it resumes."""
    live = schedule_service_pb2.PauseScheduleRequest.LiveRuns
    request = schedule_service_pb2.PauseScheduleRequest(
        name=schedule_path(tenant, schedule),
        etag=etag,
        reason=reason,
        resume_time=None if resume_time is None else timestamp_message(resume_time),
        live_runs=live.LIVE_RUNS_CANCEL if cancel_live_runs else live.LIVE_RUNS_CONTINUE,
        request_id=_id(request_id),
    )
    return Call("schedules", "PauseSchedule", request, _itself)


def _resume_schedule(
    tenant: str, schedule: str, *, run_missed: bool = False, etag: str = "", request_id: str = ""
) -> Call[schedule_pb2.Schedule]:
    """`run_missed`: what came while it was paused is judged by its misfire policy, instead of being
    skipped.
    """
    missed = schedule_service_pb2.ResumeScheduleRequest.MissedOccurrences
    request = schedule_service_pb2.ResumeScheduleRequest(
        name=schedule_path(tenant, schedule),
        etag=etag,
        missed_occurrences=missed.MISSED_OCCURRENCES_MISFIRE_POLICY
        if run_missed
        else missed.MISSED_OCCURRENCES_SKIP,
        request_id=_id(request_id),
    )
    return Call("schedules", "ResumeSchedule", request, _itself)


def _run_schedule(
    tenant: str,
    schedule: str,
    *,
    payload: PayloadLike | None = None,
    ignore_overlap: bool = False,
    request_id: str = "",
) -> Call[run_pb2.Run]:
    """A run now, beside the schedule's occurrences."""
    request = schedule_service_pb2.RunScheduleRequest(
        name=schedule_path(tenant, schedule),
        payload=payload_message(payload),
        ignore_overlap=ignore_overlap,
        request_id=_id(request_id),
    )
    return Call("schedules", "RunSchedule", request, _itself)


def _delete_schedule(
    tenant: str, schedule: str, *, etag: str = "", allow_missing: bool = False, request_id: str = ""
) -> Call[schedule_pb2.Schedule]:
    """Its live runs go on to their end; its name is free at once."""
    request = schedule_service_pb2.DeleteScheduleRequest(
        name=schedule_path(tenant, schedule),
        etag=etag,
        allow_missing=allow_missing,
        request_id=_id(request_id),
    )
    return Call("schedules", "DeleteSchedule", request, _itself)


def _preview_trigger(
    tenant: str, trigger: schedule_pb2.Trigger, *, count: int = 10, after: datetime | None = None
) -> Call[schedule_service_pb2.PreviewTriggerResponse]:
    """The next occurrences of a trigger that need not be stored."""
    request = schedule_service_pb2.PreviewTriggerRequest(
        triggers=[trigger], count=count, after_time=None if after is None else timestamp_message(after)
    )
    return Call("schedules", "PreviewTrigger", request, _itself)


def _list_upcoming(
    tenant: str,
    schedule: str,
    *,
    count: int = 10,
    after: datetime | None = None,
    until: datetime | None = None,
    show_excluded: bool = False,
) -> Call[schedule_service_pb2.ListUpcomingOccurrencesResponse]:
    """The next occurrences of a schedule, as its owner will compute them: 1,000 at most."""
    request = schedule_service_pb2.ListUpcomingOccurrencesRequest(
        name=schedule_path(tenant, schedule),
        page_size=count,
        after_time=None if after is None else timestamp_message(after),
        until_time=None if until is None else timestamp_message(until),
        show_excluded=show_excluded,
    )
    return Call("schedules", "ListUpcomingOccurrences", request, _itself)


def _backfill_schedule(
    tenant: str,
    schedule: str,
    start: datetime,
    end: datetime,
    *,
    concurrency_max: int = 1,
    request_id: str = "",
    validate_only: bool = False,
) -> Call[operations_pb2.Operation]:
    """Runs for the occurrences in [start, end) that have none, so many at once; an operation to follow."""
    request = schedule_service_pb2.BackfillScheduleRequest(
        name=schedule_path(tenant, schedule),
        start_time=timestamp_message(start),
        end_time=timestamp_message(end),
        concurrency_max=concurrency_max,
        request_id=_id(request_id),
        validate_only=validate_only,
    )
    return Call("schedules", "BackfillSchedule", request, _itself)


def calendar_path(tenant: str, calendar: str) -> str:
    """The full name of a calendar; one that is full already stays as it is."""
    return calendar if "/" in calendar else f"tenants/{tenant}/calendars/{calendar}"


def _create_calendar(
    tenant: str, calendar_id: str, calendar: calendar_pb2.Calendar, *, request_id: str = ""
) -> Call[calendar_pb2.Calendar]:
    """Raises AlreadyExists."""
    request = calendar_service_pb2.CreateCalendarRequest(
        parent=f"tenants/{tenant}",
        calendar_id=calendar_id,
        calendar=calendar,
        request_id=_id(request_id),
    )
    return Call("calendars", "CreateCalendar", request, _itself)


def _get_calendar(tenant: str, calendar: str, *, revision: int = 0) -> Call[calendar_pb2.Calendar]:
    """At an earlier revision, where one is given. Raises NotFound."""
    request = calendar_service_pb2.GetCalendarRequest(name=calendar_path(tenant, calendar), revision=revision)
    return Call("calendars", "GetCalendar", request, _itself)


def _update_calendar(
    tenant: str,
    calendar: calendar_pb2.Calendar,
    *,
    update_mask: Sequence[str] = (),
    request_id: str = "",
) -> Call[calendar_pb2.Calendar]:
    """Changes what the mask names (without one: all that is set). Needs its etag; raises EtagMismatch."""
    request = calendar_service_pb2.UpdateCalendarRequest(calendar=calendar, request_id=_id(request_id))
    request.calendar.name = calendar_path(tenant, calendar.name)
    request.update_mask.paths.extend(update_mask)
    return Call("calendars", "UpdateCalendar", request, _itself)


def _import_calendar(
    tenant: str, calendar: str, ics: bytes, *, merge: bool = False, etag: str = "", request_id: str = ""
) -> Call[calendar_pb2.Calendar]:
    """Takes the dates of an iCalendar; makes the calendar where there is none, else needs its etag."""
    request = calendar_service_pb2.ImportCalendarRequest(
        name=calendar_path(tenant, calendar),
        ics=ics,
        merge=merge,
        etag=etag,
        request_id=_id(request_id),
    )
    return Call("calendars", "ImportCalendar", request, _itself)


def _rollback_calendar(
    tenant: str, calendar: str, revision: int, *, etag: str, request_id: str = ""
) -> Call[calendar_pb2.Calendar]:
    """A new revision that says what an earlier one said."""
    request = calendar_service_pb2.RollbackCalendarRequest(
        name=calendar_path(tenant, calendar), revision=revision, etag=etag, request_id=_id(request_id)
    )
    return Call("calendars", "RollbackCalendar", request, _itself)


def _delete_calendar(
    tenant: str, calendar: str, *, etag: str, request_id: str = ""
) -> Call[calendar_pb2.Calendar]:
    """Raises CalendarInUse while a schedule names it."""
    request = calendar_service_pb2.DeleteCalendarRequest(
        name=calendar_path(tenant, calendar), etag=etag, request_id=_id(request_id)
    )
    return Call("calendars", "DeleteCalendar", request, _itself)


def _calendar_pages(tenant: str) -> Call[Any]:
    request = calendar_service_pb2.ListCalendarsRequest(parent=f"tenants/{tenant}", page_size=PAGE_SIZE)
    return Call("calendars", "ListCalendars", request, lambda response: response.calendars)


def _dependent_pages(tenant: str, calendar: str) -> Call[Any]:
    request = calendar_service_pb2.ListCalendarDependentsRequest(
        name=calendar_path(tenant, calendar), page_size=PAGE_SIZE
    )
    return Call("calendars", "ListCalendarDependents", request, lambda response: response.schedules)


def _get_operation(tenant: str, name: str) -> Call[operations_pb2.Operation]:
    """Its `metadata` is a tickwheel.v1.OperationMetadata. Raises NotFound."""
    return Call("operations", "GetOperation", operations_pb2.GetOperationRequest(name=name), _itself)


def _cancel_operation(tenant: str, name: str) -> Call[None]:
    """What it did stays done; it does no more."""
    request = operations_pb2.CancelOperationRequest(name=name)
    return Call("operations", "CancelOperation", request, lambda _: None)


def _wait_operation(tenant: str, name: str, *, timeout_s: float = 30.0) -> Call[operations_pb2.Operation]:
    """As it is when it has ended, or when the time (300 s at most) is over."""
    request = operations_pb2.WaitOperationRequest(name=name)
    request.timeout.FromTimedelta(timedelta(seconds=timeout_s))
    return Call("operations", "WaitOperation", request, _itself, timeout_s + 5.0)


def _operation_pages(tenant: str) -> Call[Any]:
    request = operations_pb2.ListOperationsRequest(name=f"tenants/{tenant}", page_size=PAGE_SIZE)
    return Call("operations", "ListOperations", request, lambda response: response.operations)


def make_run(
    kind: str = "",
    *,
    template: job_pb2.JobTemplate | None = None,
    due: datetime | timedelta | None = None,
    labels: Mapping[str, str] | None = None,
    **fields: Any,
) -> run_pb2.Run:
    """A run to be created; `due`: an instant, or a delay from now. `fields` are those of `make_template`."""
    run = run_pb2.Run(template=template or make_template(kind, **fields), labels=labels or {})
    if isinstance(due, timedelta):
        due = datetime.now(UTC) + due
    if due is not None:
        run.due_time.CopyFrom(timestamp_message(due))
    return run


def _create_run(
    tenant: str,
    /,
    kind: str = "",
    *,
    run: run_pb2.Run | None = None,
    request_id: str = "",
    validate_only: bool = False,
    **fields: Any,
) -> Call[run_pb2.Run]:
    """Do this, now or at `due`. `fields` are those of `make_run`."""
    request = run_service_pb2.CreateRunRequest(
        parent=f"tenants/{tenant}",
        run=run or make_run(kind, **fields),
        request_id=_id(request_id),
        validate_only=validate_only,
    )
    return Call("runs", "CreateRun", request, _itself)


def _create_batch(tenant: str, runs: Iterable[run_pb2.Run], *, request_id: str = "") -> Call[list[str]]:
    """All or none, 10,000 at most; gives their names in order."""
    request = run_service_pb2.BatchCreateRunsRequest(
        parent=f"tenants/{tenant}",
        requests=[run_service_pb2.CreateRunRequest(run=run) for run in runs],
        request_id=_id(request_id),
        names_only=True,
    )
    return Call("runs", "BatchCreateRuns", request, lambda response: [run.name for run in response.runs])


def _get_run(tenant: str, run: str) -> Call[run_pb2.Run]:
    """Raises NotFound."""
    return Call("runs", "GetRun", run_service_pb2.GetRunRequest(name=run_path(tenant, run)), _itself)


def _cancel_run(
    tenant: str, run: str, reason: str = "", *, grace: timedelta | None = None, request_id: str = ""
) -> Call[run_pb2.Run]:
    """What waits ends at once; what runs is told, and its lease is taken away after the grace."""
    request = run_service_pb2.CancelRunRequest(
        name=run_path(tenant, run),
        reason=reason,
        grace_duration=None if grace is None else duration_message(grace),
        request_id=_id(request_id),
    )
    return Call("runs", "CancelRun", request, _itself)


def _wait_once(tenant: str, run: str, wait_s: float) -> Call[run_pb2.Run]:
    wait = duration_message(timedelta(seconds=max(0.0, min(wait_s, WAIT_S_MAX))))
    request = run_service_pb2.WaitRunRequest(name=run_path(tenant, run), wait_duration_max=wait)
    return Call("runs", "WaitRun", request, _itself, timeout_s=wait_s + TIMEOUT_S_DEFAULT)


def _list_attempts(tenant: str, run: str) -> Call[list[run_pb2.Attempt]]:
    """The first thousand of them."""
    request = run_service_pb2.ListAttemptsRequest(parent=run_path(tenant, run), page_size=1_000)
    return Call("runs", "ListAttempts", request, lambda response: list(response.attempts))


def _get_dead_letter(tenant: str, name: str) -> Call[run_pb2.DeadLetter]:
    """By its id or the run's. Raises NotFound."""
    request = dead_letter_service_pb2.GetDeadLetterRequest(name=dead_letter_path(tenant, name))
    return Call("dead_letters", "GetDeadLetter", request, _itself)


def _replay_dead_letter(
    tenant: str, name: str, *, payload: PayloadLike | None = None, request_id: str = ""
) -> Call[run_pb2.Run]:
    """A new run that names its origin."""
    request = dead_letter_service_pb2.ReplayDeadLetterRequest(
        name=dead_letter_path(tenant, name), payload=payload_message(payload), request_id=_id(request_id)
    )
    return Call("dead_letters", "ReplayDeadLetter", request, _itself)


def _list_shards(tenant: str) -> Call[list[cluster_service_pb2.Shard]]:
    request = cluster_service_pb2.ListShardsRequest()
    return Call("cluster", "ListShards", request, lambda response: list(response.shards))


def _list_timers(tenant: str) -> Call[list[cluster_service_pb2.Timer]]:
    request = cluster_service_pb2.ListTimersRequest()
    return Call("cluster", "ListTimers", request, lambda response: list(response.timers))


def _drain_timer(tenant: str, timer_id: str, *, undrain: bool = False) -> Call[int]:
    """Moves every shard away from it; gives how many are left. Ask again until it is 0."""
    request = cluster_service_pb2.DrainTimerRequest(timer_id=timer_id, undrain=undrain)
    return Call("cluster", "DrainTimer", request, lambda response: int(response.remaining_shard_count))


def _health(tenant: str) -> Call[cluster_service_pb2.ClusterHealth]:
    request = cluster_service_pb2.GetClusterHealthRequest()
    return Call("cluster", "GetClusterHealth", request, _itself)


def _resume_cluster(
    tenant: str, *, force: bool = False, hold: timedelta | None = None
) -> Call[cluster_service_pb2.ResumeClusterResponse]:
    """Accepts what stands in Postgres as the cluster's history. `hold`: nothing is granted for so long."""
    request = cluster_service_pb2.ResumeClusterRequest(force=force)
    if hold is not None:
        request.hold_duration.CopyFrom(duration_message(hold))
    return Call("cluster", "ResumeCluster", request, _itself)


def _schedule_pages(tenant: str, filter: str, show_deleted: bool, full: bool) -> Call[Any]:
    request = schedule_service_pb2.ListSchedulesRequest(
        parent=f"tenants/{tenant}",
        page_size=PAGE_SIZE,
        filter=filter,
        show_deleted=show_deleted,
        view=job_pb2.RESOURCE_VIEW_FULL if full else job_pb2.RESOURCE_VIEW_BASIC,
    )
    return Call("schedules", "ListSchedules", request, lambda response: response.schedules)


def _run_pages(tenant: str, filter: str, full: bool) -> Call[Any]:
    request = run_service_pb2.ListRunsRequest(
        parent=f"tenants/{tenant}",
        page_size=PAGE_SIZE,
        filter=filter,
        view=job_pb2.RESOURCE_VIEW_FULL if full else job_pb2.RESOURCE_VIEW_BASIC,
    )
    return Call("runs", "ListRuns", request, lambda response: response.runs)


def _dead_letter_pages(tenant: str, filter: str) -> Call[Any]:
    request = dead_letter_service_pb2.ListDeadLettersRequest(
        parent=f"tenants/{tenant}", page_size=PAGE_SIZE, filter=filter
    )
    return Call("dead_letters", "ListDeadLetters", request, lambda response: response.dead_letters)


# --- What both clients do
# ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Settings:
    addresses: tuple[str, ...]
    tenant: str
    credentials: grpc.ChannelCredentials | None
    metadata: tuple[tuple[str, str], ...]
    timeout_s: float
    retry_s_max: float


def _settings(
    addresses: str | Sequence[str],
    tenant: str,
    credentials: grpc.ChannelCredentials | None,
    metadata: Sequence[tuple[str, str]],
    timeout_s: float,
    retry_s_max: float,
) -> _Settings:
    given = addresses.split(",") if isinstance(addresses, str) else addresses
    cleaned = tuple(address.strip() for address in given if address.strip())
    if not cleaned:
        raise ValueError(f"no address: give one or more of host:port, such as {DEFAULT_ADDRESS}")
    return _Settings(cleaned, tenant, credentials, tuple(metadata), timeout_s, retry_s_max)


class _Retry:
    """How long one call may still be tried, and how long to wait before the next try (full jitter)."""

    def __init__(self, settings: _Settings) -> None:
        self._deadline_s = time.monotonic() + settings.retry_s_max
        self._failures = 0

    def delay_s(self, error: TickwheelError) -> float | None:
        """None: give up."""
        if not isinstance(error, Unavailable):
            return None
        self._failures += 1
        ceiling = min(BACKOFF_S_MAX, BACKOFF_S_FIRST * 2 ** min(self._failures, 10))
        delay_s = random.uniform(0, ceiling)
        return delay_s if time.monotonic() + delay_s < self._deadline_s else None


def _translated(error: grpc.RpcError) -> TickwheelError | None:
    return from_rpc_error(error)


def _async(
    build: Callable[Concatenate[str, P], Call[R]],
) -> Callable[Concatenate[_AsyncPart, P], Coroutine[Any, Any, R]]:
    """A method of the asynchronous client, of the function that makes its request."""

    async def method(self: _AsyncPart, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await self._client._send(build(self._client.tenant, *args, **kwargs))

    method.__doc__ = build.__doc__
    return method


def _blocking(
    build: Callable[Concatenate[str, P], Call[R]],
) -> Callable[Concatenate[_BlockingPart, P], R]:
    """The same for the blocking client."""

    def method(self: _BlockingPart, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._client._send(build(self._client.tenant, *args, **kwargs))

    method.__doc__ = build.__doc__
    return method


# --- The asynchronous client
# ---------------------------------------------------------------------------------


class _AsyncPart:
    def __init__(self, client: Client) -> None:
        self._client = client

    async def _pages(self, call: Call[Any]) -> AsyncIterator[Any]:
        request: Any = call.request
        while True:
            response = await self._client._send(Call(call.service, call.method, request, _itself))
            for item in call.answer(response):
                yield item
            if not response.next_page_token:
                return
            request.page_token = response.next_page_token


class AsyncSchedules(_AsyncPart):
    create = _async(_create_schedule)
    get = _async(_get_schedule)
    update = _async(_update_schedule)
    ensure = _async(_ensure_schedule)
    pause = _async(_pause_schedule)
    resume = _async(_resume_schedule)
    run = _async(_run_schedule)
    delete = _async(_delete_schedule)
    preview = _async(_preview_trigger)
    upcoming = _async(_list_upcoming)
    backfill = _async(_backfill_schedule)

    def list(
        self, filter: str = "", *, show_deleted: bool = False, full: bool = False
    ) -> AsyncIterator[schedule_pb2.Schedule]:
        """All that match, page by page."""
        return self._pages(_schedule_pages(self._client.tenant, filter, show_deleted, full))


class AsyncRuns(_AsyncPart):
    create = _async(_create_run)
    create_batch = _async(_create_batch)
    get = _async(_get_run)
    cancel = _async(_cancel_run)
    attempts = _async(_list_attempts)

    def list(self, filter: str = "", *, full: bool = False) -> AsyncIterator[run_pb2.Run]:
        """All that match, newest first."""
        return self._pages(_run_pages(self._client.tenant, filter, full))

    async def wait(self, run: str, timeout_s: float | None = None) -> run_pb2.Run:
        """The run when it has ended, or as it is after the timeout (None: however long it takes)."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = WAIT_S_MAX if deadline_s is None else deadline_s - time.monotonic()
            found = await self._client._send(_wait_once(self._client.tenant, run, left_s))
            if found.state in _TERMINAL or (deadline_s is not None and time.monotonic() >= deadline_s):
                return found

    async def watch(self, filter: str = "") -> AsyncIterator[run_pb2.Run]:
        """Each change of the runs that match, until it is closed; begins with the newest as they are."""
        request = run_service_pb2.WatchRunsRequest(parent=f"tenants/{self._client.tenant}", filter=filter)
        async for response in self._client._stream("runs", "WatchRuns", request):
            for run in response.runs:
                yield run


class AsyncDeadLetters(_AsyncPart):
    get = _async(_get_dead_letter)
    replay = _async(_replay_dead_letter)

    def list(self, filter: str = "") -> AsyncIterator[run_pb2.DeadLetter]:
        """All that match, newest first."""
        return self._pages(_dead_letter_pages(self._client.tenant, filter))


class AsyncCalendars(_AsyncPart):
    create = _async(_create_calendar)
    get = _async(_get_calendar)
    update = _async(_update_calendar)
    import_ics = _async(_import_calendar)
    rollback = _async(_rollback_calendar)
    delete = _async(_delete_calendar)

    def list(self) -> AsyncIterator[calendar_pb2.Calendar]:
        return self._pages(_calendar_pages(self._client.tenant))

    def dependents(self, calendar: str) -> AsyncIterator[str]:
        """The names of the schedules that name it."""
        return self._pages(_dependent_pages(self._client.tenant, calendar))


class AsyncOperations(_AsyncPart):
    get = _async(_get_operation)
    wait = _async(_wait_operation)
    cancel = _async(_cancel_operation)

    def list(self) -> AsyncIterator[operations_pb2.Operation]:
        """The tenant's, newest first."""
        return self._pages(_operation_pages(self._client.tenant))


class AsyncCluster(_AsyncPart):
    shards = _async(_list_shards)
    timers = _async(_list_timers)
    drain = _async(_drain_timer)
    health = _async(_health)
    resume = _async(_resume_cluster)


class Client:
    """Used inside one event loop. `addresses`: one or more coordinators; `metadata` goes with every call."""

    def __init__(
        self,
        addresses: str | Sequence[str] = DEFAULT_ADDRESS,
        *,
        tenant: str = "default",
        credentials: grpc.ChannelCredentials | None = None,
        metadata: Sequence[tuple[str, str]] = (),
        timeout_s: float = TIMEOUT_S_DEFAULT,
        retry_s_max: float = RETRY_S_MAX_DEFAULT,
    ) -> None:
        self._settings = _settings(addresses, tenant, credentials, metadata, timeout_s, retry_s_max)
        self._stubs: dict[str, Stubs] = {}
        self._channels: list[grpc.aio.Channel] = []
        self._turn = random.randrange(len(self._settings.addresses))
        self.schedules = AsyncSchedules(self)
        self.runs = AsyncRuns(self)
        self.dead_letters = AsyncDeadLetters(self)
        self.calendars = AsyncCalendars(self)
        self.operations = AsyncOperations(self)
        self.cluster = AsyncCluster(self)

    @property
    def tenant(self) -> str:
        return self._settings.tenant

    async def close(self) -> None:
        """Ends every call that is under way."""
        for channel in self._channels:
            await channel.close()
        self._channels.clear()
        self._stubs.clear()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _current(self) -> Stubs:
        address = self._settings.addresses[self._turn % len(self._settings.addresses)]
        stubs = self._stubs.get(address)
        if stubs is None:
            if self._settings.credentials is None:
                channel = grpc.aio.insecure_channel(address, options=OPTIONS)
            else:
                channel = grpc.aio.secure_channel(address, self._settings.credentials, options=OPTIONS)
            self._channels.append(channel)
            stubs = self._stubs[address] = {name: stub(channel) for name, stub in _STUBS.items()}
        return stubs

    async def _send(self, call: Call[R]) -> R:
        retry = _Retry(self._settings)
        while True:
            method = getattr(self._current()[call.service], call.method)
            try:
                timeout_s = call.timeout_s or self._settings.timeout_s
                return call.answer(
                    await method(call.request, timeout=timeout_s, metadata=self._settings.metadata)
                )
            except grpc.aio.AioRpcError as error:
                found = _translated(error)
                delay_s = None if found is None else retry.delay_s(found)
                if found is None:
                    raise
                if delay_s is None:
                    raise found from error
                self._turn += 1
            await asyncio.sleep(delay_s)

    async def _stream(self, service: str, method: str, request: Message) -> AsyncIterator[Any]:
        """Messages of a stream that is opened again where it breaks."""
        retry = _Retry(self._settings)
        while True:
            try:
                async for message in getattr(self._current()[service], method)(
                    request, metadata=self._settings.metadata
                ):
                    retry = _Retry(self._settings)
                    yield message
                return
            except grpc.aio.AioRpcError as error:
                found = _translated(error)
                delay_s = None if found is None else retry.delay_s(found)
                if found is None:
                    raise
                if delay_s is None:
                    raise found from error
                self._turn += 1
            await asyncio.sleep(delay_s)


# --- The blocking client
# -------------------------------------------------------------------------------------


class _BlockingPart:
    def __init__(self, client: BlockingClient) -> None:
        self._client = client

    def _pages(self, call: Call[Any]) -> Iterator[Any]:
        request: Any = call.request
        while True:
            response = self._client._send(Call(call.service, call.method, request, _itself))
            yield from call.answer(response)
            if not response.next_page_token:
                return
            request.page_token = response.next_page_token


class BlockingSchedules(_BlockingPart):
    create = _blocking(_create_schedule)
    get = _blocking(_get_schedule)
    update = _blocking(_update_schedule)
    ensure = _blocking(_ensure_schedule)
    pause = _blocking(_pause_schedule)
    resume = _blocking(_resume_schedule)
    run = _blocking(_run_schedule)
    delete = _blocking(_delete_schedule)
    preview = _blocking(_preview_trigger)
    upcoming = _blocking(_list_upcoming)
    backfill = _blocking(_backfill_schedule)

    def list(
        self, filter: str = "", *, show_deleted: bool = False, full: bool = False
    ) -> Iterator[schedule_pb2.Schedule]:
        """All that match, page by page."""
        return self._pages(_schedule_pages(self._client.tenant, filter, show_deleted, full))


class BlockingRuns(_BlockingPart):
    create = _blocking(_create_run)
    create_batch = _blocking(_create_batch)
    get = _blocking(_get_run)
    cancel = _blocking(_cancel_run)
    attempts = _blocking(_list_attempts)

    def list(self, filter: str = "", *, full: bool = False) -> Iterator[run_pb2.Run]:
        """All that match, newest first."""
        return self._pages(_run_pages(self._client.tenant, filter, full))

    def wait(self, run: str, timeout_s: float | None = None) -> run_pb2.Run:
        """The run when it has ended, or as it is after the timeout (None: however long it takes)."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = WAIT_S_MAX if deadline_s is None else deadline_s - time.monotonic()
            found = self._client._send(_wait_once(self._client.tenant, run, left_s))
            if found.state in _TERMINAL or (deadline_s is not None and time.monotonic() >= deadline_s):
                return found

    def watch(self, filter: str = "") -> Iterator[run_pb2.Run]:
        """Each change of the runs that match, until it is closed; begins with the newest as they are."""
        request = run_service_pb2.WatchRunsRequest(parent=f"tenants/{self._client.tenant}", filter=filter)
        for response in self._client._stream("runs", "WatchRuns", request):
            yield from response.runs


class BlockingDeadLetters(_BlockingPart):
    get = _blocking(_get_dead_letter)
    replay = _blocking(_replay_dead_letter)

    def list(self, filter: str = "") -> Iterator[run_pb2.DeadLetter]:
        """All that match, newest first."""
        return self._pages(_dead_letter_pages(self._client.tenant, filter))


class BlockingCalendars(_BlockingPart):
    create = _blocking(_create_calendar)
    get = _blocking(_get_calendar)
    update = _blocking(_update_calendar)
    import_ics = _blocking(_import_calendar)
    rollback = _blocking(_rollback_calendar)
    delete = _blocking(_delete_calendar)

    def list(self) -> Iterator[calendar_pb2.Calendar]:
        return self._pages(_calendar_pages(self._client.tenant))

    def dependents(self, calendar: str) -> Iterator[str]:
        """The names of the schedules that name it."""
        return self._pages(_dependent_pages(self._client.tenant, calendar))


class BlockingOperations(_BlockingPart):
    get = _blocking(_get_operation)
    wait = _blocking(_wait_operation)
    cancel = _blocking(_cancel_operation)

    def list(self) -> Iterator[operations_pb2.Operation]:
        """The tenant's, newest first."""
        return self._pages(_operation_pages(self._client.tenant))


class BlockingCluster(_BlockingPart):
    shards = _blocking(_list_shards)
    timers = _blocking(_list_timers)
    drain = _blocking(_drain_timer)
    health = _blocking(_health)
    resume = _blocking(_resume_cluster)


class BlockingClient:
    """Thread-safe, and fork-safe: a child that was forked opens channels of its own, and leaves its
    parent's alone.
    """

    def __init__(
        self,
        addresses: str | Sequence[str] = DEFAULT_ADDRESS,
        *,
        tenant: str = "default",
        credentials: grpc.ChannelCredentials | None = None,
        metadata: Sequence[tuple[str, str]] = (),
        timeout_s: float = TIMEOUT_S_DEFAULT,
        retry_s_max: float = RETRY_S_MAX_DEFAULT,
    ) -> None:
        self._settings = _settings(addresses, tenant, credentials, metadata, timeout_s, retry_s_max)
        self._forget()
        self._parents: tuple[object, ...] = ()
        self._turn = random.randrange(len(self._settings.addresses))
        self.schedules = BlockingSchedules(self)
        self.runs = BlockingRuns(self)
        self.dead_letters = BlockingDeadLetters(self)
        self.calendars = BlockingCalendars(self)
        self.operations = BlockingOperations(self)
        self.cluster = BlockingCluster(self)

    def _forget(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._stubs: dict[str, Stubs] = {}
        self._channels: list[grpc.Channel] = []

    @property
    def tenant(self) -> str:
        return self._settings.tenant

    def close(self) -> None:
        """Ends every call that is under way."""
        if self._pid == os.getpid():
            for channel in self._channels:
                channel.close()
        self._forget()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _current(self) -> Stubs:
        if self._pid != os.getpid():
            # The parent's lock may have been held by a thread that is not here, its channels have no
            # threads here.
            self._parents = (self._stubs, self._channels)
            self._forget()
        address = self._settings.addresses[self._turn % len(self._settings.addresses)]
        with self._lock:
            stubs = self._stubs.get(address)
            if stubs is None:
                # Its own connections: the global pool of connections is the parent's.
                options = (*OPTIONS, ("grpc.use_local_subchannel_pool", 1))
                if self._settings.credentials is None:
                    channel = grpc.insecure_channel(address, options=options)
                else:
                    channel = grpc.secure_channel(address, self._settings.credentials, options=options)
                self._channels.append(channel)
                stubs = self._stubs[address] = {name: stub(channel) for name, stub in _STUBS.items()}
            return stubs

    def _send(self, call: Call[R]) -> R:
        retry = _Retry(self._settings)
        while True:
            method = getattr(self._current()[call.service], call.method)
            try:
                timeout_s = call.timeout_s or self._settings.timeout_s
                return call.answer(method(call.request, timeout=timeout_s, metadata=self._settings.metadata))
            except grpc.RpcError as error:
                found = _translated(error)
                delay_s = None if found is None else retry.delay_s(found)
                if found is None:
                    raise
                if delay_s is None:
                    raise found from error
                self._turn += 1
            time.sleep(delay_s)

    def _stream(self, service: str, method: str, request: Message) -> Iterator[Any]:
        """Messages of a stream that is opened again where it breaks."""
        retry = _Retry(self._settings)
        while True:
            call = getattr(self._current()[service], method)(request, metadata=self._settings.metadata)
            try:
                for message in call:
                    retry = _Retry(self._settings)
                    yield message
                return
            except grpc.RpcError as error:
                found = _translated(error)
                delay_s = None if found is None else retry.delay_s(found)
                if found is None:
                    raise
                if delay_s is None:
                    raise found from error
                self._turn += 1
            finally:
                call.cancel()
            time.sleep(delay_s)


__all__ = [
    "BlockingClient",
    "Client",
    "duration_message",
    "make_run",
    "make_spec",
    "make_template",
    "payload_message",
    "timestamp_message",
]
