"""Who goes next? What is due and waits for a worker; pure, over numpy columns.

Rows lie by route (a queue name and a kind), then tenant, then priority, in lanes of chunks that are sorted
by due time. A take answers three questions, from the outside in:

* Between tenants: weighted deficit round robin (Shreedhar and Varghese). A turn is `quantum * weight` rows;
  what a take leaves of it is there at the next one, so the shares hold over time and not only within a
  batch. A tenant that is alone gets everything. A route keeps its tenants in the order of their last turns;
  a subscription to several routes goes through all of them as one ring, in that order.
* Within a tenant: priority with ageing. A row gains one priority for every tenth of `ageing_us` that it
  waits, so two rows compare by `due_us - priority * step`, whatever the time is: lanes stay sorted and need
  no upkeep. That alone would let a backlog of high priority hold up the others by as much as it is late
  itself, so a row that has waited for the whole of `ageing_us` goes before all that have not, by due time.
* Within a priority: by due time, and by arrival among equals; a row handed back takes its old place.

Counts are planned first, with integers; then each tenant gives its rows in one slice. So a take costs what
it visits, not what waits.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from heapq import merge
from itertools import pairwise
from operator import attrgetter

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]

PRIORITIES = 10
QUANTUM_DEFAULT = 8
"""Rows in a turn: with one slot, a tenant that arrives waits for at most so many of each other tenant's."""
AGEING_US_DEFAULT = 60_000_000

CHUNK_ROWS_MAX = 16_384
"""A late row is sorted into its chunk: this bounds what that costs."""
CHUNKS_LOOSE_MAX = 8
DISCARDED_MIN = 1_024
"""Fewer discarded rows than this are not worth a pass over the queues."""

_DUE, _HANDLE = 0, 1
_AGED = 1 << 60
"""Taken from an aged row's rank: it then precedes every rank that is not aged."""


class _Lane:
    """Rows of one route, tenant and priority: chunks int64[2, n] (due, handle), each sorted, and in order."""

    __slots__ = ("_chunks", "count", "priority")

    def __init__(self, priority: int) -> None:
        self.priority = priority
        self._chunks: list[Int64s] = []  # some dozens at most; a deque costs 600 bytes when empty
        self.count = 0

    def push(self, rows: Int64s) -> None:
        """Add rows that are sorted by due."""
        self.count += rows.shape[1]
        chunks = self._chunks
        if not chunks or chunks[-1][_DUE, -1] <= rows[_DUE, 0]:
            chunks.append(rows)
            if len(chunks) % CHUNKS_LOOSE_MAX == 0:
                self._merge_tail()
        elif rows[_DUE, -1] < chunks[0][_DUE, 0]:
            chunks.insert(0, rows)
        else:
            self._push_late(rows)

    def _merge_tail(self) -> None:
        """Merge the last chunks, each that is at most twice as long as all behind it together."""
        chunks = self._chunks
        start, total = len(chunks) - 1, chunks[-1].shape[1]
        while start and (rows := chunks[start - 1].shape[1]) <= min(2 * total, CHUNK_ROWS_MAX - total):
            start -= 1
            total += rows
        if start < len(chunks) - 1:
            chunks[start:] = [np.concatenate(chunks[start:], axis=1)]

    def _push_late(self, rows: Int64s) -> None:
        """Deal late rows out to the chunks between whose due times they belong."""
        chunks, self._chunks = self._chunks, []
        firsts = np.array([chunk[_DUE, 0] for chunk in chunks[1:]], np.int64)
        cuts = [0, *np.searchsorted(rows[_DUE], firsts, "left").tolist(), rows.shape[1]]
        for chunk, (start, end) in zip(chunks, pairwise(cuts), strict=True):
            if start == end:
                self._chunks.append(chunk)
                continue
            both = np.concatenate((chunk, rows[:, start:end]), axis=1)
            # Two sorted runs, the older first: a stable sort is one merge, and keeps the order of arrival.
            both = np.take(both, np.argsort(both[_DUE], kind="stable"), axis=1)
            pieces = -(-both.shape[1] // CHUNK_ROWS_MAX)
            self._chunks.extend(np.array_split(both, pieces, axis=1) if pieces > 1 else [both])

    def head(self, count: int) -> Int64s:
        """The first rows, at most `count`."""
        first = self._chunks[0]
        if first.shape[1] >= count or len(self._chunks) == 1:
            return first[:, :count]
        parts, total = [], 0
        for chunk in self._chunks:
            parts.append(chunk[:, : count - total])
            total += parts[-1].shape[1]
            if total == count:
                break
        return np.concatenate(parts, axis=1)

    def drop(self, count: int) -> None:
        """Forget the first `count` rows. A view is enough until it holds twice what is left."""
        self.count -= count
        while count:
            first = self._chunks[0]
            rows = first.shape[1]
            if rows <= count:
                self._chunks.pop(0)
                count -= rows
                continue
            rest = first[:, count:]
            base = first if first.base is None else first.base
            self._chunks[0] = rest.copy() if rest.size * 2 <= base.size else rest
            return

    def oldest_due_us(self) -> int:
        return int(self._chunks[0][_DUE, 0])

    def keep(self, wanted: "_Discarded") -> None:
        """Forget the rows that were discarded."""
        kept = [np.compress(wanted.are_kept(chunk[_HANDLE]), chunk, axis=1) for chunk in self._chunks]
        self._chunks = [chunk for chunk in kept if chunk.shape[1]]
        self.count = sum(chunk.shape[1] for chunk in self._chunks)


class _Share:
    """What one tenant has waiting in one route."""

    __slots__ = ("count", "lanes", "tenant", "turn")

    def __init__(self, tenant: int, turn: int) -> None:
        self.tenant = tenant
        self.turn = turn
        """The number of its last turn here, or of its arrival."""
        self.lanes: dict[int, _Lane] = {}
        self.count = 0


class _Route:
    """The tenants of one route, in the order of their turns."""

    __slots__ = ("count", "route", "shares")

    def __init__(self, route: int) -> None:
        self.route = route
        self.shares: OrderedDict[int, _Share] = OrderedDict()
        self.count = 0


class _Discarded:
    """Handles that are to be passed over, until a pass over all rows has dropped them."""

    __slots__ = ("_pending", "_sorted", "rows")

    def __init__(self) -> None:
        self._sorted: Int64s = np.empty(0, np.int64)
        self._pending: list[Int64s] = []
        self.rows = 0

    def add(self, handles: Int64s) -> None:
        self._pending.append(np.array(handles, np.int64))
        self.rows += len(handles)

    def are_kept(self, handles: Int64s) -> npt.NDArray[np.bool_]:
        if self._pending:
            self._sorted = np.sort(np.concatenate((self._sorted, *self._pending)), kind="stable")
            self._pending.clear()
        place = np.minimum(np.searchsorted(self._sorted, handles), len(self._sorted) - 1)
        return np.asarray(self._sorted[place] != handles)

    def clear(self) -> None:
        self._sorted = np.empty(0, np.int64)
        self._pending.clear()
        self.rows = 0


class ReadyQueues:
    """Rows that are due, by route, tenant and priority; `take` deals them out fairly.

    Handles are opaque int64; a handle waits at most once. Nothing is kept for a tenant or route that has no
    rows, but for weights, which are configuration.
    """

    def __init__(self, quantum: int = QUANTUM_DEFAULT, ageing_us: int = AGEING_US_DEFAULT) -> None:
        assert quantum > 0, f"quantum must be positive, not {quantum}"
        assert ageing_us >= PRIORITIES, f"ageing_us must be at least {PRIORITIES}, not {ageing_us}"
        self._quantum = quantum
        self._ageing_us = ageing_us
        self._step_us = ageing_us // PRIORITIES
        self._routes: dict[int, _Route] = {}
        self._weights: dict[int, int] = {}
        self._deficits: dict[int, int] = {}
        """What is left of a turn that has begun, > 0."""
        self._turns = 0
        self._rows = 0
        self._discarded = _Discarded()

    def set_weight(self, tenant: int, weight: int) -> None:
        """From its next turn on, a tenant gets `weight` times the rows of one with weight 1; 1 forgets it."""
        assert weight >= 1, f"the weight of tenant {tenant} must be at least 1, not {weight}"
        if weight == 1:
            self._weights.pop(tenant, None)
        else:
            self._weights[tenant] = weight

    # ---- push

    def push(
        self,
        handle: Int64s,
        route: npt.NDArray[np.int32],
        tenant: npt.NDArray[np.int32],
        priority: npt.NDArray[np.int8],
        due_us: Int64s,
    ) -> None:
        """Add rows, in any order; the arrays are copied. A row that is handed back takes its old place by
        `due_us`.

        `priority` is 0..9, 9 the highest.
        """
        count = len(handle)
        if not count:
            return
        assert priority.min() >= 0, "a priority is 0..9"
        assert priority.max() < PRIORITIES, "a priority is 0..9"
        if self._discarded.rows and not self._discarded.are_kept(handle).all():
            self._purge()  # or the row would inherit its predecessor's fate
        rows = np.empty((2, count), np.int64)
        rows[_DUE] = due_us
        rows[_HANDLE] = handle
        if (due_us[1:] < due_us[:-1]).any():
            order = np.argsort(due_us, kind="stable")
            rows = np.take(rows, order, axis=1)
            route, tenant, priority = route[order], tenant[order], priority[order]
        self._rows += count
        lane_key = (tenant.astype(np.int64) << 4) | priority
        one_route = bool((route == route[0]).all())
        if one_route and (lane_key == lane_key[0]).all():
            self._push_group(int(route[0]), int(tenant[0]), int(priority[0]), rows)
            return
        order = np.argsort(lane_key, kind="stable") if one_route else np.lexsort((lane_key, route))
        rows, route, lane_key = np.take(rows, order, axis=1), route[order], lane_key[order]
        changes = (lane_key[1:] != lane_key[:-1]) | (route[1:] != route[:-1])
        starts = [0, *(np.flatnonzero(changes) + 1).tolist()]
        groups = zip(
            route[starts].tolist(), lane_key[starts].tolist(), pairwise([*starts, count]), strict=True
        )
        for group_route, key, (start, end) in groups:
            # A copy, or the last row of a batch would keep all of it in memory.
            self._push_group(group_route, key >> 4, key & 15, rows[:, start:end].copy())

    requeue = push

    def _push_group(self, route_id: int, tenant: int, priority: int, rows: Int64s) -> None:
        route = self._routes.get(route_id)
        if route is None:
            route = self._routes[route_id] = _Route(route_id)
        share = route.shares.get(tenant)
        if share is None:
            self._turns += 1
            share = route.shares[tenant] = _Share(tenant, self._turns)
        lane = share.lanes.get(priority)
        if lane is None:
            lane = share.lanes[priority] = _Lane(priority)
        lane.push(rows)
        count = rows.shape[1]
        share.count += count
        route.count += count

    # ---- take

    def take(self, n: int, routes: Collection[int], tenants: Collection[int] | None, now_us: int) -> Int64s:
        """At most `n` handles for a worker that serves these routes and tenants (None: all); they leave the
        queues.

        Fewer only when no more wait there. Handles come tenant by tenant, in order within each.
        """
        taken: list[Int64s] = []
        # Twice or more only if discarded rows were met, which then are gone: each time a tenant is emptied.
        while n > 0:
            found = [self._routes[route] for route in dict.fromkeys(routes) if route in self._routes]
            plan = self._plan(n, found, tenants)
            if not plan:
                break
            for tenant, count in plan.items():
                handles = self._take_from(tenant, count, found, now_us)
                n -= len(handles)
                taken.append(handles)
        if not self._rows:
            self._discarded.clear()
        if len(taken) == 1:
            return taken[0]
        return np.concatenate(taken) if taken else np.empty(0, np.int64)

    def _candidates(self, routes: list[_Route], tenants: Collection[int] | None) -> Iterator[_Share]:
        """The shares that a subscription covers, longest ago served first, as they are asked for."""
        if tenants is not None and not isinstance(tenants, set | frozenset | dict):
            tenants = frozenset(tenants)
        rings = [_ring(route, tenants) for route in routes]
        return iter(rings[0]) if len(rings) == 1 else merge(*rings, key=attrgetter("turn"))

    def _plan(self, n: int, routes: list[_Route], tenants: Collection[int] | None) -> dict[int, int]:
        """How many rows each tenant gives, by deficit round robin; ends the turns that this uses up."""
        plan: dict[int, int] = {}
        waiting: dict[int, int] = {}
        """The tenants of this subscription that have more rows than planned, and how many."""
        ended: dict[int, None] = {}
        """Tenants by the end of their last turn."""
        for share in self._candidates(routes, tenants):
            tenant = share.tenant
            if tenant in plan:
                continue  # a second route of its
            if len(routes) == 1:
                rows = share.count
            else:
                rows = sum(route.shares[tenant].count for route in routes if tenant in route.shares)
            turn = self._quantum * self._weights.get(tenant, 1)
            plan[tenant] = self._spend(
                tenant, min(n, self._deficits.get(tenant, turn)), turn, rows, waiting, ended
            )
            n -= plan[tenant]
            if not n:
                break
        while n and waiting:
            for tenant, rows in list(waiting.items()):
                turn = self._quantum * self._weights.get(tenant, 1)
                alone = len(waiting) == 1  # then its turns follow one another: all of them at once
                count = self._spend(tenant, n if alone else min(n, turn), turn, rows, waiting, ended)
                plan[tenant] += count
                n -= count
                if not n:
                    break
        self._end_turns(ended, routes)
        return plan

    def _spend(
        self, tenant: int, allowed: int, turn: int, rows: int, waiting: dict[int, int], ended: dict[int, None]
    ) -> int:
        """Plan at most `allowed` of a tenant's `rows`; it keeps the rest of its turn while it has rows."""
        if allowed >= rows:
            waiting.pop(tenant, None)
            self._deficits.pop(tenant, None)
            return rows
        waiting[tenant] = rows - allowed
        left = (self._deficits.get(tenant, turn) - allowed) % turn
        if left:
            self._deficits[tenant] = left
        else:
            self._deficits.pop(tenant, None)
            ended.pop(tenant, None)
            ended[tenant] = None
        return allowed

    def _end_turns(self, ended: Iterable[int], routes: list[_Route]) -> None:
        for tenant in ended:
            self._turns += 1
            for route in routes:
                if (share := route.shares.get(tenant)) is not None:
                    share.turn = self._turns
                    route.shares.move_to_end(tenant)

    def _take_from(self, tenant: int, count: int, routes: list[_Route], now_us: int) -> Int64s:
        """The first `count` rows of a tenant over these routes; fewer only if some turn out discarded."""
        if len(routes) == 1 and not self._discarded.rows:
            route, share = routes[0], routes[0].shares[tenant]
            if count == share.count and len(share.lanes) == 1:
                # All that a small tenant has: with many of them this is the common case, and worth its lines.
                (lane,) = share.lanes.values()
                self._rows -= count
                route.count -= count
                self._forget(route, tenant)
                rows = lane.head(count)
                handles: Int64s = rows[_HANDLE]
                return handles
        shares = [(route, route.shares[tenant]) for route in routes if tenant in route.shares]
        lanes = [(route, share, lane) for route, share in shares for lane in share.lanes.values()]
        parts: list[Int64s] = []
        while count and lanes:
            handles = self._pop(lanes, count, now_us)
            lanes = [entry for entry in lanes if entry[2].count]
            if self._discarded.rows:
                handles = handles[self._discarded.are_kept(handles)]
            count -= len(handles)
            parts.append(handles)
        for route, share in shares:
            if not share.count:
                self._forget(route, tenant)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _forget(self, route: _Route, tenant: int) -> None:
        """Leave nothing behind for a tenant without rows in a route, nor for a route without tenants."""
        del route.shares[tenant]
        self._deficits.pop(tenant, None)
        if not route.shares:
            del self._routes[route.route]

    def _pop(self, lanes: list[tuple[_Route, _Share, _Lane]], count: int, now_us: int) -> Int64s:
        """Take the first `count` rows of several lanes out, in order of rank."""
        if len(lanes) == 1:
            rows = lanes[0][2].head(count)
            counts = [rows.shape[1]]
        else:
            heads = [lane.head(count) for _, _, lane in lanes]
            lengths = [head.shape[1] for head in heads]
            rows = np.concatenate(heads, axis=1)
            origins = np.arange(len(lanes)).repeat(lengths)
            priorities = np.array([lane.priority for _, _, lane in lanes])[origins]
            first = self._ranks(rows[_DUE], priorities, now_us).argsort(kind="stable")[:count]
            rows = rows[:, first]
            counts = np.bincount(origins[first], minlength=len(lanes)).tolist()
        for (route, share, lane), gone in zip(lanes, counts, strict=True):
            if not gone:
                continue
            lane.drop(gone)
            share.count -= gone
            route.count -= gone
            self._rows -= gone
            if not lane.count:
                del share.lanes[lane.priority]
        handles: Int64s = rows[_HANDLE]
        return handles

    def _ranks(self, due_us: Int64s, priorities: Int64s, now_us: int) -> Int64s:
        """Lower goes first. Ascending along a lane, for what is aged is at its front."""
        fresh = due_us - priorities * self._step_us
        aged = due_us <= now_us - self._ageing_us
        return np.where(aged, due_us - _AGED, fresh) if aged.any() else fresh

    # ---- discard and ask

    def discard(self, handles: Int64s) -> None:
        """Forget these handles: none is taken any more. Their rows go when they are met, or in a pass."""
        if not len(handles) or not self._rows:
            return
        self._discarded.add(handles)
        if self._discarded.rows > max(DISCARDED_MIN, self._rows // 2):
            self._purge()

    def _purge(self) -> None:
        """Drop all discarded rows, and what they leave empty."""
        if not self._discarded.rows:
            return
        for route in list(self._routes.values()):
            for share in list(route.shares.values()):
                for lane in list(share.lanes.values()):
                    lane.keep(self._discarded)
                    if not lane.count:
                        del share.lanes[lane.priority]
                share.count = sum(lane.count for lane in share.lanes.values())
            route.count = sum(share.count for share in route.shares.values())
            for tenant in [share.tenant for share in route.shares.values() if not share.count]:
                self._forget(route, tenant)
        self._rows = sum(route.count for route in self._routes.values())
        self._discarded.clear()

    def depth(self, route: int | None = None, tenant: int | None = None) -> int:
        """Rows that wait, of one route, one tenant, or both; exact, after discards at the cost of a pass."""
        self._purge()
        if tenant is None:
            return (
                self._rows if route is None else (self._routes[route].count if route in self._routes else 0)
            )
        found = (
            self._routes.values()
            if route is None
            else [r for r in [self._routes.get(route)] if r is not None]
        )
        return sum(one.shares[tenant].count for one in found if tenant in one.shares)

    def oldest_due_us(self, route: int | None = None) -> int | None:
        """The due time of what has waited longest, of one route or all; costs a look at each lane."""
        self._purge()
        found = (
            self._routes.values()
            if route is None
            else [r for r in [self._routes.get(route)] if r is not None]
        )
        shares = (share for one in found for share in one.shares.values())
        return min((lane.oldest_due_us() for share in shares for lane in share.lanes.values()), default=None)

    def oldest_of_each(self) -> tuple[dict[int, int], dict[int, int]]:
        """The due time of what has waited longest, by route and by tenant; costs a look at each lane."""
        self._purge()
        by_route: dict[int, int] = {}
        by_tenant: dict[int, int] = {}
        for route in self._routes.values():
            for tenant, share in route.shares.items():
                oldest = min((lane.oldest_due_us() for lane in share.lanes.values()), default=None)
                if oldest is not None:
                    by_route[route.route] = min(oldest, by_route.get(route.route, oldest))
                    by_tenant[tenant] = min(oldest, by_tenant.get(tenant, oldest))
        return by_route, by_tenant


def _ring(route: _Route, tenants: Collection[int] | None) -> Iterable[_Share]:
    """The shares of these tenants in the order of their turns, at the cost of the smaller of the two."""
    if tenants is None:
        return route.shares.values()
    if len(tenants) > len(route.shares):
        return (share for tenant, share in route.shares.items() if tenant in tenants)
    shares = (route.shares[tenant] for tenant in tenants if tenant in route.shares)
    return sorted(shares, key=attrgetter("turn"))
