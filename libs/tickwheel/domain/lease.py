"""Until when does a lease hold, and do both ends of a stream hold the same ones? For timer and worker alike.

A timer and a worker never compare clocks. Each counts a lease on its own monotonic clock, from an instant
chosen so that the worker's deadline is never the later one, however long a message was under way:

* a renewal counts for the worker from when it *sent* the heartbeat, for the timer from when it *received* it;
* a grant counts for the timer from its own clock reading `G`, taken before the granting transaction was sent.
  The worker places `G` on its own clock by one echo of the same stream: it sent something at `s`, the answer
  to it was made at the timer's reading `T`. So `T` came after `s`, and `G` not before `s + (G - T)`.

Which deadline is allowed when, and what goes wrong without each rule: docs/decisions/0004-lease-rules.md.
All instants and durations are int microseconds. A worker's clock must go on while its host is suspended
(`CLOCK_BOOTTIME`); a timer's need not: a timer that counts too slowly only gives a lease away later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NewType

WorkerMonoUs = NewType("WorkerMonoUs", int)
"""An instant on one worker's monotonic clock. Never compare it with a timer's."""

TimerMonoUs = NewType("TimerMonoUs", int)
"""An instant on one timer's monotonic clock. To a worker, only the difference of two of them means
something."""

LEASE_LAPSED = "LeaseLapsed"
"""The type of the failure that ends an attempt whose lease was not renewed in time, whoever noticed first:
its owner, when the deadline passed, or its worker, which stopped it a margin earlier. Nobody knows how far
the work had come: it is an unknown outcome either way."""

_TOKEN_DIGITS = 16
_MASK_64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class LeaseTerm:
    """How long a lease lasts, how often it is renewed, and how early its worker stops. All in microseconds.

    ttl_us: from the instant that a deadline is counted from. Timer and worker use the same one.
    heartbeat_us: between two heartbeats of a stream; at most a third of the TTL, so that two may be lost.
    margin_us: how long before its deadline a worker begins to stop. It covers the time that a handler needs
    to
        stop and the drift of two clocks over one TTL, and leaves room for a heartbeat and its answer.
    """

    ttl_us: int
    heartbeat_us: int
    margin_us: int

    def __post_init__(self) -> None:
        if self.heartbeat_us <= 0 or self.margin_us < 0:
            raise ValueError(
                f"heartbeat_us ({self.heartbeat_us}) must be positive"
                f" and margin_us ({self.margin_us}) not negative"
            )
        if self.heartbeat_us * 3 > self.ttl_us:
            raise ValueError(
                f"heartbeat_us ({self.heartbeat_us}) must be at most a third of ttl_us ({self.ttl_us}):"
                " lower the heartbeat interval or raise the lease TTL"
            )
        if self.margin_us * 3 >= self.ttl_us:
            raise ValueError(
                f"margin_us ({self.margin_us}) must be below a third of ttl_us ({self.ttl_us}):"
                " lower the margin or raise the lease TTL"
            )

    def assert_outlasts_failover(self, *, etcd_ttl_us: int, takeover_us: int) -> None:
        """Raise ValueError unless an attempt outlives its timer's failover with one heartbeat to spare.

        etcd_ttl_us: until the dead timer is noticed. takeover_us: from there until workers are re-announced.
        """
        needed_us = etcd_ttl_us + takeover_us + self.heartbeat_us + self.margin_us
        if self.ttl_us < needed_us:
            raise ValueError(
                f"ttl_us ({self.ttl_us}) must be at least {needed_us}, or a timer's death stops work that"
                f" still runs: etcd_ttl_us ({etcd_ttl_us}) + takeover_us ({takeover_us})"
                f" + heartbeat_us ({self.heartbeat_us}) + margin_us ({self.margin_us})"
            )


@dataclass(frozen=True, slots=True)
class ClockEcho:
    """A worker sent something at `sent_us`; the timer made the answer to it at `reading_us`. On one stream.

    The first one of a stream is Hello and its Welcome; each Renewed gives another. A stream that breaks takes
    its echoes with it: the next one may lead to another process, whose clock has another zero.
    """

    sent_us: WorkerMonoUs
    reading_us: TimerMonoUs

    def earliest(self, reading_us: TimerMonoUs) -> WorkerMonoUs:
        """The timer read `reading_us` (before or after the echo) no earlier than this, for the worker."""
        return WorkerMonoUs(self.sent_us + (reading_us - self.reading_us))


def tightest_echo(kept: ClockEcho | None, fresh: ClockEcho, age_us_max: int) -> ClockEcho:
    """Which of two echoes of one stream to count by: the one that was under way for less time.

    The kept one is dropped when it is more than `age_us_max` older than the fresh one (one TTL is a good
    choice): the two clocks' rates differ a little, and over hours the difference exceeds any margin.
    """
    if kept is None or fresh.sent_us - kept.sent_us > age_us_max:
        return fresh
    kept_offset_us = kept.sent_us - kept.reading_us
    fresh_offset_us = fresh.sent_us - fresh.reading_us
    return kept if kept_offset_us > fresh_offset_us else fresh


def worker_deadline_from_renewal(sent_us: WorkerMonoUs, ttl_us: int, margin_us: int) -> WorkerMonoUs:
    """When the worker begins to stop, if the heartbeat that it sent at `sent_us` is answered by Renewed.

    The answer's arrival does not matter. It may lie in the past: then the renewal came too late to help.
    """
    return WorkerMonoUs(sent_us + ttl_us - margin_us)


def worker_deadline_from_grant(
    echo: ClockEcho | None,
    grant_reading_us: TimerMonoUs,
    received_us: WorkerMonoUs,
    ttl_us: int,
    margin_us: int,
) -> WorkerMonoUs:
    """When the worker begins to stop, for a grant received at `received_us` and not renewed yet.

    With an echo of the same stream, the lease counts from the earliest instant at which the grant can have
    been made, and never from after its receipt. Without one, two thirds of the TTL count from receipt: safe
    as long as commit and delivery took no more than the third that is given up. A deadline at or before
    `received_us` means that the grant waited too long: do not begin it.
    """
    if echo is None:
        return WorkerMonoUs(received_us + ttl_us * 2 // 3 - margin_us)
    made_us = min(echo.earliest(grant_reading_us), received_us)
    return WorkerMonoUs(made_us + ttl_us - margin_us)


def timer_deadline(received_us: TimerMonoUs, ttl_us: int) -> TimerMonoUs:
    """From when on the timer may give the lease away.

    received_us: when the heartbeat was received; for a grant, the reading `G` or any later instant; for a
    lease that a new owner found, when it learnt that its epoch was committed (taking a shard again keeps the
    old deadlines).
    """
    return TimerMonoUs(received_us + ttl_us)


def token_number(lease_token: str) -> int:
    """What a token adds to a digest, 0 to 2^64 - 1: its first 16 hexadecimal digits; else ValueError."""
    return int(lease_token[:_TOKEN_DIGITS], 16)


@dataclass(frozen=True, slots=True)
class HeldDigest:
    """What a worker holds on a stream, in two numbers: how many, and the sum of their tokens modulo 2^64.

    The order of adding and removing does not matter. Tokens are random, so that two different sets agree by
    accident once in 2^64; attempts of all shards of the stream are in one digest.
    """

    count: int = 0
    token_sum: int = 0

    @classmethod
    def of(cls, lease_tokens: Iterable[str]) -> HeldDigest:
        return cls().add(lease_tokens)

    def add(self, lease_tokens: Iterable[str]) -> HeldDigest:
        numbers = [token_number(token) for token in lease_tokens]
        return HeldDigest(self.count + len(numbers), (self.token_sum + sum(numbers)) & _MASK_64)

    def remove(self, lease_tokens: Iterable[str]) -> HeldDigest:
        """Each token must be in it, which two numbers cannot check."""
        numbers = [token_number(token) for token in lease_tokens]
        return HeldDigest(self.count - len(numbers), (self.token_sum - sum(numbers)) & _MASK_64)


class HeldHistory:
    """The timer's digest of one stream as of each response that the worker may not have taken yet.

    A heartbeat says what its worker held after response `last_sequence`; what is still under way is no
    disagreement. So every change is noted under the sequence of the response that tells the worker of it: a
    grant adds, `recorded` and a refusal remove. Bounded: note a response only while `len(history) <
    entry_count_max`; a stream whose worker is so far behind gets nothing new until a heartbeat has come.
    """

    __slots__ = ("_confirmed", "_entries", "entry_count_max")

    def __init__(self, announced: HeldDigest, entry_count_max: int) -> None:
        """announced: what Hello listed and this timer took, as of sequence 0."""
        assert entry_count_max > 0
        self.entry_count_max = entry_count_max
        self._confirmed = announced
        self._entries: deque[tuple[int, HeldDigest]] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def latest(self) -> HeldDigest:
        """As of everything that was sent."""
        return self._entries[-1][1] if self._entries else self._confirmed

    def note(self, sequence: int, added: Iterable[str] = (), removed: Iterable[str] = ()) -> None:
        """Response `sequence` tells the worker of these changes. Leave out the responses that change
        nothing."""
        assert len(self._entries) < self.entry_count_max, f"{len(self)} responses are not confirmed"
        assert not self._entries or sequence > self._entries[-1][0], f"sequence {sequence} does not grow"
        self._entries.append((sequence, self.latest.add(added).remove(removed)))

    def agrees(self, last_sequence: int, held: HeldDigest) -> bool:
        """Is `held` what the worker should hold after response `last_sequence`? Forgets what lies before
        it."""
        while self._entries and self._entries[0][0] <= last_sequence:
            self._confirmed = self._entries.popleft()[1]
        return held == self._confirmed

    def resolve(self, last_sequence: int, held: HeldDigest) -> None:
        """The worker named what it holds as of `last_sequence`: count on from there, with what is under way.

        A change under way that does not fit what was named (the removal of a lost grant) shows as the next
        disagreement, and is resolved by the next naming.
        """
        before = self._confirmed
        while self._entries and self._entries[0][0] <= last_sequence:
            before = self._entries.popleft()[1]
        count_by = held.count - before.count
        sum_by = held.token_sum - before.token_sum
        self._confirmed = held
        self._entries = deque(
            (sequence, HeldDigest(later.count + count_by, (later.token_sum + sum_by) & _MASK_64))
            for sequence, later in self._entries
        )
