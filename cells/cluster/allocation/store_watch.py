"""Identities of the kvstore to rows of the table ``identities``; and what is in use here keeps its keys.

Controller: ``shared-identities`` in, ``identities`` out; identities in use here in, keys of the store out.
Needs:  KVStore, SharedIdentities, KVStoreAllocator, Identities.   Gives: KVStoreIdentityWatch, used_keys().
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable

from cells.cluster.allocation.settings import AllocationMode
from cells.cluster.allocation.shared import SharedIdentities, SharedIdentity, value_key
from cells.cluster.allocation.store import KVStoreAllocator
from cells.cluster.identity import Identities, Identity
from cells.cluster.kvstore import KVStore, OwnKey, keep_keys
from cells.node.addresses import NodeAddress
from lifecycle import Change, Derived, Jobs, Logger, Table, Tables


class KVStoreIdentityWatch:
    """Follows keys, once all are known."""

    def __init__(
        self,
        store: KVStore,
        shared: SharedIdentities,
        allocator: KVStoreAllocator,
        identities: Identities,
        addresses: Table[NodeAddress],
        mode: AllocationMode,
        *,
        jobs: Jobs,
        tables: Tables,
        log: Logger,
    ) -> None:
        self._shared = shared.table
        self._allocator = allocator
        self._identities = identities
        self._log = log
        if not mode.reads_keys:
            return
        self._first = identities.table.initializer("identities of the kvstore")
        self._known: set[str] = set()
        """The keys that were taken in."""
        shared.follow(store, jobs)
        jobs.observe("follow", self._rounds, self._follow)
        jobs.observe("keep", identities.used.changes, self._keep_used)
        self._compare = jobs.timer("compare", self._restore_all, store.settings.kvstore_periodic_sync)
        store.on_return(self._compare.trigger)
        keys: Derived[OwnKey] = Derived("identity-keys", used_keys, identities.used, addresses)
        keep_keys(store, keys, jobs=jobs, tables=tables, left=allocator.written)

    async def _rounds(self) -> AsyncIterator[list[Change[SharedIdentity]] | None]:
        """None at the beginning: everything is to be looked at."""
        await self._shared.wait_initialized()
        changes = self._shared.changes(self._shared.revision)
        yield None
        async for batch in changes:
            yield batch

    async def _follow(self, changes: list[Change[SharedIdentity]] | None) -> None:
        if changes is None:
            there = {row.name: row for row in self._shared.all()}
            for name in {*self._known, *there}:
                self._take(name, there.get(name))
            self._first.done()
        else:
            for change in changes:
                self._take(str(change.key), change.row)
        await self._keep()

    async def _keep_used(self, _: object) -> None:
        if self._shared.initialized:
            await self._keep()

    async def _restore_all(self) -> None:
        """As _keep(), whatever was read last: the store may be another one. Raises StoreError."""
        await self._shared.wait_initialized()
        for number, labels in self._identities.in_use().items():
            if self._identities.stands_for(number, labels):
                await self._allocator.restore(number, labels)

    def _take(self, name: str, row: SharedIdentity | None) -> None:
        if row is None:
            self._known.discard(name)
            self._identities.unlearn(int(name))
        else:
            self._known.add(name)
            self._allocator.seen(row.labels)
            self._identities.learn(row.number, row.labels)

    async def _keep(self) -> None:
        """Numbers in use here stand for their labels in the store. Raises StoreError."""
        for number, labels in self._identities.in_use().items():
            if str(number) in self._shared or self._allocator.is_on_its_way(number):
                continue
            if self._shared.by("labels").get(labels):
                self._log.info("the cluster has another identity for labels in use", identity=number)
                self._identities.supersede(number)
            else:
                await self._allocator.restore(number, labels)


def used_keys(used: Iterable[Identity], addresses: Iterable[NodeAddress]) -> dict[str, OwnKey]:
    """Keys that say that this node uses these identities."""
    own = sorted((row.ip for row in addresses), key=lambda ip: ip.version)
    if not own:
        return {}
    wanted = [OwnKey(value_key(row.labels, str(own[0])), str(row.id)) for row in used if not row.superseded]
    return {row.key: row for row in wanted}
