"""`tickwheel calendar …`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tickwheel.cli import output
from tickwheel.cli.options import DEFAULT_TENANT, Address, AsJson, Tenant, connect
from tickwheel.client import DEFAULT_ADDRESS
from tickwheel.errors import FieldInvalid, NotFound
from tickwheel.v1 import calendar_pb2

app = typer.Typer(
    help="Dates that schedules share: import, look at, delete.", no_args_is_help=True, add_completion=False
)

Name = Annotated[str, typer.Argument(help="The calendar's id, or its full name.")]


@app.command("import")
def import_ics(
    name: Name,
    file: Annotated[Path, typer.Argument(help="An iCalendar (.ics).")],
    merge: Annotated[bool, typer.Option("--merge", help="Keep what it names already.")] = False,
    address: Address = DEFAULT_ADDRESS,
    tenant: Tenant = DEFAULT_TENANT,
    as_json: AsJson = False,
) -> None:
    """Take the dates of an iCalendar's events; the calendar is made where there is none."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise FieldInvalid("file", f"{file} cannot be read: {error.strerror}") from error
    with connect(address, tenant) as client:
        try:
            etag = client.calendars.get(name).etag
        except NotFound:
            etag = ""
        made = client.calendars.import_ics(name, data, merge=merge, etag=etag)
    _show(made, as_json)


@app.command("get")
def get(
    name: Name,
    revision: Annotated[int, typer.Option("--revision", min=0, help="An earlier one; 0: the current.")] = 0,
    address: Address = DEFAULT_ADDRESS,
    tenant: Tenant = DEFAULT_TENANT,
    as_json: AsJson = False,
) -> None:
    """Show a calendar."""
    with connect(address, tenant) as client:
        _show(client.calendars.get(name, revision=revision), as_json)


@app.command("list")
def list_calendars(
    address: Address = DEFAULT_ADDRESS, tenant: Tenant = DEFAULT_TENANT, as_json: AsJson = False
) -> None:
    """List calendars, oldest first."""
    with connect(address, tenant) as client:
        found = list(client.calendars.list())
    if as_json:
        output.print_json(found)
        return
    output.print_table(
        ("NAME", "TITLE", "DATES", "REVISION", "CHANGED"),
        (
            (
                output.short(each.name),
                each.display_name,
                str(len(each.effective_dates)),
                str(each.revision),
                output.relative(each.update_time),
            )
            for each in found
        ),
        "there is none; tickwheel calendar import --help says how to make one",
    )


@app.command("dependents")
def dependents(
    name: Name, address: Address = DEFAULT_ADDRESS, tenant: Tenant = DEFAULT_TENANT, as_json: AsJson = False
) -> None:
    """List the schedules that name a calendar."""
    with connect(address, tenant) as client:
        found = list(client.calendars.dependents(name))
    if as_json:
        output.print_json(found)
        return
    for schedule in found:
        typer.echo(output.short(schedule))


@app.command("delete")
def delete(
    name: Name, address: Address = DEFAULT_ADDRESS, tenant: Tenant = DEFAULT_TENANT, as_json: AsJson = False
) -> None:
    """Delete a calendar that no schedule names."""
    with connect(address, tenant) as client:
        gone = client.calendars.delete(name, etag=client.calendars.get(name).etag)
    if as_json:
        output.print_json(gone)


def _show(calendar: calendar_pb2.Calendar, as_json: bool) -> None:
    if as_json:
        output.print_json(calendar)
        return
    dates = list(calendar.effective_dates)
    shown = ", ".join(dates[:8]) + (f" and {len(dates) - 8} more" if len(dates) > 8 else "")
    fields = [
        ("name", calendar.name),
        ("title", calendar.display_name),
        ("dates", shown),
        ("rules", str(len(calendar.rules))),
        ("worked out", f"up to {calendar.effective_year}"),
        ("revision", f"{calendar.revision}  (etag {calendar.etag})"),
        ("recomputes", calendar.recompute_operation),
    ]
    output.print_fields([field for field in fields if field[1]])
