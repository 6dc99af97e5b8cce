"""The objects that the leader follows, as tables: of every kind that some cell asks for.

Source: an API server; one reflector for each kind that is asked for, none for the others.
Needs:  ClusterAPI, CustomResources (its kinds are served).   Gives: ClusterObjects, selector_of().
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
from cells.operator.objects.selectors import selector_of
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
    "selector_of",
]

cell = module("objects", "Objects of the cluster, as tables", provide(source_statuses, ClusterObjects))
