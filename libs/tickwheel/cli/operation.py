"""`tickwheel operation …`."""

from __future__ import annotations

from typing import Annotated

import typer
from google.longrunning import operations_pb2

from tickwheel.cli import output
from tickwheel.cli.options import DEFAULT_TENANT, Address, AsJson, Tenant, connect
from tickwheel.client import DEFAULT_ADDRESS
from tickwheel.v1 import operation_pb2

app = typer.Typer(help="How far background work is; stop it.", no_args_is_help=True, add_completion=False)

Name = Annotated[str, typer.Argument(help="operations/ID, as it was answered.")]


@app.command("get")
def get(
    name: Name, address: Address = DEFAULT_ADDRESS, tenant: Tenant = DEFAULT_TENANT, as_json: AsJson = False
) -> None:
    """Show how far an operation is."""
    with connect(address, tenant) as client:
        _show(client.operations.get(name), as_json)


@app.command("wait")
def wait(
    name: Name,
    timeout: Annotated[float, typer.Option("--timeout", min=0.0, max=300.0, help="Seconds.")] = 60.0,
    address: Address = DEFAULT_ADDRESS,
    tenant: Tenant = DEFAULT_TENANT,
    as_json: AsJson = False,
) -> None:
    """Wait until an operation has ended; exits with 1 where it has not, or has failed."""
    with connect(address, tenant) as client:
        found = client.operations.wait(name, timeout_s=timeout)
    _show(found, as_json)
    if not found.done or found.HasField("error"):
        raise typer.Exit(1)


@app.command("cancel")
def cancel(name: Name, address: Address = DEFAULT_ADDRESS, tenant: Tenant = DEFAULT_TENANT) -> None:
    """Stop an operation; what it did stays done."""
    with connect(address, tenant) as client:
        client.operations.cancel(name)


@app.command("list")
def list_operations(
    limit: Annotated[int, typer.Option("--limit", min=1, max=10_000)] = 50,
    address: Address = DEFAULT_ADDRESS,
    tenant: Tenant = DEFAULT_TENANT,
    as_json: AsJson = False,
) -> None:
    """List operations, newest first."""
    found: list[operation_pb2.OperationMetadata] = []
    names: list[str] = []
    with connect(address, tenant) as client:
        for each in client.operations.list():
            names.append(each.name)
            found.append(_metadata(each))
            if len(found) == limit:
                break
    if as_json:
        rows = zip(names, found, strict=True)
        output.print_json([{"name": name, **output.as_dict(each)} for name, each in rows])
        return
    output.print_table(
        ("NAME", "KIND", "STATE", "OF", "DONE", "LEFT OUT", "BEGAN"),
        (
            (
                name,
                _kind(each),
                output.state_text(_state(each)),
                output.short(each.resource),
                str(each.changed_count),
                str(each.skipped_count),
                output.relative(each.create_time),
            )
            for name, each in zip(names, found, strict=True)
        ),
        "there is none",
    )


def _show(operation: operations_pb2.Operation, as_json: bool) -> None:
    found = _metadata(operation)
    if as_json:
        output.print_json({"name": operation.name, "done": operation.done, **output.as_dict(found)})
        return
    fields = [
        ("name", operation.name),
        ("kind", _kind(found)),
        ("state", output.state_text(_state(found))),
        ("of", found.resource),
        ("steps", f"{found.step_done_count} of {found.step_count}"),
        ("looked at", str(found.examined_count)),
        ("changed", str(found.changed_count)),
        ("left out", str(found.skipped_count)),
        ("last error", found.last_error),
    ]
    output.print_fields([field for field in fields if field[1]])


def _metadata(operation: operations_pb2.Operation) -> operation_pb2.OperationMetadata:
    metadata = operation_pb2.OperationMetadata()
    operation.metadata.Unpack(metadata)
    return metadata


def _kind(metadata: operation_pb2.OperationMetadata) -> str:
    return operation_pb2.OperationMetadata.Kind.Name(metadata.kind).removeprefix("KIND_")


def _state(metadata: operation_pb2.OperationMetadata) -> str:
    return operation_pb2.OperationMetadata.State.Name(metadata.state).removeprefix("STATE_")
