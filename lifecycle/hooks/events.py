"""Events of a hive that starts, runs and stops, for subscribers and for the log."""

import asyncio
import functools
import logging
import math
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Literal

import msgspec

from lifecycle.hints.places import Place, place_of
from lifecycle.process.logs import Logger
from lifecycle.settings.durations import Duration

__all__ = ["Event", "EventLog", "Events", "HookEvent", "HookStep", "JobEvent", "JobStep", "ModuleEvent"]

HookStep = Literal[
    "starting",
    "started",
    "failed to start",
    "crashed",
    "stopping",
    "stopped",
    "failed to stop",
    "left behind",
]
JobStep = Literal["failed", "recovered", "ended", "ended the hive"]

REMEMBERED = 10_000
"""Events that a stream buffers for a slow reader; if there are more, the oldest are lost."""


class HookEvent(msgspec.Struct, frozen=True):
    """A step of a hook."""

    step: HookStep
    hook: str
    module: str
    owner: str
    """The constructor or invoked function that registered it."""
    source: object
    """The function that is called: a start, a stop, or a context manager."""
    took: float | None = None
    """Duration of the start or stop that ended, in seconds."""
    error: BaseException | None = None

    @property
    def place(self) -> Place:
        """The source place of the function."""
        source = self.source
        while isinstance(source, functools.partial):
            source = source.func
        return place_of(source)


class JobEvent(msgspec.Struct, frozen=True):
    """A job has failed and will be retried, has recovered, or has ended."""

    step: JobStep
    job: str
    module: str
    failures: int = 0
    """Number of failures in a row so far."""
    error: BaseException | None = None


class ModuleEvent(msgspec.Struct, frozen=True):
    """A module was enabled or disabled, and with it the other modules in the event."""

    step: Literal["disabled", "enabled"]
    module: str
    affected: tuple[str, ...]


Event = HookEvent | JobEvent | ModuleEvent
Callback = Callable[[Event], object]


class Events:
    """Notifies subscribers, in order, of events of a hive and of the hives inside it."""

    def __init__(self, log: Logger, slow: float = math.inf) -> None:
        self._log = log
        self._event_log = EventLog(log, slow)
        self._callbacks: dict[int, Callback] = {}
        self._count = 0

    def subscribe(self, callback: Callback) -> Callable[[], None]:
        """Call a function with every event from now on, synchronously on the loop. Returns a function that
        ends it.

        Exceptions of the callback are logged and have no other effect. It must not block.
        """
        self._count = number = self._count + 1
        self._callbacks[number] = callback
        return lambda: self._callbacks.pop(number, None) and None

    async def stream(self) -> AsyncGenerator[Event, None]:
        """Iterate over all events from now on, without end; a very slow reader loses the oldest."""
        remembered: deque[Event] = deque(maxlen=REMEMBERED)
        arrived = asyncio.Event()

        def enqueue(event: Event) -> None:
            remembered.append(event)
            arrived.set()

        unsubscribe = self.subscribe(enqueue)
        try:
            while True:
                await arrived.wait()
                arrived.clear()
                while remembered:
                    yield remembered.popleft()
        finally:
            unsubscribe()

    def notices(self, took: float | None) -> bool:
        """Whether any subscriber or log needs the event of a successful step of this duration.

        Thousands of hooks start and stop, mostly without subscribers: then no events are created.
        """
        log = self._event_log
        return bool(self._callbacks) or (took is not None and took >= log.slow) or log.is_debugged()

    def emit(self, event: Event) -> None:
        """Log an event and pass it to every subscriber."""
        self._event_log(event)
        for callback in list(self._callbacks.values()):
            try:
                callback(event)
            except Exception as error:  # noqa: BLE001  # a subscriber's error must not stop the hive
                self._log.error("a follower of events has failed", of=repr(event), exc_info=error)


class EventLog:
    """Logs starts and stops with duration and source; slow ones at level info."""

    def __init__(self, log: Logger, slow: float) -> None:
        self._log = log
        self.slow = slow
        """Seconds from which on a start or stop is logged at level info."""

    def __call__(self, event: Event) -> None:
        """Log an event. Failures are logged where they are caught, and by the jobs themselves."""
        match event:
            case HookEvent(step="started" | "stopped", took=float(took)):
                slow = took >= self.slow
                if slow or self.is_debugged():  # locating a hook in the source takes longer than most hooks
                    write = self._log.info if slow else self._log.debug
                    seconds, place = str(Duration(round(took, 4))), str(event.place)
                    write(f"hook {event.step}", hook=event.hook, of=event.module, took=seconds, at=place)
            case HookEvent(step="starting" | "stopping"):
                if self.is_debugged():
                    place = str(event.place)
                    self._log.debug(f"hook {event.step}", hook=event.hook, of=event.module, at=place)
            case JobEvent(step="recovered"):
                self._log.info("job works again", job=event.job, of=event.module, failures=event.failures)
            case ModuleEvent():
                affected = ", ".join(event.affected)
                self._log.info(f"module {event.step}", switched=event.module, affected=affected)

    def is_debugged(self) -> bool:
        """Whether every step is logged."""
        return self._bound.is_enabled_for(logging.DEBUG)

    @functools.cached_property
    def _bound(self) -> Logger:
        """The logger, bound at the first step, when logs are configured."""
        return self._log.bind()
