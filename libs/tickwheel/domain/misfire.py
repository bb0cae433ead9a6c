"""What becomes of occurrences that were found late: a pure decision, taken by a shard's owner.

A schedule is *on time* while its oldest undecided occurrence is not later than the threshold: then each of
its due occurrences becomes a run. Otherwise it stood still (no owner, no Postgres, resumed from a pause), and
everything that came due meanwhile is *missed* together, the newest too: a scheduler that came back at
02:30:20 does not run the minutely job of 02:30:00 as if nothing had happened while it skips the 149 before
it. The policy then says what runs:

* SKIP: nothing;
* FIRE_ONCE: the latest missed one stands for all;
* FIRE_ALL: every missed one, oldest first, the newest ``catchup_count_max`` of them.

Nothing that is older than the catch-up window, measured from its nominal instant, ever runs. Whatever does
not run is named as a range with its count and its reason. Phases never move: the next occurrence is the one
after the last decided.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tickwheel.domain.decision import DecisionReason
from tickwheel.domain.trigger import CompiledTrigger

CATCHUP_COUNT_MAX = 10_000
"""The most that ``catchup_count_max`` may be."""
ON_TIME_COUNT_MAX = 1_000
"""Runs of one decision while on time; what is left is found by the next call."""
COUNTED_MAX = 1_000_000
"""How far a dropped range is counted: by the calendar, at once."""
COUNTED_SEVERAL_MAX = 100_000
"""The same where a schedule has several triggers: they are enumerated, since they may agree; some 25 ms."""


class MisfirePolicy(StrEnum):
    FIRE_ONCE = "FIRE_ONCE"
    FIRE_ALL = "FIRE_ALL"
    SKIP = "SKIP"


@dataclass(frozen=True, slots=True)
class MisfireRules:
    """A schedule's misfire policy, with the defaults of the API."""

    policy: MisfirePolicy = MisfirePolicy.FIRE_ONCE
    threshold_us: int = 60 * 1_000_000
    catchup_us: int = 86_400 * 1_000_000
    catchup_count_max: int = 1_000

    def __post_init__(self) -> None:
        assert self.threshold_us >= 0, self.threshold_us
        assert self.catchup_us >= 0, self.catchup_us
        assert 1 <= self.catchup_count_max <= CATCHUP_COUNT_MAX, self.catchup_count_max


@dataclass(frozen=True, slots=True)
class DroppedRange:
    """Occurrences ``[first_us .. last_us]`` that do not become runs, for one reason."""

    reason: DecisionReason
    first_us: int
    last_us: int
    count: int
    is_count_exact: bool = True
    """False: there are ``count`` or more; counting ended at its bound."""


@dataclass(frozen=True, slots=True)
class MisfireDecision:
    runs_us: tuple[int, ...]
    """Occurrences to run, ascending."""
    is_catch_up: bool
    """The runs were missed: their cause is CATCH_UP, not SCHEDULED."""
    dropped: tuple[DroppedRange, ...]
    """Ascending, apart from each other and from the runs."""
    decided_us: int
    """The last occurrence that is decided now; unchanged if none was due."""
    next_us: int | None
    """The occurrence after it: due already if a page of on-time runs was full; None if there is none."""

    @property
    def missed_count(self) -> int:
        """How many occurrences were misfires."""
        return sum(part.count for part in self.dropped) + (len(self.runs_us) if self.is_catch_up else 0)


def decide(trigger: CompiledTrigger, decided_us: int, now_us: int, rules: MisfireRules) -> MisfireDecision:
    """Decides every occurrence later than ``decided_us`` and not than ``now_us`` (the cluster clock)."""
    first_us = trigger.next_after(decided_us)
    if first_us is None or first_us > now_us:
        return MisfireDecision((), False, (), decided_us, first_us)
    if now_us - first_us <= rules.threshold_us:
        runs = trigger.between(decided_us, now_us, ON_TIME_COUNT_MAX)
        return MisfireDecision(tuple(runs), False, (), runs[-1], trigger.next_after(runs[-1]))

    latest_us = trigger.latest_between(decided_us, now_us, 1)[0]
    next_us = trigger.next_after(latest_us)
    if rules.policy is MisfirePolicy.SKIP:
        skipped = _dropped(trigger, decided_us, latest_us, DecisionReason.MISFIRE_SKIPPED)
        return MisfireDecision((), True, skipped, latest_us, next_us)

    # The oldest that may still run lies at now - catchup exactly; a range here leaves out its lower end.
    window_us = max(decided_us, min(now_us - rules.catchup_us - 1, latest_us))
    limit = 1 if rules.policy is MisfirePolicy.FIRE_ONCE else rules.catchup_count_max
    runs = trigger.latest_between(window_us, latest_us, limit)[::-1]
    dropped = _dropped(trigger, decided_us, window_us, DecisionReason.CATCHUP_WINDOW)
    if runs:
        is_once = rules.policy is MisfirePolicy.FIRE_ONCE
        reason = DecisionReason.MISFIRE_COLLAPSED if is_once else DecisionReason.CATCHUP_COUNT
        dropped += _dropped(trigger, window_us, runs[0] - 1, reason)
    return MisfireDecision(tuple(runs), True, dropped, latest_us, next_us)


def _dropped(
    trigger: CompiledTrigger, after_us: int, until_us: int, reason: DecisionReason
) -> tuple[DroppedRange, ...]:
    """The occurrences in ``(after_us, until_us]`` as one range; empty if there are none."""
    newest = trigger.latest_between(after_us, until_us, 1)
    if not newest:
        return ()
    first_us = trigger.between(after_us, until_us, 1)[0]
    counted_max = COUNTED_MAX if len(trigger.sources) == 1 else COUNTED_SEVERAL_MAX
    count = trigger.count_between(after_us, until_us, counted_max)
    return (DroppedRange(reason, first_us, newest[0], count, count < counted_max),)
