"""When a failed attempt is tried again."""

from tickwheel.domain.job import BACKOFF_MS_MAX, MULTIPLIER_MAX, Failure, RetryPolicy


def backoff_ms(policy: RetryPolicy, failure_count: int) -> int:
    """The delay after the `failure_count`-th failure (from 1), without jitter; it never overflows.

    initial × multiplier ** (failure_count - 1), at most `backoff_ms_max`.
    """
    assert failure_count >= 1
    assert 1.0 <= policy.multiplier <= MULTIPLIER_MAX
    # After 64 doublings the cap is long reached; the exponent is bounded so that the power cannot overflow.
    growth = policy.multiplier ** min(failure_count - 1, 64)
    return int(min(policy.initial_backoff_ms * growth, policy.backoff_ms_max))


def retry_delay_ms(policy: RetryPolicy, failure_count: int, failure: Failure, random_unit: float) -> int:
    """The delay before the next attempt. `random_unit` is uniform in [0, 1); jitter only ever adds.

    A worker's own word (`retry_delay_ms`) goes before the policy, within a year.
    """
    if failure.retry_delay_ms is not None:
        return max(0, min(failure.retry_delay_ms, BACKOFF_MS_MAX))
    base = backoff_ms(policy, failure_count)
    return base + int(base * policy.jitter_ratio * random_unit)


def may_retry(policy: RetryPolicy, spent_count: int, failure: Failure) -> bool:
    """Whether a run that has spent `spent_count` attempts (this failure included) may have another."""
    return (
        spent_count < policy.attempt_count_max
        and not failure.non_retryable
        and failure.type not in policy.non_retryable_types
    )
