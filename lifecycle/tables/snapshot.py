"""A table as it was at one moment.

Needs:  its rows.
Gives:  Snapshot.
"""

from collections.abc import Hashable, Iterator, Mapping
from typing import TypeVar

from lifecycle.tables.indexes import Index, IndexSpec, index_of
from lifecycle.tables.rows import Rows, Stored

__all__ = ["Snapshot"]

Row = TypeVar("Row")


class Snapshot(Rows[Row]):
    """The rows of a table as they were at one revision; later writes do not show.

    It may be read in another thread. The first use of an index builds it from the rows, which costs about as
    much as writing them did.
    """

    __slots__ = ("__weakref__", "_indexes", "_rows", "_specs", "name", "revision")

    def __init__(
        self, name: str, rows: Stored[Row], revision: int, indexes: Mapping[str, IndexSpec[Row]]
    ) -> None:
        self.name = name
        self.revision = revision
        self._rows = rows
        self._specs = indexes
        self._indexes: dict[str, Index[Row]] = {}

    def __iter__(self) -> Iterator[tuple[Hashable, Row, int]]:
        """As items(), one by one: for work in slices, with pauses between them."""
        return ((key, row, revision) for key, (row, revision) in self._rows.items())

    def item(self, key: Hashable) -> tuple[Hashable, Row, int] | None:
        """The row with this key, as items() gives it."""
        found = self._rows.get(key)
        return None if found is None else (key, *found)

    def _current(self) -> Stored[Row]:
        return self._rows

    def _index(self, name: str) -> Index[Row] | None:
        if name not in self._indexes and (spec := self._specs.get(name)) is not None:
            index = index_of(self, name, spec)
            index.apply(index.plan({key: row for key, (row, _) in self._rows.items()}))
            self._indexes[name] = index
        return self._indexes.get(name)
