"""A thread that checks whether the event loop makes progress, and logs the stack of code that blocks it.

Why:    while code blocks the loop, nothing on the loop can report it: timeouts, signals and probes wait, too.
"""

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Iterable

from lifecycle.hints import Member
from lifecycle.hooks import Hook, Lifecycle
from lifecycle.injection import Cell, config, invoke, module, provide
from lifecycle.process import Collector, Family, Logger, counter, gauge
from lifecycle.settings import Duration, Settings, seconds

__all__ = ["LoopWatchdog", "LoopWatchdogSettings", "loop_watchdog"]

FRAMES = 20
"""Maximum number of innermost frames in a logged stack."""


class LoopWatchdogSettings(Settings, frozen=True):
    """Settings of the watchdog over the event loop."""

    loop_watchdog: Duration = seconds(1)
    """Log the stack of what blocks the event loop for longer; 0s for no watchdog."""

    def validate(self) -> None:
        """Refuse a limit below that of ordinary work. Raises ValueError with one line."""
        if 0 < self.loop_watchdog < 0.05:
            raise ValueError(f"loop-watchdog={self.loop_watchdog}: expected 0s, or 50ms and more")


class LoopWatchdog:
    """Requests a sign of life from the loop four times in the limit; logs if none comes for three.

    So code that blocks for the whole limit is always found, and code that blocks for three quarters may be.
    """

    def __init__(self, settings: LoopWatchdogSettings, lifecycle: Lifecycle, log: Logger) -> None:
        self._limit = float(settings.loop_watchdog)
        self._log = log
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self.blocked = 0
        """How often code blocked the loop for too long."""
        self.longest = 0.0
        """The longest time, in seconds."""
        if self._limit:
            lifecycle.append(Hook("watch the event loop", self._start, self._stop))

    async def _start(self) -> None:
        self._over.clear()
        loop, ident = asyncio.get_running_loop(), threading.get_ident()
        self._thread = threading.Thread(
            target=self._watch, args=(loop, ident), name="loop watchdog", daemon=True
        )
        self._thread.start()

    async def _stop(self) -> None:
        self._over.set()
        if (thread := self._thread) is not None:
            await asyncio.to_thread(thread.join)

    def _watch(self, loop: asyncio.AbstractEventLoop, ident: int) -> None:
        while not self._over.wait(self._limit / 4):
            answered, sent_at = threading.Event(), time.monotonic()
            try:
                loop.call_soon_threadsafe(answered.set)
            except RuntimeError:  # the loop is closed
                return
            if answered.wait(self._limit * 3 / 4):
                continue
            stack = _stack(ident)
            self._log.error(
                "the event loop is blocked", since=f"{time.monotonic() - sent_at:.1f}s", stack=stack
            )
            while not answered.wait(self._limit):
                if self._over.is_set() or loop.is_closed():
                    return
            took = time.monotonic() - sent_at
            self.blocked += 1
            self.longest = max(self.longest, took)
            self._log.warning("the event loop turns again", after=f"{took:.1f}s")


def _stack(ident: int) -> str:
    """Return the present frames of the loop's thread, outermost first."""
    frame = sys._current_frames().get(ident)  # noqa: SLF001  # the documented way
    lines = traceback.format_stack(frame)[-FRAMES:] if frame is not None else ["its thread has ended"]
    return "".join(lines).rstrip()


def loop_metrics(watchdog: LoopWatchdog) -> Member[Collector]:
    """Findings of the watchdog, as metrics."""

    async def collect() -> Iterable[Family]:
        text = "Times that something blocked the event loop for too long."
        return [
            counter("lifecycle_loop_blocked_total", text, watchdog.blocked),
            gauge("lifecycle_loop_blocked_longest_seconds", "The longest of these times.", watchdog.longest),
        ]

    return Collector("loop watchdog", collect)


def loop_watchdog() -> Cell:
    """Return the module ``loop-watchdog``: logs code that blocks the event loop for longer than a second."""
    return module(
        "loop-watchdog",
        "Logs what blocks the event loop",
        config(LoopWatchdogSettings),
        provide(LoopWatchdog, loop_metrics),
        invoke(LoopWatchdog),
    )
