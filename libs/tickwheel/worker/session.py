"""What does a worker do on its stream with one timer? A state machine without I/O, threads or a clock.

The timer is authoritative: it alone grants, renews, records and expires. The worker's side of the bargain:

* it holds every attempt from its grant until the timer has `recorded` its outcome or refused it;
* it heartbeats what it holds, and stops an attempt whose deadline passes on its own clock (`holdings` does,
  across streams; the deadlines are computed here, because the arithmetic needs an echo of this stream);
* it repeats an outcome until it is acknowledged, and says what it holds by name whenever the timer's list may
  differ from its own.

Messages in, effects out, in the manner of h11: `receive` takes one response and returns what the process must
do; `take_request` gives what is to be written next, merged into one message. An illegal event raises and
changes nothing. Responses are read by their field names only, so that anything shaped like
`tickwheel.v1.WorkResponse` will do. All instants are microseconds on the worker's monotonic clock, but for
`clock_us` and `grant_clock_us`, which are the timer's.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tickwheel.domain.lease import (
    ClockEcho,
    HeldDigest,
    TimerMonoUs,
    WorkerMonoUs,
    tightest_echo,
    worker_deadline_from_grant,
    worker_deadline_from_renewal,
)
from tickwheel.worker.attempt import (
    SUCCEEDED,
    Attempt,
    LeaseToken,
    Outcome,
    Phase,
    Progress,
    Released,
    Succeeded,
)

PROTOCOL_VERSION = 1

LEASE_DEFAULT_US = 10_000_000
"""Where a timer's Welcome names none."""

MARGIN_DEFAULT_US = 500_000
"""How early an attempt is stopped, but never more than an eighth of its lease."""

MESSAGE_BYTES_DEFAULT = 1 << 20
MESSAGE_BYTES_MIN = 64 << 10

OPENING_US_MAX = 5_000_000
"""A timer that has not said Welcome by then is taken for frozen."""

GONE_SILENCE_US = 500_000
"""How long a timer that is not listed any more may leave a heartbeat unanswered, until it is doubted."""

PROGRESS_INTERVAL_US = 1_000_000
"""Progress makes a heartbeat come early, but not more often than this."""

NAMING_INTERVAL_US = 100_000
"""All that is held is listed by name at most this often, however often the timer asks."""

_NOT_SAID_YET = 1 << 62

BACKLOG_US_MAX = 1_000_000
"""How long a timer's word about its backlog counts."""

REFUSAL_SUPERSEDED = 1
REFUSAL_MOVED = 2


class State(enum.Enum):
    """Where a stream is in its life."""

    OPENING = "OPENING"
    """Hello is to be sent or was sent; Welcome has not come."""
    OPEN = "OPEN"
    """Grants come."""
    LEAVING = "LEAVING"
    """We said Goodbye: grants that were under way may still come, and are handed back."""
    DRAINING = "DRAINING"
    """The timer said Drain: no grant may come; the stream ends when nothing is held."""
    CLOSED = "CLOSED"


class Event(enum.Enum):
    """What can happen to a stream."""

    WELCOME = "welcome"
    GRANTS = "grants"
    RENEWED = "renewed"
    RECORDED = "recorded"
    REFUSALS = "refusals"
    CANCELS = "cancels"
    DRAIN = "drain"
    RESYNC = "resync"
    NOTE = "note"
    """A response with none of these: it carries a clock reading or a backlog."""
    GOODBYE = "goodbye"
    LOST = "lost"


_OPEN_STATES = (State.OPEN, State.LEAVING, State.DRAINING)

TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.OPENING, Event.WELCOME): State.OPEN,
    # Welcome may come after we said Goodbye, so Goodbye waits for it: `_leaving` remembers.
    (State.OPENING, Event.GOODBYE): State.OPENING,
    (State.OPENING, Event.LOST): State.CLOSED,
    (State.OPEN, Event.GRANTS): State.OPEN,
    (State.LEAVING, Event.GRANTS): State.LEAVING,
    (State.OPEN, Event.DRAIN): State.DRAINING,
    (State.LEAVING, Event.DRAIN): State.DRAINING,
    (State.DRAINING, Event.DRAIN): State.DRAINING,
    (State.OPEN, Event.GOODBYE): State.LEAVING,
    (State.LEAVING, Event.GOODBYE): State.LEAVING,
    (State.DRAINING, Event.GOODBYE): State.DRAINING,
    **{
        (state, event): state
        for state in _OPEN_STATES
        for event in (
            Event.RENEWED,
            Event.RECORDED,
            Event.REFUSALS,
            Event.CANCELS,
            Event.RESYNC,
            Event.NOTE,
        )
    },
    **{(state, Event.LOST): State.CLOSED for state in _OPEN_STATES},
}
"""Every legal (state, event). What is not here raises `ProtocolError`."""


class ProtocolError(Exception):
    """The timer broke the protocol: close the stream and open another. Nothing was changed.

    state: in which it was. what: the offence.
    """

    def __init__(self, state: State, what: str) -> None:
        self.state = state
        self.what = what
        super().__init__(f"a stream that is {state.value} got {what}: close it and connect again")


@dataclass(frozen=True, slots=True)
class Identity:
    """Who the worker says it is, in Hello. Empty tuples: all."""

    worker_id: str
    pool: str = "default"
    host: str = ""
    queues: tuple[str, ...] = ("default",)
    tenants: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    capacity: int = 100


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """See `tickwheel.v1.Heartbeat`. `held` is None unless everything is listed by name."""

    sent_us: int
    last_sequence: int
    held_count: int
    held_digest: int
    progress: list[tuple[Attempt, Progress]]
    held: list[Attempt] | None


@dataclass(slots=True)
class Request:
    """One message to be written. Parts that are None or empty are left out."""

    hello: Identity | None = None
    hello_held: list[Attempt] = field(default_factory=list)
    outcomes: list[tuple[Attempt, Outcome]] = field(default_factory=list)
    heartbeat: Heartbeat | None = None
    grant_count_max: int | None = None
    goodbye: str | None = None


@dataclass(slots=True)
class Effects:
    """What the process has to do now. Attempts are told apart by identity."""

    start: list[Attempt] = field(default_factory=list)
    """Begin their handlers."""
    cancel: list[tuple[Attempt, str, int]] = field(default_factory=list)
    """Tell the handler to stop: (attempt, reason, grace in microseconds)."""
    stop: list[Attempt] = field(default_factory=list)
    """Their leases lapse: stop the handlers, and report what becomes of that."""
    abandon: list[tuple[Attempt, str]] = field(default_factory=list)
    """Stop the handler and drop whatever it gives: (attempt, why)."""
    forget: list[Attempt] = field(default_factory=list)
    """Recorded: nothing is left to do."""
    refused: list[tuple[Attempt, str]] = field(default_factory=list)
    """Outcomes that were not taken: (attempt, the timer's words)."""
    moved: list[Attempt] = field(default_factory=list)
    """The shard has another owner."""
    detach: list[Attempt] = field(default_factory=list)
    """Replace their `grant` by a copy."""
    close: str = ""
    """Why the stream is to be ended, empty: it goes on."""


class Session:
    """One stream with one timer, from Hello to its end. A stream that broke gets a new one.

    identity: what Hello says. announced: attempts from earlier streams. margin_us: how early attempts stop.
    share: how many attempts this timer's grants may hold at a time (see `set_share`).
    """

    def __init__(
        self,
        identity: Identity,
        announced: Iterable[Attempt],
        *,
        share: int,
        now_us: int,
        margin_us: int = MARGIN_DEFAULT_US,
    ) -> None:
        self.identity = identity
        self.state = State.OPENING
        self.opened_us = now_us
        self.is_gone = False
        self.timer_id = ""
        self._backlog_count = 0
        self._backlog_us = now_us
        self.lease_us = LEASE_DEFAULT_US
        self.heartbeat_us = LEASE_DEFAULT_US // 3
        self.message_bytes_max = MESSAGE_BYTES_DEFAULT
        self._margin_us_max = margin_us
        self.last_sequence = 0
        self.last_response_us = now_us
        # What this stream's digest covers, by token: granted here, or announced here and not refused.
        self.held: dict[LeaseToken, Attempt] = {}
        # When each attempt was announced here: the renewal of a heartbeat sent then or later takes it over.
        self._announced_us: dict[LeaseToken, int] = {}
        # No running attempt that is held here lapses before this.
        self.deadline_us_min = _NOT_SAID_YET
        self._echo: ClockEcho | None = None
        self._hello_sent_us: int | None = None
        self._hello_held: list[Attempt] = list(announced)
        self._share = share
        self._granted_count = 0
        self._settled_count = 0
        self._limit_said = 0
        self._limit_said_max = 0
        self._outbox: deque[Attempt] = deque()
        self._progress: dict[LeaseToken, Attempt] = {}
        self._goodbye: str | None = None
        self._leaving = False
        self._heartbeat_sent_us: int | None = None
        self._heartbeat_unanswered_us: int | None = None
        self._heartbeat_due_us = 0
        self._naming_due = False
        self._named_us = now_us - NAMING_INTERVAL_US
        self._lease_us_min = LEASE_DEFAULT_US
        # Outcomes that a listing was refused for, and that wait for an answer of their own.
        self.owed: dict[LeaseToken, Attempt] = {}
        for attempt in self._hello_held:
            self._hold(attempt)
            self._announced_us[attempt.token] = now_us  # Hello goes before every heartbeat of this stream.
            if attempt.phase is Phase.FINISHED and attempt.owner is None:
                self._outbox.append(attempt)

    # What others ask.

    @property
    def digest(self) -> tuple[int, int]:
        """(count, sum of tokens) of what is held as of the last response taken."""
        held = HeldDigest.of(self.held)
        return held.count, held.token_sum

    @property
    def held_count(self) -> int:
        """What is held, and what is owed an answer."""
        return len(self.held) + len(self.owed)

    @property
    def is_welcomed(self) -> bool:
        return self.state in _OPEN_STATES

    @property
    def grant_limit(self) -> int:
        """The number of grants in all that may have come on this stream, by what is free now."""
        if self.state in (State.LEAVING, State.DRAINING) or self._leaving:
            return self._granted_count
        return self._granted_count + max(0, self._share - len(self.held))

    def backlog_count(self, now_us: int) -> int:
        """How many runs wait at the timer. Its last word counts for a while."""
        return self._backlog_count if now_us - self._backlog_us <= BACKLOG_US_MAX else 0

    def silent_us(self, now_us: int) -> int:
        """For how long a heartbeat (or Hello) has gone without any response; 0 when none is awaited."""
        since_us = self._heartbeat_unanswered_us
        return 0 if since_us is None else max(0, now_us - max(since_us, self.last_response_us))

    def is_doubtful(self, now_us: int) -> bool:
        """The timer may be dead or frozen: what it granted is announced to others as well."""
        limit_us = GONE_SILENCE_US if self.is_gone else self.heartbeat_us // 2
        return self.silent_us(now_us) > limit_us

    def is_dead(self, now_us: int) -> bool:
        """It has been silent for too long: end the stream."""
        if self.state is State.OPENING:
            return self.silent_us(now_us) > OPENING_US_MAX
        return self.silent_us(now_us) > self.lease_us

    def set_gone(self, is_gone: bool) -> None:
        """Whether the coordinators list the timer no more. It is asked at once, and has less time to answer.
        It is not given up at once: the list may be wrong, when etcd is away, and to announce everything to
        everybody is not cheap.
        """
        if is_gone and not self.is_gone:
            self._heartbeat_due_us = 0
        self.is_gone = is_gone

    # What comes in.

    def receive(self, response: Any, now_us: int) -> Effects:
        """Take one response in. Raises ProtocolError, and then nothing has changed."""
        self._check(response)
        effects = Effects()
        self.last_sequence = response.sequence
        self.last_response_us = now_us
        self._heartbeat_unanswered_us = None
        if response.HasField("welcome"):
            self._welcome(response, now_us)
        if response.grants:
            self._grants(response, now_us, effects)
        if response.recorded:
            self._recorded(response.recorded, effects)
        if response.refusals:
            self._refusals(response.refusals, effects)
        if response.HasField("renewed"):
            self._renewed(response, effects)
        for cancel in response.cancels:
            attempt = self.held.get(cancel.lease_token)
            if attempt is not None and attempt.phase is Phase.RUNNING:
                effects.cancel.append((attempt, cancel.reason, _micros(cancel.grace_duration)))
        if response.backlog_count:
            self._backlog_count = response.backlog_count
            self._backlog_us = now_us
        if response.resync:
            self._naming_due = True
        if response.HasField("drain"):
            self.state = TRANSITIONS[self.state, Event.DRAIN]
        self._close_if_done(effects)
        return effects

    def _check(self, response: Any) -> None:
        """Raise ProtocolError if any part of the response is illegal now."""
        state = self.state
        for event in _events(response):
            following = TRANSITIONS.get((state, event))
            if following is None:
                raise ProtocolError(state, event.value)
            state = following
        if response.sequence != self.last_sequence + 1:
            raise ProtocolError(
                self.state, f"response {response.sequence} where {self.last_sequence + 1} comes next"
            )
        grant_count = len(response.grants)
        if grant_count and self._granted_count + grant_count > self._limit_said_max:
            raise ProtocolError(
                self.state,
                f"{self._granted_count + grant_count} grants in all, {self._limit_said_max} were allowed",
            )

    def _welcome(self, response: Any, now_us: int) -> None:
        welcome = response.welcome
        self.state = TRANSITIONS[self.state, Event.WELCOME]
        self.timer_id = welcome.timer_id
        self.lease_us = _micros(welcome.lease_duration) or LEASE_DEFAULT_US
        interval_us = _micros(welcome.heartbeat_interval_duration)
        self.heartbeat_us = min(interval_us or self.lease_us, self.lease_us // 3)
        self._lease_us_min = min(self._lease_us_min, self.lease_us) if self.held else self.lease_us
        self.message_bytes_max = max(
            MESSAGE_BYTES_MIN, min(welcome.message_bytes_max or MESSAGE_BYTES_DEFAULT, MESSAGE_BYTES_DEFAULT)
        )
        if self._hello_sent_us is not None:
            self._take_echo(self._hello_sent_us, response.clock_us)
        self._heartbeat_due_us = now_us
        if self._leaving:
            self.state = TRANSITIONS[self.state, Event.GOODBYE]
            self._goodbye = self._goodbye or "the worker stops"

    def _take_echo(self, sent_us: int, reading_us: int) -> None:
        fresh = ClockEcho(WorkerMonoUs(sent_us), TimerMonoUs(reading_us))
        self._echo = tightest_echo(self._echo, fresh, self.lease_us)

    def _grants(self, response: Any, now_us: int, effects: Effects) -> None:
        """Hot: once a run. The deadline is computed once for all grants with the stream's own lease."""
        default_us = self.lease_us
        default_deadline_us = self._deadline(response.grant_clock_us, now_us, default_us)
        sequence = response.sequence
        held = self.held
        start = effects.start
        leaving = self.state is not State.OPEN
        for grant in response.grants:
            lease_us, deadline_us = default_us, default_deadline_us
            if grant.HasField("lease_duration"):
                lease_us = _micros(grant.lease_duration) or default_us
                deadline_us = self._deadline(response.grant_clock_us, now_us, lease_us)
                self._lease_us_min = min(self._lease_us_min, lease_us)
            token = grant.lease_token
            attempt = Attempt(
                grant,
                grant.run,
                grant.attempt,
                grant.fence,
                token,
                grant.shard,
                sequence,
                lease_us,
                deadline_us,
                self,
            )
            self._granted_count += 1
            if token in held:
                continue
            if deadline_us < self.deadline_us_min:
                self.deadline_us_min = deadline_us
            held[token] = attempt
            if leaving or deadline_us <= now_us:
                attempt.finish(Released("the worker stops" if leaving else "the grant came too late"))
                self._outbox.append(attempt)
            else:
                start.append(attempt)

    def _deadline(self, grant_clock_us: int, now_us: int, lease_us: int) -> int:
        # Without a reading there is nothing to place on our clock, whatever echo we have.
        echo = self._echo if grant_clock_us else None
        return worker_deadline_from_grant(
            echo, TimerMonoUs(grant_clock_us), WorkerMonoUs(now_us), lease_us, self._margin_us(lease_us)
        )

    def _margin_us(self, lease_us: int) -> int:
        return min(self._margin_us_max, lease_us // 8)

    def _renewed(self, response: Any, effects: Effects) -> None:
        renewed = response.renewed
        sent_us = renewed.sent_us
        self._take_echo(sent_us, response.clock_us)
        if not renewed.shards:
            return
        shards = set(renewed.shards)
        sequence = renewed.sequence
        lease_us_min = self.lease_us
        for token, attempt in self.held.items():
            lease_us = attempt.lease_us
            if lease_us < lease_us_min:
                lease_us_min = lease_us
            if attempt.shard not in shards:
                continue
            announced_us = self._announced_us.get(token)
            if announced_us is not None:
                if sent_us < announced_us:
                    continue
                # It answers a heartbeat that covers the attempt, and has not refused it: it took it over.
                del self._announced_us[token]
                attempt.sequence = 0
            elif attempt.sequence > sequence:
                continue
            if attempt.owner is not self:
                attempt.owner = self
                if attempt.phase is Phase.FINISHED:
                    # It may have heard the outcome while it was loading the shard, and kept silent.
                    self._outbox.append(attempt)
            if not attempt.is_detached and attempt.phase is Phase.RUNNING:
                # It lives for longer than most: it must not keep the whole message that brought it.
                attempt.is_detached = True
                effects.detach.append(attempt)
            deadline_us = worker_deadline_from_renewal(
                WorkerMonoUs(sent_us), lease_us, self._margin_us(lease_us)
            )
            if deadline_us > attempt.deadline_us:
                attempt.deadline_us = deadline_us
        self._lease_us_min = lease_us_min

    def _recorded(self, tokens: Iterable[LeaseToken], effects: Effects) -> None:
        """Hot: once a run."""
        held = self.held
        forget = effects.forget
        for token in tokens:
            attempt = held.pop(token, None)
            if attempt is None and self.owed:
                attempt = self.owed.pop(token, None)
            if attempt is not None:
                forget.append(attempt)
        if self._announced_us or self._progress:
            for attempt in forget:
                self._announced_us.pop(attempt.token, None)
                self._progress.pop(attempt.token, None)

    def _refusals(self, refusals: Iterable[Any], effects: Effects) -> None:
        for refusal in refusals:
            token = refusal.lease_token
            attempt = self.owed.pop(token, None)
            if attempt is None:
                attempt = self.held.get(token)
                if attempt is None:
                    continue
                self._drop(attempt)
            why = refusal.message or "the lease is not ours any more"
            if refusal.reason == REFUSAL_MOVED:
                if attempt.owner is self:
                    attempt.owner = None
                effects.moved.append(attempt)
            elif attempt.phase is not Phase.FINISHED:
                effects.abandon.append((attempt, why))
            elif attempt.sent_on is self:
                effects.refused.append((attempt, why))
            else:
                # It is the listing that was refused. The outcome may be recorded all the same, by another
                # owner whose answer was lost: it is asked for by itself.
                self.owed[token] = attempt
                self._outbox.append(attempt)

    def _close_if_done(self, effects: Effects) -> None:
        if self.state is State.DRAINING and not self.held_count:
            effects.close = "the timer drains and nothing is held"

    # What the worker does.

    def send_outcome(self, attempt: Attempt) -> None:
        """Send the outcome (again) on this stream, if the attempt is held here."""
        if attempt.token in self.held:
            self._outbox.append(attempt)

    def resend_outcomes(self, sent_before_us: int) -> None:
        """Repeat the outcomes that were sent by then and that this timer has not acknowledged."""
        waiting = set(self._outbox)
        for attempt in self.held.values():
            if (
                attempt.phase is Phase.FINISHED
                and attempt.owner is self
                and attempt.sent_us <= sent_before_us
                and attempt not in waiting
            ):
                self._outbox.append(attempt)
        for attempt in self.owed.values():
            if attempt.sent_us <= sent_before_us and attempt not in waiting:
                self._outbox.append(attempt)

    def announce(self, attempts: Iterable[Attempt]) -> None:
        """Tell this timer of attempts that may be its own by now. Those that it holds are passed over.

        Their outcomes wait until it has taken them over, or has refused to.
        """
        for attempt in attempts:
            if attempt.token in self.held or attempt.token in self.owed:
                continue
            self._hold(attempt)
            self._announced_us[attempt.token] = _NOT_SAID_YET
            self._naming_due = True

    def drop(self, attempt: Attempt) -> None:
        """We do not hold it any more, and the timer did not say so: it hears of it by name."""
        if attempt.token in self.held:
            self._drop(attempt)
            self._naming_due = True

    def note_progress(self, attempt: Attempt) -> None:
        """`attempt.progress` is new: the next heartbeat carries it."""
        if attempt.token in self.held and attempt.phase is Phase.RUNNING:
            self._progress[attempt.token] = attempt

    def set_share(self, share: int) -> None:
        """How many attempts may be held here at a time. What is over it stays; no more comes meanwhile."""
        self._share = share

    def goodbye(self, reason: str) -> None:
        """No more grants, please. Illegal on a stream that is closed."""
        following = TRANSITIONS.get((self.state, Event.GOODBYE))
        if following is None:
            raise ProtocolError(self.state, "our own goodbye")
        if not self._leaving:
            self._goodbye = reason
        self._leaving = True
        self.state = following

    def lost(self) -> list[Attempt]:
        """The stream broke: what it held has no owner until a timer takes it. Illegal when closed."""
        following = TRANSITIONS.get((self.state, Event.LOST))
        if following is None:
            raise ProtocolError(self.state, "its own end, twice")
        self.state = following
        held = [*self.held.values(), *self.owed.values()]
        for attempt in held:
            if attempt.owner is self:
                attempt.owner = None
        self.held.clear()
        self._announced_us.clear()
        self._outbox.clear()
        self._progress.clear()
        self.owed.clear()
        return held

    def _hold(self, attempt: Attempt) -> None:
        self.held[attempt.token] = attempt
        self._lease_us_min = min(self._lease_us_min, attempt.lease_us)
        self.deadline_us_min = min(self.deadline_us_min, attempt.deadline_us)

    def _drop(self, attempt: Attempt) -> None:
        del self.held[attempt.token]
        self._announced_us.pop(attempt.token, None)
        self._progress.pop(attempt.token, None)

    # What goes out.

    def heartbeat_interval_us(self) -> int:
        """A third of the shortest lease that is held, or what the timer asked for if that is sooner."""
        return min(self.heartbeat_us, self._lease_us_min // 3)

    def has_request(self, now_us: int) -> bool:
        """Would `take_request` give something?"""
        if self.state is State.CLOSED:
            return False
        if self.state is State.OPENING:
            return self._hello_sent_us is None
        return bool(
            self._outbox
            or self._goodbye is not None
            or now_us >= self._heartbeat_due_at()
            or self._limit_is_worth_a_message(self.grant_limit)
        )

    def take_request(self, now_us: int) -> Request | None:
        """What is to be written next, or None. What is in it counts as sent: write it, or end the stream."""
        if self.state is State.CLOSED:
            return None
        if self.state is State.OPENING:
            return self._take_hello(now_us)
        request = Request()
        some = False
        if self._outbox:
            self._take_outcomes(request, now_us)
            some = bool(request.outcomes)
        if now_us >= self._heartbeat_due_at():
            request.heartbeat = self._take_heartbeat(now_us)
            some = True
        limit = self.grant_limit
        # Room is given back with whatever is sent, or by itself once an eighth of the share is free again.
        if limit != self._limit_said and (some or self._limit_is_worth_a_message(limit)):
            self._say_limit(request, limit)
            some = True
        if self._goodbye is not None:
            request.goodbye = self._goodbye
            self._goodbye = None
            some = True
        return request if some else None

    def _take_hello(self, now_us: int) -> Request | None:
        if self._hello_sent_us is not None:
            return None
        self._hello_sent_us = now_us
        self._heartbeat_unanswered_us = now_us
        held = [attempt for attempt in self._hello_held if attempt.token in self.held]
        self._hello_held = []
        request = Request(hello=self.identity, hello_held=held)
        self._say_limit(request, self.grant_limit)
        return request

    def _say_limit(self, request: Request, limit: int) -> None:
        request.grant_count_max = limit
        self._limit_said = limit
        self._limit_said_max = max(self._limit_said_max, limit)

    def _limit_is_worth_a_message(self, limit: int) -> bool:
        # The timer waits for room when it has used up nearly all that it was given.
        more = limit - self._limit_said
        return more < 0 or (more > 0 and more * 8 >= self._share)

    def _take_outcomes(self, request: Request, now_us: int) -> None:
        """As many as one message may carry, and at least one."""
        room = self.message_bytes_max - 4096
        outbox = self._outbox
        held = self.held
        outcomes = request.outcomes
        while outbox and room > 0:
            attempt = outbox[0]
            outcome = attempt.outcome
            if outcome is None or (attempt.token not in held and attempt.token not in self.owed):
                outbox.popleft()
                continue
            room -= _EMPTY_OUTCOME_BYTES if outcome is SUCCEEDED else outcome_bytes_max(attempt, outcome)
            if room < 0 and outcomes:
                break
            outbox.popleft()
            attempt.sent_on = self
            attempt.sent_us = now_us
            outcomes.append((attempt, outcome))

    def _heartbeat_due_at(self) -> int:
        due_us = self._heartbeat_due_us
        if self._naming_due:
            due_us = min(due_us, self._named_us + NAMING_INTERVAL_US)
        if self._progress and self._heartbeat_sent_us is not None:
            due_us = min(due_us, self._heartbeat_sent_us + PROGRESS_INTERVAL_US)
        return due_us

    def _take_heartbeat(self, now_us: int) -> Heartbeat:
        held: list[Attempt] | None = None
        # Echoes tell heartbeats apart by their stamps.
        now_us = max(now_us, (self._heartbeat_sent_us or 0) + 1)
        if self._naming_due and now_us >= self._named_us + NAMING_INTERVAL_US:
            held = list(self.held.values())
            self._naming_due = False
            self._named_us = now_us
            for token, said_us in self._announced_us.items():
                if said_us == _NOT_SAID_YET:
                    self._announced_us[token] = now_us
        progress = [
            (attempt, attempt.progress)
            for attempt in self._progress.values()
            if attempt.progress is not None and attempt.phase is Phase.RUNNING
        ]
        self._progress.clear()
        self._heartbeat_sent_us = now_us
        if self._heartbeat_unanswered_us is None:
            self._heartbeat_unanswered_us = now_us
        self._heartbeat_due_us = now_us + self.heartbeat_interval_us()
        # Once a heartbeat, not once a run: most attempts end between two of them.
        count, token_sum = self.digest
        return Heartbeat(now_us, self.last_sequence, count, token_sum, progress, held)


def _events(response: Any) -> list[Event]:
    """The parts that a response carries, in the order in which they are taken."""
    events = []
    if response.HasField("welcome"):
        events.append(Event.WELCOME)
    if response.grants:
        events.append(Event.GRANTS)
    if response.recorded:
        events.append(Event.RECORDED)
    if response.refusals:
        events.append(Event.REFUSALS)
    if response.HasField("renewed"):
        events.append(Event.RENEWED)
    if response.cancels:
        events.append(Event.CANCELS)
    if response.resync:
        events.append(Event.RESYNC)
    if response.HasField("drain"):
        events.append(Event.DRAIN)
    return events or [Event.NOTE]


def _micros(duration: Any) -> int:
    seconds: int = duration.seconds
    nanos: int = duration.nanos
    return seconds * 1_000_000 + nanos // 1000


# Two names of at most 63 characters with what is around them, a token, three numbers.
_EMPTY_OUTCOME_BYTES = 256


def outcome_bytes_max(attempt: Attempt, outcome: Outcome) -> int:
    """No encoding of this outcome is longer."""
    size = 96 + len(attempt.run) + len(attempt.token)
    if isinstance(outcome, Succeeded):
        if outcome.data:
            size += len(outcome.data) + len(outcome.content_type) + 16
    elif not isinstance(outcome, Released):
        size += 4 * sum(len(text) for text in _texts(outcome)) + 64
    else:
        size += 4 * len(outcome.reason) + 64
    return size


def _texts(outcome: Any) -> tuple[str, ...]:
    return (outcome.type, outcome.message, outcome.stack) if hasattr(outcome, "stack") else ()
