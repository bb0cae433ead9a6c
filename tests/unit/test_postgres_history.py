"""Which Postgres is the one that was known? And which number comes after all that were ever seen?"""

from __future__ import annotations

import pytest

from tickwheel.domain.shard import EPOCH_TAKING_BITS, INCARNATION_MAX
from tickwheel.errors import FailedPrecondition
from tickwheel.ports import ClusterFacts
from tickwheel.postgres.history import difference, next_incarnation

KNOWN = ClusterFacts(system_identifier=7, timeline=3, wal_position=1_000, incarnation=2)


def test_the_same_history_goes_on_growing() -> None:
    assert difference(KNOWN, 2, KNOWN) == ""
    assert difference(KNOWN, 2, ClusterFacts(7, 3, 1_001, 2)) == ""


def test_a_registry_that_knows_nothing_is_no_reason_to_stop() -> None:
    assert difference(None, 0, ClusterFacts(7, 3, 1_000, 0)) == ""
    assert difference(None, 0, KNOWN) == ""


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (ClusterFacts(8, 3, 2_000, 2), "another one"),
        (ClusterFacts(7, 4, 2_000, 2), "promoted or restored"),
        (ClusterFacts(7, 2, 2_000, 2), "promoted or restored"),
        (ClusterFacts(7, 3, 999, 2), "1 bytes before"),
        (ClusterFacts(7, 3, 2_000, 1), "restored from before a resume"),
    ],
)
def test_another_history_is_told_with_its_reason(found: ClusterFacts, why: str) -> None:
    assert why in difference(KNOWN, 2, found)


def test_a_resume_that_did_not_get_through_to_postgres_leaves_everything_halted() -> None:
    assert "did not get through" in difference(KNOWN, 3, KNOWN)
    assert "did not get through" in difference(None, 1, ClusterFacts(7, 3, 1_000, 0))


def test_an_accepted_history_may_differ_in_everything() -> None:
    assert difference(KNOWN, 3, ClusterFacts(8, 1, 1, 3)) == ""


def test_the_next_incarnation_is_above_everything_that_was_seen() -> None:
    found = ClusterFacts(7, 3, 1_000, 1)
    assert next_incarnation(0, {}, found) == 2
    assert next_incarnation(5, {}, found) == 6
    assert next_incarnation(0, {3: (9 << EPOCH_TAKING_BITS) + 17, 4: 12}, found) == 10
    with pytest.raises(FailedPrecondition, match=str(INCARNATION_MAX + 1)):
        next_incarnation(INCARNATION_MAX, {}, found)
