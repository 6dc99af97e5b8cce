"""Watches of a table: batches of changes since the last one."""

import asyncio
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Generic, TypeVar

import msgspec

from lifecycle.tables.rows import Rows

__all__ = ["Change", "Changes", "Only"]

Key = TypeVar("Key", bound=Hashable)
Row = TypeVar("Row")
Only = Callable[[Key, Row | None, Row | None], bool]
"""Decides from a key, the row before and the row now whether a change matters."""


class Change(msgspec.Struct, Generic[Key, Row], frozen=True):
    """The change of one key since the watcher's last batch."""

    key: Key
    old: Row | None
    """The row in the watcher's last batch; None if it had none."""
    row: Row | None
    """The row now; None if it was deleted."""
    revision: int

    @property
    def deleted(self) -> bool:
        """Whether the row no longer exists."""
        return self.row is None


class Changes(Generic[Key, Row]):
    """An endless iteration over batches of changes; ``changes()`` of a table makes it.

    The watch ends when it is garbage-collected. It holds at most the table's keys and pending deletions,
    however slow its reader is.
    """

    def __init__(self, table: Rows[Key, Row], only: Only[Key, Row] | None = None) -> None:
        self._table = table
        self._only = only
        self._waiters: list[asyncio.Future[None]] = []
        self._woken = False
        self._busy = False
        """Whether the last batch came without a wait."""
        self._returned: dict[Key, Change[Key, Row]] = {}
        self._error: Exception | None = None
        """The error of `only`, for the reader of the next batch."""
        self._pending: dict[Key, tuple[Row | None, int]] = {}
        """Keys that may have changed, with the row last seen and the revision of the last change."""
        self.revision = 0
        """The table's revision at the next batch: where to resume with ``changes(since)``."""

    def __aiter__(self) -> "Changes[Key, Row]":
        return self

    async def __anext__(self) -> list[Change[Key, Row]]:
        while True:
            if self._busy:  # yield: a watcher that writes its own table must not block the loop
                await asyncio.sleep(0)
            self._busy = True
            await self.wait()
            if batch := self.take():
                return batch

    def take(self) -> list[Change[Key, Row]]:
        """Return the changes since the last batch at once; empty if there are none.

        Raises the error of `only`; changes on which it could not decide come with the next batch.
        """
        rows = self._table._current()  # noqa: SLF001  # the two are one mechanism
        self._woken = False
        if self._error is not None:
            error, self._error, self._woken = self._error, None, True
            raise error
        batch = []
        for key, (old, revision) in self._pending.items():
            row, row_revision = rows.get(key, (None, revision))
            if old != row:
                batch.append(Change(key, old, row, row_revision))
        self._pending.clear()
        if self._returned:
            batch = self._with_returned(batch)
        batch.sort(key=lambda change: change.revision)
        return batch

    def put_back(self, batch: Iterable[Change[Key, Row]]) -> None:
        """Return changes that could not be processed; the next batch repeats them with later ones.

        All of them count as partly seen: a row that was put and is deleted meanwhile becomes a deletion.
        """
        self._returned.update((change.key, change) for change in batch)
        self.wake()

    async def wait(self) -> None:
        """Wait until take() may return something new.

        Raises TableClosedError if nothing can come, as the module of the table was disabled.
        """
        if self._pending or self._woken:
            return
        self._table.check_open()
        self._busy = False
        waiter = asyncio.get_running_loop().create_future()  # a third of the cost of an anyio.Event
        self._waiters.append(waiter)
        try:
            await waiter
        finally:
            if waiter in self._waiters:  # cancelled
                self._waiters.remove(waiter)

    def wake(self) -> None:
        """End the present wait(), or the next one, as something may have changed."""
        self._woken = True
        if self._waiters:
            self._release()

    def replay(self, rows: Mapping[Key, Row | None], revision: int) -> None:
        """Begin with these rows, which the watcher has not seen."""
        if self._only is not None:
            self.notify(rows, revision)
            return
        self.revision = revision
        self._pending.update(dict.fromkeys(rows, (None, revision)))

    def notify(self, changed: Mapping[Key, Row | None], revision: int) -> None:
        """Record changed keys, with the row before unless an older one is recorded."""
        rows, pending, only = self._table._rows, self._pending, self._only  # noqa: SLF001
        self.revision = revision
        matters = False
        for key, old in changed.items():
            if only is not None and key not in pending and not self._passes(only, key, old):
                continue
            matters = True
            seen = pending[key][0] if key in pending else old
            if seen is None and key not in rows:  # added and deleted between two batches
                pending.pop(key, None)
            else:
                pending[key] = (seen, revision)
        if matters and self._waiters:
            self._release()

    def _passes(self, only: Only[Key, Row], key: Key, old: Row | None) -> bool:
        """Whether `only` returns true for the change, or fails."""
        now = self._table._rows.get(key)  # noqa: SLF001
        try:
            return only(key, old, None if now is None else now[0])
        except Exception as error:  # noqa: BLE001  # it is the watcher's, not the writer's or another watcher's
            self._error = error
            self._woken = True
            return True

    def _with_returned(self, batch: list[Change[Key, Row]]) -> list[Change[Key, Row]]:
        """Return the changes that were put back, as they are now, with the rest of the batch."""
        returned, self._returned = self._returned, {}
        newer = {change.key: change for change in batch}
        rows = self._table._rows  # noqa: SLF001  # take() has brought them up to date
        for key, before in returned.items():
            change = newer.get(key, before)
            row, revision = rows.get(key, (None, change.revision))
            old = before.old
            if row is None:  # keep the row to delete, which may be partly processed
                old = before.old if before.row is None else before.row
            newer[key] = Change(key, old, row, revision)
        return list(newer.values())

    def _release(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()
