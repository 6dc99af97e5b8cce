"""The way to the pods of other nodes: rows of cilium_tunnel_map, and routes.

Needs: AgentConfig, Tunnel, Router, ReadTable[ClusterNode], TunnelMaps, TunnelRoutes, Table[Device], RouteMtu.
Gives: RemoteNetworks; the tables ``tunnel-networks``, ``tunnel-endpoints``, ``tunnel-routes``, and statuses.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping
from typing import Final

from cells.cluster.nodes import ClusterNode
from cells.config import AgentConfig
from cells.ipam import Family, IPNetwork
from cells.maps import TunnelKey, TunnelValue
from cells.node.devices import Device
from cells.node.netlink import news
from cells.node.router import Router
from cells.tunnel.edges import TunnelMaps, TunnelRoutes
from cells.tunnel.mtu import RouteMtu
from cells.tunnel.network import TunnelRoute
from cells.tunnel.networks import RemoteNetwork, remote_networks, troubles
from cells.tunnel.settings import TunnelSettings
from cells.tunnel.targets import EndpointRows, NetworkRoutes
from cells.tunnel.tunnel import Tunnel
from lifecycle import Derived, Health, Jobs, ReadTable, Reconciler, Table, Tables, after, seconds

INTERVAL: Final = seconds(30)

_RTMGRP_IPV4_ROUTE: Final = 0x40
_RTMGRP_IPV6_ROUTE: Final = 0x400
_RTM_DELROUTE: Final = 25
_RTPROT_KERNEL: Final = 2
_TABLE, _PROTOCOL, _TYPE, _MAIN, _UNICAST = 20, 21, 23, 254, 1
"""Of an rtmsg, behind the header of 16 bytes: the table a route is in, who made it, what it is."""
ROUTES_GONE: Final = news.passing(
    (
        news.kinds(_RTM_DELROUTE),
        news.Field(news.LOAD_BYTE, _TABLE, (_MAIN,)),
        news.Field(news.LOAD_BYTE, _PROTOCOL, (_RTPROT_KERNEL,)),
        news.Field(news.LOAD_BYTE, _TYPE, (_UNICAST,)),
    )
)


@after(Tunnel)
class RemoteNetworks:
    """Follows the nodes. In native mode all of it is empty, and what a tunnel has left goes.

    Rows are written as soon as a node is known, and go only when all are.
    """

    def __init__(
        self,
        settings: TunnelSettings,
        agent: AgentConfig,
        router: Router,
        nodes: ReadTable[ClusterNode],
        maps: TunnelMaps,
        routes: TunnelRoutes,
        devices: Table[Device],
        *,
        route_mtu: RouteMtu,
        jobs: Jobs,
        tables: Tables,
        health: Health,
    ) -> None:
        self._settings = settings
        self._agent = agent
        self._router = router
        self._route_mtu = route_mtu
        self._nodes = nodes
        self._health = health.child("nodes")
        self.table: Derived[RemoteNetwork] = Derived("tunnel-networks", self._networks, nodes)
        """The ranges of other nodes' pods that the tunnel reaches, by range."""
        self._endpoints = self.table.derive(_endpoints, name="tunnel-endpoints")
        self._routes: Derived[TunnelRoute] = Derived(
            "tunnel-routes", self._wanted_routes, self.table, devices
        )
        every = INTERVAL if settings.tunnelled else math.inf
        into_map = Reconciler(self._endpoints, EndpointRows(maps), full_every=every, put_early=True)
        self._ways = Reconciler(self._routes, NetworkRoutes(routes), full_every=every, put_early=True)
        tables.add(self.table, self._endpoints, into_map.statuses, self._routes, self._ways.statuses)
        jobs.observe("reconcile endpoints", into_map)
        jobs.observe("reconcile routes", self._ways)
        jobs.observe("publish nodes", nodes.changes, self._tell)
        if settings.tunnelled:
            jobs.observe("follow devices", devices.changes, self._look)
            jobs.observe("watch routes", self._hints, self._look)

    @property
    def _own(self) -> str:
        return f"{self._agent.cluster_name}/{self._agent.node_name}"

    def _networks(self, nodes: list[ClusterNode]) -> Mapping[IPNetwork, RemoteNetwork]:
        if not self._settings.tunnelled:
            return {}
        return remote_networks(nodes, self._router.addressing(), self._own)

    def _wanted_routes(
        self, networks: list[RemoteNetwork], devices: list[Device]
    ) -> Mapping[IPNetwork, TunnelRoute]:
        del devices  # the MTU follows them
        made, mtu = self._router.addressing(), self._route_mtu()
        found: dict[IPNetwork, TunnelRoute] = {}
        for each in networks:
            router = made[Family.of(each.network)].ip
            gateway = router if router.version == 4 else None  # IPv6 takes no gateway that is its own
            found[each.network] = TunnelRoute(each.network, gateway, router, mtu)
        return found

    async def _tell(self, _: object) -> None:
        if not self._settings.tunnelled:
            return
        networks = self.table.all()
        wrong = troubles(self._nodes.all(), self._own)
        if wrong:
            self._health.degraded("; ".join(wrong[:3]))
        else:
            self._health.ok(f"{len(networks)} ranges of pods of other nodes")

    async def _hints(self) -> AsyncIterator[None]:
        async for hint in news.hints(_RTMGRP_IPV4_ROUTE | _RTMGRP_IPV6_ROUTE, ROUTES_GONE):
            yield hint

    async def _look(self, _: object) -> None:
        self._ways.trigger()


def _endpoints(networks: list[RemoteNetwork]) -> dict[TunnelKey, TunnelValue]:
    return {TunnelKey(each.network.network_address): TunnelValue(each.endpoint) for each in networks}
