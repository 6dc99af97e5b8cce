"""This node's keys: written under its leases, and restored when others change them.

Reconciler target: a table of OwnKey in, keys of the store out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final

import msgspec

from cells.kvstore.model import Compare, LeaseLostError, batches, delete, get, put
from cells.kvstore.store import KVStore
from lifecycle import Backoff, Jobs, ReadTable, Reconciler, Tables, Target

__all__ = ["OwnKey", "OwnKeys", "keep_keys"]


RETRY: Final = Backoff(first=0.5, maximum=15.0)


class OwnKey(msgspec.Struct, frozen=True, gc=False):
    """A row: a key that the store is to have, and its value."""

    key: str
    value: str


def nothing() -> dict[str, str]:
    """No key is left of an earlier agent."""
    return {}


class OwnKeys(Target[str, OwnKey, OwnKey]):
    """The store as a reconciler's target. A key under a lease of an earlier agent is written again."""

    def __init__(
        self, store: KVStore, wanted: ReadTable[str, OwnKey], left: Callable[[], Mapping[str, str]] = nothing
    ) -> None:
        """``left`` returns keys in the store that belong to this node, with their values."""
        self._store = store
        self._wanted = wanted
        self._left = left
        self._known: dict[str, str] = {}
        """What was written, or left: as long as the store has nothing else, it is this node's to delete."""

    async def observe(self) -> Mapping[str, OwnKey]:
        """This node's keys as the store has them. Raises StoreError."""
        self._known = {**self._left(), **self._known}
        keys = dict.fromkeys([*self._known, *(row.key for row in self._wanted.all())])
        found: dict[str, OwnKey] = {}
        for batch in batches(map(get, keys)):
            for kv in (await self._store.client.txn(*batch)).found:
                if kv is None:
                    continue
                value = kv.value.decode(errors="replace")
                if kv.lease in self._store.leases:
                    found[kv.key] = OwnKey(kv.key, value)
                elif self._known.get(kv.key) == value:
                    found[kv.key] = OwnKey(kv.key, "")  # right, but it ends with an earlier lease
        return found

    async def put(self, batch: Mapping[str, OwnKey]) -> None:
        """Write them. Raises StoreError."""
        leases = self._store.leases
        by_lease: dict[int, list[OwnKey]] = {}
        for row in batch.values():
            by_lease.setdefault(await leases.lease_for(row.key), []).append(row)
        for lease, rows in by_lease.items():
            try:
                for some in batches(put(row.key, row.value.encode(), lease) for row in rows):
                    await self._store.client.txn(*some)
            except LeaseLostError:
                leases.lost(lease)
                raise
            self._known.update((row.key, row.value) for row in rows)

    async def drop(self, batch: Collection[str]) -> None:
        """Delete them, as far as they are still this node's. Raises StoreError."""
        for key in batch:
            if (value := self._known.get(key)) is not None:
                await self._store.client.txn(delete(key), when=[Compare(key, "value", value.encode())])
                del self._known[key]
            self._store.leases.release(key)


def keep_keys(
    store: KVStore,
    wanted: ReadTable[str, OwnKey],
    scope: str,
    *,
    jobs: Jobs,
    tables: Tables,
    left: Callable[[], Mapping[str, str]] = nothing,
    after: Iterable[ReadTable[Any, Any]] = (),
) -> Reconciler[str, OwnKey]:
    """Write these keys to the store. None is deleted before all that is wanted, and ``after``, is known.

    ``scope`` is their name in metrics.
    """

    async def known() -> None:
        for table in after:
            await table.wait_initialized()

    async def compare(_: None) -> None:
        reconciler.trigger()

    reconciler: Reconciler[str, OwnKey] = Reconciler(
        wanted,
        OwnKeys(store, wanted, left),
        full_every=store.settings.kvstore_periodic_sync,
        after=known,
        put_early=True,
        backoff=RETRY,
    )
    store.metrics.writes(scope, reconciler)
    tables.add(wanted, reconciler.statuses)
    jobs.observe(f"write {wanted.name}", reconciler)
    jobs.observe(f"compare {wanted.name} when the store returns", store.returns, compare)
    return reconciler
