"""An index in the order of its values, for ranges, prefixes and pages."""

from collections.abc import Hashable, Iterable, Iterator, Mapping
from itertools import islice, takewhile
from typing import Any, Generic, NamedTuple, TypeVar

from lifecycle.tables.indexes.hashed import Index, Plan, RowSource, Values
from lifecycle.tables.indexes.sorted_values import SortedValues

__all__ = ["OrderedKeys", "Page", "SortedIndex"]

Key = TypeVar("Key", bound=Hashable)
Row = TypeVar("Row")
Prefix = str | bytes | tuple[Any, ...]


class Page(NamedTuple, Generic[Row]):
    """A page of rows, in order."""

    rows: list[Row]
    after: Any
    """The argument for the next page; None on the last one."""


class OrderedKeys(Index[Key, Row]):
    """A hash index with its values in order."""

    def __init__(self, source: RowSource[Key, Row], name: str, values: Values[Row]) -> None:
        super().__init__(source, name, values)
        self._order = SortedValues()
        self._reserved: list[Hashable] = []
        """The values in order with those of a pending plan, so that plan() raises if they cannot be compared.
        """

    def plan(self, rows: Mapping[Key, Row | None]) -> Plan[Key]:
        """Compute the values of the rows to write. Raises TypeError if two of them cannot be compared."""
        plan = super().plan(rows)
        new: set[Hashable] = set()
        new = new.union(*plan.values()).difference(self._keys)
        try:
            for value in new:
                self._order.add(value)
                self._reserved.append(value)
        except TypeError as error:
            self.cancel()
            raise TypeError(
                f"table {self._source.name}: index {self.name} is sorted, and a value cannot be compared "
                f"with the others: {error}"
            ) from None
        return plan

    def cancel(self) -> None:
        """Discard the plan."""
        for value in self._reserved:
            self._order.remove(value)
        self._reserved.clear()

    def apply(self, plan: Plan[Key]) -> None:
        """Apply the plan."""
        before = {value for key in plan for value in self._indexed.get(key, ())}
        super().apply(plan)
        removed = before.difference(self._keys)
        for value in removed:
            self._order.remove(value)
        added, self._reserved = self._reserved, []
        self._note(added, removed)

    def _note(self, added: Iterable[Any], removed: Iterable[Any]) -> None:
        """Add the first values, remove the others."""

    def _rows_with(self, values: Iterator[Any]) -> list[Row]:
        """Return the rows with these values in their order, each once."""
        rows = self._source._current()  # noqa: SLF001  # the two are one mechanism
        keys = {key: None for value in values for key in self._keys[value]}
        return [rows[key][0] for key in keys]


class SortedIndex(OrderedKeys[Key, Row]):
    """An index ordered by its values."""

    def range(self, low: Any = None, high: Any = None) -> list[Row]:
        """Return all rows with a value from `low` to below `high`, by value; None is unbounded.

        A row with several such values occurs once, at its least value.
        """
        self._source._current()  # noqa: SLF001
        values = iter(self._order) if low is None else self._order.starting_at(low)
        return self._rows_with(values if high is None else takewhile(lambda value: value < high, values))

    def prefix(self, prefix: Prefix) -> list[Row]:
        """Return all rows with a value that starts with this one, by value.

        Values are str, bytes or tuples.
        """
        self._source._current()  # noqa: SLF001
        values, length = self._order.starting_at(prefix), len(prefix)
        return self._rows_with(takewhile(lambda value: value[:length] == prefix, values))

    def page(self, size: int, after: Any = None) -> "Page[Row]":
        """Return a page: the rows of the first `size` values above `after`, or from the start.

        Pass `after` of a page to get the next one: rows that are added or deleted meanwhile do not shift it.
        Rows with one value are on one page. Raises ValueError for a size below 1.
        """
        if size < 1:
            raise ValueError(f"{self._described}: a page of {size}: expected 1 or more")
        self._source._current()  # noqa: SLF001
        candidates = iter(self._order) if after is None else self._order.starting_at(after)
        values = list(islice((value for value in candidates if after is None or value > after), size + 1))
        return Page(self._rows_with(iter(values[:size])), values[size - 1] if len(values) > size else None)

    def values(self) -> list[Hashable]:
        """Return all values of rows, in order."""
        self._source._current()  # noqa: SLF001
        return list(self._order)
