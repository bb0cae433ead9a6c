"""What do workers say, and what is answered? Hello, heartbeats and outcomes, against the lease table.

The rules are docs/decisions/0004-lease-rules.md; the arithmetic of one stream is `session`. Here a
worker's words meet the leases of all shards: an attempt is held on the stream that named it last; one
that nobody names runs out.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import structlog

from tickwheel.clock import mono_us
from tickwheel.domain import job
from tickwheel.domain.ids import parse_run_id, run_shard
from tickwheel.domain.lease import LEASE_LAPSED, token_number
from tickwheel.domain.run import AttemptState
from tickwheel.domain.timer_rows import Int64s
from tickwheel.errors import FieldInvalid, TickwheelError
from tickwheel.postgres.arrays import join_uuid
from tickwheel.rpc import convert
from tickwheel.services.timer.lane import OUTCOME_TRIES_MAX, Ended, Lane
from tickwheel.services.timer.leases import ENDING, FREE, LIVE, NO_STREAM, STREAM_COUNT_MAX
from tickwheel.services.timer.session import Cancelled, Pending, Refused, WorkerSession
from tickwheel.v1 import worker_service_pb2 as pb

if TYPE_CHECKING:
    from tickwheel.services.timer.node import TimerNode

log = structlog.get_logger()

QUESTIONS_MAX: Final = 5_000
MESSAGE_MAX: Final = 4_096
STACK_MAX: Final = 16_384
TYPE_MAX: Final = 256
RESULT_BYTES_MAX: Final = 1 << 20


@dataclass(slots=True)
class Stream:
    """A session with what its reader and writer need."""

    session: WorkerSession
    queues: tuple[str, ...]
    kinds: tuple[str, ...]
    tenants: tuple[str, ...]
    wake: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True)
class Question:
    """An outcome that finds no lease here: was it recorded before, or is it not the caller's?"""

    stream: int
    run: str
    attempt: int
    fence: int
    token: str
    shard: int
    hi: int
    lo: int


class Streams:
    """All streams with workers, by number."""

    def __init__(self, node: "TimerNode") -> None:
        self._node = node
        self.by_number: dict[int, Stream] = {}
        self._next = 0
        self._questions: list[Question] = []
        self._question_wake = asyncio.Event()
        self.waiters: dict[str, asyncio.Future[str]] = {}
        """Unary twins that wait for what becomes of an outcome, by token: "recorded", "superseded",
        "moved"."""

    # Opening and closing.

    async def open(self, hello: pb.Hello, *, unary: bool = False) -> Stream:
        """A new stream. Its worker's attempts that this timer has are held on it from now on.

        With `unary` it only collects grants for one call, and names nothing.
        """
        node = self._node
        worker_no = await node.store.register_worker(
            hello.worker_id[:128], hello.pool[:63], hello.host[:255], node.clock.now_us()
        )
        await node.refresh_routes()
        queues = tuple(hello.queues) or (job.DEFAULT_QUEUE,)
        kinds = tuple(hello.kinds)
        tenants = tuple(hello.tenants)
        number = self._free_number()
        session = WorkerSession(
            number,
            worker_no,
            hello.worker_id,
            node.catalog.routes_for(queues, kinds),
            await node.tenant_ids(tenants),
            hello.grant_count_max,
        )
        stream = Stream(session, queues, kinds, tenants)
        self.by_number[number] = stream
        node.sessions[number] = session
        node.leases.renewed_mono_us[number] = 0
        session.heard_mono_us = mono_us()
        if not unary:
            self._named(stream, hello.held, 0)
            self._release_unnamed(stream)
        for lane in node.lanes:
            lane.wake()
        return stream

    def _free_number(self) -> int:
        # -1 reads the last element of `renewed_mono_us`: it is never a stream's.
        for _ in range(STREAM_COUNT_MAX):
            self._next = (self._next + 1) % (STREAM_COUNT_MAX - 1)
            if self._next not in self.by_number:
                return self._next
        raise TickwheelError("there are too many streams")

    def _release_unnamed(self, stream: Stream) -> None:
        """A worker that begins a new stream names all it holds: grants of its earlier ones here that it does
        not name never reached it, and are handed back at no cost in attempts.

        Those that another timer granted keep their grace: they may still be on their way from there.
        """
        node = self._node
        leases = node.leases
        mine = np.flatnonzero(
            (leases.worker == stream.session.worker_no)
            & (leases.state == LIVE)
            & (leases.stream == NO_STREAM)
            & leases.granted_here
        ).astype(np.int64)
        if len(mine):
            log.info("grants_never_received", worker=stream.session.worker_id, count=len(mine))
            node.hand_back(mine)

    def close(self, stream: Stream) -> None:
        """The stream is gone: its credit with it; its attempts keep what was renewed so far."""
        node = self._node
        session = stream.session
        session.closed = True
        self.by_number.pop(session.number, None)
        node.sessions.pop(session.number, None)
        node.leases.detach(node.leases.of_stream(session.number))

    def update_routes(self) -> None:
        catalog = self._node.catalog
        for stream in self.by_number.values():
            stream.session.routes = catalog.routes_for(stream.queues, stream.kinds)

    # What a worker says.

    def take(self, stream: Stream, request: pb.WorkRequest) -> None:
        """One request after Hello."""
        session = stream.session
        session.heard_mono_us = mono_us()
        if request.outcomes:
            self.take_outcomes(stream, request.outcomes)
        if request.HasField("heartbeat"):
            self._heartbeat(stream, request.heartbeat)
        if request.HasField("grant_count_max"):
            session.grant_count_max = request.grant_count_max
            for lane in self._node.lanes:
                if lane.ready.depth():
                    lane.wake()
        if request.HasField("goodbye"):
            session.leaving = True
        if session.has_output:
            stream.wake.set()

    def _heartbeat(self, stream: Stream, heartbeat: pb.Heartbeat) -> None:
        session = stream.session
        received = mono_us()
        if heartbeat.progress:
            self._node.take_progress(heartbeat.progress)
        if heartbeat.held_complete:
            self._named(stream, heartbeat.held, heartbeat.last_sequence)
            session.accept(heartbeat.sent_us, heartbeat.last_sequence, received)
            renews = True
        else:
            renews = session.heartbeat(
                heartbeat.sent_us,
                heartbeat.last_sequence,
                heartbeat.held_count,
                heartbeat.held_digest,
                received,
            )
        if renews:
            self._node.leases.renewed_mono_us[session.number] = received
            self._node.prove_soon()

    def _named(self, stream: Stream, held: Iterable[pb.HeldAttempt], last_sequence: int) -> None:
        """The worker's list of what it holds, after it has taken response `last_sequence`."""
        node = self._node
        leases = node.leases
        session = stream.session
        numbers: list[int] = []
        slots: list[int] = []
        session.pending.clear()
        for attempt in held:
            token = attempt.lease_token
            number = _number(token)
            numbers.append(number)
            slot = leases.by_token.get(token)
            if slot is not None:
                slots.append(slot)
            else:
                self._announce(session, attempt.run, attempt.attempt, token, number)
        session.named(last_sequence, numbers)
        listed = np.array(slots, dtype=np.int64)
        attached = leases.of_stream(session.number)
        # What was sent after `last_sequence` is still on its way to the worker.
        unlisted = np.setdiff1d(attached[leases.sequence[attached] <= last_sequence], listed)
        if len(unlisted):
            # What this timer granted and the worker says it does not hold, nobody works on.
            given = leases.granted_here[unlisted] & (leases.state[unlisted] == LIVE)
            leases.detach(unlisted)
            if given.any():
                node.hand_back(unlisted[given])
        if len(listed):
            leases.deadline_mono_us[listed] = leases.deadlines(listed)
            leases.stream[listed] = session.number
            leases.sequence[listed] = last_sequence
            leases.worker[listed] = session.worker_no

    def _announce(self, session: WorkerSession, run: str, attempt: int, token: str, number: int) -> None:
        """An announced attempt that is not in the table: another timer's, or one that has to wait.

        That it is over is said only after a proof that begins later than now: an owner that has lost the
        shard and does not know it yet must not end an attempt that lives on elsewhere.
        """
        shard = _shard_of(run)
        if shard in self._node.epochs or shard in self._node.loading:
            session.pending[token] = Pending(run, attempt, shard, mono_us())
            self._node.prove_soon()
            return
        session.add_refusal(Refused(run, attempt, token, True, "the shard is not here"), number, True)

    def shards_loaded(self, shards: set[int]) -> None:
        """Shards are ours and loaded: attempts that were announced meanwhile find their leases.

        The heartbeats that came meanwhile renew them, once a proof has followed.
        """
        for stream in self.by_number.values():
            session = stream.session
            found = False
            for token, pending in list(session.pending.items()):
                if pending.shard in shards and self._attach(session, token):
                    del session.pending[token]
                    found = True
            if found and session.last_heartbeat is not None:
                session.awaiting = session.awaiting or session.last_heartbeat
                self._node.prove_soon()

    def _attach(self, session: WorkerSession, token: str) -> bool:
        leases = self._node.leases
        slot = leases.by_token.get(token)
        if slot is None:
            return False
        leases.deadline_mono_us[slot] = int(leases.deadlines(np.array([slot], dtype=np.int64))[0])
        leases.stream[slot] = session.number
        leases.sequence[slot] = 0
        leases.worker[slot] = session.worker_no
        return True

    def proven(self, begun_us: int, shards: tuple[int, ...]) -> None:
        """A proof that began at `begun_us` shows these shards to be ours: renewals, and the end of attempts
        that were announced before it and have no lease, are answered."""
        ours = set(shards)
        withheld = self._node.leases.withheld()
        for stream in list(self.by_number.values()):
            session = stream.session
            for token, pending in list(session.pending.items()):
                if pending.since_us > begun_us or pending.shard in self._node.loading:
                    continue
                if pending.shard in ours:
                    del session.pending[token]
                    if not self._attach(session, token):
                        refusal = Refused(pending.run, pending.attempt, token, False, "the lease has ended")
                        session.add_refusal(refusal, _number(token), True)
                elif pending.shard not in self._node.epochs:
                    del session.pending[token]
                    refusal = Refused(pending.run, pending.attempt, token, True, "the shard is not here")
                    session.add_refusal(refusal, _number(token), True)
            left_out = withheld.get(session.number)
            covered = shards if not left_out else tuple(s for s in shards if s not in left_out)
            session.renewal_proven(begun_us, covered)
            if session.has_output:
                stream.wake.set()

    def shards_lost(self, slots: Int64s) -> None:
        """Leases of shards that another timer owns now: their workers look for it."""
        node = self._node
        leases = node.leases
        for slot in slots.tolist():
            self._answer_waiter(leases.tokens[slot], "moved")
            stream = self.by_number.get(int(leases.stream[slot]))
            if stream is None:
                continue
            stream.session.add_refusal(
                Refused(
                    node.run_name(slot),
                    int(leases.attempt[slot]),
                    leases.tokens[slot],
                    True,
                    "the shard moved",
                ),
                int(leases.token_hi[slot]),
                True,
            )
            stream.wake.set()

    # Outcomes.

    def take_outcomes(self, stream: Stream, outcomes: Sequence[pb.Outcome]) -> None:
        """Hot: attempts have ended. Each goes to the lane of its shard, once."""
        node = self._node
        by_token = node.leases.by_token
        succeeded: list[int] = []
        results: list[bytes | None] = []
        types: list[str | None] = []
        with_results = False
        others: list[tuple[int, pb.Outcome]] = []
        for outcome in outcomes:
            if outcome.success.result.HasField("json"):
                make_result_plain(outcome)
            slot = by_token.get(outcome.lease_token)
            if slot is None:
                self._without_lease(stream, outcome)
                continue
            if outcome.WhichOneof("result") == "success":
                succeeded.append(slot)
                data = outcome.success.result.data
                if data:
                    with_results = True
                    results.append(data[:RESULT_BYTES_MAX])
                    types.append(outcome.success.result.content_type)
                else:
                    results.append(None)
                    types.append(None)
            else:
                others.append((slot, outcome))
        if succeeded:
            self._end_many(
                np.array(succeeded, dtype=np.int64),
                results if with_results else None,
                types if with_results else None,
            )
        for slot, outcome in others:
            self._end_other(slot, outcome)

    def _end_many(
        self, slots: Int64s, results: list[bytes | None] | None, types: list[str | None] | None
    ) -> None:
        node = self._node
        leases = node.leases
        live = leases.state[slots] == LIVE
        if not live.all():
            # Said twice, or its lease ran out a moment ago: that batch decides.
            keep = np.flatnonzero(live)
            slots = slots[keep]
            results = None if results is None else [results[i] for i in keep.tolist()]
            types = None if types is None else [types[i] for i in keep.tolist()]
        if results is None and len(slots) > 1:
            slots = np.unique(slots)
        leases.state[slots] = ENDING
        lane_of = node.lane_of[leases.shard[slots]]
        for lane in np.unique(lane_of).tolist():
            rows = np.flatnonzero(lane_of == lane)
            node.lanes[lane].push_ended(
                Ended(
                    slots[rows],
                    AttemptState.SUCCEEDED,
                    None if results is None else [results[i] for i in rows.tolist()],
                    None if types is None else [types[i] for i in rows.tolist()],
                )
            )

    async def take_outcome(self, outcome: pb.Outcome, timeout_s: float) -> str:
        """One outcome of a unary twin. Returns "recorded", "superseded" or "moved"; raises TimeoutError."""
        waiter: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.waiters[outcome.lease_token] = waiter
        try:
            slot = self._node.leases.by_token.get(outcome.lease_token)
            if slot is None:
                self._without_lease(None, outcome)
            elif outcome.WhichOneof("result") == "success":
                data = outcome.success.result.data or None
                kind = outcome.success.result.content_type
                self._end_many(
                    np.array([slot], dtype=np.int64), [data] if data else None, [kind] if data else None
                )
            else:
                self._end_other(slot, outcome)
            async with asyncio.timeout(timeout_s):
                return await waiter
        finally:
            if self.waiters.get(outcome.lease_token) is waiter:
                del self.waiters[outcome.lease_token]

    def _end_other(self, slot: int, outcome: pb.Outcome) -> None:
        leases = self._node.leases
        if leases.state[slot] != LIVE:
            return
        which = outcome.WhichOneof("result")
        slots = np.array([slot], dtype=np.int64)
        if which == "failure":
            failure = failure_of(outcome.failure)
            lapsed = failure.type == LEASE_LAPSED
            state = AttemptState.OUTCOME_UNKNOWN if lapsed else AttemptState.FAILED
            self._node.end(slots, Ended(slots, state, failures=[failure]))
        elif which == "cancelled":
            self._node.end(slots, Ended(slots, AttemptState.CANCELLED))
        elif which == "release":
            delay_ms = outcome.release.not_before_duration.ToMilliseconds()
            ended = Ended(
                slots,
                AttemptState.RELEASED,
                not_before_ms=[max(0, min(delay_ms, job.BACKOFF_MS_MAX))],
            )
            self._node.end(slots, ended)
        else:
            stream = self.by_number.get(int(leases.stream[slot]))
            log.warning("outcome_without_result", run=outcome.run, stream=stream and stream.session.worker_id)
            failure = job.Failure(type="NoResult", message="the outcome said neither success nor failure")
            self._node.end(slots, Ended(slots, AttemptState.FAILED, failures=[failure]))

    def _without_lease(self, stream: Stream | None, outcome: pb.Outcome) -> None:
        """Recorded before (the answer was lost), superseded, moved, or of a shard that is loading."""
        node = self._node
        run = parse_run_id(outcome.run.rpartition("/")[2])
        shard = run_shard(run) if run else -1
        if shard in node.loading:
            return
        if run is None or shard not in node.epochs:
            self._refuse(stream, outcome.run, outcome.attempt, outcome.lease_token, run is not None)
            return
        if len(self._questions) >= QUESTIONS_MAX:
            return  # It is said again.
        hi, lo = int.from_bytes(run[:8], "big"), int.from_bytes(run[8:], "big")
        self._questions.append(
            Question(
                -1 if stream is None else stream.session.number,
                outcome.run,
                outcome.attempt,
                outcome.fence,
                outcome.lease_token,
                shard,
                hi,
                lo,
            )
        )
        self._question_wake.set()

    def _refuse(self, stream: Stream | None, run: str, attempt: int, token: str, moved: bool) -> None:
        self._answer_waiter(token, "moved" if moved else "superseded")
        if stream is None:
            return
        reason = "the shard is not here" if moved else "the lease was given away"
        stream.session.add_refusal(Refused(run, attempt, token, moved, reason), _number(token), True)
        stream.wake.set()

    async def run_questions(self) -> None:
        """Asks Postgres about outcomes that found no lease, many at a time (I6)."""
        while True:
            await self._question_wake.wait()
            self._question_wake.clear()
            asked, self._questions = self._questions, []
            try:
                await self._ask(asked)
            except TickwheelError as error:
                log.warning("outcome_question_failed", reason=str(error))
                await asyncio.sleep(0.2)

    async def _ask(self, asked: list[Question]) -> None:
        rows = await self._node.store.outcome_states(
            np.array([q.shard for q in asked], dtype=np.int16),
            np.array([q.hi for q in asked], dtype=np.uint64),
            np.array([q.lo for q in asked], dtype=np.uint64),
            np.array([q.attempt for q in asked], dtype=np.int16),
        )
        for ordinal, state, run_fence, attempt_fence, token, attempt_state in rows:
            question = asked[ordinal - 1]
            stream = self.by_number.get(question.stream)
            if question.shard not in self._node.epochs:
                continue
            if token is not None and token.hex == question.token:
                continue  # The lease is there after all: a batch has just written it. It is said again.
            if question.fence:
                known = question.fence in (run_fence, attempt_fence)
            else:
                # A unary caller names no fence: its attempt is on record, or is the run's last and no
                # longer live.
                known = bool(attempt_fence) or (token is None and bool(run_fence))
            lapsed = attempt_state in (AttemptState.OUTCOME_UNKNOWN, AttemptState.TIMED_OUT)
            if known and not lapsed and state != 0:
                self._answer_waiter(question.token, "recorded")
                if stream is not None:
                    stream.session.add_recorded(
                        [question.token], np.array([_number(question.token)], dtype=np.uint64)
                    )
                    stream.wake.set()
            else:
                self._refuse(stream, question.run, question.attempt, question.token, False)

    def tell_recorded(self, slots: Int64s) -> None:
        """These outcomes are committed: each worker may forget them."""
        leases = self._node.leases
        streams = leases.stream[slots]
        if self.waiters:
            for slot in slots.tolist():
                self._answer_waiter(leases.tokens[slot], "recorded")
        for number in np.unique(streams).tolist():
            stream = self.by_number.get(number)
            if stream is None:
                continue
            chosen = slots[streams == number]
            stream.session.add_recorded(
                [leases.tokens[slot] for slot in chosen.tolist()], leases.token_hi[chosen]
            )
            stream.wake.set()

    def _answer_waiter(self, token: str, answer: str) -> None:
        waiter = self.waiters.pop(token, None)
        if waiter is not None and not waiter.done():
            waiter.set_result(answer)

    def tell_lapsed(self, slots: Int64s, reason: str) -> None:
        """These leases were ended by their owner: whoever held them must not go on."""
        node = self._node
        leases = node.leases
        for slot in slots.tolist():
            token = leases.tokens[slot]
            self._answer_waiter(token, "superseded")
            stream = self.by_number.get(int(leases.stream[slot]))
            if stream is not None:
                refusal = Refused(node.run_name(slot), int(leases.attempt[slot]), token, False, reason)
                stream.session.add_refusal(refusal, int(leases.token_hi[slot]), True)
                stream.wake.set()

    def watch_silence(self, silent_us: int, dead_us: int) -> None:
        """A worker that says nothing gets nothing; one that is silent for a whole TTL is taken for gone."""
        now = mono_us()
        for stream in list(self.by_number.values()):
            quiet_us = now - stream.session.heard_mono_us
            stream.session.silent = quiet_us > silent_us
            if quiet_us > dead_us:
                stream.session.closed = True
                stream.wake.set()

    def cancel(self, slot: int, reason: str, grace_ms: int) -> None:
        node = self._node
        leases = node.leases
        stream = self.by_number.get(int(leases.stream[slot]))
        if stream is not None:
            stream.session.add_cancel(
                Cancelled(
                    node.run_name(slot), int(leases.attempt[slot]), leases.tokens[slot], reason, grace_ms
                )
            )
            stream.wake.set()

    async def doubtful(self, lane: Lane, slots: Int64s, ended: Sequence[Ended]) -> None:
        """Outcomes that did not take effect, of shards that are still ours: locked just now, or gone."""
        node = self._node
        leases = node.leases
        slots = slots[(leases.state[slots] != FREE) & (leases.state[slots] != LIVE)]
        rows = await node.store.outcome_states(
            leases.shard[slots], leases.run_hi[slots], leases.run_lo[slots], leases.attempt[slots]
        )
        again: list[int] = []
        gone: list[int] = []
        for ordinal, _state, _run_fence, _attempt_fence, token, _attempt_state in rows:
            slot = int(slots[ordinal - 1])
            mine = join_uuid(int(leases.token_hi[slot]), int(leases.token_lo[slot]))
            (again if token is not None and token.bytes == mine else gone).append(slot)
        if gone:
            lost = np.array(gone, dtype=np.int64)
            self.tell_lapsed(lost, "the lease row is gone")
            leases.remove(lost)
        for part in ended:
            chosen = np.isin(part.slots, np.array(again, dtype=np.int64))
            if chosen.any() and part.tries < OUTCOME_TRIES_MAX:
                retried = part.pick(np.flatnonzero(chosen))
                retried.tries += 1
                await asyncio.sleep(0.02)
                lane.push_ended(retried)


def make_result_plain(outcome: pb.Outcome) -> None:
    """A result that came as a JSON object becomes its text; one that is none fails the attempt for good."""
    try:
        plain = convert.payload(outcome.success.result, "result")
    except FieldInvalid as error:
        outcome.failure.type = "ResultInvalid"
        outcome.failure.message = str(error)
        outcome.failure.non_retryable = True
    else:
        outcome.success.result.CopyFrom(convert.payload_message(plain))


def failure_of(message: Any) -> job.Failure:
    """A worker's failure, cut to what is kept."""
    delay: int | None = None
    if message.HasField("retry_delay"):
        delay = max(0, min(message.retry_delay.ToMilliseconds(), job.BACKOFF_MS_MAX))
    return job.Failure(
        type=message.type[:TYPE_MAX],
        message=message.message[:MESSAGE_MAX],
        non_retryable=message.non_retryable,
        retry_delay_ms=delay,
        stack=message.stack[:STACK_MAX],
        fingerprint=message.fingerprint[:128] or job.fingerprint(message.type, message.message),
    )


def _number(token: str) -> int:
    try:
        return token_number(token)
    except ValueError:
        return 0


def _shard_of(run_name: str) -> int:
    run = parse_run_id(run_name.rpartition("/")[2])
    return run_shard(run) if run else -1
