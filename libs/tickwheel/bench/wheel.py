"""What the wheel, ready queues and entry store cost. `python -m tickwheel.bench.wheel --json`.

Everything is pure and single-threaded, so times are CPU seconds of this process: what else runs on the
machine does not count. Rates are medians of several repeats; each `_max` is the worst call of a run.
"""

import argparse
import gc
import json
import statistics
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np

from tickwheel.domain.timer_rows import COLUMNS, TimerRows
from tickwheel.services.timer.entries import EntryStore
from tickwheel.services.timer.ready import ReadyQueues
from tickwheel.services.timer.wheel import TimingWheel

REPEATS = 5
TIMERS = 1_000_000
PAGE_ROWS = 20_000
"""Rows in one page of the loader."""
BATCH_ROWS = 1_000
"""Rows in one grant batch, each of which arms a lease."""
HORIZON_US = 120_000_000
START_US = 1_790_000_000_000_000


def median_s(measure: Callable[[], float]) -> float:
    def clean() -> float:
        gc.collect()
        return measure()

    return statistics.median(clean() for _ in range(REPEATS))


def filled(rows_each: int, spread_us: int = HORIZON_US) -> tuple[TimingWheel, float]:
    """A wheel with `TIMERS` timers at random instants, and the seconds that the inserts took."""
    rng = np.random.default_rng(1)
    due = START_US + rng.integers(0, spread_us, TIMERS)
    items = np.arange(TIMERS)
    wheel = TimingWheel(START_US)
    began = time.process_time()
    for at in range(0, TIMERS, rows_each):
        wheel.insert(due[at : at + rows_each], items[at : at + rows_each])
    return wheel, time.process_time() - began


def bytes_per_timer(rows_each: int, *, cancels: bool = False) -> float:
    """Measured by the allocator, not by the wheel's own account; with a cancel the wheel keeps an index."""
    rng = np.random.default_rng(1)
    due = START_US + rng.integers(0, HORIZON_US, TIMERS)
    items = np.arange(TIMERS)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    wheel = TimingWheel(START_US)
    for at in range(0, TIMERS, rows_each):
        wheel.insert(due[at : at + rows_each], items[at : at + rows_each])
        if cancels:
            wheel.cancel(items[at : at + 1])
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return (after - before) / len(wheel)


def tick_costs() -> dict[str, float]:
    """Advance a full wheel tick by tick. In the longest call a slot falls."""
    wheel, _ = filled(PAGE_ROWS)
    calls, rows = [], 0
    for now_us in range(START_US, START_US + 30_000_000, 10_000):
        began = time.process_time()
        due, _ = wheel.advance(now_us)
        calls.append(time.process_time() - began)
        rows += len(due)
    return {
        "tick_us_median": statistics.median(calls) * 1e6,
        "tick_us_max": max(calls) * 1e6,
        "advance_rows_per_s": rows / sum(calls),
    }


def idle_costs() -> dict[str, float]:
    """A tick of a wheel whose timers are all hours away, and a jump over a day that takes a million."""
    wheel = TimingWheel(START_US)
    wheel.insert(np.full(TIMERS, START_US + 7_200_000_000), np.arange(TIMERS))
    ticks = 10_000
    began = time.process_time()
    for tick in range(ticks):
        wheel.advance(START_US + tick * 10_000)
    idle_s = (time.process_time() - began) / ticks
    wheel, _ = filled(PAGE_ROWS, spread_us=3_600_000_000)
    began = time.process_time()
    due, _ = wheel.advance(START_US + 86_400_000_000)
    jump_s = time.process_time() - began
    assert len(due) == TIMERS
    return {"idle_tick_us": idle_s * 1e6, "jump_over_a_million_ms": jump_s * 1e3}


def burst_costs() -> dict[str, float]:
    """A million due within one second, taken 2,000 at a time; in the longest call they fall."""
    wheel = TimingWheel(START_US)
    rng = np.random.default_rng(1)
    wheel.insert(START_US + 60_000_000 + np.sort(rng.integers(0, 1_000_000, TIMERS)), np.arange(TIMERS))
    calls, now_us = [], START_US + 50_000_000
    while len(wheel):
        now_us += 2_000
        began = time.process_time()
        wheel.advance(now_us, 2_000)
        calls.append(time.process_time() - began)
    return {"burst_rows_per_s": TIMERS / sum(calls), "burst_call_ms_max": max(calls) * 1e3}


def lease_costs() -> dict[str, float]:
    """Leases of a busy node: armed for 10 s in batches, cancelled a second later."""
    wheel = TimingWheel(START_US)
    batches, held, cancelled = 600, 60, 0
    began = time.process_time()
    for batch in range(batches):
        now_us = START_US + batch * 16_000
        items = np.arange(BATCH_ROWS) + batch * BATCH_ROWS
        wheel.insert(np.full(BATCH_ROWS, now_us + 10_000_000), items)
        wheel.advance(now_us)
        if batch >= held:
            cancelled += wheel.cancel(items - held * BATCH_ROWS)
    spent = time.process_time() - began
    assert cancelled == (batches - held) * BATCH_ROWS
    return {"arm_and_cancel_rows_per_s": batches * BATCH_ROWS / spent}


def ready_rows_per_s(tenants: int, rows_each: int, take_rows: int) -> float:
    """Rows pushed and taken a second: batches of `rows_each` for each tenant, emptied by takes."""
    rows = tenants * rows_each
    tenant = np.random.default_rng(1).permutation(np.repeat(np.arange(tenants, dtype=np.int32), rows_each))
    handle, route, priority = np.arange(rows), np.ones(rows, np.int32), np.full(rows, 5, np.int8)
    due = START_US + np.arange(rows)
    queues, turns = ReadyQueues(), max(200_000 // rows, 1)
    began = time.process_time()
    for _ in range(turns):
        queues.push(handle, route, tenant, priority, due)
        while len(queues.take(take_rows, [1], None, START_US)):
            pass
    spent = time.process_time() - began
    assert not queues.depth()
    return turns * rows / spent


def ready_backlog_take_us(tenants: int, take_rows: int) -> float:
    """One take while a million rows wait in two routes and three priorities."""
    rng = np.random.default_rng(1)
    queues = ReadyQueues()
    queues.push(
        np.arange(TIMERS),
        rng.integers(1, 3, TIMERS, np.int32),
        rng.integers(0, tenants, TIMERS, np.int32),
        rng.integers(4, 7, TIMERS, np.int8),
        START_US + np.arange(TIMERS),
    )
    calls = []
    for _ in range(100):
        began = time.process_time()
        queues.take(take_rows, [1, 2], None, START_US)
        calls.append(time.process_time() - began)
    return statistics.median(calls) * 1e6


def entry_pages() -> list[TimerRows]:
    rng = np.random.default_rng(1)
    store = EntryStore(rows_max=1)
    pages = []
    for _ in range(0, TIMERS, PAGE_ROWS):
        columns = {name: np.ones(PAGE_ROWS, getattr(store, name).dtype) for name in COLUMNS}
        for half in ("ref_hi", "ref_lo"):
            columns[half] = rng.integers(0, 1 << 63, PAGE_ROWS).astype(np.uint64)
        pages.append(TimerRows(**columns))
    return pages


def entry_costs() -> dict[str, float]:
    """A million rows added in pages of the loader, looked up, asked whether they live, freed in batches."""
    pages = entry_pages()
    spent: dict[str, list[float]] = {"add": [], "lookup": [], "alive": [], "free": []}
    page_ms_max = bytes_each = 0.0
    for _ in range(REPEATS):
        store, handles = EntryStore(rows_max=TIMERS, rows_initial=TIMERS), []
        seconds = dict.fromkeys(spent, 0.0)
        for page in pages:
            began = time.process_time()
            handles.append(store.add(page))
            took = time.process_time() - began
            seconds["add"] += took
            page_ms_max = max(page_ms_max, took * 1e3)
        bytes_each = store.nbytes / len(store)
        for page in pages:
            began = time.process_time()
            store.lookup(page.ref_hi, page.ref_lo)
            seconds["lookup"] += time.process_time() - began
        for page_handles in handles:
            began = time.process_time()
            store.alive(page_handles)
            seconds["alive"] += time.process_time() - began
            began = time.process_time()
            for batch in np.array_split(page_handles, PAGE_ROWS // BATCH_ROWS):
                store.free(batch)
            seconds["free"] += time.process_time() - began
        for name, took in seconds.items():
            spent[name].append(took)
    rates = {f"entries_{name}_rows_per_s": TIMERS / statistics.median(took) for name, took in spent.items()}
    return {**rates, "entries_bytes_per_row": bytes_each, "entries_add_page_ms_max": page_ms_max}


def median(measure: Callable[[], float]) -> float:
    return statistics.median(measure() for _ in range(REPEATS))


def run() -> dict[str, Any]:
    """All figures, by name; units in the names."""
    return {
        "insert_pages_rows_per_s": TIMERS / median_s(lambda: filled(PAGE_ROWS)[1]),
        "insert_batches_rows_per_s": TIMERS / median_s(lambda: filled(BATCH_ROWS)[1]),
        "insert_one_call_rows_per_s": TIMERS / median_s(lambda: filled(TIMERS)[1]),
        "bytes_per_timer_pages": bytes_per_timer(PAGE_ROWS),
        "bytes_per_timer_batches": bytes_per_timer(BATCH_ROWS),
        "bytes_per_timer_with_cancels": bytes_per_timer(BATCH_ROWS, cancels=True),
        **tick_costs(),
        **idle_costs(),
        **burst_costs(),
        **lease_costs(),
        **entry_costs(),
        "ready_one_tenant_rows_per_s": median(lambda: ready_rows_per_s(1, 1_000, 1_000)),
        "ready_two_tenants_rows_per_s": median(lambda: ready_rows_per_s(2, 1_000, 1_000)),
        "ready_1000_tenants_of_10_rows_per_s": median(lambda: ready_rows_per_s(1_000, 10, 1_000)),
        "ready_1000_tenants_of_3_rows_per_s": median(lambda: ready_rows_per_s(1_000, 3, 1_000)),
        "ready_1000_tenants_of_1_rows_per_s": median(lambda: ready_rows_per_s(1_000, 1, 1_000)),
        "ready_backlog_1_tenant_take_1000_us": ready_backlog_take_us(1, 1_000),
        "ready_backlog_1000_tenants_take_1000_us": ready_backlog_take_us(1_000, 1_000),
        "ready_backlog_1000_tenants_take_1_us": ready_backlog_take_us(1_000, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    figures = run()
    if parser.parse_args().json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:32} {value:16,.1f}")


if __name__ == "__main__":
    main()
