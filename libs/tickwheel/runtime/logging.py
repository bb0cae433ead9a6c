"""How a process writes its log: an event name and fields, on standard error, one line each.

`structlog.get_logger().info("shard_taken", shard=7, epoch=9)`. What libraries write through the standard
library comes out in the same form. Lines written inside a recorded span carry its trace and span ids.
"""

from __future__ import annotations

import logging
import sys
from typing import Literal, TextIO

import structlog
from opentelemetry import trace
from structlog.types import EventDict, Processor, WrappedLogger

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["auto", "json", "console"]

# Libraries that write much, of little use to an operator, at the level of our own events.
_QUIET_LIBRARIES = ("grpc", "httpx", "httpcore", "opentelemetry", "alembic.runtime.plugins")


# Without the frames' locals: those hold passwords and lease tokens, and payloads of any size.
_TRACEBACKS = structlog.processors.ExceptionRenderer(
    structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
)


def configure_logging(
    level: LogLevel = "info",
    log_format: LogFormat = "auto",
    *,
    process: str = "",
    node_name: str = "",
    file: TextIO | None = None,
) -> None:
    """For the whole process; again replaces. Empty `process` and `node_name` are left out of the lines."""
    output = file if file is not None else sys.stderr
    least = getattr(logging, level.upper())
    on_console = log_format == "console" or (log_format == "auto" and output.isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _add_trace_ids,
        _constant_fields(process=process, node=node_name),
    ]
    ending: list[Processor] = (
        [structlog.dev.ConsoleRenderer(colors=output.isatty())]
        if on_console
        else [_TRACEBACKS, structlog.processors.JSONRenderer(default=str)]
    )
    structlog.configure(
        processors=[*shared, *ending],
        wrapper_class=structlog.make_filtering_bound_logger(least),
        logger_factory=structlog.WriteLoggerFactory(output),
        cache_logger_on_first_use=file is None,
    )
    handler = logging.StreamHandler(output)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *ending],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(least)
    for name in _QUIET_LIBRARIES:
        logging.getLogger(name).setLevel(max(least, logging.WARNING))


def _constant_fields(**fields: str) -> Processor:
    given = {name: value for name, value in fields.items() if value}

    def add(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        for name, value in given.items():
            event.setdefault(name, value)
        return event

    return add


def _add_trace_ids(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    span = trace.get_current_span()
    if span.is_recording():
        context = span.get_span_context()
        event["trace_id"] = f"{context.trace_id:032x}"
        event["span_id"] = f"{context.span_id:016x}"
    return event
