"""What a caller sees of an error: one table from our errors to gRPC statuses, read in both directions.

Each status carries a `google.rpc.Status` with an `ErrorInfo` (reason, domain, the error's own fields as
metadata) and the details that its kind has: which field, which resource, when to try again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

from tickwheel import errors

ERROR_DOMAIN = "tickwheel.dev"
DETAILS_KEY = "grpc-status-details-bin"
_MESSAGE_CHARACTERS_MAX = 2_000
_METADATA_CHARACTERS_MAX = 256

DetailMaker = Callable[[Any], Any]
"""Gives one of `google.rpc`'s detail messages."""


@dataclass(frozen=True, slots=True)
class Row:
    """`reason` is ErrorInfo's; a callable reads it from the error. `fields` become ErrorInfo's metadata."""

    code: grpc.StatusCode
    reason: str | Callable[[Any], str]
    fields: tuple[str, ...] = ()
    details: tuple[DetailMaker, ...] = ()


def _bad_field(error: Any) -> Any:
    violation = error_details_pb2.BadRequest.FieldViolation(
        field=_short(error.field), description=_short(error.reason)
    )
    return error_details_pb2.BadRequest(field_violations=[violation])


def _bad_request_id(error: errors.RequestIdReused) -> Any:
    violation = error_details_pb2.BadRequest.FieldViolation(
        field="request_id", description="use a new id for a new request"
    )
    return error_details_pb2.BadRequest(field_violations=[violation])


def _resource(error: Any) -> Any:
    kind = {"schedules": "Schedule", "runs": "Run", "deadLetters": "DeadLetter", "tenants": "Tenant"}
    segments = error.resource.split("/")
    name = next((kind[part] for part in reversed(segments) if part in kind), "")
    return error_details_pb2.ResourceInfo(
        resource_type=f"{ERROR_DOMAIN}/{name}" if name else "",
        resource_name=_short(error.resource),
        description=_short(str(error)),
    )


def _etag_violation(error: errors.EtagMismatch) -> Any:
    violation = error_details_pb2.PreconditionFailure.Violation(
        type="ETAG", subject=_short(error.resource), description=f"the current etag is {error.current}"
    )
    return error_details_pb2.PreconditionFailure(violations=[violation])


def _state_violation(error: errors.StateTransitionForbidden) -> Any:
    violation = error_details_pb2.PreconditionFailure.Violation(
        type="STATE",
        subject=_short(error.resource),
        description=f"{error.event} leads nowhere from {error.state}",
    )
    return error_details_pb2.PreconditionFailure(violations=[violation])


def _use_violation(error: errors.CalendarInUse) -> Any:
    violation = error_details_pb2.PreconditionFailure.Violation(
        type="IN_USE", subject=_short(error.resource), description=_short(error.dependent)
    )
    return error_details_pb2.PreconditionFailure(violations=[violation])


def _lease_violation(error: errors.LeaseSuperseded) -> Any:
    violation = error_details_pb2.PreconditionFailure.Violation(
        type="LEASE", subject=_short(error.run), description=_short(error.reason)
    )
    return error_details_pb2.PreconditionFailure(violations=[violation])


def _quota(error: errors.LimitExceeded) -> Any:
    violation = error_details_pb2.QuotaFailure.Violation(
        subject=_short(error.subject), description=_short(str(error))
    )
    return error_details_pb2.QuotaFailure(violations=[violation])


def _retry(error: errors.Unavailable) -> Any:
    delay = duration_pb2.Duration()
    delay.FromMilliseconds(error.retry_after_ms)
    return error_details_pb2.RetryInfo(retry_delay=delay)


_CODE = grpc.StatusCode
TABLE: dict[type[errors.TickwheelError], Row] = {
    errors.TickwheelError: Row(_CODE.INTERNAL, "INTERNAL"),
    errors.InvalidArgument: Row(_CODE.INVALID_ARGUMENT, "INVALID_ARGUMENT"),
    errors.FieldInvalid: Row(_CODE.INVALID_ARGUMENT, "FIELD_INVALID", ("field",), (_bad_field,)),
    errors.FilterInvalid: Row(_CODE.INVALID_ARGUMENT, "FILTER_INVALID", ("field",), (_bad_field,)),
    errors.FilterFieldNotIndexed: Row(
        _CODE.INVALID_ARGUMENT, "FILTER_FIELD_NOT_INDEXED", ("field",), (_bad_field,)
    ),
    errors.PageTokenMismatch: Row(_CODE.INVALID_ARGUMENT, "PAGE_TOKEN_MISMATCH", ("field",), (_bad_field,)),
    errors.RequestIdReused: Row(
        _CODE.INVALID_ARGUMENT, "REQUEST_ID_REUSED", ("request_id", "method"), (_bad_request_id,)
    ),
    errors.TriggerInvalid: Row(_CODE.INVALID_ARGUMENT, "TRIGGER_INVALID", ("field", "column"), (_bad_field,)),
    errors.TriggerNeverFires: Row(_CODE.INVALID_ARGUMENT, "TRIGGER_NEVER_FIRES", ("field",), (_bad_field,)),
    errors.TimeZoneUnknown: Row(
        _CODE.INVALID_ARGUMENT, "TIME_ZONE_UNKNOWN", ("field", "name"), (_bad_field,)
    ),
    errors.NotFound: Row(_CODE.NOT_FOUND, "NOT_FOUND", ("resource",), (_resource,)),
    errors.AlreadyExists: Row(
        _CODE.ALREADY_EXISTS,
        lambda error: "SCHEDULE_EXISTS" if "/schedules/" in error.resource else "ALREADY_EXISTS",
        ("resource",),
        (_resource,),
    ),
    errors.EtagMismatch: Row(
        _CODE.ABORTED, "ETAG_MISMATCH", ("resource", "sent", "current"), (_etag_violation,)
    ),
    errors.FailedPrecondition: Row(_CODE.FAILED_PRECONDITION, "FAILED_PRECONDITION"),
    errors.StateTransitionForbidden: Row(
        _CODE.FAILED_PRECONDITION,
        "STATE_TRANSITION_FORBIDDEN",
        ("state", "event", "resource"),
        (_state_violation,),
    ),
    errors.CalendarInUse: Row(
        _CODE.FAILED_PRECONDITION, "CALENDAR_IN_USE", ("resource", "dependent"), (_use_violation,)
    ),
    errors.LeaseSuperseded: Row(
        _CODE.FAILED_PRECONDITION, "LEASE_SUPERSEDED", ("run", "attempt", "reason"), (_lease_violation,)
    ),
    errors.LimitExceeded: Row(
        _CODE.RESOURCE_EXHAUSTED, lambda error: str(error.reason), ("subject", "limit", "actual"), (_quota,)
    ),
    errors.Unavailable: Row(_CODE.UNAVAILABLE, "UNAVAILABLE", (), (_retry,)),
    errors.ShardMoving: Row(_CODE.UNAVAILABLE, "SHARD_MOVING", ("shard",), (_retry,)),
    errors.StoreUnavailable: Row(_CODE.UNAVAILABLE, "STORE_UNAVAILABLE", ("store",), (_retry,)),
    errors.NodeDraining: Row(_CODE.UNAVAILABLE, "NODE_DRAINING", ("node",), (_retry,)),
}


def row_of(kind: type[errors.TickwheelError]) -> Row:
    """The row of an error's class, or of the nearest class above it."""
    return next(TABLE[base] for base in kind.__mro__ if base in TABLE)


def to_status(error: errors.TickwheelError) -> tuple[grpc.StatusCode, status_pb2.Status]:
    """The code, and the `google.rpc.Status` that goes with it."""
    row = row_of(type(error))
    reason = row.reason if isinstance(row.reason, str) else row.reason(error)
    info = error_details_pb2.ErrorInfo(reason=reason, domain=ERROR_DOMAIN)
    for name in row.fields:
        value = getattr(error, name)
        if value is not None:
            info.metadata[name] = _short(str(value))
    number, _ = row.code.value
    status = status_pb2.Status(code=number, message=str(error)[:_MESSAGE_CHARACTERS_MAX])
    for detail in (info, *(make(error) for make in row.details)):
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return row.code, status


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: errors.TickwheelError) -> None:
    """Ends the call with the error's status. Raises what gRPC raises to end a handler."""
    code, status = to_status(error)
    await context.abort(code, status.message, trailing_metadata=((DETAILS_KEY, status.SerializeToString()),))


def from_rpc_error(error: grpc.RpcError) -> errors.TickwheelError | None:
    """Our own error behind a failed call, or None where the status is not one of ours.

    What the wire does not carry (such as a `StoreUnavailable`'s reason) stands in the message alone.
    """
    code, message, status = _parts(error)
    info = error_details_pb2.ErrorInfo()
    found = next((detail for detail in status.details if detail.Is(info.DESCRIPTOR)), None)
    if found is not None and found.Unpack(info) and info.domain == ERROR_DOMAIN:
        return _rebuild(code, info.reason, dict(info.metadata), message, status)
    if code is _CODE.UNAVAILABLE:
        return _with_message(errors.Unavailable(message), message)
    return None


def _parts(error: Any) -> tuple[grpc.StatusCode, str, status_pb2.Status]:
    status = status_pb2.Status()
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS_KEY:
            status.ParseFromString(value)
    return error.code(), status.message or error.details() or "", status


def _rebuild(
    code: grpc.StatusCode, reason: str, data: dict[str, str], message: str, status: status_pb2.Status
) -> errors.TickwheelError:
    retry_after_ms = _retry_after_ms(status)
    why = _violation(status)
    match reason:
        case "FIELD_INVALID":
            made: errors.TickwheelError = errors.FieldInvalid(data["field"], why)
        case "FILTER_INVALID":
            made = errors.FilterInvalid(data["field"], why)
        case "FILTER_FIELD_NOT_INDEXED":
            made = errors.FilterFieldNotIndexed(data["field"], why)
        case "PAGE_TOKEN_MISMATCH":
            made = errors.PageTokenMismatch(data["field"], why)
        case "REQUEST_ID_REUSED":
            made = errors.RequestIdReused(data["request_id"], data["method"])
        case "TRIGGER_INVALID":
            column = int(data["column"]) if "column" in data else None
            made = errors.TriggerInvalid(data["field"], why, column)
        case "TRIGGER_NEVER_FIRES":
            made = errors.TriggerNeverFires(data["field"], why)
        case "TIME_ZONE_UNKNOWN":
            made = errors.TimeZoneUnknown(data["name"], why, data["field"])
        case "NOT_FOUND":
            made = errors.NotFound(data["resource"])
        case "SCHEDULE_EXISTS" | "ALREADY_EXISTS":
            made = errors.AlreadyExists(data["resource"])
        case "ETAG_MISMATCH":
            made = errors.EtagMismatch(data["resource"], data["sent"], data["current"])
        case "STATE_TRANSITION_FORBIDDEN":
            made = errors.StateTransitionForbidden(data["state"], data["event"], data["resource"])
        case "CALENDAR_IN_USE":
            made = errors.CalendarInUse(data["resource"], data["dependent"])
        case "LEASE_SUPERSEDED":
            made = errors.LeaseSuperseded(data["run"], int(data["attempt"]), data["reason"])
        case "SHARD_MOVING":
            made = errors.ShardMoving(int(data["shard"]), retry_after_ms)
        case "STORE_UNAVAILABLE":
            made = errors.StoreUnavailable(data["store"], "", retry_after_ms)
        case "NODE_DRAINING":
            made = errors.NodeDraining(data["node"], retry_after_ms)
        case _ if "limit" in data and "actual" in data:
            made = errors.LimitExceeded(data["subject"], int(data["limit"]), int(data["actual"]), reason)
        case _:
            made = _BASES.get(code, errors.TickwheelError)(message)
    return _with_message(made, message)


_BASES: dict[grpc.StatusCode, type[errors.TickwheelError]] = {
    _CODE.INVALID_ARGUMENT: errors.InvalidArgument,
    _CODE.FAILED_PRECONDITION: errors.FailedPrecondition,
    _CODE.UNAVAILABLE: errors.Unavailable,
}


def _with_message(error: errors.TickwheelError, message: str) -> errors.TickwheelError:
    error.args = (message,)
    return error


def _retry_after_ms(status: status_pb2.Status) -> int:
    info = error_details_pb2.RetryInfo()
    for detail in status.details:
        if detail.Unpack(info):
            return int(info.retry_delay.ToMilliseconds())
    return errors.Unavailable.retry_after_ms


def _violation(status: status_pb2.Status) -> str:
    """The description of the first field violation."""
    bad = error_details_pb2.BadRequest()
    for detail in status.details:
        if detail.Unpack(bad) and bad.field_violations:
            return str(bad.field_violations[0].description)
    return ""


def _short(text: str) -> str:
    """Trailing metadata has little room; and what a caller sent may be long."""
    return text if len(text) <= _METADATA_CHARACTERS_MAX else text[: _METADATA_CHARACTERS_MAX - 1] + "…"
