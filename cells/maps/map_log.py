"""The latest writes of the agent to a BPF map, for `cilium-dbg map events`."""

import time
from collections import deque
from collections.abc import Collection
from itertools import islice
from typing import Final

import anyio
import msgspec

__all__ = ["MapChange", "MapLog"]


RETAINED: Final = 256


class MapChange(msgspec.Struct, frozen=True):
    """One write of the agent."""

    number: int
    """Number of the change, counted per map from 1."""
    at: float
    """Seconds since the epoch."""
    key: bytes
    value: bytes | None
    """None: the entry was deleted."""
    error: str
    """The errno's name if the kernel refused the write; empty on success."""


class MapLog:
    """The latest 256 changes of a map. note() takes less than a microsecond."""

    __slots__ = ("_changed", "_changes", "_count")

    def __init__(self) -> None:
        self._changes: deque[MapChange] = deque(maxlen=RETAINED)
        self._count = 0
        self._changed: anyio.Event | None = None

    def note(self, key: bytes, value: bytes | None, error: str = "") -> None:
        """Append a change with the current time."""
        self._count += 1
        self._changes.append(MapChange(self._count, time.time(), key, value, error))
        self.wake()

    def note_many(self, changes: Collection[tuple[bytes, bytes | None]]) -> None:
        """Append the changes of one batch; of a batch that is too large, the last ones."""
        dropped = max(0, len(changes) - RETAINED)
        self._count += dropped
        for key, value in islice(changes, dropped, None):
            self.note(key, value)

    def since(self, number: int) -> list[MapChange]:
        """Retained changes with a larger number."""
        return [change for change in self._changes if change.number > number]

    async def wait(self, number: int) -> None:
        """Wait for a change with a larger number, or for wake()."""
        if number < self._count:
            return
        if self._changed is None:
            self._changed = anyio.Event()
        await self._changed.wait()

    def wake(self) -> None:
        """Wake all waiters, for example at shutdown."""
        if self._changed is not None:
            self._changed.set()
            self._changed = None
