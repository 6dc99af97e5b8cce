"""What a table that follows from others key by key knows of them."""

from collections.abc import Callable, Hashable, Mapping
from typing import Any, Generic, Protocol, TypeVar
from weakref import ref

from lifecycle.tables.core import TableCore
from lifecycle.tables.rows import Stored

__all__ = ["ABSENT", "Input", "Plan", "nothing_to_remember"]

Key = TypeVar("Key", bound=Hashable)
Row = TypeVar("Row")
Plan = tuple[dict[Key, Row | None], Callable[[], None]]
"""What to write, and how to remember it once it is written."""

ABSENT: Any = object()
"""In place of a value that no row has; None is one that rows may have."""


class Follower(Protocol):
    """Who follows a source."""

    def wake(self) -> None:
        """The source may have changed."""
        ...


class Input(Generic[Key, Row]):
    """A source, and what has changed in it since it was last worked through."""

    __slots__ = ("__weakref__", "_changed", "_follower", "_source")

    def __init__(self, source: TableCore[Key, Row], follower: Follower) -> None:
        self._source = source
        self._follower = ref(follower)
        self._changed: dict[Key, None] | None = None
        """Keys, as the source has them: least recently changed first. None: all of them."""
        source._listen(self)  # noqa: SLF001  # tables are one mechanism

    def rows(self) -> Stored[Key, Row]:
        """The rows by key, up to date."""
        return self._source._current()  # noqa: SLF001

    @property
    def changed(self) -> dict[Key, None]:
        """The keys to work through, least recently changed first; up to date once rows() is."""
        if self._changed is None:
            self._changed = dict.fromkeys(self.rows())
        return self._changed

    def worked_through(self) -> None:
        """All that changed has been."""
        self._changed = {}

    def notify(self, changed: Mapping[Key, Any], revision: int) -> None:
        """The source has changed."""
        del revision
        if (known := self._changed) is not None:
            for key in changed:
                known.pop(key, None)
                known[key] = None
        self.wake()

    def wake(self) -> None:
        """The source may have changed."""
        if (follower := self._follower()) is not None:
            follower.wake()


def nothing_to_remember() -> None:
    """Of what keeps nothing besides the rows."""
