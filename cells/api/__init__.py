"""The REST API on ``cilium.sock``, compatible with Cilium 1.17's clients.

This module composes the API from operations on other cells; ``server`` serves them. cilium-cni creates
endpoints with the API; cilium-dbg and ``hive`` inspect the node.

The socket exists before the daemon runs; requests that need the daemon, e.g. on endpoints, wait for it.
Changes require peer uid 0 (or the agent's own user), whatever the socket's group. Unknown paths are answered
with 404, unknown methods of a path with 405. Requests on endpoints are rate-limited: 429 if the wait would be
too long.
"""

from __future__ import annotations

from collections.abc import Iterable

from cells.api.health import HealthApi, HealthApiSettings
from cells.api.models.status import (
    EncryptionStatus,
    MasqueradedProtocols,
    Masquerading,
    WireguardInterface,
    WireguardPeerStatus,
    WireguardStatus,
)
from cells.api.operations import (
    AccessSettings,
    ApiPart,
    Operation,
    Route,
    absent_part,
    addresses,
    agent,
    cilium_tables,
    directory,
    endpoints,
    ends,
    explain,
    node,
    policy,
    services,
)
from cells.api.operations.agent import MetricsList
from cells.api.operations.config_mapping import NodeSection
from cells.api.operations.endpoint_models import NEVER, rfc3339
from cells.api.operations.endpoints import PolicyPool
from cells.api.operations.node import MapReader, NodeMaps
from cells.api.operations.node_view import NodeView, PodLinks, StatusView
from cells.api.operations.status import NodeSummary, StatusFacts, StatusSection, StatusSummary
from cells.api.operations.status_sections import SECTIONS
from cells.api.rate_limits import Limits, LimitSettings
from cells.api.server import Api, ApiTimes, Gate, StartedDaemon
from cells.api.wire import FrameworkError, answer, empty, parse_bool, parse_int, read_body
from cells.base.metrics import Collector, MetricFamily, features
from cells.cluster.host_ip_sync import HostIPSync
from cells.cni import QueueLock
from cells.config import AgentConfig
from cells.datapath.datapath import Datapath
from cells.endpoint.restore import ExposedEndpoints
from cells.maps.node_maps import Maps
from cells.maps.policy_maps import PolicyMaps
from cells.observe.bootstrap import ApiServed
from lifecycle import (
    Lifecycle,
    Logger,
    Member,
    after,
    config,
    group,
    invoke,
    module,
    provide,
    provide_private,
)

__all__ = [
    "NEVER",
    "Api",
    "ApiPart",
    "EncryptionStatus",
    "FrameworkError",
    "MapReader",
    "MasqueradedProtocols",
    "Masquerading",
    "NodeSection",
    "NodeSummary",
    "Operation",
    "PolicyPool",
    "Route",
    "StartedDaemon",
    "StatusFacts",
    "StatusSection",
    "StatusSummary",
    "WireguardInterface",
    "WireguardPeerStatus",
    "WireguardStatus",
    "answer",
    "cell",
    "empty",
    "parse_bool",
    "parse_int",
    "read_body",
    "rfc3339",
]


# Constructors.


def policy_pool(policies: PolicyMaps) -> PolicyPool:
    """Provide the pool of prepared policy maps, for which PUT /endpoint waits."""
    return policies


def map_reader(maps: Maps) -> MapReader:
    """Provide read access to the node's maps."""
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
    """Provide the API server.

    Its socket appears only after the following steps, so that no client can interfere with them: restored
    endpoints have claimed their addresses, CNI plugins can no longer queue a deletion that would never be
    read, and the datapath has the node's own addresses, so that the first pod can reach them. Requests that
    need the running daemon wait at the gate.
    """
    return Api(config.api_socket, parts, gate, times, access, limits, lifecycle, log)


@after(Api)
def api_served() -> ApiServed:
    """Provide an ordering dependency for hooks that must run after the API serves."""
    return ApiServed()


def api_metrics(times: ApiTimes, datapath: Datapath) -> Member[Collector]:
    """Provide the metrics of API requests and of the agent's version."""

    async def collect() -> Iterable[MetricFamily]:
        from cells.api.metrics import families

        return families(times, datapath.build)

    return Collector("api", collect)


def agent_features(agent: AgentConfig) -> Member[Collector]:
    """Provide the feature metrics of datapath mode and address families."""
    mode = ("", "ipv4-only", "ipv6-only", "ipv4-ipv6-dual-stack")[agent.ipv4 + 2 * agent.ipv6]
    return features("agent-features", lambda: {"datapath_config": "veth", "datapath_internet_protocol": mode})


def limit_metrics(limits: Limits) -> Member[Collector]:
    """Provide the metrics of the API's rate limits."""

    async def collect() -> Iterable[MetricFamily]:
        from cells.api.metrics import limiter_families

        return limiter_families(limits.limiters.values())

    return Collector("api-limits", collect)


_load = module(
    "api-load",
    "Requests to the REST API: how many at a time, how long they take",
    config(LimitSettings),
    provide(ApiTimes, Limits, api_metrics, agent_features, limit_metrics),
)

_api = module(
    "api",
    "REST API on cilium.sock",
    config(AccessSettings, HealthApiSettings),
    provide(api, api_served, StartedDaemon),
    provide(absent_part, addresses.part, endpoints.part, node.part, node.config_part),
    provide(node.maps_part, node.identities_part),
    provide(
        agent.part,
        policy.part,
        explain.part,
        policy.names_part,
        services.part,
        agent.inspection_part,
        agent.events_part,
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
        agent.EventHistory,
        agent.Inspection,
        node.MapOperations,
        node.IdentityOperations,
        node.NodeOperations,
        node.ConfigOperations,
        policy.EndpointPolicyModels,
        policy.PolicyOperations,
        directory.AgentDirectory,
        ends.AgentEnds,
        ends.Neighbourhood,
        ends.OwnPolicies,
        directory.AgentServices,
        explain.ExplainOperations,
        ends.OtherNodes,
        policy.NameOperations,
        services.ServiceOperations,
        agent.StateDB,
        agent.StatusOperations,
        map_reader,
        policy_pool,
    ),
    provide_private(PodLinks),
    provide_private(NodeView, as_=(NodeSummary,)),
    provide_private(StatusView, as_=(StatusSummary,)),
    provide_private(*SECTIONS),
    invoke(Api, HealthApi, StartedDaemon),
)

cell = group(_load, _api)
