"""A rate with a burst: so many at once, and then one after the other.

For:    Limiter. Needs: the caller's time, in seconds of any clock. Gives: Bucket.
Source: golang.org/x/time/rate, which Cilium's limiter stands on: a bucket that is full at first, holds
``burst`` tokens at most, and gets ``rate`` more each second.
"""

from __future__ import annotations

import math


class Bucket:
    """Tokens that come back by and by."""

    def __init__(self, rate: float, burst: int) -> None:
        self.rate = rate
        """Tokens a second; 0: they never run out."""
        self.burst = burst
        self.tokens = float(burst)
        """As of ``_at``."""
        self._at = -math.inf

    def wait(self, now: float, ahead: int = 0) -> float:
        """Seconds until there is a token for a request with this many others ahead of it; 0: now."""
        if not self.rate:
            return 0.0
        self._fill(now)
        return max(0.0, (ahead + 1 - self.tokens) / self.rate)

    def take(self, now: float) -> None:
        """Take one, which there must be."""
        self._fill(now)
        self.tokens -= 1

    def adjust(self, rate: float, burst: int, now: float) -> None:
        """Go on with another rate and burst. What is there stays there, as far as the burst allows."""
        self._fill(now)
        self.rate, self.burst = rate, burst

    def _fill(self, now: float) -> None:
        if self.rate:
            self.tokens = min(self.burst, self.tokens + max(0.0, now - self._at) * self.rate)
        self._at = now
