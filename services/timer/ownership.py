"""Which shards are ours, and how do we come by them and let them go? (Design, section 6.)

The registry says which shards *should* be ours; Postgres says which *are*: those whose epoch we raised.
Taking a shard goes in this order, and the order is what makes it right:

    read its near rows (warm)  ->  raise its epoch  ->  read its leases  ->  read again what is due soon
    ->  dispatch ->  read the rest again

Nothing that an earlier owner wrote is missed, for its writes waited for the fence or failed; nothing is
dispatched from rows that were read before the epoch alone, for each grant is a compare-and-set. A shard
that should be another's is served until we find ourselves fenced: then it is let go, with all that was in
memory for it.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import structlog

from tickwheel.clock import mono_us
from tickwheel.domain import job
from tickwheel.domain.run import AttemptState
from tickwheel.domain.shard import EPOCH_TAKING_BITS, GRANTS_PER_EPOCH_MAX, first_fence
from tickwheel.domain.timer_rows import Bools, Int64s
from tickwheel.errors import StoreUnavailable, TickwheelError
from tickwheel.ports import RegistryError
from tickwheel.postgres.history import HistoryChanged
from tickwheel.postgres.timer_store import BatchRefused, CommitUnknown, Fence, LeaseRows, ShardBusy
from tickwheel.services.timer.lane import IN_WHEEL, Batch, Lane, hex_ids
from tickwheel.services.timer.loader import LOOKAHEAD_US

if TYPE_CHECKING:
    from tickwheel.services.timer.node import TimerNode

log = structlog.get_logger()

SOON_US: Final = 2_000_000
TAKE_CHUNK: Final = 64
TAKE_TRIES_MAX: Final = 20
RETRY_S: Final = 0.2
PROOF_TIMEOUT_S: Final = 1.5
PROOF_INTERVAL_S: Final = 1.0
PROOF_GAP_S: Final = 0.05
NO_TIMEOUT_MS: Final = 10 * 365 * 86_400_000


class Ownership:
    """Takes, re-takes, proves and loses shards."""

    def __init__(self, node: "TimerNode") -> None:
        self._node = node
        self.desired: dict[int, int] = {}
        """Shard -> generation, as the registry has it for us."""
        self.generations: dict[int, int] = {}
        """Shard -> generation under which we took it."""
        self._retaking: set[int] = set()
        """Shards whose epoch we are raising: a call of our own that finds the newer one has lost nothing."""
        self._wake = asyncio.Event()
        self._prove = asyncio.Event()

    def want(self, desired: Mapping[int, int]) -> None:
        """The registry's newest word."""
        self.desired = dict(desired)
        self._wake.set()

    def wake(self) -> None:
        """Looks again at what should be ours."""
        self._wake.set()

    def fence(self) -> Fence:
        """Of all shards that are ours."""
        epochs = self._node.epochs
        shards = sorted(epochs)
        return Fence(np.array(shards, dtype=np.int16), np.array([epochs[s] for s in shards], dtype=np.int64))

    # Taking.

    async def run(self) -> None:
        """Takes what should be ours, until it is cancelled."""
        node = self._node
        while True:
            await self._wake.wait()
            self._wake.clear()
            if node.halted:
                continue  # Going on wakes us.
            missing = sorted(
                shard
                for shard, generation in self.desired.items()
                if shard not in node.epochs or self.generations.get(shard, 0) < generation
            )
            if not missing:
                continue
            try:
                for start in range(0, len(missing), TAKE_CHUNK):
                    await self._acquire(missing[start : start + TAKE_CHUNK])
            except (TickwheelError, RegistryError) as error:
                log.warning("take_failed", shards=len(missing), reason=str(error))
            if any(shard not in node.epochs for shard in self.desired):
                await asyncio.sleep(RETRY_S)
                self._wake.set()

    async def _acquire(self, shards: list[int]) -> None:
        node = self._node
        loader = node.loader
        generations = {shard: self.desired[shard] for shard in shards if shard in self.desired}
        fresh = [shard for shard in generations if shard not in node.epochs]
        node.loading.update(fresh)
        try:
            began = mono_us()
            await loader.find_tenants(list(generations))
            until_us = node.clock.now_us() + LOOKAHEAD_US
            node.horizon_us = max(node.horizon_us, until_us)
            await loader.load(fresh, 0, until_us)
            warmed = mono_us()
            self._retaking.update(generations)
            try:
                epochs = await self._take(generations)
                self._note(epochs, generations)
            finally:
                self._retaking.difference_update(generations)
            taken = sorted(epochs)
            try:
                await self._learn(taken, until_us)
            except BaseException:
                # Ours and not known: nobody would ever fire or expire what lies there. From the start again.
                self.let_go(taken)
                raise
        finally:
            node.loading.difference_update(fresh)
        node.streams.shards_loaded(set(taken))
        node.shards_changed()
        log.info(
            "shards_taken",
            count=len(taken),
            warm_ms=(warmed - began) // 1_000,
            gap_ms=(mono_us() - warmed) // 1_000,
        )
        self._node.spawn(self._after_taking(taken, epochs, until_us))

    async def _learn(self, taken: list[int], until_us: int) -> None:
        """Reads what earlier owners may have written until the epochs rose: leases, and what is due soon."""
        node = self._node
        leases = await node.store.load_leases(taken)
        learnt_us = mono_us()
        await node.catalog.ensure_definitions([], np.unique(leases.template).tolist())
        self._adopt(leases, learnt_us)
        for shard in taken:
            node.loader.loaded_until_us.setdefault(shard, until_us)
        await node.loader.load(taken, 0, node.clock.now_us() + SOON_US)

    async def _after_taking(self, taken: list[int], epochs: dict[int, int], until_us: int) -> None:
        try:
            await self._node.loader.load(taken, 0, until_us)
        except TickwheelError as error:
            log.warning("reload_failed", reason=str(error))
        try:
            await self._node.registry.raise_epochs(epochs)
        except RegistryError as error:
            log.warning("epochs_not_noted", reason=str(error))

    async def _take(self, generations: Mapping[int, int]) -> dict[int, int]:
        """Raises the epochs, and ends whoever holds a fence too long."""
        node = self._node
        for _ in range(TAKE_TRIES_MAX):
            try:
                return self._of_our_history(await node.store.take(generations, node.clock.now_us()))
            except ShardBusy:
                pids = await node.store.end_blockers(sorted(generations))
                log.warning("fence_blockers_ended", pids=pids)
            except CommitUnknown as error:
                # Taking again is harmless: the epoch only grows, and it is ours either way.
                log.warning("take_unknown", reason=error.reason)
                await asyncio.sleep(RETRY_S)
        raise StoreUnavailable("Postgres", "a fence could not be had")

    def _of_our_history(self, epochs: dict[int, int]) -> dict[int, int]:
        """The epochs that were taken, if they are of the incarnation that we know. Raises HistoryChanged."""
        node = self._node
        newest = max(epochs.values(), default=0) >> EPOCH_TAKING_BITS
        if newest > node.incarnation:
            node.history.halt(f"the cluster was resumed as incarnation {newest}")
            raise HistoryChanged(node.halted)
        return epochs

    def _note(self, epochs: Mapping[int, int], generations: Mapping[int, int]) -> None:
        node = self._node
        for shard, epoch in epochs.items():
            node.epochs[shard] = epoch
            node.fences[shard] = first_fence(epoch) + 1
            self.generations[shard] = generations[shard]
        node.metrics.epochs_raised(len(epochs))

    def _adopt(self, rows: LeaseRows, learnt_us: int) -> None:
        """Live attempts of shards that are ours now: each has one full TTL to announce itself."""
        node = self._node
        tokens = hex_ids(rows.token_hi, rows.token_lo)
        known = node.leases.by_token
        fresh = np.array([token not in known for token in tokens], dtype=np.bool_)
        if not fresh.any():
            return
        slots = self._add(rows, fresh, tokens)
        node.leases.deadline_mono_us[slots] = learnt_us + node.leases.ttl_us[slots]
        node.watch_leases(slots)

    def _add(self, rows: LeaseRows, which: Bools, tokens: list[str]) -> Int64s:
        now_us = self._node.clock.now_us()
        columns = {
            name: getattr(rows, name)[which]
            for name in (
                "shard",
                "run_hi",
                "run_lo",
                "token_hi",
                "token_lo",
                "fence",
                "attempt",
                "schedule_hi",
                "schedule_lo",
                "version",
                "template",
                "tenant",
                "route",
                "flags",
                "spent",
                "schedule_us",
                "due_us",
                "lease_us",
                "worker",
                "priority",
            )
        }
        columns["ttl_us"] = rows.lease_ms[which].astype(np.int64) * 1_000
        timeouts_us = self._attempt_timeouts_us(columns["template"])
        columns["attempt_deadline_us"] = np.maximum(columns["lease_us"] + timeouts_us, now_us)
        return self._node.leases.add(
            [t for t, keep in zip(tokens, which.tolist(), strict=True) if keep], columns
        )

    def _attempt_timeouts_us(self, template_ids: Int64s) -> Int64s:
        """How long an attempt of each template may take; a template that cannot be read has the default."""
        templates = self._node.catalog.templates
        distinct, inverse = np.unique(template_ids, return_inverse=True)
        timeouts_ms = []
        for key in distinct.tolist():
            template = templates.get(key)
            timeouts = template.timeouts if isinstance(template, job.JobTemplate) else job.Timeouts()
            timeouts_ms.append(timeouts.attempt_ms_max or NO_TIMEOUT_MS)
        return np.array(timeouts_ms, dtype=np.int64)[inverse] * 1_000

    # Taking again.

    async def retake(self, lane: Lane, batch: Batch, shards: Sequence[int]) -> None:
        """After a write whose answer never came: the epoch rises, which waits for the orphan; then the
        rows tell.

        The lane stands still meanwhile, so nothing is written under what may be wrong.
        """
        self._retaking.update(shards)
        try:
            await self._retake(lane, batch, shards)
        finally:
            self._retaking.difference_update(shards)

    async def _retake(self, lane: Lane, batch: Batch, shards: Sequence[int]) -> None:
        node = self._node
        while True:
            mine = {s: self.generations[s] for s in shards if s in node.epochs}
            if not mine or node.halted:
                return  # Whoever goes on after a halt forgets everything first.
            try:
                epochs = await self._take(mine)
                rows = await node.store.load_leases(sorted(epochs))
                break
            except TickwheelError as error:
                log.warning("retake_waits", lane=lane.number, reason=str(error))
                await asyncio.sleep(RETRY_S)
        gone = [shard for shard in mine if shard not in epochs]
        if gone:
            self.let_go(gone)
        self._note(epochs, mine)
        self._compare(lane, batch, rows, set(epochs))
        self._reread(batch)
        log.info("shards_retaken", lane=lane.number, count=len(epochs))

    def _compare(self, lane: Lane, batch: Batch, rows: LeaseRows, shards: set[int]) -> None:
        """What the rows say about the batch: which outcomes were recorded, which grants were committed."""
        node = self._node
        leases = node.leases
        tokens = hex_ids(rows.token_hi, rows.token_lo)
        standing = set(tokens)
        here = leases.held(batch.outcome_handles) & np.isin(
            leases.shard[batch.outcome_slots], np.array(sorted(shards), dtype=np.int16)
        )
        slots = batch.outcome_slots[here]
        by_owner = batch.by_owner[here]
        applied = np.array([leases.tokens[slot] not in standing for slot in slots.tolist()], dtype=np.bool_)
        if len(slots):
            node.streams.tell_recorded(slots[applied & ~by_owner])
            node.streams.tell_lapsed(slots[applied & by_owner], "the lease was ended by its owner")
            leases.remove(slots[applied])
            lane.requeue_ended(batch.ended, slots[~applied])
        mine = batch.granted_tokens()
        unsent = np.array([t not in leases.by_token and t in mine for t in tokens], dtype=np.bool_)
        if unsent.any():
            added = self._add(rows, unsent, tokens)
            node.end_owned(added, AttemptState.RELEASED)
            log.info("unsent_grants_released", lane=lane.number, count=len(added))
        # Of any other lease that we do not know a worker may hold it: it has its time to say so.
        self._adopt(rows, mono_us())

    def _reread(self, batch: Batch) -> None:
        node = self._node
        entries = node.entries
        handles = np.unique(np.concatenate([batch.move_handles, batch.grant_handles]))
        handles = handles[entries.alive(handles)]
        slots = entries.slot(handles)
        shard, hi, lo = entries.shard[slots], entries.ref_hi[slots], entries.ref_lo[slots]
        entries.state[slots] = IN_WHEEL
        # Freed, not kept: whatever the row says now is put in anew.
        entries.free(handles)
        node.loader.refresh_soon(shard, hi, lo)

    # Losing.

    def lost(self, shards: Sequence[int], fence: Fence) -> None:
        """A call under `fence` found these shards under another epoch. Those that we took again since are
        ours."""
        if shards:
            self._node.metrics.fenced()
        sent = dict(zip(fence.shards.tolist(), fence.epochs.tolist(), strict=True))
        mine = self._node.epochs
        gone = [s for s in shards if s not in self._retaking and s in mine and mine[s] == sent.get(s)]
        if gone:
            self.let_go(gone)

    def let_go(self, shards: Sequence[int]) -> None:
        node = self._node
        gone = set(shards)
        for shard in gone:
            node.epochs.pop(shard, None)
            self.generations.pop(shard, None)
        slots = node.leases.of_shards(gone)
        node.streams.shards_lost(slots)
        for lane in node.lanes:
            lane.drop_ended(slots)
        node.leases.remove(slots)
        node.forget_rows(node.entries.of_shards(sorted(gone)))
        node.loader.forget(gone)
        node.metrics.shards_lost(len(gone))
        log.info("shards_lost", count=len(gone))
        node.shards_changed()
        self._wake.set()

    # Proof.

    def prove_soon(self) -> None:
        self._prove.set()

    async def run_proofs(self) -> None:
        """Stamps `seen` over all shards, every second and whenever renewals wait; answers what waited."""
        node = self._node
        while True:
            try:
                async with asyncio.timeout(PROOF_INTERVAL_S):
                    await self._prove.wait()
            except TimeoutError:
                pass
            self._prove.clear()
            if node.epochs:
                begun = mono_us()
                proven = await self._prove_once()
                if proven:
                    node.renewals_proven(begun, proven)
            await asyncio.sleep(PROOF_GAP_S)

    async def _prove_once(self) -> tuple[int, ...]:
        """The shards that are shown to be ours still: by a fenced write, or else by the registry."""
        node = self._node
        fence = self.fence()
        if node.halted:
            # A write to a Postgres in doubt proves nothing.
            return await self._prove_by_registry(fence)
        try:
            async with asyncio.timeout(PROOF_TIMEOUT_S):
                lost = await node.store.stamp(fence, node.clock.now_us())
            node.postgres_seen()
        except (TimeoutError, StoreUnavailable, CommitUnknown, BatchRefused) as error:
            node.postgres_missed(str(error) or "no answer in time")
            return await self._prove_by_registry(fence)
        if lost:
            self.lost(lost, fence)
        worn = [s for s in fence.shards.tolist() if s in node.epochs and self._is_worn(s)]
        if worn:
            self._node.spawn(self._renew_epochs(worn))
        return tuple(s for s in fence.shards.tolist() if s in node.epochs)

    def _is_worn(self, shard: int) -> bool:
        used = int(self._node.fences[shard]) - first_fence(self._node.epochs[shard])
        return used > GRANTS_PER_EPOCH_MAX // 2

    async def _renew_epochs(self, shards: list[int]) -> None:
        """The grants of these epochs are half used up: new epochs, before they run out."""
        mine = {s: self.generations[s] for s in shards if s in self._node.epochs}
        try:
            self._note(await self._take(mine), mine)
        except TickwheelError as error:
            log.warning("epoch_renewal_failed", reason=str(error))

    async def _prove_by_registry(self, fence: Fence) -> tuple[int, ...]:
        node = self._node
        generations = {s: self.generations[s] for s in fence.shards.tolist() if s in self.generations}
        try:
            async with asyncio.timeout(PROOF_TIMEOUT_S):
                return tuple(sorted(await node.registry.prove(node.timer_id, generations, node.incarnation)))
        except (TimeoutError, RegistryError) as error:
            log.warning("proof_failed", reason=str(error) or "no answer in time")
            return ()
