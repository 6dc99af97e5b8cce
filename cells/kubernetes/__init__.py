"""Tables of Kubernetes objects, read from API servers or from a folder of manifests.

Source: fills one table per kind; consumers do not depend on which source it is. Without a source the tables
        are initialized and empty.
Why:    missing information deletes nothing: an unreachable server or an invalid file changes no table.
"""

from __future__ import annotations

from collections.abc import Iterable

from cells.base.metrics import Collector, MetricFamily
from cells.kubernetes.api_server import KubernetesAPI
from cells.kubernetes.manifests import ManifestsSource, manifest_files
from cells.kubernetes.objects.cilium_endpoint import CILIUM_IDENTITIES, CiliumIdentity
from cells.kubernetes.objects.cilium_node import CILIUM_NODES, CiliumNode
from cells.kubernetes.objects.core import (
    ENDPOINT_SLICES,
    NAMESPACES,
    NETWORK_POLICIES,
    NODES,
    PODS,
    SERVICES,
    EndpointSlice,
    Namespace,
    NetworkPolicy,
    Node,
    Pod,
    Service,
)
from cells.kubernetes.resources import Resources, service_addresses, source_statuses
from cells.kubernetes.settings import KubernetesSettings, ObjectSource
from cells.kubernetes.sink import missing_objects
from lifecycle import Member, Table, config, invoke, module, provide

__all__ = ["cell"]


# The composition of the cell.


def pods(resources: Resources) -> Table[tuple[str, str], Pod]:
    """The pods of this node."""
    return resources.table(PODS)


def namespaces(resources: Resources) -> Table[tuple[str, str], Namespace]:
    """Every namespace."""
    return resources.table(NAMESPACES)


def nodes(resources: Resources) -> Table[tuple[str, str], Node]:
    """Every node."""
    return resources.table(NODES)


def services(resources: Resources) -> Table[tuple[str, str], Service]:
    """Every service."""
    return resources.table(SERVICES)


def endpoint_slices(resources: Resources) -> Table[tuple[str, str], EndpointSlice]:
    """Every EndpointSlice."""
    return resources.table(ENDPOINT_SLICES)


def network_policies(resources: Resources) -> Table[tuple[str, str], NetworkPolicy]:
    """Every network policy."""
    return resources.table(NETWORK_POLICIES)


def cilium_nodes(resources: Resources) -> Table[tuple[str, str], CiliumNode]:
    """Every CiliumNode."""
    return resources.table(CILIUM_NODES)


def cilium_identities(resources: Resources) -> Table[tuple[str, str], CiliumIdentity]:
    """Every CiliumIdentity."""
    return resources.table(CILIUM_IDENTITIES)


def client_metrics(api: KubernetesAPI) -> Member[Collector]:
    """Metrics of requests, if there is an API server."""

    async def collect() -> Iterable[MetricFamily]:
        if (calls := api.calls) is None:
            return ()
        from cells.kubernetes.client.calls import families

        return families(calls)

    return Collector("k8s-client", collect)


def object_metrics(resources: Resources) -> Member[Collector]:
    """Metrics of the events of sources."""

    async def collect() -> Iterable[MetricFamily]:
        from cells.kubernetes.sink import families

        return families(resources.events)

    return Collector("k8s-objects", collect)


def object_source(settings: KubernetesSettings) -> ObjectSource:
    """The source of objects that the settings select."""
    return settings.source


cell = module(
    "kubernetes",
    "Objects of Kubernetes, from API servers or manifests",
    config(KubernetesSettings),
    provide(
        object_source,
        source_statuses,
        missing_objects,
        manifest_files,
        Resources,
        KubernetesAPI,
        ManifestsSource,
    ),
    provide(pods, namespaces, nodes, services, endpoint_slices, network_policies, service_addresses),
    provide(cilium_nodes, cilium_identities, client_metrics, object_metrics),
    invoke(KubernetesAPI, ManifestsSource),
)
