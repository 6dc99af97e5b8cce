"""The interface of all tables: reading, watching, waiting; and derived tables: map, filter, join …

All derived tables but those of derive() are incremental: reading one processes only the rows of its sources
that changed since it was last read. All of them share these rules:

* A derived table is read-only. Every read, and every watcher, sees the present contents of the sources.
* The functions have no side effects: the same rows give the same result. Their errors reach readers, never
  writers of a source; the table is unchanged then, and the next read tries again.
* Changes in quick succession are processed once, by key. An equal result changes nothing.
* A derived table is initialized when all its sources are.
* Creating one is free. The first read processes all rows.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, TypeVar

from lifecycle.tables.core import TableCore
from lifecycle.tables.derived.inputs import Input, Plan
from lifecycle.tables.indexes import IndexSpec

__all__ = ["Derived", "Incremental", "ReadTable"]

Key = TypeVar("Key", bound=Hashable)
Row = TypeVar("Row")
NewKey = TypeVar("NewKey", bound=Hashable)
New = TypeVar("New")
OtherKey = TypeVar("OtherKey", bound=Hashable)
Other = TypeVar("Other")
Value = TypeVar("Value", bound=Hashable)


class ReadTable(TableCore[Key, Row]):
    """The interface of all tables, writable or not: reading, watching, waiting, deriving tables."""

    def map(
        self, fn: Callable[[Row], New], *, name: str = "", indexes: Mapping[str, IndexSpec[New]] | None = None
    ) -> "ReadTable[Key, New]":
        """Return the results of `fn` for all rows, under the keys of the rows.

        They must not be None: use filter() first.
        """
        from lifecycle.tables.derived.rows import MapRows

        return Incremental(name or _name(self, fn, "mapped"), MapRows(fn).plan, self, indexes=indexes)

    def filter(
        self,
        predicate: Callable[[Row], object],
        *,
        name: str = "",
        indexes: Mapping[str, IndexSpec[Row]] | None = None,
    ) -> "ReadTable[Key, Row]":
        """Return the rows for which `predicate` is true, under their keys."""
        from lifecycle.tables.derived.rows import FilterRows

        name = name or _name(self, predicate, "filtered")
        return Incremental(name, FilterRows(predicate).plan, self, indexes=indexes)

    def flat_map(
        self,
        fn: Callable[[Row], Iterable[New]],
        *,
        key: Callable[[New], NewKey],
        name: str = "",
        indexes: Mapping[str, IndexSpec[New]] | None = None,
    ) -> "ReadTable[NewKey, New]":
        """Return all results of `fn` for all rows, any number for each row, by `key` of the result.

        Two results must not have the same key: reading raises ValueError with the rows of both. If several
        rows yield the same result, add the row's key to the result's key and group() the results.
        """
        from lifecycle.tables.derived.rows import FlatMapRows

        name = name or _name(self, fn, "flat-mapped")
        return Incremental(name, FlatMapRows(fn, key).plan, self, indexes=indexes)

    def rekey(
        self,
        key: Callable[[Row], NewKey],
        *,
        name: str = "",
        indexes: Mapping[str, IndexSpec[Row]] | None = None,
    ) -> "ReadTable[NewKey, Row]":
        """Return the same rows under another key. If two have the same key, reading raises ValueError."""
        return self.flat_map(
            lambda row: (row,), key=key, name=name or _name(self, key, "rekeyed"), indexes=indexes
        )

    def group(
        self,
        by: Callable[[Row], Value],
        into: Callable[[Value, list[Row]], New],
        *,
        name: str = "",
        indexes: Mapping[str, IndexSpec[New]] | None = None,
    ) -> "ReadTable[Value, New]":
        """For every value of `by`, the result of `into` for that value and the rows with it.

        The rows come least recently changed first, as in all(): sort them if the order matters. A changed row
        costs a run of `into` over its group; for large groups, aggregate() costs less.
        """
        from lifecycle.tables.derived.groups import GroupRows

        name = name or _name(self, into, "grouped")
        return Incremental(name, GroupRows(by, into).plan, self, indexes=indexes)

    def aggregate(
        self,
        by: Callable[[Row], Value],
        *,
        zero: Callable[[Value], New],
        add: Callable[[New, Row], New],
        subtract: Callable[[New, Row], New],
        name: str = "",
        indexes: Mapping[str, IndexSpec[New]] | None = None,
    ) -> "ReadTable[Value, New]":
        """For every value of `by`, the sum of the rows with it, under the value as key.

        `zero(value)` is the empty sum; `add` and `subtract` return a new sum and do not change the old one.
        `subtract` must undo `add` exactly, in any order, as for numbers and counts, but not for floats. A
        changed row costs one call of each, however large its group. A value without rows has no sum.
        """
        from lifecycle.tables.derived.groups import AggregateRows

        name = name or _name(self, by, "aggregated")
        return Incremental(name, AggregateRows(by, zero, add, subtract).plan, self, indexes=indexes)

    def join(
        self,
        other: "ReadTable[OtherKey, Other]",
        into: Callable[[Row, Other], New],
        *,
        on: Callable[[Row], OtherKey | None] | None = None,
        name: str = "",
        indexes: Mapping[str, IndexSpec[New]] | None = None,
    ) -> "ReadTable[Key, New]":
        """For every row with a counterpart, the result of `into` for both, under the row's key.

        The counterpart is the row of `other` with the key that `on` returns, None for no counterpart; without
        `on`, with the same key. A changed row of `other` costs a run of `into` for each row that is joined to
        it.
        """
        from lifecycle.tables.derived.joins import JoinRows

        name = name or _name(self, into, "joined")
        return Incremental(name, JoinRows(into, on, inner=True).plan, self, other, indexes=indexes)

    def left_join(
        self,
        other: "ReadTable[OtherKey, Other]",
        into: Callable[[Row, Other | None], New],
        *,
        on: Callable[[Row], OtherKey | None] | None = None,
        name: str = "",
        indexes: Mapping[str, IndexSpec[New]] | None = None,
    ) -> "ReadTable[Key, New]":
        """As join(), for every row: `into` receives None if there is no counterpart."""
        from lifecycle.tables.derived.joins import JoinRows

        name = name or _name(self, into, "joined")
        return Incremental(name, JoinRows(into, on, inner=False).plan, self, other, indexes=indexes)

    def outer_join(
        self,
        other: "ReadTable[Key, Other]",
        into: Callable[[Row | None, Other | None], New],
        *,
        name: str = "",
        indexes: Mapping[str, IndexSpec[New]] | None = None,
    ) -> "ReadTable[Key, New]":
        """For every key of either table, the result of `into` for both rows; None if a row is missing."""
        from lifecycle.tables.derived.joins import OuterJoinRows

        name = name or _name(self, into, "joined")
        return Incremental(name, OuterJoinRows(into).plan, self, other, indexes=indexes)

    def derive(
        self,
        fn: Callable[[list[Row]], Mapping[NewKey, New]],
        *,
        name: str = "",
        indexes: Mapping[str, IndexSpec[New]] | None = None,
    ) -> "Derived[NewKey, New]":
        """Return a table that equals ``fn(rows)``, a mapping from key to row, recomputed after any change.

        For small tables, and for operations that the others do not cover. Derived(...) takes several sources.
        """
        return Derived(name or _name(self, fn, "derived"), fn, self, indexes=indexes)


class _Following(ReadTable[Key, Row]):
    """A derived table. It is initialized when all its sources are."""

    def __init__(
        self, name: str, *sources: ReadTable[Any, Any], indexes: Mapping[str, IndexSpec[Row]] | None = None
    ) -> None:
        super().__init__(name, indexes)
        self._sources = sources
        self._stale = True

    @property
    def uninitialized_by(self) -> list[str]:
        """The sources that are not initialized."""
        return list(dict.fromkeys(name for source in self._sources for name in source.uninitialized_by))

    def check_open(self) -> None:
        """Raise TableClosedError if it or one of its sources is closed."""
        super().check_open()
        for source in self._sources:
            source.check_open()

    async def wait_initialized(self) -> None:
        """Wait until every source is initialized."""
        for source in self._sources:
            await source.wait_initialized()

    def wake(self) -> None:
        """A source may have changed: watchers of this table must read it."""
        if not self._stale:
            self._stale = True
            for listener in self._listening():
                listener.wake()

    def _replace(self, writes: Mapping[Key, Row | None]) -> None:
        self._stale = False
        try:
            self._commit(writes)
        except BaseException:
            self._stale = True
            raise


class Incremental(_Following[Key, Row]):
    """Processes the changes of its sources when it is read: all or, if something raises, none.

    ``plan(name, input of the first source, ...)`` returns the rows to write, None for rows to delete, and a
    function that is called after the write.
    """

    def __init__(
        self,
        name: str,
        plan: Callable[..., Plan[Key, Row]],
        *sources: ReadTable[Any, Any],
        indexes: Mapping[str, IndexSpec[Row]] | None = None,
    ) -> None:
        super().__init__(name, *sources, indexes=indexes)
        self._plan = plan
        self._inputs = tuple(Input(source, self) for source in sources)

    def _refresh(self) -> None:
        writes, remember = self._plan(self.name, *self._inputs)
        self._replace(writes)
        remember()
        for source in self._inputs:
            source.clear()


class Derived(_Following[Key, Row]):
    """Equals ``fn(rows of the first source, rows of the second, ...)``, a mapping from key to row.

    Any change of a source costs a run over all rows. Reading raises the error of the function, which runs
    again at the next read. It is initialized when all its sources are.
    """

    def __init__(
        self,
        name: str,
        fn: Callable[..., Mapping[Key, Row]],
        *sources: ReadTable[Any, Any],
        indexes: Mapping[str, IndexSpec[Row]] | None = None,
    ) -> None:
        super().__init__(name, *sources, indexes=indexes)
        self._fn = fn
        for source in sources:
            source._listen(self)  # noqa: SLF001  # tables are one mechanism

    def notify(self, changed: Mapping[Key, Any], revision: int) -> None:
        """A source has changed."""
        del changed, revision
        self.wake()

    def _refresh(self) -> None:
        desired = self._fn(*(source.all() for source in self._sources))
        writes: dict[Key, Row | None] = dict.fromkeys(key for key in self._rows if key not in desired)
        writes.update(desired)
        self._replace(writes)


def _name(source: "ReadTable[Any, Any]", fn: Callable[..., object], otherwise: str) -> str:
    """Return the name of the function, or of the operation if the function has none."""
    named = getattr(fn, "__name__", "<")
    return f"{source.name}-{otherwise if named.startswith('<') else named}"
