"""The plan is total, balanced, minimal and stable, whatever the timers and whoever holds the shards now."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from tickwheel.domain.assignment import Move, MoveReason, TimerInfo, apply, plan

TTL_US = 3_000_000
timer_ids = st.sampled_from([f"timer-{n}" for n in range(9)])
infos = st.builds(TimerInfo, capacity=st.integers(0, 8), load=st.integers(0, 100), draining=st.booleans())


@st.composite
def worlds(draw: st.DrawFn) -> tuple[dict[int, str], dict[str, TimerInfo], int]:
    """A shard count, timers (at least one able to take shards), and an assignment, dead owners included."""
    shard_count = draw(st.integers(1, 64))
    timers = draw(st.dictionaries(timer_ids, infos, max_size=8))
    timers["able"] = TimerInfo(capacity=draw(st.integers(1, 8)), load=draw(st.integers(0, 100)))
    owners = st.sampled_from([*timers, "dead-1", "dead-2"])
    current = draw(st.dictionaries(st.integers(0, shard_count - 1), owners, max_size=shard_count))
    return current, timers, shard_count


def _shares(timers: dict[str, TimerInfo], shard_count: int) -> dict[str, Fraction]:
    able = {name: info.capacity for name, info in timers.items() if not info.draining and info.capacity}
    return {name: Fraction(shard_count * weight, sum(able.values())) for name, weight in able.items()}


@given(worlds())
def test_every_shard_has_a_live_owner_after_a_plan(
    world: tuple[dict[int, str], dict[str, TimerInfo], int],
) -> None:
    current, timers, shard_count = world
    after = apply(current, plan(current, timers, shard_count, drain_moves_max=0, rebalance_moves_max=0))
    assert set(after) == set(range(shard_count))
    assert set(after.values()) <= set(timers)


@given(worlds())
def test_an_unlimited_plan_leaves_everybody_within_one_shard_of_the_fair_share(
    world: tuple[dict[int, str], dict[str, TimerInfo], int],
) -> None:
    current, timers, shard_count = world
    held = Counter(apply(current, plan(current, timers, shard_count)).values())
    shares = _shares(timers, shard_count)
    assert set(held) <= set(shares)
    assert all(abs(held[timer] - share) < 1 for timer, share in shares.items())


@given(worlds())
def test_a_plan_that_was_carried_out_asks_for_nothing_more(
    world: tuple[dict[int, str], dict[str, TimerInfo], int],
) -> None:
    current, timers, shard_count = world
    after = apply(current, plan(current, timers, shard_count))
    assert plan(after, timers, shard_count) == ()
    # Load drifts all the time; it must not move a shard.
    drifted = {
        name: TimerInfo(info.capacity, 100 - info.load, info.draining) for name, info in timers.items()
    }
    assert plan(after, drifted, shard_count) == ()


@given(worlds())
def test_no_plan_with_fewer_moves_is_balanced(
    world: tuple[dict[int, str], dict[str, TimerInfo], int],
) -> None:
    current, timers, shard_count = world
    moves = plan(current, timers, shard_count)
    assert len({move.shard for move in moves}) == len(moves)
    shares = _shares(timers, shard_count)
    held = Counter(owner for owner in current.values() if owner in shares)
    must_find_a_home = shard_count - sum(held.values())
    # Above the ceiling of its share everyone gives; of those above their floor only as many may keep a
    # rounded-up share as there are extra shards.
    floors = {timer: int(share) for timer, share in shares.items()}
    extras = shard_count - sum(floors.values())
    may_keep_one_more = [
        timer for timer in shares if held[timer] > floors[timer] and shares[timer] != floors[timer]
    ]
    surplus = sum(max(0, held[timer] - floors[timer]) for timer in shares)
    assert len(moves) == must_find_a_home + surplus - min(extras, len(may_keep_one_more))


@given(worlds(), st.integers(0, 5), st.integers(0, 5))
def test_drains_and_rebalancing_keep_to_their_limits_and_still_arrive(
    world: tuple[dict[int, str], dict[str, TimerInfo], int], drain_moves_max: int, rebalance_moves_max: int
) -> None:
    current, timers, shard_count = world
    after = dict(current)
    passes = 0
    while moves := plan(
        after,
        timers,
        shard_count,
        drain_moves_max=drain_moves_max + 1,
        rebalance_moves_max=rebalance_moves_max + 1,
    ):
        reasons = Counter(move.reason for move in moves)
        assert reasons[MoveReason.DRAIN] <= drain_moves_max + 1
        assert reasons[MoveReason.REBALANCE] <= rebalance_moves_max + 1
        after = apply(after, moves)
        passes += 1
        assert passes <= 2 * shard_count, "the plan goes round in circles"
    assert after == apply(after, plan(after, timers, shard_count))


@given(worlds(), st.data())
def test_rebalancing_leaves_a_shard_where_it_is_for_two_lease_ttls(
    world: tuple[dict[int, str], dict[str, TimerInfo], int], data: st.DataObject
) -> None:
    current, timers, shard_count = world
    now_us = 10 * TTL_US
    moved_at_us = {shard: data.draw(st.integers(0, now_us)) for shard in current}
    moves = plan(current, timers, shard_count, moved_at_us=moved_at_us, now_us=now_us, hold_us=2 * TTL_US)
    for move in moves:
        if move.reason is MoveReason.REBALANCE:
            assert moved_at_us[move.shard] <= now_us - 2 * TTL_US
    # Deaths and drains do not wait.
    unlimited = plan(current, timers, shard_count)
    assert [move for move in moves if move.reason is not MoveReason.REBALANCE] == [
        move for move in unlimited if move.reason is not MoveReason.REBALANCE
    ]


def test_the_shards_of_a_dead_timer_go_to_the_least_loaded_survivors() -> None:
    current = {0: "a", 1: "a", 2: "a", 3: "b", 4: "dead", 5: "dead"}
    moves = plan(current, {"a": TimerInfo(1), "b": TimerInfo(1)}, 6)
    assert moves == (Move(4, "dead", "b", MoveReason.OWNER_DEAD), Move(5, "dead", "b", MoveReason.OWNER_DEAD))


def test_equal_timers_receive_by_their_reported_load() -> None:
    moves = plan({}, {"busy": TimerInfo(1, load=90), "idle": TimerInfo(1, load=1)}, 1)
    assert moves == (Move(0, None, "idle", MoveReason.UNOWNED),)


def test_without_a_live_timer_the_assignments_stand() -> None:
    assert plan({0: "dead"}, {}, 4) == ()


def test_a_drain_with_nowhere_to_go_moves_nothing() -> None:
    assert plan({0: "a", 1: "a"}, {"a": TimerInfo(1, draining=True)}, 2) == ()
    assert plan({0: "a"}, {"a": TimerInfo(1, draining=True)}, 2) == (Move(1, None, "a", MoveReason.UNOWNED),)
