"""When does a timer fire? A hierarchical timing wheel over numpy columns; it has no clock and does no I/O.

The shape is Varghese and Lauck's hierarchy, with the level rule of tokio's wheel: time is cut into ticks, a
tick number into groups of `SLOT_BITS` bits, and a timer lies at the level of the highest bit in which its
tick differs from the wheel's own. Three facts follow, and the code leans on each:

* Everything at level L is due before everything at level L + 1, and within a level the slots are in order of
  time. So the next timer is in the lowest occupied slot of the lowest occupied level: two bit operations,
  however long the wheel has been idle.
* A timer falls at most once through each level, so the cost of a tick is that of what is due, not of what
  waits.
* What falls down was inserted before anything that is inserted there directly. So order of insertion is order
  of place, and needs no column.

A slot is a list of chunks, a chunk one int64[2, n] (due, item): 16 bytes a timer, and nothing per timer in
Python.

Cancelling leaves the rows where they lie and notes (item, number of the cancel); a chunk carries the number
of the last cancel that it has seen, and drops the dead when it is next touched. So a cancelled item may be
inserted again at once. Which items are held is known from a multiset in sorted runs, 8 to 12 bytes more a
timer, that exists only once somebody cancels.
"""

import sys
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

TICK_US_DEFAULT = 10_000
SLOT_BITS = 8
"""256 slots; at 10 ms the levels span 2.56 s, 11 min, 47 h …, and what is loaded minutes ahead falls once."""
SLOTS = 1 << SLOT_BITS

NEVER_US = int(np.iinfo(np.int64).max)
"""A due time that does not come: such a timer is held, counted and can be cancelled, and never fires."""
_NEVER_KEY = -1

CHUNKS_LOOSE_MAX = 8
"""A slot's chunks are merged each time that so many came: each has some 250 bytes of Python around it."""
COMPACT_DEAD_MIN = 256
"""Fewer cancelled rows than this are not worth a pass over the wheel."""
PENDING_MAX = 65_536
"""Rows that the multiset keeps unsorted at most."""

_DUE, _ITEM = 0, 1


def level_count(tick_us: int) -> int:
    """Levels that cover every tick of int64 microseconds: 7 at 10 ms."""
    return -(-(NEVER_US // tick_us).bit_length() // SLOT_BITS)


def level_of(elapsed_tick: int, tick: int) -> int:
    """The level of a timer: that of the highest bit in which the two differ. `tick >= elapsed_tick >= 0`."""
    return max((elapsed_tick ^ tick).bit_length() - 1, 0) // SLOT_BITS


def slot_of(tick: int, level: int) -> int:
    """The place of a tick within its level, in 0..SLOTS-1."""
    return (tick >> (level * SLOT_BITS)) & (SLOTS - 1)


def slot_start(elapsed_tick: int, level: int, slot: int) -> int:
    """The first tick of an occupied slot, which shares all higher bits with the wheel's own tick: no wrap."""
    above = (level + 1) * SLOT_BITS
    return (elapsed_tick >> above << above) | (slot << (level * SLOT_BITS))


def slot_span(level: int) -> int:
    """Ticks in one slot."""
    return 1 << (level * SLOT_BITS)


def keys_of(elapsed_tick: int, ticks: Int64s) -> npt.NDArray[np.int16]:
    """`level * SLOTS + slot` for each tick: `level_of` and `slot_of` over an array. Keys ascend with time."""
    differing = ticks ^ elapsed_tick
    widest = int(differing.max(initial=0))
    if widest < SLOTS:
        return (ticks & (SLOTS - 1)).astype(np.int16)
    levels = np.zeros(len(ticks), np.int16)
    for level in range(1, level_of(0, widest) + 1):
        levels += differing >= slot_span(level)
    shifts = levels.astype(np.int64) * SLOT_BITS
    return (levels << SLOT_BITS) | ((ticks >> shifts) & (SLOTS - 1)).astype(np.int16)


class _Chunk:
    """Rows of one slot in order of insertion, or `ordered` by (due, insertion)."""

    __slots__ = ("_earliest_us", "ordered", "rows", "seen_cancel")

    def __init__(self, rows: Int64s, seen_cancel: int, *, ordered: bool = False) -> None:
        self.rows = rows
        self.seen_cancel = seen_cancel
        self.ordered = ordered
        self._earliest_us: int | None = None

    def __len__(self) -> int:
        return int(self.rows.shape[1])

    def earliest_us(self) -> int:
        if self._earliest_us is None:
            self._earliest_us = int(self.rows[_DUE, 0] if self.ordered else self.rows[_DUE].min())
        return self._earliest_us

    def order(self) -> None:
        """Sort by due once; stable, so that order of insertion decides ties."""
        if self.ordered:
            return
        due = self.rows[_DUE]
        if (due[1:] < due[:-1]).any():
            self.rows = np.take(self.rows, np.argsort(due, kind="stable"), axis=1)
        self.ordered = True

    def drop_head(self, count: int) -> None:
        """Forget the first rows. A view is enough until it would hold twice what is left."""
        rest = self.rows[:, count:]
        base = self.rows if self.rows.base is None else self.rows.base
        self.rows = rest.copy() if rest.size * 2 <= base.size else rest
        self._earliest_us = None

    @property
    def nbytes(self) -> int:
        owner = self.rows if self.rows.base is None else self.rows.base
        around = sys.getsizeof(self.rows) if owner is not self.rows else 0
        return sys.getsizeof(self) + sys.getsizeof(owner) + around


class _Multiset:
    """How many of an item are held: added less removed, each in sorted runs that double in length."""

    __slots__ = ("_added", "_removed")

    def __init__(self, items: Int64s) -> None:
        self._added = _SortedRuns()
        self._removed = _SortedRuns()
        self._added.append(items)

    def add(self, items: Int64s) -> None:
        self._added.append(items.copy())

    def remove(self, items: Int64s) -> None:
        """Each item must be held as often as it is named."""
        self._removed.append(items.copy())
        # A quarter: the multiset then costs at most 12 bytes a timer, and a removal four rows of a pass.
        if self._removed.rows > max(PENDING_MAX, (self._added.rows - self._removed.rows) >> 2):
            kept = subtract_sorted(self._added.merged(), self._removed.merged())
            self._added, self._removed = _SortedRuns(), _SortedRuns()
            self._added.append(kept)

    def count(self, items: Int64s) -> Int64s:
        return self._added.count(items) - self._removed.count(items)

    @property
    def nbytes(self) -> int:
        return self._added.nbytes + self._removed.nbytes


class _SortedRuns:
    """A growing bag of int64: what came last lies unsorted, until a question or its length has it sorted."""

    __slots__ = ("_pending", "_pending_rows", "_runs", "rows")

    def __init__(self) -> None:
        self._runs: list[Int64s] = []
        self._pending: list[Int64s] = []
        self._pending_rows = 0
        self.rows = 0

    def append(self, items: Int64s) -> None:
        self._pending.append(items)
        self._pending_rows += len(items)
        self.rows += len(items)
        if self._pending_rows > PENDING_MAX:
            self._settle()

    def _settle(self) -> None:
        if not self._pending:
            return
        self._runs.append(np.sort(np.concatenate(self._pending)))
        self._pending, self._pending_rows = [], 0
        while len(self._runs) > 1 and len(self._runs[-2]) <= 2 * len(self._runs[-1]):
            # Two sorted runs: the stable sort finds them and does one merge.
            self._runs[-2:] = [np.sort(np.concatenate(self._runs[-2:]), kind="stable")]

    def count(self, items: Int64s) -> Int64s:
        self._settle()
        total = np.zeros(len(items), np.int64)
        for run in self._runs:
            total += np.searchsorted(run, items, "right") - np.searchsorted(run, items, "left")
        return total

    def merged(self) -> Int64s:
        parts = [*self._runs, *self._pending]
        return np.sort(np.concatenate(parts), kind="stable") if parts else np.empty(0, np.int64)

    @property
    def nbytes(self) -> int:
        return sum(sys.getsizeof(part) for part in (*self._runs, *self._pending))


def subtract_sorted(held: Int64s, gone: Int64s) -> Int64s:
    """`held` without `gone`, both sorted multisets; every row of `gone` must be in `held`."""
    copy_number = np.arange(len(gone)) - np.searchsorted(gone, gone, "left")
    kept = np.ones(len(held), np.bool_)
    kept[np.searchsorted(held, gone, "left") + copy_number] = False
    return held[kept]


class _Cancels:
    """The number of the last cancel that named an item, in sorted runs that double; unique within a run."""

    __slots__ = ("_runs",)

    def __init__(self) -> None:
        self._runs: list[tuple[Int64s, Int64s]] = []

    def note(self, items: Int64s, number: int) -> None:
        """`items` sorted and unique; `number` higher than any before."""
        self._runs.append((items, np.full(len(items), number, np.int64)))
        while len(self._runs) > 1 and len(self._runs[-2][0]) <= 2 * len(self._runs[-1][0]):
            (old_items, old_numbers), (new_items, new_numbers) = self._runs.pop(-2), self._runs.pop(-1)
            both = np.concatenate((old_items, new_items))
            order = np.argsort(both, kind="stable")
            both, numbers = both[order], np.concatenate((old_numbers, new_numbers))[order]
            # Of one item's two numbers the newer stands last, for the sort is stable.
            last = np.append(both[1:] != both[:-1], True)
            self._runs.append((both[last], numbers[last]))

    def last_for(self, items: Int64s) -> Int64s:
        """0 for an item that was not cancelled."""
        last = np.zeros(len(items), np.int64)
        for run_items, numbers in self._runs:
            place = np.minimum(np.searchsorted(run_items, items), len(run_items) - 1)
            np.maximum(last, np.where(run_items[place] == items, numbers[place], 0), out=last)
        return last

    def clear(self) -> None:
        self._runs.clear()

    @property
    def nbytes(self) -> int:
        return sum(sys.getsizeof(items) + sys.getsizeof(numbers) for items, numbers in self._runs)


class TimingWheel:
    """Timers `(due_us, item)`; items are opaque int64 >= 0, and one item may be held several times.

    Exact to the microsecond, not to the tick: `advance` gives what is due at its `now_us` and nothing else
    (I10). The tick only says how finely timers are sorted ahead of time, and how finely a caller needs to
    wake up.
    """

    def __init__(self, now_us: int, tick_us: int = TICK_US_DEFAULT) -> None:
        assert tick_us > 0, f"tick_us must be positive, not {tick_us}"
        self._tick_us = tick_us
        self._elapsed_tick = max(now_us, 0) // tick_us
        self._slots: dict[int, list[_Chunk]] = {}
        self._occupied = [0] * level_count(tick_us)
        self._live = 0
        self._dead = 0
        self._cancel_number = 0
        self._cancels = _Cancels()
        self._held: _Multiset | None = None

    def __len__(self) -> int:
        """Timers held, the cancelled ones not counted."""
        return self._live

    @property
    def nbytes(self) -> int:
        """Bytes of everything the wheel keeps, Python objects included."""
        chunks = sum(
            sys.getsizeof(slot) + sum(chunk.nbytes for chunk in slot) for slot in self._slots.values()
        )
        held = self._held.nbytes if self._held is not None else 0
        return sys.getsizeof(self._slots) + chunks + held + self._cancels.nbytes

    # ---- insert

    def insert(self, due_us: Int64s, item: Int64s) -> None:
        """Add timers; the arrays are copied. A due time in the past is due at the next `advance`."""
        count = len(due_us)
        assert count == len(item), f"{count} due times for {len(item)} items"
        if not count:
            return
        rows = np.empty((2, count), np.int64)
        rows[_DUE] = due_us
        rows[_ITEM] = item
        assert rows[_ITEM].min() >= 0, "an item is a handle >= 0"
        self._live += count
        if self._held is not None:
            self._held.add(rows[_ITEM])
        self._place(rows)

    def _place(self, rows: Int64s) -> None:
        """Put rows, which this takes over, into their slots."""
        due = rows[_DUE]
        if due.max() == NEVER_US:
            never = due == NEVER_US
            self._append(_NEVER_KEY, rows[:, never])
            rows = rows[:, ~never]
            if not rows.size:
                return
            due = rows[_DUE]
        ticks = np.maximum(due // self._tick_us, self._elapsed_tick)
        keys = keys_of(self._elapsed_tick, ticks)
        first = int(keys[0])
        if (keys == first).all():
            self._append(first, rows)
            return
        if (keys[1:] < keys[:-1]).any():
            order = np.argsort(keys, kind="stable")  # radix for 16 bits: linear
            keys, rows = keys[order], np.take(rows, order, axis=1)
        borders = [0, *(np.flatnonzero(keys[1:] != keys[:-1]) + 1).tolist(), len(keys)]
        for start, end in pairwise(borders):
            # A copy, or the last timer of a batch would keep all of it in memory.
            self._append(int(keys[start]), rows[:, start:end].copy())

    def _append(self, key: int, rows: Int64s) -> None:
        chunk = _Chunk(rows, self._cancel_number)
        slot = self._slots.get(key)
        if slot is None:
            self._slots[key] = [chunk]
            if key != _NEVER_KEY:
                self._occupied[key >> SLOT_BITS] |= 1 << (key & (SLOTS - 1))
            return
        slot.append(chunk)
        if len(slot) % CHUNKS_LOOSE_MAX == 0:
            self._merge_tail(slot)

    def _merge_tail(self, slot: list[_Chunk]) -> None:
        """Merge the last chunks, each that is at most twice as long as all behind it together.

        A row is copied log(n) times, and log(n) chunks stay.
        """
        start, total = len(slot) - 1, len(slot[-1])
        while start and len(slot[start - 1]) <= 2 * total:
            start -= 1
            total += len(slot[start])
        tail = slot[start:]
        self._purge(tail)  # never empties it: the last chunk is newer than any cancel
        slot[start:] = [self._merge(tail)]

    def _merge(self, chunks: list[_Chunk]) -> _Chunk:
        if len(chunks) == 1:
            return chunks[0]
        return _Chunk(np.concatenate([chunk.rows for chunk in chunks], axis=1), self._cancel_number)

    # ---- advance

    def advance(self, now_us: int, limit: int | None = None) -> tuple[Int64s, Int64s]:
        """Take what is due: (due_us, item) of every timer with `due_us <= now_us`, by due, then by insertion.

        With a `limit`, at most that many; the others stay due, and the next call goes on where this one
        ended.
        """
        taken: list[Int64s] = []
        room = sys.maxsize if limit is None else limit
        now_tick = max(now_us // self._tick_us, self._elapsed_tick)
        while (key := self._first_key()) is not None:
            level, slot = key >> SLOT_BITS, key & (SLOTS - 1)
            start = slot_start(self._elapsed_tick, level, slot)
            if start > now_tick:
                self._elapsed_tick = now_tick
                break
            if room <= 0:
                break
            if level and start + slot_span(level) > now_tick:
                self._elapsed_tick = start
                self._fall(key)
                continue
            # A slot that has wholly passed is taken as it is, at any level: hours of sleep cost one sort.
            rows = self._take_due(key, now_us, room)
            room -= rows.shape[1]
            if rows.size:
                taken.append(rows)
            if key in self._slots:
                # No room for the rest, which is due; or it is the rest of the present tick, which is not.
                # (The wheel's own tick must not enter a slot above level 0 that is occupied.)
                if not level:
                    self._elapsed_tick = start
                break
        else:
            self._elapsed_tick = now_tick
        return self._give(taken)

    def _give(self, taken: list[Int64s]) -> tuple[Int64s, Int64s]:
        if not taken:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        rows = taken[0] if len(taken) == 1 else np.concatenate(taken, axis=1)
        self._live -= rows.shape[1]
        if self._held is not None:
            self._held.remove(rows[_ITEM])
        if not self._live:
            self._forget_all()
        return rows[_DUE], rows[_ITEM]

    def _forget_all(self) -> None:
        """Nothing is held: what still lies in slots is cancelled."""
        self._slots.clear()
        self._occupied = [0] * len(self._occupied)
        self._dead = 0
        self._cancels.clear()
        self._held = None

    def _first_key(self) -> int | None:
        """The slot of the earliest timer; by the level rule the lowest of the lowest level."""
        for level, occupied in enumerate(self._occupied):
            if occupied:
                return (level << SLOT_BITS) | ((occupied & -occupied).bit_length() - 1)
        return None

    def _remove_slot(self, key: int) -> list[_Chunk]:
        if key != _NEVER_KEY:
            self._occupied[key >> SLOT_BITS] &= ~(1 << (key & (SLOTS - 1)))
        return self._slots.pop(key)

    def _fall(self, key: int) -> None:
        """Deal a slot that time has reached out to the levels below, chunk by chunk in their order."""
        chunks = self._remove_slot(key)
        self._purge(chunks)
        if chunks:
            self._place(self._merge(chunks).rows)

    def _take_due(self, key: int, now_us: int, room: int) -> Int64s:
        """The first `room` rows of a slot that are due, in order.

        Each chunk is sorted once, and only the heads are merged: a backlog of a million that is taken a
        thousand at a time costs a thousand each time, even while new timers join it.
        """
        slot = self._slots[key]
        self._purge(slot)
        for chunk in slot:
            chunk.order()
        due_counts = [min(int(np.searchsorted(chunk.rows[_DUE], now_us, "right")), room) for chunk in slot]
        heads = [chunk.rows[:, :count] for chunk, count in zip(slot, due_counts, strict=True)]
        rows, counts = heads[0] if heads else np.empty((2, 0), np.int64), due_counts
        if len(heads) > 1:
            rows = np.concatenate(heads, axis=1)
            order = np.argsort(rows[_DUE], kind="stable")[:room]
            rows = np.take(rows, order, axis=1)
            origin = np.repeat(np.arange(len(slot)), due_counts)[order]
            counts = np.bincount(origin, minlength=len(slot)).tolist()
        for chunk, count in zip(slot, counts, strict=True):
            if count:
                chunk.drop_head(count)
        slot[:] = [chunk for chunk in slot if len(chunk)]
        if not slot:
            self._remove_slot(key)
        return rows

    def next_due_us(self) -> int | None:
        """The earliest due time, or None if nothing will ever be due; a caller may sleep until then.

        Never late. Early only when the earliest timer was cancelled and is not yet purged: then the caller
        wakes for nothing.
        """
        key = self._first_key()
        return None if key is None else min(chunk.earliest_us() for chunk in self._slots[key])

    # ---- cancel

    def cancel(self, items: Int64s) -> int:
        """Forget every timer with one of these items; gives how many. Unknown items are no error."""
        if not len(items) or not self._live:
            return 0
        if self._held is None:
            self._held = _Multiset(self._items_held())
        wanted = np.unique(items)
        counts = self._held.count(wanted)
        found, counts = wanted[counts > 0], counts[counts > 0]
        if not len(found):
            return 0
        cancelled = int(counts.sum())
        self._cancel_number += 1
        self._cancels.note(found, self._cancel_number)
        self._held.remove(np.repeat(found, counts))
        self._live -= cancelled
        self._dead += cancelled
        if not self._live:
            self._forget_all()
        elif self._dead > max(self._live, COMPACT_DEAD_MIN):
            self._compact()
        return cancelled

    def _items_held(self) -> Int64s:
        # No cancel is pending here: the multiset is dropped only when nothing is held, dead rows included.
        assert not self._dead, f"{self._dead} cancelled timers are not purged"
        return np.concatenate([chunk.rows[_ITEM] for chunk in self._chunks()])

    def _chunks(self) -> Iterator[_Chunk]:
        for slot in self._slots.values():
            yield from slot

    def _purge(self, chunks: list[_Chunk]) -> None:
        """Drop the rows that were cancelled since their chunk was written, and chunks that this empties."""
        if not self._dead:
            return
        for chunk in chunks:
            if chunk.seen_cancel == self._cancel_number:
                continue
            dead = self._cancels.last_for(chunk.rows[_ITEM]) > chunk.seen_cancel
            chunk.seen_cancel = self._cancel_number
            count = int(np.count_nonzero(dead))
            if count:
                chunk.rows = np.compress(~dead, chunk.rows, axis=1)
                chunk._earliest_us = None
                self._dead -= count
        chunks[:] = [chunk for chunk in chunks if len(chunk)]
        if not self._dead:
            self._cancels.clear()

    def _compact(self) -> None:
        for key in list(self._slots):
            slot = self._slots[key]
            self._purge(slot)
            if slot:
                slot[:] = [self._merge(slot)]
            else:
                self._remove_slot(key)
        assert not self._dead, f"{self._dead} cancelled timers were not found"
