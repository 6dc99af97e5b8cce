"""What follows from rows of two tables by key: joins."""

from collections.abc import Callable, Hashable, Iterable
from typing import Any, Generic, TypeVar

from lifecycle.tables.derived.inputs import ABSENT, Input, Plan, nothing_to_remember
from lifecycle.tables.rows import Stored

__all__ = ["JoinRows", "OuterJoinRows"]

Key = TypeVar("Key", bound=Hashable)
New = TypeVar("New")


class JoinRows(Generic[Key, New]):
    """Each row of one table with its counterpart in the other."""

    __slots__ = ("_inner", "_into", "_on", "_other", "_users")

    def __init__(
        self, into: Callable[[Any, Any], New], on: Callable[[Any], Hashable] | None, *, inner: bool
    ) -> None:
        self._into = into
        self._on = on
        self._inner = inner
        self._other: dict[Key, Hashable] = {}
        """By key on the left the key of its counterpart, whether there is one or not. Unused without `on`."""
        self._users: dict[Hashable, dict[Key, None]] = {}
        """The same the other way round."""

    def plan(self, table: str, left: Input[Key, Any], right: Input[Any, Any]) -> Plan[Key, New]:
        """What to write; raises TypeError when two rows are joined into None."""
        ours, theirs, changed = left.rows(), right.rows(), left.changed
        others = self._others(changed, ours)
        writes: dict[Key, New | None] = {}
        for key in changed:
            writes[key] = self._joined(table, key, ours.get(key), theirs.get(others.get(key, key)))
        for other in right.changed:
            for key in self._users_of(other):
                if key not in changed:
                    writes[key] = self._joined(table, key, ours.get(key), theirs.get(other))

        def remember() -> None:
            for key, other in others.items():
                if (before := self._other.pop(key, ABSENT)) is not ABSENT:
                    users = self._users[before]
                    del users[key]
                    if not users:
                        del self._users[before]
                if other is not ABSENT:
                    self._other[key] = other
                    self._users.setdefault(other, {})[key] = None

        return writes, remember

    def _others(self, changed: Iterable[Key], left: Stored[Key, Any]) -> dict[Key, Hashable]:
        """By changed key on the left the row on the right, ABSENT for a deleted key; empty without `on`."""
        if self._on is None:
            return {}
        found = ((key, left.get(key)) for key in changed)
        return {key: ABSENT if row is None else self._on(row[0]) for key, row in found}

    def _users_of(self, other: Any) -> Iterable[Key]:
        return (other,) if self._on is None else self._users.get(other, ())

    def _joined(
        self, table: str, key: Key, row: tuple[Any, int] | None, other: tuple[Any, int] | None
    ) -> New | None:
        if row is None or (other is None and self._inner):
            return None
        return _not_none(table, key, self._into(row[0], other[0] if other is not None else None))


class OuterJoinRows(Generic[Key, New]):
    """The rows of two tables that have the same key."""

    __slots__ = ("_into",)

    def __init__(self, into: Callable[[Any, Any], New]) -> None:
        self._into = into

    def plan(self, table: str, left: Input[Key, Any], right: Input[Key, Any]) -> Plan[Key, New]:
        """What to write; raises TypeError when two rows are joined into None."""
        ours, theirs = left.rows(), right.rows()
        writes: dict[Key, New | None] = {}
        for key in {**left.changed, **right.changed}:
            one, other = ours.get(key), theirs.get(key)
            if one is None and other is None:
                writes[key] = None
            else:
                new = self._into(one[0] if one is not None else None, other[0] if other is not None else None)
                writes[key] = _not_none(table, key, new)
        return writes, nothing_to_remember


def _not_none(table: str, key: Hashable, new: New) -> New:
    if new is None:
        raise TypeError(f"table {table}: {key!r} is joined into None; filter() the result instead")
    return new
