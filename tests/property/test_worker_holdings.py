"""A worker among scripted timers that move shards, lose streams, freeze and lose messages, in random order.

The model knows who owns which shard, which leases live and what was recorded. Whatever happens: at most one
outcome of a lease is taken, no running attempt outlives its lease on the timer's side, none is lost while its
lease lives, and when the world calms down everything is recorded and nothing is left anywhere.
"""

from __future__ import annotations

import random
import secrets
from collections import deque
from dataclasses import dataclass, field

import pytest

from tickwheel.domain.lease import HeldDigest
from tickwheel.v1 import worker_service_pb2 as pb
from tickwheel.worker.attempt import SUCCEEDED, Attempt, Failed, Phase, Released
from tickwheel.worker.credit import Demand, deal
from tickwheel.worker.holdings import Holdings
from tickwheel.worker.session import Effects, Identity, Request

SHARDS = range(6)
LEASE_US = 10_000_000
STEP_US = 50_000
CAPACITY = 12


@dataclass
class Lease:
    run: str
    token: str
    shard: int
    deadline_us: int


@dataclass
class Timer:
    """One timer: what it believes, and the two directions of its stream."""

    name: str
    loading: set[int] = field(default_factory=set)
    frozen: bool = False
    connected: bool = False
    sequence: int = 0
    granted: int = 0
    grant_count_max: int = 0
    # What the worker held after the last response that it named, and what each later one changes.
    base: set[str] = field(default_factory=set)
    changes: list[tuple[int, list[str], list[str]]] = field(default_factory=list)
    up: deque[Request] = field(default_factory=deque)
    down: deque[pb.WorkResponse] = field(default_factory=deque)

    def settle(self, last_sequence: int) -> None:
        while self.changes and self.changes[0][0] <= last_sequence:
            _, added, removed = self.changes.pop(0)
            self.base = (self.base | set(added)) - set(removed)

    def held(self) -> set[str]:
        held = set(self.base)
        for _, added, removed in self.changes:
            held = (held | set(added)) - set(removed)
        return held


class World:
    """Timers, leases and one worker's holdings. One clock for all."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now_us = 1_000_000_000
        self.holdings = Holdings(Identity("w", capacity=CAPACITY))
        self.timers = {name: Timer(name) for name in ("a", "b", "c")}
        self.owner = {shard: self.random.choice("abc") for shard in SHARDS}
        self.leases: dict[str, Lease] = {}
        self.recorded: dict[str, int] = {}
        self.expired: set[str] = set()
        self.running: dict[str, Attempt] = {}
        self.ends_us: dict[str, int] = {}
        self.finished: set[str] = set()
        self.calm = False

    # The timers.

    def respond(self, timer: Timer, response: pb.WorkResponse, added: list[str], removed: list[str]) -> None:
        timer.sequence += 1
        response.sequence = timer.sequence
        response.clock_us = self.now_us
        if added or removed:
            timer.changes.append((timer.sequence, added, removed))
        timer.down.append(response)

    def owns(self, timer: Timer, shard: int) -> bool:
        return self.owner[shard] == timer.name and shard not in timer.loading

    def grant(self, timer: Timer) -> None:
        shards = [shard for shard in SHARDS if self.owns(timer, shard)]
        if not shards or not timer.connected or timer.granted >= timer.grant_count_max:
            return
        lease = Lease(
            f"tenants/t/runs/{secrets.token_hex(16)}",
            "".join(self.random.choice("0123456789abcdef") for _ in range(32)),
            self.random.choice(shards),
            self.now_us + LEASE_US,
        )
        self.leases[lease.token] = lease
        timer.granted += 1
        response = pb.WorkResponse(grant_clock_us=self.now_us)
        response.grants.add(run=lease.run, attempt=1, fence=1, lease_token=lease.token, shard=lease.shard)
        self.respond(timer, response, [lease.token], [])

    def serve(self, timer: Timer) -> None:
        """Take one request in, in the order of its fields."""
        if timer.frozen or not timer.up:
            return
        request = timer.up.popleft()
        response = pb.WorkResponse(backlog_count=self.random.choice((0, 0, 5)))
        added: list[str] = []
        removed: list[str] = []
        if request.hello is not None:
            welcome = response.welcome
            welcome.lease_duration.FromMicroseconds(LEASE_US)
            welcome.heartbeat_interval_duration.FromMicroseconds(LEASE_US // 3)
            timer.base = {attempt.token for attempt in request.hello_held}
            timer.changes.clear()
            self.name(timer, request.hello_held, response, removed)
        for attempt, _ in request.outcomes:
            self.outcome(timer, attempt, response, removed)
        if request.heartbeat is not None:
            beat = request.heartbeat
            if beat.held is not None:
                timer.settle(beat.last_sequence)
                timer.base = {attempt.token for attempt in beat.held}
                self.name(timer, beat.held, response, removed)
                self.renew(timer, beat.sent_us, beat.last_sequence, response)
            else:
                timer.settle(beat.last_sequence)
                expected = HeldDigest.of(timer.base)
                if (beat.held_count, beat.held_digest) == (expected.count, expected.token_sum):
                    self.renew(timer, beat.sent_us, beat.last_sequence, response)
                else:
                    response.resync = True
        if request.grant_count_max is not None:
            timer.grant_count_max = request.grant_count_max
        self.respond(timer, response, added, removed)

    def name(
        self, timer: Timer, attempts: list[Attempt], response: pb.WorkResponse, removed: list[str]
    ) -> None:
        for attempt in attempts:
            lease = self.leases.get(attempt.token)
            if lease is None:
                reason = pb.Refusal.REASON_SUPERSEDED
            elif self.owner[lease.shard] != timer.name:
                reason = pb.Refusal.REASON_MOVED
            else:
                continue
            response.refusals.add(run=attempt.run, attempt=1, lease_token=attempt.token, reason=reason)
            removed.append(attempt.token)

    def outcome(self, timer: Timer, attempt: Attempt, response: pb.WorkResponse, removed: list[str]) -> None:
        lease = self.leases.get(attempt.token)
        if lease is None:
            if attempt.token in self.recorded:
                response.recorded.append(attempt.token)
            else:
                response.refusals.add(
                    run=attempt.run,
                    attempt=1,
                    lease_token=attempt.token,
                    reason=pb.Refusal.REASON_SUPERSEDED,
                )
        elif self.owner[lease.shard] != timer.name:
            response.refusals.add(
                run=attempt.run, attempt=1, lease_token=attempt.token, reason=pb.Refusal.REASON_MOVED
            )
        elif lease.shard in timer.loading:
            return
        else:
            del self.leases[attempt.token]
            self.recorded[attempt.token] = self.recorded.get(attempt.token, 0) + 1
            response.recorded.append(attempt.token)
        removed.append(attempt.token)

    def renew(self, timer: Timer, sent_us: int, sequence: int, response: pb.WorkResponse) -> None:
        shards = [shard for shard in SHARDS if self.owns(timer, shard)]
        response.renewed.sent_us = sent_us
        response.renewed.sequence = sequence
        response.renewed.shards.extend(shards)
        for token in timer.held():
            lease = self.leases.get(token)
            if lease is not None and lease.shard in shards:
                # A timer counts from the receipt, which is not before the sending.
                lease.deadline_us = max(lease.deadline_us, self.now_us + LEASE_US)

    def expire(self) -> None:
        for token, lease in list(self.leases.items()):
            if lease.deadline_us <= self.now_us and lease.shard not in self.loading_shards():
                del self.leases[token]
                self.expired.add(token)

    def loading_shards(self) -> set[int]:
        return {shard for timer in self.timers.values() for shard in timer.loading}

    def move(self, shard: int, to: str) -> None:
        """A takeover: the new owner gives everything a full lease, and loads for a while."""
        if self.owner[shard] == to:
            return
        self.timers[self.owner[shard]].loading.discard(shard)
        self.owner[shard] = to
        self.timers[to].loading.add(shard)
        for lease in self.leases.values():
            if lease.shard == shard:
                lease.deadline_us = self.now_us + LEASE_US

    # The worker.

    def connect(self, timer: Timer) -> None:
        if timer.connected:
            return
        timer.connected = True
        timer.sequence = timer.granted = timer.grant_count_max = 0
        timer.up.clear()
        timer.down.clear()
        self.holdings.open(timer.name, self.now_us)

    def disconnect(self, timer: Timer) -> None:
        if timer.connected:
            timer.connected = False
            timer.up.clear()
            timer.down.clear()
            self.holdings.lost(timer.name, self.now_us)

    def deliver(self, timer: Timer) -> None:
        if timer.connected and timer.down and not timer.frozen:
            self.apply(self.holdings.receive(timer.name, timer.down.popleft(), self.now_us))

    def write(self, timer: Timer) -> None:
        if timer.connected:
            request = self.holdings.sessions[timer.name].take_request(self.now_us)
            if request is not None:
                timer.up.append(request)

    def apply(self, effects: Effects) -> None:
        for attempt in effects.start:
            self.running[attempt.token] = attempt
            # Most are short, some outlast several leases.
            length_us = self.random.choice((100_000, 1_000_000, 40_000_000))
            self.ends_us[attempt.token] = self.now_us + self.random.randrange(length_us)
        for attempt, _ in effects.abandon:
            self.running.pop(attempt.token, None)
        for attempt in effects.stop:
            del self.running[attempt.token]
            assert self.holdings.finish_all([(attempt, Failed("LeaseLapsed", ""))]) == 0
            self.finished.add(attempt.token)

    def finish(self) -> None:
        for token in [token for token in self.running if self.ends_us[token] <= self.now_us]:
            attempt = self.running.pop(token)
            outcome = self.random.choice((SUCCEEDED, Failed("E", "m"), Released("r")))
            assert self.holdings.finish_all([(attempt, outcome)]) == 0
            self.finished.add(token)

    # One step, and what must hold after it.

    def step(self) -> None:
        self.now_us += self.random.randrange(STEP_US)
        timer = self.timers[self.random.choice("abc")]
        weights = {
            self.write: 30,
            self.deliver: 30,
            self.serve: 30,
            self.grant: 0 if self.calm else 8,
            self.connect: 4 if self.calm else 0.5,
            self.disconnect: 0 if self.calm else 0.2,
        }
        action = self.random.choices(list(weights), list(weights.values()))[0]
        action(timer)
        self.finish()
        if not self.calm and self.random.random() < 0.01:
            self.move(self.random.choice(SHARDS), self.random.choice("abc"))
        if not self.calm and self.random.random() < 0.004:
            timer.frozen = not timer.frozen
        if self.random.random() < 0.1:
            timer.loading.clear()
        self.apply(self.holdings.tick(self.now_us))
        for key in self.holdings.dead(self.now_us):
            self.disconnect(self.timers[key])
        self.expire()
        self.check()

    def check(self) -> None:
        assert all(count == 1 for count in self.recorded.values()), "an outcome was taken twice"
        for session in self.holdings.sessions.values():
            held = HeldDigest.of(session.held)
            assert session.digest == (held.count, held.token_sum)
        for token in self.running:
            assert token not in self.expired, "it still ran when its lease was given away"
        known = {token for session in self.holdings.sessions.values() for token in session.held}
        known |= {token for session in self.holdings.sessions.values() for token in session.owed}
        known |= set(self.holdings._wandering)
        for token, attempt in self.running.items():
            assert attempt.phase is Phase.RUNNING
            assert token in known, "a running attempt that nobody renews"
        for token in self.finished:
            assert token in known or token in self.recorded or token in self.expired, "an outcome was lost"


@pytest.mark.parametrize("seed", [random.Random().randrange(1 << 32) for _ in range(12)])
def test_no_outcome_is_lost_or_taken_twice_and_nothing_runs_past_its_lease(seed: int) -> None:
    print(f"seed {seed}")
    world = World(seed)
    for timer in world.timers.values():
        world.connect(timer)
    for _ in range(4000):
        world.step()
    world.calm = True
    for timer in world.timers.values():
        timer.frozen = False
        world.connect(timer)
    for _ in range(6000):
        world.step()
    assert world.running == {}
    assert world.leases == {} or all(token not in world.finished for token in world.leases)
    assert world.holdings.held_count == 0
    assert world.holdings._wandering == {}
    for session in world.holdings.sessions.values():
        assert session.held == {}
        assert session.grant_limit >= session._granted_count
    assert sum(session._share for session in world.holdings.sessions.values()) == CAPACITY
    assert len(world.recorded) + len(world.expired) > 0


def test_a_run_of_one_seed_is_the_same_run_every_time_and_does_much() -> None:
    outcomes = []
    for _ in range(2):
        world = World(7)
        for timer in world.timers.values():
            world.connect(timer)
        for _ in range(4000):
            world.step()
        outcomes.append((sorted(world.recorded), sorted(world.expired), sorted(world.running), world.now_us))
    assert outcomes[0] == outcomes[1]
    assert len(outcomes[0][0]) > 20


def test_a_timer_that_does_not_answer_keeps_no_credit_from_one_that_does() -> None:
    holdings = Holdings(Identity("w", capacity=100))
    now_us = 1_000_000_000
    for name in ("a", "b"):
        session = holdings.open(name, now_us)
        session.take_request(now_us)
        response = pb.WorkResponse(sequence=1, clock_us=1)
        response.welcome.lease_duration.FromMicroseconds(LEASE_US)
        holdings.receive(name, response, now_us)
        session.take_request(now_us)
    holdings.tick(now_us + 200_000)
    a, b = holdings.sessions["a"], holdings.sessions["b"]
    assert (a.grant_limit, b.grant_limit) == (50, 50)
    holdings.set_present(["a"])
    now_us += 1_000_000
    b.take_request(now_us)
    holdings.receive("a", pb.WorkResponse(sequence=2, clock_us=1), now_us)
    now_us += 600_000
    holdings.tick(now_us)
    assert (a.grant_limit, b.grant_limit) == (100, 0)
    holdings.receive("b", pb.WorkResponse(sequence=2, clock_us=1), now_us)
    holdings.tick(now_us + 200_000)
    assert (a.grant_limit, b.grant_limit) == (50, 50)


@pytest.mark.parametrize("seed", [random.Random().randrange(1 << 32) for _ in range(5)])
def test_the_deal_gives_out_the_capacity_and_nobody_starves(seed: int) -> None:
    print(f"seed {seed}")
    chance = random.Random(seed)
    for _ in range(2000):
        count = chance.randrange(1, 12)
        capacity = chance.randrange(0, 200)
        demands = [
            Demand(chance.randrange(50), chance.choice((0, chance.randrange(10_000)))) for _ in range(count)
        ]
        shares = deal(capacity, demands, chance.randrange(100))
        assert sum(shares) == capacity
        assert min(shares) >= 0
        if capacity >= count:
            assert min(shares) >= 1
    # With fewer places than timers each has its turn.
    idle = [Demand(0, 0)] * 3
    assert {deal(1, idle, turn).index(1) for turn in range(3)} == {0, 1, 2}
    assert deal(1, [Demand(0, 0), Demand(0, 9), Demand(0, 0)], 0) == [0, 1, 0]
