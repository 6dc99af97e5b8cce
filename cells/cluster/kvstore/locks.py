"""Locks: one client of the store at a time, as etcd's own clients and Cilium's take them.

For:    identities. Needs: EtcdClient. Gives: Lock, lock().
Source: etcd 3.4, concurrency.Mutex: below a prefix each waiter has a key named by its lease, and the one that
        was created first has the lock. Cilium 1.17: its lease lasts 25 s.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Final

import anyio
import msgspec

from cells.cluster.kvstore.etcd import EtcdClient
from cells.cluster.kvstore.model import Compare, KeyValue, StoreError, absent, get, put

LEASE: Final = 25.0
"""Seconds after which the lock of a dead holder is free."""


class Lock(msgspec.Struct, frozen=True):
    """A lock that is held."""

    key: str
    create_revision: int

    @property
    def held(self) -> Compare:
        """What a transaction compares, so that it does nothing once the lock is lost."""
        return Compare(self.key, "create", self.create_revision)


@asynccontextmanager
async def lock(client: EtcdClient, path: str) -> AsyncIterator[Lock]:
    """Hold the lock of the path. Raises StoreError; holding it ends with its lease, whatever happens."""
    prefix = f"{path}/"
    lease = await client.grant(LEASE)
    try:
        key = f"{prefix}{lease:x}"
        await client.txn(put(key, b"", lease), when=[absent(key)])
        own = (await client.txn(get(key))).found[0]
        if own is None:
            raise StoreError(f"the lock {key} was taken away")
        await _wait(client, prefix, own)
        yield Lock(key, own.create_revision)
    finally:
        with anyio.CancelScope(shield=True), suppress(StoreError):  # else it ends with its lease
            await client.revoke(lease)


async def _wait(client: EtcdClient, prefix: str, own: KeyValue) -> None:
    """Wait until no earlier waiter is left."""
    while (first := await client.oldest(prefix)) is not None and first.key != own.key:
        async with aclosing(client.watch(first.key, first.mod_revision + 1)) as changes:
            async for events in changes:
                if any(event.kv is None and event.key == first.key for event in events):
                    break
    if first is None:
        raise StoreError(f"the lock {own.key} was taken away")
