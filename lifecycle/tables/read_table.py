"""What every table lets one do: read, watch, wait; and tables from tables: map, filter, group, join …

All tables made of others but those of derive() are incremental: reading one works through the rows of its
sources that changed since it was last read, and through no others. What they have in common:

* It is read-only, and every reading shows what the sources hold at that moment; so do its watchers.
* The functions are pure: the same rows give the same result. What one raises reaches who reads, never who
  writes a source; nothing has changed then, and the next reading tries again.
* A burst of changes is worked through once, by key. A result equal to the one before is not a change.
* It is initialized when all its sources are.
* Making one costs nothing. The first reading works through all rows.
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
    """What every table offers, whether or not it can be written: reading, watching, waiting, deriving
    tables."""

    def map(
        self, fn: Callable[[Row], New], *, name: str = "", indexes: Mapping[str, IndexSpec[New]] | None = None
    ) -> "ReadTable[Key, New]":
        """The result of `fn` for every row, under the row's key. It is never None: filter() first."""
        from lifecycle.tables.derived.rows import MapRows

        return Incremental(name or _name(self, fn, "mapped"), MapRows(fn).plan, self, indexes=indexes)

    def filter(
        self,
        predicate: Callable[[Row], object],
        *,
        name: str = "",
        indexes: Mapping[str, IndexSpec[Row]] | None = None,
    ) -> "ReadTable[Key, Row]":
        """The rows of which `predicate` is true, under their keys."""
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
        """All that `fn` gives for the rows, none, one or many for each, by `key` of the result.

        No two results may have the same key: reading raises ValueError, naming the rows they were made of.
        Where several rows give the same thing, put the row's key in the result's key and group() the results.
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
        """The same rows under another key. No two may have the same: reading raises ValueError then."""
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
        """For every value of `by`, and under it as the key: what `into` makes of it and of the rows with it.

        They come least recently changed first, as all() gives them: sort them where the order shows. A
        changed row costs a run of `into` over its group; for large groups, aggregate() costs less.
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
        """For every value of `by`, and under it as the key: the rows with it, added up one by one.

        `zero(value)` is where adding begins; `add` and `subtract` give a new sum and leave the old one as it
        is. `subtract` undoes `add` exactly, in any order: numbers and counts do, floats do not. A changed row
        costs one of each, however large its group. A value that no row has any more has no sum.
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
        """For every row that has a counterpart: what `into` makes of both, under the row's key.

        The counterpart is the row of `other` with the key that `on` gives, None for no counterpart; without
        `on`, with the same key. A changed row of `other` costs a run of `into` for each row that it is joined
        to.
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
        """As join(), for every row: `into` is given None where there is no counterpart."""
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
        """For every key of either table: what `into` makes of its two rows; None stands for no row."""
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
        """A table that always equals ``fn(rows)``, a mapping from key to row: all of it after any change.

        For small tables, and for what none of the others can say. Derived(...) takes several sources.
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
        """Who is still to be waited for."""
        return list(dict.fromkeys(name for source in self._sources for name in source.uninitialized_by))

    def check_open(self) -> None:
        """Raise TableClosedError when it, or one of its sources, is closed."""
        super().check_open()
        for source in self._sources:
            source.check_open()

    async def wait_initialized(self) -> None:
        """Wait until every source is initialized."""
        for source in self._sources:
            await source.wait_initialized()

    def wake(self) -> None:
        """A source may have changed: watchers of this table have to read it."""
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
    """Works through what changed in its sources when it is read: all or, if something raises, nothing.

    ``plan(name, input of the first source, ...)`` gives what to write, None for what is to be deleted, and a
    function that is called once it is written.
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
        for one in self._inputs:
            one.worked_through()


class Derived(_Following[Key, Row]):
    """Equals ``fn(rows of the first source, rows of the second, ...)``, a mapping from key to row.

    Any change of a source costs a run over all rows. What reading raises is what the function raised; it is
    run again at the next reading. It is initialized when all its sources are.
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
        wanted = self._fn(*(source.all() for source in self._sources))
        writes: dict[Key, Row | None] = dict.fromkeys(key for key in self._rows if key not in wanted)
        writes.update(wanted)
        self._replace(writes)


def _name(source: "ReadTable[Any, Any]", fn: Callable[..., object], otherwise: str) -> str:
    """Of the function; those without a name of their own go by what is done."""
    named = getattr(fn, "__name__", "<")
    return f"{source.name}-{otherwise if named.startswith('<') else named}"
