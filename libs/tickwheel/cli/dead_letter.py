"""`tickwheel dead-letter …`."""

from __future__ import annotations

from typing import Annotated

import typer

from tickwheel.cli import output
from tickwheel.cli.options import DEFAULT_TENANT, Address, AsJson, RequestId, Tenant, connect, parse_payload
from tickwheel.client import DEFAULT_ADDRESS

app = typer.Typer(
    help="Look at runs that have no attempts left, and replay them.",
    no_args_is_help=True,
    add_completion=False,
)


@app.command("list")
def list_dead_letters(
    filter: Annotated[str, typer.Option("--filter", help='Such as: kind = "mail".')] = "",
    limit: Annotated[int, typer.Option("--limit", min=1, max=100_000)] = 50,
    address: Address = DEFAULT_ADDRESS,
    tenant: Tenant = DEFAULT_TENANT,
    as_json: AsJson = False,
) -> None:
    """List dead letters, newest first."""
    found = []
    with connect(address, tenant) as client:
        for letter in client.dead_letters.list(filter):
            found.append(letter)
            if len(found) == limit:
                break
    if as_json:
        output.print_json(found)
        return
    output.print_table(
        ("RUN", "DIED", "KIND", "ATTEMPTS", "REPLAYED", "FAILURE"),
        (
            (
                output.short(letter.name),
                output.relative(letter.create_time),
                letter.kind,
                str(letter.attempt_count),
                str(letter.replay_count or ""),
                letter.last_failure.message[:80],
            )
            for letter in found
        ),
        "there is none: every run came to a good end, or still tries",
    )


@app.command("replay")
def replay(
    name: Annotated[str, typer.Argument(help="The id of the run that died.")],
    payload: Annotated[str | None, typer.Option("--payload", help="Instead of the original one.")] = None,
    request_id: RequestId = "",
    address: Address = DEFAULT_ADDRESS,
    tenant: Tenant = DEFAULT_TENANT,
    as_json: AsJson = False,
) -> None:
    """Try again, as a new run that names its origin."""
    from tickwheel.cli.run import show

    with connect(address, tenant) as client:
        show(client.dead_letters.replay(name, payload=parse_payload(payload), request_id=request_id), as_json)
