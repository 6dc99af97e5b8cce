"""A typed handle of an index."""

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar, cast

from lifecycle.tables.indexes.hashed import Index

__all__ = ["Lookup"]

Value = TypeVar("Value", bound=Hashable)
Key = TypeVar("Key", bound=Hashable)
Row = TypeVar("Row")


class Lookup(Generic[Value, Key, Row]):
    """Finds rows of a table by the values of an index, which is always up to date."""

    __slots__ = ("_index",)

    def __init__(self, index: Index[Key, Row]) -> None:
        self._index = index

    def get(self, value: Value) -> list[Row]:
        """Return all rows with this value, in no particular order."""
        return self._index.get(value)

    def any(self, values: Iterable[Value]) -> list[Row]:
        """Return all rows with one of these values, each row once."""
        keys = {key: None for value in values for key in self._index.keys(value)}
        return self._index.rows(keys)

    def one(self, value: Value) -> Row | None:
        """Return the row with this value, or None. Raises LookupError if there are several."""
        return self._index.one(value)

    def keys(self, value: Value) -> list[Key]:
        """Return the keys of all rows with this value, in no particular order."""
        return self._index.keys(value)

    def values(self) -> list[Value]:
        """Return all values of rows."""
        return cast("list[Value]", self._index.values())

    def __contains__(self, value: Value) -> bool:
        return value in self._index
