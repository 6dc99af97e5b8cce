"""The objects of Kubernetes as tables, from API servers or from a folder of manifests.

Source: fills one table per kind; nothing downstream can tell which source it was. Without a source the
        tables are initialized and empty.
Needs:  AgentConfig, KubernetesSettings.
Gives:  Resources (``table(PODS)`` and the like), KubernetesAPI (the client of those who write),
        Table[SourceStatus], Table[ManifestFile].
Why:    a table changes only by what is known: an unreachable server or a broken file changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from cells.kubernetes.manifests import ManifestFile, ManifestsSource, manifest_files
from cells.kubernetes.objects import (
    CILIUM_CIDR_GROUPS,
    CILIUM_CLUSTERWIDE_NETWORK_POLICIES,
    CILIUM_EGRESS_GATEWAYS,
    CILIUM_ENDPOINT_SLICES,
    CILIUM_ENDPOINTS,
    CILIUM_IDENTITIES,
    CILIUM_L2_ANNOUNCEMENTS,
    CILIUM_LOAD_BALANCER_IP_POOLS,
    CILIUM_LOCAL_REDIRECT_POLICIES,
    CILIUM_NETWORK_POLICIES,
    CILIUM_NODE_CONFIGS,
    CILIUM_NODES,
    CILIUM_POD_IP_POOLS,
    ENDPOINT_SLICES,
    KINDS,
    NAMESPACES,
    NETWORK_POLICIES,
    NODES,
    PODS,
    SERVICES,
    AllocatedPool,
    CiliumCIDRGroup,
    CiliumClusterwideNetworkPolicy,
    CiliumEgressGatewayPolicy,
    CiliumEndpoint,
    CiliumEndpointSlice,
    CiliumEndpointStatus,
    CiliumIdentity,
    CiliumL2AnnouncementPolicy,
    CiliumLoadBalancerIPPool,
    CiliumLocalRedirectPolicy,
    CiliumNetworkPolicy,
    CiliumNode,
    CiliumNodeConfig,
    CiliumPodIPPool,
    Condition,
    ContainerPort,
    EndpointConditions,
    EndpointSlice,
    Key,
    Kind,
    Meta,
    NamedPort,
    Namespace,
    Needed,
    NetworkPolicy,
    Node,
    Object,
    Pod,
    RequestedPool,
    Requirement,
    Selector,
    Service,
    ServicePort,
)
from cells.kubernetes.resources import Resources, source_statuses
from cells.kubernetes.settings import KubernetesSettings
from cells.kubernetes.source import SourceStatus
from cells.kubernetes.source.api_server import KubernetesAPI
from cells.observe.metrics import Collector, Family
from lifecycle import Member, Table, config, invoke, module, provide

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
    "KINDS",
    "NAMESPACES",
    "NETWORK_POLICIES",
    "NODES",
    "PODS",
    "SERVICES",
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
    "Condition",
    "ContainerPort",
    "EndpointConditions",
    "EndpointSlice",
    "Key",
    "Kind",
    "KubernetesAPI",
    "KubernetesSettings",
    "ManifestFile",
    "Meta",
    "NamedPort",
    "Namespace",
    "Needed",
    "NetworkPolicy",
    "Node",
    "Object",
    "Pod",
    "RequestedPool",
    "Requirement",
    "Resources",
    "Selector",
    "Service",
    "ServicePort",
    "SourceStatus",
    "cell",
]


def pods(resources: Resources) -> Table[Pod]:
    """The node's own pods."""
    return resources.table(PODS)


def namespaces(resources: Resources) -> Table[Namespace]:
    """Every namespace."""
    return resources.table(NAMESPACES)


def nodes(resources: Resources) -> Table[Node]:
    """Every node."""
    return resources.table(NODES)


def services(resources: Resources) -> Table[Service]:
    """Every service."""
    return resources.table(SERVICES)


def endpoint_slices(resources: Resources) -> Table[EndpointSlice]:
    """Every EndpointSlice."""
    return resources.table(ENDPOINT_SLICES)


def network_policies(resources: Resources) -> Table[NetworkPolicy]:
    """Every network policy."""
    return resources.table(NETWORK_POLICIES)


def cilium_nodes(resources: Resources) -> Table[CiliumNode]:
    """Every CiliumNode."""
    return resources.table(CILIUM_NODES)


def cilium_identities(resources: Resources) -> Table[CiliumIdentity]:
    """Every CiliumIdentity."""
    return resources.table(CILIUM_IDENTITIES)


def cilium_endpoints(resources: Resources) -> Table[CiliumEndpoint]:
    """Every CiliumEndpoint."""
    return resources.table(CILIUM_ENDPOINTS)


def client_metrics(api: KubernetesAPI) -> Member[Collector]:
    """Requests as metrics, where there is a server."""

    async def collect() -> Iterable[Family]:
        if (calls := api.calls) is None:
            return ()
        from cells.kubernetes.client.calls import families

        return families(calls)

    return Collector("k8s-client", collect)


cell = module(
    "kubernetes",
    "Objects of Kubernetes, from API servers or manifests",
    config(KubernetesSettings),
    provide(source_statuses, manifest_files, Resources, KubernetesAPI, ManifestsSource),
    provide(pods, namespaces, nodes, services, endpoint_slices, network_policies),
    provide(cilium_nodes, cilium_identities, cilium_endpoints, client_metrics),
    invoke(KubernetesAPI, ManifestsSource),
)
