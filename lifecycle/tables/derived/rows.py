"""Derived tables of single source rows: map(), filter() and flat_map()."""

from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

from lifecycle.tables.derived.inputs import Input, Plan, no_state

__all__ = ["FilterRows", "FlatMapRows", "MapRows"]

Key = TypeVar("Key", bound=Hashable)
Row = TypeVar("Row")
NewKey = TypeVar("NewKey", bound=Hashable)
New = TypeVar("New")


class MapRows(Generic[Key, Row, New]):
    """Applies a function to each row."""

    __slots__ = ("_fn",)

    def __init__(self, fn: Callable[[Row], New]) -> None:
        self._fn = fn

    def plan(self, table: str, source: Input[Key, Row]) -> Plan[Key, New]:
        """Compute the changed rows. Raises TypeError if the function returns None."""
        rows, fn = source.rows(), self._fn
        writes: dict[Key, New | None] = {}
        for key in source.changed:
            if (entry := rows.get(key)) is None:
                writes[key] = None
            elif (new := fn(entry[0])) is None:
                raise TypeError(f"table {table}: {key!r} is mapped to None; filter() such rows first")
            else:
                writes[key] = new
        return writes, no_state


class FilterRows(Generic[Key, Row]):
    """Selects the rows that satisfy a predicate."""

    __slots__ = ("_predicate",)

    def __init__(self, predicate: Callable[[Row], object]) -> None:
        self._predicate = predicate

    def plan(self, table: str, source: Input[Key, Row]) -> Plan[Key, Row]:
        """Compute the changed rows."""
        del table
        rows, predicate = source.rows(), self._predicate
        writes: dict[Key, Row | None] = {}
        for key in source.changed:
            entry = rows.get(key)
            writes[key] = entry[0] if entry is not None and predicate(entry[0]) else None
        return writes, no_state


class FlatMapRows(Generic[Key, Row, NewKey, New]):
    """Applies a function with any number of results to each row."""

    __slots__ = ("_fn", "_key", "_results_of", "_source_of")

    def __init__(self, fn: Callable[[Row], Iterable[New]], key: Callable[[New], NewKey]) -> None:
        self._fn = fn
        self._key = key
        self._results_of: dict[Key, tuple[NewKey, ...]] = {}
        """Key of a row -> keys of its results."""
        self._source_of: dict[NewKey, Key] = {}
        """Key of a result -> key of its row."""

    def plan(self, table: str, source: Input[Key, Row]) -> Plan[NewKey, New]:
        """Compute the changed results. Raises ValueError if two results have one key."""
        rows, changed = source.rows(), source.changed
        writes: dict[NewKey, New | None] = dict.fromkeys(
            result for key in changed for result in self._results_of.get(key, ())
        )
        results_of: dict[Key, tuple[NewKey, ...]] = {}
        sources: dict[NewKey, Key] = {}
        for key in changed:
            entry = rows.get(key)
            results = {} if entry is None else self._results(table, key, entry[0])
            for result in results:
                if result in sources:
                    raise _same_key(table, result, sources[result], key)
                if (owner := self._source_of.get(result, key)) not in changed:
                    raise _same_key(table, result, owner, key)
                sources[result] = key
            results_of[key] = tuple(results)
            writes |= results

        def remember() -> None:
            for key, results in results_of.items():
                for result in self._results_of.pop(key, ()):
                    del self._source_of[result]
                if results:
                    self._results_of[key] = results
            self._source_of.update(sources)

        return writes, remember

    def _results(self, table: str, key: Key, row: Row) -> dict[NewKey, New]:
        results: dict[NewKey, New] = {}
        for new in self._fn(row):
            if new is None:
                raise TypeError(f"table {table}: {key!r} yields None; omit missing results")
            if (result := self._key(new)) in results:
                raise _same_key(table, result, key, key)
            results[result] = new
        return results


def _same_key(table: str, result: Hashable, first: Hashable, second: Hashable) -> ValueError:
    sources = f"{first!r} and {second!r}" if first != second else f"{first!r} twice"
    return ValueError(
        f"table {table}: {result!r} is the key of results of {sources}; "
        "make the key distinguish them, or group() the results"
    )
