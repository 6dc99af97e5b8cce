"""Keys of a prefix to rows of a table: all of them first, then what changes.

A watch that breaks is taken up where it broke. What cannot be taken up, since etcd has compacted it, is read
anew, and compared. A store that knows less than it did is another one, or an old copy: what it lacks stays
for a while, since its owners write it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import aclosing
from typing import Final, Generic, TypeVar

import anyio
import anyio.lowlevel

from cells.kvstore.model import (
    CompactedError,
    KeyEvent,
    KeyValue,
    StoreError,
    StoreUnavailableError,
    raw_key,
)
from cells.kvstore.store import KVStore
from lifecycle import Backoff, Health, Table

__all__ = ["PrefixWatch"]


Row = TypeVar("Row")

RETRY: Final = Backoff(first=0.2, maximum=5.0)
GRACE: Final = 60.0
"""Seconds that others have to write again what a new store does not know."""
STRETCH: Final = 200
"""Keys read before others get their turn on the event loop."""


class PrefixWatch(Generic[Row]):
    """An Observer, for ``jobs.observe``: the only writer of its table, which is by key behind the prefix."""

    def __init__(
        self,
        store: KVStore,
        prefix: str,
        table: Table[str, Row],
        read: Callable[[str, bytes], Row | None],
        *,
        scope: str,
        grace: float = GRACE,
    ) -> None:
        """``read`` makes a row of a key, less the prefix, and its value; None for a value that is not valid.

        The row's key in the table is that key. ``scope`` is what metrics call it. While a key has an invalid
        value, the row of its last valid one stays, as in Cilium.
        """
        self._store = store
        self._prefix = prefix
        self._table = table
        self._read = read
        self._scope = scope
        self._grace = grace
        self._first = table.initializer(f"keys of {prefix}")
        self._revision = 0
        """Up to which everything is in the table; 0: nothing."""
        self._generation = 0
        """Of the store that was read."""
        self._reached = False
        self._unreadable: set[str] = set()
        """Keys with values that cannot be read."""
        self._missed: set[str] = set()
        """Keys of rows that a new store does not have yet."""
        store.expect(self)
        store.metrics.synchronised(scope, done=False)

    async def run(self, health: Health, /) -> None:
        """Follow, for ever."""
        failures = 0
        while True:
            self._reached = False
            try:
                await self._follow(health)
            except CompactedError:
                self._revision = 0
            except StoreError as error:
                failures = 1 if self._reached else failures + 1
                self._store.failed(error)
                health.degraded(f"{len(self._table)} keys as last seen; not watched now", error)
                await anyio.sleep(RETRY.pause(failures))

    async def _follow(self, health: Health) -> None:
        """Read what is to be read, and follow until the watch breaks, or the store is another one."""
        store = self._store
        older = self._revision and await store.client.revision() < self._revision
        if older and self._generation == store.generation:  # else another watch has noticed it
            store.replaced()
        if not self._revision or self._generation != store.generation:
            await self._all()
        error: StoreError = StoreUnavailableError("the store was replaced")
        async with anyio.create_task_group() as tasks:

            async def until_replaced() -> None:
                await store.wait_replaced(self._generation)
                tasks.cancel_scope.cancel()

            tasks.start_soon(until_replaced)
            tasks.start_soon(self._forget_missed)
            error = await self._changes(health)
            tasks.cancel_scope.cancel()
        if self._generation == store.generation:
            raise error

    async def _changes(self, health: Health) -> StoreError:
        """Take changes in until the watch breaks; how."""
        try:
            async with aclosing(self._store.client.watch(self._prefix, self._revision + 1)) as changes:
                async for events in changes:
                    self._reached = True
                    self._store.reached()
                    if events:
                        self._take(events)
                    health.ok(self._summary())
        except StoreError as error:
            return error
        return StoreUnavailableError("the watch has ended")

    def _summary(self) -> str:
        keys = f"{len(self._table)} keys"
        if not self._unreadable:
            return keys
        one = raw_key(min(self._unreadable)).decode(errors="replace")
        return f"{keys}; {len(self._unreadable)} cannot be read, such as {self._prefix}{one}"

    async def _all(self) -> None:
        generation = self._store.generation
        replaced = generation != self._generation
        found, revision = await self._store.client.list_prefix(self._prefix)
        for begin in range(0, len(found), STRETCH):
            self._put(found[begin : begin + STRETCH])
            await anyio.lowlevel.checkpoint()
        there = {kv.key[len(self._prefix) :] for kv in found}
        self._unreadable &= there
        missing = [key for key, *_ in self._table.items() if key not in there]
        if replaced:
            self._missed.update(map(str, missing))
        else:
            self._drop(str(key) for key in missing if key not in self._missed)
        self._revision, self._generation = revision, generation
        self._first.done()
        self._store.metrics.synchronised(self._scope, done=True)
        self._store.was_read(self)

    def _take(self, events: list[KeyEvent]) -> None:
        self._apply((event.key, event.kv) for event in events)
        self._revision = max(self._revision, *(event.revision for event in events))

    def _put(self, found: Iterable[KeyValue]) -> None:
        self._apply((kv.key, kv) for kv in found)

    def _drop(self, keys: Iterable[str]) -> None:
        self._apply((self._prefix + key, None) for key in keys)

    def _apply(self, changes: Iterable[tuple[str, KeyValue | None]]) -> None:
        """All that came together is one change of the table."""
        with self._table.txn() as rows:
            for whole, kv in changes:
                key = whole[len(self._prefix) :]
                self._missed.discard(key)
                self._unreadable.discard(key)
                if kv is None:
                    rows.delete(key)
                elif (row := self._read(key, kv.value)) is not None:
                    rows.put(row)
                else:
                    self._unreadable.add(key)

    async def _forget_missed(self) -> None:
        """Drop what the store still lacks at the end of the grace period, which begins anew with each watch.

        Its owners cannot write while etcd is away.
        """
        if self._missed:
            await anyio.sleep(self._grace)
            self._drop(list(self._missed))
