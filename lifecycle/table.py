"""A table: rows by key, written by one, watched by many.

Needs:  nothing.
Gives:  Table; ReadTable, what it shares with derived tables; Snapshot, Transaction, Initializer.

Everything runs on one event loop, so reads between awaits are consistent and no lock is needed.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar
from weakref import ref

import anyio

from lifecycle.changes import Change, Changes
from lifecycle.index import Index, Values

if TYPE_CHECKING:
    from lifecycle.derived import Derived

__all__ = ["Change", "Changes", "Initializer", "ReadTable", "Snapshot", "Table", "Transaction"]

Row = TypeVar("Row")
New = TypeVar("New")
Stored = dict[Hashable, tuple[Row, int]]

REMEMBERED_DELETIONS = 1024
"""How many deletions a table can still tell someone who comes back with a revision."""


class Listener(Protocol):
    """Who is told of changes: watchers and derived tables."""

    def tell(self, changed: Mapping[Hashable, Any], revision: int) -> None:
        """These keys changed, with the rows before."""
        ...

    def wake(self) -> None:
        """Something may have changed: look."""
        ...


class Snapshot(Generic[Row]):
    """The rows of a table as they were at one revision; later writes do not show."""

    __slots__ = ("__weakref__", "_rows", "name", "revision")

    def __init__(self, name: str, rows: Stored[Row], revision: int) -> None:
        self.name = name
        self.revision = revision
        self._rows = rows

    def get(self, key: Hashable) -> Row | None:
        """The row with this key."""
        found = self._rows.get(key)
        return found[0] if found else None

    def all(self) -> list[Row]:
        """Every row, least recently changed first."""
        return [row for row, _ in self._rows.values()]

    def items(self) -> list[tuple[Hashable, Row, int]]:
        """Every row with its key and the revision it was written at, least recently changed first."""
        return [(key, row, revision) for key, (row, revision) in self._rows.items()]

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._rows


class ReadTable(ABC, Generic[Row]):
    """What every table lets one read and watch. Rows are immutable values, and never None."""

    def __init__(self, name: str, indexes: Mapping[str, Values[Row]] | None = None) -> None:
        self.name = name
        self._rows: Stored[Row] = {}  # ordered by revision
        self._deleted: Stored[Row] = {}  # ordered by revision
        self._forgotten = 0  # deletions up to this revision can no longer be told
        self._revision = 0
        self._stale = False  # whether _refresh() has to bring the rows up to date first
        self._listeners: dict[int, ref[Listener]] = {}  # in the order they came
        self._indexes = {name: Index(self, name, values) for name, values in (indexes or {}).items()}
        self._snapshot: ref[Snapshot[Row]] | None = None

    @property
    def revision(self) -> int:
        """Counts the transactions that changed something."""
        self._current()
        return self._revision

    def get(self, key: Hashable) -> Row | None:
        """The row with this key."""
        found = self._current().get(key)
        return found[0] if found else None

    def all(self) -> list[Row]:
        """Every row, least recently changed first."""
        return [row for row, _ in self._current().values()]

    def __len__(self) -> int:
        return len(self._current())

    def __contains__(self, key: Hashable) -> bool:
        return key in self._current()

    def by(self, index: str) -> Index[Row]:
        """The rows by the values of an index. Raises LookupError for one the table was not made with."""
        if (found := self._indexes.get(index)) is None:
            known = ", ".join(self._indexes) or "none"
            raise LookupError(f"table {self.name} has no index {index!r}; it has: {known}")
        self._current()
        return found

    def snapshot(self) -> Snapshot[Row]:
        """The rows as they are now, to keep across awaits. Free; the first write while it is held copies."""
        rows = self._current()
        held = self._snapshot() if self._snapshot is not None else None
        if held is None or held.revision != self._revision:
            held = Snapshot(self.name, rows, self._revision)
            self._snapshot = ref(held)
        return held

    def changes(self, since: int = 0) -> Changes[Row]:
        """Watch: batches of changes, the first of them a replay of what is newer than revision `since`.

        Every row there is comes first (since 0), then what changes. Changes that a slow watcher has not
        fetched yet are merged per key; a row that came and went unseen is not told. Raises LookupError when
        deletions after `since` are no longer known, or it is no revision of this table: start from 0.
        """
        rows = self._current()
        if 0 < since < self._forgotten:
            raise LookupError(
                f"table {self.name}: deletions after revision {since} are forgotten; start from 0"
            )
        if since > self._revision:
            raise LookupError(
                f"table {self.name}: revision {since} is yet to come (now {self._revision}); start from 0"
            )
        watcher = Changes(self)
        if since:
            for key, (row, revision) in self._deleted.items():
                if revision > since:
                    watcher.tell({key: row}, revision)
        newer: dict[Hashable, Row | None] = {
            key: None for key, (_, revision) in rows.items() if revision > since
        }
        watcher.tell(newer, self._revision)
        self._listen(watcher)
        return watcher

    def derive(
        self,
        fn: Callable[[list[Row]], Mapping[Any, New]],
        *,
        name: str = "",
        indexes: Mapping[str, Values[New]] | None = None,
    ) -> "Derived[New]":
        """A read-only table that always equals ``fn(rows)``, a mapping from key to row."""
        from lifecycle.derived import Derived

        return Derived(name or f"{self.name}-{fn.__name__}", fn, self, indexes=indexes)

    @property
    def initialized(self) -> bool:
        """Whether every announced source has written what it knew. Before that, absence means nothing."""
        return not self.uninitialized_by

    @property
    @abstractmethod
    def uninitialized_by(self) -> list[str]:
        """Who is still to be waited for."""

    @abstractmethod
    async def wait_initialized(self) -> None:
        """Wait until the table is initialized."""

    def _current(self) -> Stored[Row]:
        if self._stale:
            self._refresh()
        return self._rows

    def _refresh(self) -> None:
        """Bring the rows up to date, of a table that can be stale."""

    def _listen(self, listener: Listener) -> None:
        """Tell it of every change for as long as someone else holds it."""
        number, listeners = id(listener), self._listeners
        listeners[number] = ref(listener, lambda _: listeners.pop(number, None))

    def _listening(self) -> list[Listener]:
        return [found for reference in self._listeners.values() if (found := reference()) is not None]

    def _commit(self, writes: Mapping[Hashable, Row | None]) -> None:
        """Write all that is new, or raise and write nothing."""
        changed: dict[Hashable, Row | None] = {}  # key -> the row before
        for key, row in writes.items():
            found = self._rows.get(key)
            old = found[0] if found is not None else None
            if old is not row and old != row:
                changed[key] = old
        if not changed:
            return
        plans = []
        if self._indexes:
            new = {key: writes[key] for key in changed}
            plans = [(index, index.plan(new)) for index in self._indexes.values()]
        # what may raise has happened
        revision = self._apply(changed, writes)
        for index, plan in plans:
            index.apply(plan)
        for listener in self._listening():
            listener.tell(changed, revision)

    def _apply(self, changed: Mapping[Hashable, Row | None], writes: Mapping[Hashable, Row | None]) -> int:
        if self._snapshot is not None:
            if self._snapshot() is not None:
                self._rows = self._rows.copy()
            self._snapshot = None
        rows, deleted = self._rows, self._deleted
        self._revision = revision = self._revision + 1
        for key, old in changed.items():
            row = writes[key]
            if old is None:
                deleted.pop(key, None)
            else:
                del rows[key]
            if row is not None:
                rows[key] = (row, revision)
            elif old is not None:
                deleted[key] = (old, revision)
        while len(deleted) > REMEMBERED_DELETIONS:
            _, self._forgotten = deleted.pop(next(iter(deleted)))
        return revision


class Initializer:
    """A source that has not filled the table yet. done() may be called more than once."""

    __slots__ = ("_table", "name")

    def __init__(self, table: "Table[Any]", name: str) -> None:
        self._table = table
        self.name = name

    def done(self) -> None:
        """The source has written everything it knew at its start."""
        self._table._initializer_done(self)  # noqa: SLF001  # the two are one mechanism


class Transaction(Generic[Row]):
    """Writes that appear together when the `with` block ends, or not at all when it raises."""

    __slots__ = ("_over", "_table", "_writes")

    def __init__(self, table: "Table[Row]") -> None:
        self._table = table
        self._writes: dict[Hashable, Row | None] = {}
        self._over = False

    def put(self, row: Row) -> None:
        """Insert the row, or put it in place of the one with its key."""
        self._usable()[self._table.key(row)] = row

    def delete(self, key: Hashable) -> None:
        """Remove the row with this key, if there is one."""
        self._usable()[key] = None

    def replace_all(self, rows: Iterable[Row]) -> None:
        """Make these the only rows: what the table holds under other keys is removed."""
        writes, key = self._usable(), self._table.key
        new: dict[Hashable, Row | None] = {key(row): row for row in rows}
        for gone in (*self._table._rows, *writes):  # noqa: SLF001  # the two are one mechanism
            writes[gone] = None
        writes.update(new)

    def get(self, key: Hashable) -> Row | None:
        """The row as this transaction leaves it."""
        writes = self._usable()
        return writes[key] if key in writes else self._table.get(key)

    def __enter__(self) -> "Transaction[Row]":
        self._table._begin(self)  # noqa: SLF001
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = True
        self._table._end(self._writes if kind is None else {})  # noqa: SLF001

    def _usable(self) -> dict[Hashable, Row | None]:
        if self._over:
            raise RuntimeError(f"table {self._table.name}: this transaction is over; open another one")
        return self._writes


class Table(ReadTable[Row]):
    """Rows by key. One that equals what is there is no change.

    `indexes` are functions from a row to the values it is found by, see by(). They are pure.
    """

    def __init__(
        self,
        name: str,
        key: Callable[[Row], Hashable],
        *,
        indexes: Mapping[str, Values[Row]] | None = None,
    ) -> None:
        super().__init__(name, indexes)
        self.key = key
        self._pending: set[Initializer] = set()
        self._event: anyio.Event | None = None
        self._open: Transaction[Row] | None = None

    def txn(self) -> Transaction[Row]:
        """Write: synchronous, without an await inside. Raises RuntimeError when one is open already."""
        return Transaction(self)

    def initializer(self, name: str = "") -> Initializer:
        """Announce a source that will fill the table: it is not initialized before that one is done().

        To be called in constructors. Raises RuntimeError once the table counted as initialized for someone.
        """
        if self._event is not None and self._event.is_set():
            raise RuntimeError(f"table {self.name} is initialized already: announce sources in constructors")
        initializer = Initializer(self, name)
        self._pending.add(initializer)
        return initializer

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

    def _begin(self, transaction: Transaction[Row]) -> None:
        if self._open is not None:
            raise RuntimeError(f"table {self.name}: a transaction is open already; a table has one writer")
        self._open = transaction

    def _end(self, writes: Mapping[Hashable, Row | None]) -> None:
        self._open = None
        self._commit(writes)
