"""Between the wire and the domain: reads and proves requests, and writes answers.

Whatever is wrong with a request is said with the path of its field, as it is called in the request. Nothing
that passes here can fail later on its way into Postgres.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any

import msgspec
from google.longrunning import operations_pb2
from google.protobuf import json_format
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.protobuf.timestamp_pb2 import Timestamp
from google.rpc import code_pb2

from tickwheel.domain import ids, job, trigger
from tickwheel.domain.calendar import CalendarRecord, CalendarSource, iso_dates
from tickwheel.domain.describe import PreviewedOccurrence
from tickwheel.domain.job import Failure, JobTemplate, Payload, RetryPolicy, Timeouts, UnknownOutcomePolicy
from tickwheel.domain.misfire import CATCHUP_COUNT_MAX, MisfirePolicy, MisfireRules
from tickwheel.domain.operation import Move, Operation, OperationState, Totals
from tickwheel.domain.record import AttemptRecord, DeadLetterRecord, RunRecord
from tickwheel.domain.schedule import (
    BUFFER_COUNT_DEFAULT,
    BUFFER_COUNT_MAX,
    CATCHUP_MS_MAX,
    MISFIRE_THRESHOLD_MS_MAX,
    RUN_COUNT_MAX,
    OverlapPolicy,
    ScheduleRecord,
    ScheduleSpec,
)
from tickwheel.domain.trigger import (
    EXCLUSION_COUNT_MAX,
    CalendarShift,
    CompiledTrigger,
    Cron,
    Dialect,
    DstGapPolicy,
    DstOverlapPolicy,
    Interval,
    Rrule,
    Trigger,
    TriggerSet,
)
from tickwheel.domain.upcoming import ExcludedOccurrence
from tickwheel.errors import FieldInvalid, TimeZoneUnknown, TriggerInvalid, TriggerNeverFires
from tickwheel.v1 import calendar_pb2, job_pb2, operation_pb2, run_pb2, schedule_pb2

TIME_S_MAX = 253_402_300_799
"""9999-12-31T23:59:59Z."""
REQUEST_ID_CHARACTERS_MAX = 128
LABEL_COUNT_MAX = 64
LABEL_CHARACTERS_MAX = 63
ANNOTATION_BYTES_MAX = 64 * 1024
DISPLAY_NAME_CHARACTERS_MAX = 255
REASON_CHARACTERS_MAX = 1_024
DAY_MS = 86_400_000
CALENDAR_COUNT_MAX = 20
"""Of one schedule."""
_EXACT_MAX = 2**53
DURATION_MS_MAX = 10 * 366 * DAY_MS

_DIALECTS = {1: Dialect.UNIX, 2: Dialect.UNIX_SECONDS, 3: Dialect.QUARTZ}
_GAPS = {1: DstGapPolicy.RUN_AT_GAP_END, 2: DstGapPolicy.SKIP, 3: DstGapPolicy.RUN_SHIFTED}
_OVERLAPS = {1: DstOverlapPolicy.FIRST, 2: DstOverlapPolicy.SECOND, 3: DstOverlapPolicy.BOTH}
_SHIFTS = {1: CalendarShift.NONE, 2: CalendarShift.NEXT_WORKING_DAY, 3: CalendarShift.PREVIOUS_WORKING_DAY}
_MISFIRES = {1: MisfirePolicy.FIRE_ONCE, 2: MisfirePolicy.FIRE_ALL, 3: MisfirePolicy.SKIP}


# --- Names ------------------------------------------------------------------------------------------------


def tenant_of(parent: str, field: str = "parent") -> str:
    """The tenant's id in `tenants/{t}`."""
    parts = parent.split("/")
    if len(parts) != 2 or parts[0] != "tenants":
        raise FieldInvalid(field, f"{_shown(parent)} is not of the form tenants/{{tenant}}")
    return user_id(parts[1], field)


def schedule_of(name: str, field: str = "name") -> tuple[str, str]:
    """The tenant's and the schedule's id in `tenants/{t}/schedules/{s}`."""
    parts = name.split("/")
    if len(parts) != 4 or parts[0] != "tenants" or parts[2] != "schedules":
        raise FieldInvalid(
            field, f"{_shown(name)} is not of the form tenants/{{tenant}}/schedules/{{schedule}}"
        )
    return user_id(parts[1], field), user_id(parts[3], field)


def calendar_of(name: str, field: str = "name") -> tuple[str, str]:
    """The tenant's and the calendar's id in `tenants/{t}/calendars/{c}`."""
    parts = name.split("/")
    if len(parts) != 4 or parts[0] != "tenants" or parts[2] != "calendars":
        raise FieldInvalid(
            field, f"{_shown(name)} is not of the form tenants/{{tenant}}/calendars/{{calendar}}"
        )
    return user_id(parts[1], field), user_id(parts[3], field)


def run_of(name: str, field: str = "name", collection: str = "runs") -> tuple[str, bytes]:
    """The tenant's id and the run's in `tenants/{t}/runs/{r}`."""
    parts = name.split("/")
    run = ids.parse_run_id(parts[3]) if len(parts) == 4 else None
    if len(parts) != 4 or parts[0] != "tenants" or parts[2] != collection or run is None:
        form = f"tenants/{{tenant}}/{collection}/{{32 hexadecimal digits}}"
        raise FieldInvalid(field, f"{_shown(name)} is not of the form {form}")
    return user_id(parts[1], field), bytes(run)


def user_id(text: str, field: str) -> str:
    if ids.USER_ID_PATTERN.fullmatch(text) is None:
        raise FieldInvalid(
            field,
            f"{_shown(text)} is not a valid id: 1 to 63 of a-z, 0-9 and '-', starting with a letter, "
            "not ending with '-'",
        )
    return text


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:79] + "…")


# --- Plain values -----------------------------------------------------------------------------------------


def text(value: str, field: str, characters_max: int) -> str:
    """A string that can be stored. Characters are Unicode code points, kept as they are sent."""
    if len(value) > characters_max:
        raise FieldInvalid(field, f"{len(value)} characters are more than {characters_max}")
    if "\0" in value:
        raise FieldInvalid(field, "the character U+0000 cannot be stored: remove it")
    return value


def request_id(value: str) -> str:
    return text(value, "request_id", REQUEST_ID_CHARACTERS_MAX)


def label_map(values: Mapping[str, str], field: str) -> dict[str, str]:
    if len(values) > LABEL_COUNT_MAX:
        raise FieldInvalid(field, f"{len(values)} labels are more than {LABEL_COUNT_MAX}")
    for key, value in values.items():
        if not key:
            raise FieldInvalid(field, "a key is empty")
        text(key, field, LABEL_CHARACTERS_MAX)
        text(value, f"{field}.{key}", LABEL_CHARACTERS_MAX)
    return dict(values)


def annotation_map(values: Mapping[str, str], field: str) -> dict[str, str]:
    size = sum(len(key.encode()) + len(value.encode()) for key, value in values.items())
    if size > ANNOTATION_BYTES_MAX:
        raise FieldInvalid(field, f"{size} bytes are more than {ANNOTATION_BYTES_MAX}")
    for key, value in values.items():
        text(key, field, ANNOTATION_BYTES_MAX)
        text(value, f"{field}.{key}", ANNOTATION_BYTES_MAX)
    return dict(values)


def time_us(value: Timestamp, field: str) -> int:
    """Microseconds since the Unix epoch; finer parts are cut off. From 1970 to the end of 9999."""
    if not 0 <= value.nanos <= 999_999_999:
        raise FieldInvalid(field, f"nanos is {value.nanos}, not between 0 and 999999999")
    if not 0 <= value.seconds <= TIME_S_MAX:
        raise FieldInvalid(field, "it is not between 1970-01-01T00:00:00Z and 9999-12-31T23:59:59Z")
    return value.seconds * 1_000_000 + value.nanos // 1_000


def duration_us(value: Duration, field: str) -> int:
    """Microseconds, 0 or more, ten years at most."""
    if abs(value.nanos) > 999_999_999 or (
        value.seconds and value.nanos and (value.seconds > 0) != (value.nanos > 0)
    ):
        raise FieldInvalid(field, "nanos and seconds do not fit together")
    if value.seconds < 0 or value.nanos < 0:
        raise FieldInvalid(field, "it is negative")
    if value.seconds > DURATION_MS_MAX // 1_000:
        raise FieldInvalid(field, "it is longer than ten years")
    return value.seconds * 1_000_000 + value.nanos // 1_000


def duration_ms(
    message: Message, name: str, path: str, *, default: int, least: int = 1, most: int = DURATION_MS_MAX
) -> int:
    """A Duration field in milliseconds, rounded up; `default` where it is not set."""
    if not message.HasField(name):
        return default
    field = _join(path, name)
    value = -(-duration_us(getattr(message, name), field) // 1_000)
    if value < least:
        wanted = (
            "longer than zero; leave it unset for the default"
            if least == 1
            else f"at least {_seconds(least)}"
        )
        raise FieldInvalid(field, f"it must be {wanted}")
    if value > most:
        raise FieldInvalid(field, f"it must be at most {_seconds(most)}")
    return value


def _seconds(ms: int) -> str:
    return f"{ms / 1_000:g} s"


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def timestamp(us: int) -> Timestamp:
    return Timestamp(seconds=us // 1_000_000, nanos=us % 1_000_000 * 1_000)


def duration(us: int) -> Duration:
    sign = -1 if us < 0 else 1
    return Duration(seconds=sign * (abs(us) // 1_000_000), nanos=sign * (abs(us) % 1_000_000 * 1_000))


# --- Payloads, templates, failures ------------------------------------------------------------------------


def payload(message: job_pb2.Payload, field: str) -> Payload:
    """Bytes and their media type; `json` becomes its text."""
    if message.WhichOneof("content") == "json":
        try:
            # A Struct keeps no order of keys and knows no integers: sorted, and 1 rather than 1.0.
            plain = _plain(json_format.MessageToDict(message.json))
            data = msgspec.json.encode(plain, order="sorted")
        except (json_format.SerializeToJsonError, msgspec.MsgspecError, RecursionError) as error:
            raise FieldInvalid(_join(field, "json"), f"it is not JSON: {error}") from error
        content_type = "application/json"
    else:
        data = message.data
        content_type = text(message.content_type, _join(field, "content_type"), 255)
    if len(data) > job.PAYLOAD_BYTES_MAX:
        raise FieldInvalid(field, f"{len(data)} bytes are more than {job.PAYLOAD_BYTES_MAX}")
    return Payload(data, content_type)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, float) and value.is_integer() and abs(value) <= _EXACT_MAX:
        return int(value)
    return value


def payload_message(value: Payload) -> job_pb2.Payload:
    return job_pb2.Payload(data=value.data, content_type=value.content_type)


def template(message: job_pb2.JobTemplate, path: str) -> JobTemplate:
    """What is to be done, apart from its payload."""
    queue = message.queue or job.DEFAULT_QUEUE
    user_id(queue, _join(path, "queue"))
    if ids.KIND_PATTERN.fullmatch(message.kind) is None:
        problem = "it is required" if not message.kind else f"{_shown(message.kind)} is not valid"
        raise FieldInvalid(_join(path, "kind"), f"{problem}: 1 to 128 letters, digits and '_.:/-'")
    if not 0 <= message.priority <= job.PRIORITY_MAX:
        raise FieldInvalid(
            _join(path, "priority"), f"{message.priority} is not between 0 and {job.PRIORITY_MAX}"
        )
    return JobTemplate(
        kind=message.kind,
        queue=queue,
        priority=message.priority,
        retry=_retry(message.retry, _join(path, "retry")) if message.HasField("retry") else RetryPolicy(),
        timeouts=_timeouts(message, path) if message.HasField("timeouts") else Timeouts(),
        lease_ms=duration_ms(
            message,
            "lease_duration",
            path,
            default=job.LEASE_DEFAULT_MS,
            least=job.LEASE_MS_MIN,
            most=job.LEASE_MS_MAX,
        ),
        on_unknown_outcome=UnknownOutcomePolicy(
            _enum(message.on_unknown_outcome, {1: 1, 2: 2}, 1, _join(path, "on_unknown_outcome"))
        ),
    )


def _retry(message: job_pb2.RetryPolicy, path: str) -> RetryPolicy:
    standard = RetryPolicy()
    count = message.attempt_count_max or standard.attempt_count_max
    if not 1 <= count <= job.ATTEMPT_COUNT_MAX:
        raise FieldInvalid(
            _join(path, "attempt_count_max"), f"{count} is not between 1 and {job.ATTEMPT_COUNT_MAX}"
        )
    multiplier = message.multiplier or standard.multiplier
    if not 1.0 <= multiplier <= job.MULTIPLIER_MAX:
        raise FieldInvalid(
            _join(path, "multiplier"), f"{multiplier:g} is not between 1 and {job.MULTIPLIER_MAX:g}"
        )
    ratio = message.jitter_ratio if message.HasField("jitter_ratio") else standard.jitter_ratio
    if not (math.isfinite(ratio) and 0.0 <= ratio <= 1.0):
        raise FieldInvalid(_join(path, "jitter_ratio"), f"{ratio:g} is not between 0 and 1")
    types = tuple(message.non_retryable_types)
    if len(types) > 100:
        raise FieldInvalid(_join(path, "non_retryable_types"), f"{len(types)} are more than 100")
    for index, name in enumerate(types):
        text(name, f"{_join(path, 'non_retryable_types')}[{index}]", 255)
    most = job.BACKOFF_MS_MAX
    return RetryPolicy(
        attempt_count_max=count,
        initial_backoff_ms=duration_ms(
            message,
            "initial_backoff_duration",
            path,
            default=standard.initial_backoff_ms,
            least=0,
            most=most,
        ),
        multiplier=multiplier,
        backoff_ms_max=duration_ms(
            message, "backoff_duration_max", path, default=standard.backoff_ms_max, least=0, most=most
        ),
        jitter_ratio=ratio,
        non_retryable_types=types,
    )


def _timeouts(message: job_pb2.JobTemplate, path: str) -> Timeouts:
    standard, given, path = Timeouts(), message.timeouts, _join(path, "timeouts")
    return Timeouts(
        start_ms_max=duration_ms(given, "start_duration_max", path, default=standard.start_ms_max),
        attempt_ms_max=duration_ms(given, "attempt_duration_max", path, default=standard.attempt_ms_max),
        run_ms_max=duration_ms(given, "run_duration_max", path, default=standard.run_ms_max),
        heartbeat_ms_max=duration_ms(
            given, "heartbeat_duration_max", path, default=standard.heartbeat_ms_max
        ),
    )


def _enum(value: int, known: Mapping[int, Any], default: int, field: str) -> Any:
    if value == 0:
        return known[default]
    if value not in known:
        raise FieldInvalid(field, f"{value} is not a value of it")
    return known[value]


def template_message(value: JobTemplate, own_payload: Payload | None = None) -> job_pb2.JobTemplate:
    """With every default spelled out."""
    message = job_pb2.JobTemplate(
        queue=value.queue,
        kind=value.kind,
        priority=value.priority,
        lease_duration=duration(value.lease_ms * 1_000),
        on_unknown_outcome=int(value.on_unknown_outcome),  # type: ignore[arg-type]
        retry=job_pb2.RetryPolicy(
            attempt_count_max=value.retry.attempt_count_max,
            initial_backoff_duration=duration(value.retry.initial_backoff_ms * 1_000),
            multiplier=value.retry.multiplier,
            backoff_duration_max=duration(value.retry.backoff_ms_max * 1_000),
            jitter_ratio=value.retry.jitter_ratio,
            non_retryable_types=value.retry.non_retryable_types,
        ),
    )
    for name, ms in (
        ("start_duration_max", value.timeouts.start_ms_max),
        ("attempt_duration_max", value.timeouts.attempt_ms_max),
        ("run_duration_max", value.timeouts.run_ms_max),
        ("heartbeat_duration_max", value.timeouts.heartbeat_ms_max),
    ):
        if ms:
            getattr(message.timeouts, name).CopyFrom(duration(ms * 1_000))
    if own_payload is not None and (own_payload.data or own_payload.content_type):
        message.payload.CopyFrom(payload_message(own_payload))
    return message


def failure_message(value: Failure) -> job_pb2.Failure:
    message = job_pb2.Failure(
        type=value.type,
        message=value.message,
        non_retryable=value.non_retryable,
        stack=value.stack,
        fingerprint=value.fingerprint,
    )
    if value.retry_delay_ms is not None:
        message.retry_delay.CopyFrom(duration(value.retry_delay_ms * 1_000))
    return message


# --- Schedules --------------------------------------------------------------------------------------------


def schedule_spec(
    message: schedule_pb2.ScheduleSpec,
    *,
    path: str,
    name: str,
    default_anchor_us: int,
    calendars: Mapping[str, frozenset[date]] | None = None,
) -> tuple[ScheduleSpec, CompiledTrigger]:
    """The spec, read and proven, with its triggers ready to be asked.

    `name` is what an `H` draws from; `default_anchor_us` is when the schedule is, or was, created.
    `calendars` are the dates of each calendar that it names; None: they are left out, and the triggers are
    not those that the schedule is due by.

    Raises:
        FieldInvalid, TriggerInvalid, TriggerNeverFires, TimeZoneUnknown: with the path of the field.
    """
    start_us = (
        time_us(message.start_time, _join(path, "start_time")) if message.HasField("start_time") else None
    )
    end_us = time_us(message.end_time, _join(path, "end_time")) if message.HasField("end_time") else None
    jitter_us = (
        duration_us(message.jitter_duration, _join(path, "jitter_duration"))
        if message.HasField("jitter_duration")
        else 0
    )
    anchor_us = default_anchor_us if start_us is None else start_us
    text(message.display_name, _join(path, "display_name"), DISPLAY_NAME_CHARACTERS_MAX)
    triggers, compiled = trigger_set(
        message.triggers,
        message.exclusions,
        path=path,
        name=name,
        default_anchor_us=anchor_us,
        start_us=start_us,
        end_us=end_us,
        jitter_us=jitter_us,
        calendars=calendars,
    )
    if not message.HasField("template"):
        raise FieldInvalid(_join(path, "template"), "it is required")
    if not 0 <= message.run_count_max <= RUN_COUNT_MAX:
        raise FieldInvalid(
            _join(path, "run_count_max"), f"{message.run_count_max} is not between 0 and {RUN_COUNT_MAX}"
        )
    job_path = _join(path, "template")
    spec = ScheduleSpec(
        triggers=triggers,
        template=template(message.template, job_path),
        payload=payload(message.template.payload, _join(job_path, "payload")),
        misfire=_misfire(message.misfire, _join(path, "misfire")),
        overlap=OverlapPolicy(
            _enum(message.overlap.policy, {n: n for n in range(1, 6)}, 1, _join(path, "overlap.policy"))
        ),
        buffer_count_max=_bounded(
            message.overlap.buffer_count_max,
            BUFFER_COUNT_DEFAULT,
            BUFFER_COUNT_MAX,
            _join(path, "overlap.buffer_count_max"),
        ),
        run_count_max=message.run_count_max,
        verbatim=_verbatim(message),
    )
    return spec, compiled


def trigger_set(
    triggers: Sequence[schedule_pb2.Trigger],
    exclusions: Sequence[schedule_pb2.Exclusion],
    *,
    path: str,
    name: str | None,
    default_anchor_us: int,
    start_us: int | None = None,
    end_us: int | None = None,
    jitter_us: int = 0,
    calendars: Mapping[str, frozenset[date]] | None = None,
) -> tuple[TriggerSet, CompiledTrigger]:
    """The triggers with everything resolved that has a default, and compiled."""
    if not triggers:
        raise FieldInvalid(_join(path, "triggers"), "at least one trigger is required")
    given = TriggerSet(
        triggers=tuple(
            _trigger(each, _join(path, f"triggers[{index}]"), default_anchor_us)
            for index, each in enumerate(triggers)
        ),
        exclusions=excluded_dates(exclusions, path).union(*(calendars or {}).values()),
        start_us=start_us,
        end_us=end_us,
        jitter_us=jitter_us,
    )
    try:
        resolved = trigger.resolve_hash(given, name) if name is not None else given
        return resolved, trigger.compile(resolved)
    except (TriggerInvalid, TriggerNeverFires, TimeZoneUnknown) as error:
        if not path:
            raise
        raise error.under(path) from error


def _trigger(message: schedule_pb2.Trigger, path: str, default_anchor_us: int) -> Trigger:
    kind = message.WhichOneof("kind")
    if kind is None:
        raise FieldInvalid(path, "one of cron, interval, instants and rrule is required")
    cron = interval = rrule = None
    instants_us: tuple[int, ...] = ()
    if kind == "cron":
        dialect = _enum(message.cron.dialect, _DIALECTS, 1, f"{path}.cron.dialect")
        # Its length and its characters are the engine's to judge: it names the column.
        cron = Cron(message.cron.expression, dialect)
    elif kind == "interval":
        field = f"{path}.interval.duration"
        if not message.interval.HasField("duration"):
            raise FieldInvalid(field, "it is required")
        anchor_us = default_anchor_us
        if message.interval.HasField("anchor_time"):
            anchor_us = time_us(message.interval.anchor_time, f"{path}.interval.anchor_time")
        interval = Interval(duration_us(message.interval.duration, field), anchor_us)
    elif kind == "instants":
        if not 1 <= len(message.instants.times) <= 1_000:
            raise FieldInvalid(
                f"{path}.instants.times", f"{len(message.instants.times)} is not between 1 and 1000"
            )
        instants_us = tuple(
            time_us(each, f"{path}.instants.times[{index}]")
            for index, each in enumerate(message.instants.times)
        )
    else:
        rrule = Rrule(text(message.rrule.rule, f"{path}.rrule.rule", 10_000))
    return Trigger(
        cron=cron,
        interval=interval,
        instants_us=instants_us,
        rrule=rrule,
        time_zone=message.time_zone or "UTC",
        dst_gap_policy=_enum(message.dst_gap_policy, _GAPS, 1, f"{path}.dst_gap_policy"),
        dst_overlap_policy=_enum(message.dst_overlap_policy, _OVERLAPS, 1, f"{path}.dst_overlap_policy"),
        calendar_shift=_enum(message.calendar_shift, _SHIFTS, 1, f"{path}.calendar_shift"),
    )


def named_calendars(
    messages: Sequence[schedule_pb2.Exclusion], path: str, tenant: str
) -> list[tuple[str, str]]:
    """(field, calendar id) of each calendar that exclusions name; they are `tenant`'s own."""
    found: list[tuple[str, str]] = []
    for outer, message in enumerate(messages):
        for inner, name in enumerate(message.calendars):
            field = _join(path, f"exclusions[{outer}].calendars[{inner}]")
            owner, calendar = calendar_of(name, field)
            if owner != tenant:
                raise FieldInvalid(field, f"it is not a calendar of tenants/{tenant}")
            found.append((field, calendar))
    if len(found) > CALENDAR_COUNT_MAX:
        raise FieldInvalid(
            _join(path, "exclusions"), f"{len(found)} calendars are more than {CALENDAR_COUNT_MAX}"
        )
    return found


def excluded_dates(messages: Sequence[schedule_pb2.Exclusion], path: str) -> frozenset[date]:
    """The dates that exclusions name one by one."""
    days: set[date] = set()
    for outer, message in enumerate(messages):
        if len(message.dates) > 1_000:
            raise FieldInvalid(
                _join(path, f"exclusions[{outer}].dates"), f"{len(message.dates)} are more than 1000"
            )
        for inner, value in enumerate(message.dates):
            days.add(_day(value, _join(path, f"exclusions[{outer}].dates[{inner}]")))
    return frozenset(days)


def _day(value: str, field: str) -> date:
    try:
        return date.fromisoformat(value)
    except ValueError as error:
        raise FieldInvalid(field, f"{_shown(value)} is not a date such as 2027-12-25") from error


def _misfire(message: schedule_pb2.MisfirePolicy, path: str) -> MisfireRules:
    standard = MisfireRules()
    return MisfireRules(
        policy=_enum(message.policy, _MISFIRES, 1, _join(path, "policy")),
        threshold_us=1_000
        * duration_ms(
            message,
            "threshold_duration",
            path,
            default=standard.threshold_us // 1_000,
            most=MISFIRE_THRESHOLD_MS_MAX,
        ),
        catchup_us=1_000
        * duration_ms(
            message, "catchup_duration", path, default=standard.catchup_us // 1_000, most=CATCHUP_MS_MAX
        ),
        catchup_count_max=_bounded(
            message.catchup_count_max,
            standard.catchup_count_max,
            CATCHUP_COUNT_MAX,
            _join(path, "catchup_count_max"),
        ),
    )


def _bounded(value: int, default: int, most: int, field: str) -> int:
    if not 0 <= value <= most:
        raise FieldInvalid(field, f"{value} is not between 1 and {most}")
    return value or default


def _verbatim(message: schedule_pb2.ScheduleSpec) -> str:
    """What the user typed, for people and for later; its payload is stored apart."""
    if message.template.HasField("payload"):
        bare = schedule_pb2.ScheduleSpec()
        bare.CopyFrom(message)
        bare.template.ClearField("payload")
        message = bare
    return json_format.MessageToJson(message, preserving_proto_field_name=True, indent=None)


def spec_message(verbatim: str, own_payload: Payload | None) -> schedule_pb2.ScheduleSpec:
    """The spec as it was typed. What a newer version knows and this one does not is left out."""
    message = json_format.Parse(verbatim, schedule_pb2.ScheduleSpec(), ignore_unknown_fields=True)
    if own_payload is not None and (own_payload.data or own_payload.content_type):
        message.template.payload.CopyFrom(payload_message(own_payload))
    return message


def effective_spec(typed: schedule_pb2.ScheduleSpec, value: ScheduleSpec) -> schedule_pb2.ScheduleSpec:
    """The spec with every default spelled out."""
    message = schedule_pb2.ScheduleSpec()
    message.CopyFrom(typed)
    for each, proven in zip(message.triggers, value.triggers.triggers, strict=True):
        each.time_zone = proven.time_zone
        each.dst_gap_policy = each.dst_gap_policy or 1  # type: ignore[assignment]
        each.dst_overlap_policy = each.dst_overlap_policy or 1  # type: ignore[assignment]
        each.calendar_shift = each.calendar_shift or 1  # type: ignore[assignment]
        if proven.cron is not None:
            each.cron.dialect = each.cron.dialect or 1  # type: ignore[assignment]
        if proven.interval is not None:
            each.interval.anchor_time.CopyFrom(timestamp(proven.interval.anchor_us))
    message.misfire.policy = message.misfire.policy or 1  # type: ignore[assignment]
    message.misfire.threshold_duration.CopyFrom(duration(value.misfire.threshold_us))
    message.misfire.catchup_duration.CopyFrom(duration(value.misfire.catchup_us))
    message.misfire.catchup_count_max = value.misfire.catchup_count_max
    message.overlap.policy = int(value.overlap)  # type: ignore[assignment]
    message.overlap.buffer_count_max = value.buffer_count_max
    message.template.CopyFrom(template_message(value.template))
    if typed.template.HasField("payload"):
        message.template.payload.CopyFrom(typed.template.payload)
    return message


def schedule_message(record: ScheduleRecord) -> schedule_pb2.Schedule:
    """What its row says; the caller adds what has to be computed."""
    message = schedule_pb2.Schedule(
        name=ids.schedule_name(record.tenant, record.name),
        uid=record.uid.hex(),
        create_time=timestamp(record.create_us),
        update_time=timestamp(record.update_us),
        labels=record.labels,
        annotations=record.annotations,
        etag=record.etag,
        version=record.version,
        spec=spec_message(record.verbatim, record.payload),
    )
    status = message.status
    status.state = int(record.state)  # type: ignore[assignment]
    status.shard = record.shard
    status.observed_version = record.observed_version
    status.quarantine_reason = record.quarantine_reason or ""
    if record.pause is not None:
        status.pause.reason = record.pause.reason
        status.pause.principal = record.pause.principal
        status.pause.pause_time.CopyFrom(timestamp(record.pause.pause_us))
        if record.pause.resume_us:
            status.pause.resume_time.CopyFrom(timestamp(record.pause.resume_us))
    return message


def occurrence_message(seen: PreviewedOccurrence, due_us: int) -> schedule_pb2.Occurrence:
    """An occurrence that will happen. `due_us`: with its jitter."""
    return schedule_pb2.Occurrence(
        schedule_time=timestamp(seen.schedule_time_us),
        due_time=timestamp(due_us),
        utc_offset=seen.utc_offset,
        adjustment=seen.adjustment,
    )


def excluded_message(seen: ExcludedOccurrence, reason: str) -> schedule_pb2.Occurrence:
    """An occurrence that will not happen, and why."""
    return schedule_pb2.Occurrence(
        schedule_time=timestamp(seen.schedule_time_us), utc_offset=seen.utc_offset, exclusion=reason
    )


# --- Calendars and operations -----------------------------------------------------------------------------


def calendar_source(message: calendar_pb2.Calendar, path: str) -> CalendarSource:
    """What a calendar says; whether its rules can be read is found when they are worked out."""
    field = _join(path, "dates")
    if len(message.dates) > EXCLUSION_COUNT_MAX:
        raise FieldInvalid(field, f"{len(message.dates)} are more than {EXCLUSION_COUNT_MAX}")
    days = {_day(value, f"{field}[{index}]") for index, value in enumerate(message.dates)}
    rules = [
        text(rule, f"{_join(path, 'rules')}[{index}]", 10_000) for index, rule in enumerate(message.rules)
    ]
    return CalendarSource(tuple(sorted(days)), tuple(rules))


def calendar_message(record: CalendarRecord) -> calendar_pb2.Calendar:
    return calendar_pb2.Calendar(
        name=record.full_name,
        uid=record.uid.hex(),
        create_time=timestamp(record.create_us),
        update_time=timestamp(record.update_us),
        display_name=record.display_name,
        labels=record.labels,
        etag=record.etag,
        revision=record.revision,
        dates=iso_dates(record.source.dates),
        rules=record.source.rules,
        effective_dates=iso_dates(record.dates),
        effective_year=record.effective_year,
    )


def operation_message(
    operation: Operation, totals: Totals, moves: Sequence[Move]
) -> operations_pb2.Operation:
    metadata = operation_pb2.OperationMetadata(
        kind=int(operation.kind),  # type: ignore[arg-type]
        state=int(operation.state),  # type: ignore[arg-type]
        resource=operation.resource,
        principal=operation.principal,
        create_time=timestamp(operation.create_us),
        update_time=timestamp(operation.update_us),
        step_count=totals.step_count,
        step_done_count=totals.step_done_count,
        examined_count=totals.examined_count,
        changed_count=totals.changed_count,
        skipped_count=totals.skipped_count,
        last_error=totals.last_error,
    )
    if operation.end_us:
        metadata.end_time.CopyFrom(timestamp(operation.end_us))
    for move in moves:
        added = metadata.moves.add(schedule=move.schedule)
        added.schedule_time_before.CopyFrom(timestamp(move.before_us))
        if move.after_us != trigger.NEVER_US:
            added.schedule_time_after.CopyFrom(timestamp(move.after_us))
    message = operations_pb2.Operation(
        name=operation.name, done=operation.state is not OperationState.RUNNING
    )
    message.metadata.Pack(metadata)
    if operation.state is OperationState.SUCCEEDED:
        message.response.Pack(
            operation_pb2.OperationResult(
                examined_count=totals.examined_count,
                changed_count=totals.changed_count,
                skipped_count=totals.skipped_count,
            )
        )
    elif operation.state is OperationState.CANCELLED:
        message.error.code, message.error.message = code_pb2.CANCELLED, "it was cancelled"
    elif operation.state is OperationState.FAILED:
        message.error.code, message.error.message = code_pb2.ABORTED, totals.last_error
    return message


# --- Runs -------------------------------------------------------------------------------------------------


def run_message(record: RunRecord, *, full: bool) -> run_pb2.Run:
    """`full`: with payloads and results."""
    name = ids.run_name(record.tenant, record.run)
    message = run_pb2.Run(
        name=name,
        create_time=timestamp(record.create_us),
        schedule=ids.schedule_name(record.tenant, record.schedule) if record.schedule else "",
        schedule_version=record.version,
        cause=int(record.cause),  # type: ignore[arg-type]
        state=int(record.state),  # type: ignore[arg-type]
        schedule_time=timestamp(record.schedule_us),
        due_time=timestamp(record.due_us),
        template=template_message(record.template, record.payload if full else None),
        attempt_count=record.attempt,
        idempotency_key=record.run.hex(),
        traceparent=record.traceparent,
        cancel_reason=record.cancel_reason,
        labels=record.labels,
        shard=record.shard,
        worker=record.worker,
    )
    if record.lease_us:
        message.lease_time.CopyFrom(timestamp(record.lease_us))
        message.due_lag_duration.CopyFrom(duration(max(0, record.lease_us - record.due_us)))
    if record.end_us:
        message.end_time.CopyFrom(timestamp(record.end_us))
    if record.failure is not None:
        message.last_failure.CopyFrom(failure_message(record.failure))
    if full and record.result is not None:
        message.result.CopyFrom(payload_message(record.result))
    if record.progress:
        try:
            message.progress.ParseFromString(record.progress)
        except DecodeError:
            # What a worker said of itself does not hide the run.
            message.ClearField("progress")
    if record.replayed_from is not None:
        message.replayed_from = ids.run_name(record.tenant, record.replayed_from)
    return message


def attempt_message(record: AttemptRecord, tenant: str) -> run_pb2.Attempt:
    message = run_pb2.Attempt(
        name=f"{ids.run_name(tenant, record.run)}/attempts/{record.number}",
        number=record.number,
        fence=record.fence,
        worker=record.worker,
        host=record.host,
        lease_time=timestamp(record.lease_us),
        state=int(record.state),  # type: ignore[arg-type]
    )
    if record.end_us:
        message.end_time.CopyFrom(timestamp(record.end_us))
    if record.failure is not None:
        message.failure.CopyFrom(failure_message(record.failure))
    return message


def dead_letter_message(record: DeadLetterRecord) -> run_pb2.DeadLetter:
    message = run_pb2.DeadLetter(
        name=f"tenants/{record.tenant}/deadLetters/{record.run.hex()}",
        run=ids.run_name(record.tenant, record.run),
        schedule=ids.schedule_name(record.tenant, record.schedule) if record.schedule else "",
        queue=record.queue,
        kind=record.kind,
        create_time=timestamp(record.create_us),
        attempt_count=record.attempt_count,
        replayed_by=ids.run_name(record.tenant, record.replayed_by) if record.replayed_by else "",
        replay_count=record.replay_count,
    )
    if record.failure is not None:
        message.last_failure.CopyFrom(failure_message(record.failure))
    if record.payload is not None:
        message.payload.CopyFrom(payload_message(record.payload))
    return message
