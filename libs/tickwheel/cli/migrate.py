"""`tickwheel migrate`."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from tickwheel.cli import output

app = typer.Typer(add_completion=False)


@app.command("migrate")
def migrate(
    url: Annotated[str, typer.Option("--url", envvar="TICKWHEEL_POSTGRES_URL", help="Of the database.")],
    shard_count: Annotated[
        int | None,
        typer.Option("--shard-count", min=1, max=4096, help="For a new cluster; for its whole life."),
    ] = None,
    phase: Annotated[
        str, typer.Option("--phase", help="pre: only what the running version bears; all: everything.")
    ] = "all",
    as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
) -> None:
    """Bring a database up to date: as often as you like, while the cluster runs."""
    from tickwheel.errors import FieldInvalid
    from tickwheel.postgres.migrate import migrate as migrate_database

    if phase not in ("pre", "all"):
        raise FieldInvalid("phase", f"{phase!r} is neither pre nor all")
    wanted: Literal["pre", "all"] = "pre" if phase == "pre" else "all"
    done = migrate_database(url, shard_count=shard_count, phase=wanted)
    if as_json:
        output.print_json(
            {
                "cluster_id": str(done.cluster_id),
                "shard_count": done.shard_count,
                "revision_before": done.revision_before,
                "revision": done.revision,
                "pending_post": list(done.pending_post),
            }
        )
        return
    moved = (
        "is" if done.revision_before == done.revision else f"went from {done.revision_before or 'nothing'} to"
    )
    output.console.print(
        f"the schema {moved} {done.revision}; {done.shard_count} shards, cluster {done.cluster_id}"
    )
    if done.pending_post:
        steps = ", ".join(done.pending_post)
        output.console.print(
            f"after the old version is gone, run it again with --phase all ({steps} wait)", style="yellow"
        )
