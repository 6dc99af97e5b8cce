"""The way to the pods of other nodes: rows of cilium_tunnel_map, and routes."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from typing import Final

import msgspec

from cells.base.addresses import Family, IPAddress, IPNetwork
from cells.cluster.nodes.node import ClusterNode
from cells.config import AgentConfig
from cells.maps.records.cluster import TunnelKey, TunnelValue
from cells.maps.target import MapTarget
from cells.netlink.connection import (
    LOAD_BYTE,
    Field,
    ForeignRouteError,
    message_filter,
    notifications,
    of_types,
)
from cells.node.router import Router
from cells.tunnel.kernel import TunnelNetwork, TunnelRoute
from cells.tunnel.settings import RouteMtu, TunnelSettings
from cells.tunnel.tunnel import Tunnel
from lifecycle import Derived, Health, HiveError, Jobs, ReadTable, Reconciler, Tables, Target, after, seconds
from lifecycle.tables import BatchFailures

__all__ = ["RemoteNetwork", "RemoteNetworks"]


# Which node has which pods: the table ``tunnel-networks``.
#
# Controller: the table ``nodes`` in, ranges of the other nodes' pods out.


class RemoteNetwork(msgspec.Struct, frozen=True):
    """A range of pods on another node."""

    network: IPNetwork
    node: str
    """``cluster/name``."""
    endpoint: IPAddress
    """Where the tunnel to it ends: the node's address of the underlay's family."""


class TunnelWay(msgspec.Struct, frozen=True):
    """What all routes of a family have in common."""

    gateway: IPAddress | None
    source: IPAddress
    mtu: int


def remote_networks(
    nodes: Iterable[ClusterNode], families: Collection[Family], name: str, underlay: Family = Family.IPV4
) -> dict[IPNetwork, RemoteNetwork]:
    """The ranges of all nodes but this one, of families that are on; of nodes that the tunnel can reach.

    ``name``: ``cluster/name`` of this node, which objects may name before its agent does.
    """
    found: dict[IPNetwork, RemoteNetwork] = {}
    for node in nodes:
        endpoint = node.node_ip(underlay)
        if _is(node, name) or endpoint is None:
            continue
        for cidr in node.all_cidrs():
            if Family.of(cidr) in families:
                found[cidr] = RemoteNetwork(cidr, node.full_name, endpoint)
    return found


def _is(node: ClusterNode, name: str) -> bool:
    """Whether it is this node."""
    return node.local or node.full_name == name


def troubles(nodes: Iterable[ClusterNode], name: str, underlay: Family = Family.IPV4) -> list[str]:
    """What keeps pods of other nodes from being reached, in words."""
    return [
        f"node {node.full_name} has no {underlay.text} address, which the tunnel needs"
        for node in sorted(nodes, key=lambda node: node.full_name)
        if not _is(node, name) and node.node_ip(underlay) is None
    ]


# Where the ranges of other nodes' pods go: cilium_tunnel_map, and routes over cilium_host.

HOST_LINK: Final = "cilium_host"

TunnelEndpoints = MapTarget[TunnelKey, TunnelValue, TunnelValue]
"""cilium_tunnel_map, by network address."""


class NetworkRoutes(Target[IPNetwork, TunnelRoute, TunnelRoute]):
    """The node's own way to pods of other nodes, and what it forwards there: over cilium_host."""

    def __init__(self, kernel: TunnelNetwork) -> None:
        self._kernel = kernel

    async def observe(self) -> Mapping[IPNetwork, TunnelRoute]:
        """Those there are."""
        return {route.key: route for route in await self._kernel.routes(HOST_LINK)}

    async def put(self, batch: Mapping[IPNetwork, TunnelRoute]) -> None:
        """Set routes. Raises BatchError."""
        foreign = await self._kernel.foreign()
        with BatchFailures(OSError, HiveError) as failures:
            for route in batch.values():
                with failures.of(route.key):
                    if route.key in foreign:
                        raise ForeignRouteError(route.key, foreign[route.key])
                    await self._kernel.set_route(HOST_LINK, route)

    async def drop(self, batch: Collection[IPNetwork]) -> None:
        """Remove routes. Raises BatchError."""
        with BatchFailures(OSError) as failures:
            for destination in batch:
                with failures.of(destination):
                    await self._kernel.remove_route(HOST_LINK, destination)


INTERVAL: Final = seconds(30)

_RTMGRP_IPV4_ROUTE: Final = 0x40
_RTMGRP_IPV6_ROUTE: Final = 0x400
_RTM_DELROUTE: Final = 25
_RTPROT_KERNEL: Final = 2
_TABLE, _PROTOCOL, _TYPE, _MAIN, _UNICAST = 20, 21, 23, 254, 1
"""Of an rtmsg, behind the header of 16 bytes: the table a route is in, who made it, what it is."""
ROUTES_REMOVED: Final = message_filter(
    (
        of_types(_RTM_DELROUTE),
        Field(LOAD_BYTE, _TABLE, (_MAIN,)),
        Field(LOAD_BYTE, _PROTOCOL, (_RTPROT_KERNEL,)),
        Field(LOAD_BYTE, _TYPE, (_UNICAST,)),
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
        nodes: ReadTable[str, ClusterNode],
        endpoints: TunnelEndpoints,
        routes: TunnelNetwork,
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
        self._health = health.child("nodes")
        self._unreachable = nodes.filter(self._is_unreachable, name="nodes-without-tunnel")
        self.table: ReadTable[IPNetwork, RemoteNetwork] = nodes.flat_map(
            self._networks, key=lambda each: each.network, name="tunnel-networks"
        )
        """The ranges of other nodes' pods that the tunnel reaches, by range."""
        self._endpoints = self.table.group(
            lambda each: TunnelKey(each.network.network_address),
            lambda _, networks: TunnelValue(networks[-1].endpoint),
            name="tunnel-endpoints",
        )
        self._routes = self.table.join(
            Derived("tunnel-ways", self._ways_by_family, *route_mtu.sources),
            lambda each, way: TunnelRoute(each.network, way.gateway, way.source, way.mtu),
            on=lambda each: Family.of(each.network),
            name="tunnel-routes",
        )
        every = INTERVAL if settings.tunnelled else math.inf
        into_map = Reconciler(self._endpoints, endpoints, full_every=every, put_early=True)
        self._ways = Reconciler(self._routes, NetworkRoutes(routes), full_every=every, put_early=True)
        tables.add(self.table, self._endpoints, into_map.statuses, self._routes, self._ways.statuses)
        jobs.observe("reconcile endpoints", into_map)
        jobs.observe("reconcile routes", self._ways)
        jobs.observe("publish nodes", nodes.changes, self._report)
        if settings.tunnelled:
            jobs.observe("follow devices", route_mtu.devices.changes, self._look)
            jobs.observe("watch routes", self._hints, self._look)

    @property
    def _own(self) -> str:
        return f"{self._agent.cluster_name}/{self._agent.node_name}"

    def _networks(self, node: ClusterNode) -> Collection[RemoteNetwork]:
        if not self._settings.tunnelled:
            return ()
        families = self._router.addressing()
        return remote_networks([node], families, self._own, self._settings.underlay).values()

    def _is_unreachable(self, node: ClusterNode) -> bool:
        return bool(troubles([node], self._own, self._settings.underlay))

    def _ways_by_family(self, *_: object) -> Mapping[Family, TunnelWay]:
        """How all routes of a family go; the MTU follows what changes."""
        mtu, found = self._route_mtu(), dict[Family, TunnelWay]()
        for family, made in self._router.addressing().items():
            gateway = made.ip if made.ip.version == 4 else None  # IPv6 takes no gateway that is its own
            found[family] = TunnelWay(gateway, made.ip, mtu)
        return found

    async def _report(self, _: object) -> None:
        if not self._settings.tunnelled:
            return
        wrong = troubles(self._unreachable.all(), self._own, self._settings.underlay)
        if wrong:
            self._health.degraded("; ".join(wrong[:3]))
        else:
            self._health.ok(f"{len(self.table)} ranges of pods of other nodes")

    async def _hints(self) -> AsyncIterator[None]:
        async for hint in notifications(_RTMGRP_IPV4_ROUTE | _RTMGRP_IPV6_ROUTE, ROUTES_REMOVED):
            yield hint

    async def _look(self, _: object) -> None:
        self._ways.trigger()
