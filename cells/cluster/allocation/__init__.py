"""Identities that all nodes of a cluster agree upon: by keys of the kvstore, or CiliumIdentity objects.

Source and writer: keys or objects fill the table ``identities``; labels that have none get one.

Why: a number means the same on every node, so only one place can give it. While that is away endpoints go on
     with what they have, and labels without a number wait.
"""

from __future__ import annotations

from typing import Any

from cells.base.addresses import Family
from cells.base.metrics import Collector, features
from cells.cluster.allocation.agreed import AgreedNumbers, AllocationMode, AllocationSettings
from cells.cluster.allocation.keys import KVStoreAllocator, KVStoreIdentityWatch, SharedIdentities, used_keys
from cells.cluster.allocation.objects import CiliumIdentityAllocator, CiliumIdentityWatch
from cells.cluster.identity.identities import ClusterAllocator, Identities, NodeAllocator
from cells.cluster.identity.numbers import CLUSTER, ClusterNumbers
from cells.config import AgentConfig
from cells.kubernetes.api_server import KubernetesAPI
from cells.kubernetes.objects.cilium_endpoint import CiliumIdentity
from cells.kubernetes.settings import ObjectSource
from cells.kvstore.own_keys import OwnKey, keep_keys
from cells.kvstore.store import KVStore
from cells.node.addresses import NodeAddress
from lifecycle import (
    Derived,
    Health,
    Hook,
    Jobs,
    Lifecycle,
    Logger,
    Member,
    ReadTable,
    Table,
    Tables,
    UsageError,
    config,
    group,
    invoke,
    module,
    provide,
    provide_private,
)

__all__ = ["cell"]


# Writes identities in use here to the other store as well: the doublewrite modes.
#
# Controller: ``identities-in-use`` in; writes what the store that is not read lacks of them.
# Source:     Cilium 1.17, identity-allocation-mode=doublewrite-readkvstore and doublewrite-readcrd. Unlike
#             there, pods wait for nothing but the store that is read.
# Why:        a cluster changes from one to the other while its pods run: all agents write both, then all read
#             the other one.


class IdentityMirror:
    """Compares when either side changes, and every kvstore-periodic-sync."""

    def __init__(
        self,
        mode: AllocationMode,
        identities: Identities,
        objects: CiliumIdentityAllocator,
        keys: KVStoreAllocator,
        shared: SharedIdentities,
        store: KVStore,
        addresses: Table[Family, NodeAddress],
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
        self._there: ReadTable[Any, Any] = objects.table if mode.reads_keys else shared.table
        self._name = "CiliumIdentity objects" if mode.reads_keys else "the kvstore"
        if mode.reads_keys:
            keys.agree_with(objects)
        else:
            objects.agree_with(keys)
            shared.follow(store, jobs)
            used: Derived[str, OwnKey] = Derived("identity-keys", used_keys, identities.used, addresses)
            keep_keys(store, used, "identities/v1", jobs=jobs, tables=tables)
        self._timer = jobs.timer("compare both", self._compare, store.settings.kvstore_periodic_sync)
        self._timer.trigger()
        jobs.observe("compare both when the store returns", store.returns, self._look)
        jobs.observe("watch identities in use", identities.used.changes, self._look)
        jobs.observe("watch the labels of identities", identities.table.changes, self._look)
        jobs.observe("watch the second identity store", self._there.changes, self._look)

    async def _look(self, _: object) -> None:
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
            self._health.degraded(f"{other} identities in use here have other labels in {self._name}")
        else:
            self._health.ok(f"identities in use here are in {self._name}, too")


def identity_objects(
    settings: AllocationSettings,
    api: KubernetesAPI,
    table: Table[tuple[str, str], CiliumIdentity],
    agent: AgentConfig,
    health: Health,
    log: Logger,
) -> CiliumIdentityAllocator:
    """Numbers by objects; used where there is an API server."""
    return CiliumIdentityAllocator(
        api,
        table,
        ClusterNumbers.of_agent(agent),
        settings.identity_change_grace_period,
        health=health.child("allocate"),
        log=log,
    )


def identity_keys(
    settings: AllocationSettings,
    store: KVStore,
    shared: SharedIdentities,
    addresses: Table[Family, NodeAddress],
    agent: AgentConfig,
    health: Health,
    log: Logger,
) -> KVStoreAllocator:
    """Numbers by keys; used where there is a kvstore."""

    def node() -> str:
        own = sorted((row.ip for row in addresses.all()), key=lambda ip: ip.version)
        return str(own[0]) if own else ""

    grace = settings.identity_change_grace_period
    return KVStoreAllocator(
        store, shared, node, ClusterNumbers.of_agent(agent), grace, health=health.child("allocate"), log=log
    )


def mode(settings: AllocationSettings, store: KVStore, lifecycle: Lifecycle, log: Logger) -> AllocationMode:
    """How nodes agree: without a kvstore by objects."""
    wanted = settings.identity_allocation_mode

    async def report() -> None:
        log.warning("identity-allocation-mode is crd: no kvstore is set", wanted=wanted.value)

    if not store.enabled and wanted.writes_both:
        lifecycle.append(Hook("report the identity allocation mode", report))
    return wanted if store.enabled else AllocationMode.CRD


def cluster_allocator(
    source: ObjectSource,
    allocation: AllocationSettings,
    mode: AllocationMode,
    objects: CiliumIdentityAllocator,
    keys: KVStoreAllocator,
    store: KVStore,
    agent: AgentConfig,
    lifecycle: Lifecycle,
) -> ClusterAllocator:
    """The allocator that agrees with the other nodes; this node alone with neither kvstore nor API server."""

    async def check() -> None:
        raise UsageError(
            f"identity-allocation-mode={mode.value}: there is no API server, and numbers of this node alone"
            f" cannot be shared through kvstore={store.settings.kvstore}: set it to kvstore"
        )

    served = source is ObjectSource.API_SERVER
    needs_objects = store.enabled and mode is not AllocationMode.KVSTORE
    if needs_objects and not served:
        lifecycle.append(Hook("check the identity allocation mode", check))
    if mode.reads_keys:
        return keys
    if served:
        return objects
    given = ClusterNumbers.of_agent(agent).given
    return NodeAllocator(given, given.start - CLUSTER.start + allocation.first_identity)


def allocation_features(mode: AllocationMode) -> Member[Collector]:
    """How nodes agree on identities, as a feature in use."""
    return features("identity-allocation-features", lambda: {"controlplane_identity_allocation": mode.value})


cell = group(
    module(
        "identity-allocation",
        "Identity numbers shared by all nodes",
        config(AllocationSettings),
        provide(identity_objects, identity_keys, cluster_allocator, mode, SharedIdentities),
        provide(allocation_features),
    ),
    module(
        "identity-watch",
        "Identities that other nodes have",
        provide(CiliumIdentityWatch),
        provide_private(KVStoreIdentityWatch, IdentityMirror),
        invoke(CiliumIdentityWatch, KVStoreIdentityWatch, IdentityMirror),
    ),
)
