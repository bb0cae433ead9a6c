"""Options that commands share, and what they mean."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from tickwheel.client import DEFAULT_ADDRESS, BlockingClient
from tickwheel.errors import FieldInvalid

RETRY_S_MAX = 5.0
"""A person who waits wants to hear soon that nobody is there."""

Address = Annotated[
    str,
    typer.Option(
        "--address", envvar="TICKWHEEL_ADDRESS", help="host:port of a coordinator; several with commas."
    ),
]
Tenant = Annotated[str, typer.Option("--tenant", envvar="TICKWHEEL_TENANT", help="Whose.")]
AsJson = Annotated[bool, typer.Option("--json", help="For scripts.")]
RequestId = Annotated[
    str, typer.Option("--request-id", help="Said again with it, the same gives the first answer again.")
]
DEFAULT_TENANT = "default"

_DURATION = re.compile(r"(?:[0-9]{1,9}(?:\.[0-9]{1,6})?(?:ms|s|m|h|d))+")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}


def connect(address: str = DEFAULT_ADDRESS, tenant: str = DEFAULT_TENANT) -> BlockingClient:
    return BlockingClient(address, tenant=tenant, retry_s_max=RETRY_S_MAX)


def parse_duration(text: str, field: str) -> timedelta:
    """Such as 250ms, 90s, 15m, 1h30m or 1d."""
    if _DURATION.fullmatch(text) is None:
        raise FieldInvalid(field, f"cannot read {text[:40]!r}; write 250ms, 90s, 15m, 1h30m or 1d")
    parts = re.findall(r"([0-9.]+)(ms|s|m|h|d)", text)
    return timedelta(seconds=sum(float(number) * _SECONDS[unit] for number, unit in parts))


def parse_instant(text: str, field: str) -> datetime:
    """RFC 3339, or a duration from now."""
    if _DURATION.fullmatch(text):
        return datetime.now(UTC) + parse_duration(text, field)
    try:
        parsed = datetime.fromisoformat(text)
    except ValueError as error:
        problem = f"cannot read {text[:40]!r}; write 2027-01-31T09:00:00Z, or 15m for in 15 minutes"
        raise FieldInvalid(field, problem) from error
    if parsed.tzinfo is None:
        raise FieldInvalid(field, f"{text[:40]!r} has no UTC offset; end it with Z or +hh:mm")
    return parsed


def parse_payload(text: str | None) -> bytes | dict[str, object] | None:
    """A JSON object as such; any other text as its bytes."""
    if text is None:
        return None
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return text.encode()
    return value if isinstance(value, dict) else text.encode()


def parse_labels(pairs: list[str] | None) -> dict[str, str]:
    """Each KEY=VALUE."""
    labels: dict[str, str] = {}
    for pair in pairs or []:
        key, separator, value = pair.partition("=")
        if not separator or not key:
            raise FieldInvalid("label", f"cannot read {pair[:80]!r}; write KEY=VALUE")
        labels[key] = value
    return labels
