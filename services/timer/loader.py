"""Which due rows are in memory? Cells ahead of their time, what a nudge names, and what a sweep finds
overdue.

A row is read at most a few minutes before it is due. Each (shard, tenant) has a cursor: how far it has
been read, and whether reading stopped because the tenant's share of memory was full; then it goes on as
the tenant's rows drain. What a load, a nudge and a sweep bring is put in by one function, `take_in`, that
knows which rows are here already: so nothing is lost or held twice when they overlap, and a stale row
does no harm (the compare-and-set refuses it).
"""

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import structlog

from tickwheel.domain.timer_rows import Int16s, Int32s, Int64s, TimerRows, Uint64s
from tickwheel.errors import TickwheelError
from tickwheel.services.timer.lane import IN_BATCH

if TYPE_CHECKING:
    from tickwheel.services.timer.node import TimerNode

log = structlog.get_logger()

BUCKET_US: Final = 60_000_000
LOOKAHEAD_US: Final = 2 * BUCKET_US
PAIRS_PER_QUERY_MAX: Final = 1_000
SWEEP_AFTER_US: Final = 1_000_000
SWEEP_PAGE_ROWS: Final = 1_000
RAISED_PAGE_ROWS: Final = 200
TRANSACTION_US_MAX: Final = 60_000_000
"""The longest that a coordinator's transaction may take from computing a due time to committing it."""
REFRESH_MAX: Final = 200_000
REFRESH_CHUNK: Final = 5_000
TENANTS_INTERVAL_S: Final = 5.0
_FIRST_REF: Final = np.zeros(1, dtype=np.uint64)

Pair = tuple[int, int]


@dataclass(slots=True)
class Cursor:
    """Of one (shard, tenant): everything due before (due_us, ref) was read."""

    due_us: int
    ref_hi: int = 0
    ref_lo: int = 0


class Loader:
    """Keeps the node's memory filled."""

    def __init__(
        self,
        node: "TimerNode",
        tenant_share_max: int,
        page_rows: int,
        full_sweep_interval_us: int,
    ) -> None:
        self._node = node
        self._page_rows = page_rows
        self._share_max = tenant_share_max
        self.tenants: dict[int, set[int]] = {}
        """Of each owned shard: the tenants that have timers there."""
        self.loaded_until_us: dict[int, int] = {}
        self.truncated: dict[Pair, Cursor] = {}
        """Where reading stopped because the tenant's share, or the memory, was full."""
        self._sweep_cursors: dict[Pair, Cursor] = {}
        self._refresh: deque[tuple[Int16s, Uint64s, Uint64s]] = deque()
        self._refresh_rows = 0
        self._refresh_wake = asyncio.Event()
        self._counts: dict[int, int] = {}
        self._watermark_us = -1
        self._full_sweep_us = 0
        self._full_sweep_interval_us = full_sweep_interval_us

    # Taking rows in.

    def limits_us(self, shards: Int16s, tenants: Int32s) -> Int64s:
        """Up to which due time each row's (shard, tenant) is held in memory: nothing later is.

        Where reading stopped, it stopped there: rows beyond stay in Postgres, also those that were in memory
        once, or a tenant's early schedules would come round and round and its late ones would never be read.
        """
        limits = np.full(len(shards), self._node.horizon_us, dtype=np.int64)
        if self.truncated and len(shards):
            keys = shards.astype(np.int64) << 32 | tenants
            for key in np.unique(keys).tolist():
                cursor = self.truncated.get((key >> 32, key & 0xFFFFFFFF))
                if cursor is not None:
                    limits[keys == key] = cursor.due_us
        return limits

    async def take_in(self, rows: TimerRows, *, beyond: bool = False) -> int:
        """Puts rows into memory and the wheel. Returns how many there was no room for.

        `beyond`: also where reading had stopped before them.
        """
        node = self._node
        entries = node.entries
        owned = np.isin(rows.shard, node.known_shards())
        limits = node.horizon_us if beyond else self.limits_us(rows.shard, rows.tenant)
        rows = rows.pick(owned & (rows.due_us < limits))
        if not len(rows):
            return 0
        await node.catalog.ensure_definitions(
            np.unique(rows.trigger_id).tolist(), np.unique(rows.template_id).tolist()
        )
        await node.know_tenants(np.unique(rows.tenant).tolist())
        if not set(np.unique(rows.route).tolist()) <= node.catalog.routes.keys():
            await node.refresh_routes()
        handles = entries.lookup(rows.ref_hi, rows.ref_lo)
        here = handles >= 0
        wanted = ~here
        if here.any():
            slots = entries.slot(handles[here])
            same = (
                (entries.due_us[slots] == rows.due_us[here])
                & (entries.version[slots] == rows.version[here])
                & (entries.attempt[slots] == rows.attempt[here])
                & (entries.decided_us[slots] == rows.decided_us[here])
                & (entries.flags[slots] == rows.flags[here])
            )
            replaced = ~same & (entries.state[slots] != IN_BATCH)
            node.forget_rows(handles[here][replaced])
            wanted[np.flatnonzero(here)[replaced]] = True
        fresh = rows.pick(wanted)
        added = entries.add(fresh)
        node.wheel.insert(fresh.due_us[: len(added)], added)
        node.wake_ticker()
        return len(fresh) - len(added)

    # Cells.

    def known(self, shard: int, tenants: set[int]) -> None:
        self.tenants.setdefault(shard, set()).update(tenants)

    def forget(self, shards: set[int]) -> None:
        for shard in shards:
            self.tenants.pop(shard, None)
            self.loaded_until_us.pop(shard, None)
        for table in (self.truncated, self._sweep_cursors):
            for pair in [pair for pair in table if pair[0] in shards]:
                del table[pair]

    async def find_tenants(self, shards: list[int]) -> None:
        found_shards, found_tenants = await self._node.store.list_tenants(shards)
        for shard in shards:
            self.tenants.setdefault(shard, set())
        for shard, tenant in zip(found_shards.tolist(), found_tenants.tolist(), strict=True):
            known = self.tenants[shard]
            if tenant not in known:
                known.add(tenant)
                if shard in self.loaded_until_us:
                    self.truncated[shard, tenant] = Cursor(-1)

    async def load(self, shards: list[int], after_us: int, until_us: int) -> None:
        """Reads everything due in [after_us, until_us) of these shards, tenant by tenant up to its share."""
        pending = {
            (shard, tenant): Cursor(after_us - 1, 2**64 - 1, 2**64 - 1)
            for shard in shards
            for tenant in self.tenants.get(shard, ())
        }
        await self._read(pending, until_us)

    async def _read(self, pending: dict[Pair, Cursor], until_us: int) -> None:
        """Reads page after page; Postgres is at the next one while the last is put into memory."""
        self._count_tenants()
        reading = self._start_page(pending, until_us)
        try:
            while reading is not None:
                pairs, page_max, page = reading
                reading = None
                rows = await page
                self._advance(pending, pairs, rows, page_max)
                reading = self._start_page(pending, until_us)
                if await self.take_in(rows, beyond=True):
                    # Memory is full: all of it is read again, from the beginning, when there is room.
                    for pair in {*pairs, *pending, *(reading[0] if reading else ())}:
                        self.truncated[pair] = Cursor(-1)
                        self._node.metrics.truncated()
                    return
                await asyncio.sleep(0)
        finally:
            if reading is not None:
                reading[2].cancel()

    def _start_page(
        self, pending: dict[Pair, Cursor], until_us: int
    ) -> tuple[list[Pair], int, asyncio.Task[TimerRows]] | None:
        """Takes the next pairs out of `pending` and asks for a page of each."""
        pairs = list(pending)[:PAIRS_PER_QUERY_MAX]
        if not pairs:
            return None
        cursors = {pair: pending.pop(pair) for pair in pairs}
        page_max = max(500, self._page_rows // len(pairs))
        return pairs, page_max, asyncio.create_task(self._page(pairs, cursors, until_us, page_max))

    def _advance(
        self, pending: dict[Pair, Cursor], pairs: list[Pair], rows: TimerRows, page_max: int
    ) -> None:
        """Pairs whose page was full go on after its last row, unless their tenant's share is used up."""
        ends = _ends_of_pairs(rows)
        for pair in pairs:
            count, last = ends.get(pair, (0, -1))
            self._counts[pair[1]] = self._counts.get(pair[1], 0) + count
            if count < page_max:
                continue
            if self._counts[pair[1]] >= self._share_max:
                self.truncated[pair] = _cursor_at(rows, last)
                self._node.metrics.truncated()
            else:
                pending[pair] = _cursor_at(rows, last)

    async def _page(
        self,
        pairs: list[Pair],
        cursors: Mapping[Pair, Cursor],
        until_us: int,
        page_max: int,
        *,
        raised: bool = False,
    ) -> TimerRows:
        chosen = [cursors[pair] for pair in pairs]
        return await self._node.store.load_timers(
            [pair[0] for pair in pairs],
            [pair[1] for pair in pairs],
            [cursor.due_us for cursor in chosen],
            (
                np.array([cursor.ref_hi for cursor in chosen], dtype=np.uint64),
                np.array([cursor.ref_lo for cursor in chosen], dtype=np.uint64),
            ),
            np.full(len(pairs), until_us, dtype=np.int64),
            page_max,
            raised=raised,
        )

    def _count_tenants(self) -> None:
        entries = self._node.entries
        handles = entries.everything()
        if not len(handles):
            self._counts = {}
            return
        tenants, counts = np.unique(entries.tenant[entries.slot(handles)], return_counts=True)
        self._counts = dict(zip(tenants.tolist(), counts.tolist(), strict=True))

    async def run(self) -> None:
        """Loads each shard's next cell ahead of its time, spread over the minute before."""
        node = self._node
        tenants_due = 0.0
        while True:
            try:
                now_us = node.clock.now_us()
                shards = [s for s in self.loaded_until_us if s in node.epochs]
                late = [s for s in shards if self.loaded_until_us[s] < now_us + BUCKET_US]
                early = sorted(
                    (
                        s
                        for s in shards
                        if now_us + BUCKET_US <= self.loaded_until_us[s] < now_us + LOOKAHEAD_US
                    ),
                    key=self.loaded_until_us.__getitem__,
                )
                share = early[: max(1, len(shards) // 30)]
                for group in (late, share):
                    await self._next_cells(group)
                if tenants_due <= 0 and shards:
                    await self.find_tenants(shards)
                    tenants_due = TENANTS_INTERVAL_S
                await self._go_on()
            except TickwheelError as error:
                log.warning("load_failed", reason=str(error))
            tenants_due -= 0.5
            await asyncio.sleep(0.5)

    async def _next_cells(self, shards: list[int]) -> None:
        node = self._node
        by_start: dict[int, list[int]] = {}
        for shard in shards:
            by_start.setdefault(self.loaded_until_us[shard], []).append(shard)
        for start_us, group in by_start.items():
            until_us = max(start_us + BUCKET_US, node.clock.now_us() + BUCKET_US)
            node.horizon_us = max(node.horizon_us, until_us)
            await self.load(group, start_us, until_us)
            for shard in group:
                if shard in self.loaded_until_us:
                    self.loaded_until_us[shard] = until_us

    async def _go_on(self) -> None:
        """Reads on where a tenant's share was full, once half of it has drained."""
        if not self.truncated:
            return
        await self._read_raised()
        self._count_tenants()
        ready = {
            pair: cursor
            for pair, cursor in self.truncated.items()
            if self._counts.get(pair[1], 0) <= self._share_max // 2 and pair[0] in self.loaded_until_us
        }
        if not ready or self._node.entries.room < self._page_rows:
            return
        for pair in ready:
            del self.truncated[pair]
        until_us = min(self.loaded_until_us[pair[0]] for pair in ready)
        await self._read(ready, until_us)

    async def _read_raised(self) -> None:
        """Of tenants whose share is full, what is due with raised priority: it need not wait for the rest."""
        node = self._node
        pairs = [pair for pair in self.truncated if pair[0] in node.epochs][:PAIRS_PER_QUERY_MAX]
        if pairs:
            start = {pair: Cursor(-1) for pair in pairs}
            rows = await self._page(
                pairs, start, node.clock.now_us() + BUCKET_US, RAISED_PAGE_ROWS, raised=True
            )
            await self.take_in(rows, beyond=True)

    # The sweep.

    async def sweep(self) -> None:
        """Finds rows that are overdue and not in memory: what a lost nudge, or a late commit, has hidden.

        It reads on from page to page, so rows that are here and wait do not hide those behind them. Most
        sweeps start at the low watermark, which trails the longest transaction that may still commit a row:
        a long transaction elsewhere keeps dead index entries before it, and they need not be walked every
        second. Once a minute a sweep starts at the beginning.
        """
        node = self._node
        until_us = node.clock.now_us() - SWEEP_AFTER_US
        full = until_us - self._full_sweep_us >= self._full_sweep_interval_us
        start_us = -1 if full else self._watermark_us
        if full:
            self._full_sweep_us = until_us
            self._sweep_cursors.clear()
        pairs = [
            (shard, tenant)
            for shard in self.loaded_until_us
            if shard in node.epochs
            for tenant in self.tenants.get(shard, ())
            if (shard, tenant) not in self.truncated
        ]
        for start in range(0, len(pairs), PAIRS_PER_QUERY_MAX):
            group = pairs[start : start + PAIRS_PER_QUERY_MAX]
            cursors = {pair: self._sweep_cursors.get(pair) or Cursor(start_us) for pair in group}
            page_max = max(50, SWEEP_PAGE_ROWS // len(group))
            rows = await self._page(group, cursors, until_us, page_max)
            before = len(node.entries)
            await self.take_in(rows)
            node.metrics.swept(len(node.entries) - before)
            self._advance_sweep(group, rows, page_max)
            await asyncio.sleep(0)
        if not self._sweep_cursors:
            self._watermark_us = until_us - TRANSACTION_US_MAX

    def _advance_sweep(self, group: list[Pair], rows: TimerRows, page_max: int) -> None:
        ends = _ends_of_pairs(rows)
        for pair in group:
            count, last = ends.get(pair, (0, -1))
            if count < page_max:
                self._sweep_cursors.pop(pair, None)
            else:
                self._sweep_cursors[pair] = _cursor_at(rows, last)

    # Rows by name.

    def refresh_soon(self, shard: Int16s, ref_hi: Uint64s, ref_lo: Uint64s) -> None:
        """Reads these rows again: they were just written, nudged, or found different. Bounded: a sweep finds
        what is dropped here."""
        if self._refresh_rows + len(shard) > REFRESH_MAX:
            self._node.metrics.nudges_dropped(len(shard))
            return
        self._refresh.append((shard, ref_hi, ref_lo))
        self._refresh_rows += len(shard)
        self._refresh_wake.set()

    async def run_refresh(self) -> None:
        while True:
            await self._refresh_wake.wait()
            self._refresh_wake.clear()
            while self._refresh:
                chunk = []
                rows = 0
                while self._refresh and rows < REFRESH_CHUNK:
                    part = self._refresh.popleft()
                    chunk.append(part)
                    rows += len(part[0])
                self._refresh_rows -= rows
                shard, hi, lo = (np.concatenate([part[i] for part in chunk]) for i in range(3))
                try:
                    await self._refresh_rows_of(shard, hi, lo)
                except TickwheelError as error:
                    log.warning("refresh_failed", reason=str(error))
                    await asyncio.sleep(0.2)

    async def _refresh_rows_of(self, shard: Int16s, hi: Uint64s, lo: Uint64s) -> None:
        node = self._node
        order = np.lexsort((lo, hi, shard))
        rows = await node.store.peek_timers(shard[order], hi[order], lo[order])
        for one, tenant in set(zip(rows.shard.tolist(), rows.tenant.tolist(), strict=True)):
            if one in self.tenants:
                self.tenants[one].add(tenant)
        # Rows that are gone, or wait for something beyond the horizon, leave the memory.
        handles = node.entries.lookup(hi, lo)
        near = rows.due_us < node.horizon_us
        kept = node.entries.lookup(rows.ref_hi[near], rows.ref_lo[near])
        gone = handles[(handles >= 0) & ~np.isin(handles, kept)]
        if len(gone):
            gone = gone[node.entries.state[node.entries.slot(gone)] != IN_BATCH]
            node.forget_rows(gone)
        await self.take_in(rows)


def _ends_of_pairs(rows: TimerRows) -> dict[Pair, tuple[int, int]]:
    """Of each (shard, tenant): how many rows it has, and the number of its last. Its rows stand together."""
    keys = rows.shard.astype(np.int64) << 32 | rows.tenant
    distinct, first, counts = np.unique(keys, return_index=True, return_counts=True)
    return {
        (key >> 32, key & 0xFFFFFFFF): (count, at + count - 1)
        for key, at, count in zip(distinct.tolist(), first.tolist(), counts.tolist(), strict=True)
    }


def _cursor_at(rows: TimerRows, row: int) -> Cursor:
    return Cursor(int(rows.due_us[row]), int(rows.ref_hi[row]), int(rows.ref_lo[row]))
