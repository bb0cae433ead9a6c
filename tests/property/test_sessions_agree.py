"""The timer's session and the worker's, run against each other: both pure, with two queues between them.

Whatever the order of grants, outcomes, records, refusals, cancels and heartbeats, and wherever a stream
breaks: what is under way is never taken for a disagreement, a real one is found by the next heartbeat and
resolved by naming, credit is never exceeded, and when all is quiet both hold the same attempts.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pytest

from tickwheel.domain.lease import HeldDigest, token_number
from tickwheel.services.timer.session import Cancelled, Frame, GrantChunk, Refused, WorkerSession
from tickwheel.v1 import worker_service_pb2 as pb
from tickwheel.worker.attempt import SUCCEEDED, Attempt, Phase
from tickwheel.worker.session import Effects, Request, Session
from tickwheel.worker.session import Identity as WorkerIdentity

CAPACITY = 9
STEP_US = 40_000
LEASE_US = 3_000_000
SHARD = 5


@dataclass
class Live:
    """A lease as the timer's rows have it."""

    token: str
    run: str


@dataclass
class Pair:
    """One worker, one timer, and the stream between them; streams come and go."""

    seed: int
    live: dict[str, Live] = field(default_factory=dict)
    recorded: set[str] = field(default_factory=set)
    away: set[str] = field(default_factory=set)
    """Tokens that the timer has given up: moved or superseded."""
    now_us: int = 1_000_000
    disagreements: int = 0
    provoked: int = 0
    heartbeats: int = 0
    renewals: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.held: dict[str, Attempt] = {}
        self.number = 0
        self.connect()

    # Streams.

    def connect(self) -> None:
        self.number += 1
        announced = list(self.held.values())
        for attempt in announced:
            attempt.owner = None
        self.worker = Session(
            WorkerIdentity("w", capacity=CAPACITY), announced, share=CAPACITY, now_us=self.now_us
        )
        self.timer: WorkerSession | None = None
        # On this stream: what the worker counts by the timer's books, what it was told to count no more, and
        # in which response each grant went.
        self.listed: set[str] = set()
        self.settled: set[str] = set()
        self.granted_in: dict[str, int] = {}
        self.up: deque[Request] = deque()
        self.down: deque[pb.WorkResponse] = deque()
        self.broken = False
        """The timer's count was changed behind its back: the next heartbeat has to disagree."""

    def lose(self) -> None:
        """The stream breaks, with all that was under way on it."""
        self.worker.lost()
        if self.timer is not None:
            self.timer.closed = True
        self.connect()

    # The timer.

    def grant(self) -> None:
        timer = self.timer
        if timer is None or not timer.credit:
            return
        count = self.random.randint(1, timer.credit)
        timer.reserve(count)
        if self.random.random() < 0.1:
            timer.give_back(count)
            return
        grants = []
        for _ in range(count):
            token = f"{self.random.getrandbits(128):032x}"
            run = f"tenants/t/runs/{self.random.getrandbits(128):032x}"
            self.live[token] = Live(token, run)
            grants.append(pb.Grant(run=run, attempt=1, fence=1, lease_token=token, shard=SHARD))
        numbers = np.array([token_number(grant.lease_token) for grant in grants], dtype=np.uint64)
        wire = pb.WorkResponse(grants=grants).SerializeToString()
        timer.add_grants(GrantChunk(wire, np.arange(count), numbers, self.now_us))

    def refuse_one(self, *, moved: bool) -> None:
        """The owner ended a lease, or lost its shard, while the worker holds it."""
        candidates = sorted(self.live.keys() & self.listed) if self.timer is not None else []
        if candidates:
            lease = self.live.pop(self.random.choice(candidates))
            self.away.add(lease.token)
            self._refuse(lease.token, moved=moved)

    def _refuse(self, token: str, *, moved: bool) -> None:
        assert self.timer is not None
        self.timer.add_refusal(Refused("run", 1, token, moved, "gone"), token_number(token), True)
        self._settled(token)

    def _settled(self, token: str) -> None:
        self.listed.discard(token)
        self.settled.add(token)

    def cancel_one(self) -> None:
        if self.timer is not None and self.live:
            lease = self.live[self.random.choice(sorted(self.live))]
            self.timer.add_cancel(Cancelled(lease.run, 1, lease.token, "why", 100))

    def disturb(self) -> None:
        """The timer forgets a change of its count: a fault that the digest is there to find."""
        if self.timer is not None and not self.broken:
            self.timer._base_digest ^= 1 << self.random.randrange(60)
            self.broken = True
            self.provoked += 1

    def read(self) -> None:
        """The timer takes one request in, in the order of its parts."""
        if not self.up:
            return
        request = self.up.popleft()
        if request.hello is not None:
            limit = request.grant_count_max
            assert limit is not None
            self.timer = WorkerSession(self.number, 1, "w", frozenset({1}), None, limit)
            self._named([attempt.token for attempt in request.hello_held], 0)
            return
        timer = self.timer
        assert timer is not None
        for attempt, _ in request.outcomes:
            self._outcome(timer, attempt)
        if request.heartbeat is not None:
            self.heartbeats += 1
            beat = request.heartbeat
            if beat.held is not None:
                self._named([attempt.token for attempt in beat.held], beat.last_sequence)
                timer.accept(beat.sent_us, beat.last_sequence, self.now_us)
                self.broken = False
            elif not timer.heartbeat(
                beat.sent_us, beat.last_sequence, beat.held_count, beat.held_digest, self.now_us
            ):
                self.disagreements += 1
                assert self.broken, f"seed {self.seed}: what is under way was taken for a disagreement"
            else:
                assert not self.broken, f"seed {self.seed}: a disagreement was not noticed"
        if request.grant_count_max is not None:
            timer.grant_count_max = request.grant_count_max

    def _named(self, tokens: list[str], last_sequence: int) -> None:
        timer = self.timer
        assert timer is not None
        timer.named(last_sequence, [token_number(token) for token in tokens])
        later = {token for token, sequence in self.granted_in.items() if sequence > last_sequence}
        self.listed = ({*tokens} | later) - self.settled
        for token in sorted(self.listed - self.live.keys()):
            self._refuse(token, moved=token in self.away)

    def _outcome(self, timer: WorkerSession, attempt: Attempt) -> None:
        token = attempt.token
        if self.live.pop(token, None) is not None:
            self.recorded.add(token)
        if token in self.listed and token in self.recorded:
            timer.add_recorded([token], np.array([token_number(token)], dtype=np.uint64))
            self._settled(token)
        elif token in self.listed:
            self._refuse(token, moved=False)
        elif token in self.worker.owed:
            # Its listing was refused and it is asked for by itself: the worker's digest is without it.
            timer._recorded.append(token)

    def prove(self) -> None:
        if self.timer is not None and self.timer.renewal_proven(self.now_us, (SHARD,)):
            self.renewals += 1

    def write(self) -> None:
        """The timer's writer puts one response on the wire."""
        timer = self.timer
        frame = timer.take_frame() if timer is not None else None
        if frame is None:
            return
        for grant in pb.WorkResponse.FromString(b"".join(frame.grants)).grants:
            self.granted_in[grant.lease_token] = frame.sequence
            self.listed.add(grant.lease_token)
        self.down.append(self._response(frame))

    def _response(self, frame: Frame) -> pb.WorkResponse:
        response = pb.WorkResponse.FromString(b"".join(frame.grants))
        response.MergeFrom(
            pb.WorkResponse(
                sequence=frame.sequence,
                clock_us=self.now_us,
                grant_clock_us=frame.grant_clock_us,
                recorded=frame.recorded,
                resync=frame.resync,
            )
        )
        if frame.welcome:
            response.welcome.timer_id = "t"
            response.welcome.lease_duration.FromMicroseconds(LEASE_US)
            response.welcome.heartbeat_interval_duration.FromMicroseconds(LEASE_US // 3)
        if frame.renewal is not None:
            response.renewed.sent_us = frame.renewal.sent_us
            response.renewed.sequence = frame.renewal.sequence
            response.renewed.shards.extend(frame.renewal.shards)
        for refusal in frame.refusals:
            response.refusals.add(
                run=refusal.run, lease_token=refusal.token, reason=2 if refusal.moved else 1
            )
        for cancel in frame.cancels:
            response.cancels.add(run=cancel.run, lease_token=cancel.token, reason=cancel.reason)
        return response

    # The worker.

    def receive(self) -> None:
        if self.down:
            self._effects(self.worker.receive(self.down.popleft(), self.now_us))

    def _effects(self, effects: Effects) -> None:
        for attempt in effects.start:
            self.held[attempt.token] = attempt
        gone = [*effects.forget, *effects.moved]
        gone += [attempt for attempt, _ in (*effects.abandon, *effects.refused)]
        for attempt in gone:
            self.held.pop(attempt.token, None)

    def finish(self) -> None:
        running = [attempt for attempt in self.held.values() if attempt.phase is Phase.RUNNING]
        if running:
            attempt = self.random.choice(running)
            attempt.finish(SUCCEEDED)
            self.worker.send_outcome(attempt)

    def send(self) -> None:
        request = self.worker.take_request(self.now_us)
        if request is not None:
            self.up.append(request)

    # What holds.

    def step(self, faults: bool) -> None:
        self.now_us += self.random.randrange(STEP_US)
        steps = [self.grant, self.finish, self.cancel_one, self.prove]
        steps += [self.read, self.write, self.receive, self.send] * 2
        if self.random.random() < 0.05:
            steps = [lambda: self.refuse_one(moved=False), lambda: self.refuse_one(moved=True)]
        if faults and self.random.random() < 0.02:
            steps = [self.lose, self.disturb]
        self.random.choice(steps)()
        assert len(self.worker.held) <= CAPACITY
        assert self.worker.digest == _digest(list(self.worker.held))

    def settle(self) -> None:
        """No more grants and no more faults: everything that is under way arrives."""
        for _ in range(400):
            self.now_us += STEP_US
            for act in (self.send, self.read, self.prove, self.write, self.receive):
                act()
            self.finish()
            if not self.held and not self.up and not self.down and not self.live and not self.worker.held:
                return


def _digest(tokens: list[str]) -> tuple[int, int]:
    digest = HeldDigest.of(tokens)
    return digest.count, digest.token_sum


@pytest.mark.parametrize("seed", range(60))
def test_what_is_under_way_is_never_taken_for_a_disagreement(seed: int) -> None:
    pair = Pair(seed)
    for _ in range(1_500):
        pair.step(faults=False)
    assert pair.disagreements == 0
    assert pair.heartbeats > 10
    assert pair.renewals > 5
    pair.settle()
    assert not pair.worker.held, f"seed {seed}: {len(pair.worker.held)} attempts are left at the worker"
    assert not pair.live, f"seed {seed}: {len(pair.live)} leases are left at the timer"


@pytest.mark.parametrize("seed", range(60))
def test_lost_streams_and_wrong_counts_are_found_and_resolved_by_naming(seed: int) -> None:
    pair = Pair(seed)
    for _ in range(2_500):
        pair.step(faults=True)
    pair.settle()
    assert pair.number > 2, "no stream was ever lost"
    lost = {token for token in pair.live if token not in pair.worker.held}
    assert not pair.worker.held
    # Grants that were under way on a broken stream: the owner hands them back, which is not the session's.
    assert set(pair.live) == lost


def test_a_wrong_count_is_noticed_by_the_next_heartbeat() -> None:
    provoked = disagreements = 0
    for seed in range(20):
        pair = Pair(seed)
        for _ in range(2_000):
            pair.step(faults=True)
        provoked += pair.provoked
        disagreements += pair.disagreements
    assert provoked > 20
    assert disagreements > provoked // 3


def test_a_proof_that_began_before_a_heartbeat_came_does_not_answer_it() -> None:
    timer = WorkerSession(1, 1, "w", frozenset(), None, 10)
    assert timer.heartbeat(5, 0, 0, 0, received_us=1_000)
    assert not timer.renewal_proven(999, (1,))
    assert timer.renewal_proven(1_000, (1,))
    assert not timer.renewal_proven(2_000, (1,)), "one proof answers it once"


def test_credit_is_what_was_given_less_what_was_granted_and_none_goes_to_who_is_silent() -> None:
    timer = WorkerSession(1, 1, "w", frozenset(), None, 3)
    timer.reserve(2)
    assert timer.credit == 1
    timer.give_back(1)
    assert timer.credit == 2
    timer.grant_count_max = 1
    assert timer.credit == 0
    timer.grant_count_max = 5
    timer.silent = True
    assert timer.credit == 0
    timer.silent = False
    timer.add_drain("rolling")
    assert timer.credit == 0


def test_a_message_is_cut_at_its_size_and_nothing_waits_behind_nothing() -> None:
    timer = WorkerSession(1, 1, "w", frozenset(), None, 100)
    for _ in range(5):
        timer.reserve(10)
        timer.add_grants(GrantChunk(bytes(400_000), np.arange(10), np.ones(10, dtype=np.uint64), 7))
    sizes = []
    while (frame := timer.take_frame()) is not None:
        sizes.append(frame.grant_count)
    assert sizes == [20, 20, 10]
    assert not timer.has_output
    assert timer.outbox_grants == 0
    assert timer.heartbeat(1, 3, 50, 50, 1)
