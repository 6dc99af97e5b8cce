"""Keeps this node's keys in the kvstore, under its leases.

In:  a table of OwnKey, the desired keys.
Out: keys in the store. They are written again when a lease expires, at once after a watch has reported their
     deletion, and at the next periodic comparison after another client has overwritten them: two nodes that
     claim one address would otherwise overwrite each other's key continuously.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any, Final

import msgspec

from cells.kvstore.model import Compare, LeaseLostError, batches, delete, get, put
from cells.kvstore.store import KVStore
from lifecycle import Backoff, Jobs, ReadTable, Reconciler, Tables, Target

__all__ = ["OwnKey", "OwnKeys", "keep_keys"]


RETRY: Final = Backoff(first=0.5, maximum=15.0)


class OwnKey(msgspec.Struct, frozen=True, gc=False):
    """A row: a desired key and its value."""

    key: str
    value: str


def _no_previous_keys() -> dict[str, str]:
    """The default for callers without keys of a previous agent."""
    return {}


class OwnKeys(Target[str, OwnKey, OwnKey]):
    """The reconciler target. A key under a lease of a previous agent is written again under a current one."""

    def __init__(
        self,
        store: KVStore,
        wanted: ReadTable[str, OwnKey],
        previous: Callable[[], Mapping[str, str]] = _no_previous_keys,
    ) -> None:
        """``previous`` returns the keys, with values, that an earlier agent of this node wrote."""
        self._store = store
        self._wanted = wanted
        self._previous = previous
        self._written: dict[str, str] = {}
        """Keys written by this node, now or by a previous agent.

        A key is deleted only while it still has this value: otherwise another node owns it.
        """

    async def observe(self) -> Mapping[str, OwnKey]:
        """Return this node's keys in the store. Raises StoreError."""
        self._written = {**self._previous(), **self._written}
        keys = dict.fromkeys([*self._written, *(row.key for row in self._wanted.all())])
        found: dict[str, OwnKey] = {}
        for batch in batches(map(get, keys)):
            for kv in (await self._store.client.txn(*batch)).found:
                if kv is None:
                    continue
                value = kv.value.decode(errors="replace")
                if kv.lease in self._store.leases:
                    found[kv.key] = OwnKey(kv.key, value)
                elif self._written.get(kv.key) == value:
                    found[kv.key] = OwnKey(
                        kv.key, ""
                    )  # the right value under a lease of a previous agent: write it again
        return found

    async def put(self, batch: Mapping[str, OwnKey]) -> None:
        """Write the keys, each under a lease. Raises StoreError."""
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
            self._written.update((row.key, row.value) for row in rows)

    async def drop(self, batch: Collection[str]) -> None:
        """Delete the keys that still have the value this node wrote. Raises StoreError."""
        for key in batch:
            if (value := self._written.get(key)) is not None:
                await self._store.client.txn(delete(key), when=[Compare(key, "value", value.encode())])
                del self._written[key]
            self._store.leases.release(key)


def keep_keys(
    store: KVStore,
    wanted: ReadTable[str, OwnKey],
    scope: str,
    *,
    jobs: Jobs,
    tables: Tables,
    previous: Callable[[], Mapping[str, str]] = _no_previous_keys,
    after: Iterable[ReadTable[Any, Any]] = (),
) -> Reconciler[str, OwnKey]:
    """Start reconciling the table ``wanted`` with the store; ``scope`` is its label in metrics.

    No key is deleted before ``wanted`` and all tables in ``after`` are initialized.
    """

    async def wait_initialized() -> None:
        for table in after:
            await table.wait_initialized()

    async def compare(_: None) -> None:
        reconciler.trigger()

    reconciler: Reconciler[str, OwnKey] = Reconciler(
        wanted,
        OwnKeys(store, wanted, previous),
        full_every=store.settings.kvstore_periodic_sync,
        after=wait_initialized,
        put_early=True,
        backoff=RETRY,
    )
    store.metrics.writes(scope, reconciler)
    tables.add(wanted, reconciler.statuses)
    jobs.observe(f"write {wanted.name}", reconciler)
    jobs.observe(f"compare {wanted.name} after a kvstore resync", store.resyncs, compare)
    jobs.observe(f"restore {wanted.name}", partial(store.deletions, wanted), compare)
    return reconciler
