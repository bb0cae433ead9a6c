"""What the timer plans for due rows, against slow and plain answers for each row alone."""

from __future__ import annotations

import random
from datetime import UTC, datetime

import numpy as np
import pytest

from tickwheel.domain import flags as bits
from tickwheel.domain import trigger as triggers
from tickwheel.domain.ids import run_day, run_shard
from tickwheel.domain.timer_rows import COLUMNS, NEVER_US, Int64s, TimerRows
from tickwheel.domain.trigger import CompiledTrigger, Cron, Interval, Trigger, TriggerSet
from tickwheel.services.timer.entries import EntryStore
from tickwheel.services.timer.plan import (
    first_of_each,
    number_within_shards,
    overtaken,
    plan_next,
    run_id_heads,
)

NOW_US = 1_900_000_000_000_000
SECOND_US = 1_000_000


def rows_of(random_: random.Random, trigger_ids: list[int], count: int) -> TimerRows:
    store = EntryStore(rows_max=1)
    columns = {name: np.zeros(count, dtype=getattr(store, name).dtype) for name in COLUMNS}
    columns["shard"] = np.sort(np.array([random_.randrange(4) for _ in range(count)], dtype=np.int16))
    columns["kind"][:] = 1
    for name in ("ref_hi", "ref_lo"):
        columns[name] = np.array([random_.getrandbits(64) for _ in range(count)], dtype=np.uint64)
    columns["schedule_time_us"] = NOW_US + np.array(
        [random_.randrange(-(10**12), 10**12) for _ in range(count)], dtype=np.int64
    )
    columns["due_us"] = columns["schedule_time_us"] + random_.choice((0, 5 * SECOND_US))
    columns["trigger_id"] = np.array([random_.choice(trigger_ids) for _ in range(count)], dtype=np.int64)
    columns["countdown"] = np.array([random_.choice((-1, 1, 2, 9)) for _ in range(count)], dtype=np.int32)
    columns["misfire_ms"] = np.array(
        [random_.choice((0, 1_000, 60_000)) for _ in range(count)], dtype=np.int32
    )
    columns["flags"] = np.array([random_.choice((0, bits.JITTER)) for _ in range(count)], dtype=np.int32)
    return TimerRows(**columns)


class Broken(CompiledTrigger):
    """A trigger that an upgrade has made uncomputable."""

    def __init__(self, good: CompiledTrigger) -> None:
        super().__init__(good.trigger_set, good.sources)

    def next_after(self, base_us: int) -> int | None:
        raise ValueError("no such field")

    def next_after_many(self, bases_us: Int64s) -> Int64s:
        raise ValueError("no such field")


def compiled() -> dict[int, CompiledTrigger | Exception]:
    utc, berlin = "UTC", "Europe/Berlin"
    once_us = NOW_US + 5 * 10**11
    sets = {
        1: TriggerSet((Trigger(interval=Interval(7 * SECOND_US, NOW_US)),)),
        2: TriggerSet((Trigger(cron=Cron("*/5 * * * *"), time_zone=utc),)),
        3: TriggerSet((Trigger(cron=Cron("30 2 * * *"), time_zone=berlin),), jitter_us=600 * SECOND_US),
        4: TriggerSet((Trigger(interval=Interval(SECOND_US, NOW_US)),), jitter_us=10 * SECOND_US),
        5: TriggerSet((Trigger(interval=Interval(SECOND_US, NOW_US)),), end_us=once_us),
    }
    return {key: triggers.compile(trigger_set) for key, trigger_set in sets.items()}


@pytest.mark.parametrize("seed", range(8))
def test_each_row_of_a_batch_gets_the_next_occurrence_that_it_would_get_alone(seed: int) -> None:
    random_ = random.Random(seed)
    known = compiled()
    rows = rows_of(random_, [1, 2, 3, 4, 5], 200)
    plan = plan_next(rows, known, 30 * SECOND_US)
    assert not plan.failed
    for n in range(len(rows)):
        trigger = known[int(rows.trigger_id[n])]
        assert isinstance(trigger, CompiledTrigger)
        found = trigger.next_after(int(rows.schedule_time_us[n]))
        expected = NEVER_US if found is None or rows.countdown[n] == 1 else found
        next_us, due_us = int(plan.next_schedule_us[n]), int(plan.next_due_us[n])
        assert next_us == expected
        assert next_us > rows.schedule_time_us[n]
        if expected == NEVER_US:
            assert due_us == NEVER_US
            continue
        following = trigger.next_after(next_us)
        late_us = due_us - next_us
        assert 0 <= late_us <= (trigger.trigger_set.jitter_us if rows.flags[n] & bits.JITTER else 0)
        assert following is None or due_us < following


@pytest.mark.parametrize("seed", range(4))
def test_an_occurrence_is_settled_within_half_its_misfire_threshold(seed: int) -> None:
    rows = rows_of(random.Random(seed), [1, 2, 3, 4, 5], 200)
    plan = plan_next(rows, compiled(), 30 * SECOND_US)
    assert (plan.settle_us <= rows.due_us + 30 * SECOND_US).all()
    assert (plan.settle_us <= rows.due_us + rows.misfire_ms.astype(np.int64) * 500).all()
    assert (plan.settle_us >= rows.due_us).all()


@pytest.mark.parametrize("seed", range(4))
def test_an_exclusive_schedule_that_is_late_skips_exactly_what_overtook_it(seed: int) -> None:
    rng = random.Random(seed)
    rows = rows_of(rng, [1, 2, 3, 4, 5], 200)
    triggers = compiled()
    following = plan_next(rows, triggers, 30 * SECOND_US).next_schedule_us
    now_us = int(rows.schedule_time_us.max()) + rng.randrange(0, 600 * SECOND_US)
    found = overtaken(rows, following, triggers, now_us)
    for n in range(len(rows)):
        trigger = triggers[int(rows.trigger_id[n])]
        assert isinstance(trigger, CompiledTrigger)
        exclusive = rows.flags[n] & bits.OVERLAP_MASK == 1 and not rows.flags[n] & bits.JITTER
        if not exclusive or rows.countdown[n] >= 0 or following[n] > now_us:
            assert found.count[n] == 0
            assert found.following_us[n] == following[n]
            continue
        passed = trigger.between(int(following[n]) - 1, now_us, 10_000)
        assert found.count[n] == len(passed)
        assert (found.first_us[n], found.last_us[n]) == (passed[0], passed[-1])
        after = trigger.next_after(passed[-1])
        assert found.following_us[n] == (NEVER_US if after is None else after)


@pytest.mark.parametrize("seed", range(4))
def test_a_trigger_that_cannot_be_computed_fails_its_own_rows_alone(seed: int) -> None:
    random_ = random.Random(seed)
    known = compiled()
    good = known[1]
    assert isinstance(good, CompiledTrigger)
    known[6], known[7] = Broken(good), ValueError("it was compiled by a newer version")
    rows = rows_of(random_, [1, 2, 6, 7], 100)
    plan = plan_next(rows, known, 30 * SECOND_US)
    assert plan.failed.keys() == set(np.flatnonzero(rows.trigger_id >= 6).tolist())
    for n in np.flatnonzero(rows.trigger_id < 6).tolist():
        trigger = known[int(rows.trigger_id[n])]
        assert isinstance(trigger, CompiledTrigger)
        if rows.countdown[n] != 1:
            assert plan.next_schedule_us[n] == trigger.next_after(int(rows.schedule_time_us[n]))
    assert all(plan.next_schedule_us[n] == NEVER_US for n in plan.failed)


@pytest.mark.parametrize("seed", range(4))
def test_a_plan_of_a_batch_is_the_plan_of_its_parts(seed: int) -> None:
    """Jitter and next are functions of the row: a retry, a failover and a preview agree."""
    rows = rows_of(random.Random(seed), [1, 2, 3, 4, 5], 60)
    whole = plan_next(rows, compiled(), SECOND_US)
    for n in range(len(rows)):
        alone = plan_next(rows.pick(np.array([n], dtype=np.int64)), compiled(), SECOND_US)
        assert alone.next_due_us[0] == whole.next_due_us[n]
        assert alone.settle_us[0] == whole.settle_us[n]


@pytest.mark.parametrize("seed", range(20))
def test_numbers_are_fresh_and_grow_by_one_within_a_shard(seed: int) -> None:
    random_ = random.Random(seed)
    counters = np.array([random_.randrange(1, 1_000) for _ in range(8)], dtype=np.int64)
    before = counters.copy()
    given: dict[int, list[int]] = {shard: [] for shard in range(8)}
    for _ in range(5):
        shards = np.sort(
            np.array([random_.randrange(8) for _ in range(random_.randrange(30))], dtype=np.int16)
        )
        for shard, number in zip(
            shards.tolist(), number_within_shards(shards, counters).tolist(), strict=True
        ):
            given[shard].append(number)
    for shard, got in given.items():
        assert got == list(range(before[shard], before[shard] + len(got)))
        assert counters[shard] == before[shard] + len(got)


def test_a_run_id_says_its_day_and_shard() -> None:
    shards = np.array([0, 1, 255, 4_095], dtype=np.int16)
    day = (datetime.fromtimestamp(NOW_US / 1e6, UTC) - datetime(1970, 1, 1, tzinfo=UTC)).days
    for head, shard in zip(run_id_heads(NOW_US, shards).tolist(), shards.tolist(), strict=True):
        run = head.to_bytes(8, "big") + bytes(8)
        assert (run_shard(run), run_day(run)) == (shard, day)


@pytest.mark.parametrize("seed", range(20))
def test_of_active_rows_the_first_of_each_key_goes_and_inactive_ones_all_do(seed: int) -> None:
    random_ = random.Random(seed)
    count = random_.randrange(40)
    keys = np.array([random_.randrange(6) for _ in range(count)], dtype=np.uint64)
    active = np.array([random_.random() < 0.6 for _ in range(count)], dtype=np.bool_)
    allowed = first_of_each(keys, active)
    seen: set[int] = set()
    for n in range(count):
        expected = not active[n] or int(keys[n]) not in seen
        if active[n]:
            seen.add(int(keys[n]))
        assert allowed[n] == expected
