"""The cluster clock, for any samples: it never goes back, is slewed and not stepped, and follows no jump."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tickwheel.clock import SKEW_WARNING_US, SLEW_PPM, ClusterClock, Sample

BASE_US = 1_900_000_000_000_000

# (microseconds until the reading, its offset's error, its round trip)
READINGS = st.lists(
    st.tuples(st.integers(0, 10_000_000), st.integers(-500_000, 500_000), st.integers(0, 400_000)),
    min_size=1,
    max_size=30,
)


class Machine:
    """A monotonic clock that stands where it is put."""

    def __init__(self) -> None:
        self.now_us = 5_000_000

    def mono_us(self) -> int:
        return self.now_us


@given(readings=READINGS)
@example(readings=[(0, 18_118, 0), (2_001, -481_883, 0), (1_999, 0, 0)])
def test_it_never_goes_back_and_is_slewed_by_a_bounded_rate(readings: list[tuple[int, int, int]]) -> None:
    machine = Machine()
    clock = ClusterClock(machine.mono_us)
    before: int | None = None
    for wait_us, error_us, round_trip_us in readings:
        machine.now_us += wait_us
        clock.take(Sample(machine.now_us, BASE_US + error_us, round_trip_us))
        now_us = clock.now_us()
        if before is not None:
            allowed_us = wait_us * SLEW_PPM // 1_000_000 + 1
            assert before <= now_us
            assert abs(now_us - (before + wait_us)) <= allowed_us
        before = now_us


@given(readings=READINGS, offset_us=st.integers(-(10**6), 10**6))
def test_honest_samples_keep_the_true_date_within_the_uncertainty(
    readings: list[tuple[int, int, int]], offset_us: int
) -> None:
    """An honest reading errs by at most half its round trip, for the date was read somewhere within it."""
    machine = Machine()
    clock = ClusterClock(machine.mono_us)
    true_offset_us = BASE_US + offset_us
    for wait_us, error_us, round_trip_us in readings:
        machine.now_us += wait_us
        bound_us = round_trip_us // 2
        honest_us = max(-bound_us, min(bound_us, error_us))
        clock.take(Sample(machine.now_us, true_offset_us + honest_us, round_trip_us))
        assert clock.jump_us == 0
        assert abs(clock.now_us() - (machine.now_us + true_offset_us)) <= clock.uncertainty_us + 1


@given(before=st.integers(1, 20), jump_us=st.integers(SKEW_WARNING_US + 1, 10**12), back=st.booleans())
def test_a_jump_of_the_reference_is_alarmed_and_not_followed(before: int, jump_us: int, back: bool) -> None:
    machine = Machine()
    clock = ClusterClock(machine.mono_us)
    for _ in range(before):
        machine.now_us += 1_000_000
        clock.take(Sample(machine.now_us, BASE_US, 1_000))
    jump_us = -jump_us if back else jump_us
    for _ in range(15):
        machine.now_us += 1_000_000
        clock.take(Sample(machine.now_us, BASE_US + jump_us, 10))
        assert clock.jump_us == jump_us
        assert clock.now_us() == machine.now_us + BASE_US
    machine.now_us += 1_000_000
    clock.take(Sample(machine.now_us, BASE_US, 1_000))
    assert clock.jump_us == 0


def test_the_shortest_round_trip_counts_and_a_slow_server_does_not() -> None:
    machine = Machine()
    clock = ClusterClock(machine.mono_us)
    clock.take(Sample(machine.now_us, BASE_US, 200))
    for _ in range(8):
        machine.now_us += 5_000_000
        clock.take(Sample(machine.now_us, BASE_US + 100_000, 250_000))
    assert clock.now_us() == machine.now_us + BASE_US
    assert clock.uncertainty_us == 100


def test_a_drift_is_followed_once_the_old_samples_are_forgotten() -> None:
    machine = Machine()
    clock = ClusterClock(machine.mono_us)
    for _ in range(40):
        machine.now_us += 5_000_000
        clock.take(Sample(machine.now_us, BASE_US, 200))
    for _ in range(40):
        machine.now_us += 5_000_000
        clock.take(Sample(machine.now_us, BASE_US + 3_000, 300))
    assert clock.now_us() == machine.now_us + BASE_US + 3_000


async def test_a_reading_counts_at_the_middle_of_its_round_trip_and_a_failed_one_not_at_all() -> None:
    machine = Machine()
    clock = ClusterClock(machine.mono_us)

    async def read() -> int:
        machine.now_us += 400
        return BASE_US + 200

    async def fail() -> int:
        raise OSError("away")

    with pytest.raises(OSError, match="away"):
        await clock.sample(fail)
    assert not clock.is_set
    began_us = machine.now_us
    await clock.sample(read)
    assert clock.now_us() == BASE_US + 400
    assert clock.uncertainty_us == 200
    assert machine.now_us == began_us + 400


def test_a_clock_that_is_not_set_gives_no_date() -> None:
    with pytest.raises(AssertionError, match="has not been set"):
        ClusterClock().now_us()
