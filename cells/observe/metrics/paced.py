"""Work that many ask for, done for all of them together, and for a small part of the time.

Needs: a running event loop.   Gives: Paced.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")

SHARE = 0.1
"""Of the time that may go by in the work, when it is asked for without end."""


class Paced(Generic[T]):
    """Does the work once for all callers before it began; a caller that comes later waits for the next
    run."""

    def __init__(self, work: Callable[[], Awaitable[T]]) -> None:
        self._work = work
        self._next: asyncio.Task[T] | None = None
        """The next run, not begun yet; None if no one has asked for it."""
        self._latest: asyncio.Task[T] | None = None
        self._not_before = 0.0

    async def get(self) -> T:
        """What the work gives when it is begun after this; raises what it raises."""
        if self._next is None:
            self._next = self._latest = asyncio.get_running_loop().create_task(self._do(self._latest))
        return await asyncio.shield(self._next)

    async def _do(self, before: asyncio.Task[T] | None) -> T:
        if before is not None:
            await asyncio.wait([before])
        loop = asyncio.get_running_loop()
        if (pause := self._not_before - loop.time()) > 0:
            await asyncio.sleep(pause)
        self._next = None
        began = loop.time()
        try:
            return await self._work()
        finally:
            took = loop.time() - began
            self._not_before = loop.time() + took / SHARE - took
