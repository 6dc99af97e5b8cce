"""BPF maps written from tables: the one way, for reconcilers and for who must have written before it returns.

Why: a pod's rows must be there before its link comes up, so its ADD writes them at once; what the kernel
     refuses or others change is put right by the same target later.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, Generic, NamedTuple, Protocol, Self, TypeVar

from anyio import to_thread

from cells.maps.map import Map
from lifecycle import BatchError, Logger, NotStartedError, Reconciler, Table

__all__ = ["BYTES", "Codec", "MapTable", "MapTarget", "record"]

T = TypeVar("T")
Key = TypeVar("Key")
Row = TypeVar("Row")
Value = TypeVar("Value")


class Codec(NamedTuple, Generic[T]):
    """How a key or value is written as the bytes of a map; the two are inverse to each other."""

    pack: Callable[[T], bytes]
    unpack: Callable[[bytes], T]


class _Record(Protocol):
    def pack(self) -> bytes: ...
    @classmethod
    def unpack(cls, data: bytes) -> Self: ...


R = TypeVar("R", bound=_Record)


def record(kind: type[R]) -> Codec[R]:
    """The codec of a record of :mod:`cells.maps.records`, which a test holds to the C."""
    return Codec(kind.pack, kind.unpack)


BYTES: Final[Codec[bytes]] = Codec(bytes, bytes)
"""Of keys or values that have no members."""


_BATCH: Final = 8
"""Rows from which a call for all of them takes less than one for each."""


def _first(_: object) -> int:
    return 0


class MapTarget(Generic[Key, Row, Value]):
    """A reconciler's target: a BPF map, or one for each family, by the codecs of its keys and values.

    Several rows void the verdicts that follow from them once.
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
        """``maps`` returns them once they are open; ``which`` of them has a key. ``value_of`` a row."""
        self._maps = maps
        self._key = key
        self._value = value
        self._which = which
        self.value_of = value_of
        """What the map has of a row."""

    @property
    def name(self) -> str:
        """Of the map, or of the first."""
        return self._maps()[0].spec.name

    async def observe(self) -> Mapping[Key, Value]:
        """Every row of the maps, read in a thread. Raises OSError."""
        return await to_thread.run_sync(self._read)

    def matches(self, row: Row, observed: Value) -> bool:
        """Whether the map has the row's entries."""
        return self.value_of(row) == observed

    async def put(self, batch: Mapping[Key, Row]) -> None:
        """Write rows. Raises BatchError."""
        self.write_now(batch)

    async def drop(self, batch: Collection[Key]) -> None:
        """Remove rows. Raises BatchError."""
        self.write_now(dict.fromkeys(batch))

    def write_now(self, rows: Mapping[Key, Row | None]) -> None:
        """Write rows, or remove those that are None. Raises BatchError, with an OSError for each."""
        maps = self._maps()
        if len(rows) == 1:  # as nearly always: verdicts are void once anyway
            failures = self._write(maps, rows)
        else:
            with maps[0].once():
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
        """Write all rows by one call for each map; False if one is to be removed, or the kernel refuses."""
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
            return False  # one by one, each with its own error
        return True

    def lookup(self, key: Key) -> Value | None:
        """What the datapath finds for the key: in a trie, that of the longest prefix. Raises OSError."""
        found = self._maps()[self._which(key)].lookup(self._key.pack(key))
        return None if found is None else self._value.unpack(found)

    def _read(self) -> dict[Key, Value]:
        found: dict[Key, Value] = {}
        for table in self._maps():
            with table.reopened() as own:
                found |= {self._key.unpack(key): self._value.unpack(value) for key, value in own.items()}
        return found


class MapTable(Generic[Key, Row, Value]):
    """A table and its map as one: a row is in the map when :meth:`write` returns.

    Beside it a reconciler sweeps the whole map, for what others changed and for what the kernel refused. What
    an earlier agent left goes by a sweep too, not before all sources of the table are known.
    """

    def __init__(
        self, table: Table[Key, Row], target: MapTarget[Key, Row, Value], log: Logger, *, every: float
    ) -> None:
        """``every``: seconds between two sweeps."""
        self._table = table
        self._target = target
        self._log = log
        self._left: dict[Key, Value] | None = None
        self.reconciler: Reconciler[Key, Row] = Reconciler(table, self, full_every=every, write_through=True)

    async def read(self) -> None:
        """Take note of what an earlier agent left. Raises OSError."""
        self.left(await self._target.observe())

    def left(self, rows: Mapping[Key, Value]) -> None:
        """These rows are what an earlier agent left."""
        self._left = dict(rows)

    @property
    def leftovers(self) -> dict[Key, Value]:
        """Rows of the map without a row in the table; raises NotStartedError before they were read."""
        if self._left is None:
            raise NotStartedError(
                f"{self._table.name} was written before its map was read: depend on its cell"
            )
        return self._left

    def lookup(self, key: Key) -> Value | None:
        """What the datapath finds for the key. Raises OSError."""
        return self._target.lookup(key)

    def write(self, rows: Mapping[Key, Row | None], *, undo: bool = False) -> None:
        """Write these rows to table and map, or delete where it is None; what is right is not written.

        Raises OSError when the kernel refuses one, once all were tried: the next sweep tries it again. With
        ``undo`` the table is as before then, and the map follows with the sweep.
        """
        left, get = self.leftovers, self._table.get
        before: dict[Key, Row | None] = {}
        differ = []
        for key, row in rows.items():
            was = before[key] = get(key)
            if was is not None or left:
                known = left.get(key) if was is None else self._target.value_of(was)
                if self._holds(key, row, known):
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
            raise next(iter(error.failures.values())) from error
        if left:
            for key in rows:
                left.pop(key, None)

    def adopt(self, rows: Mapping[Key, Row]) -> None:
        """These rows are what the map has already: they are in the table, and no leftovers any more."""
        self._put(rows)
        for key in rows:
            self.leftovers.pop(key, None)

    def _put(self, rows: Mapping[Key, Row | None]) -> None:
        if len(rows) == 1:  # as nearly always, and pods wait for it
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

    def _holds(self, key: Key, row: Row | None, known: Value | None) -> bool:
        """Whether the map has this already: ``known`` is what we wrote or read, and it is found."""
        if row is None or known is None:
            return row is None and known is None
        wanted = self._target.value_of(row)
        return known == wanted and self._target.lookup(key) == wanted

    # The reconciler's target

    async def observe(self) -> Mapping[Key, Value]:
        """Every row of the map. Raises OSError."""
        return await self._target.observe()

    def matches(self, row: Row, observed: Value) -> bool:
        """Whether the map has the row's entries."""
        return self._target.matches(row, observed)

    async def put(self, batch: Mapping[Key, Row]) -> None:
        """Write rows. Raises BatchError."""
        self.write_now(batch)

    async def drop(self, batch: Collection[Key]) -> None:
        """Remove rows. Raises BatchError."""
        self.write_now(dict.fromkeys(batch))
        self._log.info(f"removed unclaimed rows of {self._target.name}", rows=_some(batch))

    def write_now(self, rows: Mapping[Key, Any]) -> None:
        """Write rows, or remove those that are None. Raises BatchError."""
        self._target.write_now(rows)
        if self._left:
            for key in rows:
                self._left.pop(key, None)


def _some(keys: Iterable[object], most: int = 8) -> str:
    """Keys for a log: the first, and how many more."""
    shown = [str(key) for key in keys]
    return ", ".join(shown[:most]) + (f" and {len(shown) - most} more" if len(shown) > most else "")
