"""Deadlines and events of hooks, cheap for thousands of which few are ever used."""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Deadlines", "Flag"]

Node = TypeVar("Node")


class Deadlines(Generic[Node]):
    """Calls back for hooks past their deadline; each hook has at most one deadline.

    Most hooks share a few limits, and those of one limit are due in the order in which they were set, so one
    timer of the event loop serves all.
    """

    __slots__ = ("_limits", "_loop", "_queues", "_timers")

    def __init__(self) -> None:
        self._limits: dict[Node, float] = {}
        self._queues: dict[float, dict[Node, tuple[float, Callable[[Node], None]]]] = {}
        """By limit, in seconds: deadlines in order, each with its callback."""
        self._timers: dict[float, asyncio.TimerHandle] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def set(self, node: Node, limit: float, callback: Callable[[Node], None]) -> None:
        """Call `callback` with this hook after a number of seconds, instead of its earlier callback."""
        if node in self._limits:
            self.clear(node)
        if (loop := self._loop) is None:
            loop = self._loop = asyncio.get_running_loop()
        self._limits[node] = limit
        if (queue := self._queues.get(limit)) is None:
            queue = self._queues[limit] = {}
        queue[node] = (due := loop.time() + limit, callback)
        if limit not in self._timers:
            self._timers[limit] = loop.call_at(due, self._ring, limit)

    def clear(self, node: Node) -> None:
        """Remove the deadline of a hook, if it has one."""
        if (limit := self._limits.pop(node, None)) is None:
            return
        queue = self._queues[limit]
        del queue[node]
        if not queue and limit in self._timers:  # a remaining timer would be a stop for a virtual clock
            self._timers.pop(limit).cancel()

    def _ring(self, limit: float) -> None:
        queue, now = self._queues[limit], self._timers.pop(limit).when()
        overdue = []
        for node, (due, callback) in queue.items():
            if due > now:
                self._timers[limit] = asyncio.get_running_loop().call_at(due, self._ring, limit)
                break
            overdue.append((node, callback))
        for node, callback in overdue:
            if node in queue:  # a previous callback may have ended it
                self.clear(node)
                callback(node)


class Flag:
    """Like an asyncio.Event that is never cleared, in a twentieth of the memory."""

    __slots__ = ("_set", "_waiters")

    def __init__(self) -> None:
        self._set = False
        self._waiters: list[asyncio.Future[None]] | None = None

    def is_set(self) -> bool:
        """Whether it was set."""
        return self._set

    def set(self) -> None:
        """Wake all waiters."""
        self._set = True
        if self._waiters is not None:
            for waiter in self._waiters:
                if not waiter.done():
                    waiter.set_result(None)
            self._waiters = None

    async def wait(self) -> None:
        """Wait until it is set."""
        if self._set:
            return
        waiter = asyncio.get_running_loop().create_future()
        if self._waiters is None:
            self._waiters = []
        self._waiters.append(waiter)
        try:
            await waiter
        finally:
            if self._waiters is not None:  # cancelled
                self._waiters.remove(waiter)
