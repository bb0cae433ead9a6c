"""How long to wait before connecting again? Full jitter, so that many workers do not come back in step."""

from __future__ import annotations

import random

FIRST_S = 0.1
LONGEST_S = 4.0
_DOUBLINGS_MAX = 16


class Backoff:
    """Delays between 0 and a bound that doubles with every failure, up to `longest_s`."""

    def __init__(
        self, *, first_s: float = FIRST_S, longest_s: float = LONGEST_S, random_: random.Random | None = None
    ) -> None:
        self.failure_count = 0
        self._first_s = first_s
        self._longest_s = longest_s
        self._random = random_ or random.Random()

    def reset(self) -> None:
        """Only when a connection has proved stable: a server that accepts and drops is not back."""
        self.failure_count = 0

    def next_delay_s(self) -> float:
        """Counts a failure."""
        bound_s = min(self._longest_s, self._first_s * 2.0 ** min(self.failure_count, _DOUBLINGS_MAX))
        self.failure_count += 1
        return self._random.uniform(0, bound_s)
