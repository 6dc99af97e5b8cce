"""Long work on the event loop, in slices of time between which others have their turn."""

import asyncio
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["TimeSlice", "collector_paused"]

LONGEST = 0.003
"""Seconds that a slice lasts, and one step more."""


class TimeSlice:
    """A slice of time for work. It begins when it is made; pause() after every step of some microseconds."""

    __slots__ = ("_ends",)

    def __init__(self) -> None:
        self._ends = time.monotonic() + LONGEST

    @property
    def over(self) -> bool:
        """Whether the loop was held for a few milliseconds."""
        return time.monotonic() >= self._ends

    async def pause(self) -> None:
        """Let others have the loop, if it was held for a few milliseconds."""
        if time.monotonic() >= self._ends:  # as over: this is asked at every step
            await asyncio.sleep(0)
            self._ends = time.monotonic() + LONGEST


@contextmanager
def collector_paused() -> Iterator[None]:
    """Inside, the garbage collector does not run. Without an await inside; blocks may be nested.

    For work that makes many objects, of which most stay and next to none are in cycles: it would look through
    all of them again and again, for a tenth of the time that the work takes.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
