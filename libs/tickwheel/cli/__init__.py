"""`tickwheel …`: the cluster from a terminal. `--json` for scripts, tables for people.

Exit codes: 0 done; 1 it could not be done (the cluster said no, or is out of reach); 2 what was typed
cannot be meant.

Each command's module is imported when it is asked for: `tickwheel trigger next` waits for no gRPC.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any, NoReturn

import typer
import typer.core
import typer.main

EXIT_FAILED = 1
EXIT_USAGE = 2

COMMANDS: dict[str, tuple[str, str]] = {
    "up": ("tickwheel.cli.up", "Start a whole cluster on this machine, with samples to watch."),
    "migrate": ("tickwheel.cli.migrate", "Bring a database up to date."),
    "schedule": ("tickwheel.cli.schedule", "Create, look at, change, pause and delete schedules."),
    "run": ("tickwheel.cli.run", "Create, look at, cancel and watch runs."),
    "calendar": ("tickwheel.cli.calendar", "Dates that schedules share: import, look at, delete."),
    "operation": ("tickwheel.cli.operation", "How far background work is; stop it."),
    "dead-letter": ("tickwheel.cli.dead_letter", "Look at runs that have no attempts left, and replay them."),
    "cluster": ("tickwheel.cli.cluster", "Shards, timers, drains, restored stores."),
    "health": ("tickwheel.cli.health", "One sentence on how the cluster is."),
    "trigger": ("tickwheel.cli.trigger", "Look at triggers before they are saved."),
    "bench": ("tickwheel.cli.bench", "Measure this machine against the budgets."),
}


class LazyGroup(typer.core.TyperGroup):
    """Commands by name, imported when they are used."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for name, (module, _) in COMMANDS.items() if importlib.util.find_spec(module)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        known = COMMANDS.get(cmd_name)
        if known is None or importlib.util.find_spec(known[0]) is None:
            return None
        if ctx.resilient_parsing or _wants_the_list():
            # The list needs one line of each, not its module.
            return typer.core.TyperCommand(cmd_name, short_help=known[1], help=known[1])
        command = typer.main.get_command(importlib.import_module(known[0]).app)
        command.name = cmd_name
        return command


def _wants_the_list() -> bool:
    arguments = sys.argv[1:]
    return not arguments or arguments[0] in ("--help", "-h")


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)


@app.callback()
def _root() -> None:
    """A distributed job scheduler: millions of schedules, fenced leases, milliseconds of lag."""


def main() -> None:
    """The entry point of `tickwheel`."""
    try:
        app()
    except Exception as error:
        _explain(error)


def _explain(error: Exception) -> NoReturn:
    """Says what went wrong in a sentence, and what to do where that is known; a bug keeps its traceback."""
    from tickwheel.errors import InvalidArgument, TickwheelError

    if isinstance(error, TickwheelError):
        from tickwheel.cli.output import print_error

        print_error(error)
        sys.exit(EXIT_USAGE if isinstance(error, InvalidArgument) else EXIT_FAILED)
    if type(error).__module__ == "tickwheel.embedded.errors":
        from tickwheel.cli.output import print_error

        print_error(error)
        sys.exit(EXIT_FAILED)
    if isinstance(error, ModuleNotFoundError) and not str(error.name).startswith("tickwheel"):
        # The base installation is the SDK and the commands that speak to a cluster.
        print(f"error: this command needs {error.name}, which is not installed", file=sys.stderr)
        print('install it with: pip install "tickwheel[server,embedded]"', file=sys.stderr)
        sys.exit(EXIT_FAILED)
    raise error
