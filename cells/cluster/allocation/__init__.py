"""Global identities: numbers that all nodes agree on, through the kvstore or CiliumIdentity objects.

In:   keys of the kvstore or CiliumIdentities; label sets that need a number.
Out:  rows of the table ``identities``; new keys or objects; keys or objects in use that are missing.
Why:  a number must have the same labels on every node. While etcd or the API server is unreachable, endpoints
      keep their identities, and label sets without a number wait.
"""

from __future__ import annotations

from typing import Any

from cells.base.addresses import Family
from cells.base.metrics import Collector, features
from cells.cluster.allocation.global_allocator import AllocationMode, AllocationSettings, GlobalAllocator
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


# The doublewrite modes.
#
# Source: Cilium 1.17, identity-allocation-mode=doublewrite-readkvstore and doublewrite-readcrd. Unlike in
#         Cilium, pods do not wait for the store that is only written.
# Why:    a cluster migrates from one store to the other while its pods run: first all agents write both, then
#         all read the other one.


class IdentityMirror:
    """Writes identities in use on this node to the second store, in the doublewrite modes.

    It compares when either store changes, and every kvstore-periodic-sync.
    """

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
        self._other: GlobalAllocator = objects if mode.reads_keys else keys
        self._other_table: ReadTable[Any, Any] = objects.table if mode.reads_keys else shared.table
        self._name = "CiliumIdentity objects" if mode.reads_keys else "the kvstore"
        if mode.reads_keys:
            keys.avoid_conflicts_with(objects)
        else:
            objects.avoid_conflicts_with(keys)
            shared.follow(store, jobs)
            used: Derived[str, OwnKey] = Derived("identity-keys", used_keys, identities.used, addresses)
            keep_keys(store, used, "identities/v1", jobs=jobs, tables=tables)
        self._timer = jobs.timer(
            "compare identity stores", self._compare, store.settings.kvstore_periodic_sync
        )
        self._timer.trigger()
        jobs.observe("compare identity stores after a kvstore resync", store.resyncs, self._changed)
        jobs.observe("watch identities in use", identities.used.changes, self._changed)
        jobs.observe("watch the labels of identities", identities.table.changes, self._changed)
        jobs.observe("watch the second identity store", self._other_table.changes, self._changed)

    async def _changed(self, _: object) -> None:
        self._timer.trigger()

    async def _compare(self) -> None:
        """Write the identities that the second store lacks. Raises HiveError."""
        await self._other_table.wait_initialized()
        conflicts = 0
        for number, labels in self._identities.in_use().items():
            if not self._identities.is_current(number, labels):
                continue
            if self._other.labels_of(number) in (None, labels):
                await self._other.ensure(number, labels)
            else:
                conflicts += 1
        if conflicts:
            self._health.degraded(f"{conflicts} identities in use here have other labels in {self._name}")
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
    """Provide the allocator over CiliumIdentities; used with an API server."""
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
    """Provide the allocator over the kvstore; used with a kvstore."""

    def node() -> str:
        own = sorted((row.ip for row in addresses.all()), key=lambda ip: ip.version)
        return str(own[0]) if own else ""

    grace = settings.identity_change_grace_period
    return KVStoreAllocator(
        store, shared, node, ClusterNumbers.of_agent(agent), grace, health=health.child("allocate"), log=log
    )


def mode(settings: AllocationSettings, store: KVStore, lifecycle: Lifecycle, log: Logger) -> AllocationMode:
    """Provide the allocation mode: crd without a kvstore."""
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
    """Provide the allocator for the mode; without kvstore and API server this node allocates alone."""

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
    allocatable = ClusterNumbers.of_agent(agent).allocatable
    return NodeAllocator(allocatable, allocatable.start - CLUSTER.start + allocation.first_identity)


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
        "Global identities in the table identities",
        provide(CiliumIdentityWatch),
        provide_private(KVStoreIdentityWatch, IdentityMirror),
        invoke(CiliumIdentityWatch, KVStoreIdentityWatch, IdentityMirror),
    ),
)
