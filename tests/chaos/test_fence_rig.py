"""No timer writes under an epoch that is gone, whatever is frozen, cut or killed. A broken fence is found."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.chaos.fence_ledger import BROKEN_FENCES
from tests.chaos.rig import Rig, plan

from tickwheel.embedded.postgres import EmbeddedPostgres

SECONDS = 10.0
BROKEN_SECONDS = 5.0
SOAK_SECONDS = 60.0
SOAK_SEEDS = 20


@pytest.fixture
def rig_url(postgres_server: EmbeddedPostgres, migrated_template: str) -> Iterator[str]:
    name = f"rig_{uuid.uuid4().hex[:10]}"
    yield postgres_server.create_database(name, template=migrated_template)
    postgres_server.drop_database(name)


def _seed() -> int:
    return int(os.environ.get("TICKWHEEL_TEST_SEED", int.from_bytes(os.urandom(3), "big")))


@pytest.mark.chaos
@pytest.mark.slow
async def test_owners_that_freeze_die_and_steal_break_no_invariant(rig_url: str, tmp_path: Path) -> None:
    rig = Rig(rig_url, tmp_path, _seed())
    verdict = await rig.run(SECONDS)
    print(f"TICKWHEEL_TEST_SEED={rig.seed} {verdict} {dict(rig.done)}")
    assert verdict.violations == []
    assert verdict.grants > 200
    assert verdict.ends > 150
    assert verdict.takes > 30
    assert verdict.coordinator_writes > 20
    assert verdict.lost_calls > 0, "nobody ever met a stolen shard"
    assert verdict.unknown_resolved > 0, "no commit was ever unknown"


@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.parametrize("broken", BROKEN_FENCES)
async def test_a_broken_fence_is_found(rig_url: str, tmp_path: Path, broken: str) -> None:
    rig = Rig(rig_url, tmp_path, _seed(), BROKEN_FENCES[broken])
    verdict = await rig.run(BROKEN_SECONDS)
    print(f"TICKWHEEL_TEST_SEED={rig.seed} {len(verdict.violations)} violations: {verdict.violations[:5]}")
    assert any(violation.startswith("I4") for violation in verdict.violations)


def test_a_seed_plans_the_same_faults_again() -> None:
    assert plan(7, 30.0) == plan(7, 30.0) != plan(8, 30.0)


@pytest.mark.soak
@pytest.mark.chaos
@pytest.mark.timeout(SOAK_SECONDS + 120)
@pytest.mark.parametrize("number", range(SOAK_SEEDS))
async def test_owners_break_no_invariant_for_a_long_time(rig_url: str, tmp_path: Path, number: int) -> None:
    rig = Rig(rig_url, tmp_path, _seed() + number)
    verdict = await rig.run(SOAK_SECONDS)
    print(f"TICKWHEEL_TEST_SEED={rig.seed} {verdict} {dict(rig.done)}")
    assert verdict.violations == []
