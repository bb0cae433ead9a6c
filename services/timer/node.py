"""One timer: what its parts share, and the loops that drive them.

    registry --desired--> Ownership --taken--> Loader --rows--> wheel --due--> Lane --batches--> Postgres
                                                                                 |  ^
                                                                grants, recorded v  | outcomes
                                                                          Streams (one session a worker)

Everything here runs on one event loop and is therefore never touched by two at once; whatever awaits may
find the world changed, and says so by handles that are not alive any more.
"""

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, Final

import numpy as np
import structlog

from tickwheel.clock import ClusterClock, mono_us
from tickwheel.domain import flags as bits
from tickwheel.domain import job
from tickwheel.domain.ids import run_name
from tickwheel.domain.lease import LEASE_LAPSED
from tickwheel.domain.misfire import MisfirePolicy, MisfireRules
from tickwheel.domain.run import AttemptState, RunState
from tickwheel.domain.timer_rows import KIND_SCHEDULE, Int16s, Int64s, TimerRows, Uint64s
from tickwheel.errors import TickwheelError
from tickwheel.ports import ShardRegistry
from tickwheel.postgres.arrays import join_uuid
from tickwheel.postgres.timer_store import BatchRefused, Fence, TimerStore
from tickwheel.runtime.config import TimerSettings
from tickwheel.services.timer import plan
from tickwheel.services.timer.catalog import Catalog
from tickwheel.services.timer.entries import EntryStore
from tickwheel.services.timer.frames import Frames, duration, stored_progress
from tickwheel.services.timer.history import NOT_YET_US, History
from tickwheel.services.timer.lane import (
    BACKOFF_LOCKED_US,
    IN_WHEEL,
    READY,
    Ended,
    Lane,
)
from tickwheel.services.timer.leases import ENDING, ENDING_BY_OWNER, LeaseTable
from tickwheel.services.timer.loader import LOOKAHEAD_US, Loader
from tickwheel.services.timer.meters import Meters
from tickwheel.services.timer.ownership import Ownership
from tickwheel.services.timer.session import WorkerSession
from tickwheel.services.timer.streams import Streams
from tickwheel.services.timer.traces import Traces
from tickwheel.services.timer.wheel import TimingWheel
from tickwheel.v1 import worker_service_pb2 as pb

log = structlog.get_logger()

SHARD_NUMBERS: Final = 4096
LANE_COUNT: Final = 2
ENTRIES_MAX: Final = 4_000_000
TICK_SLEEP_MAX_S: Final = 0.25
POP_MAX: Final = 20_000
SETTLE_INTERVAL_S: Final = 0.25
SWEEP_INTERVAL_S: Final = 1.0
CANCEL_INTERVAL_S: Final = 1.0
TIMEOUT_GRACE_US: Final = 1_000_000
TRIES_MAX: Final = 60
NOT_OURS_YET_US: Final = 20_000
CLOCK_INTERVAL_MS: Final = 2_000


class TimerNode:
    """Owns shards: loads what is due, grants it, renews, expires and records."""

    def __init__(
        self,
        settings: TimerSettings,
        timer_id: str,
        store: TimerStore,
        registry: ShardRegistry,
        meters: Meters,
    ) -> None:
        self.settings = settings
        self.timer_id = timer_id
        self.store = store
        self.registry = registry
        self.metrics = meters
        self.clock = ClusterClock()
        self.incarnation = 0
        self.shard_count = 0
        self.halted = ""
        """Why nothing may be granted, written or read: Postgres has another history than the one we knew."""
        self.halt_changed = asyncio.Event()
        self.grants_from_mono_us = NOT_YET_US
        """Nothing is granted before: leases of a history that was lost may still run."""
        self.external_address = ""

        self.epochs: dict[int, int] = {}
        """Shards that are ours, with the epoch under which we hold each."""
        self.loading: set[int] = set()
        """Shards that are about to be ours."""
        self.fences: Int64s = np.zeros(SHARD_NUMBERS, dtype=np.int64)
        """The next fence of each shard."""
        self.lane_of = (np.arange(SHARD_NUMBERS) % LANE_COUNT).astype(np.int64)
        self.horizon_us = 0
        self.grant_batch_max = settings.grant_batch_count_max
        self.outcome_batch_max = settings.outcome_batch_count_max
        self.grant_batch_wait_s = settings.grant_batch_wait_ms / 1_000

        rows_max = min(settings.wheel_count_max, ENTRIES_MAX)
        self.entries = EntryStore(rows_max, rows_initial=rows_max)
        self.leases = LeaseTable()
        self.catalog = Catalog(store)
        self.frames = Frames(self, settings.attempt_lease_ttl_ms)
        self.loader = Loader(
            self,
            settings.tenant_share_count_max,
            settings.load_page_count,
            settings.full_sweep_interval_ms * 1_000,
        )
        self.history = History(self)
        self.ownership = Ownership(self)
        self.streams = Streams(self)
        self.lanes = [Lane(number, self) for number in range(LANE_COUNT)]
        self.sessions: dict[int, WorkerSession] = {}
        self.wheel = TimingWheel(0)
        self._expiries = TimingWheel(mono_us())
        self._tick = asyncio.Event()
        self._known_shards = np.empty(0, dtype=np.int16)
        self._known_key: tuple[int, int, int] = (-1, -1, -1)
        self._background: set[asyncio.Task[Any]] = set()
        self._progress: dict[str, tuple[int, bytes]] = {}
        self._postgres_missed_since_us = 0
        self._proof_waiters: list[tuple[int, asyncio.Future[frozenset[int]]]] = []
        self.traces: Traces | None = None
        """None: nobody wants to see any."""
        self.draining = False
        self.emptied = asyncio.Event()
        """Set when the last shard has gone to another, or there is no other."""
        self.peers: frozenset[str] = frozenset()
        """Other timers that could take shards."""
        self._silent_us = settings.heartbeat_interval_ms * 1_500
        self._dead_us = settings.attempt_lease_ttl_ms * 1_000

    async def start(self) -> None:
        """Sets the clock, reads what every part needs. Raises StoreUnavailable."""
        await self.history.enter()
        _, self.shard_count, _, _ = await self.store.cluster()
        for _ in range(5):
            await self.clock.sample(self.store.clock_us)
        self.wheel = TimingWheel(self.clock.now_us())
        self.horizon_us = self.clock.now_us() + LOOKAHEAD_US
        await self.refresh_routes()

    def loops(self) -> dict[str, Coroutine[Any, Any, None]]:
        """What runs until the end, by name."""
        return {
            "ticker": self._run_ticker(),
            "expiries": self._run_expiries(),
            "settle": self._run_settle(),
            "sweep": self._run_sweep(),
            "cancels": self._run_cancels(),
            "progress": self._run_progress(),
            "routes": self._run_routes(),
            "history": self.history.run(),
            "ownership": self.ownership.run(),
            "proofs": self.ownership.run_proofs(),
            "loader": self.loader.run(),
            "refresh": self.loader.run_refresh(),
            "questions": self.streams.run_questions(),
            "clock": self.clock.run(self.store.clock_us, CLOCK_INTERVAL_MS),
            **{f"lane {lane.number}": lane.run() for lane in self.lanes},
        }

    # Names.

    def known_shards(self) -> Int16s:
        """Shards whose rows are kept in memory: ours, and those that are about to be."""
        key = (len(self.epochs), len(self.loading), sum(self.epochs) + (sum(self.loading) << 20))
        if key != self._known_key:
            self._known_shards = np.array(sorted(self.epochs.keys() | self.loading), dtype=np.int16)
            self._known_key = key
        return self._known_shards

    def run_name(self, slot: int) -> str:
        leases = self.leases
        tenant = self.catalog.tenants.get(int(leases.tenant[slot]), "")
        return run_name(tenant, join_uuid(int(leases.run_hi[slot]), int(leases.run_lo[slot])))

    def welcome(self) -> pb.Welcome:
        settings = self.settings
        return pb.Welcome(
            protocol_version=1,
            timer_id=self.timer_id,
            lease_duration=duration(settings.attempt_lease_ttl_ms),
            heartbeat_interval_duration=duration(settings.heartbeat_interval_ms),
            message_bytes_max=settings.stream_message_bytes_max,
        )

    async def tenant_ids(self, names: Sequence[str]) -> frozenset[int] | None:
        """None means all of them. A name that is not known yet is looked for in Postgres."""
        if not names:
            return None
        missing = [name for name in names if name not in self.catalog.tenant_ids]
        if missing:
            await self.catalog.find_tenants(missing)
        return frozenset(self.catalog.tenant_ids[name] for name in names if name in self.catalog.tenant_ids)

    async def know_tenants(self, tenants: Sequence[int]) -> None:
        """Reads the names and weights of tenants that are new here."""
        new = [tenant for tenant in tenants if tenant not in self.catalog.tenants]
        if not new:
            return
        await self.catalog.ensure_tenants(new)
        for tenant in new:
            for lane in self.lanes:
                lane.ready.set_weight(tenant, self.catalog.weights.get(tenant, 1))

    async def refresh_routes(self) -> None:
        if await self.catalog.refresh_routes():
            self.streams.update_routes()
            for lane in self.lanes:
                lane.wake()

    async def _run_routes(self) -> None:
        while True:
            await asyncio.sleep(2.0)
            try:
                await self.refresh_routes()
            except TickwheelError as error:
                log.warning("routes_not_read", reason=str(error))

    async def misfire_rules(self, rows: TimerRows) -> list[MisfireRules]:
        """The misfire policy of each row, whole."""
        found = {
            (uid.int & 0xFFFFFFFFFFFFFFFF, version): spec or {}
            for uid, version, spec in await self.store.load_misfire_rules(
                rows.ref_hi, rows.ref_lo, rows.version
            )
        }
        rules = []
        for lo, version, flags, threshold_ms in zip(
            rows.ref_lo.tolist(),
            rows.version.tolist(),
            rows.flags.tolist(),
            rows.misfire_ms.tolist(),
            strict=True,
        ):
            rules.append(_misfire_rules(found.get((lo, version), {}), flags, threshold_ms))
        return rules

    # Due rows.

    def wake_ticker(self) -> None:
        self._tick.set()

    async def _run_ticker(self) -> None:
        """Takes what is due out of the wheel, plans it, and puts it where workers are served from."""
        while True:
            now_us = self.clock.now_us() - self.clock.uncertainty_us
            _, handles = self.wheel.advance(now_us, POP_MAX)
            if len(handles):
                self._take_due(handles)
                await asyncio.sleep(0)
                continue
            next_us = self.wheel.next_due_us()
            wait_s = TICK_SLEEP_MAX_S
            if next_us is not None:
                wait_s = min(wait_s, max(0.0005, (next_us - now_us) / 1e6))
            self._tick.clear()
            try:
                async with asyncio.timeout(wait_s):
                    await self._tick.wait()
            except TimeoutError:
                pass

    def _take_due(self, handles: Int64s) -> None:
        entries = self.entries
        handles = handles[entries.alive(handles)]
        slots = entries.slot(handles)
        waiting = entries.state[slots] == IN_WHEEL
        handles, slots = handles[waiting], slots[waiting]
        ours = np.isin(entries.shard[slots], np.fromiter(self.epochs, dtype=np.int16))
        if not ours.all():
            self.postpone(handles[~ours], NOT_OURS_YET_US)
            handles, slots = handles[ours], slots[ours]
        if not len(handles):
            return
        handles = self._plan(handles, slots)
        lanes = self.lane_of[entries.shard[entries.slot(handles)]]
        for lane in self.lanes:
            chosen = handles[lanes == lane.number]
            if len(chosen):
                lane.push_ready(chosen)

    def _plan(self, handles: Int64s, slots: Int64s) -> Int64s:
        """Computes the next occurrence of each schedule, and leaves those out that cannot be computed."""
        entries = self.entries
        schedules = np.flatnonzero(entries.kind[slots] == KIND_SCHEDULE)
        if not len(schedules):
            return handles
        chosen = slots[schedules]
        missing = set(np.unique(entries.trigger_id[chosen]).tolist()) - self.catalog.triggers.keys()
        if missing:
            self.spawn(self._plan_later(handles))
            return handles[:0]
        rows = entries.rows(handles[schedules])
        planned = plan.plan_next(rows, self.catalog.triggers, self.settings.decide_after_ms * 1_000)
        entries.next_due_us[chosen] = planned.next_due_us
        entries.next_schedule_us[chosen] = planned.next_schedule_us
        entries.settle_us[chosen] = planned.settle_us
        if not planned.failed:
            return handles
        failed = schedules[list(planned.failed)]
        self.set_aside(handles[failed], list(planned.failed.values()))
        return np.delete(handles, failed)

    async def _plan_later(self, handles: Int64s) -> None:
        """Some triggers were put out of the cache: read them again first."""
        entries = self.entries
        try:
            slots = entries.slot(handles[entries.alive(handles)])
            await self.catalog.ensure_definitions(np.unique(entries.trigger_id[slots]).tolist(), [])
        except TickwheelError as error:
            log.warning("triggers_not_read", reason=str(error))
        self.postpone(handles, 1_000)

    def postpone(self, handles: Int64s, delay_us: int) -> None:
        """Looks at these rows again a little later."""
        entries = self.entries
        handles = handles[entries.alive(handles)]
        if not len(handles):
            return
        entries.state[entries.slot(handles)] = IN_WHEEL
        self.wheel.insert(np.full(len(handles), self.clock.now_us() + delay_us, dtype=np.int64), handles)
        self._tick.set()

    def forget_rows(self, handles: Int64s) -> None:
        """Rows leave the memory, and the ready queues with it: nobody may ever come to take them there."""
        entries = self.entries
        slots = entries.slot(handles)
        waiting = entries.state[slots] == READY
        if waiting.any():
            lanes = self.lane_of[entries.shard[slots]]
            for lane in self.lanes:
                lane.ready.discard(handles[waiting & (lanes == lane.number)])
        entries.free(handles)

    def recheck(self, handles: Int64s) -> None:
        """Rows that a batch did not find as they were: read again. If they are the same, they were locked."""
        entries = self.entries
        slots = entries.slot(handles)
        entries.tries[slots] = np.minimum(entries.tries[slots] + 1, 100)
        self.postpone(handles, BACKOFF_LOCKED_US)
        self.loader.refresh_soon(entries.shard[slots], entries.ref_hi[slots], entries.ref_lo[slots])

    def refresh_soon(self, shard: Int16s, hi: Uint64s, lo: Uint64s) -> None:
        self.loader.refresh_soon(shard, hi, lo)

    async def _run_settle(self) -> None:
        """Occurrences that nobody took in time become waiting runs, whose own rows say so (section 7)."""
        while True:
            await asyncio.sleep(SETTLE_INTERVAL_S)
            if not any(lane.ready.depth() for lane in self.lanes):
                continue
            entries = self.entries
            handles = entries.everything()
            slots = entries.slot(handles)
            now_us = self.clock.now_us()
            due = (
                (entries.state[slots] == READY)
                & (entries.kind[slots] == KIND_SCHEDULE)
                & (entries.settle_us[slots] <= now_us)
            )
            if not due.any():
                continue
            handles, lanes = handles[due], self.lane_of[entries.shard[slots[due]]]
            for lane in self.lanes:
                chosen = handles[lanes == lane.number][: self.grant_batch_max]
                if len(chosen):
                    lane.push_settle(chosen)

    async def _run_sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            try:
                await self.loader.sweep()
            except TickwheelError as error:
                log.warning("sweep_failed", reason=str(error))
            self.metrics.observe(self)

    def set_aside(self, handles: Int64s, reasons: Sequence[str]) -> None:
        """Rows that cannot be computed or written: quarantined or ended, so that the others go on (I11)."""
        self.spawn(self._set_aside(self.entries.rows(handles), handles, list(reasons)))

    async def _set_aside(self, rows: TimerRows, handles: Int64s, reasons: list[str]) -> None:
        try:
            ours = np.array([s in self.epochs for s in rows.shard.tolist()], dtype=np.bool_)
            rows, handles = rows.pick(ours), handles[ours]
            reasons = [reason for reason, keep in zip(reasons, ours.tolist(), strict=True) if keep]
            fence = self.fence_of(np.unique(rows.shard).tolist())
            schedules = rows.kind == KIND_SCHEDULE
            if schedules.any():
                chosen = [reasons[i] for i in np.flatnonzero(schedules).tolist()]
                self.ownership.lost(
                    await self.store.quarantine(fence, self.clock.now_us(), rows.pick(schedules), chosen),
                    fence,
                )
                self.metrics.quarantined(len(chosen))
                log.error("schedules_quarantined", count=len(chosen), reason=chosen[0])
            if not schedules.all():
                failures = [
                    job.encode_failure(job.Failure(type="NotGrantable", message=reasons[i][:1000]))
                    for i in np.flatnonzero(~schedules).tolist()
                ]
                self.ownership.lost(
                    await self.store.end_waiting(
                        fence,
                        self.clock.now_us(),
                        rows.pick(~schedules),
                        np.full(len(failures), RunState.DEAD_LETTERED, dtype=np.int64),
                        failures,
                    ),
                    fence,
                )
                log.error("runs_not_grantable", count=len(failures), reason=reasons[0])
            self.entries.free(handles)
        except TickwheelError as error:
            log.warning("set_aside_failed", reason=str(error))
            self.postpone(handles, 5_000_000)

    def fence_of(self, shards: Iterable[int]) -> Fence:
        chosen = sorted(s for s in shards if s in self.epochs)
        return Fence(
            np.array(chosen, dtype=np.int16), np.array([self.epochs[s] for s in chosen], dtype=np.int64)
        )

    # Leases.

    def watch_leases(self, slots: Int64s) -> None:
        """Wakes up when these could have run out, timed out, or used up the time to stop."""
        if not len(slots):
            return
        leases = self.leases
        offset = mono_us() - self.clock.now_us()
        until = np.minimum(
            leases.deadlines(slots), leases.attempt_deadline_us[slots] + TIMEOUT_GRACE_US + offset
        )
        cancel = leases.cancel_until_us[slots]
        until = np.where(cancel > 0, np.minimum(until, cancel + offset), until)
        self._expiries.insert(until, leases.handles(slots))

    async def _run_expiries(self) -> None:
        while True:
            await asyncio.sleep(0.05)
            self.streams.watch_silence(self._silent_us, self._dead_us)
            _, handles = self._expiries.advance(mono_us(), POP_MAX)
            if len(handles):
                self._expire(self.leases.live(handles))

    def _expire(self, slots: Int64s) -> None:
        """Leases whose time may be over: ended if so, and else watched on."""
        if not len(slots):
            return
        leases = self.leases
        now_us = self.clock.now_us()
        slots = slots[np.isin(leases.shard[slots], np.fromiter(self.epochs, dtype=np.int16))]
        lapsed = leases.deadlines(slots) <= mono_us()
        late = ~lapsed & (leases.attempt_deadline_us[slots] + TIMEOUT_GRACE_US <= now_us)
        cancel = leases.cancel_until_us[slots]
        cut_off = ~lapsed & ~late & (cancel > 0) & (cancel <= now_us)
        self.watch_leases(slots[~(lapsed | late | cut_off)])
        if lapsed.any():
            self.end_owned(
                slots[lapsed],
                AttemptState.OUTCOME_UNKNOWN,
                job.Failure(type=LEASE_LAPSED, message="the worker did not renew its lease in time"),
            )
        if late.any():
            self.end_owned(
                slots[late],
                AttemptState.TIMED_OUT,
                job.Failure(type="AttemptTimeout", message="the attempt took longer than it may"),
            )
        if cut_off.any():
            self.end_owned(slots[cut_off], AttemptState.CANCELLED)

    def end_owned(self, slots: Int64s, state: AttemptState, failure: job.Failure | None = None) -> None:
        """The owner ends these attempts."""
        failures = None if failure is None else [failure] * len(slots)
        self.end(slots, Ended(slots, state, failures=failures, by_owner=True))

    def end(self, slots: Int64s, ended: Ended) -> None:
        """Hands ended attempts to the lanes of their shards."""
        leases = self.leases
        leases.state[slots] = ENDING_BY_OWNER if ended.by_owner else ENDING
        lanes = self.lane_of[leases.shard[slots]]
        for number in np.unique(lanes).tolist():
            self.lanes[number].push_ended(ended.pick(np.flatnonzero(lanes == number)))

    def hand_back(self, slots: Int64s) -> None:
        """Grants that never reach a worker: no attempt is spent."""
        self.end_owned(slots, AttemptState.RELEASED)

    def doubtful_outcomes(self, lane: Lane, slots: Int64s, ended: Sequence[Ended]) -> None:
        self.spawn(self._doubtful(lane, slots, ended))

    async def _doubtful(self, lane: Lane, slots: Int64s, ended: Sequence[Ended]) -> None:
        handles = self.leases.handles(slots)
        try:
            await self.streams.doubtful(lane, slots, ended)
        except TickwheelError as error:
            log.warning("doubtful_outcomes_wait", reason=str(error))
            await asyncio.sleep(0.5)
            # A shard that was lost meanwhile has freed its slots.
            lane.requeue_ended(ended, slots[self.leases.held(handles)])

    def poison_outcome(self, lane: Lane, slots: Int64s, error: BatchRefused) -> None:
        """An outcome that Postgres refuses for its data: the attempt fails, with the reason instead of
        the data."""
        log.error("outcome_refused", run=self.run_name(int(slots[0])), reason=error.reason)
        failure = job.Failure(
            type="OutcomeRefused", message=f"Postgres refused the outcome: {error.reason}"[:1000]
        )
        lane.push_ended(Ended(slots, AttemptState.FAILED, failures=[failure] * len(slots)))

    async def _run_cancels(self) -> None:
        """Finds runs that were asked to stop; a nudge only makes it sooner."""
        while True:
            await asyncio.sleep(CANCEL_INTERVAL_S)
            await self.find_cancels()

    async def find_cancels(self) -> None:
        leases = self.leases
        if not self.epochs or not len(leases):
            return
        try:
            rows = await self.store.load_cancels(sorted(self.epochs))
        except TickwheelError as error:
            log.warning("cancels_not_read", reason=str(error))
            return
        told: list[int] = []
        for _shard, _run, token, until_us, reason in rows:
            slot = leases.by_token.get(token.hex)
            if slot is None or leases.cancel_until_us[slot]:
                continue
            leases.cancel_until_us[slot] = max(1, until_us)
            self.streams.cancel(slot, reason, max(0, (until_us - self.clock.now_us()) // 1_000))
            told.append(slot)
        self.watch_leases(np.array(told, dtype=np.int64))

    def take_progress(self, items: Iterable[pb.AttemptProgress]) -> None:
        """The newest word of each attempt; written once a second."""
        now_us = self.clock.now_us()
        for item in items:
            slot = self.leases.by_token.get(item.lease_token)
            if slot is not None and len(self._progress) < 50_000:
                self._progress[item.lease_token] = (slot, stored_progress(item, now_us))

    async def _run_progress(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            if not self._progress:
                continue
            items, self._progress = self._progress, {}
            leases = self.leases
            kept = [(slot, body) for token, (slot, body) in items.items() if leases.tokens[slot] == token]
            for start in range(0, len(kept), 500):
                part = kept[start : start + 500]
                slots = np.array([slot for slot, _ in part], dtype=np.int64)
                fence = self.fence_of(np.unique(leases.shard[slots]).tolist())
                try:
                    await self.store.progress(
                        fence,
                        leases.shard[slots].astype(np.int64),
                        (leases.run_hi[slots], leases.run_lo[slots]),
                        (leases.token_hi[slots], leases.token_lo[slots]),
                        [body for _, body in part],
                    )
                    leases.flags[slots] |= bits.HAS_HISTORY
                except TickwheelError as error:
                    log.warning("progress_not_written", reason=str(error))

    # Sessions.

    def wake_session(self, session: WorkerSession) -> None:
        stream = self.streams.by_number.get(session.number)
        if stream is not None:
            stream.wake.set()

    def prove_soon(self) -> None:
        self.ownership.prove_soon()

    async def proof_after(self, mono: int) -> frozenset[int]:
        """The shards that the next proof that begins after `mono` shows to be ours; empty if none comes."""
        waiter: asyncio.Future[frozenset[int]] = asyncio.get_running_loop().create_future()
        self._proof_waiters.append((mono, waiter))
        self.prove_soon()
        try:
            async with asyncio.timeout(5.0):
                return await waiter
        except TimeoutError:
            return frozenset()

    def problem(self) -> str | None:
        """For the health check, from another thread."""
        since = self._postgres_missed_since_us
        if since and mono_us() - since > 5_000_000:
            return f"Postgres has been out of reach for {(mono_us() - since) // 1_000_000} s"
        return self.halted or None

    def renewals_proven(self, begun_us: int, shards: tuple[int, ...]) -> None:
        waiting, self._proof_waiters = self._proof_waiters, []
        for since, waiter in waiting:
            if since > begun_us:
                self._proof_waiters.append((since, waiter))
            elif not waiter.done():
                waiter.set_result(frozenset(shards))
        if self._proof_waiters:
            self.prove_soon()
        self.streams.proven(begun_us, shards)

    def shards_changed(self) -> None:
        self._known_key = (-1, -1, -1)
        if not self.epochs:
            self.emptied.set()
        self.metrics.owned(len(self.epochs))

    def postgres_seen(self) -> None:
        if self._postgres_missed_since_us:
            log.info("postgres_back", after_ms=(mono_us() - self._postgres_missed_since_us) // 1_000)
        self._postgres_missed_since_us = 0

    def postgres_missed(self, reason: str) -> None:
        if not self._postgres_missed_since_us:
            self._postgres_missed_since_us = mono_us()
            log.warning("postgres_out_of_reach", reason=reason)

    def forget_everything(self) -> None:
        """Another history: shards, leases, and what ids stood for. Workers open their streams anew."""
        if self.epochs:
            self.ownership.let_go(list(self.epochs))
        self.catalog.forget()
        self.frames.forget()
        self._progress.clear()
        for stream in self.streams.by_number.values():
            stream.session.closed = True
            stream.wake.set()

    async def register_again(self) -> None:
        await self.store.register_timer(self.settings.node_name, self.external_address, self.clock.now_us())

    def drain_streams(self) -> None:
        """Tells every worker to look elsewhere."""
        self.draining = True
        for stream in self.streams.by_number.values():
            stream.session.add_drain("the timer stops")
            stream.wake.set()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _misfire_rules(spec: dict[str, Any], flags: int, threshold_ms: int) -> MisfireRules:
    policy = {2: MisfirePolicy.FIRE_ALL, 3: MisfirePolicy.SKIP}.get(
        (flags & bits.MISFIRE_MASK) >> bits.MISFIRE_SHIFT, MisfirePolicy.FIRE_ONCE
    )
    catchup = spec.get("catchupDuration", spec.get("catchup_duration"))
    count = int(spec.get("catchupCountMax", spec.get("catchup_count_max", 0)) or 0)
    defaults = MisfireRules()
    return MisfireRules(
        policy,
        threshold_ms * 1_000,
        int(float(str(catchup).rstrip("s")) * 1_000_000) if catchup else defaults.catchup_us,
        count or defaults.catchup_count_max,
    )
