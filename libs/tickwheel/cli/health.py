"""`tickwheel health`."""

from __future__ import annotations

import sys

import typer

from tickwheel.cli import EXIT_FAILED, output
from tickwheel.cli.options import Address, AsJson, connect
from tickwheel.client import DEFAULT_ADDRESS

app = typer.Typer(add_completion=False)


@app.command("health")
def health(address: Address = DEFAULT_ADDRESS, as_json: AsJson = False) -> None:
    """One sentence on how the cluster is; exit code 1 if not well."""
    with connect(address) as client:
        found = client.cluster.health()
    if as_json:
        output.print_json(found)
    else:
        output.console.print(found.verdict, style="green" if found.healthy else "bold red")
        output.print_fields(
            (
                ("leader", found.leader or "nobody"),
                ("timers", str(found.timer_count)),
                ("shards", str(found.shard_count)),
                ("without an owner", ", ".join(map(str, found.unowned_shards[:20]))),
                ("Postgres", "in reach" if found.postgres_reachable else "out of reach"),
                ("etcd", "in reach" if found.etcd_reachable else "out of reach"),
            )
        )
    if not found.healthy:
        sys.exit(EXIT_FAILED)
