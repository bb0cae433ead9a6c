"""Which timer owns which shard, as last heard from the registry: a hint for routing, never a licence to
act.
"""

from __future__ import annotations

import asyncio

from tickwheel.ports import RegistrySnapshot, TimerRecord, ViewChange


class ShardView:
    """Fed by the registry's watch; read by whoever has to reach an owner."""

    def __init__(self) -> None:
        self.snapshot = RegistrySnapshot(history=0, revision=0)
        self.connected = False
        """Whether the registry was heard, and has not gone quiet."""
        self._changed = asyncio.Event()

    def hear(self, snapshot: RegistrySnapshot, change: ViewChange) -> None:
        """The registry's watch calls it. A broken watch leaves what was known standing."""
        self.connected = change is not ViewChange.BROKEN
        if self.connected:
            self.snapshot = snapshot
        # Those who wait hold the old event.
        self._changed.set()
        self._changed = asyncio.Event()

    def owner(self, shard: int) -> TimerRecord | None:
        """The live timer to which a shard is assigned."""
        assignment = self.snapshot.assignments.get(shard)
        return None if assignment is None else self.snapshot.timers.get(assignment.timer_id)

    def timers(self) -> list[TimerRecord]:
        """The live ones, in the order of their ids."""
        return [self.snapshot.timers[key] for key in sorted(self.snapshot.timers)]

    async def wait_changed(self) -> None:
        """Until something is heard."""
        await self._changed.wait()
