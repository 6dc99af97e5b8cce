"""Serves one request in every other turn of the event loop, however many clients send requests.

So other work of the loop, above all the ADD of a pod, waits for one request at most: its events are seen at
the beginning of the turn without a request.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Hashable
from weakref import WeakKeyDictionary


class Turns:
    """Assigns turns: one peer after the other, each peer's requests in order."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}
        """Waiting requests by peer; the peer with the next turn is first."""
        self._taken = False
        self.taken_at = -math.inf
        """When a turn was last requested, by the loop's clock."""
        self.preceded_at = -math.inf
        """When the loop last served work that precedes requests; the server of that work sets it."""

    async def take(self, peer: Hashable) -> None:
        """Wait until neither this turn of the loop nor the one before had a request."""
        loop = asyncio.get_running_loop()
        self.taken_at = loop.time()
        if not self._taken:
            self._taken = True
            loop.call_soon(self._pause)
            return
        turn = loop.create_future()
        self._waiting.setdefault(peer, deque()).append(turn)
        await turn

    def _pause(self) -> None:
        """After the turn of a request: skip a turn before the next one."""
        asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        """In the turn without a request: wake the next request for the turn after this."""
        while self._waiting:
            peer = next(iter(self._waiting))
            waiting = self._waiting.pop(peer)
            turn = waiting.popleft()
            if waiting:
                self._waiting[peer] = waiting  # after the other peers
            if not turn.done():  # it may be cancelled
                turn.set_result(None)
                asyncio.get_running_loop().call_soon(self._pause)
                return
        self._taken = False


_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, Turns] = WeakKeyDictionary()


def turns_of(loop: asyncio.AbstractEventLoop) -> Turns:
    """Return the turns of an event loop, which all its servers share."""
    found = _turns.get(loop)
    if found is None:
        found = _turns[loop] = Turns()
    return found
