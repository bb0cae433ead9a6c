"""What the services ask of the outside world, as Protocols that speak in batches, and the values they
exchange.

Order: errors, values, Protocols; within each, one block per subject. A Protocol's docstring is the contract
that its adapters' conformance suite checks.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tickwheel.errors import Unavailable

# --- Shard registry and election: errors ------------------------------------------------------------------
#
# RegistryError (an errors.Unavailable: to a caller, all of these mean "not now")
# |- RegistryUnavailable   nothing is known of the call's effect; read again before acting
# |- RegistryRefused       credentials or permissions; a person must mend the configuration
# |- LeaderLost            the term that guarded the write is over; stop acting as leader
# `- IdentityTaken         another process is registered under this node id; start again with a fresh one


class RegistryError(Unavailable):
    """The shard registry could not do what was asked."""


class RegistryUnavailable(RegistryError):
    """No answer in time. A write may or may not have happened: never take this for success, read again.

    call: the RPC; code: the gRPC status name; detail: the server's words.
    """

    def __init__(self, call: str, code: str, detail: str) -> None:
        self.call, self.code, self.detail = call, code, detail
        super().__init__(f"{call} got no answer ({code}: {detail}); read again and retry with backoff")


class RegistryRefused(RegistryError):
    """The registry answered, and said no. Retrying as it is cannot help.

    call: the RPC; code: the gRPC status name; detail: the server's words.
    """

    def __init__(self, call: str, code: str, detail: str) -> None:
        self.call, self.code, self.detail = call, code, detail
        super().__init__(f"{call} was refused ({code}: {detail}); check the registry's user, role and prefix")


class LeaderLost(RegistryError):
    """A guarded write found another leader, or none.

    expected: the create revision of the term that wrote; found: the one in force, 0 for none.
    """

    def __init__(self, expected: int, found: int) -> None:
        self.expected, self.found = expected, found
        super().__init__(
            f"leader term {expected} is over: the registry is at {found}; wait to be elected again"
        )


class IdentityTaken(RegistryError):
    """Another live process is registered as this node.

    node_id: the id that both use; lease_id: the lease of the other.
    """

    def __init__(self, node_id: str, lease_id: int) -> None:
        self.node_id, self.lease_id = node_id, lease_id
        super().__init__(f"{node_id} is registered under lease {lease_id:x}; start with a fresh id")


# --- Shard registry and election: values ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TimerRecord:
    """A live timer, as it describes itself.

    address_internal: where other services reach it; address_external: what it advertises to workers.
    capacity: weight in the assignment, 0 or more; load: how busy it is, 0 (idle) upwards.
    """

    timer_id: str
    address_internal: str
    address_external: str
    version: str
    capacity: int
    load: int = 0


@dataclass(frozen=True, slots=True)
class Assignment:
    """Who should own a shard.

    generation: grows with every reassignment. moved_at_us: when it was written (cluster clock).
    mod_revision: the registry's revision of this value; guards the next write.
    """

    shard: int
    timer_id: str
    generation: int
    moved_at_us: int
    mod_revision: int


@dataclass(frozen=True, slots=True)
class AssignmentWrite:
    """A new owner for a shard, written only if the value is still at `mod_revision` (0: there is none)."""

    shard: int
    timer_id: str
    generation: int
    moved_at_us: int
    mod_revision: int


@dataclass(frozen=True, slots=True)
class AssignmentsWritten:
    """What became of a batch: shards written, and shards whose value had changed (read again, plan again)."""

    written: tuple[int, ...]
    conflicted: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RegistrySnapshot:
    """The registry at one revision.

    history: the registry's own identity; another one, or a revision that went back, means it was wiped or
    restored.
    drains: timers that somebody asked to be emptied. leader_id: None while nobody leads.
    """

    history: int
    revision: int
    timers: Mapping[str, TimerRecord] = field(default_factory=dict)
    assignments: Mapping[int, Assignment] = field(default_factory=dict)
    drains: frozenset[str] = frozenset()
    leader_id: str | None = None


class ViewChange(enum.Enum):
    """What the watch has to say: `BROKEN` until the next `CURRENT`, changes may be missing from the view."""

    CURRENT = "current"
    CHANGED = "changed"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class LeaderTerm:
    """One node's leadership, named by the create revision of the leader key: no two terms share one."""

    leader_id: str
    create_revision: int


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """Which history Postgres was last seen in; a difference means that commits may be gone (design, section
    6).

    wal_position: bytes from the start of the log; it only grows within one timeline. incarnation: what stands
    in Postgres. halted: why the leader lets nothing be granted, empty when all is well.
    """

    system_identifier: int
    timeline: int
    wal_position: int
    incarnation: int = 0
    halted: str = ""


@dataclass(frozen=True, slots=True)
class Doubt:
    """What a timer found behind a connection that is not the history that was known.

    incarnation: the one that the timer was in; the next resume settles the doubt.
    """

    node_id: str
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Resumption:
    """A history of the cluster that somebody has accepted, although commits may be gone.

    at_us: when (cluster clock); hold_ms: nothing is granted for so long after it, so that every lease of
    the history before has run out, those that nobody remembers included.
    """

    incarnation: int
    at_us: int
    hold_ms: int


# --- Shard registry and election: Protocols ---------------------------------------------------------------


class ShardRegistry(Protocol):
    """Who is alive, who should own which shard, and the few numbers that must outlive Postgres.

    Any call may raise RegistryUnavailable or RegistryRefused.
    """

    async def snapshot(self) -> RegistrySnapshot:
        """Read everything at one revision, linearizably."""
        ...

    async def watch(self, on_change: Callable[[RegistrySnapshot, ViewChange], None]) -> None:
        """Report the registry until cancelled: a snapshot first, then one after each change; never ends by
        itself.

        `on_change` is called on the event loop and must not block. Raises RegistryRefused.
        """
        ...

    async def assign(self, term: LeaderTerm, writes: Sequence[AssignmentWrite]) -> AssignmentsWritten:
        """Write new owners, each guarded by the leader's term and by the value that it replaces.

        Raises LeaderLost when the term is over; then nothing of the transaction in hand was written.
        After RegistryUnavailable a part may have been.
        """
        ...

    async def prove(self, timer_id: str, generations: Mapping[int, int], incarnation: int) -> frozenset[int]:
        """Give the shards that are, by a linearizable read begun now, still `timer_id`'s at these
        generations.

        Empty when the incarnation in the registry is another one. This stands in for a fenced write while
        Postgres
        is out of reach: a takeover changes both, so either is a proof.
        """
        ...

    async def epochs(self) -> dict[int, int]:
        """The highest epoch seen of each shard."""
        ...

    async def raise_epochs(self, epochs: Mapping[int, int]) -> None:
        """Remember these epochs where they are higher than what is known. Idempotent."""
        ...

    async def incarnation(self) -> int:
        """The number of the cluster's history; 0 before the first."""
        ...

    async def raise_incarnation(self, incarnation: int) -> int:
        """Raise the incarnation to at least this, and give the one in force.

        Raise it here *before* Postgres: from then on no proof made under the old one succeeds.
        """
        ...

    async def cluster_facts(self) -> ClusterFacts | None:
        """What a leader last wrote about Postgres; None when nobody ever did."""
        ...

    async def put_cluster_facts(self, term: LeaderTerm, facts: ClusterFacts) -> None:
        """Remember the facts. Raises LeaderLost when the term is over."""
        ...

    async def doubt(self) -> Doubt | None:
        """The last one that was put; None when there was none."""
        ...

    async def put_doubt(self, doubt: Doubt) -> None:
        """Tell the leader, who has perhaps not seen it: then everybody stops."""
        ...

    async def resumption(self) -> Resumption | None:
        """The last one that was begun; None when there was none."""
        ...

    async def put_resumption(self, resumption: Resumption) -> None:
        """Remember it. Put it *before* its incarnation is raised: whoever sees that one finds this one."""
        ...

    async def lease_ms_max(self) -> int:
        """The longest lease that was ever granted, in milliseconds; 0 before the first note of it."""
        ...

    async def raise_lease_ms_max(self, lease_ms: int) -> None:
        """Remember it where it is longer than what is known. Idempotent; do it before such a grant."""
        ...

    async def request_drain(self, timer_id: str) -> None:
        """Ask for a timer to be emptied. Idempotent."""
        ...

    async def cancel_drain(self, timer_id: str) -> None:
        """Take such a request back. Idempotent."""
        ...


class Election(Protocol):
    """One of several nodes leads at a time. The registry decides; local time only ends trust early."""

    def term(self) -> LeaderTerm | None:
        """The term that this node may act under now, else None. Ask again before every step."""
        ...

    def leader_id(self) -> str | None:
        """Who leads, as last heard; a hint for people and redirects, never a licence to act."""
        ...

    async def wait_for_change(self, known: LeaderTerm | None) -> LeaderTerm | None:
        """Wait until the term differs from `known`, and give it."""
        ...

    async def resign(self) -> None:
        """Give the leadership up, if it is held, so that another need not wait for the lease to lapse."""
        ...
