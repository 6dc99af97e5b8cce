"""The tables of a hive as plain data: their list, their rows, and their changes.

Why:    an API, a shell and scripts show tables in different forms, but read them in one way: in slices, so
        that a large table does not keep the event loop from other work.
"""

from collections.abc import AsyncGenerator, Hashable, Iterable, Sequence
from contextlib import aclosing
from typing import Any

import anyio
import msgspec

from lifecycle.admin.plain import plain
from lifecycle.jobs import TimeSlice
from lifecycle.tables import Change, ReadTable, Tables
from lifecycle.tables.changes import Changes

__all__ = ["Follower", "TableChange", "TableInfo", "TableRow", "changed", "rows", "tables_info"]


class TableInfo(msgspec.Struct, frozen=True, rename="kebab"):
    """A table: its name, size, number of changes, and pending initializers."""

    name: str
    rows: int
    revision: int
    initialized: bool
    waits_for: Sequence[str]


class TableRow(msgspec.Struct, frozen=True):
    """A row of a table, and the revision of its last write."""

    rev: int
    key: object
    obj: object


class TableChange(msgspec.Struct, frozen=True):
    """A row that was added, changed or deleted; a deleted one with its last contents."""

    rev: int
    key: object
    obj: object
    deleted: bool


def tables_info(tables: Tables) -> list[TableInfo]:
    """Return every table, by name."""
    return [
        TableInfo(table.name, len(table), table.revision, table.initialized, table.uninitialized_by)
        for table in tables.all()
    ]


async def rows(items: Iterable[tuple[Hashable, Any, int]]) -> AsyncGenerator[list[TableRow], None]:
    """Yield the rows of a Snapshot, in slices, with yields to the event loop."""
    part: list[TableRow] = []
    time_slice = TimeSlice()
    for key, row, revision in items:
        part.append(TableRow(revision, plain(key), plain(row)))
        if time_slice.over:
            yield part
            part = []
            await time_slice.pause()
    if part:
        yield part


def changed(change: Change[Any, Any]) -> TableChange:
    """Return a change as plain data."""
    row = change.old if change.deleted else change.row
    return TableChange(change.revision, plain(change.key), plain(row), change.deleted)


class Follower:
    """Follows tables for readers, until closed. For a slow reader, changes are merged, not queued."""

    def __init__(self) -> None:
        self._watched: set[Changes[Any, Any]] = set()
        self._closed = False

    def open(self) -> None:
        """Let readers follow, when their server starts, perhaps again."""
        self._closed = False

    def close(self) -> None:
        """End all readers, when their server stops."""
        self._closed = True
        for changes in self._watched:
            changes.wake()

    async def follow(
        self, table: ReadTable[Any, Any], quiet: float | None = None
    ) -> AsyncGenerator[list[TableChange], None]:
        """Yield all rows, then their changes, in batches; an empty batch after the given quiet seconds."""
        snapshot = table.snapshot()
        changes = table.changes(snapshot.revision)
        self._watched.add(changes)
        try:
            async with aclosing(rows(snapshot)) as slices:
                async for part in slices:
                    yield [TableChange(row.rev, row.key, row.obj, deleted=False) for row in part]
                    if self._closed:
                        return
            if not len(snapshot):
                yield []
            del snapshot, slices  # release the initial rows
            while not self._closed:
                with anyio.move_on_after(quiet):
                    await changes.wait()
                if not self._closed:
                    yield [changed(change) for change in changes.take()]
        finally:
            self._watched.discard(changes)
