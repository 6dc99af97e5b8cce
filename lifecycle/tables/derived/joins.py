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

    __slots__ = ("_counterpart_of", "_inner", "_into", "_on", "_users")

    def __init__(
        self, into: Callable[[Any, Any], New], on: Callable[[Any], Hashable] | None, *, inner: bool
    ) -> None:
        self._into = into
        self._on = on
        self._inner = inner
        self._counterpart_of: dict[Key, Hashable] = {}
        """Key of a left row -> key of its counterpart, which may be absent. Unused without `on`."""
        self._users: dict[Hashable, dict[Key, None]] = {}
        """Key of a right row -> keys of the left rows joined to it."""

    def plan(self, table: str, left: Input[Key, Any], right: Input[Any, Any]) -> Plan[Key, New]:
        """Compute the changed rows. Raises TypeError if a joined row is None."""
        left_rows, right_rows, changed = left.rows(), right.rows(), left.changed
        counterparts = self._counterparts(changed, left_rows)
        writes: dict[Key, New | None] = {}
        for key in changed:
            writes[key] = self._joined(
                table, key, left_rows.get(key), right_rows.get(counterparts.get(key, key))
            )
        for right_key in right.changed:
            for key in self._users_of(right_key):
                if key not in changed:
                    writes[key] = self._joined(table, key, left_rows.get(key), right_rows.get(right_key))

        def remember() -> None:
            for key, counterpart in counterparts.items():
                if (before := self._counterpart_of.pop(key, ABSENT)) is not ABSENT:
                    users = self._users[before]
                    del users[key]
                    if not users:
                        del self._users[before]
                if counterpart is not ABSENT:
                    self._counterpart_of[key] = counterpart
                    self._users.setdefault(counterpart, {})[key] = None

        return writes, remember

    def _counterparts(self, changed: Iterable[Key], left: Stored[Key, Any]) -> dict[Key, Hashable]:
        """Return the counterpart's key for each changed left key, ABSENT for a deleted row; empty without
        `on`.
        """
        if self._on is None:
            return {}
        entries = ((key, left.get(key)) for key in changed)
        return {key: ABSENT if row is None else self._on(row[0]) for key, row in entries}

    def _users_of(self, right_key: Any) -> Iterable[Key]:
        return (right_key,) if self._on is None else self._users.get(right_key, ())

    def _joined(
        self, table: str, key: Key, row: tuple[Any, int] | None, counterpart: tuple[Any, int] | None
    ) -> New | None:
        if row is None or (counterpart is None and self._inner):
            return None
        return _not_none(table, key, self._into(row[0], counterpart[0] if counterpart is not None else None))


class OuterJoinRows(Generic[Key, New]):
    """Joins the rows of both tables with the same key."""

    __slots__ = ("_into",)

    def __init__(self, into: Callable[[Any, Any], New]) -> None:
        self._into = into

    def plan(self, table: str, left: Input[Key, Any], right: Input[Key, Any]) -> Plan[Key, New]:
        """Compute the changed rows. Raises TypeError if a joined row is None."""
        left_rows, right_rows = left.rows(), right.rows()
        writes: dict[Key, New | None] = {}
        for key in {**left.changed, **right.changed}:
            left_entry, right_entry = left_rows.get(key), right_rows.get(key)
            if left_entry is None and right_entry is None:
                writes[key] = None
            else:
                new = self._into(
                    left_entry[0] if left_entry is not None else None,
                    right_entry[0] if right_entry is not None else None,
                )
                writes[key] = _not_none(table, key, new)
        return writes, no_state


def _not_none(table: str, key: Hashable, new: New) -> New:
    if new is None:
        raise TypeError(f"table {table}: {key!r} is joined into None; filter() the result instead")
    return new
