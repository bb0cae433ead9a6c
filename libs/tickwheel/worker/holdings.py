"""What does the worker hold over all of its streams, and who is told of what? Pure; no I/O, no clock.

A session knows one timer; this knows them all. It decides three things that no single stream can:

* which attempts have lapsed, whatever stream they came by. They are told to stop, and held on until their
  end is recorded or refused like any other;
* which attempts have no live owner, because their stream broke, their timer is silent or gone, or it said
  that their shard has moved. The worker does not know who has which shard, so it announces them to every
  other timer, again and again: one of them answers with a renewal and thereby takes them over, the others
  refuse them as moved. That ends when somebody took them or when they lapse;
* how the capacity is dealt out.

An outcome that no timer has acknowledged is kept and repeated however long that takes (invariant I6): it
occupies its place in the capacity meanwhile, which is what bounds them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tickwheel.worker.attempt import Attempt, LeaseToken, Outcome, Phase, Progress
from tickwheel.worker.credit import Demand, deal
from tickwheel.worker.session import MARGIN_DEFAULT_US, Effects, Identity, Session, State

ANNOUNCE_INTERVAL_US = 500_000
"""Attempts without an owner are announced to each timer this often."""

DEAL_INTERVAL_US = 100_000

OPENING_CREDIT_US = 1_000_000
"""For so long a stream that is being opened has its share of the capacity already."""

_NEVER = 1 << 62


class Holdings:
    """All that a worker holds. `key`: the caller's name for a timer; at most one live session has it."""

    def __init__(self, identity: Identity, margin_us: int = MARGIN_DEFAULT_US) -> None:
        self.identity = identity
        self._margin_us = margin_us
        self.sessions: dict[str, Session] = {}
        # Attempts that may have no live owner, or were announced to several timers: rare, so that the hot
        # path only asks whether this is empty.
        self._wandering: dict[LeaseToken, Attempt] = {}
        self._announced_us: dict[str, int] = {}
        self._dealt_us = 0
        self._turn = 0
        self._resent_us: dict[str, int] = {}
        self._leaving: str | None = None

    # Streams come and go.

    def open(self, key: str, now_us: int) -> Session:
        """A new stream to a timer. Its Hello names everything that is held, whatever stream it came by:
        what a timer had granted and does not find there it hands back at once.
        """
        assert key not in self.sessions, f"a second stream to {key}"
        self._gather(now_us)
        for session in self.sessions.values():
            self._wandering.update(session.held)
        session = Session(
            self.identity, list(self._wandering.values()), share=0, now_us=now_us, margin_us=self._margin_us
        )
        self.sessions[key] = session
        self._announced_us[key] = now_us
        self._resent_us[key] = now_us
        if self._leaving is not None:
            session.goodbye(self._leaving)
        self._deal(now_us)
        return session

    def lost(self, key: str, now_us: int) -> None:
        """The stream broke: what it held is announced to the others, and to the same timer by its next."""
        session = self.sessions.pop(key)
        self._announced_us.pop(key, None)
        self._resent_us.pop(key, None)
        for attempt in session.lost():
            if attempt.owner is None:
                self._wandering[attempt.token] = attempt
        self._announce_at_once()
        self._deal(now_us)

    def set_present(self, keys: Iterable[str]) -> None:
        """The timers that the coordinators know now. A stream to any other is good until it breaks or falls
        silent; that is looked at at once."""
        present = set(keys)
        for key, session in self.sessions.items():
            session.set_gone(key not in present)

    # Events.

    def receive(self, key: str, response: Any, now_us: int) -> Effects:
        """Take a response in. Raises `ProtocolError`, and then nothing has changed."""
        session = self.sessions[key]
        effects = session.receive(response, now_us)
        for attempt, _ in effects.abandon:
            attempt.phase = Phase.ABANDONED
        for attempt in effects.moved:
            self._moved(attempt)
        if self._wandering:
            self._settle(effects.forget, session)
            self._settle((attempt for attempt, _ in effects.refused), session)
            self._settle((attempt for attempt, _ in effects.abandon), session)
        if effects.moved:
            # A refusal may be for a provisional holder only: its lease then still stands elsewhere.
            effects.moved = [attempt for attempt in effects.moved if attempt.owner is None]
        return effects

    def _moved(self, attempt: Attempt) -> None:
        if attempt.owner is not None:
            return
        if attempt.token not in self._wandering:
            self._wandering[attempt.token] = attempt
            self._announce_at_once()

    def _settle(self, attempts: Iterable[Attempt], session: Session | None) -> None:
        """The end of these is known: no other stream needs to carry them."""
        for attempt in attempts:
            if self._wandering.pop(attempt.token, None) is None:
                continue
            for other in self.sessions.values():
                if other is not session:
                    other.drop(attempt)

    def finish_all(self, finished: Iterable[tuple[Attempt, Outcome]]) -> int:
        """Handlers ended. Gives how many outcomes are dropped, because their attempts had been abandoned.

        Hot: once a run."""
        dropped_count = 0
        abandoned = Phase.ABANDONED
        for attempt, outcome in finished:
            if attempt.phase is abandoned:
                dropped_count += 1
                continue
            attempt.finish(outcome)
            owner = attempt.owner
            if owner is not None:
                owner.send_outcome(attempt)
        return dropped_count

    def progress(self, attempt: Attempt, progress: Progress) -> None:
        """What a handler says about itself goes with the next heartbeat; only the latest word does."""
        attempt.progress = progress
        if attempt.owner is not None:
            attempt.owner.note_progress(attempt)

    def goodbye(self, reason: str) -> None:
        """The worker stops: no timer is to grant any more. Streams that open later say it too."""
        self._leaving = reason
        for session in self.sessions.values():
            session.goodbye(reason)

    # Time.

    def tick(self, now_us: int) -> Effects:
        """Call this at least ten times a second. Gives what lapsed."""
        effects = Effects()
        self._lapse(now_us, effects)
        self._announce(now_us)
        if now_us - self._dealt_us >= DEAL_INTERVAL_US:
            self._turn += 1
            self._deal(now_us)
        for key, session in self.sessions.items():
            if now_us - self._resent_us[key] >= session.lease_us:
                self._resent_us[key] = now_us
                session.resend_outcomes(now_us - session.lease_us)
        return effects

    def dead(self, now_us: int) -> list[str]:
        """Streams that have been silent for too long: end them."""
        return [key for key, session in self.sessions.items() if session.is_dead(now_us)]

    def _lapse(self, now_us: int, effects: Effects) -> None:
        due = [session for session in self.sessions.values() if session.deadline_us_min <= now_us]
        if not due and not self._wandering:
            return
        lapsed: dict[Attempt, None] = {}
        for session in due:
            earliest_us = _NEVER
            for attempt in session.held.values():
                if attempt.phase is not Phase.RUNNING or attempt.is_lapsed:
                    continue
                if attempt.deadline_us <= now_us:
                    lapsed[attempt] = None
                elif attempt.deadline_us < earliest_us:
                    earliest_us = attempt.deadline_us
            session.deadline_us_min = earliest_us
        for attempt in self._wandering.values():
            if attempt.phase is Phase.RUNNING and not attempt.is_lapsed and attempt.deadline_us <= now_us:
                lapsed[attempt] = None
        for attempt in lapsed:
            attempt.is_lapsed = True
            effects.stop.append(attempt)

    def _is_homeless(self, attempt: Attempt, now_us: int) -> bool:
        owner = attempt.owner
        return owner is None or owner.is_doubtful(now_us)

    def _gather(self, now_us: int) -> None:
        """What a silent or vanished timer owns may be another's by now; what was taken over is not."""
        for session in self.sessions.values():
            if session.held and session.is_doubtful(now_us):
                for attempt in session.held.values():
                    if attempt.owner is session:
                        self._wandering.setdefault(attempt.token, attempt)

    def _announce_at_once(self) -> None:
        for key in self._announced_us:
            self._announced_us[key] = -_NEVER

    def _announce(self, now_us: int) -> None:
        self._gather(now_us)
        if not self._wandering:
            return
        homeless = [a for a in self._wandering.values() if self._is_homeless(a, now_us)]
        if not homeless:
            self._forget_settled_wanderers()
            return
        for key, session in self.sessions.items():
            if session.state not in (State.OPEN, State.LEAVING) or session.is_doubtful(now_us):
                continue
            if now_us - self._announced_us[key] >= ANNOUNCE_INTERVAL_US:
                self._announced_us[key] = now_us
                session.announce(homeless)

    def _forget_settled_wanderers(self) -> None:
        """An attempt that has one live owner again, and that nobody else still ponders, wanders no more."""
        sessions = list(self.sessions.values())
        for token, attempt in list(self._wandering.items()):
            if sum(token in session.held for session in sessions) <= 1:
                del self._wandering[token]
                assert attempt.owner is not None

    # Capacity.

    def _deal(self, now_us: int) -> None:
        self._dealt_us = now_us
        sessions = [s for s in self.sessions.values() if self._takes_credit(s, now_us)]
        elsewhere_count = self.homeless_count
        for session in self.sessions.values():
            if session not in sessions:
                session.set_share(0)
                elsewhere_count += len(session.held)
        demands = [Demand(len(session.held), session.backlog_count(now_us)) for session in sessions]
        shares = deal(self.identity.capacity - elsewhere_count, demands, self._turn)
        for session, share in zip(sessions, shares, strict=True):
            session.set_share(share)

    def _takes_credit(self, session: Session, now_us: int) -> bool:
        """A timer that does not answer must not keep half of the capacity from those that do."""
        if session.state is State.OPENING:
            return now_us - session.opened_us <= OPENING_CREDIT_US
        return session.state is State.OPEN and not session.is_doubtful(now_us)

    # What others ask.

    @property
    def held_count(self) -> int:
        """How many attempts are held in all. An attempt that several timers ponder counts once."""
        if not self._wandering:
            return sum(session.held_count for session in self.sessions.values())
        seen = set(self._wandering)
        for session in self.sessions.values():
            seen.update(session.held, session.owed)
        return len(seen)

    @property
    def homeless_count(self) -> int:
        """How many attempts have no owner that is connected."""
        return sum(attempt.owner is None for attempt in self._wandering.values())

    @property
    def welcomed_count(self) -> int:
        """How many timers know us."""
        return sum(session.is_welcomed for session in self.sessions.values())
