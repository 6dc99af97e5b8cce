"""The lag of the event loop: how long ready tasks wait.

The loop returns to its selector after all ready callbacks have run. The time in between is the exact lag of
that turn, measured without a timer that wakes an idle process; it costs two clock readings and a bisection
for each turn, 0.3 µs.
"""

import asyncio
import selectors
import time
from bisect import bisect_left
from itertools import accumulate
from typing import Final
from weakref import WeakKeyDictionary

import msgspec

__all__ = ["LagHistogram", "LoopLag", "measured_loop"]

BOUNDS: Final = tuple(0.0001 * 2 ** (step / 4) for step in range(70))
"""Upper bounds of the histogram's buckets, in seconds: four to a doubling, from 0.1 ms to 15 s."""


class LagHistogram(msgspec.Struct, frozen=True):
    """A histogram of the lengths of turns. Two of one loop can be subtracted, for the turns between them."""

    counts: tuple[int, ...]
    """One for each of BOUNDS, and one for longer turns."""

    def __sub__(self, earlier: "LagHistogram") -> "LagHistogram":
        pairs = zip(self.counts, earlier.counts, strict=True)
        return LagHistogram(tuple(now - before for now, before in pairs))

    @property
    def total(self) -> int:
        """Number of turns."""
        return sum(self.counts)

    def within(self, share: float) -> float:
        """Return the bound in seconds that ``share`` of the turns do not exceed; 0 without any turn."""
        total = self.total
        for bound, reached in zip((*BOUNDS, float("inf")), accumulate(self.counts), strict=True):
            if total and reached >= share * total:
                return bound
        return 0.0


class LoopLag:
    """The lengths of an event loop's turns since its creation."""

    __slots__ = ("_counts", "longest", "seconds")

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS) + 1)
        self.longest = 0.0
        """Length of the longest turn, in seconds."""
        self.seconds = 0.0
        """Total length of all turns, in seconds."""

    def add(self, seconds: float) -> None:
        """Count one turn."""
        self._counts[bisect_left(BOUNDS, seconds)] += 1
        self.seconds += seconds
        self.longest = max(self.longest, seconds)

    @property
    def histogram(self) -> LagHistogram:
        """The histogram so far."""
        return LagHistogram(tuple(self._counts))

    @staticmethod
    def of(loop: asyncio.AbstractEventLoop) -> "LoopLag | None":
        """Return the LoopLag of a loop from measured_loop(); None for other loops."""
        return _measured.get(loop)


_measured: "WeakKeyDictionary[asyncio.AbstractEventLoop, LoopLag]" = WeakKeyDictionary()


class _Selector(selectors.DefaultSelector):
    """The loop's selector, which observes when the loop leaves and enters it."""

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
    """Return a new event loop that measures its lag.

    For ``anyio.run(main, backend_options={"loop_factory": measured_loop})``.
    """
    lag = LoopLag()
    loop = asyncio.SelectorEventLoop(_Selector(lag))
    _measured[loop] = lag
    return loop
