"""Waits for one key of a table."""

from collections.abc import Callable, Hashable, Mapping
from typing import Any, Generic, TypeVar

import anyio

from lifecycle.tables.rows import Listener

__all__ = ["KeyWaits"]

Key = TypeVar("Key", bound=Hashable)
Row = TypeVar("Row")


class KeyWaits(Generic[Key, Row]):
    """Waiters for keys of a table; listens to the table only while there are waiters."""

    def __init__(
        self,
        get: Callable[[Key], Row | None],
        listen: Callable[[Listener], None],
        check_open: Callable[[], None],
    ) -> None:
        self._get = get
        self._listen = listen
        self._check_open = check_open
        self._events: dict[Key, tuple[anyio.Event, int]] = {}
        """By key, the event of all waiters for it and their number."""
        self._listener: KeyListener[Key] | None = None

    async def changed(self, key: Key, seen: Row | None) -> Row | None:
        """Wait until the row with this key differs from `seen`. Returns the new row.

        Raises TableClosedError if the table is closed.
        """
        while (row := self._get(key)) == seen:
            await self._wait(key)
        return row

    async def _wait(self, key: Key) -> None:
        self._check_open()
        if self._listener is None:
            self._listener = KeyListener(self._events)
            self._listen(self._listener)
        event, waiters = self._events.get(key) or (anyio.Event(), 0)
        self._events[key] = event, waiters + 1
        try:
            await event.wait()
        finally:
            current, waiters = self._events.get(key, (event, 0))
            if current is event and waiters > 1:
                self._events[key] = event, waiters - 1
            elif current is event:
                self._events.pop(key, None)
            if not self._events:
                self._listener = None  # ends the registration as a listener


class KeyListener(Generic[Key]):
    """Wakes the waiters for changed keys."""

    __slots__ = ("__weakref__", "_events")

    def __init__(self, events: "dict[Key, tuple[anyio.Event, int]]") -> None:
        self._events = events

    def notify(self, changed: Mapping[Key, Any], revision: int) -> None:
        del revision
        for key in changed:
            if key in self._events:
                self._events.pop(key)[0].set()

    def wake(self) -> None:
        """For a derived table, which is updated by reading it: wake all waiters, to read."""
        for event, _ in self._events.values():
            event.set()
        self._events.clear()
