"""The ready queues: nothing lost, nothing twice, fair between tenants, in order within them."""

import random
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import pytest

from tickwheel.services.timer import ready
from tickwheel.services.timer.ready import ReadyQueues

NOW_US = 1_790_000_000_000_000
AGEING_US = ready.AGEING_US_DEFAULT


@dataclass(frozen=True, slots=True)
class Row:
    handle: int
    route: int
    tenant: int
    priority: int
    due_us: int


def push(queues: ReadyQueues, rows: list[Row]) -> None:
    queues.push(
        np.array([row.handle for row in rows], np.int64),
        np.array([row.route for row in rows], np.int32),
        np.array([row.tenant for row in rows], np.int32),
        np.array([row.priority for row in rows], np.int8),
        np.array([row.due_us for row in rows], np.int64),
    )


def push_many(
    queues: ReadyQueues, handles: range, *, route: int = 1, tenant: int = 1, priority: int = 5
) -> None:
    push(queues, [Row(handle, route, tenant, priority, NOW_US + handle) for handle in handles])


def rank(row: Row, now_us: int) -> tuple[int, int]:
    """Within a tenant: the aged by due, then by due less a tenth of the ageing for each priority."""
    if row.due_us <= now_us - AGEING_US:
        return 0, row.due_us
    return 1, row.due_us - row.priority * (AGEING_US // 10)


class Model:
    """Rows that wait, in order of arrival."""

    def __init__(self) -> None:
        self.waiting: dict[int, Row] = {}

    def covered(self, routes: Collection[int], tenants: Collection[int] | None) -> list[Row]:
        rows = self.waiting.values()
        return [row for row in rows if row.route in routes and (tenants is None or row.tenant in tenants)]

    def check_and_remove(
        self, taken: list[int], n: int, routes: Collection[int], tenants: Collection[int] | None, now_us: int
    ) -> None:
        covered = self.covered(routes, tenants)
        assert len(taken) == min(n, len(covered))  # never more, and work-conserving
        assert len(set(taken)) == len(taken)
        assert set(taken) <= {row.handle for row in covered}
        by_tenant: dict[int, list[Row]] = {}
        for handle in taken:
            by_tenant.setdefault(self.waiting[handle].tenant, []).append(self.waiting[handle])
        for tenant, rows in by_tenant.items():
            best = sorted(rank(row, now_us) for row in covered if row.tenant == tenant)
            assert [rank(row, now_us) for row in rows] == best[: len(rows)]
            lanes: dict[tuple[int, int], list[Row]] = {}
            for row in rows:
                lanes.setdefault((row.route, row.priority), []).append(row)
            for (route, priority), lane in lanes.items():
                same = [r for r in covered if (r.tenant, r.route, r.priority) == (tenant, route, priority)]
                assert (
                    lane == sorted(same, key=lambda row: row.due_us)[: len(lane)]
                )  # FIFO, arrival among equals
        for handle in taken:
            del self.waiting[handle]


@pytest.mark.parametrize("seed", range(60))
def test_any_mix_of_calls_takes_each_row_once_and_in_order(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    monkeypatch.setattr(ready, "CHUNK_ROWS_MAX", rng.choice([3, 20, 16_384]))
    monkeypatch.setattr(ready, "CHUNKS_LOOSE_MAX", rng.choice([2, 8]))
    monkeypatch.setattr(ready, "DISCARDED_MIN", rng.choice([0, 10, 1_024]))
    queues, model, now_us, serial = ReadyQueues(quantum=rng.choice([1, 3, 8])), Model(), NOW_US, 0
    routes_max, tenants_max = rng.choice([1, 4]), rng.choice([1, 3, 12])
    dues_max = rng.choice([20, 3 * AGEING_US])
    for tenant in range(tenants_max):
        queues.set_weight(tenant, rng.choice([1, 1, 2, 5]))
    for _ in range(120):
        now_us += rng.randrange(AGEING_US // 10)
        act = rng.random()
        if act < 0.45:
            rows = []
            one_group = rng.random() < 0.4
            route, tenant, priority = rng.randrange(routes_max), rng.randrange(tenants_max), rng.randrange(10)
            for _ in range(rng.choice([0, 1, 5, 60])):
                serial += 1
                if not one_group:
                    route, tenant, priority = (
                        rng.randrange(routes_max),
                        rng.randrange(tenants_max),
                        rng.choice([0, 5, 9]),
                    )
                rows.append(Row(serial, route, tenant, priority, now_us - rng.randrange(dues_max)))
            if rng.random() < 0.7:
                rows.sort(key=lambda row: row.due_us)
            push(queues, rows)
            model.waiting |= {row.handle: row for row in rows}
        elif act < 0.85:
            n = rng.choice([0, 1, 2, 10, 100])
            routes = rng.sample(range(routes_max + 1), rng.randrange(1, routes_max + 1))
            tenants = rng.choice([None, None, rng.sample(range(20), 5), {0, 1}, frozenset(range(30))])
            taken = queues.take(n, routes, tenants, now_us).tolist()
            handed_back = [model.waiting[handle] for handle in taken if rng.random() < 0.2]
            model.check_and_remove(taken, n, routes, tenants, now_us)
            push(queues, handed_back)
            model.waiting |= {row.handle: row for row in handed_back}
        else:
            gone = rng.sample(sorted(model.waiting), min(len(model.waiting), rng.choice([1, 5, 40])))
            queues.discard(np.array(gone, np.int64))
            back = [model.waiting.pop(handle) for handle in gone][: rng.choice([0, 0, 2])]
            push(queues, back)  # a discarded handle may come again
            model.waiting |= {row.handle: row for row in back}
        if rng.random() < 0.3:
            check_questions(queues, model, routes_max, tenants_max)
    taken = queues.take(1 << 30, range(routes_max), None, now_us).tolist()
    model.check_and_remove(taken, 1 << 30, range(routes_max), None, now_us)
    assert not model.waiting
    assert_nothing_is_left(queues)


def check_questions(queues: ReadyQueues, model: Model, routes_max: int, tenants_max: int) -> None:
    rows = list(model.waiting.values())
    assert queues.depth() == len(rows)
    assert queues.oldest_due_us() == min((row.due_us for row in rows), default=None)
    by_route, by_tenant = Counter(row.route for row in rows), Counter(row.tenant for row in rows)
    both = Counter((row.route, row.tenant) for row in rows)
    for route in range(routes_max):
        assert queues.depth(route) == by_route[route]
        assert queues.oldest_due_us(route) == min((r.due_us for r in rows if r.route == route), default=None)
        assert all(queues.depth(route, tenant) == both[route, tenant] for tenant in range(tenants_max))
    assert all(queues.depth(tenant=tenant) == by_tenant[tenant] for tenant in range(tenants_max))


def assert_nothing_is_left(queues: ReadyQueues) -> None:
    assert queues.depth() == 0
    assert not queues._routes
    assert not queues._deficits
    assert not queues._discarded.rows


@pytest.mark.parametrize("batch", [1, 3, 7, 100, 1_000])
@pytest.mark.parametrize("routes_of", [{1: [1], 2: [1], 3: [1]}, {1: [1, 2, 3], 2: [2], 3: [3, 1]}])
def test_shares_follow_the_weights(batch: int, routes_of: dict[int, list[int]]) -> None:
    queues, handle = ReadyQueues(), 0
    for weight, routes in routes_of.items():
        queues.set_weight(weight, weight if weight < 3 else 4)
        for route in routes:
            push_many(queues, range(handle, handle + 12_000), route=route, tenant=weight)
            handle += 12_000
    tenant_of = np.repeat([1, 2, 3], [12_000 * len(routes) for routes in routes_of.values()])
    taken = np.concatenate([queues.take(batch, [1, 2, 3], None, NOW_US) for _ in range(14_000 // batch)])
    counts = np.bincount(tenant_of[taken], minlength=4)[1:]
    assert counts / counts.sum() == pytest.approx([1 / 7, 2 / 7, 4 / 7], rel=0.05)


def test_shares_hold_between_workers_with_different_subscriptions() -> None:
    queues = ReadyQueues()
    for tenant in range(4):
        for route in (1, 2):
            start = (tenant * 2 + route) * 20_000
            push_many(queues, range(start, start + 20_000), route=route, tenant=tenant)
    rng, counts = random.Random(4), Counter[int]()
    for _ in range(2_000):
        routes = rng.choice([[1], [1, 2]])
        taken = queues.take(rng.randrange(1, 12), routes, None, NOW_US)
        counts.update(((taken - 20_000) // 40_000).tolist())
    assert max(counts.values()) <= 1.05 * min(counts.values())


def test_a_tenant_alone_gets_everything() -> None:
    queues = ReadyQueues(quantum=2)
    push_many(queues, range(1_000))
    assert queues.take(600, [1], None, NOW_US).tolist() == list(range(600))
    assert queues.take(600, [1], None, NOW_US).tolist() == list(range(600, 1_000))
    assert queues.take(600, [1], None, NOW_US).tolist() == []
    assert_nothing_is_left(queues)


def test_one_row_of_a_second_tenant_starts_within_ten_dispatches() -> None:
    for already in range(20):
        queues = ReadyQueues()
        push_many(queues, range(1_000), tenant=1)
        for _ in range(already):
            queues.take(1, [1], None, NOW_US)
        push_many(queues, range(5_000, 5_001), tenant=2)
        dispatches = [int(queues.take(1, [1], None, NOW_US)[0]) for _ in range(10)]
        assert 5_000 in dispatches


@pytest.mark.parametrize("flood_factor", [1, 2])
def test_a_low_priority_row_starts_within_the_ageing_bound_under_an_endless_flood(flood_factor: int) -> None:
    """The slot does 10 jobs/s; at twice that the flood's own rows wait ever longer, and it holds."""
    queues, now_us = ReadyQueues(), NOW_US
    push(queues, [Row(1, 1, 1, 0, NOW_US)])
    for step in range(1_000):
        push(queues, [Row(10 + step * 2 + more, 1, 1, 9, now_us) for more in range(flood_factor)])
        if queues.take(1, [1], None, now_us).tolist() == [1]:
            break
        now_us += 100_000
    assert 0 < now_us - NOW_US <= AGEING_US + 200_000


def test_without_waiting_the_higher_priority_goes_first_and_a_row_handed_back_takes_its_old_place() -> None:
    queues = ReadyQueues()
    push_many(queues, range(10), priority=3)
    push_many(queues, range(10, 20), priority=4)
    first = queues.take(12, [1], None, NOW_US)
    assert first.tolist() == [*range(10, 20), 0, 1]
    queues.requeue(
        np.array([1], np.int64), np.array([1], np.int32), np.array([1], np.int32), np.array([3], np.int8),
        np.array([NOW_US + 1], np.int64),
    )  # fmt: skip
    assert queues.take(3, [1], None, NOW_US).tolist() == [1, 2, 3]


def test_within_a_tenant_the_oldest_due_decides_between_routes() -> None:
    queues = ReadyQueues()
    push_many(queues, range(0, 20, 2), route=1)
    push_many(queues, range(1, 20, 2), route=2)
    assert queues.take(20, [2, 1], None, NOW_US).tolist() == list(range(20))


def test_what_a_worker_does_not_serve_stays() -> None:
    queues = ReadyQueues()
    push_many(queues, range(10), route=1, tenant=1)
    push_many(queues, range(10, 20), route=2, tenant=2)
    assert queues.take(50, [3], None, NOW_US).tolist() == []
    assert queues.take(50, [1, 2], [7], NOW_US).tolist() == []
    assert queues.take(50, [1, 1, 2], {2}, NOW_US).tolist() == list(range(10, 20))
    assert queues.depth() == 10


def test_two_hundred_thousand_rows_of_many_tenants_leave_nothing_behind() -> None:
    queues, rng = ReadyQueues(), np.random.default_rng(9)
    for start in range(0, 200_000, 10_000):
        n = 10_000
        queues.push(
            np.arange(start, start + n), rng.integers(0, 50, n, np.int32), rng.integers(0, 3_000, n,
            np.int32), rng.integers(0, 10, n, np.int8), np.full(n, NOW_US),
        )  # fmt: skip
        queues.discard(np.arange(start, start + 300))
        while len(queues.take(700, range(50), None, NOW_US)):
            pass
    assert_nothing_is_left(queues)
