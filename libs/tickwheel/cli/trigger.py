"""``tickwheel trigger``: what a trigger will do, computed here, without a server."""

from __future__ import annotations

import json
import re
import time
from datetime import UTC, datetime, timedelta
from typing import Annotated, NoReturn

import typer

from tickwheel.domain import describe
from tickwheel.domain import trigger as triggers
from tickwheel.domain.trigger import (
    Cron,
    Dialect,
    DstGapPolicy,
    DstOverlapPolicy,
    Interval,
    Rrule,
    Trigger,
    TriggerSet,
)
from tickwheel.errors import InvalidArgument, TriggerInvalid

app = typer.Typer(name="trigger", help="Look at triggers before they are saved.", no_args_is_help=True)

_COUNT_MAX = 1_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_UNITS_US = {"ms": 1_000, "s": 1_000_000, "m": 60_000_000, "h": 3_600_000_000, "d": 86_400_000_000}
_DURATION = re.compile(r"(?:[0-9]{1,9}(?:ms|s|m|h|d))+")


@app.callback()
def _group() -> None:
    """Look at triggers before they are saved."""


@app.command("next")
def print_next(
    cron: Annotated[str | None, typer.Option(help="A cron expression, such as '30 2 * * *'.")] = None,
    dialect: Annotated[Dialect, typer.Option(help="How to read the expression.")] = Dialect.UNIX,
    interval: Annotated[str | None, typer.Option(help="A duration, such as 15s or 1h30m.")] = None,
    anchor: Annotated[
        str | None, typer.Option(help="The interval's first instant; --after if left out.")
    ] = None,
    rrule: Annotated[str | None, typer.Option(help="RFC 5545 lines: DTSTART, RRULE, RDATE, EXDATE.")] = None,
    time_zone: Annotated[str, typer.Option(help="An IANA name.")] = "UTC",
    gap_policy: Annotated[
        DstGapPolicy, typer.Option(help="For wall times that do not exist.")
    ] = DstGapPolicy.RUN_AT_GAP_END,
    overlap_policy: Annotated[
        DstOverlapPolicy, typer.Option(help="For wall times that exist twice.")
    ] = DstOverlapPolicy.FIRST,
    name: Annotated[
        str | None, typer.Option(help="The schedule's name, which H draws its numbers from.")
    ] = None,
    after: Annotated[str | None, typer.Option(help="Only later instants, RFC 3339; now if left out.")] = None,
    count: Annotated[int, typer.Option(min=1, max=_COUNT_MAX, help="How many instants.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list of UTC instants.")] = False,
) -> None:
    """Print the next instants of a trigger.

    A bad trigger exits with 2 and says the field and the reason on stderr.
    """
    try:
        after_us = time.time_ns() // 1_000 if after is None else _parse_instant("after", after)
        made = Trigger(
            cron=None if cron is None else Cron(cron, dialect),
            interval=None if interval is None else _parse_interval(interval, anchor, after_us),
            rrule=None if rrule is None else Rrule(rrule),
            time_zone=time_zone,
            dst_gap_policy=gap_policy,
            dst_overlap_policy=overlap_policy,
        )
        trigger_set = TriggerSet((made,))
        if name is not None:
            trigger_set = triggers.resolve_hash(trigger_set, name)
        compiled = triggers.compile(trigger_set)
        found_us = compiled.between(after_us, triggers.NEVER_US, count)
    except InvalidArgument as error:
        _refuse(error)
    if as_json:
        typer.echo(json.dumps([format_instant(instant_us) for instant_us in found_us]))
        return
    shown = describe.preview(compiled, after_us, count)
    typer.echo(shown.description)
    for occurrence in shown.occurrences:
        words = (format_instant(occurrence.schedule_time_us), occurrence.utc_offset, occurrence.adjustment)
        typer.echo("  ".join(words).rstrip())
    for warning in shown.warnings:
        typer.echo(f"warning: {warning}")


def format_instant(instant_us: int) -> str:
    """RFC 3339 in UTC, with a fraction only where there is one."""
    text = (_EPOCH + timedelta(microseconds=instant_us)).isoformat()
    return text.removesuffix("+00:00") + "Z"


def _refuse(error: InvalidArgument) -> NoReturn:
    # There is one trigger here, so its place in a list would only confuse.
    typer.echo(str(error).removeprefix("triggers[0]."), err=True)
    raise typer.Exit(2) from error


def _parse_instant(field: str, text: str) -> int:
    try:
        parsed = datetime.fromisoformat(text)
    except ValueError as error:
        raise TriggerInvalid(field, f"{text[:40]!r} is not an RFC 3339 instant") from error
    if parsed.tzinfo is None:
        raise TriggerInvalid(field, f"{text[:40]!r} has no UTC offset; end it with Z or +hh:mm")
    return (parsed - _EPOCH) // timedelta(microseconds=1)


def _parse_interval(text: str, anchor: str | None, after_us: int) -> Interval:
    if text.startswith("-"):
        raise TriggerInvalid("interval.duration", "it must be longer than zero")
    if _DURATION.fullmatch(text) is None:
        raise TriggerInvalid("interval.duration", f"cannot read {text[:40]!r}; write 90s, 15m, 1h30m or 1d")
    parts = re.findall(r"([0-9]+)(ms|s|m|h|d)", text)
    duration_us = sum(int(number) * _UNITS_US[unit] for number, unit in parts)
    return Interval(
        duration_us, after_us if anchor is None else _parse_instant("interval.anchor_time", anchor)
    )


if __name__ == "__main__":
    app()
