"""How long the event loop is busy at a stretch, and so how long ready tasks wait.

The loop comes back to its selector after everything that was ready has run. The time from there to there is
the lag of that round, exactly, without a timer that wakes an idle process; it costs two readings of the clock
and a bisection a round, 0.3 µs.
"""

import asyncio
import selectors
import time
from bisect import bisect_left
from itertools import accumulate
from typing import Final
from weakref import WeakKeyDictionary

import msgspec

__all__ = ["LoopLag", "Stretches", "measured_loop"]

BOUNDS: Final = tuple(0.0001 * 2 ** (step / 4) for step in range(70))
"""Upper bounds of the classes of stretches in seconds: four to a doubling, from 0.1 ms to 15 s."""


class Stretches(msgspec.Struct, frozen=True):
    """So many stretches of each length. Two of one loop subtract: what happened between them."""

    counts: tuple[int, ...]
    """One for each of BOUNDS, and last for what was longer than all."""

    def __sub__(self, earlier: "Stretches") -> "Stretches":
        pairs = zip(self.counts, earlier.counts, strict=True)
        return Stretches(tuple(now - then for now, then in pairs))

    @property
    def total(self) -> int:
        """How many there were."""
        return sum(self.counts)

    def within(self, share: float) -> float:
        """Seconds that ``share`` of the stretches stayed within, rounded up to a bound; 0 without any."""
        total = self.total
        for bound, reached in zip((*BOUNDS, float("inf")), accumulate(self.counts), strict=True):
            if total and reached >= share * total:
                return bound
        return 0.0


class LoopLag:
    """The stretches of one event loop since it was made."""

    __slots__ = ("_counts", "longest", "seconds")

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS) + 1)
        self.longest = 0.0
        """Seconds."""
        self.seconds = 0.0
        """All of them together."""

    def add(self, seconds: float) -> None:
        """Count one stretch."""
        self._counts[bisect_left(BOUNDS, seconds)] += 1
        self.seconds += seconds
        self.longest = max(self.longest, seconds)

    @property
    def stretches(self) -> Stretches:
        """All of them so far."""
        return Stretches(tuple(self._counts))

    @staticmethod
    def of(loop: asyncio.AbstractEventLoop) -> "LoopLag | None":
        """That of a loop measured_loop() made; None for others."""
        return _measured.get(loop)


_measured: "WeakKeyDictionary[asyncio.AbstractEventLoop, LoopLag]" = WeakKeyDictionary()


class _Selector(selectors.DefaultSelector):
    """The loop's selector, which sees it leave and come back."""

    def __init__(self, lag: LoopLag) -> None:
        super().__init__()
        self._lag = lag
        self._left: float | None = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self._left is not None:
            self._lag.add(time.perf_counter() - self._left)
        ready = super().select(timeout)
        self._left = time.perf_counter()
        return ready


def measured_loop() -> asyncio.AbstractEventLoop:
    """A new event loop that measures its lag.

    For ``anyio.run(main, backend_options={"loop_factory": measured_loop})``.
    """
    lag = LoopLag()
    loop = asyncio.SelectorEventLoop(_Selector(lag))
    _measured[loop] = lag
    return loop
