"""How is a worker's capacity dealt out to its timers? Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_FLOOR_DIVISOR = 4


@dataclass(frozen=True, slots=True)
class Demand:
    """What one timer could use.

    held: attempts of its that occupy the worker. backlog: runs that it says are waiting for a worker like us.
    """

    held: int
    backlog: int


def deal(capacity: int, demands: Sequence[Demand], turn: int) -> list[int]:
    """How many attempts each timer's grants may hold at a time: not negative, `capacity` in sum.

    Every timer keeps a quarter of an even share, so that its next run need not wait for a new deal; the rest
    goes to where work waits, in proportion. With fewer places than timers they go round: those with a backlog
    first, another one first at each `turn` (a number that grows).
    """
    count = len(demands)
    capacity = max(0, capacity)
    if count == 0:
        return []
    if capacity < count:
        return _deal_in_turn(capacity, demands, turn)
    floor = max(1, capacity // (_FLOOR_DIVISOR * count))
    weights = [1] * count
    if any(demand.backlog for demand in demands):
        weights = [demand.held + demand.backlog for demand in demands]
    rest = capacity - floor * count
    total = sum(weights)
    shares = [floor + rest * weight // total for weight in weights]
    # What rounding left over, one each, to the heaviest.
    order = sorted(range(count), key=lambda index: -weights[index])
    for index in order[: capacity - sum(shares)]:
        shares[index] += 1
    return shares


def _deal_in_turn(capacity: int, demands: Sequence[Demand], turn: int) -> list[int]:
    count = len(demands)
    order = [(turn + step) % count for step in range(count)]
    order.sort(key=lambda index: demands[index].backlog == 0)
    shares = [0] * count
    for index in order[:capacity]:
        shares[index] = 1
    return shares
