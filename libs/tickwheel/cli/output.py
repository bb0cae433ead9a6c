"""How things look in a terminal: tables, relative times, errors with what to do; or JSON, one way for all."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from typing import Any

from google.protobuf import json_format
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tickwheel import errors
from tickwheel.v1 import run_pb2, schedule_pb2

console = Console(highlight=False)
error_console = Console(stderr=True, highlight=False)

_STYLES = {
    "ACTIVE": "green",
    "PAUSED": "yellow",
    "COMPLETED": "dim",
    "QUARANTINED": "bold red",
    "DELETED": "dim",
    "SCHEDULED": "cyan",
    "RUNNING": "bold blue",
    "CANCELLING": "yellow",
    "HELD": "bold yellow",
    "SUCCEEDED": "green",
    "FAILED": "red",
    "DEAD_LETTERED": "bold red",
    "CANCELLED": "yellow",
    "EXPIRED": "yellow",
}
_UNITS = ((86_400 * 365, "y"), (86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def as_dict(message: Message) -> Any:
    """A message as JSON has it, with the names of the proto files."""
    return json_format.MessageToDict(message, preserving_proto_field_name=True)


def print_json(value: Any) -> None:
    """A message, or a list of them."""
    if isinstance(value, Message):
        value = as_dict(value)
    elif isinstance(value, list):
        value = [as_dict(each) if isinstance(each, Message) else each for each in value]
    print(json.dumps(value, ensure_ascii=False, indent=2))


def print_json_line(value: Message) -> None:
    """One object a line, at once: for streams."""
    print(json.dumps(as_dict(value), ensure_ascii=False), flush=True)


def relative(instant: Timestamp, now_s: float | None = None) -> str:
    """Such as "in 5 min" or "2 h ago"; empty for an instant that is not set."""
    if not instant.seconds and not instant.nanos:
        return ""
    away_s = instant.seconds + instant.nanos / 1e9 - (time.time() if now_s is None else now_s)
    if abs(away_s) < 1:
        return "now"
    size, unit = next((pair for pair in _UNITS if abs(away_s) >= pair[0]), (1, "s"))
    text = f"{int(abs(away_s) / size)} {unit}"
    return f"in {text}" if away_s > 0 else f"{text} ago"


def instant_text(instant: Timestamp) -> str:
    """RFC 3339, and how far away that is."""
    if not instant.seconds and not instant.nanos:
        return "–"
    return f"{instant.ToJsonString()}  ({relative(instant)})"


def duration_text(length: Duration) -> str:
    ms = length.ToMicroseconds() / 1_000
    return f"{ms:.1f} ms" if ms < 1_000 else f"{ms / 1_000:.1f} s"


def short(name: str) -> str:
    """The last part of a name."""
    return name.rpartition("/")[2]


def state_text(name: str) -> Text:
    return Text(name, style=_STYLES.get(name, ""))


def schedule_state(schedule: schedule_pb2.Schedule) -> str:
    return schedule_pb2.ScheduleStatus.State.Name(schedule.status.state).removeprefix("STATE_")


def run_state(run: run_pb2.Run) -> str:
    return run_pb2.Run.State.Name(run.state).removeprefix("STATE_")


def trigger_text(trigger: schedule_pb2.Trigger) -> str:
    """A trigger in a few words."""
    kind = trigger.WhichOneof("kind")
    if kind == "cron":
        text = trigger.cron.expression
    elif kind == "interval":
        text = f"every {duration_text(trigger.interval.duration)}"
    elif kind == "instants":
        times = trigger.instants.times
        text = f"at {times[0].ToJsonString()}" + (f" and {len(times) - 1} more" if len(times) > 1 else "")
    else:
        text = trigger.rrule.rule.splitlines()[-1] if trigger.rrule.rule else ""
    return f"{text} {trigger.time_zone}" if trigger.time_zone not in ("", "UTC") else text


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str | Text]], empty: str) -> None:
    """A table, or the sentence that there is nothing."""
    table = Table(box=None, header_style="bold dim", pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column in ("NAME", "RUN", "STATE", "LAG"))
    count = 0
    for row in rows:
        table.add_row(*row)
        count += 1
    if count:
        console.print(table)
    else:
        console.print(empty, style="dim")


def print_fields(fields: Iterable[tuple[str, str | Text]]) -> None:
    """Name and value, a line each; what is empty is left out."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold dim")
    table.add_column(overflow="fold")
    for name, value in fields:
        if value and str(value) != "–":
            table.add_row(name, value)
    console.print(table)


def print_error(error: Exception) -> None:
    """What is wrong, and what to do about it, on standard error."""
    line = Text.assemble(("error: ", "bold red"), str(error))
    error_console.print(line, soft_wrap=True)
    hint = _hint(error)
    if hint:
        error_console.print(Text(hint, style="dim"), soft_wrap=True)


def _hint(error: Exception) -> str:
    match error:
        case errors.TriggerInvalid() | errors.TriggerNeverFires() | errors.TimeZoneUnknown():
            return "look at it before you save it: tickwheel trigger next --help"
        case errors.AlreadyExists():
            return "to change what is there: tickwheel schedule update"
        case errors.EtagMismatch():
            return "read it again, and decide anew"
        case errors.StateTransitionForbidden(event=event) if "ignore_overlap" in event:
            return "to run it anyway: --ignore-overlap"
        case errors.StoreUnavailable() | errors.ShardMoving() | errors.NodeDraining():
            return "it may work in a moment; tickwheel health says how the cluster is"
        case errors.Unavailable():
            return "is it running there? tickwheel up starts a cluster here; --address names another"
        case _:
            return ""
