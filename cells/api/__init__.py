"""The REST API on ``cilium.sock``, as Cilium 1.17's clients know it.

Edge: HTTP requests become calls of other cells, and their rows become answers.
Why:  an unmodified cilium-cni makes pods with it, and cilium-dbg and ``hive`` show the node through it. The
      socket is there before the daemon runs; what needs it, such as endpoints, is answered once it does.
      Calls that change anything need peer uid 0, whatever the socket's group. Operations that no part has do
      not exist: 404, or 405 where the path has others. Those on endpoints wait behind rate limits, and are
      answered 429 where that would take too long.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from cells.api.health import HealthApi, health_state
from cells.api.models import status as wire
from cells.api.models.status import (
    HubbleStatus,
    MasqueradedProtocols,
    Masquerading,
    ProxyRedirect,
    ProxyStatus,
)
from cells.api.operations import (
    AccessSettings,
    ApiPart,
    Operation,
    Route,
    absent,
    addresses,
    agent,
    cilium_tables,
    directory,
    endpoints,
    explain,
    node,
    policy,
    services,
)
from cells.api.operations.agent import MetricsList
from cells.api.operations.config_mapping import MasqueradeReport
from cells.api.operations.endpoints import PolicyPool
from cells.api.operations.node import MapReader, NodeMaps
from cells.api.operations.node_view import NodeView, monitor_status
from cells.api.operations.status import DISABLED as NO_PROBES
from cells.api.operations.status import NO_FLOWS, NodeSummary, ServiceFacts, hubble_status
from cells.api.rate_limits import Limits, LimitSettings
from cells.api.server import Api, ApiTimes, Gate, StartedDaemon
from cells.api.wire import FrameworkError, answer, empty, parse_bool, parse_int, read_body
from cells.base.barriers import ApiServed
from cells.base.metrics import Collector, Family
from cells.cluster.host_ip_sync import HostIPSync
from cells.cluster.nodes.node import ClusterNode
from cells.cni import QueueLock
from cells.config import AgentConfig, ChainingMode
from cells.config.shared import ChainingSettings, ServiceSettings
from cells.datapath.datapath import Datapath
from cells.datapath.settings import DatapathSettings
from cells.endpoint.host import HostEndpoint
from cells.endpoint.restore import ExposedEndpoints
from cells.health import NodeHealthSettings, ProbeResponder
from cells.hubble.hubble import Hubble
from cells.kubernetes.api_server import KubernetesAPI
from cells.kvstore.store import KVStore
from cells.maps.node_maps import Maps
from cells.maps.policy_maps import PolicyMaps
from cells.maps.specs import MapSettings
from cells.node.addresses import NodeAddresses
from cells.node.devices import Device, PodMtu
from cells.node.ipam import Ipam
from cells.node.router import Router
from cells.observe.events import EventsSettings
from cells.observe.monitor import MonitorSettings
from cells.policy.control import HTTPProxyPorts, HTTPRedirect
from cells.proxy.envoy import EnvoySettings
from cells.services.outside import NodePorts
from cells.services.sockets import SocketLB
from cells.tunnel.settings import RouteMtu, TunnelSettings
from lifecycle import (
    Lifecycle,
    Logger,
    Member,
    ReadTable,
    Table,
    after,
    config,
    group,
    invoke,
    module,
    provide,
    provide_private,
)

__all__ = [
    "Api",
    "ApiPart",
    "FrameworkError",
    "MapReader",
    "MasqueradeReport",
    "MasqueradedProtocols",
    "Masquerading",
    "NodeSummary",
    "Operation",
    "PolicyPool",
    "Route",
    "StartedDaemon",
    "answer",
    "cell",
    "empty",
    "parse_bool",
    "parse_int",
    "read_body",
]


# How the API is put together from the other cells.


def facts(
    config: AgentConfig,
    devices: Table[Device],
    mtu: PodMtu,
    route_mtu: RouteMtu,
    tunnel: TunnelSettings,
    ipam: Ipam,
    router: Router,
    datapath: Datapath,
    addresses: NodeAddresses,
    nodes: ReadTable[ClusterNode],
    *,
    maps: Maps,
    map_settings: MapSettings,
    events: EventsSettings,
    monitor: MonitorSettings,
    modes: list[Member[ChainingMode]],
    masquerades: list[Member[MasqueradeReport]],
    chaining: ChainingSettings,
    kubernetes: KubernetesAPI | None,
    kvstore: KVStore | None,
    serves: ServiceSettings | None = None,
    programs: DatapathSettings | None = None,
    outside: NodePorts | None = None,
    sockets: SocketLB | None = None,
    host: HostEndpoint | None = None,
    proxy: HTTPProxyPorts | None = None,
    envoy: EnvoySettings | None = None,
    redirects: Table[HTTPRedirect] | None = None,
    hubble: Hubble | None = None,
    probes: NodeHealthSettings | None = None,
    responder: ProbeResponder | None = None,
) -> NodeSummary:
    """The node, as the answers tell it."""

    def served() -> ServiceFacts:
        return ServiceFacts(
            serves or ServiceSettings(),
            (programs or DatapathSettings()).node_port_range,
            map_settings.bpf_lb_maglev_table_size,
            sockets=sockets is not None and sockets.enabled,
            direct_routing_device=outside.direct_device if outside is not None else "",
            acceleration=(programs or DatapathSettings()).bpf_lb_acceleration,
            tunnelled=tunnel.tunnelled,
        )

    def proxied() -> ProxyStatus | None:
        if proxy is None or not proxy.serves:
            return None
        rows = list(redirects.all()) if redirects is not None else []
        external = envoy is not None and envoy.external_envoy_proxy
        *_, address = router.addressing().values()  # IPv4 if there is, else IPv6
        return ProxyStatus(
            ip=str(address.ip),
            port_range="10000-20000",
            total_ports=len({row.port for row in rows}),
            total_redirects=len(rows),
            envoy_deployment_mode="external" if external else "embedded",
            redirects=[ProxyRedirect(name=row.name, proxy="http", proxy_port=row.port) for row in rows],
        )

    def flows() -> HubbleStatus:
        observer = hubble.observer if hubble is not None else None
        if observer is None:
            return NO_FLOWS
        now = observer.server_status()
        return hubble_status(now.num_flows, now.max_flows, now.seen_flows, now.uptime_ns)

    def probed() -> wire.Status:
        return NO_PROBES if probes is None or responder is None else health_state(probes, responder)

    return NodeView(
        config,
        devices,
        mtu,
        ipam,
        router,
        datapath,
        addresses,
        nodes,
        maps=maps,
        map_settings=map_settings,
        monitor=partial(monitor_status, events, monitor),
        chaining=next((mode.name for mode in modes), "none"),
        route_mtu_in_chains=chaining.enable_route_mtu_for_cni_chaining,
        route_mtu=route_mtu,
        tunnel=tunnel,
        kubernetes=kubernetes,
        kvstore=kvstore,
        masquerading=next((one.now for one in masquerades), Masquerading),
        services=served,
        proxy=proxied,
        hubble=flows,
        cilium_health=probed,
        host_firewall=host is not None and host.enabled,
    )


def policy_pool(policies: PolicyMaps) -> PolicyPool:
    """The prepared policy maps, as PUT /endpoint waits for them."""
    return policies


def map_reader(maps: Maps) -> MapReader:
    """The node's maps."""
    return NodeMaps(maps)


@after(ExposedEndpoints, QueueLock, HostIPSync)
def api(
    config: AgentConfig,
    parts: list[Member[ApiPart]],
    gate: Gate,
    *,
    times: ApiTimes,
    access: AccessSettings,
    limits: Limits,
    lifecycle: Lifecycle,
    log: Logger,
) -> Api:
    """The node's API. Its socket appears only after what follows, so no client can come before it:

    restored endpoints have claimed their addresses, plugins can no longer queue a deletion that nobody would
    read, and the datapath knows the node's own addresses, so that the first pod reaches them. Requests that
    need the running daemon wait at the gate.
    """
    return Api(config.api_socket, parts, gate, times, access, limits, lifecycle, log)


@after(Api)
def api_served() -> ApiServed:
    """The moment from which the API serves."""
    return ApiServed()


def api_metrics(times: ApiTimes, agent: AgentConfig, datapath: Datapath) -> Member[Collector]:
    """The API's work, and what the agent is, as metrics."""

    async def collect() -> Iterable[Family]:
        from cells.api.metrics import families

        return families(times, agent, datapath.build)

    return Collector("api", collect)


def limit_metrics(limits: Limits) -> Member[Collector]:
    """The API's rate limits as metrics."""

    async def collect() -> Iterable[Family]:
        from cells.api.metrics import limiter_families

        return limiter_families(limits.limiters.values())

    return Collector("api-limits", collect)


_load = module(
    "api-load",
    "Requests to the REST API: how many at a time, how long they take",
    config(LimitSettings),
    provide(ApiTimes, Limits, api_metrics, limit_metrics),
)

_api = module(
    "api",
    "REST API on cilium.sock",
    config(AccessSettings),
    provide(api, api_served, StartedDaemon),
    provide(absent.part, addresses.part, endpoints.part, node.part, node.config_part),
    provide(
        agent.part,
        policy.part,
        explain.part,
        policy.names_part,
        services.part,
        agent.inspection_part,
        agent.tables_part,
        cilium_tables.part,
    ),
    provide_private(
        Gate,
        HealthApi,
        MetricsList,
        addresses.AddressOperations,
        endpoints.EndpointOperations,
        cilium_tables.CiliumTables,
        agent.Inspection,
        node.NodeOperations,
        node.ConfigOperations,
        policy.EndpointPolicyModels,
        policy.PolicyOperations,
        directory.AgentDirectory,
        directory.AgentEnds,
        directory.AgentServices,
        explain.ExplainOperations,
        directory.OtherNodes,
        policy.NameOperations,
        services.ServiceOperations,
        agent.StateDB,
        agent.StatusOperations,
        facts,
        map_reader,
        policy_pool,
    ),
    invoke(Api, HealthApi, StartedDaemon),
)

cell = group(_load, _api)
