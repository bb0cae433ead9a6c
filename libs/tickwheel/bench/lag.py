"""How late is work that is due, at a steady thousand a second, with many schedules stored?"""

import time
from typing import Any

from tickwheel.bench import cluster as bench

RATE = 1_000
SETTLE_S = 10.0


def run(stored: int = 1_000_000, seconds: float = 30.0) -> dict[str, Any]:
    """`stored` schedules, of which a thousand are due each second, 50 every 50 ms."""
    interval_us = stored * 1_000_000 // RATE
    with bench.running(capacity=1_000) as (cluster, connection):
        kind = bench.store_kind(connection)
        began = time.monotonic()
        phases = stored // 50
        bench.add_schedules(
            connection, kind, stored, interval_us, bench.now_us(connection) + 5_000_000, "l", phases
        )
        connection.execute("VACUUM ANALYZE timer")
        stored_s = time.monotonic() - began
        for member in cluster.of("timer"):
            member.kill9()
            member.start()
        bench.wait_for_owners(connection, 1)
        time.sleep(SETTLE_S)
        before, from_us = bench.usage(), bench.now_us(connection)
        time.sleep(seconds)
        after, until_us = bench.usage(), bench.now_us(connection)
        seen = bench.window(connection, from_us, until_us)
        return {
            "stored": stored,
            "stored_in_s": round(stored_s, 1),
            "executions_per_s": round(seen.rate),
            "lag_p50_ms": seen.lag_p50_ms,
            "lag_p95_ms": seen.lag_p95_ms,
            "lag_p99_ms": seen.lag_p99_ms,
            "cpu_us_each": bench.cpu_us_each(before, after, seen.executions),
            "memory_mib": {key: value >> 20 for key, value in sorted(after.memory_bytes.items())},
        }
