"""The owner's table of leases, driven at random beside a plain dictionary of the same leases."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest

from tickwheel.services.timer.leases import ENDING, FREE, I64, LIVE, NO_STREAM, LeaseTable

TTL_US = 1_000


@dataclass
class Known:
    """What the dictionary says of one lease."""

    slot: int
    handle: int
    shard: int
    schedule: int
    own_deadline_us: int
    stream: int = NO_STREAM
    ending: bool = False


class Model:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.table = LeaseTable(capacity=4)
        self.known: dict[str, Known] = {}
        self.gone: list[int] = []
        self.renewed_us: dict[int, int] = {}
        self.now_us = 10_000

    def step(self) -> None:
        self.now_us += self.random.randrange(500)
        self.random.choice(
            (self.add, self.add, self.remove, self.end, self.attach, self.renew, self.detach)
        )()

    def add(self) -> None:
        count = self.random.randrange(4)
        tokens = [f"{self.random.getrandbits(128):032x}" for _ in range(count)]
        shards = [self.random.randrange(3) for _ in range(count)]
        schedules = [self.random.choice((0, 1, 2, 3)) for _ in range(count)]
        slots = self.table.add(
            tokens,
            {
                "shard": np.array(shards, dtype=np.int16),
                "schedule_lo": np.array(schedules, dtype=np.uint64),
                "ttl_us": TTL_US,
                "deadline_mono_us": self.now_us + TTL_US,
            },
        )
        handles = self.table.handles(slots).tolist()
        for n, token in enumerate(tokens):
            slot = int(slots[n])
            self.known[token] = Known(slot, handles[n], shards[n], schedules[n], self.now_us + TTL_US)

    def some(self) -> list[Known]:
        return self.random.sample(list(self.known.values()), min(len(self.known), self.random.randrange(3)))

    def slots(self, leases: list[Known]) -> I64:
        return np.array([lease.slot for lease in leases], dtype=np.int64)

    def remove(self) -> None:
        leases = self.some()
        self.table.remove(self.slots(leases))
        self.gone += [lease.handle for lease in leases]
        slots = {lease.slot for lease in leases}
        self.known = {token: lease for token, lease in self.known.items() if lease.slot not in slots}

    def end(self) -> None:
        leases = self.some()
        self.table.state[self.slots(leases)] = ENDING
        for lease in leases:
            lease.ending = True

    def attach(self) -> None:
        stream = self.random.randrange(1, 4)
        for lease in self.some():
            slot = self.slots([lease])
            self.table.deadline_mono_us[slot] = self.table.deadlines(slot)
            lease.own_deadline_us = self.deadline_us(lease)
            self.table.stream[slot] = stream
            lease.stream = stream

    def renew(self) -> None:
        stream = self.random.randrange(1, 4)
        self.table.renewed_mono_us[stream] = self.now_us
        self.renewed_us[stream] = self.now_us

    def detach(self) -> None:
        leases = self.some()
        self.table.detach(self.slots(leases))
        for lease in leases:
            lease.own_deadline_us, lease.stream = self.deadline_us(lease), NO_STREAM

    def deadline_us(self, lease: Known) -> int:
        renewed_us = self.renewed_us.get(lease.stream, 0) + TTL_US if lease.stream != NO_STREAM else 0
        return max(lease.own_deadline_us, renewed_us)

    def check(self) -> None:
        table, known = self.table, self.known
        assert len(table) == len(known)
        assert table.by_token == {token: lease.slot for token, lease in known.items()}
        assert len({lease.slot for lease in known.values()}) == len(known)
        leases = list(known.values())
        slots = self.slots(leases)
        assert table.deadlines(slots).tolist() == [self.deadline_us(lease) for lease in leases]
        handles = np.array([lease.handle for lease in leases], dtype=np.int64)
        assert table.held(handles).all()
        assert sorted(table.live(handles).tolist()) == sorted(x.slot for x in leases if not x.ending)
        gone = np.array(self.gone, dtype=np.int64)
        assert not table.held(gone).any()
        assert len(table.live(gone)) == 0
        for stream in range(1, 4):
            of = {lease.slot for lease in leases if lease.stream == stream}
            assert set(table.of_stream(stream).tolist()) == of
        assert set(table.of_shards([0, 2]).tolist()) == {x.slot for x in leases if x.shard != 1}
        busy = {lease.schedule for lease in leases if lease.schedule}
        mask = table.busy_mask(np.arange(5, dtype=np.uint64))
        assert [bool(b) for b in mask] == [n in busy for n in range(5)]
        assert [table.is_busy(n) for n in range(5)] == [n in busy for n in range(5)]
        assert set(np.unique(table.state).tolist()) <= {FREE, LIVE, ENDING}


@pytest.mark.parametrize("seed", range(40))
def test_the_table_says_what_a_dictionary_would(seed: int) -> None:
    model = Model(seed)
    for _ in range(120):
        model.step()
        model.check()


def test_a_handle_is_not_taken_for_the_successor_in_its_slot() -> None:
    table = LeaseTable(capacity=1)
    first = table.add(["a" * 32], {})
    old = table.handles(first)
    table.remove(first)
    second = table.add(["b" * 32], {})
    assert second.tolist() == first.tolist()
    assert not table.held(old)[0]
    assert table.held(table.handles(second))[0]


def test_what_a_stream_has_renewed_stays_when_it_is_gone() -> None:
    table = LeaseTable()
    slots = table.add(["a" * 32], {"ttl_us": 100, "deadline_mono_us": 100, "stream": 7})
    table.renewed_mono_us[7] = 500
    table.detach(slots)
    table.renewed_mono_us[7] = 900
    assert table.deadlines(slots).tolist() == [600]
