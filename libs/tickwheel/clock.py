"""The only reader of time.

Two kinds, of different types in meaning though both are int microseconds: `mono_us` counts from an
arbitrary start and is for durations and deadlines on this machine; `ClusterClock.now_us` is the cluster's
date, anchored in Postgres' clock. A wall clock of this host is never read for a decision: a jump of it
changes nothing (design, section 9).
"""

import asyncio
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

SAMPLES_KEPT = 12
SLEW_PPM = 500
SKEW_WARNING_US = 500_000


def mono_us() -> int:
    """This machine's monotonic clock; it may stand still while the machine is suspended."""
    return time.monotonic_ns() // 1_000


_BOOT_CLOCK = getattr(time, "CLOCK_BOOTTIME", None)


def boot_us() -> int:
    """As `mono_us`, and it goes on while the machine is suspended, where the platform has such a clock: a
    worker counts its leases by it.
    """
    if _BOOT_CLOCK is None:
        return mono_us()
    return time.clock_gettime_ns(_BOOT_CLOCK) // 1_000


def wall_us() -> int:
    """This host's wall clock, for logs and for telling how far it is off. Never for a decision."""
    return time.time_ns() // 1_000


def random_bytes(count: int) -> bytes:
    return os.urandom(count)


@dataclass(frozen=True, slots=True)
class Sample:
    """One reading of the reference clock: the offset to our monotonic clock, at the midpoint of the round
    trip."""

    taken_mono_us: int
    offset_us: int
    round_trip_us: int


class ClusterClock:
    """Postgres' date on our monotonic clock.

    Of the last samples the one with the shortest round trip counts, for a busy server answers late. The
    offset in force moves towards it by at most `SLEW_PPM`, and `now_us` never goes back. An offset that is
    off by more than `SKEW_WARNING_US` is a jump of the reference: it is reported (`jump_us`) and not
    followed.
    """

    def __init__(self, read_mono_us: Callable[[], int] = mono_us) -> None:
        self._mono_us = read_mono_us
        self._samples: deque[Sample] = deque(maxlen=SAMPLES_KEPT)
        self._offset_us: int | None = None
        self._slewed_mono_us = 0
        self._last_us = 0
        self.uncertainty_us = 0
        """Half the round trip of the sample in force: the true date is within so much of `now_us`."""
        self.jump_us = 0
        """How far the reference is from what is followed, when that is too far; else 0."""

    @property
    def is_set(self) -> bool:
        return self._offset_us is not None

    @property
    def skew_us(self) -> int:
        """This host's wall clock minus the cluster's date."""
        return wall_us() - self.now_us()

    def now_us(self) -> int:
        """The cluster's date. Call it only once the clock is set."""
        assert self._offset_us is not None, "the cluster clock has not been set"
        now = self._mono_us() + self._offset_us
        self._last_us = max(self._last_us, now)
        return self._last_us

    def take(self, sample: Sample) -> None:
        """Takes one reading in."""
        self._samples.append(sample)
        best = min(self._samples, key=lambda s: (s.round_trip_us, -s.taken_mono_us))
        if self._offset_us is None:
            self._offset_us = best.offset_us
            self._slewed_mono_us = sample.taken_mono_us
            self.uncertainty_us = best.round_trip_us // 2
            return
        wanted = best.offset_us - self._offset_us
        if abs(sample.offset_us - self._offset_us) > SKEW_WARNING_US:
            self.jump_us = sample.offset_us - self._offset_us
            self._samples.pop()
            # Time in which nothing was followed gives no right to a larger step later.
            self._slewed_mono_us = sample.taken_mono_us
            return
        self.jump_us = 0
        elapsed = max(0, sample.taken_mono_us - self._slewed_mono_us)
        step = elapsed * SLEW_PPM // 1_000_000
        self._offset_us += max(-step, min(step, wanted))
        self._slewed_mono_us = sample.taken_mono_us
        self.uncertainty_us = best.round_trip_us // 2 + abs(wanted) - min(abs(wanted), step)

    async def sample(self, read_us: Callable[[], Awaitable[int]]) -> None:
        """Reads the reference once; `read_us` raises what it likes, and then nothing has changed."""
        before = self._mono_us()
        date = await read_us()
        after = self._mono_us()
        self.take(Sample(after, date - (before + after) // 2, after - before))

    async def run(
        self,
        read_us: Callable[[], Awaitable[int]],
        interval_ms: int,
        on_error: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        """Keeps the clock until it is cancelled."""
        while True:
            try:
                await self.sample(read_us)
            except Exception as error:
                on_error(error)
            await asyncio.sleep(interval_ms / 1_000)
