"""The cluster clock as this coordinator estimates it, for stamps and horizons; mutations read it in
Postgres.
"""

from __future__ import annotations

import asyncio
import time

import structlog

from tickwheel.errors import StoreUnavailable
from tickwheel.postgres.connections import Database

log = structlog.get_logger(__name__)

SAMPLE_INTERVAL_MS = 5_000


class ClusterTime:
    """Postgres' clock anchored to this host's monotonic one: a jump of the wall clock here changes
    nothing.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        # Until Postgres has answered, this host's own wall clock.
        self._offset_us = time.time_ns() // 1_000 - self.mono_us()

    def now_us(self) -> int:
        return self.mono_us() + self._offset_us

    def mono_us(self) -> int:
        return time.monotonic_ns() // 1_000

    async def sample(self) -> None:
        """Anchors anew: the answer stands for the midpoint of its round trip. Raises StoreUnavailable."""
        sent_us = self.mono_us()
        answered_us = await self._database.now_us()
        self._offset_us = answered_us - (sent_us + self.mono_us()) // 2

    async def run(self) -> None:
        """Samples again and again, until cancelled."""
        while True:
            try:
                await self.sample()
            except StoreUnavailable as error:
                log.debug("clock_not_sampled", error=str(error))
            await asyncio.sleep(SAMPLE_INTERVAL_MS / 1_000)
