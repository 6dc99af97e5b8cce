"""Lists and watches a prefix of the kvstore, and writes its keys to a table.

A broken watch resumes at its last revision. If that has been compacted, the prefix is listed again, and rows
without a key are deleted. If the store's revision has decreased, it was replaced or restored from a backup:
rows without a key stay for a grace period, in which their owners write the keys again.
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
"""Seconds that rows stay after a replaced store lacks their keys."""
CHUNK: Final = 200
"""Keys applied before the event loop runs other tasks."""


class PrefixWatch(Generic[Row]):
    """An Observer for ``jobs.observe``, and the only writer of its table."""

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
        """``read`` parses a key without its prefix, and its value, to a row; None if the value is invalid.

        The table's key must be the key without the prefix. ``scope`` is the label in metrics. While the value
        of a key is invalid, the row of its last valid value stays, as in Cilium.
        """
        self._store = store
        self._prefix = prefix
        self._table = table
        self._read = read
        self._scope = scope
        self._grace = grace
        self._first = table.initializer(f"keys of {prefix}")
        self._revision = 0
        """The revision up to which the table is complete; 0 before the first list."""
        self._generation = 0
        """The store's generation at the last list."""
        self._connected = False
        """Whether the current watch has been established."""
        self._invalid: set[str] = set()
        """Keys with invalid values."""
        self._stale: set[str] = set()
        """Keys of rows that a replaced store does not have yet."""
        store.register_watch(self)
        store.metrics.set_initial_sync(scope, done=False)

    async def run(self, health: Health, /) -> None:
        """List and watch forever."""
        failures = 0
        while True:
            self._connected = False
            try:
                await self._follow(health)
            except CompactedError:
                self._revision = 0
            except StoreError as error:
                failures = 1 if self._connected else failures + 1
                self._store.failed(error)
                health.degraded(f"{len(self._table)} keys as last seen; not watched now", error)
                await anyio.sleep(RETRY.pause(failures))

    async def _follow(self, health: Health) -> None:
        """List if needed, then watch until the watch breaks or the store is replaced. Raises StoreError."""
        store = self._store
        went_back = self._revision and await store.client.revision() < self._revision
        if went_back and self._generation == store.generation:  # otherwise another watch has detected it
            store.replaced()
        if not self._revision or self._generation != store.generation:
            await self._list()
        error: StoreError = StoreUnavailableError("the store was replaced")
        async with anyio.create_task_group() as tasks:

            async def stop_when_replaced() -> None:
                await store.wait_replaced(self._generation)
                tasks.cancel_scope.cancel()

            tasks.start_soon(stop_when_replaced)
            tasks.start_soon(self._prune_stale)
            error = await self._watch(health)
            tasks.cancel_scope.cancel()
        if self._generation == store.generation:
            raise error

    async def _watch(self, health: Health) -> StoreError:
        """Apply events until the watch breaks, and return the error."""
        try:
            async with aclosing(self._store.client.watch(self._prefix, self._revision + 1)) as changes:
                async for events in changes:
                    self._connected = True
                    self._store.reached()
                    if events:
                        self._apply_events(events)
                    health.ok(self._summary())
        except StoreError as error:
            return error
        return StoreUnavailableError("the watch has ended")

    def _summary(self) -> str:
        keys = f"{len(self._table)} keys"
        if not self._invalid:
            return keys
        one = raw_key(min(self._invalid)).decode(errors="replace")
        return f"{keys}; {len(self._invalid)} cannot be read, such as {self._prefix}{one}"

    async def _list(self) -> None:
        generation = self._store.generation
        replaced = generation != self._generation
        found, revision = await self._store.client.list_prefix(self._prefix)
        for begin in range(0, len(found), CHUNK):
            self._apply_list(found[begin : begin + CHUNK])
            await anyio.lowlevel.checkpoint()
        present = {kv.key[len(self._prefix) :] for kv in found}
        self._invalid &= present
        missing = [key for key, *_ in self._table.items() if key not in present]
        if replaced:
            self._stale.update(map(str, missing))
        else:
            self._delete(str(key) for key in missing if key not in self._stale)
        self._revision, self._generation = revision, generation
        self._first.done()
        self._store.metrics.set_initial_sync(self._scope, done=True)
        self._store.watch_synced(self)

    def _apply_events(self, events: list[KeyEvent]) -> None:
        self._apply((event.key, event.kv) for event in events)
        self._revision = max(self._revision, *(event.revision for event in events))

    def _apply_list(self, found: Iterable[KeyValue]) -> None:
        self._apply((kv.key, kv) for kv in found)

    def _delete(self, keys: Iterable[str]) -> None:
        self._apply((self._prefix + key, None) for key in keys)

    def _apply(self, changes: Iterable[tuple[str, KeyValue | None]]) -> None:
        """Apply changes in one transaction of the table, and report deletions to the store.

        The table alone has no change for a key that is created and deleted between two reads of a watcher.
        """
        deleted: set[str] = set()
        with self._table.txn() as rows:
            for whole, kv in changes:
                key = whole[len(self._prefix) :]
                self._stale.discard(key)
                self._invalid.discard(key)
                deleted.discard(whole)
                if kv is None:
                    rows.delete(key)
                    deleted.add(whole)
                elif (row := self._read(key, kv.value)) is not None:
                    rows.put(row)
                else:
                    self._invalid.add(key)
        if deleted:
            self._store.keys_deleted(deleted)

    async def _prune_stale(self) -> None:
        """Delete stale rows after the grace period, which restarts with each watch.

        Their owners cannot write while etcd is down.
        """
        if self._stale:
            await anyio.sleep(self._grace)
            self._delete(list(self._stale))
