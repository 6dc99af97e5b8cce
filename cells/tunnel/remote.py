"""Reachability of other nodes' pods through the tunnel: entries of cilium_tunnel_map, and routes."""

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


# The table ``tunnel-networks``: pod CIDRs of other nodes, computed from the table ``nodes``.


class RemoteNetwork(msgspec.Struct, frozen=True):
    """A row of ``tunnel-networks``: a pod CIDR of another node."""

    network: IPNetwork
    node: str
    """Cluster and name of the node: ``cluster/name``."""
    endpoint: IPAddress
    """The remote tunnel endpoint: the node's address of the underlay's family."""


class NextHop(msgspec.Struct, frozen=True):
    """The attributes that all routes of a family share."""

    gateway: IPAddress | None
    source: IPAddress
    mtu: int


def remote_networks(
    nodes: Iterable[ClusterNode], families: Collection[Family], name: str, underlay: Family = Family.IPV4
) -> dict[IPNetwork, RemoteNetwork]:
    """Return the pod CIDRs of other nodes, of enabled families, if the node has an underlay address.

    ``name``: ``cluster/name`` of this node; its Node object may be listed before its agent registers it.
    """
    found: dict[IPNetwork, RemoteNetwork] = {}
    for node in nodes:
        endpoint = node.node_ip(underlay)
        if _is_local(node, name) or endpoint is None:
            continue
        for cidr in node.all_cidrs():
            if Family.of(cidr) in families:
                found[cidr] = RemoteNetwork(cidr, node.full_name, endpoint)
    return found


def _is_local(node: ClusterNode, name: str) -> bool:
    return node.local or node.full_name == name


def unreachable_nodes(nodes: Iterable[ClusterNode], name: str, underlay: Family = Family.IPV4) -> list[str]:
    """Return a message for each node that the tunnel cannot reach."""
    return [
        f"node {node.full_name} has no {underlay.text} address, which the tunnel needs"
        for node in sorted(nodes, key=lambda node: node.full_name)
        if not _is_local(node, name) and node.node_ip(underlay) is None
    ]


# Reconciler targets: cilium_tunnel_map, and routes over cilium_host.

HOST_LINK: Final = "cilium_host"

TunnelEndpoints = MapTarget[TunnelKey, TunnelValue, TunnelValue]
"""Target type of cilium_tunnel_map, keyed by network address."""


class NetworkRoutes(Target[IPNetwork, TunnelRoute, TunnelRoute]):
    """Routes over cilium_host to other nodes' pods, for the node itself and for forwarded packets."""

    def __init__(self, kernel: TunnelNetwork) -> None:
        self._kernel = kernel

    async def observe(self) -> Mapping[IPNetwork, TunnelRoute]:
        """Read the existing routes."""
        return {route.key: route for route in await self._kernel.routes(HOST_LINK)}

    async def put(self, batch: Mapping[IPNetwork, TunnelRoute]) -> None:
        """Add or replace routes. Raises BatchError, with ForeignRouteError for foreign ones."""
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
"""Offsets of rtm_table, rtm_protocol and rtm_type in a message; then their values main and unicast."""
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
    """Maintains entries and routes to the nodes' pod CIDRs; in native mode there are none.

    Entries are written as soon as a node is listed; stale ones are deleted only after all nodes are.
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
        """Other nodes' pod CIDRs that the tunnel reaches, by CIDR."""
        self._endpoints = self.table.group(
            lambda each: TunnelKey(each.network.network_address),
            lambda _, networks: TunnelValue(networks[-1].endpoint),
            name="tunnel-endpoints",
        )
        self._routes = self.table.join(
            Derived("tunnel-next-hops", self._next_hops, *route_mtu.sources),
            lambda each, hop: TunnelRoute(each.network, hop.gateway, hop.source, hop.mtu),
            on=lambda each: Family.of(each.network),
            name="tunnel-routes",
        )
        every = INTERVAL if settings.tunnelled else math.inf
        into_map = Reconciler(self._endpoints, endpoints, full_every=every, put_early=True)
        self._reconciler = Reconciler(self._routes, NetworkRoutes(routes), full_every=every, put_early=True)
        tables.add(self.table, self._endpoints, into_map.statuses, self._routes, self._reconciler.statuses)
        jobs.observe("reconcile endpoints", into_map)
        jobs.observe("reconcile routes", self._reconciler)
        jobs.observe("publish nodes", nodes.changes, self._report)
        if settings.tunnelled:
            jobs.observe("follow devices", route_mtu.devices.changes, self._trigger_routes)
            jobs.observe("watch routes", self._hints, self._trigger_routes)

    @property
    def _own(self) -> str:
        return f"{self._agent.cluster_name}/{self._agent.node_name}"

    def _networks(self, node: ClusterNode) -> Collection[RemoteNetwork]:
        if not self._settings.tunnelled:
            return ()
        families = self._router.addressing()
        return remote_networks([node], families, self._own, self._settings.underlay).values()

    def _is_unreachable(self, node: ClusterNode) -> bool:
        return bool(unreachable_nodes([node], self._own, self._settings.underlay))

    def _next_hops(self, *_: object) -> Mapping[Family, NextHop]:
        """Compute the common attributes of routes, by family; the MTU may change."""
        mtu, found = self._route_mtu(), dict[Family, NextHop]()
        for family, made in self._router.addressing().items():
            gateway = made.ip if made.ip.version == 4 else None  # IPv6: the kernel rejects own addresses
            found[family] = NextHop(gateway, made.ip, mtu)
        return found

    async def _report(self, _: object) -> None:
        if not self._settings.tunnelled:
            return
        wrong = unreachable_nodes(self._unreachable.all(), self._own, self._settings.underlay)
        if wrong:
            self._health.degraded("; ".join(wrong[:3]))
        else:
            self._health.ok(f"{len(self.table)} pod CIDRs of other nodes")

    async def _hints(self) -> AsyncIterator[None]:
        async for hint in notifications(_RTMGRP_IPV4_ROUTE | _RTMGRP_IPV6_ROUTE, ROUTES_REMOVED):
            yield hint

    async def _trigger_routes(self, _: object) -> None:
        self._reconciler.trigger()
