"""Named SQL: statements stand in `sql/*.sql`, each under a `-- name: x` line and a sentence."""

import re
from functools import cache
from importlib import resources

_NAME = re.compile(r"^-- name: *([a-z][a-z0-9_]*) *$", re.MULTILINE)


def read(file: str) -> str:
    """The text of `sql/<file>`, such as "functions.sql"."""
    return resources.files("tickwheel.postgres").joinpath("sql", file).read_text(encoding="utf-8")


@cache
def load(file: str) -> dict[str, str]:
    """The statements of `sql/<file>` by name. What stands before the first name is prose.

    Raises:
        ValueError: a name stands twice, or nothing stands under it.
    """
    return parse(read(file), file)


def parse(text: str, file: str = "") -> dict[str, str]:
    """As `load`, of a text. Comment lines go: a `%` in prose would be taken for a parameter."""
    pieces = _NAME.split(text)
    found: dict[str, str] = {}
    for name, body in zip(pieces[1::2], pieces[2::2], strict=True):
        lines = [line for line in body.splitlines() if line.strip() and not line.lstrip().startswith("--")]
        if name in found:
            raise ValueError(f"{file}: {name} stands twice")
        if not lines:
            raise ValueError(f"{file}: nothing stands under {name}")
        found[name] = "\n".join(lines)
    return found
