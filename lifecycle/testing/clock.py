"""Time that passes only when the test advances it."""

import asyncio
import math
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from anyio._backends._asyncio import AsyncIOBackend

__all__ = ["VirtualClock"]

_IN_THREAD = "run_sync_in_worker_thread"

_SLACK = 1000
"""Nanoseconds: a timer that is due this shortly after a moment is due at that moment."""

_QUIET = 3
"""Idle turns of the loop in a row: one may be needed to notice what another wrote to a socket."""


class VirtualClock:
    """Inside ``with VirtualClock() as clock``, the event loop's time stands still until advance().

    Everything that uses the loop's time follows: sleeps, deadlines, timers and pauses of Jobs, timeouts of
    hooks. Timers fire one after the other, each at its own time, after all that the one before set off: a run
    is the same every time. Calls in worker threads take no virtual time and are waited for, unless they take
    longer than `patience`, in real seconds; waits for the network are not. Inside, wait with until(), not
    with deadlines, which would wait for the clock. Times of day, such as the `since` of health, are those of
    the real clock.
    """

    def __init__(self, patience: float = 5.0) -> None:
        self._nanoseconds = 0
        self._late = 0.0
        """Rounding error of the last timer's float."""
        self._loop: Any = None
        self._calls = 0
        """Calls in worker threads that have not returned."""
        self._stuck = 0
        self._patience = patience
        self._woken = asyncio.Event()

    @property
    def now(self) -> float:
        """The loop's time, in seconds."""
        return self._nanoseconds / 1e9 + self._late

    def __enter__(self) -> Self:
        try:
            self._loop = loop = asyncio.get_running_loop()
        except RuntimeError:
            raise RuntimeError("VirtualClock needs asyncio's own event loop; none runs here") from None
        if not isinstance(loop, asyncio.BaseEventLoop):
            raise RuntimeError(  # noqa: TRY004  # no argument is at fault
                f"VirtualClock needs asyncio's own event loop; this one is of {type(loop).__module__}"
            )
        if "run_in_executor" in vars(loop):
            raise RuntimeError("VirtualClock inside another: the loop's time is virtual already")
        self._nanoseconds = round(loop.time() * 1e9)
        call_soon_threadsafe, run_in_executor = loop.call_soon_threadsafe, loop.run_in_executor

        def call_soon_and_wake(*args: Any, **kwargs: Any) -> asyncio.Handle:
            handle = call_soon_threadsafe(*args, **kwargs)
            call_soon_threadsafe(self._woken.set)
            return handle

        def in_executor(*args: Any) -> asyncio.Future[Any]:
            future = run_in_executor(*args)
            self._calls += 1
            future.add_done_callback(self._returned)
            return future

        self._resolution = self._loop._clock_resolution  # noqa: SLF001  # what a timer may be early by
        self._resolve()
        self._loop.time = lambda: self.now
        self._loop.call_soon_threadsafe = call_soon_and_wake
        self._loop.run_in_executor = in_executor
        self._count_anyio_calls()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del self._loop.time, self._loop.call_soon_threadsafe, self._loop.run_in_executor
        self._loop._clock_resolution = self._resolution  # noqa: SLF001
        setattr(AsyncIOBackend, _IN_THREAD, self._anyio)

    async def advance(self, seconds: float) -> None:
        """Let this time pass, with all timers that are due meanwhile and their consequences.

        Raises ValueError if it is negative or infinite.
        """
        if not 0 <= seconds < math.inf:
            raise ValueError(f"advance({seconds}): expected seconds, 0 or more and finite")
        end = self._nanoseconds + round(seconds * 1e9)
        await self.run_until_idle()
        while (due := self._next()) is not None and self._is_due_by(due, end):
            self._reach(due)
            await self.run_until_idle()
        if self._nanoseconds < end:
            self._nanoseconds, self._late = end, 0.0
            self._resolve()
        await self.run_until_idle()

    async def until(self, condition: Callable[[], object], within: float = 3600.0) -> float:
        """Let time pass, from timer to timer, until the condition holds. Returns the elapsed time.

        Raises AssertionError if it does not hold within that many seconds of this clock.
        """
        began = self._nanoseconds
        end = began + round(within * 1e9)
        await self.run_until_idle()
        while not condition():
            due = self._next()
            if due is None or not self._is_due_by(due, end):
                name = getattr(condition, "__name__", repr(condition))
                raise AssertionError(
                    f"{name} did not hold within {within:g} s"
                    if due
                    else f"{name} does not hold: no timer runs"
                )
            self._reach(due)
            await self.run_until_idle()
        return (self._nanoseconds - began) / 1e9

    async def run_until_idle(self) -> None:
        """Run whatever can run without time passing, including calls in worker threads.

        Calls that exceed the clock's patience are ignored from then on.
        """
        quiet = 0
        while quiet < _QUIET:
            await asyncio.sleep(0)
            if self._loop._ready:  # noqa: SLF001  # the only one who knows is the loop
                quiet = 0
            elif self._calls > self._stuck:
                quiet = 0
                await self._wait_for_threads()
            else:
                quiet += 1

    async def _wait_for_threads(self) -> None:
        self._woken.clear()
        out_of_patience = threading.Timer(self._patience, self._loop.call_soon_threadsafe, (self._give_up,))
        out_of_patience.start()
        try:
            await self._woken.wait()
        finally:
            out_of_patience.cancel()
            out_of_patience.join()

    def _give_up(self) -> None:
        self._stuck = self._calls

    def _next(self) -> float | None:
        """When the next timer is due."""
        timers = (timer.when() for timer in self._loop._scheduled if not timer.cancelled())  # noqa: SLF001
        return min(filter(math.isfinite, timers), default=None)

    def _is_due_by(self, due: float, end: int) -> bool:
        """Whether a timer is due, with tolerance: five times 0.2 s is a second."""
        return due * 1e9 <= end + _SLACK

    def _reach(self, due: float) -> None:
        """Set the time at which the timer is due, to the last bit, as the loop compares floats."""
        if due <= self.now:
            return  # time must not decrease
        self._nanoseconds = max(self._nanoseconds, round(due * 1e9))
        self._late = max(0.0, due - self._nanoseconds / 1e9)
        self._resolve()

    def _resolve(self) -> None:
        """Set the loop's resolution to one float, so that no timer runs early."""
        self._loop._clock_resolution = math.ulp(self.now)  # noqa: SLF001

    def _count_anyio_calls(self) -> None:
        """Count calls in anyio's worker threads, which do not pass through the loop's executor."""
        self._anyio = before = vars(AsyncIOBackend)[_IN_THREAD]

        async def counted(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if asyncio.get_running_loop() is not self._loop:
                return await before.__func__(cls, *args, **kwargs)
            self._calls += 1
            try:
                return await before.__func__(cls, *args, **kwargs)
            finally:
                self._returned()

        setattr(AsyncIOBackend, _IN_THREAD, classmethod(counted))

    def _returned(self, _: object = None) -> None:
        self._calls -= 1
        self._stuck = min(self._stuck, self._calls)
        self._woken.set()
