"""One request in a round of the event loop, however many clients ask.

Needs: a running event loop.   Gives: Turns.
So whatever else the loop has to do, a pod's ADD above all, never waits for a whole queue of requests.
"""

from __future__ import annotations

import asyncio
from collections import deque


class Turns:
    """Hands out the turns: first come, first served."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._taken = False

    async def take(self) -> None:
        """Return in a round of the loop in which nobody else has got a turn."""
        loop = asyncio.get_running_loop()
        if not self._taken:
            self._taken = True
            loop.call_soon(self._next)
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _next(self) -> None:
        """The round after a turn: whose turn it is now goes on in the one after this."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # else it was cancelled
                turn.set_result(None)
                asyncio.get_running_loop().call_soon(self._next)
                return
        self._taken = False
