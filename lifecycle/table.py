"""A table: rows by key, written by one, watched by many.

Needs:  nothing.
Gives:  Table, Change, Initializer.

Everything runs on one event loop, so reads between awaits are consistent and no lock is needed.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar
from weakref import WeakSet

import anyio
import msgspec

__all__ = ["Change", "Changes", "Initializer", "Table", "Transaction"]

Row = TypeVar("Row")

REMEMBERED_DELETIONS = 1024
"""How many deletions a table can still tell someone who comes back with a revision."""


class Change(msgspec.Struct, Generic[Row], frozen=True):
    """What happened to one key since the watcher was last told."""

    key: Hashable
    old: Row | None
    """The row as this watcher last saw it; None when it saw none."""
    row: Row | None
    """The row now; None when it is gone."""
    revision: int

    @property
    def deleted(self) -> bool:
        """Whether the row is gone."""
        return self.row is None


class Initializer:
    """A source that has not filled the table yet. done() may be called more than once."""

    __slots__ = ("_table", "name")

    def __init__(self, table: "Table[object]", name: str) -> None:
        self._table = table
        self.name = name

    def done(self) -> None:
        """The source has written everything it knew at its start."""
        self._table._initializer_done(self)  # noqa: SLF001  # the two are one mechanism


class Transaction(Generic[Row]):
    """Writes that appear together when the `with` block ends, or not at all when it raises."""

    __slots__ = ("_rows", "_table", "writes")

    def __init__(self, table: "Table[Row]", rows: dict[Hashable, tuple[Row, int]]) -> None:
        self._table = table
        self._rows = rows
        self.writes: dict[Hashable, Row | None] = {}

    def put(self, row: Row) -> None:
        """Insert the row, or put it in place of the one with its key."""
        self.writes[self._table.key(row)] = row

    def delete(self, key: Hashable) -> None:
        """Remove the row with this key, if there is one."""
        self.writes[key] = None

    def get(self, key: Hashable) -> Row | None:
        """The row as this transaction leaves it."""
        if key in self.writes:
            return self.writes[key]
        found = self._rows.get(key)
        return found[0] if found else None


class Table(Generic[Row]):
    """Rows by key. Rows are immutable values; one that equals what is there is no change."""

    def __init__(self, name: str, key: Callable[[Row], Hashable]) -> None:
        self.name = name
        self.key = key
        self.revision = 0
        """Counts the transactions that changed something."""
        self._rows: dict[Hashable, tuple[Row, int]] = {}  # ordered by revision
        self._deleted: dict[Hashable, tuple[Row, int]] = {}  # ordered by revision
        self._forgotten = 0  # deletions up to this revision can no longer be told
        self._watchers: WeakSet[Changes[Row]] = WeakSet()
        self._pending: set[Initializer] = set()
        self._event: anyio.Event | None = None
        self._open = False

    def get(self, key: Hashable) -> Row | None:
        """The row with this key."""
        found = self._rows.get(key)
        return found[0] if found else None

    def all(self) -> list[Row]:
        """Every row, least recently changed first."""
        return [row for row, _ in self._rows.values()]

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._rows

    @contextmanager
    def txn(self) -> Iterator[Transaction[Row]]:
        """Write: synchronous, without an await inside. Raises RuntimeError when one is open already."""
        if self._open:
            raise RuntimeError(f"table {self.name}: a transaction is open already; a table has one writer")
        self._open = True
        transaction = Transaction(self, self._rows)
        try:
            yield transaction
        finally:
            self._open = False
        self._commit(transaction.writes)

    def changes(self, since: int = 0) -> "Changes[Row]":
        """Watch: batches of changes, the first of them a replay of what is newer than revision `since`.

        Every row there is comes first (since 0), then what changes. Changes that a slow watcher has not
        fetched yet are merged per key; a row that came and went unseen is not told. Raises LookupError when
        deletions after `since` are no longer known: start again from 0.
        """
        if 0 < since < self._forgotten:
            raise LookupError(
                f"table {self.name}: deletions after revision {since} are forgotten; start from 0"
            )
        watcher: Changes[Row] = Changes(self._rows)
        if since:
            for key, (row, revision) in self._deleted.items():
                if revision > since:
                    watcher.tell({key: row}, revision)
        newer: dict[Hashable, Row | None] = {
            key: None for key, (_, revision) in self._rows.items() if revision > since
        }
        watcher.tell(newer, self.revision)
        self._watchers.add(watcher)
        return watcher

    def initializer(self, name: str = "") -> Initializer:
        """Announce a source that will fill the table: it is not initialized before that one is done().

        To be called in constructors. Raises RuntimeError once the table counted as initialized for someone.
        """
        if self._event is not None and self._event.is_set():
            raise RuntimeError(f"table {self.name} is initialized already: announce sources in constructors")
        initializer = Initializer(self, name)  # type: ignore[arg-type]  # it never looks at rows
        self._pending.add(initializer)
        return initializer

    @property
    def initialized(self) -> bool:
        """Whether every announced source has written what it knew. Before that, absence means nothing."""
        return not self._pending

    @property
    def uninitialized_by(self) -> list[str]:
        """Who is still to be waited for."""
        return sorted(initializer.name for initializer in self._pending)

    async def wait_initialized(self) -> None:
        """Wait until the table is initialized."""
        if self._event is None:
            self._event = anyio.Event()
            if not self._pending:
                self._event.set()
        await self._event.wait()

    def _initializer_done(self, initializer: Initializer) -> None:
        self._pending.discard(initializer)
        if not self._pending and self._event is not None:
            self._event.set()

    def _commit(self, writes: dict[Hashable, Row | None]) -> None:
        rows = self._rows
        changed: dict[Hashable, Row | None] = {}  # key -> the row before
        revision = self.revision + 1
        for key, row in writes.items():
            found = rows.get(key)
            old = found[0] if found else None
            if old == row:
                continue
            changed[key] = old
            rows.pop(key, None)
            self._deleted.pop(key, None)
            if row is not None:
                rows[key] = (row, revision)
            elif old is not None:
                self._deleted[key] = (old, revision)
        if not changed:
            return
        self.revision = revision
        while len(self._deleted) > REMEMBERED_DELETIONS:
            _, self._forgotten = self._deleted.pop(next(iter(self._deleted)))
        for watcher in self._watchers:
            watcher.tell(changed, revision)


class Changes(Generic[Row]):
    """An endless iteration over batches of changes. Dropping it ends the watch."""

    def __init__(self, rows: dict[Hashable, tuple[Row, int]]) -> None:
        self._rows = rows
        self._event: anyio.Event | None = None
        self._pending: dict[Hashable, tuple[Row | None, int]] = {}
        """Keys that may have changed, with the row as last seen and the revision of the last change."""
        self.revision = 0
        """The table's revision as of the batch to come: where to resume with ``changes(since)``."""

    def __aiter__(self) -> "Changes[Row]":
        return self

    async def __anext__(self) -> list[Change[Row]]:
        while not (batch := self.take()):
            self._event = anyio.Event()
            await self._event.wait()
        return batch

    def take(self) -> list[Change[Row]]:
        """What has changed since the last time, at once; empty when nothing has."""
        batch = []
        for key, (old, revision) in self._pending.items():
            row, at = self._rows.get(key, (None, revision))
            if old != row:
                batch.append(Change(key, old, row, at))
        self._pending.clear()
        batch.sort(key=lambda change: change.revision)
        return batch

    def tell(self, changed: dict[Hashable, Row | None], revision: int) -> None:
        """Remember what changed, with the row as it was before unless an older one is remembered."""
        for key, old in changed.items():
            seen = self._pending[key][0] if key in self._pending else old
            self._pending[key] = (seen, revision)
        self.revision = revision
        if self._event is not None:
            self._event.set()
