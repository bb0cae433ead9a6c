"""What is to be done (the template of a job), apart from when; and what became of an attempt.

A template is stored once for all runs and schedules that share it, under the hash of its canonical form.
"""

import re
from enum import IntEnum
from hashlib import sha256

import msgspec

DEFAULT_QUEUE = "default"
PRIORITY_MAX = 9
PAYLOAD_BYTES_DEFAULT_MAX = 64 * 1024
PAYLOAD_BYTES_MAX = 1024 * 1024
LEASE_DEFAULT_MS = 10_000
LEASE_MS_MIN = 2_000
LEASE_MS_MAX = 600_000
ATTEMPT_TIMEOUT_DEFAULT_MS = 600_000
ATTEMPT_COUNT_DEFAULT = 4
ATTEMPT_COUNT_MAX = 1_000
BACKOFF_MS_MAX = 365 * 86_400_000
MULTIPLIER_MAX = 1_000.0


class UnknownOutcomePolicy(IntEnum):
    RETRY = 1
    HOLD = 2


class RetryPolicy(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`attempt_count_max` counts the first attempt too."""

    attempt_count_max: int = ATTEMPT_COUNT_DEFAULT
    initial_backoff_ms: int = 2_000
    multiplier: float = 2.0
    backoff_ms_max: int = 3_600_000
    jitter_ratio: float = 0.1
    non_retryable_types: tuple[str, ...] = ()


class Timeouts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """0 means no limit."""

    start_ms_max: int = 0
    attempt_ms_max: int = ATTEMPT_TIMEOUT_DEFAULT_MS
    run_ms_max: int = 0
    heartbeat_ms_max: int = 0


class JobTemplate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    kind: str
    queue: str = DEFAULT_QUEUE
    priority: int = 0
    retry: RetryPolicy = RetryPolicy()
    timeouts: Timeouts = Timeouts()
    lease_ms: int = LEASE_DEFAULT_MS
    on_unknown_outcome: UnknownOutcomePolicy = UnknownOutcomePolicy.RETRY


class Payload(msgspec.Struct, frozen=True):
    data: bytes = b""
    content_type: str = ""


class Failure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    type: str = ""
    message: str = ""
    non_retryable: bool = False
    retry_delay_ms: int | None = None
    stack: str = ""
    fingerprint: str = ""


_encoder = msgspec.json.Encoder(order="sorted")
_template_decoder = msgspec.json.Decoder(JobTemplate)
_failure_decoder = msgspec.json.Decoder(Failure)


def encode_template(template: JobTemplate) -> bytes:
    """The canonical form: equal templates give equal bytes."""
    return _encoder.encode(template)


def decode_template(body: bytes) -> JobTemplate:
    return _template_decoder.decode(body)


def encode_failure(failure: Failure) -> bytes:
    return _encoder.encode(failure)


def decode_failure(body: bytes | str) -> Failure:
    return _failure_decoder.decode(body)


def content_id(body: bytes) -> int:
    """The first 63 bits of SHA-256, at least 1: the id under which a template or trigger is stored."""
    return (int.from_bytes(sha256(body).digest()[:8], "big") >> 1) or 1


_DIGITS = re.compile(r"[0-9a-f]*[0-9][0-9a-f]*")


def fingerprint(kind: str, message: str) -> str:
    """Groups failures that are alike: numbers and ids in the message do not count. 16 hexadecimal digits."""
    shape = _DIGITS.sub("#", message[:512].lower())
    return sha256(f"{kind}\0{shape}".encode()).hexdigest()[:16]
