"""Snapshots of several tables at the same moment."""

from collections.abc import Hashable, Iterable
from typing import Any, TypeVar

from lifecycle.tables.read_table import ReadTable
from lifecycle.tables.snapshot import Snapshot

__all__ = ["Snapshots", "snapshot"]

Key = TypeVar("Key", bound=Hashable)
Row = TypeVar("Row")


class Snapshots:
    """Snapshots of several tables at the same moment: ``seen[pods]`` is the Snapshot of the table `pods`."""

    __slots__ = ("_snapshots",)

    def __init__(self, tables: Iterable[ReadTable[Any, Any]]) -> None:
        self._snapshots = {id(table): (table, table.snapshot()) for table in tables}

    def __getitem__(self, table: ReadTable[Key, Row]) -> Snapshot[Key, Row]:
        """Return the snapshot of this table.

        Raises LookupError for a table that was not passed to snapshot().
        """
        if (entry := self._snapshots.get(id(table))) is None:
            names = ", ".join(member.name for member, _ in self._snapshots.values())
            raise LookupError(f"table {table.name} is not in this snapshot; it is of: {names or 'no table'}")
        return entry[1]


def snapshot(*tables: ReadTable[Any, Any]) -> Snapshots:
    """Snapshots of these tables, all at the present moment, to keep across awaits.

    Derived tables are updated first. Raises the errors of their functions.
    """
    return Snapshots(tables)
