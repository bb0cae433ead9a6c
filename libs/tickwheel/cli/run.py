"""`tickwheel run …`."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from tickwheel.cli import EXIT_FAILED, output
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
from tickwheel.client import DEFAULT_ADDRESS
from tickwheel.v1 import run_pb2

app = typer.Typer(help="Create, look at, cancel and watch runs.", no_args_is_help=True, add_completion=False)

Name = Annotated[str, typer.Argument(help="The run's id, or its full name.")]


@app.command("create")
def create(
    kind: Annotated[str, typer.Option("--kind", help="The handler's name, such as echo.")],
    payload: Annotated[str | None, typer.Option("--payload", help="JSON, or any text.")] = None,
    due: Annotated[
        str | None, typer.Option("--due", help="An instant, or such as 10m; now if left out.")
    ] = None,
    queue: Annotated[str, typer.Option("--queue")] = "",
    priority: Annotated[int, typer.Option("--priority", min=0, max=9)] = 0,
    attempts: Annotated[
        int | None, typer.Option("--attempts", min=1, help="How many, the first included.")
    ] = None,
    label: Annotated[list[str] | None, typer.Option("--label", help="KEY=VALUE; may be repeated.")] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Until it has ended; exit code 1 if not well.")
    ] = False,
    request_id: RequestId = "",
    address: Address = DEFAULT_ADDRESS,
    tenant: Tenant = DEFAULT_TENANT,
    as_json: AsJson = False,
) -> None:
    """Do something, now or later."""
    with connect(address, tenant) as client:
        made = client.runs.create(
            kind,
            payload=parse_payload(payload),
            due=None if due is None else parse_instant(due, "due"),
            queue=queue,
            priority=priority,
            attempt_count_max=attempts,
            labels=parse_labels(label),
            request_id=request_id,
        )
        if wait:
            made = client.runs.wait(made.name)
    show(made, as_json)
    if wait and made.state != run_pb2.Run.STATE_SUCCEEDED:
        sys.exit(EXIT_FAILED)


@app.command("get")
def get(
    name: Name,
    attempts: Annotated[bool, typer.Option("--attempts", help="With all of its attempts.")] = False,
    address: Address = DEFAULT_ADDRESS,
    tenant: Tenant = DEFAULT_TENANT,
    as_json: AsJson = False,
) -> None:
    """Show a run."""
    with connect(address, tenant) as client:
        found = client.runs.get(name)
        tried = client.runs.attempts(name) if attempts else []
    if as_json and attempts:
        output.print_json(
            {"run": output.as_dict(found), "attempts": [output.as_dict(each) for each in tried]}
        )
        return
    show(found, as_json)
    if tried:
        output.print_table(
            ("ATTEMPT", "STATE", "LEASED", "WORKER", "FENCE", "FAILURE"),
            (
                (
                    str(each.number),
                    output.state_text(run_pb2.Attempt.State.Name(each.state).removeprefix("STATE_")),
                    output.relative(each.lease_time),
                    each.worker,
                    str(each.fence),
                    each.failure.message,
                )
                for each in tried
            ),
            "",
        )


@app.command("list")
def list_runs(
    filter: Annotated[
        str, typer.Option("--filter", help='Such as: schedule = "nightly" AND state = RUNNING.')
    ] = "",
    limit: Annotated[int, typer.Option("--limit", min=1, max=100_000)] = 50,
    address: Address = DEFAULT_ADDRESS,
    tenant: Tenant = DEFAULT_TENANT,
    as_json: AsJson = False,
) -> None:
    """List runs, newest first."""
    found = []
    with connect(address, tenant) as client:
        for run in client.runs.list(filter):
            found.append(run)
            if len(found) == limit:
                break
    if as_json:
        output.print_json(found)
        return
    output.print_table(COLUMNS, (row(run) for run in found), "there is none")


@app.command("cancel")
def cancel(
    name: Name,
    reason: Annotated[str, typer.Option("--reason")] = "",
    grace: Annotated[
        str | None, typer.Option("--grace", help="How long running work may take to stop, such as 10s.")
    ] = None,
    address: Address = DEFAULT_ADDRESS,
    tenant: Tenant = DEFAULT_TENANT,
    as_json: AsJson = False,
) -> None:
    """Cancel a run: what waits ends at once, what runs is told to stop."""
    with connect(address, tenant) as client:
        after = client.runs.cancel(
            name, reason, grace=None if grace is None else parse_duration(grace, "grace")
        )
    show(after, as_json)


@app.command("watch")
def watch(
    filter: Annotated[str, typer.Option("--filter", help='Such as: schedule = "nightly".')] = "",
    address: Address = DEFAULT_ADDRESS,
    tenant: Tenant = DEFAULT_TENANT,
    as_json: AsJson = False,
) -> None:
    """Show each change of the runs that match, until Ctrl-C."""
    with connect(address, tenant) as client:
        try:
            for run in client.runs.watch(filter):
                if as_json:
                    output.print_json_line(run)
                else:
                    _, state, what, lag, _, worker = row(run)
                    output.console.print(output.short(run.name)[-12:], state, what, lag, worker, style="")
        except KeyboardInterrupt:
            return


COLUMNS = ("RUN", "STATE", "WHAT", "LAG", "DUE", "WORKER")


def row(run: run_pb2.Run) -> tuple[Any, ...]:
    """A run in a line, as COLUMNS says."""
    what = f"{output.short(run.schedule)} ({run.template.kind})" if run.schedule else run.template.kind
    if run.last_failure.message and run.state != run_pb2.Run.STATE_SUCCEEDED:
        what += f": {run.last_failure.message[:60]}"
    return (
        output.short(run.name),
        output.state_text(output.run_state(run)),
        what,
        output.duration_text(run.due_lag_duration) if run.HasField("due_lag_duration") else "",
        output.relative(run.due_time),
        run.worker,
    )


def show(run: run_pb2.Run, as_json: bool) -> None:
    if as_json:
        output.print_json(run)
        return
    output.print_fields(
        (
            ("run", run.name),
            ("state", output.state_text(output.run_state(run))),
            ("kind", run.template.kind),
            ("schedule", run.schedule),
            ("cause", run_pb2.Run.Cause.Name(run.cause).removeprefix("CAUSE_")),
            ("due", output.instant_text(run.due_time)),
            ("leased", output.instant_text(run.lease_time)),
            ("lag", output.duration_text(run.due_lag_duration) if run.HasField("due_lag_duration") else ""),
            ("ended", output.instant_text(run.end_time)),
            ("attempts", str(run.attempt_count) if run.attempt_count else ""),
            ("worker", run.worker),
            ("result", run.result.data.decode(errors="replace")[:2_000]),
            (
                "failure",
                f"{run.last_failure.type}: {run.last_failure.message}" if run.last_failure.type else "",
            ),
            ("cancelled", run.cancel_reason),
            ("replays", run.replayed_from),
        )
    )
