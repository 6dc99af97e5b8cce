"""The tables of a hive, by name."""

from collections.abc import Callable, Iterable
from typing import Any
from weakref import ref

from lifecycle.errors import suggestion
from lifecycle.tables.read_table import ReadTable

__all__ = ["Tables"]

_LISTED = 20
"""Tables that an error names, at most."""


class Tables:
    """Every table that a constructor of the hive gives, and those that were added.

    While the hive is being built it holds only what is built already.
    """

    __slots__ = ("_added", "_built")

    def __init__(self, built: Callable[[], Iterable[object]] = tuple) -> None:
        self._built = built
        self._added: list[ref[ReadTable[Any, Any]]] = []

    def add(self, *tables: ReadTable[Any, Any]) -> None:
        """Make tables known that no constructor gives: derived ones, the statuses of a reconciler.

        They are known for as long as someone else holds them.
        """
        self._added = [known for known in self._added if known() is not None]
        self._added.extend(map(ref, tables))

    def all(self) -> list[ReadTable[Any, Any]]:
        """Every table once, sorted by name."""
        found = {id(one): one for one in self._built() if isinstance(one, ReadTable)}
        added = (known() for known in self._added)
        found |= {id(one): one for one in added if one is not None}
        return sorted(found.values(), key=lambda table: table.name)

    def get(self, name: str) -> ReadTable[Any, Any]:
        """The table with this name. Raises LookupError with the names there are, or when two tables have the
        name."""
        tables = self.all()
        found = [table for table in tables if table.name == name]
        if len(found) == 1:
            return found[0]
        if found:
            raise LookupError(f"{len(found)} tables are named {name}: give them names of their own")
        names = [table.name for table in tables]
        there = f"are: {', '.join(names) or 'none'}" if len(names) <= _LISTED else f"are {len(names)} others"
        raise LookupError(f"no table is named {name}{suggestion(name, names) or f'; there {there}'}")
