"""What next fire times cost. `python -m tickwheel.bench.triggers --json`.

The engine is pure and runs on one core, so times are CPU seconds of this process. Rates are medians of
repeats.

The *mix* replays how a timer asks: 50,000 schedules over 2,000 triggers, the popular ones shared by many
(Zipf), most of them cron, a fifth intervals, in ten zones; every simulated minute all schedules that are due
ask for their next occurrence in one batch. *Distinct* asks 20,000 triggers that share nothing, one by one,
each time from a base that no memory covers; *cold* parses and compiles them as well.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from typing import Any

import numpy as np

from tickwheel.domain import cron
from tickwheel.domain import trigger as triggers
from tickwheel.domain.misfire import MisfirePolicy, MisfireRules, decide
from tickwheel.domain.trigger import CompiledTrigger, Cron, Interval, Trigger, TriggerSet

REPEATS = 5
SCHEDULE_COUNT = 50_000
MIX_TRIGGER_COUNT = 2_000
MIX_MINUTES = 24 * 60
DISTINCT_COUNT = 20_000
START_US = 1_790_000_000 * 1_000_000
MINUTE_US = 60 * 1_000_000
DAY_US = 86_400 * 1_000_000
MIX_PER_S_MIN = 200_000
DISTINCT_PER_S_MIN = 50_000

_ZONES = (
    *("UTC", "Europe/Berlin", "America/New_York", "Asia/Tokyo", "Australia/Sydney"),
    *("Europe/London", "Asia/Kolkata", "America/Sao_Paulo", "America/Los_Angeles", "Africa/Cairo"),
)
_POPULAR = (
    "0 0 * * *",
    "0 * * * *",
    "*/5 * * * *",
    "*/15 * * * *",
    "0 9 * * 1-5",
    "* * * * *",
    "0 2 * * 0",
    "0 0 1 * *",
)


def _random_cron(draw: random.Random) -> str:
    minute, hour = draw.randrange(60), draw.randrange(24)
    return draw.choice(
        (
            f"{minute} {hour} * * *",
            f"{minute} {hour} * * {draw.choice(('1-5', '0', 'MON,THU', '6'))}",
            f"{minute} {hour} {draw.randrange(1, 29)} * *",
            f"{minute} */{draw.randrange(2, 12)} * * *",
            f"*/{draw.randrange(2, 30)} {draw.randrange(9)}-{draw.randrange(10, 23)} * * *",
            f"{minute} {hour} {draw.choice(('L', 'LW', '15W'))} {draw.randrange(1, 13)} *",
        )
    )


def _mix(draw: random.Random) -> list[CompiledTrigger]:
    made: list[CompiledTrigger] = []
    for index in range(MIX_TRIGGER_COUNT):
        if index >= len(_POPULAR) and index % 5 == 0:
            duration_us = draw.choice((30, 60, 300, 900, 3_600)) * 1_000_000
            trigger = Trigger(interval=Interval(duration_us, START_US - draw.randrange(DAY_US)))
        else:
            expression = _POPULAR[index] if index < len(_POPULAR) else _random_cron(draw)
            trigger = Trigger(cron=Cron(expression), time_zone=draw.choice(_ZONES))
        made.append(triggers.compile(TriggerSet((trigger,))))
    return made


def measure_mix() -> tuple[float, int]:
    """Next occurrences a second, and how many were computed, over a simulated day."""
    draw = random.Random(1)
    compiled = _mix(draw)
    ranks = np.random.default_rng(1).zipf(1.3, SCHEDULE_COUNT)
    index = ((ranks - 1) % MIX_TRIGGER_COUNT).astype(np.intp)
    due_us = triggers.next_after_grouped(compiled, index, np.full(SCHEDULE_COUNT, START_US, dtype=np.int64))
    computed, spent_s = 0, 0.0
    for minute in range(1, MIX_MINUTES + 1):
        rows = np.flatnonzero(due_us <= START_US + minute * MINUTE_US)
        if len(rows) == 0:
            continue
        began_s = time.process_time()
        found_us = triggers.next_after_grouped(compiled, index[rows], due_us[rows])
        spent_s += time.process_time() - began_s
        assert (found_us > due_us[rows]).all()
        due_us[rows] = found_us
        computed += len(rows)
    return computed / spent_s, computed


def _distinct_sets() -> list[TriggerSet]:
    draw = random.Random(2)
    found: set[tuple[str, str]] = set()
    while len(found) < DISTINCT_COUNT:
        found.add((_random_cron(draw), draw.choice(_ZONES)))
    return [
        TriggerSet((Trigger(cron=Cron(expression), time_zone=time_zone),))
        for expression, time_zone in sorted(found)
    ]


def measure_distinct(compiled: list[CompiledTrigger], round_number: int) -> float:
    """Next occurrences a second where no two triggers are alike; each round's bases lie 400 days further
    on.
    """
    draw = random.Random(round_number)
    bases_us = [START_US + round_number * 400 * DAY_US + draw.randrange(DAY_US) for _ in compiled]
    began_s = time.process_time()
    for trigger, base_us in zip(compiled, bases_us, strict=True):
        trigger.next_after(base_us)
    return len(compiled) / (time.process_time() - began_s)


def measure_cold(sets: list[TriggerSet]) -> float:
    """The same with parsing and compiling each trigger first."""
    cron.parse.cache_clear()
    began_s = time.process_time()
    for trigger_set in sets:
        triggers.compile(trigger_set).next_after(START_US)
    return len(sets) / (time.process_time() - began_s)


def measure_missed_ms() -> float:
    """Milliseconds to decide 10,000 missed occurrences of a minutely schedule."""
    compiled = triggers.compile(TriggerSet((Trigger(cron=Cron("* * * * *"), time_zone="Europe/Berlin"),)))
    rules = MisfireRules(MisfirePolicy.FIRE_ALL, catchup_us=30 * DAY_US, catchup_count_max=10_000)
    began_s = time.process_time()
    decision = decide(compiled, START_US, START_US + 10_000 * MINUTE_US, rules)
    assert len(decision.runs_us) == 10_000
    return (time.process_time() - began_s) * 1_000


def run() -> dict[str, Any]:
    """The figures, with the goals they are held to."""
    sets = _distinct_sets()
    compiled = [triggers.compile(trigger_set) for trigger_set in sets]
    gc.collect()
    mixes = [measure_mix() for _ in range(3)]
    distinct = [measure_distinct(compiled, round_number) for round_number in range(REPEATS)]
    mix_per_s = statistics.median(rate for rate, _ in mixes)
    distinct_per_s = statistics.median(distinct)
    return {
        "mix_per_s": round(mix_per_s),
        "mix_computed": mixes[0][1],
        "mix_per_s_min": MIX_PER_S_MIN,
        "distinct_per_s": round(distinct_per_s),
        "distinct_per_s_min": DISTINCT_PER_S_MIN,
        "cold_per_s": round(statistics.median(measure_cold(sets) for _ in range(3))),
        "missed_10000_ms": round(statistics.median(measure_missed_ms() for _ in range(REPEATS)), 2),
        "passed": mix_per_s >= MIX_PER_S_MIN and distinct_per_s >= DISTINCT_PER_S_MIN,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    figures = run()
    if arguments.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:24} {value:>12}")


if __name__ == "__main__":
    main()
