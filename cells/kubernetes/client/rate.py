"""How many requests a second may go out.

Needs: nothing.   Gives: Bucket.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import anyio


class Bucket:
    """A token bucket: ``burst`` at once, ``qps`` a second in the long run. A ``qps`` of 0 never waits."""

    def __init__(self, qps: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._qps = qps
        self._burst = max(1, burst)
        self._clock = clock
        self._tokens = float(self._burst)
        self._at = clock()

    async def take(self) -> float:
        """Wait for a turn; the seconds it took."""
        if not self._qps:
            return 0.0
        now = self._clock()
        self._tokens = min(float(self._burst), self._tokens + (now - self._at) * self._qps)
        self._at = now
        self._tokens -= 1
        if self._tokens >= 0:
            return 0.0
        wait = -self._tokens / self._qps
        await anyio.sleep(wait)
        return wait
