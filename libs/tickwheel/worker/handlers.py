"""Which function handles which kind, what may it raise, and what becomes of what it gives back?"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias

import msgspec

from tickwheel.worker.attempt import SUCCEEDED, Failed, Outcome, Succeeded
from tickwheel.worker.context import Context, SyncContext

AsyncFunction: TypeAlias = Callable[[Context], Awaitable[Any]]
SyncFunction: TypeAlias = Callable[[SyncContext], Any]

RESULT_BYTES_MAX = 1 << 20
MESSAGE_CHARS_MAX = 4096
STACK_CHARS_MAX = 16384

JSON = "application/json"
BYTES = "application/octet-stream"


class Retry(Exception):
    """Raise it from a handler: this attempt failed, try again.

    after: seconds, or a timedelta, until the next attempt is due; None leaves it to the run's retry policy.
    """

    def __init__(self, message: str = "", *, after: float | timedelta | None = None) -> None:
        seconds = after.total_seconds() if isinstance(after, timedelta) else after
        if seconds is not None and seconds < 0:
            raise ValueError(f"Retry(after={after!r}): give a delay that is not negative")
        self.after_us = None if seconds is None else round(seconds * 1_000_000)
        self.message = message
        super().__init__(message)


class Abort(Exception):
    """Raise it from a handler: trying again is pointless. The run becomes a dead letter.

    reason: for the person who finds it there. type: what failures of this sort are called.
    """

    def __init__(self, reason: str, *, type: str = "Abort") -> None:
        self.reason = reason
        self.type = type
        super().__init__(reason)


class Release(Exception):
    """Raise it from a handler: hand the run back at no cost in attempts, for another time or worker.

    not_before: seconds until it may be granted again.
    """

    def __init__(self, reason: str, *, not_before: float | None = None) -> None:
        self.reason = reason
        self.not_before_us = None if not_before is None else round(not_before * 1_000_000)
        super().__init__(reason)


@dataclass(frozen=True, slots=True)
class Handler:
    """A function and how to call it."""

    kind: str
    function: Callable[[Any], Any]
    is_async: bool


class Handlers:
    """The functions of one worker, by kind."""

    def __init__(self) -> None:
        self._by_kind: dict[str, Handler] = {}

    def add(self, kind: str, function: Callable[[Any], Any]) -> None:
        """Raises ValueError for a kind that has a handler already."""
        if not kind:
            raise ValueError("a handler needs a kind: @worker.handler('send-email')")
        if kind in self._by_kind:
            known = self._by_kind[kind].function
            raise ValueError(f"kind {kind!r} is handled by {known!r} already: give {function!r} another kind")
        self._by_kind[kind] = Handler(kind, function, _is_async(function))

    def get(self, kind: str) -> Handler | None:
        return self._by_kind.get(kind)

    def kinds(self) -> tuple[str, ...]:
        return tuple(sorted(self._by_kind))

    def __contains__(self, kind: str) -> bool:
        return kind in self._by_kind


def _is_async(function: Callable[[Any], Any]) -> bool:
    if inspect.iscoroutinefunction(function):
        return True
    # An object whose __call__ is async is an async handler as well; its type says so.
    return inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def outcome_of_result(result: Any) -> Outcome:
    """What a handler's return value becomes: None nothing, bytes bytes, all else JSON.

    What JSON cannot hold, or is over 1 MiB, fails the run for good: another attempt would do the work again
    and end here again.
    """
    if result is None:
        return SUCCEEDED
    if isinstance(result, bytes | bytearray | memoryview):
        data, content_type = bytes(result), BYTES
    else:
        try:
            data, content_type = msgspec.json.encode(result), JSON
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            return Failed("ResultNotSerializable", _capped(str(error), MESSAGE_CHARS_MAX), non_retryable=True)
    if len(data) > RESULT_BYTES_MAX:
        return Failed(
            "ResultTooLarge",
            f"the result has {len(data)} bytes, {RESULT_BYTES_MAX} are allowed: return a reference to it",
            non_retryable=True,
        )
    return Succeeded(data, content_type)


def outcome_of_error(error: BaseException) -> Outcome:
    """What an exception becomes. Its class's name is the failure's type."""
    if isinstance(error, Abort):
        return Failed(error.type, _capped(error.reason, MESSAGE_CHARS_MAX), non_retryable=True)
    retry_delay_us = error.after_us if isinstance(error, Retry) else None
    message = error.message if isinstance(error, Retry) else _text_of(error)
    return Failed(
        type(error).__name__,
        _capped(message, MESSAGE_CHARS_MAX),
        retry_delay_us=retry_delay_us,
        stack=_stack_of(error),
    )


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return f"(its __str__ raised) {type(error).__qualname__}"


def _stack_of(error: BaseException) -> str:
    """The traceback, its end where it is too long: that is where the error was raised."""
    try:
        # The first frame is the executor's own.
        trace = error.__traceback__.tb_next if error.__traceback__ is not None else None
        text = "".join(traceback.format_exception(type(error), error, trace, limit=-50))
    except Exception:
        return ""
    return text if len(text) <= STACK_CHARS_MAX else "…" + text[-(STACK_CHARS_MAX - 1) :]


def _capped(text: str, chars_max: int) -> str:
    return text if len(text) <= chars_max else text[: chars_max - 1] + "…"
