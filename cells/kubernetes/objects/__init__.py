"""The objects of Kubernetes that the agent reads and writes: one narrow definition per kind.

Needs: nothing.   Gives: Object, Meta, Kind, every kind with its struct, KINDS.
Why:   decoding into narrow structs is what makes ten thousand pods cheap; a narrow struct is never written
       back as a whole, since that would drop what it does not know: patch, or apply.
"""

from __future__ import annotations

from typing import Any, Final

from cells.kubernetes.objects.cilium_endpoint import (
    CILIUM_ENDPOINT_SLICES,
    CILIUM_ENDPOINTS,
    CILIUM_IDENTITIES,
    CiliumEndpoint,
    CiliumEndpointSlice,
    CiliumEndpointStatus,
    CiliumIdentity,
    CoreEndpoint,
    NamedPort,
)
from cells.kubernetes.objects.cilium_node import (
    CILIUM_NODES,
    AllocatedPool,
    CiliumNode,
    Needed,
    RequestedPool,
)
from cells.kubernetes.objects.cilium_policy import (
    CILIUM_CIDR_GROUPS,
    CILIUM_CLUSTERWIDE_NETWORK_POLICIES,
    CILIUM_EGRESS_GATEWAYS,
    CILIUM_LOCAL_REDIRECT_POLICIES,
    CILIUM_NETWORK_POLICIES,
    CiliumCIDRGroup,
    CiliumClusterwideNetworkPolicy,
    CiliumEgressGatewayPolicy,
    CiliumLocalRedirectPolicy,
    CiliumNetworkPolicy,
    RedirectPort,
)
from cells.kubernetes.objects.cilium_pools import (
    CILIUM_L2_ANNOUNCEMENTS,
    CILIUM_LOAD_BALANCER_IP_POOLS,
    CILIUM_NODE_CONFIGS,
    CILIUM_POD_IP_POOLS,
    CiliumL2AnnouncementPolicy,
    CiliumLoadBalancerIPPool,
    CiliumNodeConfig,
    CiliumPodIPPool,
)
from cells.kubernetes.objects.core import NAMESPACES, NODES, PODS, ContainerPort, Namespace, Node, Pod
from cells.kubernetes.objects.kind import Column, Kind
from cells.kubernetes.objects.known_endpoint import (
    KNOWN_ENDPOINT_SLICES,
    KNOWN_ENDPOINTS,
    NODE_NAME,
    KnownEndpoint,
    KnownEndpointSlice,
    owner_of,
    said,
)
from cells.kubernetes.objects.meta import Condition, DatedMeta, Key, Meta, Object, Requirement, Selector
from cells.kubernetes.objects.nulls import convert
from cells.kubernetes.objects.services import (
    ENDPOINT_SLICES,
    HEADLESS,
    NETWORK_POLICIES,
    SERVICE_TYPES,
    SERVICES,
    EndpointConditions,
    EndpointSlice,
    NetworkPolicy,
    Service,
    ServicePort,
    served_by,
)

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
"""Every kind there is a definition of."""

__all__ = [
    "CILIUM_CIDR_GROUPS",
    "CILIUM_CLUSTERWIDE_NETWORK_POLICIES",
    "CILIUM_EGRESS_GATEWAYS",
    "CILIUM_ENDPOINTS",
    "CILIUM_ENDPOINT_SLICES",
    "CILIUM_IDENTITIES",
    "CILIUM_L2_ANNOUNCEMENTS",
    "CILIUM_LOAD_BALANCER_IP_POOLS",
    "CILIUM_LOCAL_REDIRECT_POLICIES",
    "CILIUM_NETWORK_POLICIES",
    "CILIUM_NODES",
    "CILIUM_NODE_CONFIGS",
    "CILIUM_POD_IP_POOLS",
    "ENDPOINT_SLICES",
    "HEADLESS",
    "KINDS",
    "KNOWN_ENDPOINTS",
    "KNOWN_ENDPOINT_SLICES",
    "NAMESPACES",
    "NETWORK_POLICIES",
    "NODES",
    "NODE_NAME",
    "PODS",
    "SERVICES",
    "SERVICE_TYPES",
    "AllocatedPool",
    "CiliumCIDRGroup",
    "CiliumClusterwideNetworkPolicy",
    "CiliumEgressGatewayPolicy",
    "CiliumEndpoint",
    "CiliumEndpointSlice",
    "CiliumEndpointStatus",
    "CiliumIdentity",
    "CiliumL2AnnouncementPolicy",
    "CiliumLoadBalancerIPPool",
    "CiliumLocalRedirectPolicy",
    "CiliumNetworkPolicy",
    "CiliumNode",
    "CiliumNodeConfig",
    "CiliumPodIPPool",
    "Column",
    "Condition",
    "ContainerPort",
    "CoreEndpoint",
    "DatedMeta",
    "EndpointConditions",
    "EndpointSlice",
    "Key",
    "Kind",
    "KnownEndpoint",
    "KnownEndpointSlice",
    "Meta",
    "NamedPort",
    "Namespace",
    "Needed",
    "NetworkPolicy",
    "Node",
    "Object",
    "Pod",
    "RedirectPort",
    "RequestedPool",
    "Requirement",
    "Selector",
    "Service",
    "ServicePort",
    "convert",
    "owner_of",
    "said",
    "served_by",
]
