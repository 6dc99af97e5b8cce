"""What follows from each row of a table alone: map, filter, flat_map."""

from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

from lifecycle.tables.derived.inputs import Input, Plan, nothing_to_remember

__all__ = ["FilterRows", "FlatMapRows", "MapRows"]

Key = TypeVar("Key", bound=Hashable)
Row = TypeVar("Row")
NewKey = TypeVar("NewKey", bound=Hashable)
New = TypeVar("New")


class MapRows(Generic[Key, Row, New]):
    """The result of a function for every row."""

    __slots__ = ("_fn",)

    def __init__(self, fn: Callable[[Row], New]) -> None:
        self._fn = fn

    def plan(self, table: str, source: Input[Key, Row]) -> Plan[Key, New]:
        """What to write; raises TypeError when the function gives None."""
        rows, fn = source.rows(), self._fn
        writes: dict[Key, New | None] = {}
        for key in source.changed:
            if (found := rows.get(key)) is None:
                writes[key] = None
            elif (new := fn(found[0])) is None:
                raise TypeError(f"table {table}: {key!r} is mapped to None; filter() what has no result")
            else:
                writes[key] = new
        return writes, nothing_to_remember


class FilterRows(Generic[Key, Row]):
    """The rows of which a predicate is true."""

    __slots__ = ("_predicate",)

    def __init__(self, predicate: Callable[[Row], object]) -> None:
        self._predicate = predicate

    def plan(self, table: str, source: Input[Key, Row]) -> Plan[Key, Row]:
        """What to write."""
        del table
        rows, predicate = source.rows(), self._predicate
        writes: dict[Key, Row | None] = {}
        for key in source.changed:
            found = rows.get(key)
            writes[key] = found[0] if found is not None and predicate(found[0]) else None
        return writes, nothing_to_remember


class FlatMapRows(Generic[Key, Row, NewKey, New]):
    """All that a function gives for the rows."""

    __slots__ = ("_fn", "_given", "_giver", "_key")

    def __init__(self, fn: Callable[[Row], Iterable[New]], key: Callable[[New], NewKey]) -> None:
        self._fn = fn
        self._key = key
        self._given: dict[Key, tuple[NewKey, ...]] = {}
        """By key of a row those of its results."""
        self._giver: dict[NewKey, Key] = {}
        """By key of a result that of its row."""

    def plan(self, table: str, source: Input[Key, Row]) -> Plan[NewKey, New]:
        """What to write; raises ValueError when two results have one key."""
        rows, changed = source.rows(), source.changed
        writes: dict[NewKey, New | None] = dict.fromkeys(
            result for key in changed for result in self._given.get(key, ())
        )
        given: dict[Key, tuple[NewKey, ...]] = {}
        giver: dict[NewKey, Key] = {}
        for key in changed:
            found = rows.get(key)
            results = {} if found is None else self._results(table, key, found[0])
            for result in results:
                if result in giver:
                    raise _same_key(table, result, giver[result], key)
                if (other := self._giver.get(result, key)) not in changed:
                    raise _same_key(table, result, other, key)
                giver[result] = key
            given[key] = tuple(results)
            writes |= results

        def remember() -> None:
            for key, results in given.items():
                for result in self._given.pop(key, ()):
                    del self._giver[result]
                if results:
                    self._given[key] = results
            self._giver.update(giver)

        return writes, remember

    def _results(self, table: str, key: Key, row: Row) -> dict[NewKey, New]:
        results: dict[NewKey, New] = {}
        for new in self._fn(row):
            if new is None:
                raise TypeError(f"table {table}: {key!r} gives None; leave out what is not a result")
            if (result := self._key(new)) in results:
                raise _same_key(table, result, key, key)
            results[result] = new
        return results


def _same_key(table: str, result: Hashable, one: Hashable, other: Hashable) -> ValueError:
    givers = f"{one!r} and {other!r}" if one != other else f"{one!r} twice"
    return ValueError(
        f"table {table}: {result!r} is the key of what follows from {givers}; "
        "make the key distinguish them, or group() the results"
    )
