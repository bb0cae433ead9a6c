import pytest

from tickwheel.domain.lease import (
    ClockEcho,
    HeldDigest,
    HeldHistory,
    LeaseTerm,
    TimerMonoUs,
    WorkerMonoUs,
    tightest_echo,
    timer_deadline,
    token_number,
    worker_deadline_from_grant,
    worker_deadline_from_renewal,
)

TTL_US = 10_000_000
MARGIN_US = 500_000


def test_a_renewal_counts_from_its_sending_for_the_worker_and_from_its_receipt_for_the_timer() -> None:
    assert worker_deadline_from_renewal(WorkerMonoUs(1_000), TTL_US, MARGIN_US) == 9_501_000
    assert timer_deadline(TimerMonoUs(7_000), TTL_US) == 10_007_000


def test_a_grant_that_waited_in_a_buffer_counts_from_its_reading_not_from_its_receipt() -> None:
    echo = ClockEcho(WorkerMonoUs(100), TimerMonoUs(5_000_100))
    # The timer read its clock 2 s after the echo; the message took 6 s more.
    deadline_us = worker_deadline_from_grant(
        echo, TimerMonoUs(7_000_100), WorkerMonoUs(8_000_100), TTL_US, MARGIN_US
    )
    assert deadline_us == 2_000_100 + TTL_US - MARGIN_US


def test_a_grant_never_counts_from_after_its_receipt() -> None:
    echo = ClockEcho(WorkerMonoUs(100), TimerMonoUs(0))
    deadline_us = worker_deadline_from_grant(echo, TimerMonoUs(99_000_000), WorkerMonoUs(200), TTL_US, 0)
    assert deadline_us == 200 + TTL_US


def test_a_simple_worker_counts_two_thirds_from_receipt() -> None:
    assert worker_deadline_from_grant(None, TimerMonoUs(1), WorkerMonoUs(50), 9_000_000, 0) == 6_000_050


def test_the_echo_that_was_under_way_for_less_time_is_kept_until_it_is_old() -> None:
    quick = ClockEcho(WorkerMonoUs(100), TimerMonoUs(1_100))
    slow = ClockEcho(WorkerMonoUs(200), TimerMonoUs(9_200))
    assert tightest_echo(None, slow, TTL_US) is slow
    assert tightest_echo(quick, slow, TTL_US) is quick
    assert tightest_echo(slow, ClockEcho(WorkerMonoUs(300), TimerMonoUs(1_300)), TTL_US).sent_us == 300
    old = ClockEcho(WorkerMonoUs(200 + TTL_US), TimerMonoUs(99_000_000))
    assert tightest_echo(quick, old, TTL_US) is old


@pytest.mark.parametrize(
    ("heartbeat_us", "margin_us", "named"),
    [
        (4_000_000, 0, "heartbeat_us (4000000) must be at most a third of ttl_us (10000000)"),
        (3_000_000, 4_000_000, "margin_us (4000000) must be below a third of ttl_us (10000000)"),
        (0, 0, "heartbeat_us (0) must be positive"),
        (1, -1, "margin_us (-1) not negative"),
    ],
)
def test_a_term_whose_numbers_do_not_fit_is_refused_with_both_of_them(
    heartbeat_us: int, margin_us: int, named: str
) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011 -- the message is compared below
        LeaseTerm(TTL_US, heartbeat_us, margin_us)
    assert named in str(refused.value)


def test_the_default_lease_outlasts_a_failover_and_a_short_one_does_not() -> None:
    LeaseTerm(10_000_000, 3_333_333, 500_000).assert_outlasts_failover(
        etcd_ttl_us=3_500_000, takeover_us=1_000_000
    )
    with pytest.raises(ValueError, match=r"ttl_us \(6000000\) must be at least 7000000"):
        LeaseTerm(6_000_000, 2_000_000, 500_000).assert_outlasts_failover(
            etcd_ttl_us=3_500_000, takeover_us=1_000_000
        )


def test_a_token_counts_by_its_first_sixteen_digits() -> None:
    assert token_number("ffffffffffffffff0123") == 2**64 - 1
    with pytest.raises(ValueError, match="invalid literal"):
        token_number("not hexadecimal")


def test_a_digest_of_the_empty_set_is_two_zeros() -> None:
    assert HeldDigest.of([]) == HeldDigest(0, 0)
    assert HeldDigest.of(["ff"]).remove(["ff"]) == HeldDigest(0, 0)


def test_a_grant_under_way_is_no_disagreement_and_a_lost_one_is() -> None:
    history = HeldHistory(HeldDigest.of(["aa"]), entry_count_max=8)
    history.note(2, added=["bb", "cc"])
    history.note(5, removed=["aa"])
    assert history.agrees(1, HeldDigest.of(["aa"]))
    assert history.agrees(4, HeldDigest.of(["aa", "bb", "cc"]))
    assert len(history) == 1
    assert not history.agrees(5, HeldDigest.of(["bb"]))
    assert history.agrees(6, HeldDigest.of(["bb", "cc"]))


def test_what_was_named_is_counted_on_from_with_what_is_under_way() -> None:
    history = HeldHistory(HeldDigest(), entry_count_max=8)
    history.note(1, added=["aa", "bb"])
    history.note(4, added=["cc"])
    assert not history.agrees(2, HeldDigest.of(["aa"]))
    history.resolve(3, HeldDigest.of(["aa"]))
    assert history.latest == HeldDigest.of(["aa", "cc"])
    assert history.agrees(3, HeldDigest.of(["aa"]))
    assert history.agrees(4, HeldDigest.of(["aa", "cc"]))


def test_a_worker_that_never_heartbeats_cannot_grow_the_history() -> None:
    history = HeldHistory(HeldDigest(), entry_count_max=1)
    history.note(1, added=["aa"])
    with pytest.raises(AssertionError):
        history.note(2, added=["bb"])


def test_the_removal_of_a_lost_grant_takes_two_namings() -> None:
    history = HeldHistory(HeldDigest(), entry_count_max=8)
    history.note(1, added=["aa"])
    history.note(2, removed=["aa"])
    history.resolve(1, HeldDigest())
    assert not history.agrees(2, HeldDigest())
    history.resolve(2, HeldDigest())
    assert history.agrees(2, HeldDigest())
