"""How the endpoint cell is put together.

Needs: AgentConfig, Controllers, Identities, Ipcache, EndpointPolicies, Maps, Datapath, HostLinks, Ipam,
objects of Kubernetes.   Gives: cell.
"""

from collections.abc import Iterable

from cells.cluster.identity import Identities, Identity
from cells.cluster.ipcache import Ipcache
from cells.config import AgentConfig
from cells.datapath import Collector, Datapath
from cells.endpoint.kernel.conntrack_scrub import ConntrackScrub
from cells.endpoint.kernel.edges import (
    EndpointAddresses,
    EndpointMaps,
    EndpointPrograms,
    EndpointRoutes,
)
from cells.endpoint.kernel.rows import KernelMaps
from cells.endpoint.manager import Endpoints
from cells.endpoint.metadata.follow import PodLabelsWatch
from cells.endpoint.metadata.pods import KubernetesPods
from cells.endpoint.options.changes import EndpointChanges
from cells.endpoint.options.enforcement import PolicyEnforcement
from cells.endpoint.options.settings import EndpointSettings
from cells.endpoint.regeneration.queue import Regenerations
from cells.endpoint.regeneration.recovery import RegenerationRecovery
from cells.endpoint.state.files import StateFiles
from cells.endpoint.table.model import Endpoint
from cells.endpoint.table.registry import INDEXES
from cells.ipam import Ipam
from cells.kubernetes import Namespace, Pod
from cells.maps import Maps
from cells.node.local_addresses import LocalAddresses
from cells.node.netlink import HostLinks
from cells.observe import metrics
from cells.policy.maps import EndpointPolicies
from lifecycle import Health, Jobs, Logger, Member, Table, config, invoke, module, provide


def endpoint_table() -> Table[Endpoint]:
    """The ``endpoints`` table, by endpoint id; indexed by every name and by container."""
    return Table("endpoints", key=lambda endpoint: endpoint.id, indexes=INDEXES)


def endpoint_maps(maps: Maps, local: LocalAddresses, collector: Collector) -> EndpointMaps:
    """The node's maps, as endpoints use them."""
    return KernelMaps(maps, local, collector)


def endpoint_programs(datapath: Datapath) -> EndpointPrograms:
    """The node's datapath, as endpoints use it."""
    return datapath


def endpoint_routes(links: HostLinks) -> EndpointRoutes:
    """The node's routes, as endpoints use them."""
    return links


def endpoint_addresses(ipam: Ipam) -> EndpointAddresses:
    """The node's address allocator, as endpoints use it."""
    return ipam


def state_files(agent: AgentConfig) -> StateFiles:
    """The node's state directory."""
    return StateFiles(agent.state)


def endpoints(
    *,
    table: Table[Endpoint],
    identities: Identities,
    ipcache: Ipcache,
    maps: EndpointMaps,
    programs: EndpointPrograms,
    routes: EndpointRoutes,
    addresses: EndpointAddresses,
    files: StateFiles,
    scrub: ConntrackScrub,
    recovery: RegenerationRecovery,
    policies: EndpointPolicies,
    pods: KubernetesPods,
    settings: EndpointSettings,
    log: Logger,
) -> Endpoints:
    """The node's endpoints."""
    return Endpoints(
        table=table,
        identities=identities,
        ipcache=ipcache,
        maps=maps,
        programs=programs,
        routes=routes,
        addresses=addresses,
        files=files,
        scrub=scrub,
        recovery=recovery,
        policies=policies,
        verify_source=settings.enable_source_ip_verification,
        endpoint_routes=settings.enable_endpoint_routes,
        pods=pods,
        log=log,
    )


def pod_labels_watch(
    pods: KubernetesPods,
    changes: EndpointChanges,
    endpoints: Table[Endpoint],
    objects: Table[Pod],
    namespaces: Table[Namespace],
    identities: Table[Identity],
    *,
    jobs: Jobs,
    health: Health,
    log: Logger,
) -> PodLabelsWatch:
    """Endpoints follow their pods."""
    return PodLabelsWatch(
        pods,
        changes,
        endpoints,
        pod_table=objects,
        namespaces=namespaces,
        identities=identities,
        jobs=jobs,
        health=health,
        log=log,
    )


def endpoint_metrics(all_endpoints: Endpoints) -> Member[metrics.Collector]:
    """Endpoints as metrics."""

    async def collect() -> Iterable[metrics.Family]:
        from cells.endpoint.metrics import families

        return families(all_endpoints)

    return metrics.Collector("endpoint", collect)


cell = module(
    "endpoint",
    "Endpoints of this node",
    config(EndpointSettings),
    provide(
        endpoint_table,
        endpoint_maps,
        endpoint_programs,
        endpoint_routes,
        endpoint_addresses,
        state_files,
        KubernetesPods,
        ConntrackScrub,
        RegenerationRecovery,
        endpoints,
        Regenerations,
        EndpointChanges,
        PolicyEnforcement,
        pod_labels_watch,
        endpoint_metrics,
    ),
    invoke(PodLabelsWatch),
)
