"""`tickwheel schedule …`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tickwheel.cli import output
from tickwheel.cli.options import (
    DEFAULT_TENANT,
    Address,
    AsJson,
    RequestId,
    Tenant,
    connect,
    parse_duration,
    parse_instant,
    parse_labels,
    parse_payload,
)
from tickwheel.client import DEFAULT_ADDRESS, calendar_path, make_spec, payload_message
from tickwheel.errors import FieldInvalid
from tickwheel.v1 import schedule_pb2

app = typer.Typer(
    help="Create, look at, change, pause and delete schedules.", no_args_is_help=True, add_completion=False
)

Name = Annotated[str, typer.Argument(help="The schedule's id, or its full name.")]
Cron = Annotated[str, typer.Option("--cron", help="A cron expression, such as '0 9 * * MON-FRI'.")]
Seconds = Annotated[bool, typer.Option("--seconds", help="The cron expression has seconds first.")]
Every = Annotated[str | None, typer.Option("--every", help="A duration, such as 15s or 1h30m.")]
At = Annotated[list[str] | None, typer.Option("--at", help="An instant, RFC 3339; may be repeated.")]
Rrule = Annotated[str, typer.Option("--rrule", help="RFC 5545 lines.")]
TimeZone = Annotated[str, typer.Option("--time-zone", help="An IANA name.")]
Queue = Annotated[str, typer.Option("--queue")]
PayloadText = Annotated[str | None, typer.Option("--payload", help="JSON, or any text.")]
Priority = Annotated[int, typer.Option("--priority", min=0, max=9)]
Jitter = Annotated[str | None, typer.Option("--jitter", help="Later by less than this.")]
Overlap = Annotated[
    str, typer.Option("--overlap", help="SKIP, BUFFER_ONE, BUFFER_ALL, CANCEL_OTHER or ALLOW_ALL.")
]
Misfire = Annotated[str, typer.Option("--misfire", help="FIRE_ONCE, FIRE_ALL or SKIP.")]
Attempts = Annotated[int | None, typer.Option("--attempts", min=1, help="How many, the first included.")]
Labels = Annotated[list[str] | None, typer.Option("--label", help="KEY=VALUE; may be repeated.")]
Etag = Annotated[str, typer.Option("--etag", help="Only if it is still this one.")]


@app.command("create")
def create(
    schedule_id: Annotated[str, typer.Argument(help="Its id: a-z, 0-9 and '-'.")],
    kind: Annotated[str, typer.Option("--kind", help="The handler's name.")],
    cron: Cron = "",
    seconds: Seconds = False,
    every: Every = None,
    at: At = None,
    rrule: Rrule = "",
    time_zone: TimeZone = "",
    queue: Queue = "",
    payload: PayloadText = None,
    priority: Priority = 0,
    jitter: Jitter = None,
    overlap: Overlap = "",
    misfire: Misfire = "",
    attempts: Attempts = None,
    label: Labels = None,
    calendar: Annotated[
        list[str] | None, typer.Option("--calendar", help="Not on its dates; may be repeated.")
    ] = None,
    shift: Annotated[
        str, typer.Option("--shift", help="From weekends and those dates: NEXT or PREVIOUS working day.")
    ] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be.")] = False,
    request_id: RequestId = "",
    address: Address = DEFAULT_ADDRESS,
    tenant: Tenant = DEFAULT_TENANT,
    as_json: AsJson = False,
) -> None:
    """Create a schedule."""
    spec = _spec(
        kind,
        cron,
        seconds,
        every,
        at,
        rrule,
        time_zone,
        queue,
        payload,
        priority,
        jitter,
        overlap,
        misfire,
        attempts,
    )
    if calendar:
        spec.exclusions.add(calendars=[calendar_path(tenant, each) for each in calendar])
    if shift:
        wanted = f"CALENDAR_SHIFT_{shift.upper()}_WORKING_DAY"
        if wanted not in schedule_pb2.CalendarShift.keys():  # noqa: SIM118
            raise FieldInvalid("shift", f"{shift} is neither NEXT nor PREVIOUS")
        spec.triggers[0].calendar_shift = schedule_pb2.CalendarShift.Value(wanted)
    with connect(address, tenant) as client:
        made = client.schedules.create(
            schedule_id, spec, labels=parse_labels(label), request_id=request_id, validate_only=dry_run
        )
    _show(made, as_json)


@app.command("get")
def get(
    name: Name, address: Address = DEFAULT_ADDRESS, tenant: Tenant = DEFAULT_TENANT, as_json: AsJson = False
) -> None:
    """Show a schedule."""
    with connect(address, tenant) as client:
        _show(client.schedules.get(name), as_json)


@app.command("upcoming")
def upcoming(
    name: Name,
    count: Annotated[int, typer.Option("--count", min=1, max=1_000)] = 10,
    after: Annotated[str | None, typer.Option("--after", help="Only later ones, RFC 3339.")] = None,
    until: Annotated[str | None, typer.Option("--until", help="Only earlier ones, RFC 3339.")] = None,
    excluded: Annotated[
        bool, typer.Option("--excluded", help="Also those that a date or a calendar leaves out.")
    ] = False,
    address: Address = DEFAULT_ADDRESS,
    tenant: Tenant = DEFAULT_TENANT,
    as_json: AsJson = False,
) -> None:
    """Show when a schedule will be due, what clock changes do to it, and what is left out."""
    with connect(address, tenant) as client:
        found = client.schedules.upcoming(
            name,
            count=count,
            after=None if after is None else parse_instant(after, "after"),
            until=None if until is None else parse_instant(until, "until"),
            show_excluded=excluded,
        )
    if as_json:
        output.print_json(found)
        return
    typer.echo(found.description)
    output.print_table(
        ("TIME", "OFFSET", "DUE", "NOTE"),
        (
            (
                each.schedule_time.ToJsonString(),
                each.utc_offset,
                each.due_time.ToJsonString() if each.HasField("due_time") else "",
                each.exclusion or each.adjustment,
            )
            for each in found.occurrences
        ),
        "there is none",
    )
    for warning in found.warnings:
        typer.echo(f"warning: {warning}")


@app.command("backfill")
def backfill(
    name: Name,
    start: Annotated[str, typer.Option("--from", help="The first instant, RFC 3339.")],
    end: Annotated[str, typer.Option("--until", help="The interval ends before it, RFC 3339.")],
    concurrency: Annotated[int, typer.Option("--concurrency", min=1, max=1_000, help="Runs at once.")] = 1,
    request_id: RequestId = "",
    address: Address = DEFAULT_ADDRESS,
    tenant: Tenant = DEFAULT_TENANT,
    as_json: AsJson = False,
) -> None:
    """Run what an interval of the past should have run and did not; prints the operation that does it."""
    with connect(address, tenant) as client:
        begun = client.schedules.backfill(
            name,
            parse_instant(start, "from"),
            parse_instant(end, "until"),
            concurrency_max=concurrency,
            request_id=request_id,
        )
    if as_json:
        output.print_json(begun)
    else:
        typer.echo(begun.name)


@app.command("list")
def list_schedules(
    filter: Annotated[
        str, typer.Option("--filter", help='Such as: state = PAUSED AND labels.team = "x".')
    ] = "",
    deleted: Annotated[bool, typer.Option("--deleted", help="Also those that are deleted.")] = False,
    limit: Annotated[int, typer.Option("--limit", min=1, max=100_000)] = 100,
    address: Address = DEFAULT_ADDRESS,
    tenant: Tenant = DEFAULT_TENANT,
    as_json: AsJson = False,
) -> None:
    """List schedules, oldest first."""
    with connect(address, tenant) as client:
        found = []
        for schedule in client.schedules.list(filter, show_deleted=deleted):
            found.append(schedule)
            if len(found) == limit:
                break
    if as_json:
        output.print_json(found)
        return
    output.print_table(
        ("NAME", "STATE", "TRIGGER", "KIND", "NEXT", "LAST"),
        (
            (
                output.short(schedule.name),
                output.state_text(output.schedule_state(schedule)),
                ", ".join(output.trigger_text(each) for each in schedule.spec.triggers),
                schedule.spec.template.kind,
                output.relative(schedule.status.next_occurrences[0].due_time)
                if schedule.status.next_occurrences
                else "",
                output.relative(schedule.status.last_schedule_time),
            )
            for schedule in found
        ),
        "there is none; tickwheel schedule create --help says how to make one",
    )


@app.command("update")
def update(
    name: Name,
    kind: Annotated[str, typer.Option("--kind", help="The handler's name.")] = "",
    cron: Cron = "",
    seconds: Seconds = False,
    every: Every = None,
    at: At = None,
    rrule: Rrule = "",
    time_zone: TimeZone = "",
    queue: Queue = "",
    payload: PayloadText = None,
    priority: Annotated[int | None, typer.Option("--priority", min=0, max=9)] = None,
    jitter: Jitter = None,
    overlap: Overlap = "",
    misfire: Misfire = "",
    attempts: Attempts = None,
    label: Labels = None,
    etag: Etag = "",
    address: Address = DEFAULT_ADDRESS,
    tenant: Tenant = DEFAULT_TENANT,
    as_json: AsJson = False,
) -> None:
    """Change what you name, and leave the rest; a paused schedule stays paused."""
    with connect(address, tenant) as client:
        schedule = client.schedules.get(name)
        paths: list[str] = []
        spec = schedule.spec
        if cron or every or at or rrule or time_zone:
            _change_trigger(spec, cron, seconds, every, at, rrule, time_zone)
            paths.append("spec.triggers")
        for field, value in (("kind", kind), ("queue", queue), ("priority", priority)):
            if value or value == 0:
                setattr(spec.template, field, value)
                paths.append(f"spec.template.{field}")
        if payload is not None:
            spec.template.payload.CopyFrom(
                payload_message(parse_payload(payload)) or type(spec.template.payload)()
            )
            paths.append("spec.template.payload")
        if attempts is not None:
            spec.template.retry.attempt_count_max = attempts
            paths.append("spec.template.retry")
        if jitter is not None:
            spec.jitter_duration.FromTimedelta(parse_duration(jitter, "jitter"))
            paths.append("spec.jitter_duration")
        if overlap or misfire:
            named = make_spec("x", cron="* * * * *", overlap=overlap, misfire=misfire)
            if overlap:
                spec.overlap.policy = named.overlap.policy
                paths.append("spec.overlap")
            if misfire:
                spec.misfire.policy = named.misfire.policy
                paths.append("spec.misfire")
        if label is not None:
            schedule.labels.update(parse_labels(label))
            paths.append("labels")
        if not paths:
            raise FieldInvalid("options", "nothing to change: name what is to be different")
        # Whoever changed it since we read it is not overwritten.
        schedule.etag = etag or schedule.etag
        _show(client.schedules.update(schedule, update_mask=paths), as_json)


@app.command("pause")
def pause(
    name: Name,
    reason: Annotated[str, typer.Option("--reason", help="For those who find it paused.")],
    until: Annotated[
        str | None, typer.Option("--until", help="Resumes by itself: an instant, or such as 2h.")
    ] = None,
    cancel_runs: Annotated[bool, typer.Option("--cancel-runs", help="Also the runs that live.")] = False,
    etag: Etag = "",
    address: Address = DEFAULT_ADDRESS,
    tenant: Tenant = DEFAULT_TENANT,
    as_json: AsJson = False,
) -> None:
    """Stop a schedule for a while."""
    resume = None if until is None else parse_instant(until, "until")
    with connect(address, tenant) as client:
        _show(
            client.schedules.pause(name, reason, resume_time=resume, cancel_live_runs=cancel_runs, etag=etag),
            as_json,
        )


@app.command("resume")
def resume(
    name: Name,
    run_missed: Annotated[
        bool, typer.Option("--run-missed", help="What was missed is judged by the misfire policy.")
    ] = False,
    etag: Etag = "",
    address: Address = DEFAULT_ADDRESS,
    tenant: Tenant = DEFAULT_TENANT,
    as_json: AsJson = False,
) -> None:
    """Let a paused schedule go on."""
    with connect(address, tenant) as client:
        _show(client.schedules.resume(name, run_missed=run_missed, etag=etag), as_json)


@app.command("run")
def run(
    name: Name,
    payload: PayloadText = None,
    ignore_overlap: Annotated[
        bool, typer.Option("--ignore-overlap", help="Also while another run of it lives.")
    ] = False,
    request_id: RequestId = "",
    address: Address = DEFAULT_ADDRESS,
    tenant: Tenant = DEFAULT_TENANT,
    as_json: AsJson = False,
) -> None:
    """Run a schedule's job now, beside its occurrences."""
    from tickwheel.cli.run import show

    with connect(address, tenant) as client:
        made = client.schedules.run(
            name, payload=parse_payload(payload), ignore_overlap=ignore_overlap, request_id=request_id
        )
    show(made, as_json)


@app.command("delete")
def delete(
    name: Name,
    etag: Etag = "",
    missing_ok: Annotated[bool, typer.Option("--missing-ok", help="No error when there is none.")] = False,
    address: Address = DEFAULT_ADDRESS,
    tenant: Tenant = DEFAULT_TENANT,
    as_json: AsJson = False,
) -> None:
    """Delete a schedule; its live runs go on to their end."""
    with connect(address, tenant) as client:
        gone = client.schedules.delete(name, etag=etag, allow_missing=missing_ok)
    if as_json:
        output.print_json(gone)
    else:
        output.console.print(f"{output.short(gone.name)} is deleted; runs that live go on to their end")


def _spec(
    kind: str,
    cron: str,
    seconds: bool,
    every: str | None,
    at: list[str] | None,
    rrule: str,
    time_zone: str,
    queue: str,
    payload: str | None,
    priority: int,
    jitter: str | None,
    overlap: str,
    misfire: str,
    attempts: int | None,
) -> schedule_pb2.ScheduleSpec:
    if not (cron or every or at or rrule):
        raise FieldInvalid("options", "say when: --cron, --every, --at or --rrule")
    spec = make_spec(
        kind,
        cron=cron,
        every=None if every is None else parse_duration(every, "every"),
        at=[parse_instant(each, "at") for each in at] if at else None,
        rrule=rrule,
        time_zone=time_zone,
        queue=queue,
        payload=parse_payload(payload),
        priority=priority,
        jitter=None if jitter is None else parse_duration(jitter, "jitter"),
        attempt_count_max=attempts,
        overlap=overlap,
        misfire=misfire,
    )
    if seconds:
        spec.triggers[0].cron.dialect = schedule_pb2.CRON_DIALECT_UNIX_SECONDS
    return spec


def _change_trigger(
    spec: schedule_pb2.ScheduleSpec,
    cron: str,
    seconds: bool,
    every: str | None,
    at: list[str] | None,
    rrule: str,
    time_zone: str,
) -> None:
    if len(spec.triggers) != 1:
        raise FieldInvalid("spec.triggers", f"it has {len(spec.triggers)}: change them through the API")
    trigger = spec.triggers[0]
    if cron or every or at or rrule:
        zone = time_zone or trigger.time_zone
        made = _spec("x", cron, seconds, every, at, rrule, zone, "", None, 0, None, "", "", None)
        trigger.CopyFrom(made.triggers[0])
    else:
        trigger.time_zone = time_zone


def _show(schedule: schedule_pb2.Schedule, as_json: bool) -> None:
    if as_json:
        output.print_json(schedule)
        return
    status, spec = schedule.status, schedule.spec
    fields: list[tuple[str, Any]] = [
        ("name", schedule.name),
        ("state", output.state_text(output.schedule_state(schedule))),
        ("quarantine", status.quarantine_reason),
        ("paused", _pause_text(status)),
        ("trigger", ", ".join(output.trigger_text(each) for each in spec.triggers)),
        ("kind", spec.template.kind),
        ("queue", spec.template.queue or "default"),
        ("labels", ", ".join(f"{key}={value}" for key, value in sorted(schedule.labels.items()))),
        ("version", f"{schedule.version}  (etag {schedule.etag})"),
        ("last run", output.short(status.last_run)),
        ("last success", output.instant_text(status.last_success_time)),
    ]
    fields += [
        ("next" if index == 0 else "", _occurrence_text(occurrence))
        for index, occurrence in enumerate(status.next_occurrences[:3])
    ]
    output.print_fields(fields)


def _pause_text(status: schedule_pb2.ScheduleStatus) -> str:
    if not status.HasField("pause"):
        return ""
    text = f"{status.pause.reason}  (by {status.pause.principal}, {output.relative(status.pause.pause_time)})"
    if status.pause.HasField("resume_time"):
        text += f"; resumes {output.relative(status.pause.resume_time)}"
    return text


def _occurrence_text(occurrence: schedule_pb2.Occurrence) -> str:
    text = output.instant_text(occurrence.due_time)
    return f"{text}  {occurrence.adjustment}" if occurrence.adjustment else text
