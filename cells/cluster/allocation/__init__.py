"""Identities that all nodes of a cluster agree upon: by keys of the kvstore, or CiliumIdentity objects.

Source and writer: keys or objects fill the table ``identities``; labels that have none get one.
Needs:  KVStore, Table[NodeAddress]; KubernetesAPI, Table[CiliumIdentity]; Identities.
Gives:  ClusterAllocator.
Why:    a number says the same on every node, so only one place can give it. While that is away endpoints go
        on with what they have, and what nobody has a number for waits.
"""

from cells.cluster.allocation.allocator import CiliumIdentityAllocator
from cells.cluster.allocation.mirror import IdentityMirror
from cells.cluster.allocation.settings import AllocationMode, AllocationSettings
from cells.cluster.allocation.shared import SharedIdentities
from cells.cluster.allocation.store import KVStoreAllocator
from cells.cluster.allocation.store_watch import KVStoreIdentityWatch
from cells.cluster.allocation.watch import CiliumIdentityWatch
from cells.cluster.identity import CLUSTER, ClusterAllocator, NodeAllocator
from cells.cluster.kvstore import KVStore
from cells.kubernetes import CiliumIdentity, KubernetesAPI, KubernetesSettings
from cells.node.addresses import NodeAddress
from lifecycle import (
    Health,
    Hook,
    Lifecycle,
    Logger,
    Table,
    UsageError,
    config,
    group,
    invoke,
    module,
    provide,
    provide_private,
)

__all__ = ["AllocationMode", "AllocationSettings", "cell"]


def identity_objects(
    settings: AllocationSettings,
    api: KubernetesAPI,
    table: Table[CiliumIdentity],
    health: Health,
    log: Logger,
) -> CiliumIdentityAllocator:
    """Numbers by objects; used where there is an API server."""
    return CiliumIdentityAllocator(
        api, table, settings.identity_change_grace_period, health=health.child("allocate"), log=log
    )


def identity_keys(
    settings: AllocationSettings,
    store: KVStore,
    shared: SharedIdentities,
    addresses: Table[NodeAddress],
    health: Health,
    log: Logger,
) -> KVStoreAllocator:
    """Numbers by keys; used where there is a kvstore."""

    def node() -> str:
        own = sorted((row.ip for row in addresses.all()), key=lambda ip: ip.version)
        return str(own[0]) if own else ""

    grace = settings.identity_change_grace_period
    return KVStoreAllocator(store, shared, node, grace, health=health.child("allocate"), log=log)


def mode(settings: AllocationSettings, store: KVStore, lifecycle: Lifecycle, log: Logger) -> AllocationMode:
    """How nodes agree: without a kvstore by objects."""
    wanted = settings.identity_allocation_mode

    async def tell() -> None:
        log.warning("identity-allocation-mode is crd: no kvstore is set", wanted=wanted.value)

    if not store.enabled and wanted.writes_both:
        lifecycle.append(Hook("report how nodes agree upon identities", tell))
    return wanted if store.enabled else AllocationMode.CRD


def cluster_allocator(
    settings: KubernetesSettings,
    allocation: AllocationSettings,
    mode: AllocationMode,
    objects: CiliumIdentityAllocator,
    keys: KVStoreAllocator,
    store: KVStore,
    lifecycle: Lifecycle,
) -> ClusterAllocator:
    """Whoever agrees with the other nodes; this node alone where there is neither kvstore nor API server."""

    async def check() -> None:
        raise UsageError(
            f"identity-allocation-mode={mode.value}: there is no API server, and numbers of this node alone"
            f" cannot be shared through kvstore={store.settings.kvstore}: set it to kvstore"
        )

    needs_objects = store.enabled and mode is not AllocationMode.KVSTORE
    if needs_objects and not settings.asks_api_server:
        lifecycle.append(Hook("check how nodes agree upon identities", check))
    if mode.reads_keys:
        return keys
    if settings.asks_api_server:
        return objects
    return NodeAllocator(CLUSTER, allocation.first_identity)


cell = group(
    module(
        "identity-allocation",
        "Numbers that all nodes agree upon",
        config(AllocationSettings),
        provide(identity_objects, identity_keys, cluster_allocator, mode, SharedIdentities),
    ),
    module(
        "identity-watch",
        "Identities that other nodes have",
        provide(CiliumIdentityWatch),
        provide_private(KVStoreIdentityWatch, IdentityMirror),
        invoke(CiliumIdentityWatch, KVStoreIdentityWatch, IdentityMirror),
    ),
)
