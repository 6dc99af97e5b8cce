"""Long work on the event loop, in time slices with a yield to the loop after each."""

import asyncio
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["TimeSlice", "collector_paused"]

LONGEST = 0.003
"""Maximum length of a slice, in seconds, without its last step."""


class TimeSlice:
    """A time slice for work, from its creation on; call pause() after every step of some microseconds."""

    __slots__ = ("_ends",)

    def __init__(self) -> None:
        self._ends = time.monotonic() + LONGEST

    @property
    def over(self) -> bool:
        """Whether the slice has ended."""
        return time.monotonic() >= self._ends

    async def pause(self) -> None:
        """Yield to the event loop if the slice has ended."""
        if time.monotonic() >= self._ends:  # inlined `over`: called at every step
            await asyncio.sleep(0)
            self._ends = time.monotonic() + LONGEST


@contextmanager
def collector_paused() -> Iterator[None]:
    """Disable the garbage collector in a block. Do not await inside; blocks may be nested.

    For work that makes many objects of which most stay and few are in cycles: the collector would visit all
    of them repeatedly, which takes a tenth of the time of the work.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
