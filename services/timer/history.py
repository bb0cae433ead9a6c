"""May this timer go on writing to the Postgres that it finds? (Design, section 6: promoted or restored.)

Each new connection is compared with what the leader keeps in the registry. A difference *halts* the timer:
every connection is dropped and none is made again, so nothing is written and nothing read into memory;
streams stay, outcomes wait at their workers, and what runs is renewed by the registry's proof alone. A timer
whose connections still reach the old Postgres is told by the registry: the leader's own halt, or a newer
incarnation.

It goes on only when somebody has accepted what stands in Postgres (`tickwheel cluster resume`): a log that
was too short grows, so looking again tells nothing. Going on forgets everything that was in memory, numbers
of tenants, routes and workers included, for in the other history they may mean something else; then the
shards are taken anew. After a resume nothing is granted for as long as a lease that the lost commits gave
may still run (rule 26 of docs/decisions/0004-lease-rules.md).
"""

import asyncio
from typing import TYPE_CHECKING, Final

import structlog

from tickwheel.clock import mono_us
from tickwheel.domain.job import LEASE_DEFAULT_MS, LEASE_MS_MAX
from tickwheel.errors import TickwheelError
from tickwheel.ports import ClusterFacts, Doubt, RegistryError
from tickwheel.postgres.history import HistoryChanged, difference
from tickwheel.postgres.timer_store import Known

if TYPE_CHECKING:
    from tickwheel.services.timer.node import TimerNode

log = structlog.get_logger()

LOOK_INTERVAL_S: Final = 1.0
REGISTRY_TIMEOUT_S: Final = 1.0
UNDER_WAY_MAX_S: Final = 15.0
NOTE_AGAIN_US: Final = 10_000_000
NOT_YET_US: Final = 1 << 62
"""Of `grants_from_mono_us`: until the registry has said whether a resume was a moment ago."""
HOLD_MARGIN_MS: Final = 1_000
"""For what the clocks of two Postgres may differ by."""


class History:
    """Knows which history the timer is in, and stops it when that is in doubt."""

    def __init__(self, node: "TimerNode") -> None:
        self._node = node
        self._known: ClusterFacts | None = None
        self._incarnation = 0
        """The registry's, as last heard."""
        self._doubt: Doubt | None = None
        """What this timer found and has not reported yet."""
        self._lease_ms_noted = LEASE_DEFAULT_MS
        self._note_from_us = 0

    async def enter(self) -> None:
        """At the start: waits until what is found may be used, and takes its incarnation. Raises
        StoreUnavailable."""
        node = self._node
        said = ""
        while True:
            known, incarnation = await self.known()
            found = await node.store.probe()
            why = difference(known, incarnation, found)
            if not why:
                break
            if why != said:
                log.error("timer_waits_for_its_history", reason=why)
                said = why
            await asyncio.sleep(LOOK_INTERVAL_S)
        node.incarnation = found.incarnation
        node.store.watch(self)

    def admit(self) -> None:
        """Raises HistoryChanged while the timer is halted."""
        if self._node.halted:
            raise HistoryChanged(self._node.halted)

    async def known(self) -> Known:
        """What the registry knows; while it is away, what it knew last."""
        await self._hear()
        return self._known, self._incarnation

    def check(self, known: Known, found: ClusterFacts) -> None:
        """For each new connection, before its first use. Raises HistoryChanged, and halts the timer."""
        why = difference(*known, found)
        if not why and found.incarnation != self._node.incarnation:
            self.halt(f"the cluster was resumed as incarnation {found.incarnation}")
        elif why:
            self.halt(why)
            self._doubt = Doubt(self._node.timer_id, self._node.incarnation, why)
        self.admit()

    def halt(self, why: str) -> None:
        """Nothing is granted, written or read from now on. Idempotent."""
        node = self._node
        if node.halted:
            return
        node.halted = why
        log.error("timer_halted", reason=why, incarnation=node.incarnation)
        node.metrics.halt(True)
        node.halt_changed.set()
        node.spawn(node.store.renew())

    async def run(self) -> None:
        """Looks at the registry every second, and goes on when that is safe, until it is cancelled."""
        node = self._node
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            if not await self._hear():
                continue
            if self._node.grants_from_mono_us == NOT_YET_US:
                await self._hold_at_start()
            if self._incarnation > node.incarnation:
                self.halt(f"the cluster was resumed as incarnation {self._incarnation}")
            elif self._known is not None and self._known.halted:
                self.halt(f"the leader found: {self._known.halted}")
            if self._doubt is not None:
                await self._report(self._doubt)
            if node.halted:
                await self._try_to_go_on()

    async def _hear(self) -> bool:
        """Reads what the registry knows. False when it did not answer: then the last word stands."""
        registry = self._node.registry
        try:
            async with asyncio.timeout(REGISTRY_TIMEOUT_S):
                incarnation = await registry.incarnation()
                known = await registry.cluster_facts()
        except (TimeoutError, RegistryError) as error:
            log.debug("history_not_heard", reason=str(error) or "no answer in time")
            return False
        self._incarnation, self._known = incarnation, known
        if known is None:
            # A registry that knows nothing was wiped, and this with it.
            self._lease_ms_noted = LEASE_DEFAULT_MS
        return True

    async def _try_to_go_on(self) -> None:
        node = self._node
        known, incarnation = self._known, self._incarnation
        try:
            found = await node.store.probe()
        except TickwheelError as error:
            log.info("halted_timer_waits", reason=str(error))
            return
        if difference(known, incarnation, found) or found.incarnation <= node.incarnation:
            return
        try:
            hold_ms = await self._hold_ms(found.incarnation)
        except RegistryError as error:
            log.info("halted_timer_waits", reason=str(error))
            return
        await self._go_on(found.incarnation, hold_ms)

    async def _report(self, doubt: Doubt) -> None:
        """The leader may not have seen it: a log that was too short grows."""
        try:
            await self._node.registry.put_doubt(doubt)
        except RegistryError as error:
            log.warning("doubt_not_reported", reason=str(error))
        else:
            self._doubt = None

    async def _hold_ms(self, incarnation: int) -> int:
        """How long nothing may be granted under an incarnation that is new to this timer."""
        resumption = await self._node.registry.resumption()
        if resumption is None or resumption.incarnation != incarnation:
            return LEASE_MS_MAX
        return resumption.hold_ms

    async def _go_on(self, incarnation: int, hold_ms: int) -> None:
        node = self._node
        try:
            async with asyncio.timeout(UNDER_WAY_MAX_S):
                await node.store.renew()
                for lane in node.lanes:
                    await lane.idle.wait()
        except TimeoutError:
            log.warning("halted_timer_waits", reason="a call to the old Postgres has not ended")
            return
        # From here to the end nothing is awaited: nobody finds the memory half forgotten.
        node.forget_everything()
        node.incarnation = incarnation
        self._hold(hold_ms)
        node.halted = ""
        node.metrics.halt(False)
        node.halt_changed.set()
        node.ownership.wake()
        node.spawn(self._register_again())
        log.warning("timer_goes_on", incarnation=incarnation, granting_after_ms=hold_ms)

    async def _register_again(self) -> None:
        try:
            await self._node.register_again()
        except TickwheelError as error:
            log.warning("timer_not_registered", reason=str(error))

    async def _hold_at_start(self) -> None:
        """A timer that starts soon after a resume waits for what is left of its time."""
        node = self._node
        try:
            resumption = await node.registry.resumption()
        except RegistryError as error:
            log.info("resumption_not_read", reason=str(error))
            return
        left_ms = 0
        if resumption is not None and resumption.incarnation == node.incarnation:
            end_ms = resumption.at_us // 1_000 + resumption.hold_ms
            left_ms = min(resumption.hold_ms, end_ms - node.clock.now_us() // 1_000)
        self._hold(left_ms)

    def _hold(self, hold_ms: int) -> None:
        """Grants nothing for so long."""
        node = self._node
        if hold_ms <= 0:
            node.grants_from_mono_us = 0
            self._wake_lanes()
            return
        hold_ms += HOLD_MARGIN_MS
        node.grants_from_mono_us = mono_us() + hold_ms * 1_000
        log.info("grants_held", for_ms=hold_ms)
        node.spawn(self._wake_after(hold_ms))

    async def _wake_after(self, hold_ms: int) -> None:
        await asyncio.sleep(hold_ms / 1_000)
        self._wake_lanes()

    def _wake_lanes(self) -> None:
        for lane in self._node.lanes:
            lane.wake()

    async def note_lease(self, lease_ms: int) -> None:
        """Before a grant of such a lease: the registry has to know how long one may last after a loss."""
        if lease_ms <= self._lease_ms_noted or mono_us() < self._note_from_us:
            return
        try:
            async with asyncio.timeout(REGISTRY_TIMEOUT_S):
                await self._node.registry.raise_lease_ms_max(lease_ms)
        except (TimeoutError, RegistryError) as error:
            # Nothing stands still because etcd is away. It is noted with a later grant.
            self._note_from_us = mono_us() + NOTE_AGAIN_US
            log.warning("lease_length_not_noted", lease_ms=lease_ms, reason=str(error) or "no answer in time")
            return
        self._lease_ms_noted = lease_ms
