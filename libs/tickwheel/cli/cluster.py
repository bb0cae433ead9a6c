"""`tickwheel cluster …`."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

from tickwheel.cli import EXIT_FAILED, output
from tickwheel.cli.options import Address, AsJson, connect, parse_duration
from tickwheel.client import DEFAULT_ADDRESS

app = typer.Typer(help="Shards, timers, drains, restored stores.", no_args_is_help=True, add_completion=False)

DRAIN_POLL_S = 0.5


@app.command("shards")
def shards(address: Address = DEFAULT_ADDRESS, as_json: AsJson = False) -> None:
    """Who owns which shard."""
    with connect(address) as client:
        found = client.cluster.shards()
    if as_json:
        output.print_json(found)
        return
    output.print_table(
        ("SHARD", "TIMER", "GENERATION", "EPOCH", ""),
        (
            (
                str(shard.shard),
                shard.timer or "–",
                str(shard.generation),
                str(shard.epoch),
                "" if shard.owner == shard.timer else f"still held by {shard.owner or 'nobody'}",
            )
            for shard in found
        ),
        "there is none",
    )


@app.command("timers")
def timers(address: Address = DEFAULT_ADDRESS, as_json: AsJson = False) -> None:
    """The timers, and how many shards each has."""
    with connect(address) as client:
        found = client.cluster.timers()
    if as_json:
        output.print_json(found)
        return
    output.print_table(
        ("TIMER", "NODE", "ADDRESS", "SHARDS", "STARTED", "SEEN", ""),
        (
            (
                timer.timer_id,
                timer.node_name,
                timer.address,
                str(timer.shard_count),
                output.relative(timer.start_time),
                output.relative(timer.seen_time),
                "draining" if timer.draining else "",
            )
            for timer in found
        ),
        "no timer is running: nothing is fired",
    )


@app.command("drain")
def drain(
    timer_id: Annotated[str, typer.Argument(help="As `cluster timers` shows it.")],
    undo: Annotated[bool, typer.Option("--undo", help="Take it back into service.")] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", help="Seconds to wait for its shards to move.")
    ] = 60.0,
    address: Address = DEFAULT_ADDRESS,
    as_json: AsJson = False,
) -> None:
    """Move every shard away from a timer, so that it can be stopped."""
    deadline = time.monotonic() + timeout
    with connect(address) as client:
        left = client.cluster.drain(timer_id, undrain=undo)
        while left and not undo and time.monotonic() < deadline:
            time.sleep(DRAIN_POLL_S)
            left = client.cluster.drain(timer_id)
    if as_json:
        output.print_json({"timer_id": timer_id, "remaining_shard_count": left})
    elif undo:
        output.console.print(f"{timer_id} is in service again")
    elif left:
        output.console.print(
            f"{left} shards are still to move; ask again, or look at `tickwheel cluster shards`"
        )
    else:
        output.console.print(f"{timer_id} owns nothing any more: it can be stopped")
    if left:
        sys.exit(EXIT_FAILED)


@app.command("resume")
def resume(
    force: Annotated[
        bool, typer.Option("--force", help="Though nothing stands still: commits were lost unnoticed.")
    ] = False,
    hold: Annotated[
        str | None,
        typer.Option(
            "--hold", help="Grant nothing for so long, such as 30s; else the longest lease there was."
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    address: Address = DEFAULT_ADDRESS,
    as_json: AsJson = False,
) -> None:
    """Go on with the Postgres that is there, after it was promoted or restored."""
    with connect(address) as client:
        if not yes and not as_json:
            output.console.print(client.cluster.health().verdict)
            typer.confirm("What that Postgres does not know is lost. Go on with it?", abort=True)
        resumed = client.cluster.resume(
            force=force, hold=None if hold is None else parse_duration(hold, "hold")
        )
    if as_json:
        output.print_json(resumed)
    else:
        output.console.print(
            f"the cluster goes on as incarnation {resumed.incarnation}; "
            f"grants begin in {resumed.hold_duration.ToSeconds()} s"
        )
