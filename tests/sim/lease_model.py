"""An exhaustive model of leases: two timers, one worker, one run, etcd and Postgres, explored state by state.

What it is for: design sections 6 and 8 fix who may extend, end or give away a lease, and when. Each of those
rules is a switch of `Rules`. With all of them on, no interleaving within a scenario's bounds breaks a
property; with any one off, some interleaving does, and `explore` returns the shortest.
docs/decisions/0004-lease-rules.md says the rules as an implementer needs them; test_lease_model.py runs every
switch.

How it is made:

* A state is one nested tuple. Breadth first, every enabled action of every party is tried, so the first
  counterexample is a shortest one.
* Time is whole ticks, and each instant is kept relative to now (0 is now, negative is past, cut at one TTL):
  time needs no horizon, and what differs only in when it happened is one state.
* Nothing is prompt unless the scenario says so. A timer that is frozen, or cut off from Postgres, etcd or the
  worker, is one whose actions are not chosen for a while; a slow message is one that is not delivered yet.
  All such faults, of any length, are therefore in every scenario without a switch of their own. Only the
  worker's freezing is explicit, since an awake worker *does* stop at its deadline. `prompt` scenarios are the
  opposite: time passes only when nothing is left to do, which is what liveness is judged by.
* One run with one attempt of interest, X. As soon as Postgres returns X's run (LAPSED, RELEASED), another
  worker may have it: so the worker must not believe in X then (I5, I3).

The bounds are in `SCENARIOS`: so many heartbeats, reassignments, broken streams, lost connections.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

TTL = 3
"""One lease, in ticks, where thirds matter (heartbeats, simple workers). Two ticks are enough elsewhere."""

QUEUE_MAX = 2
OFFSET_B = 2
"""Timer B's monotonic clock reads this much less than A's."""

NAMES = ("A", "B")
A, B = 0, 1
RETURNED = ("LAPSED", "RELEASED")


@dataclass(frozen=True, slots=True)
class Rules:
    """The switches. Each is one sentence of docs/decisions/0004-lease-rules.md."""

    proof_before_renewed: bool = True
    proof_begun_after_receipt: bool = True
    proof_by_committed_write: bool = True
    proof_names_its_shards: bool = True
    etcd_read_is_linearizable: bool = True
    etcd_proof_compares_generation: bool = True
    etcd_proof_compares_incarnation: bool = True
    resume_waits_one_ttl: bool = True
    take_follows_assignment: bool = True
    take_compares_generation: bool = True
    every_write_is_fenced: bool = True
    worker_counts_renewal_from_sending: bool = True
    timer_extends_at_receipt: bool = True
    worker_counts_grant_from_reading: bool = True
    echo_is_of_the_same_stream: bool = True
    reading_precedes_transaction: bool = True
    simple_worker_counts_two_thirds: bool = True
    worker_stops_a_margin_early: bool = True
    worker_clock_runs_in_suspend: bool = True
    grace_at_takeover: bool = True
    grace_counts_from_commit: bool = True
    load_after_commit: bool = True
    unknown_commit_is_retaken: bool = True
    retake_raises_epoch: bool = True
    retake_keeps_deadlines: bool = True
    retake_repeats_own_calls: bool = True
    never_sent_is_released: bool = True
    unlisted_waits_for_grace: bool = True
    rebalance_waits_two_ttls: bool = True
    digest_is_compared: bool = True
    digest_is_as_of_sequence: bool = True
    recorded_is_numbered: bool = True
    renewed_names_its_sequence: bool = True
    announced_before_heartbeat: bool = True
    disagreement_renews_nothing: bool = True
    ending_is_not_renewable: bool = True
    ending_enters_no_other_batch: bool = True
    old_stream_is_dead: bool = True
    finished_is_held_until_recorded: bool = True
    finished_is_heartbeated: bool = True
    stopped_is_reported: bool = True
    outcome_compares_token: bool = True
    fenced_owner_answers_moved: bool = True
    loading_owner_answers_neither: bool = True
    refusal_waits_for_proof: bool = True
    refused_listing_spares_outcomes: bool = True


RULE_NAMES = tuple(field.name for field in fields(Rules))


class Postgres(NamedTuple):
    row: str  # X's run: WAITING, LEASED, DONE, LAPSED, RELEASED; LOST: its grant was lost by a restore
    epoch: int
    owner: int
    generation: int
    orphans: tuple[Any, ...] = ()  # statements whose connection died before they ran: (timer, call)
    halted: bool = False  # restored, not resumed
    hold: int = 0  # ticks until dispatch after a resume


class Etcd(NamedTuple):
    owner: int
    generation: int
    incarnation: int = 0


class Timer(NamedTuple):
    phase: str = "idle"  # idle, taking (and loading), own, unknown (a call's answer was lost)
    epoch: int = 0
    generation: int = 0
    incarnation: int = 0
    lease: int | None = None  # X's deadline in memory
    origin: str = ""  # of that lease: unsent, sent, found (at a takeover), unlisted, found-unlisted
    busy: str = ""  # the batch X stands in: grant, expire, release, outcome
    owed: str = ""  # an outcome of X was received: done, stopped
    call: tuple[Any, ...] | None = None  # the shard's call: (kind, epoch, stage, result, instant, extra)
    second: tuple[Any, ...] | None = None  # another batch; only without `ending_enters_no_other_batch`
    proof: tuple[str, int, bool] | None = None  # made, its answer under way: (kind, epoch, mine)
    doubt: str = ""  # X was listed as running and is not known here: asked, proving (a proof has begun since)
    # A heartbeat that waits for a proof: (sent, sequence, proof begun since, X was held at sending).
    waiting: tuple[int, int, bool, bool] | None = None
    log: tuple[bool, ...] = ()  # is X the worker's, after each numbered message of this stream; (): closed
    up: tuple[Any, ...] = ()  # worker to timer
    down: tuple[Any, ...] = ()
    stale: tuple[Any, ...] = ()  # what a broken stream still holds; only without `old_stream_is_dead`


class Worker(NamedTuple):
    x: str = "none"  # none, run, stopped, done; over (recorded), lost (fenced)
    until: int = 0  # the handler runs before this instant
    frozen: bool = False
    began: bool = False
    member: tuple[bool, bool] = (False, False)  # X counts as held on that stream
    since: tuple[int, int] = (0, 0)  # from that sequence on
    seen: tuple[int, int] = (0, 0)
    echo: tuple[int | None, int | None] = (None, None)  # sent - reading, in true time: never above 0
    open: tuple[bool, bool] = (False, False)
    said: tuple[bool, bool] = (False, False)  # the outcome went up that stream
    beaten: tuple[bool, bool] = (False, False)  # prompt scenarios: one heartbeat a tick


class Left(NamedTuple):
    """How often each may still happen."""

    beats: int = 0  # prompt scenarios: one each tick, if any
    names: int = 0  # announcements of X on an open stream
    reassigns: int = 0
    breaks: int = 0
    losses: int = 0  # connections to Postgres that die with a call on them
    freezes: int = 0
    finishes: int = 0
    restores: int = 0
    timer_deaths: int = 0
    worker_deaths: int = 0


class State(NamedTuple):
    pg: Postgres
    etcd: Etcd
    timers: tuple[Timer, Timer]
    worker: Worker
    left: Left
    dead: int = -1  # ticks since timer A died
    worker_dead: int = -1
    settled: int = 0  # ticks since the last reassignment (prompt scenarios)


@dataclass(frozen=True, slots=True)
class Scenario:
    name: str
    start: State
    ttl: int = 2
    prompt: bool = False
    simple_worker: bool = False
    etcd_proofs: bool = True
    outcomes: bool = False  # explore also what becomes of an attempt that does not run any more
    lapse_bound: int = TTL + 1  # a dead worker's run is returned within so many ticks


class Step(NamedTuple):
    label: str
    state: State
    broken: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    states: int
    broken: str = ""
    trace: tuple[str, ...] = ()


def held(worker: Worker) -> bool:
    return worker.x in ("run", "stopped", "done")


def with_call(t: Timer, slot: str, call: tuple[Any, ...] | None) -> Timer:
    return t._replace(call=call) if slot == "call" else t._replace(second=call)


def article(kind: str) -> str:
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"


def put(pair: tuple[Any, Any], index: int, value: Any) -> tuple[Any, Any]:
    return (value, pair[1]) if index == 0 else (pair[0], value)


class Model:
    """The actions. Each method yields the steps of one party from a state."""

    def __init__(self, rules: Rules, scenario: Scenario) -> None:
        self.rules = rules
        self.scenario = scenario
        self.ttl = scenario.ttl

    def steps(self, s: State) -> Iterator[Step]:
        urgent = False
        for i in (A, B):
            if i == A and s.dead >= 0:
                continue
            for step in self.timer_steps(s, i):
                urgent = True
                yield step
            for step in self.postgres_steps(s, i):
                urgent = True
                yield step
        if not s.worker.frozen and s.worker_dead < 0:
            for step in self.worker_steps(s):
                urgent = True
                yield step
        for step in self.leader_steps(s):
            urgent = urgent or s.dead >= 0
            yield step
        yield from self.faults(s)
        if not (self.scenario.prompt and urgent):
            yield self.tick(s)

    # -- time

    def tick(self, s: State) -> Step:
        def shift(message: tuple[Any, ...]) -> tuple[Any, ...]:
            kind = message[0]
            if kind in ("hello", "names", "beat", "grant", "renewed"):
                return (kind, max(message[1] - 1, -self.ttl), *message[2:])
            return message

        def shift_call(call: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
            if call and call[0] in ("grant", "take"):
                return (*call[:4], max(call[4] - 1, -self.ttl), *call[5:])
            return call

        def shift_timer(t: Timer) -> Timer:
            return t._replace(
                lease=None if t.lease is None else max(t.lease - 1, 0),
                waiting=t.waiting and (max(t.waiting[0] - 1, -self.ttl), *t.waiting[1:]),
                call=shift_call(t.call),
                up=tuple(map(shift, t.up)),
                down=tuple(map(shift, t.down)),
                stale=tuple(map(shift, t.stale)),
            )

        timers = (shift_timer(s.timers[A]), shift_timer(s.timers[B]))
        w = s.worker
        asleep = w.frozen and not self.rules.worker_clock_runs_in_suspend
        until = w.until if asleep else max(w.until - 1, 0)
        x = w.x
        if x == "run" and until <= 0 and not w.frozen:
            x = "stopped" if self.rules.stopped_is_reported else "dropped"
        prompt = self.scenario.prompt
        worker_dead = min(s.worker_dead, self.scenario.lapse_bound) + 1 if s.worker_dead >= 0 else -1
        dead = min(s.dead + 1, self.ttl) if s.dead >= 0 else -1
        state = s._replace(
            timers=(timers[0], timers[1]),
            worker=w._replace(until=until, x=x, beaten=(False, False)),
            dead=dead,
            worker_dead=worker_dead,
            settled=min(s.settled + 1, 2 * self.ttl) if prompt else 0,
            pg=s.pg._replace(hold=max(s.pg.hold - 1, 0)),
        )
        broken = ""
        if prompt and worker_dead > self.scenario.lapse_bound and s.pg.row == "LEASED":
            broken = f"liveness: a dead worker's run is still leased after {worker_dead} ticks"
        return Step("a tick passes", state, broken)

    # -- the leader, and what goes wrong

    def leader_steps(self, s: State) -> Iterator[Step]:
        if s.left.reassigns == 0:
            return
        target = B if s.etcd.owner == A else A
        if self.scenario.prompt:
            if s.left.timer_deaths or (0 <= s.dead < 1):
                return
            if s.dead < 0 and s.settled < (2 * self.ttl if self.rules.rebalance_waits_two_ttls else 1):
                return
        left = s.left._replace(reassigns=s.left.reassigns - 1)
        etcd = s.etcd._replace(owner=target, generation=s.etcd.generation + 1)
        yield Step(
            f"etcd: the leader assigns the shard to {NAMES[target]}, generation {etcd.generation}",
            s._replace(etcd=etcd, left=left, settled=0),
        )

    def faults(self, s: State) -> Iterator[Step]:
        left = s.left
        w = s.worker
        if left.breaks:
            for i in (A, B):
                t = s.timers[i]
                if t.log:
                    yield Step(
                        f"the stream between worker and {NAMES[i]} breaks",
                        self.close(s, i)._replace(left=left._replace(breaks=left.breaks - 1)),
                    )
        if left.losses:
            for i in (A, B):
                call = s.timers[i].call
                if call and call[0] != "take":
                    yield self.lose_connection(s, i, call)
        if w.frozen:
            yield Step("the worker thaws", s._replace(worker=w._replace(frozen=False)))
        elif left.freezes and w.x == "run":
            yield Step(
                "the worker freezes",
                s._replace(worker=w._replace(frozen=True), left=left._replace(freezes=left.freezes - 1)),
            )
        if left.timer_deaths and s.dead < 0:
            dead = self.close(s, A)._replace(dead=0, left=left._replace(timer_deaths=0))
            yield Step("timer A dies", dead._replace(timers=put(dead.timers, A, Timer())))
        if left.worker_deaths and s.worker_dead < 0:
            dead = self.close(self.close(s, A), B)
            yield Step(
                "the worker dies",
                dead._replace(worker_dead=0, worker=Worker(x="dead"), left=left._replace(worker_deaths=0)),
            )
        if left.restores and s.pg.row == "LEASED":
            yield Step(
                "Postgres is restored to before the grant of X; grants stop",
                s._replace(
                    pg=s.pg._replace(row="LOST", halted=True),
                    left=left._replace(restores=0),
                ),
            )
        if s.pg.halted:
            hold = self.ttl if self.rules.resume_waits_one_ttl else 0
            yield Step(
                "an operator resumes: the incarnation and every epoch rise",
                s._replace(
                    pg=s.pg._replace(halted=False, epoch=s.pg.epoch + 10, hold=hold),
                    etcd=s.etcd._replace(incarnation=1),
                ),
            )

    def close(self, s: State, i: int) -> State:
        t, w = s.timers[i], s.worker
        stale = () if self.rules.old_stream_is_dead else tuple(m for m in t.down if m[0] == "grant")
        t = t._replace(log=(), up=(), down=(), waiting=None, stale=stale)
        w = w._replace(
            member=put(w.member, i, False),
            since=put(w.since, i, 0),
            open=put(w.open, i, False),
            said=put(w.said, i, False),
            seen=put(w.seen, i, 0),
            echo=put(w.echo, i, w.echo[i] if stale else None),
        )
        return s._replace(timers=put(s.timers, i, t), worker=w)

    def lose_connection(self, s: State, i: int, call: tuple[Any, ...]) -> Step:
        t = s.timers[i]
        pg = s.pg
        if call[2] == "sent":
            pg = pg._replace(orphans=(*pg.orphans, (i, call)))
        if self.rules.unknown_commit_is_retaken:
            t = t._replace(phase="unknown", call=None)
        else:  # the batch is dropped as stale
            t = t._replace(call=None, busy="", lease=None if call[0] == "grant" else t.lease)
        return Step(
            f"{NAMES[i]}'s connection to Postgres dies before the answer to its {call[0]}",
            s._replace(pg=pg, timers=put(s.timers, i, t), left=s.left._replace(losses=s.left.losses - 1)),
        )

    # -- Postgres and etcd: where calls take effect

    def postgres_steps(self, s: State, i: int) -> Iterator[Step]:
        t = s.timers[i]
        name = NAMES[i]
        for slot in ("call", "second"):
            call = getattr(t, slot)
            if call and call[2] == "sent":
                if call[0] == "take":
                    if not s.pg.halted:
                        yield self.run_take(s, i, call, t)
                else:
                    pg, result, broken = self.run_call(s, call)
                    done = (*call[:2], "answered", result, *call[4:])
                    finds = "commits" if result == "ok" else f"finds: {result}"
                    label = f"Postgres: {name}'s {call[0]} of X {finds}"
                    after = with_call(t, slot, done)
                    new = s._replace(pg=pg, timers=put(s.timers, i, after))
                    if self.answers_are_told_apart(s):
                        yield Step(label, new, broken)
                    else:
                        answered = self.answer_call(new, i, after, slot)
                        yield Step(f"{label}; {answered.label}", answered.state, broken or answered.broken)
        for index, (owner, call) in enumerate(s.pg.orphans):
            if owner == i:
                pg, result, broken = self.run_call(s, call)
                pg = pg._replace(orphans=pg.orphans[:index] + pg.orphans[index + 1 :])
                yield Step(f"Postgres: {name}'s orphaned {call[0]} runs: {result}", s._replace(pg=pg), broken)

    def run_call(self, s: State, call: tuple[Any, ...]) -> tuple[Postgres, str, str]:
        """One fenced statement: the new Postgres, what it answers, and what it broke."""
        kind, epoch, extra, pg = call[0], call[1], call[5], s.pg
        if pg.halted:
            return pg, "halted", ""
        if self.rules.every_write_is_fenced and epoch != pg.epoch:
            return pg, "moved", ""
        if kind == "grant":
            if pg.row == "LOST":
                return pg._replace(row="LAPSED"), "granted to another worker", ""
            return (pg._replace(row="LEASED"), "ok", "") if pg.row == "WAITING" else (pg, "stale", "")
        if pg.row == "LEASED":
            row = {"expire": "LAPSED", "release": "RELEASED", "done": "DONE", "stopped": "LAPSED"}[
                extra if kind == "outcome" else kind
            ]
            broken = ""
            if row == "RELEASED" and s.worker.began:
                broken = "I6: an attempt that a worker began ends RELEASED, as if it never ran"
            if row == "LAPSED" and kind == "expire" and self.scenario.prompt and s.worker_dead < 0:
                broken = "liveness: a live worker's attempt is expired"
            if row == "RELEASED" and self.scenario.prompt and s.worker.x == "run":
                broken = "liveness: a live worker's attempt is released"
            return pg._replace(row=row), "ok", broken
        if kind == "outcome":
            if not self.rules.outcome_compares_token:
                return pg, "ok", "I6: an outcome is applied a second time, or to another attempt's lease"
            if pg.row == "DONE":
                return pg, "recorded before", ""
        return pg, "stale", ""

    def answers_are_told_apart(self, s: State) -> bool:
        """A commit and its answer are two steps when the answer can be lost, or its lateness can do harm."""
        rules = self.rules
        apart = rules.reading_precedes_transaction and rules.ending_enters_no_other_batch
        return bool(s.left.losses) or not apart

    def take_is_one_step(self, s: State, t: Timer) -> bool:
        """A takeover's beginning, commit and answer are far apart only if something can happen between that
        matters.
        """
        rules = self.rules
        told_apart = (
            rules.load_after_commit and rules.grace_counts_from_commit and rules.take_compares_generation
        )
        return (
            told_apart
            and t.phase == "idle"
            and not s.left.reassigns
            and not s.pg.halted
            and not s.left.restores
        )

    def run_take(self, s: State, i: int, call: tuple[Any, ...], t: Timer) -> Step:
        _, _, _, _, begun, extra = call
        generation = extra[0]
        pg = s.pg
        may = pg.generation < generation or (pg.generation == generation and pg.owner == i)
        if not self.rules.take_compares_generation:
            may = True
        retake = t.epoch > 0
        if may:
            epoch = pg.epoch if retake and not self.rules.retake_raises_epoch else pg.epoch + 1
            pg = pg._replace(epoch=epoch, owner=i, generation=generation)
            counted = 0 if self.rules.grace_counts_from_commit else begun
            done = ("take", epoch, "answered", "ok", counted, extra)
        else:
            done = ("take", 0, "answered", "refused", 0, extra)
        return Step(
            f"Postgres: {NAMES[i]} takes the shard"
            + (
                f", epoch {pg.epoch}, generation {generation}"
                if may
                else ": refused, a newer generation is stored"
            ),
            s._replace(pg=pg, timers=put(s.timers, i, t._replace(call=done))),
        )

    # -- a timer

    def timer_steps(self, s: State, i: int) -> Iterator[Step]:
        t = s.timers[i]
        name = NAMES[i]

        def to(label: str, new: Timer, broken: str = "") -> Step:
            return Step(f"{name} {label}", s._replace(timers=put(s.timers, i, new)), broken)

        if t.call is None:
            yield from self.begin_calls(s, i, t)
        elif t.call[2] == "answered":
            yield self.answer_call(s, i, t, "call")
        if t.second and t.second[2] == "answered":
            yield self.answer_call(s, i, t, "second")
        if (t.phase in ("own", "unknown") or (t.phase == "taking" and t.epoch)) and t.proof is None:
            yield from self.prove(s, i, t)
        if t.proof:
            yield self.answer_proof(s, i, t)
        if t.up:
            yield from self.receive(s, i, t)
        may_enter_another = not self.rules.ending_enters_no_other_batch and t.second is None
        if may_enter_another and t.call and t.call[0] == "outcome" and t.lease == 0:
            second = ("expire", t.epoch, "sent", "", 0, "")
            yield to("sends an expire of X too", t._replace(second=second))

    def prove(self, s: State, i: int, t: Timer) -> Iterator[Step]:
        """A proof is begun and made; its answer takes its time.

        Beginning and taking effect are one step, for what counts is only whether a heartbeat was received
        before the one and what the other finds. A proof that nothing waits for matters only when it will be
        fenced, or when it passes for one that was begun later.
        """
        rules = self.rules
        needed = t.waiting or t.doubt or t.epoch != s.pg.epoch or not rules.proof_begun_after_receipt
        if s.pg.halted or not needed:
            kinds = []
        else:
            kinds = ["seen" if rules.proof_by_committed_write else "read"]
        if self.scenario.etcd_proofs and (t.waiting or t.doubt) and not self.scenario.prompt:
            kinds.append("etcd")
        for kind in kinds:
            if kind == "seen":
                mine = t.epoch == s.pg.epoch or not rules.proof_names_its_shards
                says = (
                    "a fenced write that commits" if mine else "a fenced write, which drops the shard's rows"
                )
            elif kind == "read":
                mine, says = True, "a read, answered by a primary that was cut off from its standby"
            else:
                mine = s.etcd.owner == i
                if rules.etcd_proof_compares_generation:
                    mine = mine and s.etcd.generation == t.generation
                if rules.etcd_proof_compares_incarnation:
                    mine = mine and s.etcd.incarnation == t.incarnation
                says = "a read in etcd: mine" if mine else "a read in etcd: not mine"
                if not mine and not rules.etcd_read_is_linearizable:
                    mine, says = True, "a read in etcd, answered by a member that lags: mine"
            waiting = t.waiting and (t.waiting[0], t.waiting[1], True, t.waiting[3])
            new = t._replace(proof=(kind, t.epoch, mine), waiting=waiting, doubt=t.doubt and "proving")
            label = f"{NAMES[i]} makes a proof, {says}"
            if not rules.proof_begun_after_receipt:
                yield Step(label, s._replace(timers=put(s.timers, i, new)))
                continue
            # An answer that is late is, for the worker, a Renewed that is late: the stream does that already.
            step = self.answer_proof(s, i, new)
            yield step._replace(label=f"{label}; {step.label}")

    def begin_calls(self, s: State, i: int, t: Timer) -> Iterator[Step]:
        name, rules = NAMES[i], self.rules

        def begin(kind: str, extra: str = "") -> Step:
            call = (kind, t.epoch, "sent", "", 0, extra)
            new = t._replace(call=call, busy=kind)
            return Step(f"{name} sends {article(kind)} of X", s._replace(timers=put(s.timers, i, new)))

        def take(generation: int) -> Step:
            snapshot = "" if rules.load_after_commit else s.pg.row
            call = ("take", 0, "sent", "", 0, (generation, s.etcd.incarnation, snapshot))
            new = t._replace(call=call, phase="taking")
            if self.take_is_one_step(s, t):
                step = self.run_take(s, i, call, new)
                after = step.state.timers[i]
                assert after.call
                answered = self.answer_call(step.state, i, after, "call")
                return answered._replace(label=f"{step.label}; {answered.label}")
            verb = "begins to take its shard again" if t.epoch else "begins to take the shard"
            return Step(f"{name} {verb}", s._replace(timers=put(s.timers, i, new)))

        if t.phase == "unknown":
            yield take(t.generation)
        if t.phase == "idle":
            if s.etcd.owner == i and s.etcd.generation >= s.pg.generation:
                yield take(s.etcd.generation)
            elif s.pg.owner != i and not rules.take_follows_assignment:
                yield take(s.pg.generation + 1)
            elif s.pg.owner != i and not rules.take_compares_generation and t.generation:
                yield take(t.generation)
        if t.phase != "own":
            return
        if rules.every_write_is_fenced and t.epoch != s.pg.epoch and rules.take_compares_generation:
            return  # its call would only tell it what its next proof does
        if not rules.take_compares_generation and s.pg.owner != i:
            yield take(t.generation)
        if t.lease is None:
            if s.pg.row == "WAITING" and t.log and s.worker.echo[i] is not None:
                yield begin("grant")
            if s.pg.row == "LOST" and not s.pg.hold and not s.pg.halted:
                yield begin("grant")
        if t.owed and not t.busy:
            yield begin("outcome", t.owed)
        if t.lease is not None and not t.busy and not t.owed:
            may_release = t.lease <= 0 or not rules.unlisted_waits_for_grace
            if t.origin in ("unsent", "unlisted") or (t.origin == "found-unlisted" and may_release):
                yield begin("release")
            elif t.lease <= 0:
                yield begin("expire")

    def send(self, t: Timer, kind: str, *extra: Any, member: bool | None = None) -> Timer:
        """Down the stream, if it is open. A numbered message carries its sequence last."""
        if not t.log:
            return t
        if member is not None:
            t = t._replace(log=(*t.log, member))
            return t._replace(down=(*t.down, (kind, *extra, len(t.log) - 1)))
        return t._replace(down=(*t.down, (kind, *extra)))

    def let_go(self, s: State, i: int, t: Timer, why: str) -> Step:
        """The shard is not mine any more: forget it, and say so for what the worker has here."""
        broken = ""
        still = s.pg.owner == i and s.etcd.owner == i and s.pg.generation == s.etcd.generation
        if still and t.incarnation == s.etcd.incarnation:
            broken = "a timer lets go of a shard that is its own, and tells its worker so"
        tell = bool(t.log) and (t.log[-1] or bool(t.owed))
        t = t._replace(
            phase="idle",
            epoch=0,
            lease=None,
            origin="",
            busy="",
            owed="",
            call=None,
            second=None,
            waiting=None,
            doubt="",
            proof=None,
        )
        if tell:
            t = self.send(t, "moved" if self.rules.fenced_owner_answers_moved else "fenced", member=False)
        return Step(f"{NAMES[i]} {why} and lets the shard go", s._replace(timers=put(s.timers, i, t)), broken)

    def answer_call(self, s: State, i: int, t: Timer, slot: str) -> Step:
        kind, epoch, _, result, instant, extra = getattr(t, slot)
        name, rules = NAMES[i], self.rules
        label = f"{name} learns of its {kind}: {result}"
        t = with_call(t, slot, None)
        broken = ""
        if kind == "take":
            if result == "refused":
                return self.let_go(s, i, t, "learns that a newer generation is stored")
            retake = t.epoch > 0 and t.generation == extra[0]
            if not retake:
                t = t._replace(lease=None, origin="", busy="", owed="")
            t = t._replace(phase="own", epoch=epoch, generation=extra[0], incarnation=extra[1])
            return self.load(s, i, t, retake, instant, extra[2])
        if result == "halted":
            return Step(label, s._replace(timers=put(s.timers, i, t._replace(busy=""))))
        if result == "moved":
            if rules.retake_repeats_own_calls and epoch < t.epoch:
                return Step(label + ", repeats it", s._replace(timers=put(s.timers, i, t._replace(busy=""))))
            return self.let_go(s, i, t, f"finds its {kind} fenced")
        t = t._replace(busy="")
        if kind == "grant":
            if result == "ok":
                reading = instant if rules.reading_precedes_transaction else 0
                t = t._replace(lease=reading + self.ttl, origin="unsent")
                if t.log:
                    t = self.send(t, "grant", reading, member=True)._replace(origin="sent")
        else:
            t = t._replace(lease=None, origin="")
            if kind == "outcome":
                t = t._replace(owed="")
                good = result in ("ok", "recorded before")
                t = self.end(t, "recorded" if good else "fenced")
            elif t.log and t.log[-1]:
                t = self.end(t, "fenced")
        return Step(label, s._replace(timers=put(s.timers, i, t)), broken)

    def end(self, t: Timer, verdict: str) -> Timer:
        if verdict == "recorded" and not self.rules.recorded_is_numbered and t.log:
            return t._replace(log=(*t.log[:-1], False), down=(*t.down, ("recorded", len(t.log) - 1)))
        return self.send(t, verdict, member=False)

    def load(self, s: State, i: int, t: Timer, retake: bool, committed: int, snapshot: str) -> Step:
        """Learn of the epoch, and read the shard's leases after it.

        One step: until then the timer answers for nothing, and under its epoch nobody else changes them.
        """
        rules = self.rules
        row = s.pg.row if rules.load_after_commit else snapshot
        broken = ""
        if row == "LEASED":
            if not retake:
                t = t._replace(
                    lease=max(committed + self.ttl, 0) if rules.grace_at_takeover else 0,
                    origin="found",
                    busy="",
                )
            elif t.lease is None:  # a grant whose answer was lost: it was never sent
                unsent = rules.never_sent_is_released
                t = t._replace(lease=self.ttl, origin="unsent" if unsent else "sent", busy="")
                if not unsent:
                    broken = "an attempt that no worker was ever sent is kept as if it ran, and spent"
            else:
                t = t._replace(busy="", lease=t.lease if rules.retake_keeps_deadlines else self.ttl)
        elif retake:  # what was unknown has committed, or was never there
            if t.busy == "outcome":
                t = self.end(t, "recorded" if row == "DONE" else "fenced")
                t = t._replace(owed="")
            elif t.busy in ("expire", "release") and t.log and t.log[-1]:
                t = self.end(t, "fenced")
            t = t._replace(busy="", lease=None, origin="")
        if t.lease is not None:
            t = t._replace(doubt="")
        return Step(
            f"{NAMES[i]} has epoch {t.epoch} and loads the leases: {row}",
            s._replace(timers=put(s.timers, i, t)),
            broken,
        )

    def answer_proof(self, s: State, i: int, t: Timer) -> Step:
        assert t.proof
        kind, epoch, mine = t.proof
        t = t._replace(proof=None)
        name, rules = NAMES[i], self.rules
        if not mine:
            final = not rules.retake_repeats_own_calls or (epoch == t.epoch and t.phase == "own")
            if kind == "seen" and t.epoch and final:
                return self.let_go(s, i, t, "finds its proof fenced")
            return Step(f"{name} has no proof ({kind})", s._replace(timers=put(s.timers, i, t)))
        if t.doubt == "proving":
            t = t._replace(doubt="")
            if t.lease is None:
                t = self.send(t, "refused", member=False)
                return Step(
                    f"{name} has its proof ({kind}): refuses X", s._replace(timers=put(s.timers, i, t))
                )
        if t.waiting and (t.waiting[2] or not rules.proof_begun_after_receipt):
            return self.renew(s, i, t, f"has its proof ({kind}): answers Renewed")
        return Step(
            f"{name} has a proof ({kind}) for nothing that waits", s._replace(timers=put(s.timers, i, t))
        )

    def renew(self, s: State, i: int, t: Timer, label: str) -> Step:
        assert t.waiting
        sent, sequence, _, holds = t.waiting
        t = self.send(
            t._replace(waiting=None), "renewed", sent, sent if s.worker.x == "none" else 0, sequence, holds
        )
        return Step(f"{NAMES[i]} {label}", s._replace(timers=put(s.timers, i, t)))

    def receive(self, s: State, i: int, t: Timer) -> Iterator[Step]:
        message = t.up[0]
        kind = message[0]
        name, rules = NAMES[i], self.rules
        if len(t.down) >= QUEUE_MAX:
            return
        rest = t._replace(up=t.up[1:])
        loading = t.phase == "taking" or (t.phase == "idle" and s.etcd.owner == i)
        if (loading and kind != "beat") or (t.phase == "unknown" and kind != "beat"):
            if (
                not rules.loading_owner_answers_neither
                and t.lease is None
                and (kind == "outcome" or "run" in message)
            ):
                yield Step(
                    f"{name} has not loaded its leases, does not know X: answers fenced",
                    s._replace(
                        timers=put(
                            s.timers,
                            i,
                            self.send(rest._replace(log=t.log or (False,)), "fenced", member=False),
                        )
                    ),
                )
            return  # it answers neither until it has loaded
        if loading:
            return

        def to(label: str, new: Timer, broken: str = "") -> Step:
            return Step(f"{name} {label}", s._replace(timers=put(s.timers, i, new)), broken)

        if kind == "hello":
            rest = self.send(rest._replace(log=(False,), stale=()), "welcome", message[1])
            label, new = self.take_names(rest, 0, message[2])
            yield to(f"receives Hello and {label}", new)
        elif kind == "names":
            label, new = self.take_names(rest, message[2], message[3])
            accepted = new.lease is not None and message[3] != "no" and new.log[message[2]]
            if accepted and new.busy not in ("expire", "release"):  # it is a heartbeat too
                lease = self.ttl if rules.timer_extends_at_receipt else new.lease
                new = new._replace(waiting=(message[1], message[2], False, True), lease=lease)
            yield to(f"receives the list of what the worker holds and {label}", new)
        elif kind == "beat":
            yield self.take_beat(s, i, rest, message)
        elif t.phase == "idle":
            verdict = "moved" if rules.fenced_owner_answers_moved else "fenced"
            yield to(f"answers the outcome: {verdict}", self.send(rest, verdict, member=False))
        elif t.phase == "own" and t.busy not in ("expire", "release"):
            yield to("receives the outcome of X", rest._replace(owed=message[1]))

    def take_names(self, t: Timer, sequence: int, listed: str) -> tuple[str, Timer]:
        """The worker names all that it holds, as of `sequence`. What happens, and the timer after it."""
        rules = self.rules
        if t.phase == "idle":
            if listed == "no":
                return "it lists nothing", t
            if rules.fenced_owner_answers_moved:
                return "X has moved", self.send(t, "moved", member=False)
            return "answers fenced", self.send(t, "fenced", member=False)
        if listed != "no":
            if t.busy in ("expire", "release"):
                return "X is in a batch that ends it: no answer yet", t
            if t.lease is None:
                t = t._replace(log=(*t.log[:sequence], True, *t.log[sequence + 1 :]))
                if listed == "run" and rules.refusal_waits_for_proof:
                    return "does not know X: makes sure that the shard is its own", t._replace(doubt="asked")
                if listed == "run":
                    return "does not know X: refuses it", self.send(t, "refused", member=False)
                return "leaves X to its outcome", t
            origin = {"unlisted": "sent", "found-unlisted": "found"}.get(t.origin, t.origin)
            log = (*t.log[:sequence], True, *t.log[sequence + 1 :])
            return "X is the worker's", t._replace(log=log, origin=origin)
        under_way = any(t.log[sequence + 1 :])
        if not rules.digest_is_as_of_sequence:
            under_way = False
            t = t._replace(log=tuple(False for _ in t.log))
        t = t._replace(log=(*t.log[:sequence], False, *t.log[sequence + 1 :]))
        if t.lease is None or under_way:
            return "X is not on it", t
        origin = {"sent": "unlisted", "found": "found-unlisted"}.get(t.origin, t.origin)
        return "X is not on it", t._replace(origin=origin)

    def take_beat(self, s: State, i: int, t: Timer, message: tuple[Any, ...]) -> Step:
        _, sent, sequence, holds = message
        rules = self.rules

        def to(label: str, new: Timer, broken: str = "") -> Step:
            label = f"{NAMES[i]} receives a heartbeat sent {-sent} ticks ago: {label}"
            return Step(label, s._replace(timers=put(s.timers, i, new)), broken)

        if t.phase == "idle":
            return to("is no owner, no answer", t)
        listed = t.log[sequence] if rules.digest_is_as_of_sequence else t.log[-1]
        broken = ""
        if rules.digest_is_compared and listed != holds:
            under_way = {m[0] for m in t.down}
            if not rules.recorded_is_numbered and "recorded" in under_way:
                broken = "liveness: a Recorded under way passes for a disagreement, which stops every renewal"
            if t.log[sequence] == holds and "grant" in under_way:
                broken = "liveness: a grant under way passes for a disagreement, which stops every renewal"
            if not any(m[0] == "resync" for m in t.down):
                t = self.send(t, "resync")
            if rules.disagreement_renews_nothing:
                return to("the digests disagree, nothing is renewed, asks for the list", t, broken)
        ending = t.busy in ("expire", "release")
        if ending and rules.ending_is_not_renewable:
            return to("X is in a batch that ends it, nothing is renewed", t)
        if listed and t.lease is not None and rules.timer_extends_at_receipt:
            t = t._replace(lease=self.ttl)
            if not holds:
                broken = "liveness: a timer renews, for ever, what its worker does not hold"
        t = t._replace(waiting=(sent, sequence, False, holds))
        if not rules.proof_before_renewed:
            step = self.renew(s, i, t, "answers Renewed without a proof")
            return step._replace(broken=broken)
        return to("it waits for a proof", t, broken)

    # -- the worker

    def worker_steps(self, s: State) -> Iterator[Step]:
        w, left, rules = s.worker, s.left, self.rules
        prompt = self.scenario.prompt
        for i in (A, B):
            t, name = s.timers[i], NAMES[i]
            if i == A and s.dead >= 0:
                continue

            def to(label: str, worker: Worker, timer: Timer, left: Left = left, i: int = i) -> Step:
                new = s._replace(worker=worker, timers=put(s.timers, i, timer), left=left)
                return Step(f"the worker {label}", new)

            listed = self.listed(w)
            if i != s.etcd.owner and i != s.pg.owner and not left.reassigns and t.phase == "idle":
                continue  # it never owns the shard, and can only say so
            if not w.open[i]:
                if prompt and s.etcd.owner != i:
                    continue
                worker = w._replace(open=put(w.open, i, True), member=put(w.member, i, held(w)))
                yield to(
                    f"says Hello to {name}, holding: {listed}", worker, t._replace(up=(("hello", 0, listed),))
                )
                if t.stale:
                    yield self.take_grant(s, i, t._replace(stale=t.stale[1:]), t.stale[0])
                continue
            if t.stale:
                yield self.take_grant(s, i, t._replace(stale=t.stale[1:]), t.stale[0])
            if t.down:
                step = self.worker_receives(s, i, t)
                if step:
                    yield step
            if len(t.up) >= QUEUE_MAX:
                continue
            kinds = [m[0] for m in t.up]
            # One about nothing, where nothing is under way either, changes nothing.
            telling = w.member[i] or any(t.log)
            if left.beats and telling and "beat" not in kinds and not (prompt and w.beaten[i]):
                holds = w.member[i] and held(w) and (w.x != "done" or rules.finished_is_heartbeated)
                spent = left if prompt else left._replace(beats=left.beats - 1)
                worker = w._replace(beaten=put(w.beaten, i, True)) if prompt else w
                up = (*t.up, ("beat", 0, w.seen[i], holds))
                yield to(f"sends a heartbeat to {name}", worker, t._replace(up=up), spent)
            may_announce = left.names and "names" not in kinds and (not prompt or s.etcd.owner == i)
            if held(w) and not w.member[i] and may_announce:
                worker = w._replace(member=put(w.member, i, True), since=put(w.since, i, w.seen[i]))
                up = (*t.up, ("names", 0, w.seen[i], w.x))
                spent = left._replace(names=left.names - 1)
                yield to(f"announces X to {name}", worker, t._replace(up=up), spent)
            if w.x in ("stopped", "done") and w.member[i] and not w.said[i]:
                worker = w._replace(said=put(w.said, i, True))
                if not rules.finished_is_held_until_recorded:
                    worker = worker._replace(x="forgot")
                up = (*t.up, ("outcome", w.x))
                yield to(f"sends the outcome of X to {name}", worker, t._replace(up=up))
        if w.x == "run" and w.until > 0 and left.finishes:
            yield Step(
                "the worker finishes X",
                s._replace(worker=w._replace(x="done", until=0), left=left._replace(finishes=0)),
            )

    def listed(self, w: Worker) -> str:
        forgets = w.x == "done" and not self.rules.finished_is_heartbeated
        return w.x if held(w) and not forgets else "no"

    def worker_receives(self, s: State, i: int, t: Timer) -> Step | None:
        w, rules, name = s.worker, self.rules, NAMES[i]
        message, t = t.down[0], t._replace(down=t.down[1:])
        kind = message[0]
        broken = ""

        def to(label: str, worker: Worker, timer: Timer = t) -> Step:
            return Step(
                f"the worker {label}", s._replace(worker=worker, timers=put(s.timers, i, timer)), broken
            )

        if kind == "welcome":
            return to(
                f"receives {name}'s Welcome",
                w._replace(echo=put(w.echo, i, message[1])) if w.x == "none" else w,
            )
        if kind == "resync":
            if len(t.up) >= QUEUE_MAX:
                return None
            up = (*t.up, ("names", 0, w.seen[i], self.listed(w)))
            worker = w._replace(member=put(w.member, i, held(w)))
            return to(f"is asked by {name} and lists what it holds: {up[-1][3]}", worker, t._replace(up=up))
        if kind == "renewed":
            # The worker remembers, by its own stamp, what it held when it sent that heartbeat: `holds`.
            _, sent, echo, covered, holds = message
            if w.x == "none":
                w = w._replace(echo=put(w.echo, i, echo))
            covers = w.since[i] <= covered and (holds or not rules.announced_before_heartbeat)
            covers = covers or not rules.renewed_names_its_sequence
            if w.x == "run" and w.member[i] and covers:
                counted = sent if rules.worker_counts_renewal_from_sending else 0
                late = 0 if rules.worker_stops_a_margin_early else 1
                until = max(w.until, counted + self.ttl + late)
                return to(
                    f"receives {name}'s Renewed: X runs for {until} more ticks", w._replace(until=until)
                )
            return to(f"receives {name}'s Renewed, which covers nothing that runs", w)
        if kind == "grant":
            return self.take_grant(s, i, t, message)
        w = w._replace(seen=put(w.seen, i, message[1]))
        if kind == "moved":
            w = w._replace(member=put(w.member, i, False), said=put(w.said, i, False))
            return to(f"hears from {name} that X has moved", w)
        if held(w):
            row = s.pg.row
            if kind == "refused" and w.x != "run" and rules.refused_listing_spares_outcomes:
                return to(f"hears that {name} does not know X, and waits for the answer to its outcome", w)
            if kind in ("fenced", "refused"):
                if row == "LEASED":
                    broken = "I6: a worker is told that X is not its own while its lease stands: work is lost"
                elif row == "DONE":
                    broken = "I6: a worker is told that X is not its own though its outcome is recorded"
            elif row == "LEASED":
                broken = "I6: a worker is told that its outcome is recorded, and it is not"
            x = "over" if kind == "recorded" else "lost"
            w = w._replace(x=x, until=0, member=(False, False))
        return to(f"hears from {name} that X is {kind}", w)

    def take_grant(self, s: State, i: int, t: Timer, message: tuple[Any, ...]) -> Step:
        _, reading, sequence = message
        w, rules = s.worker, self.rules
        echo, other = w.echo[i], w.echo[1 - i]
        earliest = min((echo or 0) + reading, 0)
        if not rules.echo_is_of_the_same_stream and other is not None:
            # The other timer's clock shows less, so the grant seems younger than it is.
            earliest = min(other + reading + (OFFSET_B if i == A else -OFFSET_B), 0)
        until = earliest + self.ttl
        if not rules.worker_counts_grant_from_reading:
            until = self.ttl
        if self.scenario.simple_worker:
            until = self.ttl * 2 // 3 if rules.simple_worker_counts_two_thirds else self.ttl
            if reading < -(self.ttl // 3):
                until = 0  # beyond what two thirds are promised to cover
        if not rules.worker_stops_a_margin_early and until > 0:
            until += 1
        if w.open[i]:
            w = w._replace(seen=put(w.seen, i, sequence))
        if w.x == "none" and until > 0:
            w = w._replace(
                x="run",
                began=True,
                until=until,
                member=put(w.member, i, w.open[i]),
                echo=(None, None),  # only a grant asks for it
                since=put(w.since, i, sequence),
            )
            label = f"receives {NAMES[i]}'s grant of X, made {-reading} ticks ago: X runs for {until} ticks"
        else:
            label = f"receives the grant of X from {NAMES[i]} too late, does not begin it"
        return Step(f"the worker {label}", s._replace(worker=w, timers=put(s.timers, i, t)))


def broken_state(s: State) -> str:
    """What no state may show, whatever step led to it."""
    w, pg = s.worker, s.pg
    if w.x == "run" and w.until > 0 and not w.frozen and pg.row in RETURNED:
        return f"I5: the worker runs X for {w.until} more ticks, and its lease was given away ({pg.row})"
    for t in s.timers:
        owns = t.phase == "own" and t.epoch == pg.epoch and pg.row == "LEASED"
        if owns and t.lease is None and t.call is None and t.second is None:
            return "I6: a lease stands in Postgres that its owner does not know: nobody renews or expires it"
    if w.x == "forgot" and pg.row == "LEASED":
        outcomes = [m for t in s.timers for m in t.up if m[0] == "outcome"]
        calls = [call for t in s.timers for call in (t.call, t.second) if call and call[0] == "outcome"]
        if not outcomes and not calls and not pg.orphans and not any(t.owed for t in s.timers):
            return "I6: the outcome of X is lost: its worker forgot it, and it stands nowhere"
    return ""


def settled(s: State, rules: Rules, scenario: Scenario) -> bool:
    """Nothing that `broken_state` or a step looks for can come from here any more."""
    x, row = s.worker.x, s.pg.row
    if x in ("stopped", "done") and not (scenario.outcomes or scenario.prompt):
        return True
    if x in ("over", "lost", "dead"):
        return x != "dead" or row in RETURNED
    if row in RETURNED and x == "none":
        return not any(m[0] == "grant" for t in s.timers for m in (*t.down, *t.stale))
    return row in RETURNED and x in ("stopped", "done") and rules.outcome_compares_token


def explore(rules: Rules, scenario: Scenario, states_max: int) -> Result:
    """All states reachable in the scenario, breadth first, or the shortest way to a broken one.

    Raises AssertionError when there are more than `states_max`: then nothing was shown.
    """
    model = Model(rules, scenario)
    start = scenario.start
    came_from: dict[State, tuple[State, str] | None] = {start: None}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        count = 0
        for label, new, broken in model.steps(state):
            count += 1
            broken = broken or broken_state(new)
            if not broken and scenario.prompt and new.worker.x == "stopped":
                broken = "liveness: a worker that is well stops its work"
            if broken:
                return Result(len(came_from), broken, (*trace_to(came_from, state), label))
            if new not in came_from:
                came_from[new] = (state, label)
                if not settled(new, rules, scenario):
                    queue.append(new)
        if not count:  # pragma: no cover -- a tick is always possible, unless the model is wrong
            return Result(len(came_from), "liveness: nothing can happen any more", trace_to(came_from, state))
        assert len(came_from) <= states_max, (
            f"{scenario.name}: more than {states_max} states, nothing is shown"
        )
    return Result(len(came_from))


def trace_to(came_from: dict[State, tuple[State, str] | None], state: State) -> tuple[str, ...]:
    labels: list[str] = []
    step = came_from[state]
    while step:
        labels.append(step[1])
        step = came_from[step[0]]
    return tuple(reversed(labels))


# -- scenarios

OWNER = Timer(phase="own", epoch=1, generation=1, log=(False,))
"""A owns the shard, and its stream is open."""


def running_at_a(ttl: int = 2, **left: int) -> State:
    """X was just granted by A and runs."""
    return State(
        pg=Postgres("LEASED", 1, A, 1),
        etcd=Etcd(A, 1),
        timers=(OWNER._replace(lease=ttl, origin="sent", log=(False, True)), Timer()),
        worker=Worker(
            x="run",
            until=ttl,
            began=True,
            open=(True, False),
            member=(True, False),
            since=(1, 0),
            seen=(1, 0),
        ),
        left=Left(**left),
    )


def waiting_at_a(**left: int) -> State:
    """X is due at A, whose stream has given one echo."""
    return State(
        pg=Postgres("WAITING", 1, A, 1),
        etcd=Etcd(A, 1),
        timers=(OWNER, Timer()),
        worker=Worker(open=(True, False), echo=(0, None)),
        left=Left(**left),
    )


def waiting_with_both_open(**left: int) -> State:
    start = waiting_at_a(**left)
    return start._replace(timers=(OWNER, Timer(log=(False,))), worker=Worker(open=(True, True), echo=(0, 0)))


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("renewal and move", running_at_a(beats=2, reassigns=1)),
        Scenario("move and announcement", running_at_a(beats=1, names=1, reassigns=1)),
        Scenario("move and back", running_at_a(beats=1, reassigns=2)),
        Scenario("move and back, announced", running_at_a(beats=1, names=1, reassigns=2)),
        Scenario("break and move", running_at_a(beats=1, names=1, breaks=1, reassigns=1)),
        Scenario("frozen worker and move", running_at_a(beats=1, freezes=1, reassigns=1)),
        Scenario("grant, break and move", waiting_at_a(names=1, breaks=1, reassigns=1)),
        Scenario("grant, move and back", waiting_at_a(names=1, reassigns=2)),
        Scenario("frozen worker", running_at_a(beats=2, freezes=1), etcd_proofs=False),
        Scenario("grant", waiting_at_a(beats=1, losses=1), etcd_proofs=False),
        Scenario("grant and move", waiting_with_both_open(reassigns=1, names=1)),
        Scenario("grant, and Hello elsewhere", waiting_at_a(reassigns=1, names=1)),
        Scenario("grant and break", waiting_at_a(beats=1, breaks=1), etcd_proofs=False),
        Scenario("grant to a simple worker", waiting_at_a(), ttl=3, simple_worker=True),
        Scenario(
            "outcome and lost connection",
            running_at_a(beats=1, finishes=1, losses=1),
            etcd_proofs=False,
            outcomes=True,
        ),
        Scenario(
            "outcome and break", running_at_a(beats=1, finishes=1, breaks=1), etcd_proofs=False, outcomes=True
        ),
        Scenario("outcome and move", running_at_a(finishes=1, reassigns=1, names=1), outcomes=True),
        Scenario("restore", running_at_a(beats=1, reassigns=1, restores=1)),
        Scenario("steady", running_at_a(TTL, beats=1), ttl=TTL, prompt=True),
        Scenario("steady finish", running_at_a(TTL, beats=1, finishes=1), ttl=TTL, prompt=True),
        Scenario(
            "failover", running_at_a(TTL, beats=1, names=2, timer_deaths=1, reassigns=1), ttl=TTL, prompt=True
        ),
        Scenario("dead worker", running_at_a(TTL, beats=1, worker_deaths=1, losses=1), ttl=TTL, prompt=True),
        Scenario(
            "dead worker, shard rebalanced",
            running_at_a(TTL, beats=1, names=4, worker_deaths=1, reassigns=3),
            ttl=TTL,
            prompt=True,
            lapse_bound=2 * TTL + 1,
        ),
    )
}
