"""`tickwheel bench`: what stands in `tickwheel.bench`, which knows its own options."""

from __future__ import annotations

import typer

app = typer.Typer(add_completion=False)


@app.command(
    "bench",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def bench(context: typer.Context) -> None:
    """Measure this machine against the budgets; `tickwheel bench --help` names the benchmarks."""
    from tickwheel.bench.report import main

    main(context.args)
