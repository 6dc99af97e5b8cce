"""A table as it was at one moment.

Why: tables are read by key far more often than as snapshots. So the rows stay in one dictionary, and a
snapshot records what must be undone in it.
"""

from collections import deque
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from typing import Generic, TypeVar
from weakref import ref

from lifecycle.tables.indexes import Index, IndexSpec, index_of
from lifecycle.tables.rows import Rows, Stored

__all__ = ["Snapshot", "UndoLog"]

Key = TypeVar("Key", bound=Hashable)
Row = TypeVar("Row")


class _UndoSegment(Generic[Key, Row]):
    """The rows that were overwritten between one snapshot and the next one."""

    __slots__ = ("__weakref__", "in_use", "newer", "older", "undo")

    def __init__(self, older: "ref[_UndoSegment[Key, Row]] | None") -> None:
        self.undo: dict[Key, tuple[Row, int] | None] = {}
        """The rows before the writes, by key; None if there was none."""
        self.newer: _UndoSegment[Key, Row] | None = None
        self.older = older
        self.in_use = True


class UndoLog(Generic[Key, Row]):
    """What to undo for existing snapshots: a segment for each, the oldest first.

    A write costs one entry in the newest segment. Everything but reading happens in the thread of the table.
    """

    __slots__ = ("_newest", "_released")

    def __init__(self) -> None:
        self._newest: ref[_UndoSegment[Key, Row]] | None = None
        self._released: deque[ref[_UndoSegment[Key, Row]]] = deque()

    def add(self) -> _UndoSegment[Key, Row]:
        """Return a new segment for later writes; it exists while an object references it or an older one."""
        while self._released:
            if (released := self._released.popleft()()) is not None:
                self._join(released)
        before = self._newest
        older = before() if before is not None else None
        segment = _UndoSegment(before if older is not None else None)
        if older is not None:
            older.newer = segment
            if not older.in_use:
                self._join(older)
        self._newest = ref(segment)
        return segment

    def release(self, segment: _UndoSegment[Key, Row]) -> None:
        """Drop a segment without snapshots. May be called in any thread."""
        segment.in_use = False
        if segment.older is not None and segment.older() is not None:
            self._released.append(ref(segment))

    def note(self, keys: Iterable[Key], rows: Stored[Key, Row]) -> None:
        """Record the rows with these keys before they are overwritten."""
        if (newest := self._newest) is None:
            return
        if (segment := newest()) is None:
            self._newest = None
            return
        undo = segment.undo
        for key in keys:
            if key not in undo:
                undo[key] = rows.get(key)

    @staticmethod
    def _join(segment: _UndoSegment[Key, Row]) -> None:
        """Merge a segment into the one before, unless writes are still recorded in it.

        The smaller one is copied into the larger one: however many snapshots are made and dropped, a write is
        copied only a few times.
        """
        newer, older = segment.newer, segment.older() if segment.older is not None else None
        if newer is None:
            return
        newer.older = segment.older
        if older is None:
            return
        if len(older.undo) < len(segment.undo):
            segment.undo.update(older.undo)
            older.undo = segment.undo
        else:
            for key, row in segment.undo.items():
                older.undo.setdefault(key, row)
        older.newer = newer  # last, since another thread may be following these links


class Snapshot(Rows[Key, Row]):
    """The rows of a table at one revision; later writes are not visible.

    Taking one is free; reading a key costs little more than in the table. Reading all rows copies them once;
    the first use of an index builds it, which costs about as much as writing the rows. It may be read in
    another thread.
    """

    __slots__ = (
        "__weakref__",
        "_copy",
        "_indexes",
        "_rows",
        "_segment",
        "_specs",
        "_undo_log",
        "name",
        "revision",
    )

    def __init__(
        self,
        name: str,
        rows: Stored[Key, Row],
        revision: int,
        indexes: Mapping[str, IndexSpec[Row]],
        undo_log: UndoLog[Key, Row],
    ) -> None:
        self.name = name
        self.revision = revision
        self._rows = rows  # the table's current rows
        self._specs = indexes
        self._indexes: dict[str, Index[Key, Row]] | None = None
        self._copy: Stored[Key, Row] | None = None
        self._undo_log = undo_log
        self._segment: _UndoSegment[Key, Row] | None = undo_log.add()

    def __del__(self) -> None:
        if self._segment is not None:
            self._undo_log.release(self._segment)

    def get(self, key: Key) -> Row | None:
        """Return the row with this key."""
        entry = self._entry(key)
        return None if entry is None else entry[0]

    def __contains__(self, key: Key) -> bool:
        return self._entry(key) is not None

    def __iter__(self) -> Iterator[tuple[Key, Row, int]]:
        """As items(), one by one: for work in slices with pauses between them."""
        return ((key, row, revision) for key, (row, revision) in self._current().items())

    def keys(self) -> Collection[Key]:
        """Return all keys, least recently changed first."""
        return self._current().keys()

    def item(self, key: Key) -> tuple[Key, Row, int] | None:
        """Return the row with this key, as items() returns it."""
        entry = self._entry(key)
        return None if entry is None else (key, *entry)

    def changed_since(self, older: "Snapshot[Key, Row]") -> list[Key]:
        """Return the keys that were added, changed or deleted since an older snapshot of the same table.

        Costs by the number of writes since, or by all rows if the older snapshot was read as a whole.
        """
        segment = older._segment  # noqa: SLF001  # of the same class, as below
        if segment is None or self._segment is None:
            before, now = older._current(), self._current()  # noqa: SLF001
            changed = [key for key, row in now.items() if row is not before.get(key)]
            return changed + [key for key in before if key not in now]
        keys: dict[Key, None] = {}
        while segment is not None and segment is not self._segment:
            keys |= dict.fromkeys(segment.undo)
            segment = segment.newer
        return [key for key in keys if self._entry(key) is not older._entry(key)]  # noqa: SLF001

    def _entry(self, key: Key) -> tuple[Row, int] | None:
        if self._copy is not None:
            return self._copy.get(key)
        segment = self._segment
        entry = self._rows.get(key)  # read before the undo log, since a write appends to that first
        while segment is not None:
            if key in segment.undo:
                return segment.undo[key]
            segment = segment.newer
        return entry

    def _current(self) -> Stored[Key, Row]:
        if self._copy is None:
            segment = self._segment
            self._copy = self._at_snapshot(self._rows.copy())
            self._segment = None
            if segment is not None:
                self._undo_log.release(segment)
        return self._copy

    def _at_snapshot(self, rows: Stored[Key, Row]) -> Stored[Key, Row]:
        """Return the table's rows with later writes undone, in their order at the snapshot."""
        undo: dict[Key, tuple[Row, int] | None] = {}
        segment = self._segment
        while segment is not None:
            undo = {**segment.undo.copy(), **undo}  # the oldest value applies
            segment = segment.newer
        if undo:
            for key in undo:
                rows.pop(key, None)
            restored = [(key, row) for key, row in undo.items() if row is not None]
            rows = dict(sorted([*rows.items(), *restored], key=_revision))
        return rows

    def _index(self, name: str) -> Index[Key, Row] | None:
        if self._indexes is None:
            self._indexes = {}
        if name not in self._indexes and (spec := self._specs.get(name)) is not None:
            index = index_of(self, name, spec)
            index.apply(index.plan({key: row for key, (row, _) in self._current().items()}))
            self._indexes[name] = index
        return self._indexes.get(name)


def _revision(item: tuple[object, tuple[object, int]]) -> int:
    return item[1][1]
