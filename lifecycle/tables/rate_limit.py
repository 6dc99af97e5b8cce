"""Rate limits with bursts."""

import math

import anyio
import msgspec

__all__ = ["RateLimit", "TokenBucket"]


class RateLimit(msgspec.Struct, frozen=True):
    """At most `calls` in any `per` seconds, after a burst of `burst`. ``RateLimit(10)`` is ten a second."""

    calls: float
    per: float = 1.0
    burst: int = 1

    def __post_init__(self) -> None:
        for name, value in (("calls", self.calls), ("per", self.per)):
            if not 0 < value < math.inf:
                raise ValueError(f"rate limit: {name} is {value!r}; expected a number above 0")
        if self.burst < 1:
            raise ValueError(f"rate limit: burst is {self.burst!r}; expected 1 or more")


class TokenBucket:
    """The tokens of a rate limit: each call takes one, time adds them."""

    __slots__ = ("_burst", "_filled_at", "_interval", "_tokens")

    def __init__(self, limit: RateLimit) -> None:
        self._interval = limit.per / limit.calls
        self._burst = limit.burst
        self._tokens = float(limit.burst)
        self._filled_at = -math.inf

    def pause(self) -> float:
        """Seconds until the next call is allowed; 0 if it is allowed now."""
        self._fill()
        # tolerance: a rounding error must not cause a pause of zero
        return 0.0 if self._tokens > 1 - 1e-9 else (1 - self._tokens) * self._interval

    def take(self) -> None:
        """Count a call."""
        self._fill()
        self._tokens -= 1

    def _fill(self) -> None:
        now = anyio.current_time()
        self._tokens = min(self._burst, self._tokens + (now - self._filled_at) / self._interval)
        self._filled_at = now
