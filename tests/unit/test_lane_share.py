"""How scarce credit is dealt out among the lanes of a timer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tickwheel.services.timer.lane import fair_part

COUNTS = st.integers(0, 5_000)


@given(COUNTS, COUNTS, COUNTS, st.floats(0, 1))
def test_a_part_is_never_more_than_the_credit(credit: int, mine: int, others: int, carry: float) -> None:
    part, owed = fair_part(credit, mine, others, carry)
    assert 0 <= part <= credit
    assert 0 <= owed <= 1


@given(COUNTS, COUNTS)
def test_credit_that_is_enough_is_not_dealt_out(mine: int, others: int) -> None:
    assert fair_part(mine + others, mine, others, 0.0)[0] == mine + others


def test_one_at_a_time_is_dealt_out_by_what_waits() -> None:
    carry, taken = 0.0, 0
    for _ in range(1_000):
        part, carry = fair_part(1, 300, 100, carry)
        taken += part
    assert 749 <= taken <= 750


@given(st.integers(1, 50), st.integers(200, 3_000), st.integers(200, 3_000))
def test_lanes_of_unlike_backlog_are_done_at_about_the_same_time(
    credit: int, first: int, second: int
) -> None:
    depths, carries, turn = [first, second], [0.5, 0.5], 0
    while min(depths) > 0:
        left = credit
        for lane in (turn % 2, 1 - turn % 2):
            part, carries[lane] = fair_part(left, depths[lane], depths[1 - lane], carries[lane])
            part = min(part, depths[lane])
            depths[lane] -= part
            left -= part
        turn += 1
    assert max(depths) <= max(first, second) // 4 + 2 * credit
