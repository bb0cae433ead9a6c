"""Timer rows that a transaction wrote: their owners are told when it has committed."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Touched:
    """One entry a row in each list: the shard, the row's reference (16 bytes), when it is due."""

    shards: list[int] = field(default_factory=list)
    refs: list[bytes] = field(default_factory=list)
    due_us: list[int] = field(default_factory=list)

    def add(self, shard: int, ref: bytes, due_us: int) -> None:
        self.shards.append(shard)
        self.refs.append(ref)
        self.due_us.append(due_us)
