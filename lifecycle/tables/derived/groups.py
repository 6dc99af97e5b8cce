"""Derived tables with one row per group of source rows: group() and aggregate()."""

from collections.abc import Callable, Hashable, Mapping
from typing import Generic, TypeVar

from lifecycle.tables.derived.inputs import ABSENT, Input, Plan

__all__ = ["AggregateRows", "GroupRows"]

Key = TypeVar("Key", bound=Hashable)
Row = TypeVar("Row")
New = TypeVar("New")
Value = TypeVar("Value", bound=Hashable)


class GroupRows(Generic[Key, Row, Value, New]):
    """Applies a function to all rows of each group."""

    __slots__ = ("_by", "_group_of", "_groups", "_into")

    def __init__(self, by: Callable[[Row], Value], into: Callable[[Value, list[Row]], New]) -> None:
        self._by = by
        self._into = into
        self._groups: dict[Value, dict[Key, Row]] = {}
        """Group -> key -> row, in the order of the source: least recently changed first."""
        self._group_of: dict[Key, Value] = {}  # key of a row -> its group

    def plan(self, table: str, source: Input[Key, Row]) -> Plan[Value, New]:
        """Compute the changed rows. Raises TypeError if the function returns None."""
        rows, by = source.rows(), self._by
        touched: dict[Value, dict[Key, Row]] = {}
        values: dict[Key, Value] = {}

        def group(value: Value) -> dict[Key, Row]:
            if (members := touched.get(value)) is None:
                members = touched[value] = self._groups.get(value, {}).copy()
            return members

        for key in source.changed:
            entry = rows.get(key)
            if (before := self._group_of.get(key, ABSENT)) is not ABSENT:
                del group(before)[key]
            values[key] = value = ABSENT if entry is None else by(entry[0])
            if entry is not None:
                group(value)[key] = entry[0]
        writes: dict[Value, New | None] = {}
        for value, members in touched.items():
            new = self._into(value, list(members.values())) if members else None
            if new is None and members:
                raise TypeError(f"table {table}: group {value!r} becomes None; filter() the result instead")
            writes[value] = new

        def remember() -> None:
            _remember(self._groups, touched, is_empty=lambda members: not members)
            _remember(self._group_of, values, is_empty=lambda value: value is ABSENT)

        return writes, remember


class AggregateRows(Generic[Key, Row, Value, New]):
    """Maintains the sum of the rows of each group."""

    __slots__ = ("_add", "_added", "_by", "_subtract", "_sums", "_zero")

    def __init__(
        self,
        by: Callable[[Row], Value],
        zero: Callable[[Value], New],
        add: Callable[[New, Row], New],
        subtract: Callable[[New, Row], New],
    ) -> None:
        self._by = by
        self._zero = zero
        self._add = add
        self._subtract = subtract
        self._sums: dict[Value, tuple[int, New]] = {}
        """Group -> number of its rows, and their sum."""
        self._added: dict[Key, tuple[Value, Row]] = {}
        """Key of a row -> its group, and the row as it was added."""

    def plan(self, table: str, source: Input[Key, Row]) -> Plan[Value, New]:
        """Compute the changed sums. Raises TypeError if a sum is None."""
        rows = source.rows()
        sums: dict[Value, tuple[int, New]] = {}
        added: dict[Key, tuple[Value, Row]] = {}
        for key in source.changed:
            if (before := self._added.get(key)) is not None:
                value, row = before
                count, total = sums.get(value) or self._sums[value]
                sums[value] = count - 1, self._subtract(total, row)
            if (entry := rows.get(key)) is None:
                added[key] = ABSENT
                continue
            value = self._by(entry[0])
            count, total = sums.get(value) or self._sums.get(value) or (0, ABSENT)
            sums[value] = count + 1, self._add(total if count else self._zero(value), entry[0])
            added[key] = value, entry[0]
        writes: dict[Value, New | None] = {}
        for value, (count, total) in sums.items():
            if total is None and count:
                raise TypeError(f"table {table}: the sum of {value!r} is None; add() returns the new sum")
            writes[value] = total if count else None

        def remember() -> None:
            _remember(self._sums, sums, is_empty=lambda sum_: not sum_[0])
            _remember(self._added, added, is_empty=lambda group: group is ABSENT)

        return writes, remember


Item = TypeVar("Item")
Name = TypeVar("Name")


def _remember(
    stored: dict[Name, Item], changes: Mapping[Name, Item], is_empty: Callable[[Item], bool]
) -> None:
    for name, value in changes.items():
        if is_empty(value):
            stored.pop(name, None)
        else:
            stored[name] = value
