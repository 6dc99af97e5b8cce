"""Derived tables of two source tables, joined by key."""

from collections.abc import Callable, Hashable, Iterable
from typing import Any, Generic, TypeVar

from lifecycle.tables.derived.inputs import ABSENT, Input, Plan, no_state
from lifecycle.tables.rows import Stored

__all__ = ["JoinRows", "OuterJoinRows"]

Key = TypeVar("Key", bound=Hashable)
New = TypeVar("New")


class JoinRows(Generic[Key, New]):
    """Joins each row of the left table to its counterpart in the right one."""

    __slots__ = ("_inner", "_into", "_on", "_other", "_users")

    def __init__(
        self, into: Callable[[Any, Any], New], on: Callable[[Any], Hashable] | None, *, inner: bool
    ) -> None:
        self._into = into
        self._on = on
        self._inner = inner
        self._other: dict[Key, Hashable] = {}
        """Key of a left row -> key of its counterpart, which may be absent. Unused without `on`."""
        self._users: dict[Hashable, dict[Key, None]] = {}
        """Key of a right row -> keys of the left rows joined to it."""

    def plan(self, table: str, left: Input[Key, Any], right: Input[Any, Any]) -> Plan[Key, New]:
        """Compute the changed rows. Raises TypeError if a joined row is None."""
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
        """Return the counterpart's key for each changed left key, ABSENT for a deleted row; empty without
        `on`.
        """
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
    """Joins the rows of both tables with the same key."""

    __slots__ = ("_into",)

    def __init__(self, into: Callable[[Any, Any], New]) -> None:
        self._into = into

    def plan(self, table: str, left: Input[Key, Any], right: Input[Key, Any]) -> Plan[Key, New]:
        """Compute the changed rows. Raises TypeError if a joined row is None."""
        ours, theirs = left.rows(), right.rows()
        writes: dict[Key, New | None] = {}
        for key in {**left.changed, **right.changed}:
            one, other = ours.get(key), theirs.get(key)
            if one is None and other is None:
                writes[key] = None
            else:
                new = self._into(one[0] if one is not None else None, other[0] if other is not None else None)
                writes[key] = _not_none(table, key, new)
        return writes, no_state


def _not_none(table: str, key: Hashable, new: New) -> New:
    if new is None:
        raise TypeError(f"table {table}: {key!r} is joined into None; filter() the result instead")
    return new
