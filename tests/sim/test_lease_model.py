"""The rules of leases, judged by the model: all of them hold together, and none of them can be left out.

`-s` prints the shortest counterexample of each rule, as docs/decisions/0004-lease-rules.md tells it.
"""

from dataclasses import replace

import pytest
from tests.sim.lease_model import RULE_NAMES, SCENARIOS, Rules, explore

STATES_MAX = 100_000

# Rule left out -> where its absence shows, and which property breaks.
SHOWN_BY = {
    "proof_before_renewed": ("renewal and move", "I5"),
    "proof_begun_after_receipt": ("renewal and move", "I5"),
    "proof_by_committed_write": ("renewal and move", "I5"),
    "proof_names_its_shards": ("renewal and move", "I5"),
    "etcd_read_is_linearizable": ("renewal and move", "I5"),
    "etcd_proof_compares_generation": ("move and back", "I5"),
    "etcd_proof_compares_incarnation": ("restore", "I5"),
    "resume_waits_one_ttl": ("restore", "I5"),
    "take_follows_assignment": ("renewal and move", "I5"),
    "take_compares_generation": ("grant and move", "I5"),
    "every_write_is_fenced": ("renewal and move", "I5"),
    "worker_counts_renewal_from_sending": ("renewal and move", "I5"),
    "timer_extends_at_receipt": ("renewal and move", "I5"),
    "worker_counts_grant_from_reading": ("grant and move", "I5"),
    "echo_is_of_the_same_stream": ("grant and move", "I5"),
    "reading_precedes_transaction": ("grant and move", "I5"),
    "simple_worker_counts_two_thirds": ("grant to a simple worker", "I5"),
    "worker_stops_a_margin_early": ("renewal and move", "I5"),
    "worker_clock_runs_in_suspend": ("frozen worker", "I5"),
    "grace_at_takeover": ("renewal and move", "I5"),
    "grace_counts_from_commit": ("renewal and move", "I5"),
    "load_after_commit": ("grant and move", "I6"),
    "unknown_commit_is_retaken": ("grant", "I6"),
    "retake_raises_epoch": ("grant", "I6"),
    "retake_keeps_deadlines": ("dead worker", "liveness"),
    "retake_repeats_own_calls": ("grant", "a timer lets go"),
    "never_sent_is_released": ("grant", "an attempt that no worker was ever sent"),
    "unlisted_waits_for_grace": ("grant, and Hello elsewhere", "I"),
    "rebalance_waits_two_ttls": ("dead worker, shard rebalanced", "liveness"),
    "digest_is_compared": ("grant and break", "liveness"),
    "digest_is_as_of_sequence": ("grant", "liveness"),
    "recorded_is_numbered": ("outcome and break", "liveness"),
    "renewed_names_its_sequence": ("grant and break", "I5"),
    "announced_before_heartbeat": ("move and back, announced", "I5"),
    "disagreement_renews_nothing": ("grant and break", "liveness"),
    "ending_is_not_renewable": ("frozen worker", "I5"),
    "ending_enters_no_other_batch": ("outcome and lost connection", "I6"),
    "old_stream_is_dead": ("grant and break", "I6"),
    "finished_is_held_until_recorded": ("outcome and break", "I6"),
    "finished_is_heartbeated": ("outcome and break", "I6"),
    "stopped_is_reported": ("outcome and break", "I6"),
    "outcome_compares_token": ("outcome and break", "I6"),
    "fenced_owner_answers_moved": ("renewal and move", "I6"),
    "loading_owner_answers_neither": ("renewal and move", "I6"),
    "refusal_waits_for_proof": ("grant and move", "I6"),
    "refused_listing_spares_outcomes": ("outcome and move", "I6"),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_with_every_rule_no_interleaving_breaks_a_property(name: str) -> None:
    result = explore(Rules(), SCENARIOS[name], STATES_MAX)
    assert not result.broken, "\n".join((result.broken, *result.trace))


def test_every_rule_is_shown_to_be_needed() -> None:
    assert set(SHOWN_BY) == set(RULE_NAMES)


@pytest.mark.parametrize("rule", RULE_NAMES)
def test_without_the_rule_some_interleaving_breaks_a_property(rule: str) -> None:
    scenario, broken = SHOWN_BY[rule]
    result = explore(replace(Rules(), **{rule: False}), SCENARIOS[scenario], STATES_MAX)
    print(f"\nwithout {rule} ({scenario}, {result.states} states):")
    print(*(f"  {number:2}. {label}" for number, label in enumerate(result.trace, start=1)), sep="\n")
    print(f"  => {result.broken}")
    assert result.broken.startswith(broken), f"expected {broken!r}, found {result.broken or 'nothing'!r}"
