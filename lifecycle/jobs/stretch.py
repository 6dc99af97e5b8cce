"""Long work on the event loop, in stretches between which others have their turn."""

import asyncio
import time

__all__ = ["Stretch"]

LONGEST = 0.003
"""Seconds that a stretch lasts, and one step more."""


class Stretch:
    """A stretch of work. It begins when it is made; pause() after every step of some microseconds."""

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
