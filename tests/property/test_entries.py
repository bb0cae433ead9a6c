"""The entry store against a dict: handles, columns, the index, and what a full store does."""

import random

import numpy as np
import pytest

from tickwheel.domain.timer_rows import COLUMNS, TimerRows
from tickwheel.services.timer import entries
from tickwheel.services.timer.entries import MISSING, EntryStore


def rows_for(references: list[tuple[int, int]], rng: random.Random, shards: int = 8) -> TimerRows:
    n = len(references)

    def ints(dtype: type[np.integer], low: int, high: int) -> np.ndarray:
        return np.array([rng.randrange(low, high) for _ in range(n)], dtype)

    return TimerRows(
        shard=ints(np.int16, 0, shards),
        kind=ints(np.int8, 1, 3),
        ref_hi=np.array([hi for hi, _ in references], np.uint64),
        ref_lo=np.array([lo for _, lo in references], np.uint64),
        due_us=ints(np.int64, 0, 1 << 60),
        version=ints(np.int64, 0, 1 << 40),
        decided_us=ints(np.int64, 0, 1 << 60),
        schedule_time_us=ints(np.int64, 0, 1 << 60),
        trigger_id=ints(np.int64, 0, 1 << 60),
        tenant=ints(np.int32, 0, 1 << 20),
        route=ints(np.int32, 0, 1 << 20),
        priority=ints(np.int8, 0, 10),
        attempt=ints(np.int16, 0, 100),
        flags=ints(np.int32, 0, 1 << 30),
        template_id=ints(np.int64, 0, 1 << 60),
        schedule_hi=ints(np.uint64, 0, 1 << 60),
        schedule_lo=ints(np.uint64, 0, 1 << 60),
        misfire_ms=ints(np.int32, 0, 1 << 30),
        countdown=ints(np.int32, -1, 1 << 30),
    )


def row_at(rows: TimerRows, place: int) -> dict[str, int]:
    return {name: int(getattr(rows, name)[place]) for name in COLUMNS}


def references(numbers: list[int], rng: random.Random, shape: str) -> list[tuple[int, int]]:
    """References of distinct numbers; `low` and `high` differ in one half only, as collisions would."""
    if shape == "low":
        return [(7, number) for number in numbers]
    if shape == "high":
        return [(number, 7) for number in numbers]
    return [(number << 32 | rng.getrandbits(32), rng.getrandbits(64)) for number in numbers]


@pytest.mark.parametrize("shape", ["low", "high", "random"])
@pytest.mark.parametrize("one_bucket", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_any_mix_of_calls_holds_what_a_dict_holds(
    seed: int, one_bucket: bool, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    if one_bucket:  # all hashes alike: everything but sixteen rows is in the overflow
        monkeypatch.setattr(entries, "hash_of", lambda hi, lo: (lo ^ hi) & np.uint64(1))
    monkeypatch.setattr(entries, "_PIECE_ROWS", rng.choice([3, 50, 65_536]))
    store = EntryStore(rows_max=700, rows_initial=rng.choice([1, 16, 700]))
    held: dict[int, dict[str, int]] = {}
    dead: list[int] = []
    serial = 0
    for _ in range(80):
        act = rng.random()
        if act < 0.5:
            count = rng.choice([0, 1, 5, 120])
            new = references(list(range(serial, serial + count)), rng, shape)
            serial += count
            rows = rows_for(new, rng)
            handles = store.add(rows).tolist()
            assert len(handles) == min(count, 700 - len(held))
            assert not set(handles) & {*held, *dead}
            held |= {handle: row_at(rows, place) for place, handle in enumerate(handles)}
        elif act < 0.9 and held:
            gone = rng.sample(sorted(held), min(len(held), rng.choice([1, 10, 100])))
            named = [*gone, gone[0], MISSING, *dead[-3:]]
            assert store.free(np.array(named, np.int64)) == len(gone)
            for handle in gone:
                del held[handle]
            dead = [*dead, *gone][-400:]
        else:
            shards = rng.sample(range(8), rng.randrange(3))
            dropped = store.drop_shards(shards).tolist()
            assert sorted(dropped) == sorted(handle for handle, row in held.items() if row["shard"] in shards)
            for handle in dropped:
                del held[handle]
            dead = [*dead, *dropped][-400:]
        if rng.random() < 0.3:
            check(store, held, dead)
    check(store, held, dead)


def check(store: EntryStore, held: dict[int, dict[str, int]], dead: list[int]) -> None:
    assert len(store) == len(held)
    assert store.room == 700 - len(held)
    handles = np.array(list(held), np.int64)
    assert store.alive(handles).all()
    assert not store.alive(np.array([*dead, MISSING, 5, 1 << 62], np.int64)).any()
    found = store.rows(handles)
    assert [row_at(found, place) for place in range(len(held))] == list(held.values())
    hi = np.array([row["ref_hi"] for row in held.values()], np.uint64)
    lo = np.array([row["ref_lo"] for row in held.values()], np.uint64)
    assert store.lookup(hi, lo).tolist() == list(held)
    wrong = np.uint64(1 << 63)
    assert (store.lookup(hi ^ wrong, lo) == MISSING).all()
    assert (store.lookup(hi, lo ^ wrong) == MISSING).all()


def test_a_freed_handle_is_not_taken_for_its_successor() -> None:
    store, rng = EntryStore(rows_max=1), random.Random(1)
    (first,) = store.add(rows_for([(1, 1)], rng))
    store.free(np.array([first]))
    while_free = first + (1 << 32)  # the generation of an empty slot names nothing
    assert store.alive(np.array([first, while_free])).tolist() == [False, False]
    (second,) = store.add(rows_for([(1, 1)], rng))
    assert store.slot(np.array([first, second])).tolist() == [0, 0]
    assert store.alive(np.array([first, second])).tolist() == [False, True]
    assert store.free(np.array([first])) == 0
    assert store.lookup(np.array([1], np.uint64), np.array([1], np.uint64)).tolist() == [second]


def test_a_full_store_takes_the_first_rows_and_gives_their_handles() -> None:
    store, rng = EntryStore(rows_max=10), random.Random(1)
    rows = rows_for([(0, number) for number in range(12)], rng)
    assert len(store.add(rows)) == 10
    assert len(store.add(rows)) == 0
    assert store.lookup(rows.ref_hi, rows.ref_lo)[10:].tolist() == [MISSING, MISSING]


def test_generations_wrap_without_a_negative_handle() -> None:
    store = EntryStore(rows_max=1)
    store._generation[0] = (1 << 31) - 2
    (last,) = store.allocate(1)
    assert last >> 32 == (1 << 31) - 1
    store.free(np.array([last]))
    (next_handle,) = store.allocate(1)
    assert next_handle >> 32 == 1
    assert store.alive(np.array([last, next_handle])).tolist() == [False, True]


def test_a_hundred_thousand_random_references_are_found_through_doublings_and_churn() -> None:
    rng = np.random.default_rng(2)
    store = EntryStore(rows_max=100_000)
    template = rows_for([(0, 0)], random.Random(1))
    hi, lo = rng.integers(0, 1 << 63, (2, 300_000)).astype(np.uint64)
    sizes = []
    for start in range(0, 300_000, 20_000):
        end = start + 20_000
        columns = {name: np.repeat(getattr(template, name), 20_000) for name in COLUMNS}
        columns |= {"ref_hi": hi[start:end], "ref_lo": lo[start:end]}
        assert len(store.add(TimerRows(**columns))) == 20_000
        if end >= 80_000:
            oldest = slice(end - 80_000, end - 60_000)
            handles = store.lookup(hi[oldest], lo[oldest])
            assert store.alive(handles).all()
            assert store.free(handles) == 20_000
        here = np.zeros(300_000, np.bool_)
        here[max(end - 60_000, 0) : end] = True
        assert ((store.lookup(hi, lo) != MISSING) == here).all()
        sizes.append(store.nbytes)
    assert sizes[-1] <= 1.01 * sizes[5]  # churn leaves nothing behind
