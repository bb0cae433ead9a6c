"""What does a timer node know of the rows that it holds? Fixed columns, one slot a row; pure, over numpy.

A row is named by a handle, `generation << 32 | slot`. The generation of a slot is odd while it holds a row,
and grows when it is taken and when it is freed: so a handle that still lies in the wheel or in a ready queue
after its row was freed is dead for ever, and is never taken for the row that came after it. The wheel and the
queues need not be told.

Rows are found by the reference that they carry (the 128 bits of a schedule's uid or a run's id) through a
hash table in the same style: no Python object per row, bulk operations without a loop.

Nothing here grows past `rows_max` (I7): what does not fit stays in Postgres, where it is anyhow.
"""

import numpy as np
import numpy.typing as npt

from tickwheel.domain.timer_rows import (
    COLUMNS,
    Bools,
    Int8s,
    Int16s,
    Int32s,
    Int64s,
    TimerRows,
    Uint64s,
)

MISSING = -1
"""The handle of what is not here; never alive."""
ROWS_INITIAL = 1_024
ROWS_MAX_MAX = 1 << 28
"""So that a cell's number fits 32 bits."""
_SLOT_MASK = (1 << 32) - 1
_GENERATION_MASK = (1 << 31) - 1


WORKING = {
    "next_due_us": np.int64,
    "next_schedule_us": np.int64,
    "settle_us": np.int64,
    "state": np.int8,
    "tries": np.int8,
}
"""Columns that no row of the table has: the owner's plan for an entry, zero when it is added."""


class EntryStore:
    """Rows in columns: read and write `store.due_us[store.slot(handles)]`.

    The arrays are replaced when the store grows: take them from the store after each `add`, never keep them.
    `ref_hi` and `ref_lo` are the index's and must not be written.

    It doubles from `rows_initial` to `rows_max`. Doubling a million rows takes a tenth of a second, in which
    a timer's event loop stands still; `rows_initial=rows_max` never doubles, and pages that hold no row yet
    take no memory.
    """

    def __init__(self, rows_max: int, rows_initial: int = ROWS_INITIAL) -> None:
        assert 0 < rows_max <= ROWS_MAX_MAX, f"rows_max must be 1..{ROWS_MAX_MAX}, not {rows_max}"
        capacity = min(rows_initial, rows_max)
        self.rows_max = rows_max
        self.shard: Int16s = np.zeros(capacity, np.int16)
        self.kind: Int8s = np.zeros(capacity, np.int8)
        self.ref_hi: Uint64s = np.zeros(capacity, np.uint64)
        self.ref_lo: Uint64s = np.zeros(capacity, np.uint64)
        self.due_us: Int64s = np.zeros(capacity, np.int64)
        self.version: Int64s = np.zeros(capacity, np.int64)
        self.decided_us: Int64s = np.zeros(capacity, np.int64)
        self.schedule_time_us: Int64s = np.zeros(capacity, np.int64)
        self.trigger_id: Int64s = np.zeros(capacity, np.int64)
        self.tenant: Int32s = np.zeros(capacity, np.int32)
        self.route: Int32s = np.zeros(capacity, np.int32)
        self.priority: Int8s = np.zeros(capacity, np.int8)
        self.attempt: Int16s = np.zeros(capacity, np.int16)
        self.flags: Int32s = np.zeros(capacity, np.int32)
        self.template_id: Int64s = np.zeros(capacity, np.int64)
        self.schedule_hi: Uint64s = np.zeros(capacity, np.uint64)
        self.schedule_lo: Uint64s = np.zeros(capacity, np.uint64)
        self.misfire_ms: Int32s = np.zeros(capacity, np.int32)
        self.countdown: Int32s = np.zeros(capacity, np.int32)
        self.next_due_us: Int64s = np.zeros(capacity, np.int64)
        self.next_schedule_us: Int64s = np.zeros(capacity, np.int64)
        self.settle_us: Int64s = np.zeros(capacity, np.int64)
        self.state: Int8s = np.zeros(capacity, np.int8)
        self.tries: Int8s = np.zeros(capacity, np.int8)
        self._generation: Int32s = np.zeros(capacity, np.int32)
        self._free: Int32s = np.zeros(capacity, np.int32)
        """A stack of slots that were freed."""
        self._free_rows = 0
        self._touched = 0
        """Slots below this have held a row at some time."""
        self._index = _ReferenceIndex(capacity)

    def __len__(self) -> int:
        return self._touched - self._free_rows

    @property
    def room(self) -> int:
        """Rows that still fit."""
        return self.rows_max - len(self)

    @property
    def nbytes(self) -> int:
        """Bytes of all columns and the index; they do not shrink."""
        columns = sum(int(getattr(self, name).nbytes) for name in (*COLUMNS, *WORKING))
        return columns + self._generation.nbytes + self._free.nbytes + self._index.nbytes

    # ---- handles

    def slot(self, handles: Int64s) -> Int64s:
        """Where the columns of these handles lie. Only for handles that are alive."""
        return handles & _SLOT_MASK

    def alive(self, handles: Int64s) -> Bools:
        """Whether each handle still names its row; false for `MISSING` and for what never was a handle."""
        slots = handles & _SLOT_MASK
        known = (handles >= 0) & (slots < self._touched)
        generations = self._generation[np.where(known, slots, 0)]
        alive: Bools = known & (generations == handles >> 32) & (generations & 1 == 1)
        return alive

    def _handles(self, slots: Int64s) -> Int64s:
        return (self._generation[slots].astype(np.int64) << 32) | slots

    # ---- rows

    def allocate(self, n: int) -> Int64s:
        """Handles for `n` new rows, or for as many as fit; their columns hold what was there before.

        Such rows are not found by `lookup`: `add` is what fills rows and enters them into the index.
        """
        n = min(n, self.room)
        recycled = min(n, self._free_rows)
        fresh = n - recycled
        if self._touched + fresh > len(self._generation):
            self._grow(self._touched + fresh)
        slots = np.empty(n, np.int64)
        slots[:recycled] = self._free[self._free_rows - recycled : self._free_rows]
        slots[recycled:] = np.arange(self._touched, self._touched + fresh)
        self._free_rows -= recycled
        self._touched += fresh
        self._generation[slots] = (self._generation[slots] + 1) & _GENERATION_MASK
        return self._handles(slots)

    def add(self, rows: TimerRows) -> Int64s:
        """Take rows in; gives the handles of the first ones, as many as fit.

        Whether a row is here already is the caller's to ask, by `lookup`: of two rows with one reference,
        either may be found.
        """
        handles = self.allocate(len(rows))
        slots, count = self.slot(handles), len(handles)
        for name in COLUMNS:
            getattr(self, name)[slots] = getattr(rows, name)[:count]
        for name in WORKING:
            getattr(self, name)[slots] = 0
        self._index.add(slots, self.ref_hi, self.ref_lo)
        return handles

    def rows(self, handles: Int64s) -> TimerRows:
        """Copies of the columns of these handles, which must be alive."""
        slots = self.slot(handles)
        return TimerRows(**{name: getattr(self, name)[slots] for name in COLUMNS})

    def free(self, handles: Int64s) -> int:
        """Let rows go; gives how many. Handles that are dead already, or named twice, are passed over."""
        slots = np.unique(self.slot(handles[self.alive(handles)]))
        self._index.remove(slots)
        self._generation[slots] = (self._generation[slots] + 1) & _GENERATION_MASK
        self._free[self._free_rows : self._free_rows + len(slots)] = slots
        self._free_rows += len(slots)
        return len(slots)

    def lookup(self, ref_hi: Uint64s, ref_lo: Uint64s) -> Int64s:
        """The handle of each reference, `MISSING` where it is not here."""
        slots = self._index.find(ref_hi, ref_lo, self.ref_hi, self.ref_lo)
        return np.where(slots >= 0, self._handles(np.maximum(slots, 0)), MISSING)

    def everything(self) -> Int64s:
        """The handles of all rows; costs a look at every slot."""
        return self._handles(np.flatnonzero(self._generation[: self._touched] & 1 == 1))

    def of_shards(self, shards: npt.ArrayLike) -> Int64s:
        """The handles of all rows of these shards; costs a look at every row."""
        used = slice(0, self._touched)
        held = (self._generation[used] & 1 == 1) & np.isin(self.shard[used], np.asarray(shards, np.int16))
        return self._handles(np.flatnonzero(held))

    def drop_shards(self, shards: npt.ArrayLike) -> Int64s:
        """Free all rows of these shards; gives their handles, which are dead now."""
        handles = self.of_shards(shards)
        self.free(handles)
        return handles

    def _grow(self, rows: int) -> None:
        capacity = min(max(2 * len(self._generation), rows), self.rows_max)
        for name in (*COLUMNS, *WORKING, "_generation", "_free"):
            old = getattr(self, name)
            new = np.zeros(capacity, old.dtype)
            new[: len(old)] = old
            setattr(self, name, new)
        self._index.grow_slots(capacity)


CELLS = 16
"""Places in a bucket: with ten taken on average, half a percent of the rows find theirs full."""
_LOAD_MAX = 10
_PIECE_ROWS = 65_536
"""Rows that are placed at once: a row takes some 300 bytes while it is."""
_NONE = -1


class _ReferenceIndex:
    """From a 128-bit reference to a slot: a table of buckets of `CELLS` cells, and a sorted overflow for full
    ones.

    A cell is a fingerprint (16 bits of the hash) and a slot; the reference itself is compared in the columns.
    Removing a row clears its cell and moves nothing, so there are no tombstones and no pauses but for
    doubling. References that collide on purpose end in the overflow, which is searched in log(n).
    """

    def __init__(self, capacity: int) -> None:
        self._rows = 0
        self._bits = bucket_bits(capacity)
        self._set_table()
        self._cell_1: Int32s = np.zeros(capacity, np.int32)
        """For each slot: one more than its cell in the table; 0 if it is in the overflow or not indexed.

        (Here and below 0 stands for none: the pages of a zeroed array take no memory until they are written.)
        """

    @property
    def nbytes(self) -> int:
        tables = self._prints.nbytes + self._slots_1.nbytes + self._cell_1.nbytes
        return int(tables + self._over_hashes.nbytes + self._over_slots.nbytes)

    def _set_table(self) -> None:
        self._prints = np.zeros(CELLS << self._bits, np.uint16)
        self._slots_1 = np.zeros(CELLS << self._bits, np.int32)
        """For each cell: one more than its slot; 0 if it is empty."""
        self._over_hashes = np.empty(0, np.uint64)
        self._over_slots = np.empty(0, np.int64)

    def grow_slots(self, capacity: int) -> None:
        grown = np.zeros(capacity, np.int32)
        grown[: len(self._cell_1)] = self._cell_1
        self._cell_1 = grown

    def _buckets_and_prints(self, hashes: Uint64s) -> tuple[Int64s, npt.NDArray[np.uint16]]:
        return (hashes >> np.uint64(64 - self._bits)).astype(np.int64), hashes.astype(np.uint16)

    def add(self, slots: Int64s, column_hi: Uint64s, column_lo: Uint64s) -> None:
        """Enter rows by the references that their columns hold."""
        if self._rows + len(slots) > _LOAD_MAX << self._bits:
            in_table = self._slots_1[self._slots_1 != 0].astype(np.int64) - 1
            slots = np.concatenate((in_table, self._over_slots, slots))
            self._bits = bucket_bits(len(slots))
            self._set_table()
            self._rows = 0
        self._rows += len(slots)
        for start in range(0, len(slots), _PIECE_ROWS):
            piece = slots[start : start + _PIECE_ROWS]
            self._place(piece, hash_of(column_hi[piece], column_lo[piece]))

    def _place(self, slots: Int64s, hashes: Uint64s) -> None:
        order = np.argsort(hashes)  # by bucket, for that is the hash's head
        slots, hashes = slots[order], hashes[order]
        buckets, prints = self._buckets_and_prints(hashes)
        place_in_group = np.arange(len(slots)) - np.searchsorted(buckets, buckets, "left")
        free = self._slots_1.reshape(-1, CELLS)[buckets] == 0
        # The first row of a group takes its bucket's first free cell, the second the second, and so on.
        chosen = free & (free.cumsum(axis=1, dtype=np.int8) == (place_in_group + 1)[:, None])
        placed, columns = np.nonzero(chosen)
        cells = buckets[placed] * CELLS + columns
        self._prints[cells] = prints[placed]
        self._slots_1[cells] = slots[placed] + 1
        self._cell_1[slots] = 0
        self._cell_1[slots[placed]] = cells + 1
        if len(placed) < len(slots):
            full = np.ones(len(slots), np.bool_)
            full[placed] = False
            hashes = np.concatenate((self._over_hashes, hashes[full]))
            order = np.argsort(hashes, kind="stable")
            self._over_hashes = hashes[order]
            self._over_slots = np.concatenate((self._over_slots, slots[full]))[order]

    def remove(self, slots: Int64s) -> None:
        """Forget slots; those that were never entered are passed over."""
        cells_1 = self._cell_1[slots]
        in_table = cells_1 != 0
        self._slots_1[cells_1[in_table] - 1] = 0
        self._cell_1[slots] = 0
        self._rows -= int(np.count_nonzero(in_table))
        if not in_table.all() and len(self._over_slots):
            kept = ~np.isin(self._over_slots, slots[~in_table])
            self._rows -= len(kept) - int(np.count_nonzero(kept))
            self._over_hashes, self._over_slots = self._over_hashes[kept], self._over_slots[kept]

    def find(self, ref_hi: Uint64s, ref_lo: Uint64s, column_hi: Uint64s, column_lo: Uint64s) -> Int64s:
        """The slot of each reference, `_NONE` where there is none."""
        found = np.full(len(ref_lo), _NONE, np.int64)
        for start in range(0, len(ref_lo), _PIECE_ROWS):
            piece = slice(start, start + _PIECE_ROWS)
            hashes = hash_of(ref_hi[piece], ref_lo[piece])
            for asked, slots in (self._in_table(hashes), self._in_overflow(hashes)):
                asked = asked + start
                same = (column_lo[slots] == ref_lo[asked]) & (column_hi[slots] == ref_hi[asked])
                found[asked[same]] = slots[same]
        return found

    def _in_table(self, hashes: Uint64s) -> tuple[Int64s, Int64s]:
        """(number of the hash, slot) for every cell that may be the one."""
        buckets, prints = self._buckets_and_prints(hashes)
        alike = self._prints.reshape(-1, CELLS)[buckets] == prints[:, None]
        asked, columns = np.nonzero(alike)
        slots_1 = self._slots_1[buckets[asked] * CELLS + columns]
        taken = slots_1 != 0
        return asked[taken], slots_1[taken].astype(np.int64) - 1

    def _in_overflow(self, hashes: Uint64s) -> tuple[Int64s, Int64s]:
        first = np.searchsorted(self._over_hashes, hashes, "left")
        counts = np.searchsorted(self._over_hashes, hashes, "right") - first
        asked = np.arange(len(hashes)).repeat(counts)
        place_in_group = np.arange(len(asked)) - (counts.cumsum() - counts).repeat(counts)
        return asked, self._over_slots[first.repeat(counts) + place_in_group]


def bucket_bits(rows: int) -> int:
    """Bits of the number of a bucket, so that `rows` fit with at most `_LOAD_MAX` in each on average."""
    return max((rows // _LOAD_MAX).bit_length(), 1)


def hash_of(ref_hi: Uint64s, ref_lo: Uint64s) -> Uint64s:
    """64 well mixed bits of 128 (two rounds of SplitMix64's finalizer; arithmetic wraps)."""
    mixed = ref_lo ^ (ref_hi * np.uint64(0x9E3779B97F4A7C15))
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed = mixed ^ (mixed >> np.uint64(31))
    return np.asarray(mixed, np.uint64)
