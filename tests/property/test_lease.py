"""For any delays, clock zeros and losses: the worker never counts a lease longer than its timer does."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from tickwheel.domain.lease import (
    ClockEcho,
    HeldDigest,
    HeldHistory,
    TimerMonoUs,
    WorkerMonoUs,
    tightest_echo,
    timer_deadline,
    worker_deadline_from_grant,
    worker_deadline_from_renewal,
)

DELAYS = st.integers(0, 10**8)
ZEROS = st.integers(-(10**15), 10**15)
TTLS = st.integers(3, 10**9)
TOKENS = st.text("0123456789abcdef", min_size=16, max_size=32)


@given(sent=DELAYS, under_way=DELAYS, worker_zero=ZEROS, timer_zero=ZEROS, ttl_us=TTLS)
def test_a_renewed_lease_ends_at_the_worker_first(
    sent: int, under_way: int, worker_zero: int, timer_zero: int, ttl_us: int
) -> None:
    worker = worker_deadline_from_renewal(WorkerMonoUs(sent + worker_zero), ttl_us, 0) - worker_zero
    timer = timer_deadline(TimerMonoUs(sent + under_way + timer_zero), ttl_us) - timer_zero
    assert worker <= timer


@given(
    exchanges=st.lists(st.tuples(DELAYS, DELAYS), min_size=1, max_size=4),
    granted=DELAYS,
    commit=DELAYS,
    delivery=DELAYS,
    worker_zero=ZEROS,
    timer_zero=ZEROS,
    ttl_us=TTLS,
    age_us_max=DELAYS,
)
def test_a_granted_lease_ends_at_the_worker_first_whichever_echoes_came_before_or_after(
    exchanges: list[tuple[int, int]],
    granted: int,
    commit: int,
    delivery: int,
    worker_zero: int,
    timer_zero: int,
    ttl_us: int,
    age_us_max: int,
) -> None:
    echo = None
    for sent, under_way in sorted(exchanges):
        fresh = ClockEcho(WorkerMonoUs(sent + worker_zero), TimerMonoUs(sent + under_way + timer_zero))
        echo = tightest_echo(echo, fresh, age_us_max)
    received = granted + commit + delivery
    worker = (
        worker_deadline_from_grant(
            echo, TimerMonoUs(granted + timer_zero), WorkerMonoUs(received + worker_zero), ttl_us, 0
        )
        - worker_zero
    )
    timer = timer_deadline(TimerMonoUs(granted + timer_zero), ttl_us) - timer_zero
    assert worker <= timer
    assert worker <= received + ttl_us


@given(granted=DELAYS, ttl_us=TTLS, third=st.integers(0, 10**9), worker_zero=ZEROS)
def test_two_thirds_from_receipt_are_safe_while_delivery_takes_at_most_a_third(
    granted: int, ttl_us: int, third: int, worker_zero: int
) -> None:
    received = granted + third % (ttl_us // 3 + 1)
    worker = (
        worker_deadline_from_grant(None, TimerMonoUs(0), WorkerMonoUs(received + worker_zero), ttl_us, 0)
        - worker_zero
    )
    assert worker <= granted + ttl_us


@given(sent=DELAYS, under_way=DELAYS, drift_ppm=st.integers(-200, 200), elapsed=st.integers(0, 10**7))
def test_the_margin_covers_the_drift_of_an_echo_no_older_than_one_ttl(
    sent: int, under_way: int, drift_ppm: int, elapsed: int
) -> None:
    ttl_us, margin_us = 10**7, 10_000
    read = sent + under_way
    echo = ClockEcho(WorkerMonoUs(sent), TimerMonoUs(0))
    granted = read + elapsed
    reading = TimerMonoUs(elapsed + elapsed * drift_ppm // 10**6)
    received = WorkerMonoUs(granted + 10**9)
    worker = worker_deadline_from_grant(echo, reading, received, ttl_us, margin_us)
    assert worker <= granted + ttl_us


@given(tokens=st.lists(TOKENS, unique_by=lambda token: token[:16], max_size=8), random=st.randoms())
def test_a_digest_knows_the_set_and_not_the_order(tokens: list[str], random: Random) -> None:
    shuffled = list(tokens)
    random.shuffle(shuffled)
    assert HeldDigest.of(tokens) == HeldDigest.of(shuffled)
    assert HeldDigest.of(tokens).remove(shuffled) == HeldDigest()
    if tokens:
        assert HeldDigest.of(tokens) != HeldDigest.of(tokens[1:])
        assert HeldDigest.of(tokens).remove(tokens[:1]) == HeldDigest.of(tokens[1:])


@given(
    changes=st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=12),
    taken=st.lists(st.integers(0, 12), max_size=4),
)
def test_a_worker_that_took_any_prefix_of_the_responses_agrees(
    changes: list[tuple[bool, int]], taken: list[int]
) -> None:
    tokens = [f"{number * 0x1234567890ABCDEF % 2**64:016x}" for number in range(1, 11)]
    held_after: list[set[str]] = [set()]
    history = HeldHistory(HeldDigest(), entry_count_max=12)
    for sequence, (is_grant, which) in enumerate(changes, start=1):
        held, token = set(held_after[-1]), tokens[which]
        if is_grant and token not in held:
            history.note(sequence, added=[token])
            held.add(token)
        elif not is_grant and token in held:
            history.note(sequence, removed=[token])
            held.remove(token)
        held_after.append(held)
    for sequence in sorted(min(each, len(changes)) for each in taken):
        assert history.agrees(sequence, HeldDigest.of(held_after[sequence]))
