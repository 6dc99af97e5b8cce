"""Whether an API server answers, shared by everybody who waits for one.

For:   Client. Needs: nothing. Gives: Reach.
Why:   if each had pauses of its own, grown while no server was there, some would wait long after one is back.
"""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Callable
from typing import Final

import anyio

SPREAD: Final = 0.2
"""Seconds over which those who waited begin again, so that they do not ask all at once."""
FIRST_PROBE, LONGEST_PROBE = 0.1, 3.0
"""Seconds between two looks for a server: they grow from the first to the longest."""


class Reach:
    """Told by every answer and every failure to get one; wakes those who wait for a server."""

    def __init__(self) -> None:
        self._found: anyio.Event | None = None
        """Set when a server answers again; None while servers answer."""
        self._lost = anyio.Event()

    @property
    def away(self) -> bool:
        """Whether no server answered when one was asked last."""
        return self._found is not None

    def lost(self) -> None:
        """No answer came."""
        if self._found is None:
            self._found = anyio.Event()
            self._lost.set()

    def found(self) -> None:
        """An answer came."""
        if self._found is not None:
            self._found.set()
            self._found = None
            self._lost = anyio.Event()

    async def wait_lost(self) -> None:
        """Until a server was asked in vain; at once while none answers."""
        await self._lost.wait()

    async def pause(self, seconds: float = math.inf) -> None:
        """Wait so many seconds; while servers are away, no longer than until one answers."""
        if self._found is None:
            if seconds < math.inf:
                await anyio.sleep(seconds)
            return
        with anyio.move_on_after(seconds):
            await self._found.wait()
            await anyio.sleep(SPREAD * random.random())  # noqa: S311  # spreads load

    async def probe(self, ask: Callable[[], Awaitable[object]]) -> None:
        """For ever: while servers are away, ask for one. ``ask`` calls lost() or found(), never raises."""
        while True:
            await self.wait_lost()
            pause = FIRST_PROBE
            while self.away:
                await anyio.sleep(pause * (0.5 + random.random()))  # noqa: S311
                await ask()
                pause = min(LONGEST_PROBE, 2 * pause)
