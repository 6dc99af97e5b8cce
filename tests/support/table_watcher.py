"""A watcher that compares a table with the changes it received."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from lifecycle import ReadTable
from lifecycle.tables.changes import Changes

R = TypeVar("R")


@dataclass
class Watcher(Generic[R]):
    """Watches a table and records its changes."""

    table: ReadTable[str, R]
    changes: Changes[str, R]
    known: dict[Hashable, R] = field(default_factory=dict)

    def look(self) -> None:
        batch = self.changes.take()
        assert len({change.key for change in batch}) == len(batch), "a key at most once"
        assert [change.revision for change in batch] == sorted(change.revision for change in batch)
        for change in batch:
            assert change.old == self.known.get(change.key), "what it saw last"
            assert change.row != change.old, "no change is sent twice"
            if change.row is None:
                del self.known[change.key]
            else:
                self.known[change.key] = change.row
        assert self.known == {key: row for key, row, _ in self.table.snapshot().items()}, "nothing lost"
        assert self.changes.revision == self.table.revision
        assert self.changes.take() == []
