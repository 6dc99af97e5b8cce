"""Writes identities in use here to the other store as well: the doublewrite modes.

Controller: ``identities-in-use`` in; writes what the store that is not read lacks of them.
Needs:  AllocationMode, Identities, CiliumIdentityAllocator, KVStoreAllocator, SharedIdentities, KVStore.
Gives:  IdentityMirror.
Source: Cilium 1.17, identity-allocation-mode=doublewrite-readkvstore and doublewrite-readcrd. Unlike there,
        pods wait for nothing but the store that is read.
Why:    a cluster changes from one to the other while its pods run: all agents write both, then all read the
        other one.
"""

from __future__ import annotations

from typing import Any

from cells.cluster.allocation.agreed import AgreedNumbers
from cells.cluster.allocation.allocator import CiliumIdentityAllocator
from cells.cluster.allocation.settings import AllocationMode
from cells.cluster.allocation.shared import SharedIdentities
from cells.cluster.allocation.store import KVStoreAllocator
from cells.cluster.allocation.store_watch import used_keys
from cells.cluster.identity import Identities
from cells.cluster.kvstore import KVStore, OwnKey, keep_keys
from cells.kubernetes import CiliumIdentity
from cells.node.addresses import NodeAddress
from lifecycle import Change, Derived, Health, Jobs, ReadTable, Table, Tables


class IdentityMirror:
    """Compares when either side changes, and every kvstore-periodic-sync."""

    def __init__(
        self,
        mode: AllocationMode,
        identities: Identities,
        objects: CiliumIdentityAllocator,
        keys: KVStoreAllocator,
        table: Table[CiliumIdentity],
        shared: SharedIdentities,
        store: KVStore,
        addresses: Table[NodeAddress],
        *,
        jobs: Jobs,
        tables: Tables,
        health: Health,
    ) -> None:
        self._identities = identities
        self._health = health.child("mirror")
        if not mode.writes_both:
            return
        self._other: AgreedNumbers = objects if mode.reads_keys else keys
        self._there: ReadTable[Any] = table if mode.reads_keys else shared.table
        self._name = "CiliumIdentity objects" if mode.reads_keys else "the kvstore"
        if mode.reads_keys:
            keys.agree_with(objects)
        else:
            objects.agree_with(keys)
            shared.follow(store, jobs)
            used: Derived[OwnKey] = Derived("identity-keys", used_keys, identities.used, addresses)
            keep_keys(store, used, jobs=jobs, tables=tables)
        self._timer = jobs.timer("compare both", self._compare, store.settings.kvstore_periodic_sync)
        self._timer.trigger()
        store.on_return(self._timer.trigger)
        jobs.observe("watch identities in use", identities.used.changes, self._look)
        jobs.observe("watch what numbers stand for", identities.table.changes, self._look)
        jobs.observe("watch the other store", self._there.changes, self._look)

    async def _look(self, _: list[Change[Any]]) -> None:
        self._timer.trigger()

    async def _compare(self) -> None:
        """Write what is missing there. Raises HiveError."""
        await self._there.wait_initialized()
        other = 0
        for number, labels in self._identities.in_use().items():
            if not self._identities.stands_for(number, labels):
                continue
            if self._other.labels_of(number) in (None, labels):
                await self._other.keep(number, labels)
            else:
                other += 1
        if other:
            self._health.degraded(f"{other} identities in use here stand for other labels in {self._name}")
        else:
            self._health.ok(f"identities in use here are in {self._name}, too")
