"""What can go wrong, as one tree. A class for each thing that a caller can act on; the fields come first.

TickwheelError
└── InvalidArgument              what the caller sent cannot be taken, now or later
    ├── TriggerInvalid           a trigger is malformed: which field, why, and where in the text
    ├── TriggerNeverFires        a trigger is well-formed and names no instant at all
    └── TimeZoneUnknown          a time zone has no place in the cluster's zone data
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
