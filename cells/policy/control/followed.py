"""A table that is followed, and whether what was in it at the start has been taken in.

Needs: a table.   Gives: Followed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Generic, TypeVar

import anyio

from lifecycle import Change, Table

Row = TypeVar("Row")


class Followed(Generic[Row]):
    """Batches of a table's changes; a batch counts as taken in when the next one is asked for."""

    def __init__(self, table: Table[Row]) -> None:
        self._table = table
        self._taken = -1
        self._wanted: int | None = None
        """The revision at which the table was complete."""
        self._news = anyio.Event()

    @property
    def name(self) -> str:
        """The table's."""
        return self._table.name

    @property
    def caught_up(self) -> bool:
        """Whether all there was when the table was complete has been taken in."""
        if self._wanted is None and self._table.initialized:
            self._wanted = self._table.revision
        return self._wanted is not None and self._taken >= self._wanted

    async def batches(self) -> AsyncIterator[list[Change[Row]]]:
        """Everything there is, then what changes."""
        changes = self._table.changes()
        while True:
            revision = self._table.revision
            if batch := changes.take():
                yield batch
            self._taken = revision
            news, self._news = self._news, anyio.Event()
            news.set()
            await changes.wait()

    async def known(self) -> None:
        """Return once the table was complete, and has been taken in. Any number may wait."""
        await self._table.wait_initialized()
        while not self.caught_up:
            await self._news.wait()
