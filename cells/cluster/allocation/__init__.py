"""Identities that all nodes of a cluster agree upon: CiliumIdentity objects of an API server.

Source and writer: objects fill the table ``identities``; labels without an object get one.
Needs:  KubernetesAPI, Table[CiliumIdentity], Identities.   Gives: ClusterAllocator.
Why:    a number says the same on every node, so only one place can give it. While that is away endpoints go
        on with what they have, and what nobody has a number for waits.
"""

from cells.cluster.allocation.allocator import CiliumIdentityAllocator
from cells.cluster.allocation.settings import AllocationMode, AllocationSettings
from cells.cluster.allocation.watch import CiliumIdentityWatch
from cells.cluster.identity import CLUSTER, ClusterAllocator, NodeAllocator
from cells.kubernetes import CiliumIdentity, KubernetesAPI, KubernetesSettings
from lifecycle import Health, Logger, Table, config, invoke, module, provide

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


def cluster_allocator(settings: KubernetesSettings, objects: CiliumIdentityAllocator) -> ClusterAllocator:
    """Whoever agrees with the other nodes; this node alone where there is no API server."""
    return objects if settings.asks_api_server else NodeAllocator(CLUSTER)


cell = module(
    "identity-allocation",
    "Identities that all nodes agree upon",
    config(AllocationSettings),
    provide(identity_objects, cluster_allocator, CiliumIdentityWatch),
    invoke(CiliumIdentityWatch),
)
