"""What did every transaction of the fence rig commit, in which order, and was it allowed to?

Deferred triggers write each change of the hot tables to `ledger` while its transaction commits, when it holds
all its locks still: two transactions that exclude each other stand there in their order. A wrapper around
`tw_fence` adds what the fence let through. `judge` replays the ledger against the invariants (design,
section 4), beside what the owners were told and concluded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import psycopg

from tickwheel.domain.run import TERMINAL
from tickwheel.domain.shard import FENCE_GRANT_BITS

PERIOD_US = 1_000
"""Occurrences of the rig's schedules are the multiples of it."""

_INSTALL = """
CREATE UNLOGGED TABLE ledger (
    seq bigserial PRIMARY KEY, txid bigint, app text, tbl text, op text, old jsonb, new jsonb);
CREATE UNLOGGED TABLE fenced (shards smallint[], epochs bigint[], lost smallint[]);

-- Some calls are slow in the middle: what is slow never meets what it must exclude only by being slow.
CREATE FUNCTION rig_dawdle(p_one_of integer, p_seconds float) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF hashint8(pg_current_xact_id()::text::bigint + {seed}) % p_one_of = 0 THEN
        PERFORM pg_sleep(p_seconds);
    END IF;
END $$;

CREATE FUNCTION rig_witness() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_TABLE_NAME = 'shard' THEN PERFORM rig_dawdle(3, 0.02); END IF;
    INSERT INTO ledger (txid, app, tbl, op, old, new)
    VALUES (pg_current_xact_id()::text::bigint, current_setting('application_name'), TG_ARGV[0], TG_OP,
            CASE WHEN TG_OP <> 'INSERT' THEN to_jsonb(OLD) END,
            CASE WHEN TG_OP <> 'DELETE' THEN to_jsonb(NEW) END);
    RETURN NULL;
END $$;

ALTER FUNCTION tw_fence RENAME TO tw_fence_under_test;
CREATE FUNCTION tw_fence(p_shards smallint[], p_epochs bigint[]) RETURNS smallint[] LANGUAGE plpgsql AS $$
DECLARE
    v_lost smallint[] := tw_fence_under_test(p_shards, p_epochs);
BEGIN
    INSERT INTO fenced VALUES (p_shards, p_epochs, v_lost);
    PERFORM rig_dawdle({slow_one_of}, 0.05);
    RETURN v_lost;
END $$;
"""
_WITNESSED = ("timer", "lease", "run", "attempt", "decision", "dead_letter", "shard", "fenced")

# Each breaks the one rule that its name says. They must not get past the judge.
BROKEN_FENCES = {
    "it reads the epochs before it locks": """
        CREATE OR REPLACE FUNCTION tw_fence_under_test(p_shards smallint[], p_epochs bigint[])
        RETURNS smallint[] LANGUAGE plpgsql AS $$
        DECLARE
            v_lost smallint[];
        BEGIN
            v_lost := ARRAY(SELECT a.s FROM unnest(p_shards, p_epochs) AS a(s, e) WHERE NOT EXISTS (
                SELECT FROM shard WHERE shard.shard_id = a.s AND shard.epoch = a.e));
            PERFORM pg_advisory_xact_lock_shared(27767, s) FROM unnest(p_shards) AS s;
            RETURN v_lost;
        END $$""",
    "it does not lock": """
        CREATE OR REPLACE FUNCTION tw_fence_under_test(p_shards smallint[], p_epochs bigint[])
        RETURNS smallint[] LANGUAGE plpgsql AS $$
        BEGIN
            RETURN ARRAY(SELECT a.s FROM unnest(p_shards, p_epochs) AS a(s, e) WHERE NOT EXISTS (
                SELECT FROM shard WHERE shard.shard_id = a.s AND shard.epoch = a.e));
        END $$""",
    "it locks and does not read": """
        CREATE OR REPLACE FUNCTION tw_fence_under_test(p_shards smallint[], p_epochs bigint[])
        RETURNS smallint[] LANGUAGE plpgsql AS $$
        BEGIN
            PERFORM pg_advisory_xact_lock_shared(27767, s) FROM unnest(p_shards) AS s;
            RETURN '{}';
        END $$""",
}


def install(connection: psycopg.Connection[Any], seed: int, slow_one_of: int) -> None:
    """Puts the witnesses into a migrated database (once). One fenced call of `slow_one_of` is slow."""
    text = _INSTALL.replace("{seed}", str(seed)).replace("{slow_one_of}", str(slow_one_of))
    connection.execute(text.encode())
    for table in _WITNESSED:
        connection.execute(
            f"CREATE CONSTRAINT TRIGGER rig_witness AFTER INSERT OR UPDATE OR DELETE ON {table}"
            f" DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION rig_witness('{table}')".encode()
        )


@dataclass(frozen=True, slots=True)
class Entry:
    """One change of one row. `old` and `new` are the row's columns, as jsonb gives them."""

    txid: int
    app: str
    table: str
    op: str
    old: dict[str, Any]
    new: dict[str, Any]


def read(connection: psycopg.Connection[Any]) -> list[Entry]:
    rows = connection.execute("SELECT txid, app, tbl, op, old, new FROM ledger ORDER BY seq").fetchall()
    return [Entry(txid, app, table, op, old or {}, new or {}) for txid, app, table, op, old, new in rows]


@dataclass
class Verdict:
    """What the judge found, and how much there was to judge."""

    violations: list[str] = field(default_factory=list)
    births: int = 0
    grants: int = 0
    ends: int = 0
    takes: int = 0
    decisions: int = 0
    lost_calls: int = 0
    coordinator_writes: int = 0
    unknown_resolved: int = 0


def judge(entries: Sequence[Entry], history: Iterable[dict[str, Any]]) -> Verdict:
    """Replays the ledger; then holds each owner's words against it."""
    replay = _Replay()
    transactions: dict[int, list[Entry]] = defaultdict(list)
    for entry in entries:
        transactions[entry.txid].append(entry)
    for changes in transactions.values():
        replay.apply(changes)
    for event in history:
        replay.hear(event)
    return replay.verdict


@dataclass(slots=True)
class _Live:
    run: str
    shard: int
    epoch: int


class _Replay:
    """The state that the ledger adds up to, one transaction after the other."""

    def __init__(self) -> None:
        self.verdict = Verdict()
        self.epoch: dict[int, int] = {}
        self.live: dict[str, _Live] = {}  # by token
        self.live_token: dict[str, str] = {}  # by run
        self.waiting: set[str] = set()
        self.run_state: dict[str, int] = {}
        self.last_grant: dict[str, tuple[int, int]] = {}  # run -> (fence, attempt)
        self.born: dict[tuple[str, int], str] = {}
        self.known: set[str] = set()
        self.granted: dict[str, int] = {}  # token -> epoch
        self.ended: dict[str, int] = {}  # token -> epoch under which it was ended
        self.at_take: dict[tuple[int, int], frozenset[str]] = {}

    def blame(self, invariant: str, what: str, entry: Entry | None = None) -> None:
        where = f" (transaction {entry.txid} of {entry.app})" if entry else ""
        self.verdict.violations.append(f"{invariant}: {what}{where}")

    # One transaction.

    def apply(self, changes: list[Entry]) -> None:
        fence: dict[int, int] = {}
        for entry in changes:
            if entry.table == "fenced":
                fence = self._fenced(entry)
        touched: set[str] = set()
        births: dict[str, list[int]] = defaultdict(list)
        why: dict[str, list[int]] = defaultdict(list)
        for entry in sorted(changes, key=lambda change: change.table != "lease" or change.op != "DELETE"):
            row = entry.new or entry.old
            if entry.table in ("timer", "lease", "run") and fence and row["shard_id"] not in fence:
                self.blame("I4", f"shard {row['shard_id']} was written without its fence", entry)
            if entry.table == "shard" and entry.op == "UPDATE":
                self._taken(entry)
            elif entry.table == "lease" and entry.op == "INSERT":
                self._granted(entry, births)
                touched.add(row["run"])
            elif entry.table == "lease" and entry.op == "DELETE":
                self._ended(entry, fence)
                touched.add(row["run"])
            elif entry.table == "run":
                self._run_row(entry, births)
                touched.add(row["id"])
            elif entry.table == "timer" and row["kind"] == 2:
                (self.waiting.discard if entry.op == "DELETE" else self.waiting.add)(row["ref"])
                touched.add(row["ref"])
            elif entry.table == "decision":
                self.verdict.decisions += 1
                why[row["schedule"]] += range(row["from_us"], row["until_us"] + 1, PERIOD_US)
        for entry in changes:
            if entry.table == "timer" and entry.op == "UPDATE" and entry.new["kind"] == 1:
                self._moved(entry, bool(fence), births, why)
        if not fence and changes[0].app.startswith("coordinator"):
            self.verdict.coordinator_writes += 1
        for run in touched:
            self._whereabouts(run, changes[0])

    def _fenced(self, entry: Entry) -> dict[int, int]:
        held = dict(zip(entry.new["shards"], entry.new["epochs"], strict=True))
        self.verdict.lost_calls += bool(entry.new["lost"])
        for shard in entry.new["lost"]:
            held.pop(shard)
        for shard, epoch in held.items():
            if self.epoch.get(shard) != epoch:
                self.blame(
                    "I4", f"shard {shard} is at {self.epoch.get(shard)}, {epoch} passed the fence", entry
                )
        return held

    def _taken(self, entry: Entry) -> None:
        shard, epoch = entry.new["shard_id"], entry.new["epoch"]
        if epoch <= entry.old["epoch"] or epoch <= self.epoch.get(shard, -1):
            self.blame("I4", f"the epoch of shard {shard} did not grow: {epoch}", entry)
        self.epoch[shard] = epoch
        self.verdict.takes += 1
        self.at_take[shard, epoch] = frozenset(t for t, lease in self.live.items() if lease.shard == shard)

    def _granted(self, entry: Entry, births: dict[str, list[int]]) -> None:
        row = entry.new
        run, token, shard, fence = row["run"], row["token"], row["shard_id"], row["fence"]
        epoch = fence >> FENCE_GRANT_BITS
        self.verdict.grants += 1
        if epoch != self.epoch.get(shard):
            self.blame("I4", f"a lease of epoch {epoch}, shard {shard} is at {self.epoch.get(shard)}", entry)
        if run in self.live_token:
            self.blame("I3", f"run {run} has two live leases", entry)
        last_fence, last_attempt = self.last_grant.get(run, (-1, 0))
        if fence <= last_fence:
            self.blame("I3", f"run {run} got fence {fence} after {last_fence}", entry)
        if row["attempt"] != last_attempt + 1:
            self.blame("I3", f"run {run} got attempt {row['attempt']} after {last_attempt}", entry)
        self.last_grant[run] = (fence, row["attempt"])
        self.granted[token] = epoch
        self.live[token] = _Live(run, shard, epoch)
        self.live_token[run] = token
        self._birth(run, row, entry, births)

    def _birth(self, run: str, row: dict[str, Any], entry: Entry, births: dict[str, list[int]]) -> None:
        if run in self.known:
            return
        self.known.add(run)
        self.verdict.births += 1
        occurrence = (row["schedule"], row["schedule_us"])
        if occurrence in self.born:
            self.blame("I2", f"{occurrence} became {self.born[occurrence]} and {run}", entry)
        self.born[occurrence] = run
        births[row["schedule"]].append(row["schedule_us"])

    def _ended(self, entry: Entry, fence: dict[int, int]) -> None:
        token = entry.old["token"]
        lease = self.live.pop(token, None)
        if lease is None:
            self.blame("I6", f"the attempt of token {token} ended twice", entry)
            return
        del self.live_token[lease.run]
        self.ended[token] = fence.get(lease.shard, -1)
        self.verdict.ends += 1

    def _run_row(self, entry: Entry, births: dict[str, list[int]]) -> None:
        row = entry.new
        if entry.op == "DELETE":
            self.blame("I1", f"run {entry.old['id']} was deleted", entry)
            return
        run, before = row["id"], self.run_state.get(row["id"])
        if before in TERMINAL:
            self.blame(
                "I6", f"run {run} had ended as {before} and was written again as {row['state']}", entry
            )
        if entry.op == "UPDATE" and row["fence"] < entry.old["fence"]:
            self.blame("I3", f"the fence of run {run} went back", entry)
        if entry.op == "INSERT":
            self._birth(run, row, entry, births)
        self.run_state[run] = row["state"]

    def _moved(
        self, entry: Entry, by_owner: bool, births: dict[str, list[int]], why: dict[str, list[int]]
    ) -> None:
        """I2: what an owner decides are exactly the occurrences that it passes, each once."""
        ref, before, after = entry.new["ref"], entry.old["decided_us"], entry.new["decided_us"]
        if after < before or entry.new["version"] < entry.old["version"]:
            self.blame("I2", f"schedule {ref} went back from {before} to {after}", entry)
        if not by_owner:
            return
        passed = list(range(before + PERIOD_US, after + 1, PERIOD_US))
        decided = sorted(births.get(ref, []) + why.get(ref, []))
        if not passed or decided != passed:
            self.blame("I2", f"schedule {ref} passed {passed} and decided {decided}", entry)

    def _whereabouts(self, run: str, entry: Entry) -> None:
        """A run is in exactly one place: it waits, it is leased, or it has ended."""
        ended = self.run_state.get(run) in TERMINAL
        places = (run in self.waiting) + (run in self.live_token) + ended
        if places != 1:
            self.blame("I6", f"run {run} stands in {places} places", entry)

    # What an owner was told, and what it concluded.

    def hear(self, event: dict[str, Any]) -> None:
        kind, who = event["event"], event["owner"]
        if kind == "loaded":
            self._heard_loaded(event)
        elif kind == "answered":
            for token in event["granted"]:
                if token not in self.granted:
                    self.blame("I1", f"{who} was told that {token} is granted; it is not")
            for token in event["not_granted"]:
                if token in self.granted:
                    self.blame("I3", f"{who} was told that {token} is not granted; it is")
            for token in event["ended"]:
                if token not in self.ended:
                    self.blame("I6", f"{who} was told that the outcome of {token} is recorded; it is not")
        elif kind == "resolved":
            self._heard_resolved(event)
        elif kind == "refused":
            self.blame("I11", f"{who}: a batch was refused: {event['reason']}")

    def _heard_resolved(self, event: dict[str, Any]) -> None:
        """After an unknown commit the owner has taken the shard again, at `epoch`, and looked what stands.

        What does not stand was never committed, or a still newer owner has ended it meanwhile."""
        who, epoch = event["owner"], event["epoch"]
        self.verdict.unknown_resolved += 1
        for token, stands in event["grants"].items():
            if stands != (token in self.granted) and self.ended.get(token, -1) <= epoch:
                self.blame("I4", f"{who} took the grant {token} for {stands} after an unknown commit")
        for token, ended in event["outcomes"].items():
            if ended and token not in self.ended:
                self.blame("I6", f"{who} took the outcome of {token} for recorded; it is not")
            if not ended and self.ended.get(token, epoch) < epoch:
                self.blame("I6", f"{who} took the outcome of {token} for lost; it was recorded")

    def _heard_loaded(self, event: dict[str, Any]) -> None:
        """I4: what a new owner loads after its epoch is all that older epochs ever granted and not ended."""
        stood = self.at_take.get((event["shard"], event["epoch"]))
        where = f"{event['owner']} took shard {event['shard']} at {event['epoch']}"
        if stood is None:
            self.blame("I4", f"{where}, which was never committed")
            return
        loaded = frozenset(event["tokens"])
        for token in loaded - stood:
            if self.granted.get(token, -1) <= event["epoch"]:
                self.blame("I4", f"{where} and found a lease that came after: {token}")
        for token in stood - loaded:
            if self.ended.get(token, -1) <= event["epoch"]:
                self.blame("I4", f"{where} and did not find the lease {token}")
