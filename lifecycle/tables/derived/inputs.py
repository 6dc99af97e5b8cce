"""The inputs of an incremental derived table: sources with the keys changed since the last update."""

from collections.abc import Callable, Hashable, Mapping
from typing import Any, Generic, Protocol, TypeVar
from weakref import ref

from lifecycle.tables.core import TableCore
from lifecycle.tables.rows import Stored

__all__ = ["ABSENT", "Input", "Plan", "no_state"]

Key = TypeVar("Key", bound=Hashable)
Row = TypeVar("Row")
Plan = tuple[dict[Key, Row | None], Callable[[], None]]
"""Rows to write (None deletes), and a function that updates the operation's state after the write."""

ABSENT: Any = object()
"""Marks an absent value, since None may be a value."""


class Follower(Protocol):
    """An object that is woken by changes of a source."""

    def wake(self) -> None:
        """Handle a possible change of the source."""
        ...


class Input(Generic[Key, Row]):
    """A source table, and the keys that changed since the last update."""

    __slots__ = ("__weakref__", "_changed", "_follower", "_source")

    def __init__(self, source: TableCore[Key, Row], follower: Follower) -> None:
        self._source = source
        self._follower = ref(follower)
        self._changed: dict[Key, None] | None = None
        """Changed keys in the order of the source, least recently changed first; None: all keys."""
        source._listen(self)  # noqa: SLF001  # tables are one mechanism

    def rows(self) -> Stored[Key, Row]:
        """Return the current rows by key."""
        return self._source._current()  # noqa: SLF001

    @property
    def changed(self) -> dict[Key, None]:
        """The changed keys, least recently changed first; current after a call of rows()."""
        if self._changed is None:
            self._changed = dict.fromkeys(self.rows())
        return self._changed

    def clear(self) -> None:
        """Clear the changed keys, after an update."""
        self._changed = {}

    def notify(self, changed: Mapping[Key, Any], revision: int) -> None:
        """Record changed keys and wake the follower."""
        del revision
        if (pending := self._changed) is not None:
            for key in changed:
                pending.pop(key, None)
                pending[key] = None
        self.wake()

    def wake(self) -> None:
        """Wake the follower."""
        if (follower := self._follower()) is not None:
            follower.wake()


def no_state() -> None:
    """Do nothing: the operation has no state."""
