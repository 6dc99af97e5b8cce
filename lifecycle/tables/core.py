"""The rows of a table: reading, watching, waiting; subclasses write them.

Everything runs on one event loop, so reads between awaits are consistent without locks.
"""

from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping
from itertools import islice, takewhile
from types import NoneType
from typing import Any, TypeVar
from weakref import ref

from lifecycle.errors import TableClosedError
from lifecycle.tables.changes import Changes, Only
from lifecycle.tables.frozen import unfrozen
from lifecycle.tables.indexes import Index, IndexSpec, Lookup, Plan, index_of
from lifecycle.tables.key_waits import KeyWaits
from lifecycle.tables.rows import Listener, Rows, Stored
from lifecycle.tables.snapshot import Snapshot, UndoLog

__all__ = ["TableCore", "commit_together"]

Key = TypeVar("Key", bound=Hashable)
Row = TypeVar("Row")
Value = TypeVar("Value", bound=Hashable)

REMEMBERED_DELETIONS = 1024
"""Number of deletions that a table remembers for watchers that resume at a revision."""


class TableCore(Rows[Key, Row]):
    """Rows, revisions and watchers of all tables. Rows are immutable values, and never None."""

    def __init__(self, name: str, indexes: Mapping[str, IndexSpec[Row]] | None = None) -> None:
        self.name = name
        self._rows: Stored[Key, Row] = {}  # ordered by revision
        self._deleted: Stored[Key, Row] = {}  # ordered by revision
        self._forgotten = 0  # deletions up to this revision are no longer known
        self._revision = 0
        self._stale = False  # whether _refresh() must update the rows first
        self._listeners: dict[int, ref[Listener]] = {}  # in order of registration
        self._specs = dict(indexes or {})
        self._indexes = {name: index_of(self, name, spec) for name, spec in self._specs.items()}
        self._snapshot: ref[Snapshot[Key, Row]] | None = None
        self._undo_log: UndoLog[Key, Row] | None = None  # set by the first snapshot
        self._waits: KeyWaits[Key, Row] | None = None
        self._closed = ""
        self._frozen: set[type] = {NoneType}
        """Types of rows that have been checked."""

    @property
    def revision(self) -> int:
        """Number of transactions that changed something."""
        self._current()
        return self._revision

    def lookup(self, name: str, values: Callable[[Row], Iterable[Value]]) -> Lookup[Value, Key, Row]:
        """Add a typed index: ``pods.lookup("address", lambda pod: pod.addresses)``.

        `values` returns the values by which a row is found, any number of them, without side effects.
        by(name) finds the index. Raises ValueError if the table has an index of this name, and the error of
        `values` for a row.
        """
        if name in self._specs:
            raise ValueError(f"table {self.name} has an index {name!r} already: choose another name")
        rows = self._current()
        index = index_of(self, name, values)
        index.apply(index.plan({key: row for key, (row, _) in rows.items()}))
        self._specs = {**self._specs, name: values}  # a copy: snapshots keep the old dict
        self._indexes[name] = index
        self._snapshot = None  # it has only the previous indexes
        return Lookup(index)

    def get(self, key: Key) -> Row | None:
        """Return the row with this key."""
        if self._stale:
            self._refresh()
        rows = self._rows
        return rows[key][0] if key in rows else None

    def __contains__(self, key: Key) -> bool:
        if self._stale:
            self._refresh()
        return key in self._rows

    def snapshot(self) -> Snapshot[Key, Row]:
        """Return the present rows, to keep across awaits.

        Its cost, and that of writes while it exists, does not depend on the size of the table.
        """
        rows = self._current()
        snapshot = self._snapshot() if self._snapshot is not None else None
        if snapshot is None or snapshot.revision != self._revision:
            if self._undo_log is None:
                self._undo_log = UndoLog()
            snapshot = Snapshot(self.name, rows, self._revision, self._specs, self._undo_log)
            self._snapshot = ref(snapshot)
        return snapshot

    def changes(self, since: int = 0, *, only: Only[Key, Row] | None = None) -> Changes[Key, Row]:
        """Watch the table: batches of changes, beginning with all that is newer than revision `since`.

        With since 0, all present rows come first. Changes that a slow watcher has not fetched are merged by
        key; a row that was added and deleted in between is not reported. Raises LookupError if deletions
        after `since` are forgotten or the table never had that revision: then start from 0.

        `only` decides whether a change (key, row before, row now) matters to this watcher; other changes are
        left out and wake no watcher. It is called during the write, so it must have no side effects.
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
        watcher = Changes(self, only)
        if since:
            for key, (row, revision) in self._deleted.items():
                if revision > since:
                    watcher.notify({key: row}, revision)
        newer: dict[Key, Row | None] = dict.fromkeys(rows if since == 0 else self._newer_than(since))
        watcher.replay(newer, self._revision)
        self._listen(watcher)
        return watcher

    async def wait_for(self, key: Key, until: Callable[[Row], bool] | None = None) -> Row:
        """Wait for a row with this key, and for `until` to be true of it if given. Returns the row.

        Changes of other keys do not wake it. A deletion does not end the wait, as a new row may come.
        """
        row = self.get(key)
        while row is None or (until is not None and not until(row)):
            row = await self._key_waits().changed(key, row)
        return row

    async def wait_removed(self, key: Key) -> None:
        """Wait until there is no row with this key."""
        row = self.get(key)
        while row is not None:
            row = await self._key_waits().changed(key, row)

    async def wait_changed(self, key: Key, seen: Row | None) -> Row | None:
        """Wait until the row with this key differs from `seen`.

        Returns the new row, None if it was deleted.

        Pass the result to the next call, and no lasting change is missed; a change that is undone meanwhile
        is not reported. None means no row.
        """
        return await self._key_waits().changed(key, seen)

    def close(self, why: str) -> None:
        """End every wait for a change with TableClosedError, as nothing changes any more.

        Rows stay readable.
        """
        self._closed = why
        for listener in self._listening():
            listener.wake()

    def check_open(self) -> None:
        """Raise TableClosedError if the table is closed."""
        if self._closed:
            raise TableClosedError(f"table {self.name} is closed: {self._closed}")

    @property
    def initialized(self) -> bool:
        """Whether all registered sources have written their initial rows.

        Before, an absent row means nothing.
        """
        return not self.uninitialized_by

    @property
    @abstractmethod
    def uninitialized_by(self) -> list[str]:
        """The sources that have not written their initial rows."""

    @abstractmethod
    async def wait_initialized(self) -> None:
        """Wait until the table is initialized."""

    def _newer_than(self, revision: int) -> list[Key]:
        """Keys of rows that were written after a revision, in order; costs by their number."""
        newer = list(takewhile(lambda key: self._rows[key][1] > revision, reversed(self._rows)))
        newer.reverse()
        return newer

    def _current(self) -> Stored[Key, Row]:
        if self._stale:
            self._refresh()
        return self._rows

    def _index(self, name: str) -> Index[Key, Row] | None:
        return self._indexes.get(name)

    def _key_waits(self) -> KeyWaits[Key, Row]:
        if self._waits is None:
            self._waits = KeyWaits(self.get, self._listen, self.check_open)
        return self._waits

    def _refresh(self) -> None:
        """Update the rows of a table that can be stale."""

    def _listen(self, listener: Listener) -> None:
        """Notify a listener of every change, as long as another object references it."""
        number, listeners = id(listener), self._listeners
        listeners[number] = ref(listener, lambda _: listeners.pop(number, None))

    def _listening(self) -> list[Listener]:
        return [listener for reference in self._listeners.values() if (listener := reference()) is not None]

    def _commit(self, writes: Mapping[Key, Row | None]) -> None:
        """Write all new rows, or raise and write nothing."""
        if changed := self._changed(writes):
            plans: Iterable[tuple[Index[Key, Row], Plan[Key]]] = ()
            if self._indexes:
                new = writes if len(changed) == len(writes) else {key: writes[key] for key in changed}
                plans = self._plans(new)
            # nothing below raises
            self._apply(changed, writes)
            for index, plan in plans:
                index.apply(plan)
            if self._listeners:
                self._notify(changed)

    def _changed(self, writes: Mapping[Key, Row | None]) -> dict[Key, Row | None]:
        """Keys with another row, and the row before. Raises TypeError for a row that may change in place."""
        changed: dict[Key, Row | None] = {}
        rows, frozen = self._rows, self._frozen
        if not rows:  # usually the initial rows
            for kind in set(map(type, writes.values())) - frozen:
                self._check_frozen(kind)
            return {key: None for key, row in writes.items() if row is not None}
        for key, row in writes.items():
            if type(row) not in frozen:
                self._check_frozen(type(row))
            old = rows[key][0] if key in rows else None
            if old is not row and old != row:
                changed[key] = old
        return changed

    def _notify(self, changed: Mapping[Key, Row | None]) -> None:
        revision = self._revision
        for reference in list(self._listeners.values()):  # listeners may be added or removed meanwhile
            if (listener := reference()) is not None:
                listener.notify(changed, revision)

    def _plans(self, new: Mapping[Key, Row | None]) -> list[tuple[Index[Key, Row], Plan[Key]]]:
        """Return the new contents of each index.

        Raises the errors of their functions; the indexes are unchanged then.
        """
        try:
            return [(index, index.plan(new)) for index in self._indexes.values()]
        except BaseException:
            self._cancel_plans()
            raise

    def _cancel_plans(self) -> None:
        for index in self._indexes.values():
            index.cancel()

    def _check_frozen(self, kind: type) -> None:
        """Raise TypeError for rows of a type that may change in place."""
        if (why := unfrozen(kind)) is not None:
            raise TypeError(f"table {self.name}: a row of type {why}")
        self._frozen.add(kind)

    def _apply(self, changed: Mapping[Key, Row | None], writes: Mapping[Key, Row | None]) -> None:
        rows, deleted = self._rows, self._deleted
        if self._undo_log is not None:
            self._undo_log.note(changed, rows)
        self._revision = revision = self._revision + 1
        if not rows and not deleted:
            rows.update({key: (writes[key], revision) for key in changed})  # type: ignore[misc]  # none is deleted
            return
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
        if (excess := len(deleted) - REMEMBERED_DELETIONS) > 0:
            for key in list(
                islice(deleted, excess)
            ):  # in one pass: single lookups would skip the deleted entries each time
                _, self._forgotten = deleted.pop(key)


def commit_together(writes: Iterable[tuple[TableCore[Any, Any], Mapping[Any, Any]]]) -> None:
    """Write to several tables, or raise and write to none. Listeners are notified after the last write."""
    planned = []
    try:
        for table, rows in writes:
            changed = table._changed(rows)  # noqa: SLF001  # they are one mechanism
            planned.append((table, changed, rows, table._plans({key: rows[key] for key in changed})))  # noqa: SLF001
    except BaseException:
        for table, *_ in planned:
            table._cancel_plans()  # noqa: SLF001
        raise
    for table, changed, rows, plans in planned:
        if changed:
            table._apply(changed, rows)  # noqa: SLF001
            for index, plan in plans:
                index.apply(plan)
    for table, changed, *_ in planned:
        if changed:
            table._notify(changed)  # noqa: SLF001
