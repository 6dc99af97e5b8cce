"""The Kubernetes objects that the agent reads and writes, with one narrow struct per kind.

Why:   narrow structs make it cheap to decode ten thousand pods. Never write one back as a whole, since that
       would delete the fields that it lacks: use patch or apply.
"""

from __future__ import annotations

from typing import Any, Final

from cells.kubernetes.objects.cilium_endpoint import (
    CILIUM_ENDPOINT_SLICES,
    CILIUM_ENDPOINTS,
    CILIUM_IDENTITIES,
)
from cells.kubernetes.objects.cilium_node import CILIUM_NODES
from cells.kubernetes.objects.cilium_policy import (
    CILIUM_CIDR_GROUPS,
    CILIUM_CLUSTERWIDE_NETWORK_POLICIES,
    CILIUM_EGRESS_GATEWAYS,
    CILIUM_LOCAL_REDIRECT_POLICIES,
    CILIUM_NETWORK_POLICIES,
)
from cells.kubernetes.objects.cilium_pools import (
    CILIUM_L2_ANNOUNCEMENTS,
    CILIUM_LOAD_BALANCER_IP_POOLS,
    CILIUM_NODE_CONFIGS,
    CILIUM_POD_IP_POOLS,
)
from cells.kubernetes.objects.core import ENDPOINT_SLICES, NAMESPACES, NETWORK_POLICIES, NODES, PODS, SERVICES
from cells.kubernetes.objects.kind import Kind

__all__ = ["KINDS"]


KINDS: Final[tuple[Kind[Any], ...]] = (
    NODES,
    NAMESPACES,
    PODS,
    SERVICES,
    ENDPOINT_SLICES,
    NETWORK_POLICIES,
    CILIUM_NODES,
    CILIUM_IDENTITIES,
    CILIUM_ENDPOINTS,
    CILIUM_ENDPOINT_SLICES,
    CILIUM_NETWORK_POLICIES,
    CILIUM_CLUSTERWIDE_NETWORK_POLICIES,
    CILIUM_CIDR_GROUPS,
    CILIUM_POD_IP_POOLS,
    CILIUM_LOAD_BALANCER_IP_POOLS,
    CILIUM_L2_ANNOUNCEMENTS,
    CILIUM_LOCAL_REDIRECT_POLICIES,
    CILIUM_EGRESS_GATEWAYS,
    CILIUM_NODE_CONFIGS,
)
"""All kinds that every agent reads."""
