"""How the API is put together from the other cells.

Needs: AgentConfig, Endpoints, PolicyMaps, Ipam, Router, Table[Device], Datapath, Maps, StatusCollector;
starts after ExposedEndpoints, DeleteQueue and HostIPSync.   Gives: cell.
"""

from __future__ import annotations

from cells.api.inspection import Inspection
from cells.api.node_view import NodeView
from cells.api.operations import Facts, Operations, PolicyPool
from cells.api.server import Api
from cells.api.statedb import StateDB
from cells.cni_server import DeleteQueue
from cells.config import AgentConfig
from cells.datapath import Datapath, DatapathSettings
from cells.devices import Device
from cells.endpoint_restore import ExposedEndpoints
from cells.host_ip_sync import HostIPSync
from cells.ipam import Ipam
from cells.maps import Maps, MapSettings, PolicyMaps
from cells.router import Router
from lifecycle import Lifecycle, Logger, Table, invoke, module, provide, provide_private


def facts(
    config: AgentConfig,
    devices: Table[Device],
    ipam: Ipam,
    router: Router,
    datapath: Datapath,
    *,
    maps: Maps,
    map_settings: MapSettings,
    datapath_settings: DatapathSettings,
) -> Facts:
    """The node, as the answers tell it."""
    return NodeView(
        config,
        devices,
        ipam,
        router,
        datapath,
        maps=maps,
        map_settings=map_settings,
        datapath_settings=datapath_settings,
    )


def policy_pool(policies: PolicyMaps) -> PolicyPool:
    """The prepared policy maps, as PUT /endpoint waits for them."""
    return policies


def api(
    config: AgentConfig,
    operations: Operations,
    *,
    exposed: ExposedEndpoints,
    drained: DeleteQueue,
    synced: HostIPSync,
    lifecycle: Lifecycle,
    log: Logger,
) -> Api:
    """The node's API: whoever can connect sees every endpoint of before, and no deletion is pending.

    The datapath knows the node's own addresses by then, so that the first pod reaches them.
    """
    del exposed, drained, synced
    return Api(config.api_socket, operations, lifecycle, log)


cell = module(
    "api",
    "REST API on cilium.sock",
    provide(api),
    provide_private(Inspection, Operations, StateDB, facts, policy_pool),
    invoke(Api),
)
