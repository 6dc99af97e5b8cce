"""A table that is followed, and whether what was in it at the start has been taken in.

Needs: a table.   Gives: Followed.
"""

from __future__ import annotations

from typing import Generic, Self, TypeVar

import anyio

from lifecycle import Change, Table
from lifecycle.tables import Changes

Row = TypeVar("Row")


class Followed(Generic[Row]):
    """Batches of a table's changes; a batch counts as taken in when the next one is asked for."""

    def __init__(self, table: Table[Row]) -> None:
        self._table = table
        self._taken = -1
        self._wanted: int | None = None
        """The revision at which the table was complete."""
        self._news = anyio.Event()
        self._changes: Changes[Row]
        self._given: int | None = None
        """The table's revision as of the batch that is worked on."""

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

    def batches(self) -> Self:
        """Everything there is, then what changes."""
        self._changes = self._table.changes()
        self._given = None
        return self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Change[Row]]:
        if self._given is not None:
            self._take_in(self._given)
        while True:
            revision = self._table.revision
            if batch := self._changes.take():
                self._given = revision
                return batch
            self._take_in(revision)
            await self._changes.wait()

    def put_back(self, batch: list[Change[Row]]) -> None:
        """Give the batch again: it is not taken in."""
        self._changes.put_back(batch)
        self._given = None

    def _take_in(self, revision: int) -> None:
        self._taken = revision
        news, self._news = self._news, anyio.Event()
        news.set()

    async def known(self) -> None:
        """Return once the table was complete, and has been taken in. Any number may wait."""
        await self._table.wait_initialized()
        while not self.caught_up:
            await self._news.wait()
