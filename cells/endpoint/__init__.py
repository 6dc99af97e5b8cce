"""The endpoints of this node: the ``endpoints`` table, and the cell that creates, changes and removes them.

A request (``PUT /endpoint``, or our CNI plugin's ADD) becomes a table row, entries in BPF maps, programs on
the link and a state directory; a failed request leaves none of them.

Why: a pod waits for its endpoint, so creation is synchronous and makes few system calls. Slow work (conntrack
scrub, retries) runs later.

Source: Cilium's pkg/endpoint and pkg/endpointmanager.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from cells.base import metrics
from cells.base.metrics import MetricFamily, counter, gauge, histogram
from cells.config import AgentConfig
from cells.config.shared import EndpointSettings, PodRouting
from cells.datapath.collector import ConntrackCollector
from cells.datapath.datapath import Datapath
from cells.endpoint.changes import (
    EndpointChanges,
    Enforced,
    PodLabelsWatch,
    PolicyEnforcement,
)
from cells.endpoint.creation import (
    Builds,
    EndpointCreation,
    NewEndpoint,
    RegenerationRecovery,
    controllers_of,
)
from cells.endpoint.kernel import (
    ConntrackScrub,
    EndpointAddresses,
    EndpointMaps,
    EndpointPrograms,
    EndpointRoutes,
    KernelMaps,
    Realization,
    config_row,
    ifindex_key,
    lxc_value,
    resource_of,
    restored_claims,
)
from cells.endpoint.labels import Relabel
from cells.endpoint.manager import EndpointResources, Endpoints
from cells.endpoint.model import (
    Code,
    DatapathConfiguration,
    Endpoint,
    EndpointError,
    EndpointHealthStatus,
    EndpointRequest,
    IPAddress,
    RegenerationLevel,
    State,
    StatusEntry,
    StatusLog,
    Subject,
    displayed,
    health_of,
)
from cells.endpoint.pods import MAC_ANNOTATION, KubernetesPods, PodFacts, PodMetadata, PodName
from cells.endpoint.regeneration import Regeneration, Regenerations
from cells.endpoint.registry import INDEXES, Registry
from cells.endpoint.state.directory import Scan, StateFiles
from cells.endpoint.state.saved import SavedEndpoint, SavedLookup, SavedNames, SavedZombie
from cells.maps.node_maps import Maps
from cells.netlink.links import HostLinks
from cells.node.ipam import Ipam
from cells.node.local_addresses import LocalAddresses
from lifecycle import Member, Table, config, invoke, module, provide, provide_private

__all__ = [
    "MAC_ANNOTATION",
    "Builds",
    "Code",
    "ConntrackScrub",
    "DatapathConfiguration",
    "Endpoint",
    "EndpointAddresses",
    "EndpointChanges",
    "EndpointError",
    "EndpointHealthStatus",
    "EndpointMaps",
    "EndpointPrograms",
    "EndpointRequest",
    "EndpointRoutes",
    "Endpoints",
    "Enforced",
    "IPAddress",
    "KubernetesPods",
    "NewEndpoint",
    "PodFacts",
    "PodMetadata",
    "PodName",
    "PolicyEnforcement",
    "Regeneration",
    "RegenerationLevel",
    "RegenerationRecovery",
    "Regenerations",
    "SavedEndpoint",
    "SavedLookup",
    "SavedNames",
    "SavedZombie",
    "Scan",
    "State",
    "StateFiles",
    "StatusEntry",
    "StatusLog",
    "Subject",
    "cell",
    "config_row",
    "controllers_of",
    "displayed",
    "health_of",
    "ifindex_key",
    "lxc_value",
    "resource_of",
    "restored_claims",
]


# Cilium's metrics of endpoints.
#
# Source: Cilium 1.17, cilium_endpoint*, cilium_policy_regeneration*, cilium_k8s_event_lag_seconds.


def families(endpoints: Endpoints, lag: float | None = None) -> Iterator[MetricFamily]:
    """Yield the metrics of endpoints: their number, states and regenerations.

    ``lag`` is the Kubernetes event lag of the last pod; None if unknown.
    """
    present = endpoints.all()
    yield gauge("cilium_endpoint", "Number of endpoints managed by this agent", len(present))
    yield gauge(
        "cilium_endpoint_state",
        "Count of all endpoints, tagged by different endpoint states",
        Counter(endpoints.shown_state(endpoint).value for endpoint in present),
        "endpoint_state",
    )
    yield gauge(
        "cilium_endpoint_max_ifindex",
        "Maximum interface index observed for existing endpoints",
        max((endpoint.ifindex for endpoint in present), default=0),
        on=False,
    )
    yield gauge(
        "cilium_k8s_event_lag_seconds",
        "Lag for Kubernetes events - computed value between receiving a CNI ADD event from kubelet and a Pod"
        " event received from kube-api-server",
        {"k8s": lag} if lag is not None else {},
        "source",
        on=False,
    )
    yield from _builds(endpoints.builds)


def _builds(builds: Builds) -> Iterator[MetricFamily]:
    """Yield the metrics of regenerations, under Cilium's names for endpoints and for policy.

    Cilium declares the outcome ``failure`` but counts under ``fail``, so both are exported.
    """
    outcomes = {"success": builds.succeeded, "fail": builds.failed, "failure": 0}
    took = {("total", status): spread for status, spread in builds.took.items() if spread.count}
    yield counter(
        "cilium_endpoint_regenerations_total",
        "Count of all endpoint regenerations that have completed, tagged by outcome",
        outcomes,
        "outcome",
    )
    yield counter(
        "cilium_policy_regeneration_total",
        "Total number of successful policy regenerations",
        builds.succeeded,
    )
    for name, what in (("endpoint_regeneration", "Endpoint"), ("policy_regeneration", "Policy")):
        yield histogram(
            f"cilium_{name}_time_stats_seconds",
            f"{what} regeneration time stats labeled by the scope",
            took,
            "scope status",
        )


# Assembly of the cell.


def endpoint_table() -> Table[int, Endpoint]:
    """Create the ``endpoints`` table, by endpoint id; indexed by registered names and by container."""
    return Table("endpoints", key=lambda endpoint: endpoint.id, indexes=INDEXES)


def endpoint_maps(maps: Maps, local: LocalAddresses, collector: ConntrackCollector) -> EndpointMaps:
    """Provide the node's BPF maps as endpoints use them."""
    return KernelMaps(maps, local, collector)


def endpoint_programs(datapath: Datapath) -> EndpointPrograms:
    """Provide the node's datapath as endpoints use it."""
    return datapath


def endpoint_routes(links: HostLinks) -> EndpointRoutes:
    """Provide the node's routes as endpoints use them."""
    return links


def endpoint_addresses(ipam: Ipam) -> EndpointAddresses:
    """Provide the node's IPAM as endpoints use it."""
    return ipam


def state_files(agent: AgentConfig) -> StateFiles:
    """Provide the node's state directory."""
    return StateFiles(agent.state)


def pod_routing(settings: EndpointSettings) -> PodRouting:
    """Provide whether each pod has its own route (``enable-endpoint-routes``)."""
    return PodRouting(endpoint_routes=settings.enable_endpoint_routes)


def pod_metadata(pods: KubernetesPods) -> PodMetadata:
    """Provide labels and MAC addresses of pods for new endpoints."""
    return pods


def endpoint_metrics(all_endpoints: Endpoints, pods: PodLabelsWatch) -> Member[metrics.Collector]:
    """Provide the metrics of endpoints."""

    async def collect() -> Iterable[metrics.MetricFamily]:

        return families(all_endpoints, pods.lag)

    return metrics.Collector("endpoint", collect)


cell = module(
    "endpoint",
    "Endpoints of this node",
    config(EndpointSettings),
    provide(
        pod_routing,
        endpoint_table,
        endpoint_maps,
        endpoint_programs,
        endpoint_routes,
        endpoint_addresses,
        state_files,
        KubernetesPods,
        ConntrackScrub,
        RegenerationRecovery,
        Endpoints,
        Regenerations,
        EndpointChanges,
        PolicyEnforcement,
        PodLabelsWatch,
        endpoint_metrics,
    ),
    provide_private(
        pod_metadata, Registry, Builds, Realization, EndpointCreation, Relabel, EndpointResources
    ),
    invoke(PodLabelsWatch),
)
