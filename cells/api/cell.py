"""How the API is put together from the other cells.

Needs: AgentConfig, Endpoints, PolicyMaps, Ipam, Router, Table[Device], PodMtu, Datapath, Maps,
StatusCollector; starts after ExposedEndpoints, QueueLock and HostIPSync.   Gives: cell.
"""

from __future__ import annotations

from collections.abc import Iterable

from cells import metrics
from cells.api.access import AccessSettings
from cells.api.config_mapping import ChainingMode
from cells.api.gate import Gate, StartedDaemon
from cells.api.health_table import HealthTable
from cells.api.inspection import Inspection
from cells.api.limited import Limits
from cells.api.limits import LimitSettings
from cells.api.metrics_list import MetricsList
from cells.api.node_maps import NodeMaps
from cells.api.node_operations import MapReader, NodeOperations
from cells.api.node_view import NodeView, monitor_status
from cells.api.not_built import NotBuilt
from cells.api.operations import Facts, Operations, PolicyPool
from cells.api.server import Api
from cells.api.statedb import StateDB
from cells.api.times import ApiTimes
from cells.cni_server import ChainingSettings, QueueLock
from cells.config import AgentConfig
from cells.datapath import Datapath
from cells.devices import Device, PodMtu
from cells.endpoint_restore import ExposedEndpoints
from cells.events import EventsSettings
from cells.host_ip_sync import HostIPSync
from cells.ipam import Ipam
from cells.maps import Maps, MapSettings, PolicyMaps
from cells.monitor import MonitorSettings
from cells.router import Router
from lifecycle import Lifecycle, Logger, Member, Table, config, invoke, module, provide, provide_private


def facts(
    config: AgentConfig,
    devices: Table[Device],
    mtu: PodMtu,
    ipam: Ipam,
    router: Router,
    datapath: Datapath,
    *,
    maps: Maps,
    map_settings: MapSettings,
    events: EventsSettings,
    monitor: MonitorSettings,
    modes: list[Member[ChainingMode]],
    chaining: ChainingSettings,
) -> Facts:
    """The node, as the answers tell it."""
    return NodeView(
        config,
        devices,
        mtu,
        ipam,
        router,
        datapath,
        maps=maps,
        map_settings=map_settings,
        monitor=monitor_status(events, monitor),
        chaining=next((mode.name for mode in modes), "none"),
        route_mtu_in_chains=chaining.enable_route_mtu_for_cni_chaining,
    )


def policy_pool(policies: PolicyMaps) -> PolicyPool:
    """The prepared policy maps, as PUT /endpoint waits for them."""
    return policies


def map_reader(maps: Maps) -> MapReader:
    """The node's maps."""
    return NodeMaps(maps)


def api(
    config: AgentConfig,
    operations: Operations,
    node: NodeOperations,
    gate: Gate,
    *,
    exposed: ExposedEndpoints,
    locked: QueueLock,
    synced: HostIPSync,
    times: ApiTimes,
    access: AccessSettings,
    limits: Limits,
    lifecycle: Lifecycle,
    log: Logger,
) -> Api:
    """The node's API: whoever can connect can free or take no address of an endpoint of before.

    No plugin can queue a deletion any more that nobody would read, and the datapath knows the node's own
    addresses, so that the first pod reaches them. What needs the running daemon waits at the gate.
    """
    del exposed, locked, synced
    parts = operations, node, NotBuilt()
    return Api(config.api_socket, parts, gate, times, access, limits, lifecycle, log)


def api_metrics(times: ApiTimes, agent: AgentConfig, datapath: Datapath) -> Member[metrics.Collector]:
    """The API's work, and what the agent is, as metrics."""

    async def collect() -> Iterable[metrics.Family]:
        from cells.api.metrics import families

        return families(times, agent, datapath.build)

    return metrics.Collector("api", collect)


def limit_metrics(limits: Limits) -> Member[metrics.Collector]:
    """The API's rate limits as metrics."""

    async def collect() -> Iterable[metrics.Family]:
        from cells.api.limit_metrics import families

        return families(limits.limiters.values())

    return metrics.Collector("api-limits", collect)


cell = module(
    "api",
    "REST API on cilium.sock",
    config(AccessSettings, LimitSettings),
    provide(api, api_metrics, limit_metrics, StartedDaemon),
    provide_private(
        ApiTimes,
        Gate,
        HealthTable,
        Inspection,
        Limits,
        MetricsList,
        NodeOperations,
        Operations,
        StateDB,
        facts,
        map_reader,
        policy_pool,
    ),
    invoke(Api, StartedDaemon),
)
