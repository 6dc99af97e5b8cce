"""Tables at past moments, for the shell.

Why:    a table that is wrong now was often right a minute ago. A moment is a snapshot of every table: it
        costs a reference to each row that is overwritten while it exists, and nothing while nothing changes.
"""

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from lifecycle.admin.script import CommandError
from lifecycle.hooks import Hook, Lifecycle
from lifecycle.settings import Duration
from lifecycle.tables import Table, Tables
from lifecycle.tables.snapshot import Snapshot

__all__ = ["Moment", "TableHistory"]

REST: Final = 1.0
"""Minimum time between two moments, in seconds: later changes belong to the next one."""


class Moment(msgspec.Struct, frozen=True):
    """All tables after a change."""

    number: int
    at: float
    """In seconds since the epoch."""
    changed: tuple[str, ...]
    """Names of the tables that differ from the moment before; empty for the first one."""
    seen: Mapping[str, Snapshot[Any, Any] | str]
    """Snapshots by name; the error of tables that could not be read."""


class TableHistory:
    """The last moments of all tables, up to a number; if that is 0, none, at no cost."""

    def __init__(self, moments: int, tables: Tables, lifecycle: Lifecycle) -> None:
        self._moments: deque[Moment] = deque(maxlen=moments)
        self._tables = tables
        self._number = 0
        self._next: asyncio.TimerHandle | None = None
        self._runs = False
        if moments:
            lifecycle.append(Hook("remember tables", self._start, self._stop))

    def notify(self, changed: Mapping[Any, Any], revision: int) -> None:
        """A table has changed: record a moment soon."""
        del changed, revision
        if self._runs and self._next is None:
            last = self._moments[-1].at if self._moments else 0.0
            pause = min(max(0.0, last + REST - time.time()), REST)
            self._next = asyncio.get_running_loop().call_later(pause, self._remember)

    def wake(self) -> None:
        """A no-op."""

    async def _start(self) -> None:
        self._runs = True
        self._remember()

    async def _stop(self) -> None:
        self._runs = False
        if self._next is not None:
            self._next.cancel()

    def all(self) -> list[Moment]:
        """Return all moments, the oldest first."""
        return list(self._moments)

    def moments(self, subject: str) -> list[Moment]:
        """As all(). Raises CommandError, which begins with `subject`, if there is none."""
        if not self._moments:
            raise CommandError(
                f"{subject}: no moments are remembered; expected a setting such as admin-history=60"
            )
        return self.all()

    def at(self, text: str) -> Moment:
        """Return the moment of a number, or the last one that is at least as old as a duration.

        Raises CommandError.
        """
        self.moments(f"--at={text}")
        first, last = self._moments[0].number, self._moments[-1].number
        if text.isdecimal():
            if not first <= int(text) <= last:
                raise CommandError(f"--at={text}: expected {first} to {last}; db/moments lists them")
            return self._moments[int(text) - first]
        try:
            age = float(Duration.parse(text))
        except ValueError as error:
            raise CommandError(f"--at={text}: neither the number of a moment nor an age: {error}") from None
        old_enough = [moment for moment in self._moments if moment.at <= time.time() - age]
        if not old_enough:
            oldest = time.time() - self._moments[0].at
            raise CommandError(f"--at={text}: the oldest moment is {oldest:.0f} s old")
        return old_enough[-1]

    def _remember(self) -> None:
        self._next = None
        seen: dict[str, Snapshot[Any, Any] | str] = {}
        for table in self._tables.all():
            if isinstance(table, Table):  # derived tables change with these
                table._listen(self)  # noqa: SLF001  # tables are one mechanism; a second time changes nothing
            try:
                seen[table.name] = table.snapshot()
            except Exception as error:  # noqa: BLE001  # of a derived table's function: shown to those who look
                seen[table.name] = f"{type(error).__name__}: {error}"
        before = self._moments[-1].seen if self._moments else seen
        changed = tuple(name for name, snapshot in seen.items() if snapshot != before.get(name))
        self._number += 1
        self._moments.append(Moment(self._number, time.time(), changed, seen))
