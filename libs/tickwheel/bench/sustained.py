"""How many recurring executions a second does the system sustain? Steps of offered load, until the lag
runs away."""

import argparse
import json
import time
from typing import Any

from tickwheel.bench import cluster as bench

SETTLE_S = 3.0
LEAD_US = 20_000_000
"""From storing the schedules to the first that is due: the timer is back by then, and has its worker."""
LAG_P95_MS_MAX = 1_000.0


def run(
    start: int = 15_000,
    step: int = 5_000,
    step_s: float = 10.0,
    rate_max: int = 80_000,
    workers: int = 1,
    timers: int = 1,
    capacity: int = 4_000,
) -> dict[str, Any]:
    """Adds `step` schedules of one second's interval at a time. The result holds each step and the best
    one."""
    steps: list[dict[str, Any]] = []
    offered = start
    while offered <= rate_max:
        steps.append(measure(offered, step_s, workers=workers, timers=timers, capacity=capacity))
        print(json.dumps(steps[-1]), flush=True)
        if steps[-1]["lag_p95_ms"] > LAG_P95_MS_MAX or steps[-1]["executions_per_s"] < 0.9 * offered:
            break
        offered += step
    return {"steps": steps, "executions_per_s": max(step["executions_per_s"] for step in steps)}


def measure(offered: int, step_s: float, *, workers: int, timers: int, capacity: int) -> dict[str, Any]:
    """One rate, on a cluster of its own: so many schedules that are due every second."""
    with bench.running(workers=workers, timers=timers, capacity=capacity) as (cluster, connection):
        kind = bench.store_kind(connection)
        first_us = bench.now_us(connection) + LEAD_US
        bench.add_schedules(connection, kind, offered, 1_000_000, first_us, "s")
        connection.execute("VACUUM ANALYZE timer")
        # The rows lie inside the horizon that is already loaded: a restart loads them as a failover would.
        for member in cluster.of("timer"):
            member.kill9()
            member.start()
        bench.wait_for_owners(connection, timers)
        time.sleep(max(0.0, (first_us - bench.now_us(connection)) / 1e6) + SETTLE_S)
        before, from_us = bench.usage(), bench.now_us(connection)
        time.sleep(step_s)
        after, until_us = bench.usage(), bench.now_us(connection)
        seen = bench.window(connection, from_us, until_us)
        return {
            "offered_per_s": offered,
            "executions_per_s": round(seen.rate),
            "lag_p50_ms": seen.lag_p50_ms,
            "lag_p95_ms": seen.lag_p95_ms,
            "lag_p99_ms": seen.lag_p99_ms,
            "cpu_us_each": bench.cpu_us_each(before, after, seen.executions),
            "memory_mib": {key: value >> 20 for key, value in sorted(after.memory_bytes.items())},
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--start", type=int, default=15_000)
    parser.add_argument("--step", type=int, default=5_000)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--timers", type=int, default=1)
    parser.add_argument("--capacity", type=int, default=4_000)
    options = parser.parse_args()
    found = run(
        options.start, options.step, workers=options.workers, timers=options.timers, capacity=options.capacity
    )
    print(json.dumps(found) if options.json else f"{found['executions_per_s']} executions/s")


if __name__ == "__main__":
    main()
