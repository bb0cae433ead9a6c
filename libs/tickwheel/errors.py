"""What can go wrong, as one tree. A class for each thing that a caller can act on; the fields come first.

TickwheelError
├── InvalidArgument              what the caller sent cannot be taken, now or later
│   ├── FieldInvalid             a field is malformed or out of its bounds: which one, and what to do
│   │   ├── FilterInvalid        a filter cannot be read
│   │   ├── FilterFieldNotIndexed  a filter names a field that would have to be searched for
│   │   └── PageTokenMismatch    a page token belongs to another query
│   ├── RequestIdReused          a request_id came again with another request
│   ├── TriggerInvalid           a trigger is malformed: which field, why, and where in the text
│   ├── TriggerNeverFires        a trigger is well-formed and names no instant at all
│   └── TimeZoneUnknown          a time zone has no place in the cluster's zone data
├── NotFound                     there is no such resource
├── AlreadyExists                the name is taken
├── EtagMismatch                 somebody else changed the resource first
├── FailedPrecondition           not in this state
│   ├── StateTransitionForbidden the table of states has no such move
│   ├── CalendarInUse            a calendar that schedules name is to be deleted
│   └── LeaseSuperseded          the lease is not the caller's any more
├── LimitExceeded                too much at once, or too many
└── Unavailable                  not now: the same call may succeed later
    ├── ShardMoving              a shard has no owner at this moment
    ├── StoreUnavailable         Postgres or etcd is out of reach
    └── NodeDraining             this process takes no new work
"""

from __future__ import annotations


class TickwheelError(Exception):
    """The root: everything that tickwheel raises on purpose."""


class InvalidArgument(TickwheelError):
    """What the caller sent cannot be taken: change it, a retry gives the same answer."""


class TriggerInvalid(InvalidArgument):
    """A trigger is malformed. Correct the named field."""

    def __init__(self, field: str, reason: str, column: int | None = None) -> None:
        self.field = field
        self.reason = reason
        self.column = column
        """Where in the expression, counted from 1; None where there is no text."""
        where = f" (column {column})" if column is not None else ""
        super().__init__(f"{field}: {reason}{where}")

    def under(self, parent: str) -> TriggerInvalid:
        """The same fault seen from the message that holds the field."""
        return TriggerInvalid(f"{parent}.{self.field}", self.reason, self.column)


class TriggerNeverFires(InvalidArgument):
    """A trigger is well-formed and names no instant. Correct the dates, the bounds or the exclusions."""

    def __init__(self, field: str, reason: str) -> None:
        self.field = field
        self.reason = reason
        super().__init__(f"{field}: never fires: {reason}")

    def under(self, parent: str) -> TriggerNeverFires:
        return TriggerNeverFires(f"{parent}.{self.field}", self.reason)


class TimeZoneUnknown(InvalidArgument):
    """A time zone has no place in the cluster's data. Use an IANA name, such as ``Europe/Berlin``."""

    def __init__(self, name: str, reason: str, field: str = "time_zone") -> None:
        self.field = field
        self.name = name
        self.reason = reason
        super().__init__(f"{field}: {name!r} is not a time zone to schedule in: {reason}")

    def under(self, parent: str) -> TimeZoneUnknown:
        return TimeZoneUnknown(self.name, self.reason, f"{parent}.{self.field}")


class FieldInvalid(InvalidArgument):
    """A field is malformed or out of its bounds. Correct the named field."""

    def __init__(self, field: str, reason: str) -> None:
        self.field = field
        self.reason = reason
        super().__init__(f"{field}: {reason}")


class FilterInvalid(FieldInvalid):
    """A filter cannot be read. Terms are `field = "value"`, joined by AND."""


class FilterFieldNotIndexed(FieldInvalid):
    """A filter names a field that would have to be searched for. Use one of those that the answer lists."""


class PageTokenMismatch(FieldInvalid):
    """A page token belongs to another query. Start again without it."""


class RequestIdReused(InvalidArgument):
    """A request_id came again with another request. Use a new id for a new request."""

    def __init__(self, request_id: str, method: str) -> None:
        self.request_id = request_id
        self.method = method
        super().__init__(f"request_id {request_id!r} was used for another {method} within the last 7 days")


class NotFound(TickwheelError):
    """There is no such resource, or the caller may not know of it."""

    def __init__(self, resource: str) -> None:
        self.resource = resource
        super().__init__(f"{resource} does not exist")


class AlreadyExists(TickwheelError):
    """The name is taken. Choose another, or update what stands there."""

    def __init__(self, resource: str) -> None:
        self.resource = resource
        super().__init__(f"{resource} exists already")


class EtagMismatch(TickwheelError):
    """Somebody else changed the resource first. Read it again, and decide anew."""

    def __init__(self, resource: str, sent: str, current: str) -> None:
        self.resource = resource
        self.sent = sent
        self.current = current
        super().__init__(f"{resource} has etag {current!r}, not {sent!r}")


class FailedPrecondition(TickwheelError):
    """The resource's state does not allow this."""


class StateTransitionForbidden(FailedPrecondition):
    """The table of states has no such move."""

    def __init__(self, state: str, event: str, resource: str = "") -> None:
        self.state = state
        self.event = event
        self.resource = resource
        super().__init__(f"{resource or 'it'} is {state}: {event} leads nowhere from there")


class CalendarInUse(FailedPrecondition):
    """A calendar that schedules name is to be deleted. Change them first."""

    def __init__(self, resource: str, dependent: str) -> None:
        self.resource = resource
        self.dependent = dependent
        """One of them."""
        super().__init__(
            f"{resource} is in use: {dependent} names it; ListCalendarDependents lists all that do"
        )


class LeaseSuperseded(FailedPrecondition):
    """The lease is not the caller's any more. Stop the work, and do not retry."""

    def __init__(self, run: str, attempt: int, reason: str) -> None:
        self.run = run
        self.attempt = attempt
        self.reason = reason
        super().__init__(f"attempt {attempt} of {run} has no lease any more: {reason}")


class LimitExceeded(TickwheelError):
    """Too much at once, or too many. Send less, or wait."""

    def __init__(self, subject: str, limit: int, actual: int, reason: str = "BATCH_TOO_LARGE") -> None:
        self.subject = subject
        self.limit = limit
        self.actual = actual
        self.reason = reason
        super().__init__(f"{subject}: {actual} is more than {limit}")


class Unavailable(TickwheelError):
    """Not now. The same call may succeed after `retry_after_ms`."""

    retry_after_ms: int = 1_000


class ShardMoving(Unavailable):
    """A shard has no owner at this moment."""

    def __init__(self, shard: int, retry_after_ms: int = 500) -> None:
        self.shard = shard
        self.retry_after_ms = retry_after_ms
        super().__init__(f"shard {shard} is moving to another timer")


class StoreUnavailable(Unavailable):
    """Postgres or etcd is out of reach."""

    def __init__(self, store: str, reason: str, retry_after_ms: int = 1_000) -> None:
        self.store = store
        self.reason = reason
        self.retry_after_ms = retry_after_ms
        super().__init__(f"{store} is out of reach: {reason}")


class NodeDraining(Unavailable):
    """This process takes no new work."""

    def __init__(self, node: str, retry_after_ms: int = 1_000) -> None:
        self.node = node
        self.retry_after_ms = retry_after_ms
        super().__init__(f"{node} is draining")
