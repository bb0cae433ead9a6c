"""Who should own which shard? A pure plan: no I/O, no clock, the same answer for the same question.

The leader asks `plan` at every pass and writes what it answers. Four rules, in the order in which they win:

1. **Total.** While any timer lives, every shard has an owner. The shards of the dead go to the survivors that
   are furthest below their fair share.
2. **Balanced.** A timer's fair share is `shard_count * capacity / total capacity`; nobody is meant to end a
   whole shard or more away from it (its *quota* is the share rounded down or up).
3. **As few moves as possible.** Where rounding leaves a choice, whoever already holds the extra shard keeps
   it, so a plan that was carried out asks for nothing more (`plan` after `plan` is empty).
4. **Slowly where nobody is in need.** Orphans move at once. A drain moves at most `drain_moves_max` shards a
   plan; rebalancing moves at most `rebalance_moves_max`, and none that moved less than `hold_us` ago: a new
   owner gives running attempts one full lease of grace, and a shard that moves for ever would give a dead
   worker grace for ever.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TimerInfo:
    """What a plan knows of a live timer.

    capacity: its weight, any positive integer; a timer with 0 takes shards only when nobody else can.
    load: its own reading of how busy it is, 0 (idle) upwards; only breaks ties.
    draining: it is being emptied, and gets no shard while another timer can take it.
    """

    capacity: int
    load: int = 0
    draining: bool = False

    def __post_init__(self) -> None:
        if self.capacity < 0 or self.load < 0:
            raise ValueError(f"capacity ({self.capacity}) and load ({self.load}) must not be negative")


class MoveReason(enum.Enum):
    """Why a shard changes hands."""

    UNOWNED = "unowned"
    OWNER_DEAD = "owner_dead"
    DRAIN = "drain"
    REBALANCE = "rebalance"


@dataclass(frozen=True, slots=True)
class Move:
    """One shard changes hands; `source` is None when it had no owner."""

    shard: int
    source: str | None
    target: str
    reason: MoveReason


Moves = tuple[Move, ...]


def plan(
    current: Mapping[int, str],
    timers: Mapping[str, TimerInfo],
    shard_count: int,
    *,
    moved_at_us: Mapping[int, int] | None = None,
    now_us: int = 0,
    hold_us: int = 0,
    drain_moves_max: int | None = None,
    rebalance_moves_max: int | None = None,
) -> Moves:
    """Give the moves that lead from `current` towards the balanced assignment, each shard at most once.

    current: shard -> owner; a shard without an owner is absent. Owners that `timers` does not list are dead.
    timers: every live timer by id.
    moved_at_us: when each shard last changed hands (cluster clock); absent means long ago.
    hold_us: a shard is not rebalanced until this long after its last move.
    drain_moves_max, rebalance_moves_max: at most so many moves of that kind in this plan; None: no limit.

    Without a live timer there is nothing to plan: the answer is empty, and the assignments stand.
    """
    if shard_count < 1:
        raise ValueError(f"shard_count must be at least 1, not {shard_count}")
    targets = _targets(timers)
    if not targets:
        return ()
    holdings = _Holdings(current, timers, targets, shard_count)
    moves = holdings.place_orphans()
    moves += holdings.drain(drain_moves_max)
    moves += holdings.rebalance(rebalance_moves_max, moved_at_us or {}, now_us - hold_us)
    return tuple(moves)


def apply(current: Mapping[int, str], moves: Sequence[Move]) -> dict[int, str]:
    """Give the assignment after `moves`."""
    after = dict(current)
    after.update((move.shard, move.target) for move in moves)
    return after


def quotas(
    held: Mapping[str, int], weights: Mapping[str, int], loads: Mapping[str, int], shard_count: int
) -> dict[str, int]:
    """Round the fair shares so that they add to `shard_count`; who holds an extra shard already keeps it.

    held: shards held now, by timer; weights: positive integers by timer; loads: break the ties that are left.
    """
    total = sum(weights.values())
    floors = {timer: shard_count * weight // total for timer, weight in weights.items()}
    remainders = {timer: shard_count * weight % total for timer, weight in weights.items()}
    left = shard_count - sum(floors.values())
    # A share without a remainder is exact already: one more would put it a whole shard off.
    candidates = sorted(
        (timer for timer in weights if remainders[timer]),
        key=lambda timer: (held[timer] <= floors[timer], -remainders[timer], loads[timer], timer),
    )
    for timer in candidates[:left]:
        floors[timer] += 1
    return floors


def _targets(timers: Mapping[str, TimerInfo]) -> dict[str, int]:
    """Who may receive shards, with weights: the best choice that is not empty, so no shard stays unowned."""
    staying = {timer: info for timer, info in timers.items() if not info.draining}
    able = {timer: info.capacity for timer, info in staying.items() if info.capacity > 0}
    if able:
        return able
    # Nobody to drain to, or nobody with capacity: an overloaded owner is better than none.
    return {timer: max(1, info.capacity) for timer, info in (staying or timers).items()}


class _Holdings:
    """The assignment while it is being planned: who holds what, and who has room."""

    def __init__(
        self,
        current: Mapping[int, str],
        timers: Mapping[str, TimerInfo],
        targets: Mapping[str, int],
        shard_count: int,
    ) -> None:
        self._targets = targets
        self._loads = {timer: timers[timer].load for timer in targets}
        self._shards: dict[str, list[int]] = {timer: [] for timer in targets}
        self._leaving: list[tuple[int, str]] = []  # held by a live timer that is no target
        self._orphans: list[tuple[int, str | None]] = []
        for shard in range(shard_count):
            owner = current.get(shard)
            if owner in self._shards:
                self._shards[owner].append(shard)
            elif owner is not None and owner in timers:
                self._leaving.append((shard, owner))
            else:
                self._orphans.append((shard, owner))
        held = {timer: len(shards) for timer, shards in self._shards.items()}
        self._quotas = quotas(held, targets, self._loads, shard_count)
        # Room exists for every orphan and every leaving shard: the quotas add up to shard_count.
        self._room = [self._rank(timer) for timer in targets if held[timer] < self._quotas[timer]]
        heapq.heapify(self._room)
        self._received = dict(held)

    def _rank(self, timer: str, received: int | None = None) -> tuple[float, int, str]:
        """Order of receiving: the smallest used part of its capacity, then the least load, then the id."""
        count = len(self._shards[timer]) if received is None else received
        return (count / self._targets[timer], self._loads[timer], timer)

    def _take_room(self) -> str | None:
        if not self._room:
            return None
        _, _, timer = heapq.heappop(self._room)
        self._received[timer] += 1
        if self._received[timer] < self._quotas[timer]:
            heapq.heappush(self._room, self._rank(timer, self._received[timer]))
        return timer

    def place_orphans(self) -> list[Move]:
        moves = []
        for shard, owner in self._orphans:
            target = self._take_room()
            assert target is not None, "the quotas add up to the shards: an orphan always finds room"
            moves.append(
                Move(shard, owner, target, MoveReason.UNOWNED if owner is None else MoveReason.OWNER_DEAD)
            )
        return moves

    def drain(self, moves_max: int | None) -> list[Move]:
        moves = []
        for shard, owner in self._leaving[:moves_max]:
            target = self._take_room()
            assert target is not None, "the quotas add up to the shards: a drained shard always finds room"
            moves.append(Move(shard, owner, target, MoveReason.DRAIN))
        return moves

    def rebalance(
        self, moves_max: int | None, moved_at_us: Mapping[int, int], moved_before_us: int
    ) -> list[Move]:
        """Move what is over quota, longest at rest first, from the fullest timer first."""
        surplus: list[tuple[float, int, int, str]] = []
        for timer, shards in self._shards.items():
            over = len(shards) - self._quotas[timer]
            if over <= 0:
                continue
            at_rest = [
                shard for shard in shards if moved_at_us.get(shard, moved_before_us) <= moved_before_us
            ]
            at_rest.sort(key=lambda shard: (moved_at_us.get(shard, 0), shard))
            for rank, shard in enumerate(at_rest[:over]):
                fullness = (len(shards) - rank) / self._targets[timer]
                surplus.append((-fullness, moved_at_us.get(shard, 0), shard, timer))
        surplus.sort()
        moves = []
        for _, _, shard, owner in surplus[:moves_max]:
            target = self._take_room()
            if target is None:
                break
            moves.append(Move(shard, owner, target, MoveReason.REBALANCE))
        return moves
