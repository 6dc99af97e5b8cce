"""Services, to pods and to clients outside: from Kubernetes objects to the datapath's maps.

Source:     the tables of Services, EndpointSlices, Nodes and, for host ports, Pods, and addresses for node
            ports; the table ``frontends`` is computed from them.
Reconciler: ``frontends`` in, the maps ``cilium_lb*`` out; their only writer.
Why:        entries of an earlier agent keep their numbers, and stale ones are removed only after all Services
            and EndpointSlices are listed: connections through services survive a restart. Without a source of
            objects, the entries stay, and a warning is logged.
"""

from collections.abc import Iterable
from functools import partial
from typing import Final

from cells.base.metrics import Collector, MetricFamily, counter, features, ingested
from cells.cluster.nodes.node import ClusterNode
from cells.clustermesh.tables import MeshServices
from cells.config import AgentConfig
from cells.config.shared import ServiceProxyName, ServiceReach
from cells.datapath.settings import DatapathSettings, ServicePrograms, service_programs
from cells.kubernetes.objects.cilium_policy import CILIUM_LOCAL_REDIRECT_POLICIES
from cells.kubernetes.objects.core import ENDPOINT_SLICES, NODES, PODS, SERVICES
from cells.kubernetes.resources import Resources
from cells.kubernetes.settings import ObjectSource
from cells.maps.specs import MapSettings, MapSizing, map_sizing
from cells.node.devices import Device
from cells.services import (
    INTERNAL,
    PROTOCOLS,
    Backend,
    BackendState,
    Frontend,
    FrontendKey,
    LoadBalancerOptions,
    Seed,
    ServiceAddress,
    ServiceName,
    ServiceType,
)
from cells.services.control.balancer import LoadBalancer
from cells.services.control.manual import (
    ManualServices,
    RequestedService,
    manual_services,
    manual_states,
)
from cells.services.control.tables import (
    ImplementationDelays,
    LocalRedirect,
    MapFullFrontends,
    ServedFrontend,
    ServiceConflict,
    ServiceReports,
    address_events,
    backend_events,
    delay_metrics,
    dependency,
    local_redirects,
    metrics,
    redirect_events,
    refused_addresses,
    served_frontends,
    service_conflicts,
    service_events,
)
from cells.services.control.target import KernelServices, ServiceMaps, ServicesTarget
from cells.services.control.watch import ServiceWatch, WatchedObjects
from cells.services.maglev import MaglevTables
from cells.services.model.backends import backends_by_port, backends_of, selectable
from cells.services.model.claims import RefusedAddress, frontends
from cells.services.model.frontends import is_headless, visible_in_cluster
from cells.services.node_ports import ForwardingSettings, NodePortMode, NodePorts
from cells.tunnel.settings import PodTunnel
from lifecycle import (
    Jobs,
    Logger,
    Member,
    ReadTable,
    Reconciler,
    Settings,
    Table,
    Tables,
    after,
    config,
    invoke,
    minutes,
    module,
    provide,
    provide_private,
)

__all__ = [
    "INTERNAL",
    "PROTOCOLS",
    "Backend",
    "BackendState",
    "Frontend",
    "FrontendKey",
    "LoadBalancerOptions",
    "LocalRedirect",
    "ManualServices",
    "RefusedAddress",
    "RequestedService",
    "ServedFrontend",
    "ServiceAddress",
    "ServiceConflict",
    "ServiceMaps",
    "ServiceName",
    "ServiceType",
    "backends_by_port",
    "backends_of",
    "cell",
    "is_headless",
    "selectable",
    "visible_in_cluster",
]

SWEEP: Final = minutes(1)


class LoadBalancerSettings(Settings, frozen=True):
    """Which parts of services are served."""

    enable_external_ips_of_nodes: bool = False
    """Serve externalIPs that are a node's address: who may create services can take the node's own ports."""

    enable_session_affinity: bool = False
    """Whether clients of a service with sessionAffinity ClientIP stay with one backend."""

    enable_svc_source_range_check: bool = True
    """Serve load balancers' addresses only to loadBalancerSourceRanges, where a service has some."""

    bpf_lb_source_range_all_types: bool = False
    """Serve node ports, external addresses and cluster addresses only to loadBalancerSourceRanges too, to
    clients outside."""

    enable_internal_traffic_policy: bool = True
    """Follow internalTrafficPolicy Local of services: without it, clients inside reach all backends."""

    enable_k8s_terminating_endpoint: bool = True
    """Let connections to terminating pods go on, and serve by them while no other backend is active."""

    enable_service_topology: bool = False
    """Prefer backends that are hinted for the node's zone."""

    enable_local_redirect_policy: bool = False
    """Follow CiliumLocalRedirectPolicies: services and addresses that go to pods of this node instead."""

    bpf_lb_proto_diff: bool = True
    """Distinguish protocols: two services may share a port, in TCP and in UDP; else one has it."""


def options(
    agent: AgentConfig,
    settings: LoadBalancerSettings,
    reach: ServiceReach,
    proxy: ServiceProxyName,
    programs: ServicePrograms | None = None,
    sizing: MapSizing | None = None,
    mode: NodePortMode | None = None,
) -> LoadBalancerOptions:
    """Collect the options of load balancing from several settings; ClusterIP services are always served."""
    programs = programs or service_programs(DatapathSettings())
    mode = mode or NodePortMode(ForwardingSettings(), programs, PodTunnel(used=False))
    first, last = programs.port_range
    return LoadBalancerOptions(
        enable_ipv4=agent.ipv4,
        enable_ipv6=agent.ipv6,
        enable_node_port=reach.node_ports,
        enable_external_ips=reach.external_ips,
        enable_external_ips_of_nodes=settings.enable_external_ips_of_nodes,
        enable_host_port=reach.host_ports,
        enable_session_affinity=reach.replaces_kube_proxy or settings.enable_session_affinity,
        enable_svc_source_range_check=settings.enable_svc_source_range_check,
        bpf_lb_source_range_all_types=settings.bpf_lb_source_range_all_types,
        enable_internal_traffic_policy=settings.enable_internal_traffic_policy,
        enable_k8s_terminating_endpoint=settings.enable_k8s_terminating_endpoint,
        enable_service_topology=settings.enable_service_topology,
        enable_local_redirect_policy=settings.enable_local_redirect_policy,
        bpf_lb_external_clusterip=reach.cluster_ips,
        bpf_lb_algorithm=mode.algorithm,
        bpf_lb_algorithm_annotation=mode.services_choose_algorithm,
        bpf_lb_mode_annotation=mode.services_choose_forwarding,
        bpf_lb_mode=mode.forwarding,
        bpf_lb_maglev_table_size=(sizing or map_sizing(MapSettings())).maglev_table,
        bpf_lb_maglev_hash_seed=mode.hash_seed,
        bpf_lb_proto_diff=settings.bpf_lb_proto_diff,
        enable_sctp=programs.sctp,
        global_services=agent.cluster_id != 0,
        k8s_service_proxy_name=proxy.name,
        cluster_name=agent.cluster_name,
        node_port_min=first,
        node_port_max=last,
    )


def watched_objects(
    resources: Resources,
    served: LoadBalancerOptions,
    manual: ManualServices,
    outside: NodePorts | None = None,
    cluster: ReadTable[str, ClusterNode] | None = None,
    devices: Table[int, Device] | None = None,
    remote: MeshServices | None = None,
) -> WatchedObjects:
    """Select the tables that frontends depend on, by the enabled features."""
    redirected = served.enable_local_redirect_policy
    reached = served.enable_external_ips or served.enable_node_port
    return WatchedObjects(
        resources.table(SERVICES),
        resources.table(ENDPOINT_SLICES),
        resources.table(NODES),
        resources.table(PODS) if served.enable_host_port or redirected or reached else None,
        outside.addresses if outside is not None else None,
        resources.table(CILIUM_LOCAL_REDIRECT_POLICIES) if redirected else None,
        manual.services,
        manual.states,
        devices if served.enable_host_port else None,
        cluster if reached or redirected else None,
        remote if served.global_services else None,
    )


def service_reports(
    served: LoadBalancerOptions,
    conflicts: Table[FrontendKey, ServiceConflict],
    refused: Table[tuple[str, str, str], RefusedAddress],
    redirects: Table[ServiceName, LocalRedirect],
) -> ServiceReports:
    """Collect the tables of refused and conflicting requests, except those of disabled features."""
    return ServiceReports(conflicts, refused, redirects if served.enable_local_redirect_policy else None)


def watch(
    agent: AgentConfig,
    objects: WatchedObjects,
    table: Table[FrontendKey, Frontend],
    served: LoadBalancerOptions,
    reports: ServiceReports,
    delays: ImplementationDelays,
    *,
    jobs: Jobs,
    log: Logger,
) -> ServiceWatch:
    """Create the watch of the objects and start it with the agent."""
    found = ServiceWatch(lambda: agent.node_name, objects, table, served, reports, log, delays)
    jobs.one_shot("follow", found.run)
    return found


def watch_metrics(found: ServiceWatch) -> Member[Collector]:
    """Count added, updated and deleted services, and features that objects use."""

    async def collect() -> Iterable[MetricFamily]:
        text = "Number of services events labeled by action type"
        return [
            counter("cilium_services_events_total", text, dict(found.events), "action"),
            counter(
                "cilium_k8s_terminating_endpoints_events_total",
                "Number of terminating endpoint events received from Kubernetes",
                found.terminating,
            ),
            ingested("internal_traffic_policy_services", found.ingested),
            ingested("local_redirect_policies", found.ingested),
        ]

    return Collector("service-events", collect)


def balancer_features(served: LoadBalancerOptions) -> Member[Collector]:
    """Report optional features of services that are in use."""
    return features(
        "services-features",
        lambda: {
            "adv_connect_and_lb_k8s_internal_traffic_policy_enabled": served.enable_internal_traffic_policy,
            "adv_connect_and_lb_sctp_enabled": served.enable_sctp,
            "network_policies_local_redirect_policy_enabled": served.enable_local_redirect_policy,
        },
    )


def load_balancer(options: LoadBalancerOptions, served: Table[FrontendKey, ServedFrontend]) -> LoadBalancer:
    """Create the planner of map entries."""
    maglev = None
    if options.maglev:
        seed = Seed.parse(options.bpf_lb_maglev_hash_seed)
        maglev = MaglevTables(options.bpf_lb_maglev_table_size, seed)
    return LoadBalancer(options, served, maglev)


@after(ServiceWatch)
def reconcile(
    table: Table[FrontendKey, Frontend],
    served: Table[FrontendKey, ServedFrontend],
    maps: ServiceMaps,
    balancer: LoadBalancer,
    objects: ObjectSource,
    map_full: MapFullFrontends,
    delays: ImplementationDelays,
    *,
    jobs: Jobs,
    tables: Tables,
    log: Logger,
) -> None:
    """Reconcile the maps with the table; without a source of objects, leave the maps unchanged."""
    initial = served.initializer("read the service maps")
    if objects is ObjectSource.NOWHERE:
        jobs.one_shot("check leftover entries", partial(_leave, maps, log))
        return
    target = ServicesTarget(table, balancer, maps, served, initial, map_full, delays)
    reconciler = Reconciler(table, target, full_every=SWEEP)
    tables.add(reconciler.statuses)
    jobs.observe("reconcile", reconciler)


async def _leave(maps: ServiceMaps, log: Logger) -> None:
    """Warn about entries of an earlier agent: deleting them would break connections of pods."""
    held = await maps.dump()
    if held:
        log.warning(
            "services of an earlier agent stay as they are: no source of objects is set"
            " (k8s-api-server, k8s-kubeconfig-path or manifests-dir)",
            entries=len(held),
        )


cell = module(
    "services",
    "Services",
    config(LoadBalancerSettings),
    provide(
        options,
        balancer_features,
        frontends,
        served_frontends,
        service_conflicts,
        refused_addresses,
        local_redirects,
        manual_services,
        manual_states,
        ManualServices,
        MapFullFrontends,
        dependency,
        delay_metrics,
        metrics,
        watch_metrics,
        watch,
        address_events,
        service_events,
        backend_events,
        redirect_events,
        KernelServices.provided,
    ),
    provide_private(watched_objects, service_reports, load_balancer, ImplementationDelays),
    invoke(reconcile),
)
