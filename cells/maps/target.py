"""BPF maps written from tables: by reconcilers, and directly before a call returns.

Why: a pod's entries must exist before its link comes up, so its ADD writes them at once. A later sweep with
the same target repairs what the kernel refused or other programs changed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, Generic, NamedTuple, Protocol, Self, TypeVar

from anyio import to_thread

from cells.maps.map import Map
from lifecycle import BatchError, Hook, Jobs, Lifecycle, Logger, NotStartedError, Reconciler, Table, Tables

__all__ = ["BYTES", "Codec", "MapTable", "MapTarget", "record"]

T = TypeVar("T")
Key = TypeVar("Key")
Row = TypeVar("Row")
Value = TypeVar("Value")


class Codec(NamedTuple, Generic[T]):
    """Converts a key or value to the bytes of a map and back."""

    pack: Callable[[T], bytes]
    unpack: Callable[[bytes], T]


class _Record(Protocol):
    def pack(self) -> bytes: ...
    @classmethod
    def unpack(cls, data: bytes) -> Self: ...


R = TypeVar("R", bound=_Record)


def record(kind: type[R]) -> Codec[R]:
    """The codec of a record of :mod:`cells.maps.records`. A test compares the records with the C structs."""
    return Codec(kind.pack, kind.unpack)


BYTES: Final[Codec[bytes]] = Codec(bytes, bytes)
"""The codec of keys or values that stay bytes."""


_BATCH: Final = 8
"""From this number of rows on, one batch is faster than single calls."""


def _first(_: object) -> int:
    return 0


class MapTarget(Generic[Key, Row, Value]):
    """A reconciler's target: one BPF map, or one per address family.

    A write of several rows invalidates the verdicts that depend on them once.
    """

    def __init__(
        self,
        maps: Callable[[], Sequence[Map]],
        key: Codec[Key],
        value: Codec[Value],
        value_of: Callable[[Row], Value],
        *,
        which: Callable[[Key], int] = _first,
    ) -> None:
        """``maps`` returns the open maps, ``which`` a key's index in them, ``value_of`` a row's value."""
        self._maps = maps
        self._key = key
        self._value = value
        self._which = which
        self.value_of = value_of
        """Computes the map's value of a row."""

    @property
    def name(self) -> str:
        """Name of the first map."""
        return self._maps()[0].spec.name

    async def observe(self) -> Mapping[Key, Value]:
        """Read all entries of the maps, in a thread. Raises OSError."""
        return await to_thread.run_sync(self._read)

    def matches(self, row: Row, observed: Value) -> bool:
        """Whether the value in the map is up to date."""
        return self.value_of(row) == observed

    async def put(self, batch: Mapping[Key, Row]) -> None:
        """Write rows. Raises BatchError."""
        self.write_now(batch)

    async def drop(self, batch: Collection[Key]) -> None:
        """Delete entries. Raises BatchError."""
        self.write_now(dict.fromkeys(batch))

    def write_now(self, rows: Mapping[Key, Row | None]) -> None:
        """Write rows; delete entries of keys with None. BatchError, with an OSError for each key."""
        maps = self._maps()
        if len(rows) == 1:  # the usual case: verdicts are invalidated once anyway
            failures = self._write(maps, rows)
        else:
            with maps[0].invalidate_once():
                failures = self._write(maps, rows)
        if failures:
            raise BatchError(failures)

    def _write(self, maps: Sequence[Map], rows: Mapping[Key, Row | None]) -> dict[Any, Exception]:
        failures: dict[Any, Exception] = {}
        if len(rows) >= _BATCH and self._put_batch(maps, rows):
            return failures
        for key, row in rows.items():
            table, packed = maps[self._which(key)], self._key.pack(key)
            try:
                if row is None:
                    table.delete(packed)
                else:
                    table.update(packed, self._value.pack(self.value_of(row)))
            except OSError as error:
                failures[key] = error
        return failures

    def _put_batch(self, maps: Sequence[Map], rows: Mapping[Key, Row | None]) -> bool:
        """Write all rows, one call per map; False if a row must be deleted or the kernel refuses."""
        entries: list[tuple[list[bytes], list[bytes]]] = [([], []) for _ in maps]
        for key, row in rows.items():
            if row is None:
                return False
            keys, values = entries[self._which(key)]
            keys.append(self._key.pack(key))
            values.append(self._value.pack(self.value_of(row)))
        try:
            for table, (keys, values) in zip(maps, entries, strict=True):
                table.update_all(keys, values)
        except OSError:
            return False  # single writes find the error of each row
        return True

    def lookup(self, key: Key) -> Value | None:
        """The value that the datapath finds: in a trie, that of the longest prefix. Raises OSError."""
        found = self._maps()[self._which(key)].lookup(self._key.pack(key))
        return None if found is None else self._value.unpack(found)

    def _read(self) -> dict[Key, Value]:
        entries: dict[Key, Value] = {}
        for table in self._maps():
            with table.reopened() as own:
                entries |= {self._key.unpack(key): self._value.unpack(value) for key, value in own.items()}
        return entries


class MapTable(Generic[Key, Row, Value]):
    """A table and its BPF map: a row is in the map when :meth:`write` returns.

    A reconciler also sweeps the whole map, and repairs what other programs changed or the kernel refused.
    Entries of an earlier agent (leftovers) are deleted by a sweep once all sources of the table have listed
    their rows.
    """

    def __init__(
        self, table: Table[Key, Row], target: MapTarget[Key, Row, Value], log: Logger, *, every: float
    ) -> None:
        """``every``: seconds between sweeps."""
        self._table = table
        self._target = target
        self._log = log
        self._every = every
        self._left: dict[Key, Value] | None = None
        self._sweep_soon: Callable[[], object] = lambda: None  # until register()
        self.reconciler: Reconciler[Key, Row] = Reconciler(table, self, full_every=every, write_through=True)

    def register(self, what: str, *, lifecycle: Lifecycle, jobs: Jobs, tables: Tables) -> None:
        """Register the hook that reads the map and the timer that sweeps it.

        The map is swept when all sources of the table have listed their rows, at each interval, and after the
        kernel refused an entry. ``what`` names the contents in the hook's name.
        """
        tables.add(self.reconciler.statuses)
        lifecycle.append(Hook(f"read {what}", self.read))
        self._sweep_soon = jobs.timer("sweep", self.reconciler.sweep, self._every).trigger
        self._sweep_soon()

    async def read(self) -> None:
        """Read the entries of an earlier agent. Raises OSError."""
        self.left(await self._target.observe())

    def left(self, rows: Mapping[Key, Value]) -> None:
        """Set the leftovers: the entries of an earlier agent."""
        self._left = dict(rows)

    @property
    def leftovers(self) -> dict[Key, Value]:
        """Entries of the map without a row in the table. Raises NotStartedError before the map is read."""
        if self._left is None:
            raise NotStartedError(
                f"{self._table.name} was written before its map was read: depend on its cell"
            )
        return self._left

    def lookup(self, key: Key) -> Value | None:
        """The value that the datapath finds for the key. Raises OSError."""
        return self._target.lookup(key)

    def write(self, rows: Mapping[Key, Row | None], *, undo: bool = False) -> None:
        """Write rows to the table and the map; None deletes. Rows that are up to date are not written.

        Raises OSError, after all rows were tried, if the kernel refuses one: the next sweep retries it. With
        ``undo`` the table gets its previous rows then, and the sweep restores the map.
        """
        left, get = self.leftovers, self._table.get
        before: dict[Key, Row | None] = {}
        differ = []
        for key, row in rows.items():
            previous = before[key] = get(key)
            if previous is not None or left:
                stored = left.get(key) if previous is None else self._target.value_of(previous)
                if self._is_current(key, row, stored):
                    continue
            elif row is None:
                continue
            differ.append(key)
        self._put(rows)
        try:
            if differ:
                self.reconciler.write_now(differ)
        except BatchError as error:
            if undo:
                self._put(before)
            self._sweep_soon()
            raise next(iter(error.failures.values())) from error
        if left:
            for key in rows:
                left.pop(key, None)

    def adopt(self, rows: Mapping[Key, Row]) -> None:
        """Put leftovers into the table as these rows, without writing: the map has them already."""
        self._put(rows)
        for key in rows:
            self.leftovers.pop(key, None)

    def _put(self, rows: Mapping[Key, Row | None]) -> None:
        if len(rows) == 1:  # the usual case, and pods wait for it
            ((key, row),) = rows.items()
            if row is None:
                self._table.delete(key)
            else:
                self._table.put(row)
            return
        with self._table.txn() as table:
            for key, row in rows.items():
                if row is None:
                    table.delete(key)
                else:
                    table.put(row)

    def _is_current(self, key: Key, row: Row | None, stored: Value | None) -> bool:
        """Whether the map is up to date: ``stored``, written or read last, is correct and still found."""
        if row is None or stored is None:
            return row is None and stored is None
        wanted = self._target.value_of(row)
        return stored == wanted and self._target.lookup(key) == wanted

    # The reconciler's target

    async def observe(self) -> Mapping[Key, Value]:
        """Read all entries of the map. Raises OSError."""
        return await self._target.observe()

    def matches(self, row: Row, observed: Value) -> bool:
        """Whether the value in the map is up to date."""
        return self._target.matches(row, observed)

    async def put(self, batch: Mapping[Key, Row]) -> None:
        """Write rows. Raises BatchError."""
        self.write_now(batch)

    async def drop(self, batch: Collection[Key]) -> None:
        """Delete entries. Raises BatchError."""
        self.write_now(dict.fromkeys(batch))
        self._log.info(f"removed unclaimed rows of {self._target.name}", rows=_some(batch))

    def write_now(self, rows: Mapping[Key, Any]) -> None:
        """Write rows; delete the entries of keys with None. Raises BatchError."""
        self._target.write_now(rows)
        if self._left:
            for key in rows:
                self._left.pop(key, None)


def _some(keys: Iterable[object]) -> str:
    """The first keys, and the number of the others, for a log message."""
    shown = [str(key) for key in keys]
    return ", ".join(shown[:8]) + (f" and {len(shown) - 8} more" if len(shown) > 8 else "")
