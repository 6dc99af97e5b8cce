"""The memory that a server holds for bodies and answers."""

from __future__ import annotations

import asyncio
from collections import deque


class InFlight:
    """A number of bytes with a limit for new requests; those in progress may exceed it by their own size."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.total = 0

    @property
    def full(self) -> bool:
        """Whether a new request would have to wait."""
        return self.total > self._limit

    @property
    def has_waiters(self) -> bool:
        """Whether a request waits for others to end."""
        return bool(self._waiting)

    def add(self, count: int) -> None:
        """Add bytes; a negative count subtracts, and waiters may continue."""
        self.total += count
        while self._waiting and not self.full:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)

    async def room(self) -> None:
        """Wait until the total is within the limit."""
        while self.full:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            finally:
                if turn in self._waiting:
                    self._waiting.remove(turn)
