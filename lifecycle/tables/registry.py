"""The tables of a hive, by name."""

from collections.abc import Callable, Iterable
from typing import Any
from weakref import ref

from lifecycle.errors import suggestion
from lifecycle.tables.read_table import ReadTable

__all__ = ["Tables"]

_LISTED = 20
"""Maximum number of tables that an error names."""


class Tables:
    """All tables that constructors of the hive provide, and tables that were added.

    While the hive is built, it contains only the tables that are built already.
    """

    __slots__ = ("_added", "_built")

    def __init__(self, built: Callable[[], Iterable[object]] = tuple) -> None:
        self._built = built
        self._added: list[ref[ReadTable[Any, Any]]] = []

    def add(self, *tables: ReadTable[Any, Any]) -> None:
        """Register tables that no constructor provides: derived tables, statuses of a reconciler.

        They stay registered as long as another object references them.
        """
        self._added = [reference for reference in self._added if reference() is not None]
        self._added.extend(map(ref, tables))

    def all(self) -> list[ReadTable[Any, Any]]:
        """Return all tables, sorted by name."""
        by_id = {id(table): table for table in self._built() if isinstance(table, ReadTable)}
        added = (reference() for reference in self._added)
        by_id |= {id(table): table for table in added if table is not None}
        return sorted(by_id.values(), key=lambda table: table.name)

    def get(self, name: str) -> ReadTable[Any, Any]:
        """Return the table with this name.

        Raises LookupError with the existing names, or if two tables have the name.
        """
        tables = self.all()
        matches = [table for table in tables if table.name == name]
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise LookupError(f"{len(matches)} tables are named {name}: give them names of their own")
        names = [table.name for table in tables]
        existing = (
            f"are: {', '.join(names) or 'none'}" if len(names) <= _LISTED else f"are {len(names)} others"
        )
        raise LookupError(f"no table is named {name}{suggestion(name, names) or f'; there {existing}'}")
