"""Finding rows of a table by something other than their key.

Needs:  a table.
Gives:  Index, what ``table.by(name)`` returns.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from lifecycle.table import ReadTable

__all__ = ["Index", "Values"]

Row = TypeVar("Row")
Values = Callable[[Row], Iterable[Hashable]]
Plan = dict[Hashable, frozenset[Hashable]]


class Index(Generic[Row]):
    """The rows by each of the values that a function gives for a row: none, one or many."""

    def __init__(self, table: "ReadTable[Row]", name: str, values: Values[Row]) -> None:
        self.name = name
        self._table = table
        self._values = values
        self._keys: dict[Hashable, dict[Hashable, None]] = {}
        self._of: Plan = {}  # key -> its values

    def get(self, value: Hashable) -> list[Row]:
        """Every row with this value, in no particular order."""
        rows = self._table._current()  # noqa: SLF001  # the two are one mechanism
        return [rows[key][0] for key in self._keys.get(value, ())]

    def one(self, value: Hashable) -> Row | None:
        """The row with this value. Raises LookupError when there are several."""
        found = self.get(value)
        if len(found) > 1:
            raise LookupError(
                f"table {self._table.name}: {len(found)} rows have {self.name} {value!r}, not one"
            )
        return found[0] if found else None

    def values(self) -> list[Hashable]:
        """Every value that some row has."""
        self._table._current()  # noqa: SLF001
        return list(self._keys)

    def __contains__(self, value: Hashable) -> bool:
        self._table._current()  # noqa: SLF001
        return value in self._keys

    def plan(self, rows: Mapping[Hashable, Row | None]) -> Plan:
        """The values of rows to be written. Raises what the function raises; changes nothing."""
        values = self._values
        return {key: frozenset() if row is None else frozenset(values(row)) for key, row in rows.items()}

    def apply(self, plan: Plan) -> None:
        """Write what was planned."""
        for key, values in plan.items():
            before = self._of.pop(key, frozenset())
            for value in before - values:
                keys = self._keys[value]
                del keys[key]
                if not keys:
                    del self._keys[value]
            for value in values - before:
                self._keys.setdefault(value, {})[key] = None
            if values:
                self._of[key] = values
