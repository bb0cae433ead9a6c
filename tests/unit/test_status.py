"""One table says what a caller sees of each error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2

from tickwheel import errors
from tickwheel.rpc.status import DETAILS_KEY, ERROR_DOMAIN, TABLE, from_rpc_error, to_status


def _classes(base: type[errors.TickwheelError]) -> Iterator[type[errors.TickwheelError]]:
    yield base
    for kind in base.__subclasses__():
        if kind.__module__ == "tickwheel.errors":
            yield from _classes(kind)


EXAMPLES: list[errors.TickwheelError] = [
    errors.FieldInvalid("schedule.spec.template.kind", "it is required"),
    errors.FilterInvalid("filter", "cannot read it"),
    errors.FilterFieldNotIndexed("filter", "use state, labels, queue, kind or name"),
    errors.PageTokenMismatch("page_token", "it belongs to another query"),
    errors.RequestIdReused("order-7", "CreateRun"),
    errors.TriggerInvalid("schedule.spec.triggers[0].cron.expression", "61 is more than 59", 1),
    errors.TriggerNeverFires("schedule.spec.triggers", "30 February"),
    errors.TimeZoneUnknown("Mars/Olympus", "there is none of that name"),
    errors.NotFound("tenants/default/schedules/nightly"),
    errors.AlreadyExists("tenants/default/schedules/nightly"),
    errors.EtagMismatch("tenants/default/schedules/nightly", "a-1", "a-2"),
    errors.StateTransitionForbidden("SUCCEEDED", "RELEASE", "tenants/default/runs/x"),
    errors.CalendarInUse("tenants/default/calendars/holidays", "tenants/default/schedules/nightly"),
    errors.LeaseSuperseded("tenants/default/runs/x", 3, "its lease lapsed"),
    errors.LimitExceeded("requests", 10_000, 10_001),
    errors.ShardMoving(7, 250),
    errors.StoreUnavailable("Postgres", "connection refused", 2_000),
    errors.NodeDraining("coordinator-1"),
]


class _Failed(grpc.RpcError):
    """What a client sees of a status."""

    def __init__(self, code: grpc.StatusCode, message: str, metadata: tuple[tuple[str, bytes], ...]) -> None:
        self._parts = code, message, metadata

    def code(self) -> grpc.StatusCode:
        return self._parts[0]

    def details(self) -> str:
        return self._parts[1]

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:  # type: ignore[override]
        return self._parts[2]


@pytest.mark.parametrize("kind", list(_classes(errors.TickwheelError)), ids=lambda kind: kind.__name__)
def test_every_error_has_a_row(kind: type[errors.TickwheelError]) -> None:
    assert kind in TABLE


def test_the_examples_leave_no_concrete_error_out() -> None:
    concrete = {kind for kind in _classes(errors.TickwheelError) if "__init__" in vars(kind)}
    assert concrete == {type(example) for example in EXAMPLES} - {
        errors.FilterInvalid,
        errors.FilterFieldNotIndexed,
        errors.PageTokenMismatch,
    }


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_an_error_arrives_at_the_client_as_it_was_raised(error: errors.TickwheelError) -> None:
    code, status = to_status(error)
    arrived: Any = from_rpc_error(_Failed(code, status.message, ((DETAILS_KEY, status.SerializeToString()),)))
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    for name in TABLE[type(error)].fields:
        assert getattr(arrived, name) == getattr(error, name)


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_every_status_names_its_reason_and_fits_into_trailing_metadata(error: errors.TickwheelError) -> None:
    _, status = to_status(error)
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert info.domain == ERROR_DOMAIN
    assert info.reason == info.reason.upper() != ""
    assert status.ByteSize() < 4_096


def test_what_a_caller_sent_does_not_blow_up_the_answer() -> None:
    _, status = to_status(errors.FieldInvalid("name", "x" * 1_000_000))
    assert status.ByteSize() < 8_192


def test_what_can_be_retried_says_when() -> None:
    _, status = to_status(errors.ShardMoving(7, 250))
    retry = error_details_pb2.RetryInfo()
    assert any(detail.Unpack(retry) for detail in status.details)
    assert retry.retry_delay.ToMilliseconds() == 250


def test_a_status_that_is_not_ours_is_left_alone() -> None:
    assert from_rpc_error(_Failed(grpc.StatusCode.UNIMPLEMENTED, "no such method", ())) is None
