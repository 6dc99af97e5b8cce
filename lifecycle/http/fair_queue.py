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


class FairQueue:
    """Admits one request at a time: the peers in turn, each peer's requests in order."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}
        """Waiting requests by peer; the peer with the next turn is first."""
        self._busy = False
        self.requested_at = -math.inf
        """When a turn was last requested, by the loop's clock."""
        self.priority_work_at = -math.inf
        """When the loop last served work that precedes requests; the server of that work sets it."""

    async def wait(self, peer: Hashable) -> None:
        """Wait until neither this turn of the loop nor the one before had a request."""
        loop = asyncio.get_running_loop()
        self.requested_at = loop.time()
        if not self._busy:
            self._busy = True
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
        self._busy = False


_queues: WeakKeyDictionary[asyncio.AbstractEventLoop, FairQueue] = WeakKeyDictionary()


def fair_queue_of(loop: asyncio.AbstractEventLoop) -> FairQueue:
    """Return the queue of an event loop, which all its servers share."""
    queue = _queues.get(loop)
    if queue is None:
        queue = _queues[loop] = FairQueue()
    return queue
