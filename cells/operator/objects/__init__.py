"""The objects that the leader follows, as tables: of every kind that some cell asks for.

Source: an API server; one reflector for each kind that is asked for, none for the others.
Needs:  ClusterAPI, CustomResources (its kinds are served).   Gives: ClusterObjects.
"""

from cells.operator.objects.follow import ClusterObjects, source_statuses
from cells.operator.objects.kinds import (
    CLUSTER_IDENTITIES,
    CLUSTER_PODS,
    CLUSTER_SERVICES,
    ClusterIdentity,
    ClusterPod,
    ClusterService,
)
from lifecycle import module, provide

__all__ = [
    "CLUSTER_IDENTITIES",
    "CLUSTER_PODS",
    "CLUSTER_SERVICES",
    "ClusterIdentity",
    "ClusterObjects",
    "ClusterPod",
    "ClusterService",
    "cell",
]

cell = module("objects", "Objects of the cluster, as tables", provide(source_statuses, ClusterObjects))
