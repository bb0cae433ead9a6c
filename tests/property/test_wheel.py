"""The timing wheel against a sorted list, and its level arithmetic against the definition."""

import random
import tracemalloc
from bisect import insort

import numpy as np
import pytest

from tickwheel.services.timer import wheel
from tickwheel.services.timer.wheel import NEVER_US, SLOT_BITS, SLOTS, TimingWheel

TICK_US = wheel.TICK_US_DEFAULT
YEAR_9999_US = 253_402_300_799_000_000
START_US = 1_790_000_000_123_456


def int64s(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


class SortedListWheel:
    """What the wheel must do, said as simply as possible."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, int]] = []
        self.serial = 0

    def insert(self, due_us: list[int], items: list[int]) -> None:
        for due, item in zip(due_us, items, strict=True):
            self.serial += 1
            insort(self.rows, (due, self.serial, item))

    def advance(self, now_us: int, limit: int | None) -> list[tuple[int, int]]:
        count = sum(due <= now_us and due != NEVER_US for due, _, _ in self.rows)
        count = count if limit is None else min(count, limit)
        taken, self.rows = self.rows[:count], self.rows[count:]
        return [(due, item) for due, _, item in taken]

    def cancel(self, items: list[int]) -> int:
        before, gone = len(self.rows), set(items)
        self.rows = [row for row in self.rows if row[2] not in gone]
        return before - len(self.rows)

    def next_due_us(self) -> int | None:
        return self.rows[0][0] if self.rows and self.rows[0][0] != NEVER_US else None


def pairs(taken: tuple[np.ndarray, np.ndarray]) -> list[tuple[int, int]]:
    return list(zip(taken[0].tolist(), taken[1].tolist(), strict=True))


def a_due_time(rng: random.Random, now_us: int, tick_us: int) -> int:
    """Where wheels break: level borders and a tick or a microsecond to either side, past, far future."""
    shape = rng.randrange(8)
    if shape == 0:
        return now_us + rng.randrange(-3 * tick_us, 3 * tick_us)
    if shape == 1:
        return now_us + rng.randrange(5_000) * tick_us
    if shape == 2:
        return rng.choice([NEVER_US, NEVER_US - 1, YEAR_9999_US, YEAR_9999_US - 1, 0, -1, now_us, now_us + 1])
    level = rng.randrange(1, 5)
    span_us = tick_us << (level * SLOT_BITS)
    border = (
        (now_us // span_us + rng.randrange(3)) * span_us if shape < 6 else now_us + span_us * rng.randrange(3)
    )
    return border + rng.choice([-tick_us, -1, 0, 1, tick_us]) + rng.choice([0, 0, rng.randrange(tick_us)])


def an_advance(rng: random.Random, now_us: int, tick_us: int, next_due_us: int | None) -> int:
    shape = rng.randrange(6)
    if shape == 0 and next_due_us is not None and next_due_us < now_us + (tick_us << 30):
        return max(now_us, next_due_us + rng.choice([-1, 0, 1]))
    if shape == 1:
        span_us = tick_us << (rng.randrange(1, 4) * SLOT_BITS)
        return max(now_us, (now_us // span_us + 1) * span_us + rng.choice([-tick_us, -1, 0, 1, tick_us]))
    return now_us + rng.choice([0, 1, tick_us, rng.randrange(300 * tick_us), rng.randrange(70_000 * tick_us)])


@pytest.mark.parametrize("seed", range(60))
def test_any_mix_of_calls_gives_what_a_sorted_list_gives(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    monkeypatch.setattr(wheel, "COMPACT_DEAD_MIN", rng.choice([0, 5, 256]))
    monkeypatch.setattr(wheel, "PENDING_MAX", rng.choice([1, 40, 65_536]))
    monkeypatch.setattr(wheel, "CHUNKS_LOOSE_MAX", rng.choice([2, 8]))
    tick_us = rng.choice([TICK_US, TICK_US, 1, 7])
    now_us = START_US
    real, model = TimingWheel(now_us, tick_us), SortedListWheel()
    items_max = rng.choice(
        [20, 400, 1 << 62]
    )  # few items: the same one is held several times, and comes again
    seen: list[int] = [0]
    for _ in range(200):
        act = rng.random()
        if act < 0.45:
            count = rng.choice([0, 1, 2, 30, 150])
            due = [a_due_time(rng, now_us, tick_us) for _ in range(count)]
            items = [rng.randrange(items_max) for _ in range(count)]
            seen = [*seen[-500:], *items]
            real.insert(int64s(*due), int64s(*items))
            model.insert(due, items)
        elif act < 0.65:
            chosen = [*rng.choices(seen, k=rng.choice([0, 1, 3, 60])), rng.randrange(items_max)]
            assert real.cancel(int64s(*chosen)) == model.cancel(chosen)
        else:
            now_us = an_advance(rng, now_us, tick_us, model.next_due_us())
            limit = rng.choice([None, None, 0, 1, 3, 50])
            assert pairs(real.advance(now_us, limit)) == model.advance(now_us, limit)
        assert len(real) == len(model.rows)
        if (earliest := model.next_due_us()) is not None:
            promised = real.next_due_us()
            assert promised is not None
            assert promised <= earliest
    assert pairs(real.advance(NEVER_US - 1)) == model.advance(NEVER_US - 1, None)
    assert len(real) == len(model.rows)


@pytest.mark.parametrize("seed", range(10))
def test_without_cancels_the_next_due_time_is_exact(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    real, model, now_us = TimingWheel(START_US), SortedListWheel(), START_US
    for _ in range(150):
        due = [a_due_time(rng, now_us, TICK_US) for _ in range(rng.randrange(5))]
        real.insert(int64s(*due), int64s(*range(len(due))))
        model.insert(due, list(range(len(due))))
        assert real.next_due_us() == model.next_due_us()
        now_us = an_advance(rng, now_us, TICK_US, model.next_due_us())
        assert pairs(real.advance(now_us)) == model.advance(now_us, None)


@pytest.mark.parametrize("level", range(1, 6))
@pytest.mark.parametrize("ticks_off", [-1, 0, 1])
@pytest.mark.parametrize("turns", [1, 2])
def test_a_delay_of_whole_turns_fires_within_its_tick(level: int, ticks_off: int, turns: int) -> None:
    for now_us in (START_US, START_US // TICK_US * TICK_US, TICK_US << (5 * SLOT_BITS)):
        due_us = now_us + (turns << (level * SLOT_BITS)) * TICK_US + ticks_off * TICK_US
        under_test = TimingWheel(now_us)
        under_test.insert(int64s(due_us), int64s(1))
        for step_us in (now_us, (now_us + due_us) // 2, due_us - TICK_US, due_us - 1):
            assert pairs(under_test.advance(step_us)) == []
        assert pairs(under_test.advance(due_us)) == [(due_us, 1)]


def test_a_timer_armed_again_a_thousand_times_does_not_drift() -> None:
    period_us, due_us = 10_000_000, START_US + 10_000_000
    under_test, now_us = TimingWheel(START_US), START_US
    under_test.insert(int64s(due_us), int64s(7))
    for _ in range(1_000):
        while not (fired := pairs(under_test.advance(now_us))):
            now_us = under_test.next_due_us() or pytest.fail("nothing is due")
        assert fired == [(due_us, 7)]
        due_us = fired[0][0] + period_us
        under_test.insert(int64s(due_us), int64s(7))
    assert now_us == START_US + 1_000 * period_us


def test_the_year_9999_and_never_are_held_and_do_not_fire_early() -> None:
    under_test = TimingWheel(START_US)
    far = [START_US + 400 * 86_400_000_000, YEAR_9999_US, 253_402_300_800_000_000, NEVER_US - 1]
    under_test.insert(int64s(NEVER_US, *far), int64s(0, 1, 2, 3, 4))
    assert under_test.next_due_us() == far[0]
    for number, due_us in enumerate(far, start=1):
        assert pairs(under_test.advance(due_us - 1)) == []
        assert pairs(under_test.advance(due_us)) == [(due_us, number)]
    assert under_test.next_due_us() is None
    assert pairs(under_test.advance(NEVER_US)) == []
    assert len(under_test) == 1
    assert under_test.cancel(int64s(0)) == 1
    assert len(under_test) == 0


def test_what_is_due_later_within_the_present_tick_stays() -> None:
    under_test = TimingWheel(0)
    under_test.insert(int64s(15_000, 12_000, 19_999, 12_000), int64s(1, 2, 3, 4))
    assert pairs(under_test.advance(11_999)) == []
    assert pairs(under_test.advance(15_000)) == [(12_000, 2), (12_000, 4), (15_000, 1)]
    assert under_test.next_due_us() == 19_999
    assert pairs(under_test.advance(20_000)) == [(19_999, 3)]


def test_a_clock_that_goes_back_makes_nothing_due() -> None:
    under_test = TimingWheel(START_US)
    under_test.advance(START_US + 5_000_000)
    under_test.insert(int64s(START_US + 1_000_000), int64s(1))
    assert pairs(under_test.advance(START_US)) == []
    assert pairs(under_test.advance(START_US + 1_000_000)) == [(START_US + 1_000_000, 1)]


def test_an_idle_wheel_jumps_over_hours_in_few_steps() -> None:
    under_test, falls = TimingWheel(START_US), 0
    fall = under_test._fall

    def counting_fall(key: int) -> None:
        nonlocal falls
        falls += 1
        fall(key)

    under_test._fall = counting_fall  # type: ignore[method-assign]
    due_us = START_US + 30 * 86_400_000_000
    under_test.insert(int64s(due_us), int64s(1))
    under_test.advance(due_us - 1)
    assert pairs(under_test.advance(due_us)) == [(due_us, 1)]
    assert falls <= wheel.level_count(TICK_US)


def test_a_limit_takes_a_backlog_in_order_while_timers_join_it() -> None:
    rng = np.random.default_rng(5)
    due = START_US + rng.integers(0, 3_600_000_000, 20_000)
    late = START_US + rng.integers(0, 3_600_000_000, 200)
    under_test = TimingWheel(START_US)
    under_test.insert(due, np.arange(20_000))
    now_us, taken = START_US + 3_600_000_000, []
    for batch in np.split(late, 20):
        taken.append(under_test.advance(now_us, limit=500)[0])
        assert len(taken[-1]) == 500
        assert (np.diff(taken[-1]) >= 0).all()
        under_test.insert(batch, np.full(10, 7))
    rest = under_test.advance(now_us)[0]
    assert (np.diff(rest) >= 0).all()
    assert sorted([*np.concatenate(taken), *rest]) == sorted([*due, *late])


def test_cancelled_timers_leave_the_memory() -> None:
    under_test = TimingWheel(START_US)
    rng = np.random.default_rng(3)
    sizes = []
    for turn in range(40):
        items = np.arange(10_000) + turn * 10_000
        under_test.insert(START_US + rng.integers(1, 10**10, 10_000), items)
        assert under_test.cancel(items[:9_990]) == 9_990
        sizes.append(under_test.nbytes)
    assert len(under_test) == 400
    assert max(sizes) < 3_000_000
    assert under_test.cancel(np.arange(400_000)) == 400
    assert under_test.nbytes < 10_000


def test_a_cancelled_item_may_be_inserted_again_at_once() -> None:
    under_test = TimingWheel(START_US)
    for _ in range(5):
        under_test.insert(int64s(START_US + 50_000, START_US + 60_000), int64s(1, 2))
        assert under_test.cancel(int64s(1, 1, 9)) == 1
    assert [item for _, item in pairs(under_test.advance(START_US + 55_000))] == []
    under_test.insert(int64s(START_US + 56_000), int64s(1))
    assert [item for _, item in pairs(under_test.advance(START_US + 60_000))] == [1, 2, 2, 2, 2, 2]


def test_a_million_timers_cost_at_most_32_bytes_each() -> None:
    rng = np.random.default_rng(11)
    for cancels in (False, True):
        under_test = TimingWheel(START_US)
        for page in range(50):
            due = START_US + rng.integers(0, 120_000_000, 20_000)
            under_test.insert(due, np.arange(20_000) + page * 20_000)
            if cancels:
                under_test.cancel(int64s(page))
        assert under_test.nbytes <= 32 * len(under_test)


@pytest.mark.parametrize("cancels", [False, True])
def test_the_wheel_knows_how_much_memory_it_takes(cancels: bool) -> None:
    rng = np.random.default_rng(12)
    due = START_US + rng.integers(0, 120_000_000, 100_000)
    items = np.arange(100_000)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    under_test = TimingWheel(START_US)
    for page in np.split(items, 20):
        under_test.insert(due[page], page)
        if cancels:
            under_test.cancel(page[:50])
    under_test.advance(START_US + 500_000, limit=300)
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert under_test.nbytes == pytest.approx(taken, rel=0.05)


def test_levels_are_the_highest_differing_bit_for_every_pair_of_near_ticks() -> None:
    for elapsed in (0, 1, 254, 255, 256, 257, 65_535, 65_536):
        ticks = np.arange(elapsed, elapsed + 70_000)
        keys = wheel.keys_of(elapsed, ticks)
        assert (np.diff(keys) >= 0).all()
        for tick, key in zip(ticks.tolist(), keys.tolist(), strict=True):
            level = wheel.level_of(elapsed, tick)
            assert key == (level << SLOT_BITS) | wheel.slot_of(tick, level)
            # All bits above the level agree; the level's own digits differ, unless it is the lowest.
            assert tick >> ((level + 1) * SLOT_BITS) == elapsed >> ((level + 1) * SLOT_BITS)
            assert level == 0 or wheel.slot_of(tick, level) > wheel.slot_of(elapsed, level)
            start = wheel.slot_start(elapsed, level, wheel.slot_of(tick, level))
            assert start <= tick < start + wheel.slot_span(level)


@pytest.mark.parametrize("tick_us", [1, 7, 1_000, TICK_US, 1_000_000])
def test_every_level_border_of_int64_has_a_key_that_its_start_gives_back(tick_us: int) -> None:
    last = NEVER_US // tick_us
    levels = wheel.level_count(tick_us)
    assert wheel.level_of(0, last) == levels - 1
    borders = {
        SLOTS**level * turn + off for level in range(levels) for turn in (1, 2, 255) for off in (-1, 0, 1)
    }
    ticks = sorted(tick for tick in {*borders, 0, last - 1, last} if 0 <= tick <= last)
    for elapsed in ticks:
        later = np.array([tick for tick in ticks if tick >= elapsed], np.int64)
        keys = wheel.keys_of(elapsed, later)
        assert (np.diff(keys) >= 0).all()
        for tick, key in zip(later.tolist(), keys.tolist(), strict=True):
            level, slot = key >> SLOT_BITS, key & (SLOTS - 1)
            assert level == wheel.level_of(elapsed, tick) < levels
            start = wheel.slot_start(elapsed, level, slot)
            assert start <= tick < start + wheel.slot_span(level)


@pytest.mark.parametrize("seed", range(20))
def test_subtracting_sorted_multisets_takes_each_copy_once(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    held = sorted(rng.choices(range(30), k=60))
    gone = sorted(rng.sample(held, rng.randrange(60)))
    expected = list(held)
    for item in gone:
        expected.remove(item)
    assert wheel.subtract_sorted(int64s(*held), int64s(*gone)).tolist() == expected
