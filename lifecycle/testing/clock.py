"""Time that passes when the test says so.

Needs:  asyncio's own event loop.
Gives:  VirtualClock.
"""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import anyio.to_thread

__all__ = ["VirtualClock"]

_QUIET = 3
"""Turns of the loop in a row with nothing to do: it may take one to see what another wrote to a socket."""


class VirtualClock:
    """Inside ``with VirtualClock() as clock`` the event loop's time stands still until advance().

    Everything that counts by the loop follows: sleeps, deadlines, Jobs' timers and pauses, the time-outs of
    hooks. Timers run one after the other, each at its own time, with everything it sets off done before the
    next: a run is the same every time. Calls in worker threads are waited for, in no time at all; what waits
    for the network is not. Inside, wait with until(), not with deadlines: those would wait for the clock.
    What is told in times of day, such as since when a module is well, goes by the real clock.
    """

    def __init__(self) -> None:
        self.now = 0.0
        """The loop's time, in seconds."""
        self._loop: Any = None
        self._poked = asyncio.Event()

    def __enter__(self) -> Self:
        self._loop = loop = asyncio.get_running_loop()
        self.now = loop.time()
        call_soon_threadsafe = loop.call_soon_threadsafe

        def poke(*args: Any, **kwargs: Any) -> asyncio.Handle:
            handle = call_soon_threadsafe(*args, **kwargs)
            call_soon_threadsafe(self._poked.set)
            return handle

        self._loop.time = lambda: self.now
        self._loop.call_soon_threadsafe = poke
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del self._loop.time, self._loop.call_soon_threadsafe

    async def advance(self, seconds: float) -> None:
        """Let so much time pass, with all that falls due meanwhile, and what that sets off."""
        end = self.now + seconds
        await self.settle()
        while (due := self._next()) is not None and due <= end:
            self.now = max(self.now, due)
            await self.settle()
        self.now = end
        await self.settle()

    async def until(self, condition: Callable[[], object], within: float = 3600.0) -> float:
        """Let time pass, from one timer to the next, until the condition holds; returns how much passed.

        Raises AssertionError when it does not hold within so many seconds of this clock.
        """
        began = self.now
        await self.settle()
        while not condition():
            due = self._next()
            if due is None or due > began + within:
                name = getattr(condition, "__name__", repr(condition))
                raise AssertionError(
                    f"{name} did not hold within {within:g} s"
                    if due
                    else f"{name} does not hold: no timer runs"
                )
            self.now = max(self.now, due)
            await self.settle()
        return self.now - began

    async def settle(self) -> None:
        """Run whatever can run without time passing, calls in anyio's default worker threads included."""
        limiter = anyio.to_thread.current_default_thread_limiter()
        quiet = 0
        while quiet < _QUIET:
            await asyncio.sleep(0)
            if self._loop._ready:  # noqa: SLF001  # the only one who knows is the loop
                quiet = 0
            elif limiter.borrowed_tokens:
                quiet = 0
                self._poked.clear()
                await self._poked.wait()
            else:
                quiet += 1

    def _next(self) -> float | None:
        """When the next timer is due."""
        timers = (timer.when() for timer in self._loop._scheduled if not timer.cancelled())  # noqa: SLF001
        return min(timers, default=None)
