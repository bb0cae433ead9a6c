"""Log lines: one JSON object each, for our events and for those of libraries."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from opentelemetry.sdk.trace import TracerProvider

from tickwheel.runtime.logging import configure_logging


@pytest.fixture
def output() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield io.StringIO()
    structlog.reset_defaults()
    root.handlers[:] = handlers
    root.setLevel(level)


def lines(output: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.getvalue().splitlines()]


def test_an_event_is_one_line_with_its_fields(output: io.StringIO) -> None:
    configure_logging("info", "json", process="timer", node_name="n1", file=output)
    structlog.get_logger("a.module").info("shard_taken", shard=7, epoch=9)
    (line,) = lines(output)
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "event": "shard_taken",
        "level": "info",
        "process": "timer",
        "node": "n1",
        "shard": 7,
        "epoch": 9,
    }


def test_what_is_below_the_level_is_not_written(output: io.StringIO) -> None:
    configure_logging("warning", "json", file=output)
    structlog.get_logger().info("shard_taken")
    logging.getLogger("library").info("hello")
    assert output.getvalue() == ""


def test_a_library_writes_in_the_same_form(output: io.StringIO) -> None:
    configure_logging("info", "json", process="timer", file=output)
    logging.getLogger("library").warning("lost %d of %d", 1, 2)
    (line,) = lines(output)
    assert (line["event"], line["level"], line["logger"]) == ("lost 1 of 2", "warning", "library")
    assert line["process"] == "timer"


def test_an_error_carries_its_traceback_in_one_line(output: io.StringIO) -> None:
    configure_logging("info", "json", file=output)
    try:
        raise ValueError("a\nb")
    except ValueError:
        structlog.get_logger().exception("part_failed")
    (line,) = lines(output)
    assert line["exception"][0]["exc_type"] == "ValueError"


def test_a_value_that_json_does_not_know_is_written_as_text(output: io.StringIO) -> None:
    configure_logging("info", "json", file=output)
    structlog.get_logger().info("odd", value={1}, error=ValueError("x"))
    (line,) = lines(output)
    assert line["value"] == "{1}"


def test_a_line_within_a_recorded_span_names_it(output: io.StringIO) -> None:
    configure_logging("info", "json", file=output)
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("test")
    with tracer.start_as_current_span("fire") as span:
        structlog.get_logger().info("inside")
    structlog.get_logger().info("outside")
    inside, outside = lines(output)
    assert inside["trace_id"] == f"{span.get_span_context().trace_id:032x}"
    assert inside["span_id"] == f"{span.get_span_context().span_id:016x}"
    assert "trace_id" not in outside


def test_a_person_at_a_terminal_gets_text(output: io.StringIO) -> None:
    configure_logging("info", "console", file=output)
    structlog.get_logger().info("shard_taken", shard=7)
    assert "shard_taken" in output.getvalue()
    assert "shard=7" in output.getvalue()


def test_a_traceback_does_not_tell_what_the_variables_held(output: io.StringIO) -> None:
    configure_logging("info", "json", file=output)

    def connect(password: str) -> None:
        raise OSError("refused")

    try:
        connect("geheim")
    except OSError:
        structlog.get_logger().exception("connect_failed")
    assert "refused" in output.getvalue()
    assert "geheim" not in output.getvalue().replace('connect("geheim")', "")
