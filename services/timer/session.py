"""What does the timer owe one worker stream? Credit, digest, renewals and what waits to be sent; no I/O, no
clock.

Rules (design, section 8; docs/decisions/0004-lease-rules.md):

* A grant goes out only against credit: `grant_count_max` minus all that was ever granted on this stream.
* Responses are numbered. What the worker holds after response k is known here: grants add to it, `recorded`
  and refusals take from it. A heartbeat names the last response taken, with a count and a digest; where
  they differ from ours, nothing is renewed, and the worker is asked to list what it holds by name.
* A renewal counts for the timer from the receipt of the heartbeat, and is answered only after a proof of
  ownership that began later (`renewal_proven`).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

_MASK: Final = (1 << 64) - 1
FRAME_BYTES_MAX: Final = 1 << 20
FRAME_GRANTS_MAX: Final = 2_000
OUTBOX_GRANTS_MAX: Final = 20_000


@dataclass(frozen=True, slots=True)
class Refused:
    run: str
    attempt: int
    token: str
    moved: bool
    message: str


@dataclass(frozen=True, slots=True)
class Cancelled:
    run: str
    attempt: int
    token: str
    reason: str
    grace_ms: int


@dataclass(frozen=True, slots=True)
class Renewal:
    sent_us: int
    sequence: int
    shards: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pending:
    run: str
    attempt: int
    shard: int
    since_us: int


@dataclass(slots=True)
class GrantChunk:
    """Grants of one batch for one stream, encoded, with what the session must know of them."""

    wire: bytes
    slots: I64
    numbers: U64
    clock_us: int

    def __len__(self) -> int:
        return len(self.slots)


@dataclass(slots=True)
class Frame:
    """One response to be sent."""

    sequence: int
    grants: list[bytes] = field(default_factory=list)
    grant_count: int = 0
    grant_clock_us: int = 0
    slots: list[I64] = field(default_factory=list)
    recorded: list[str] = field(default_factory=list)
    refusals: list[Refused] = field(default_factory=list)
    cancels: list[Cancelled] = field(default_factory=list)
    renewal: Renewal | None = None
    welcome: bool = False
    resync: bool = False
    drain: str | None = None
    backlog_count: int = -1


class WorkerSession:
    """One stream with one worker."""

    __slots__ = (
        "_backlog",
        "_base_count",
        "_base_digest",
        "_cancels",
        "_chunks",
        "_deltas",
        "_drain",
        "_mark_count",
        "_mark_digest",
        "_recorded",
        "_refusals",
        "_renewal",
        "_resync",
        "_welcome",
        "awaiting",
        "closed",
        "grant_count_max",
        "granted_count",
        "heard_mono_us",
        "last_heartbeat",
        "leaving",
        "number",
        "outbox_grants",
        "pending",
        "routes",
        "sequence",
        "silent",
        "tenants",
        "worker_id",
        "worker_no",
    )

    def __init__(
        self,
        number: int,
        worker_no: int,
        worker_id: str,
        routes: frozenset[int],
        tenants: frozenset[int] | None,
        grant_count_max: int,
    ) -> None:
        self.number = number
        self.worker_no = worker_no
        self.worker_id = worker_id
        self.routes = routes
        self.tenants = tenants
        self.grant_count_max = grant_count_max
        self.granted_count = 0
        """Granted or being granted: credit is taken when a run is picked, and given back if the grant
        fails."""
        self.heard_mono_us = 0
        self.leaving = False
        self.closed = False
        self.silent = False
        """Nothing was heard for longer than a heartbeat's interval: it may be frozen, so nothing goes to
        it."""
        self.sequence = 0
        self.awaiting: tuple[int, int, int] | None = None
        """A heartbeat that waits for its proof: (sent_us of the worker, its last_sequence, received here)."""
        self.last_heartbeat: tuple[int, int, int] | None = None
        """The last one that renewed, in the same form."""
        self.pending: dict[str, Pending] = {}
        """Announced attempts without a lease here, by token: their shard loads, or a proof has to follow."""
        self.outbox_grants = 0
        # What the worker holds after the last response that it acknowledged, and what each later one changes.
        self._base_count = 0
        self._base_digest = 0
        self._deltas: deque[tuple[int, int, int]] = deque()
        # Of the response that is being put together.
        self._mark_count = 0
        self._mark_digest = 0
        self._chunks: deque[GrantChunk] = deque()
        self._recorded: list[str] = []
        self._refusals: list[Refused] = []
        self._cancels: list[Cancelled] = []
        self._renewal: Renewal | None = None
        self._welcome = True
        self._resync = False
        self._drain: str | None = None
        self._backlog = -1

    # Credit.

    @property
    def credit(self) -> int:
        if self.closed or self.leaving or self.silent or self.outbox_grants >= OUTBOX_GRANTS_MAX:
            return 0
        return max(0, self.grant_count_max - self.granted_count)

    def reserve(self, count: int) -> None:
        assert 0 <= count <= self.credit
        self.granted_count += count

    def give_back(self, count: int) -> None:
        self.granted_count -= count

    # What is to be sent.

    def add_grants(self, chunk: GrantChunk) -> None:
        """Takes grants whose credit was reserved."""
        if len(chunk):
            self._chunks.append(chunk)
            self.outbox_grants += len(chunk)

    def add_recorded(self, tokens: list[str], numbers: U64) -> None:
        self._recorded.extend(tokens)
        self._mark_count -= len(tokens)
        self._mark_digest -= int(numbers.sum(dtype=np.uint64)) if len(numbers) else 0

    def add_refusal(self, refusal: Refused, number: int, held: bool) -> None:
        """`held`: the worker counts the attempt in its digest until it reads this."""
        self._refusals.append(refusal)
        if held:
            self._mark_count -= 1
            self._mark_digest -= number

    def add_cancel(self, cancel: Cancelled) -> None:
        self._cancels.append(cancel)

    def add_drain(self, reason: str) -> None:
        self._drain = reason
        self.leaving = True

    def add_backlog(self, count: int) -> None:
        self._backlog = count

    @property
    def has_output(self) -> bool:
        return bool(
            self._welcome
            or self._chunks
            or self._recorded
            or self._refusals
            or self._cancels
            or self._renewal
            or self._resync
            or self._drain is not None
            or self._backlog >= 0
        )

    def take_frame(self) -> Frame | None:
        """The next response, of at most about `FRAME_BYTES_MAX` bytes, or None when nothing waits."""
        if not self.has_output:
            return None
        self.sequence += 1
        frame = Frame(self.sequence)
        frame.welcome, self._welcome = self._welcome, False
        frame.recorded, self._recorded = self._recorded, []
        frame.refusals, self._refusals = self._refusals, []
        frame.cancels, self._cancels = self._cancels, []
        frame.renewal, self._renewal = self._renewal, None
        frame.resync, self._resync = self._resync, False
        frame.drain, self._drain = self._drain, None
        frame.backlog_count, self._backlog = self._backlog, -1
        byte_count = 64 * len(frame.recorded) + 256 * (len(frame.refusals) + len(frame.cancels))
        while self._chunks:
            chunk = self._chunks[0]
            if frame.grants and (
                byte_count + len(chunk.wire) > FRAME_BYTES_MAX
                or frame.grant_count + len(chunk) > FRAME_GRANTS_MAX
            ):
                break
            self._chunks.popleft()
            frame.grants.append(chunk.wire)
            frame.grant_count += len(chunk)
            frame.slots.append(chunk.slots)
            frame.grant_clock_us = (
                min(frame.grant_clock_us, chunk.clock_us) if frame.grant_clock_us else chunk.clock_us
            )
            byte_count += len(chunk.wire)
            self.outbox_grants -= len(chunk)
            self._mark_count += len(chunk)
            self._mark_digest += int(chunk.numbers.sum(dtype=np.uint64))
        if self._mark_count or self._mark_digest:
            self._deltas.append((self.sequence, self._mark_count, self._mark_digest))
            self._mark_count = 0
            self._mark_digest = 0
        return frame

    # What the worker says.

    def _settle(self, last_sequence: int) -> None:
        while self._deltas and self._deltas[0][0] <= last_sequence:
            _, count, digest = self._deltas.popleft()
            self._base_count += count
            self._base_digest = (self._base_digest + digest) & _MASK

    def heartbeat(
        self, sent_us: int, last_sequence: int, held_count: int, held_digest: int, received_us: int
    ) -> bool:
        """Takes a heartbeat in; returns whether it renews. If not, the worker is asked for its list."""
        self._settle(last_sequence)
        if held_count != self._base_count or held_digest != self._base_digest:
            self._resync = True
            return False
        self.accept(sent_us, last_sequence, received_us)
        return True

    def accept(self, sent_us: int, last_sequence: int, received_us: int) -> None:
        """A heartbeat with which we agree waits for its proof."""
        self.awaiting = self.last_heartbeat = (sent_us, last_sequence, received_us)

    def named(self, last_sequence: int, numbers: Sequence[int]) -> None:
        """The worker has listed what it holds after `last_sequence`: that is the truth from here on."""
        self._settle(last_sequence)
        self._base_count = len(numbers)
        self._base_digest = sum(numbers) & _MASK
        self._resync = False

    def renewal_proven(self, begun_us: int, shards: tuple[int, ...]) -> bool:
        """A proof that began at `begun_us` has shown these shards to be ours: answer what waited for it."""
        if self.awaiting is None or self.awaiting[2] > begun_us:
            return False
        sent_us, sequence, _ = self.awaiting
        self._renewal = Renewal(sent_us, sequence, shards)
        self.awaiting = None
        return True
