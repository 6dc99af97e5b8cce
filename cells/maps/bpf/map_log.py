"""The latest changes that the agent made to a map.

For:    Maps keeps one for each map that people ask about. Needs: nothing. Gives: MapLog, MapChange.
"""

import time
from collections import deque
from collections.abc import Collection
from itertools import islice
from typing import Final

import anyio
import msgspec

KEPT: Final = 256


class MapChange(msgspec.Struct, frozen=True):
    """One write."""

    number: int
    """Counts the changes of the map."""
    at: float
    """Seconds since the epoch."""
    key: bytes
    value: bytes | None
    """None: the row was removed."""
    error: str
    """What the kernel said, as the name of an errno; empty: it was done."""


class MapLog:
    """Remembers some changes; noting one takes less than a microsecond."""

    __slots__ = ("_changed", "_changes", "_count")

    def __init__(self) -> None:
        self._changes: deque[MapChange] = deque(maxlen=KEPT)
        self._count = 0
        self._changed: anyio.Event | None = None

    def note(self, key: bytes, value: bytes | None, error: str = "") -> None:
        """Remember a change made just now."""
        self._count += 1
        self._changes.append(MapChange(self._count, time.time(), key, value, error))
        self.wake()

    def note_many(self, changes: Collection[tuple[bytes, bytes | None]]) -> None:
        """Remember changes made at once, of more than are kept the last."""
        dropped = max(0, len(changes) - KEPT)
        self._count += dropped
        for key, value in islice(changes, dropped, None):
            self.note(key, value)

    def since(self, number: int) -> list[MapChange]:
        """Those after the one of that number, as far as they are remembered."""
        return [change for change in self._changes if change.number > number]

    async def wait(self, number: int) -> None:
        """Return once there is a change after the one with that number, or the waiters were woken."""
        if number < self._count:
            return
        if self._changed is None:
            self._changed = anyio.Event()
        await self._changed.wait()

    def wake(self) -> None:
        """Have those who wait go on."""
        if self._changed is not None:
            self._changed.set()
            self._changed = None
