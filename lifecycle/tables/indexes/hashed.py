"""A hash index: finds rows of a table by the values of a function.

A write is first planned, which may raise and has no effect, and then applied, which cannot raise.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import ClassVar, Generic, Protocol, TypeVar

from lifecycle.hints.places import has_place, place_of

__all__ = ["Index", "Plan", "RowSource", "Values"]

Key = TypeVar("Key", bound=Hashable)
Row = TypeVar("Row")
Values = Callable[[Row], Iterable[Hashable]]
Plan = dict[Key, frozenset[Hashable]]
Stored = dict[Key, tuple[Row, int]]


_ONE = "one value, of which every part would be a value; give it in a tuple"


class RowSource(Protocol[Key, Row]):
    """The table, or a snapshot of it, with the rows."""

    name: str

    def _current(self) -> Stored[Key, Row]:
        """Return the current rows by key."""
        ...


class Index(Generic[Key, Row]):
    """A hash index: each row has any number of values."""

    single: ClassVar[tuple[type, ...]] = (str, bytes)
    """Iterable types that are single values."""

    def __init__(self, source: RowSource[Key, Row], name: str, values: Values[Row]) -> None:
        self._described = f"table {source.name}: index {name!r}"
        if not callable(values):
            raise TypeError(f"{self._described} is {values!r}: expected a function from a row to its values")
        gives = getattr(values, "__annotations__", {}).get("return")
        if gives in self.single or gives in {kind.__name__ for kind in self.single}:
            place = f" at {place_of(values)}" if has_place(values) else ""
            raise TypeError(f"{self._described}: its function{place} gives {_ONE}")
        self.name = name
        self._source = source
        self._values = values
        self._keys: dict[Hashable, dict[Key, None]] = {}
        self._indexed: Plan[Key] = {}  # key -> its values

    def get(self, value: Hashable) -> list[Row]:
        """Return all rows with this value, in no particular order."""
        rows = self._source._current()  # noqa: SLF001  # the two are one mechanism
        return [rows[key][0] for key in self._keys.get(value, ())]

    def rows(self, keys: Iterable[Key]) -> list[Row]:
        """Return the rows with these keys, which must exist."""
        rows = self._source._current()  # noqa: SLF001
        return [rows[key][0] for key in keys]

    def keys(self, value: Hashable) -> list[Key]:
        """Return the keys of all rows with this value, in no particular order."""
        self._source._current()  # noqa: SLF001
        return list(self._keys.get(value, ()))

    def one(self, value: Hashable) -> Row | None:
        """Return the row with this value, or None. Raises LookupError if there are several."""
        rows = self.get(value)
        if len(rows) > 1:
            raise LookupError(
                f"table {self._source.name}: {len(rows)} rows have {self.name} {value!r}, not one"
            )
        return rows[0] if rows else None

    def values(self) -> list[Hashable]:
        """Return all values of rows."""
        self._source._current()  # noqa: SLF001
        return list(self._keys)

    def __contains__(self, value: Hashable) -> bool:
        self._source._current()  # noqa: SLF001
        return value in self._keys

    def plan(self, rows: Mapping[Key, Row | None]) -> Plan[Key]:
        """Compute the values of the rows to write. Raises the function's errors; the index is unchanged."""
        return {key: frozenset() if row is None else self._values_of(row) for key, row in rows.items()}

    def _values_of(self, row: Row) -> frozenset[Hashable]:
        values = self._values(row)
        if isinstance(values, self.single):
            raise TypeError(f"{self._described}: its function gave {values!r}, {_ONE}")
        try:
            return self._hashed(values)
        except TypeError as error:
            problem = f"its function gave {values!r}, expected hashable values in a tuple or list"
            raise TypeError(f"{self._described}: {problem}: {error}") from error

    def _hashed(self, values: Iterable[Hashable]) -> frozenset[Hashable]:
        return frozenset(values)

    def cancel(self) -> None:
        """Discard the plan."""

    def apply(self, plan: Plan[Key]) -> None:
        """Apply the plan."""
        for key, values in plan.items():
            before = self._indexed.get(key)
            if before == values:
                continue
            if before is None:
                added = values
            else:
                added = values - before
                for value in before - values:
                    keys = self._keys[value]
                    del keys[key]
                    if not keys:
                        del self._keys[value]
            for value in added:
                self._keys.setdefault(value, {})[key] = None
            if values:
                self._indexed[key] = values
            else:
                self._indexed.pop(key, None)
