"""Status sections of cells below the API; each sets its fields of StatusFacts.

Cells above the API, such as masquerading, contribute their own sections.
"""

from __future__ import annotations

import mmap
import os

from msgspec import to_builtins
from msgspec.structs import replace

from cells.api.health import health_state
from cells.api.models import MonitorStatus
from cells.api.models import status as wire
from cells.api.operations.config_mapping import NodeSection
from cells.api.operations.endpoint_models import NEVER, rfc3339
from cells.api.operations.status import (
    FLOWS_NOT_SERVED,
    ServiceFacts,
    StatusFacts,
    StatusSection,
    hubble_status,
)
from cells.clustermesh.tables import BY_NAME, MeshServices, MeshTables
from cells.config.shared import ServiceReach
from cells.datapath.settings import ServicePrograms
from cells.endpoint.host import HostEndpoint
from cells.health import ProbeResponder
from cells.hubble.hubble import Hubble
from cells.hubble.metrics.server import HubbleMetrics
from cells.hubble.rpc.server import HubbleServer
from cells.kubernetes.api_server import KubernetesAPI
from cells.kvstore.store import KVStore
from cells.maps.node_maps import Maps
from cells.maps.specs import MapSizing
from cells.node.ipam import Ipam
from cells.node.router import Router
from cells.observe.events import Events
from cells.observe.monitor import Monitor
from cells.policy.control import HTTPProxyPorts, HTTPRedirect
from cells.proxy.envoy import EnvoyProgram
from cells.services import LoadBalancerOptions
from cells.services.node_ports import NodePorts
from cells.services.sockets import SocketLB
from lifecycle import Member, Table

__all__ = ["SECTIONS"]


def addresses(ipam: Ipam) -> Member[StatusSection]:
    """Set the allocated addresses and their owners."""

    def fill(facts: StatusFacts) -> None:
        facts.ipam_status, facts.allocations = ipam.status(), ipam.dump()

    return StatusSection(fill)


def bpf_maps(maps: Maps, sizing: MapSizing) -> Member[StatusSection]:
    """Set the capacities of the maps."""

    def fill(facts: StatusFacts) -> None:
        facts.map_sizes, facts.map_size_ratio = map_sizes(maps), sizing.dynamic_ratio

    return StatusSection(fill)


def _rings(events: Events, served: Monitor) -> MonitorStatus | None:
    """Return the perf buffers of datapath events; None if the monitor is disabled."""
    if not served.enabled:
        return None
    cpus = os.sysconf("SC_NPROCESSORS_ONLN")
    return MonitorStatus(cpus=cpus, npages=events.pages, pagesize=mmap.PAGESIZE)


def monitor(events: Events, served: Monitor) -> Member[StatusSection]:
    """Set the perf buffers of datapath events."""

    def fill(facts: StatusFacts) -> None:
        facts.monitor = _rings(events, served)

    return StatusSection(fill)


def configured_monitor(events: Events, served: Monitor) -> Member[NodeSection]:
    """Set the perf buffers of datapath events in the configuration."""
    return NodeSection(lambda facts: replace(facts, monitor=_rings(events, served)))


def configured_api_server(server: KubernetesAPI | None) -> Member[NodeSection]:
    """Set the API server's URL and the kubeconfig in the configuration."""
    url, kubeconfig = server.configured if server is not None else ("", "")
    return NodeSection(lambda facts: replace(facts, api_server=url, kubeconfig=kubeconfig))


def api_server(server: KubernetesAPI | None) -> Member[StatusSection]:
    """Set the state of the API server, and the watched resources."""

    def fill(facts: StatusFacts) -> None:
        if server is not None:
            state, followed = server.state(), tuple(server.followed())
            facts.kubernetes = wire.KubernetesStatus(
                state=state.state, msg=state.message, k8s_api_versions=followed
            )

    return StatusSection(fill)


def kvstore(store: KVStore | None) -> Member[StatusSection]:
    """Set the state of the kvstore."""

    def fill(facts: StatusFacts) -> None:
        if store is not None:
            state = store.state()
            facts.kvstore = wire.Status(state=state.state, msg=state.message)

    return StatusSection(fill)


def services(
    options: LoadBalancerOptions | None = None,
    reach: ServiceReach | None = None,
    programs: ServicePrograms | None = None,
    outside: NodePorts | None = None,
    sockets: SocketLB | None = None,
) -> Member[StatusSection]:
    """Set the service features, in the terms of the kube-proxy replacement."""

    def fill(facts: StatusFacts) -> None:
        if options is None or reach is None or programs is None:
            return
        facts.services = ServiceFacts(
            options,
            replaces_kube_proxy=reach.replaces_kube_proxy,
            sockets=sockets is not None and sockets.enabled,
            direct_routing_device=outside.direct_device if outside is not None else "",
            acceleration=programs.acceleration,
        )

    return StatusSection(fill)


def proxy(
    router: Router,
    ports: HTTPProxyPorts | None = None,
    program: EnvoyProgram | None = None,
    redirects: Table[str, HTTPRedirect] | None = None,
) -> Member[StatusSection]:
    """Set the L7 proxy and its redirects; an empty section without a proxy."""

    def fill(facts: StatusFacts) -> None:
        if ports is None or not ports.serves:
            return
        rows = list(redirects.all()) if redirects is not None else []
        external = program is not None and program.external
        *_, address = router.addressing().values()  # IPv4 if enabled, else IPv6
        facts.proxy = wire.ProxyStatus(
            ip=str(address.ip),
            port_range="10000-20000",
            total_ports=len({row.port for row in rows}),
            total_redirects=len(rows),
            envoy_deployment_mode="external" if external else "embedded",
            redirects=[wire.ProxyRedirect(name=row.name, proxy="http", proxy_port=row.port) for row in rows],
        )

    return StatusSection(fill)


def flows(
    hubble: Hubble | None, server: HubbleServer | None, metrics: HubbleMetrics | None
) -> Member[StatusSection]:
    """Set the fill level of Hubble's ring, and whether flows and metrics are served."""

    def fill(facts: StatusFacts) -> None:
        observer = hubble.observer if hubble is not None else None
        if observer is None:
            return
        if server is not None and not server.ready:
            facts.hubble = FLOWS_NOT_SERVED
            return
        now = observer.server_status()
        facts.hubble = hubble_status(
            now.num_flows,
            now.max_flows,
            now.seen_flows,
            now.uptime_ns,
            metrics=metrics is not None and metrics.served,
        )

    return StatusSection(fill)


def probes(responder: ProbeResponder | None) -> Member[StatusSection]:
    """Set the state of the health probes between nodes."""

    def fill(facts: StatusFacts) -> None:
        facts.cilium_health = health_state(responder)

    return StatusSection(fill)


def host_firewall(host: HostEndpoint | None) -> Member[StatusSection]:
    """Set whether the host firewall is enabled."""

    def fill(facts: StatusFacts) -> None:
        facts.host_firewall = host is not None and host.enabled

    return StatusSection(fill)


def cluster_mesh(mesh: MeshTables | None, services: MeshServices | None) -> Member[StatusSection]:
    """Set the remote clusters; an empty section without a mesh."""

    def fill(facts: StatusFacts) -> None:
        if mesh is not None and services is not None and mesh.enabled:
            facts.cluster_mesh = mesh_status(mesh, services)

    return StatusSection(fill)


def mesh_status(mesh: MeshTables, services: MeshServices) -> wire.ClusterMeshStatus:
    """Return all remote clusters by name."""
    rows = sorted(mesh.clusters.all(), key=lambda row: row.name)
    return wire.ClusterMeshStatus(
        clusters=[
            wire.RemoteClusterStatus(
                name=row.name,
                ready=row.ready,
                connected=row.connected,
                status=row.status,
                config=None
                if row.config is None
                else wire.RemoteClusterConfiguration(**to_builtins(row.config)),
                num_nodes=mesh.count(row.name, "nodes"),
                num_shared_services=mesh.count(row.name, "services"),
                num_endpoints=mesh.count(row.name, "endpoints"),
                num_identities=mesh.count(row.name, "identities"),
                num_failures=row.failures,
                last_failure=rfc3339(row.last_failure) if row.last_failure else NEVER,
                synced=wire.RemoteClusterSynced(**dict.fromkeys(row.synced, True)),
            )
            for row in rows
        ],
        num_global_services=len(services.by(BY_NAME).values()),
    )


def map_sizes(maps: Maps) -> dict[str, int]:
    """Return the map capacities, with the names and order of ``cilium-dbg status --verbose``."""
    policy = maps.policies.spec.inner
    tcp, other, *_ = maps.conntrack  # equal in both families
    return {
        "Non-TCP connection tracking": other.spec.max_entries,
        "TCP connection tracking": tcp.spec.max_entries,
        "Endpoint policy": policy.max_entries if policy else 0,
        "IP cache": maps.ipcache.spec.max_entries,
        "Metrics": maps.metrics.spec.max_entries,
    }


SECTIONS = (
    addresses,
    bpf_maps,
    monitor,
    configured_monitor,
    api_server,
    configured_api_server,
    kvstore,
    services,
    proxy,
    flows,
    probes,
    host_firewall,
    cluster_mesh,
)
