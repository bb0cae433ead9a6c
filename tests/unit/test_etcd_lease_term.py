"""What a node may believe of its lease after each answer."""

from __future__ import annotations

import pytest

from tickwheel.etcd.lease import LeaseSettings, LeaseTerm

TERM = LeaseTerm(
    lease_id=7, granted_ttl_us=10_000_000, ttl_us=10_000_000, sent_at_mono_us=1_000, margin_us=500_000
)


def test_trust_counts_from_the_sending_of_the_answered_request() -> None:
    renewed = TERM.renewed(sent_at_mono_us=5_001_000, answered_ttl_s=10)
    assert renewed is not None
    assert renewed.trusted_until_mono_us == 5_001_000 + 10_000_000 - 500_000
    assert renewed.is_trusted(renewed.trusted_until_mono_us - 1)
    assert not renewed.is_trusted(renewed.trusted_until_mono_us)


@pytest.mark.parametrize("absurd_ttl_s", [11, 9_223_372_036, 2**63 - 1])
def test_an_absurd_ttl_is_clamped_to_what_was_granted(absurd_ttl_s: int) -> None:
    renewed = TERM.renewed(2_000, absurd_ttl_s)
    assert renewed is not None
    assert renewed.ttl_us == TERM.granted_ttl_us


@pytest.mark.parametrize("ttl_s", [0, -1])
def test_a_ttl_of_zero_or_less_means_that_the_lease_is_lost(ttl_s: int) -> None:
    assert TERM.renewed(2_000, ttl_s) is None


def test_a_shorter_ttl_is_believed_until_a_longer_one_comes() -> None:
    short = TERM.renewed(2_000, 4)
    assert short is not None
    assert short.trusted_until_mono_us == 2_000 + 4_000_000 - 500_000
    long = short.renewed(3_000, 10)
    assert long is not None
    assert long.ttl_us == TERM.granted_ttl_us


def test_an_answer_that_comes_out_of_order_takes_no_trust_away() -> None:
    renewed = TERM.renewed(0, 10)
    assert renewed is not None
    assert renewed.sent_at_mono_us == TERM.sent_at_mono_us


@pytest.mark.parametrize(("ttl_ms", "margin_ms"), [(2_500, 500), (1_000, 100), (3_000, 1_500), (3_000, 0)])
def test_settings_that_cannot_hold_are_refused(ttl_ms: int, margin_ms: int) -> None:
    with pytest.raises(ValueError, match=str(ttl_ms)):
        LeaseSettings(ttl_ms, margin_ms)
