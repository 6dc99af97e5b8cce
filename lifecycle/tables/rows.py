"""Read access to rows by key, shared by tables and snapshots."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Mapping
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from lifecycle.tables.indexes import Index, IndexSpec

if TYPE_CHECKING:
    from lifecycle.tables.indexes.lpm import LPMIndex
    from lifecycle.tables.indexes.ordered import SortedIndex

__all__ = ["Listener", "Rows", "Stored"]

Key = TypeVar("Key", bound=Hashable)
Row = TypeVar("Row")
Stored = dict[Key, tuple[Row, int]]
"""Rows by key, each with the revision of its write, ordered by that."""


class Listener(Protocol):
    """Receives notifications of changes: watchers and derived tables."""

    def notify(self, changed: Mapping[Any, Any], revision: int) -> None:
        """These keys changed, with the rows before."""
        ...

    def wake(self) -> None:
        """Something may have changed."""
        ...


class Rows(ABC, Generic[Key, Row]):
    """Rows by key and by index. They are immutable values, and never None."""

    __slots__ = ()

    name: str
    _rows: Stored[Key, Row]
    _specs: Mapping[str, IndexSpec[Row]]

    def get(self, key: Key) -> Row | None:
        """Return the row with this key."""
        entry = self._current().get(key)
        return entry[0] if entry else None

    def all(self) -> list[Row]:
        """Return all rows, least recently changed first."""
        return [row for row, _ in self._current().values()]

    def keys(self) -> Collection[Key]:
        """Return all keys, least recently changed first: a live view, invalid after the next write."""
        return self._current().keys()

    def items(self) -> list[tuple[Key, Row, int]]:
        """Return all rows with key and revision of their write, least recently changed first."""
        return [(key, row, revision) for key, (row, revision) in self._current().items()]

    def __len__(self) -> int:
        return len(self._current())

    def __contains__(self, key: Key) -> bool:
        return key in self._current()

    def by(self, index: str) -> Index[Key, Row]:
        """Return the rows by the values of an index. Raises LookupError for an unknown index."""
        self._current()
        if (result := self._index(index)) is None:
            names = ", ".join(self._specs) or "none"
            raise LookupError(f"table {self.name} has no index {index!r}; it has: {names}")
        return result

    def sorted_by(self, index: str) -> "SortedIndex[Key, Row]":
        """Return the rows in the order of a Sorted index: ranges and prefixes.

        Raises LookupError for other indexes.
        """
        from lifecycle.tables.indexes.ordered import SortedIndex

        result = self.by(index)
        if not isinstance(result, SortedIndex):
            raise self._other_kind(index, "Sorted")
        return result

    def lpm(self, index: str) -> "LPMIndex[Key, Row]":
        """Return the rows by the IP prefixes of an LPM index. Raises LookupError for other indexes."""
        from lifecycle.tables.indexes.lpm import LPMIndex

        result = self.by(index)
        if not isinstance(result, LPMIndex):
            raise self._other_kind(index, "LPM")
        return result

    def _other_kind(self, index: str, kind: str) -> LookupError:
        return LookupError(
            f"table {self.name}: index {index!r} is not {kind}; make the table with {index!r}: {kind}(...)"
        )

    def check_open(self) -> None:
        """Raise TableClosedError if the table is closed."""

    @abstractmethod
    def _index(self, name: str) -> Index[Any, Any] | None:
        """Return the index of this name, up to date with _current()."""

    @abstractmethod
    def _current(self) -> Stored[Key, Row]:
        """Return the rows, up to date."""
