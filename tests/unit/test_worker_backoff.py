"""G-O09: two hundred workers whose timer was away for ten seconds do not come back in step."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tickwheel.worker.backoff import FIRST_S, LONGEST_S, Backoff

WORKERS = 200
AWAY_S = 10.0


@pytest.mark.parametrize("seed", [random.Random().randrange(1 << 32) for _ in range(10)])
def test_workers_come_back_spread_out_and_soon(seed: int) -> None:
    print(f"seed {seed}")
    back_s = []
    for worker in range(WORKERS):
        backoff = Backoff(random_=random.Random(seed + worker))
        now_s = 0.0
        while now_s < AWAY_S:
            now_s += backoff.next_delay_s()
        back_s.append(now_s - AWAY_S)
    assert max(back_s) <= LONGEST_S
    # Any window of 500 ms lies within six neighbouring ones of 100 ms.
    bins = Counter(int(moment / 0.1) for moment in back_s)
    windows = [sum(bins[start + step] for step in range(6)) for start in range(int(LONGEST_S / 0.1) + 1)]
    assert max(windows) <= 0.4 * WORKERS


def test_delays_double_up_to_a_bound_and_start_over_only_when_told() -> None:
    class Most(random.Random):
        def uniform(self, a: float, b: float) -> float:
            return b

    backoff = Backoff(random_=Most())
    delays = [backoff.next_delay_s() for _ in range(40)]
    assert delays[:3] == [FIRST_S, FIRST_S * 2, FIRST_S * 4]
    assert delays[-1] == LONGEST_S
    assert delays == sorted(delays)
    backoff.reset()
    assert backoff.next_delay_s() == FIRST_S
