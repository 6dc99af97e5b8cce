"""Endpoint routes: routes to this node's pods, each over its own link (enable-endpoint-routes).

Reconciles routes of the main table with the ``endpoints`` table; ``endpoint-routes`` has the desired routes
and ``endpoint-routes-status`` their status.

Why: no single route covers the addresses of another IPAM plugin. The creation of an endpoint installs its
routes; this cell reinstalls deleted routes, and removes those of a previous configuration.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from ipaddress import ip_network
from typing import Final, Protocol

import msgspec
from anyio import to_thread

from cells.base.addresses import IPAddress, IPNetwork
from cells.config import AgentConfig
from cells.config.shared import PodRouting
from cells.endpoint import Endpoint
from cells.endpoint.restore import ExposedEndpoints
from cells.netlink.connection import LOAD_BYTE, Field, message_filter, notifications, of_types
from cells.netlink.links import HostLinks, all_routes
from cells.netlink.rows import RouteInfo
from cells.node.sysctl import Sysctls
from lifecycle import (
    Hook,
    Jobs,
    Lifecycle,
    ReadTable,
    Reconciler,
    Table,
    Tables,
    Target,
    after,
    invoke,
    minutes,
    module,
    provide,
    provide_private,
)
from lifecycle.tables import BatchFailures

__all__ = ["EndpointRoute", "EndpointRouteKeeper", "EndpointRouteKernel", "cell", "wanted"]


# Desired routes, and their reconciler.
#
# Source: Cilium 1.17, endpoint routes.

SWEEP: Final = minutes(1)
FORWARDING: Final = {"net/ipv4/ip_forward": "1"}
"""The router enables forwarding of IPv6."""

_RTMGRP_IPV4_ROUTE, _RTMGRP_IPV6_ROUTE = 0x40, 0x400
_RTM_DELROUTE: Final = 25
_LENGTH, _TABLE, _TYPE = 17, 20, 23
"""Offsets in a netlink message: struct rtmsg follows the header of 16 bytes."""
REMOVED: Final = message_filter(
    (
        of_types(_RTM_DELROUTE),
        Field(LOAD_BYTE, _LENGTH, (32, 128)),
        Field(LOAD_BYTE, _TABLE, (254,)),
        Field(LOAD_BYTE, _TYPE, (1,)),
    )
)
"""Matches the deletion of a unicast route to one address from the main table."""


class EndpointRoute(msgspec.Struct, frozen=True):
    """The route to a pod's address over its link."""

    destination: IPNetwork
    ifindex: int
    pod_mac: bytes
    """MAC address of the neighbour entry."""


class EndpointRouteKernel(Protocol):
    """The interface to the node's main routing table. Methods raise OSError."""

    async def routes(self) -> list[RouteInfo]:
        """Return all unicast routes."""
        ...

    def put(self, ifindex: int, address: IPAddress, mac: bytes) -> None:
        """Replace the route to ``address`` over the link, and the neighbour entry with its MAC."""
        ...

    def drop(self, ifindex: int, destination: IPNetwork) -> None:
        """Delete the route; a missing one is a no-op."""
        ...


def wanted(endpoint: Endpoint) -> Iterator[EndpointRoute]:
    """Yield the desired routes of an endpoint; none before it has an identity and its link is up."""
    if endpoint.datapath.install_endpoint_route and endpoint.identity:
        for address in endpoint.addresses:
            yield EndpointRoute(ip_network(address), endpoint.ifindex, endpoint.pod_mac)


def of_endpoints(endpoints: ReadTable[int, Endpoint]) -> ReadTable[IPNetwork, EndpointRoute]:
    """Return the table of all desired routes, by destination."""
    return endpoints.flat_map(wanted, key=_destination, name="endpoint-routes")


def _destination(route: EndpointRoute) -> IPNetwork:
    return route.destination


class EndpointRouteTarget(Target[IPNetwork, EndpointRoute, EndpointRoute]):
    """The reconciler's target: routes over links of endpoints."""

    def __init__(self, endpoints: Table[int, Endpoint], kernel: EndpointRouteKernel) -> None:
        self._endpoints = endpoints
        self._kernel = kernel

    async def observe(self) -> Mapping[IPNetwork, EndpointRoute]:
        """Return the routes to single addresses over links of our endpoints."""
        found = await self._kernel.routes()
        ours = {each.ifindex: each.pod_mac for each in self._endpoints.all() if not each.datapath.is_chained}
        return {
            route.destination: EndpointRoute(route.destination, route.ifindex, ours[route.ifindex])
            for route in found
            if route.ifindex in ours and not route.by_kernel and route.destination.num_addresses == 1
        }

    async def put(self, batch: Mapping[IPNetwork, EndpointRoute]) -> None:
        """Install routes. Raises BatchError."""
        with BatchFailures(OSError) as failures:
            for route in batch.values():
                with failures.of(route.destination):
                    self._kernel.put(route.ifindex, route.destination.network_address, route.pod_mac)

    async def drop(self, batch: Collection[IPNetwork]) -> None:
        """Delete routes. Raises BatchError."""
        present = await self.observe()
        with BatchFailures(OSError) as failures:
            for destination in batch:
                if (route := present.get(destination)) is not None:
                    with failures.of(destination):
                        self._kernel.drop(route.ifindex, destination)


@after(ExposedEndpoints)
class EndpointRouteKeeper:
    """Reconciles endpoint routes; reinstalls deleted routes at once.

    Starts once all endpoints, and thereby all links of pods, are listed.
    """

    def __init__(
        self,
        routing: PodRouting,
        endpoints: Table[int, Endpoint],
        kernel: EndpointRouteKernel,
        agent: AgentConfig,
        sysctls: Sysctls,
        *,
        lifecycle: Lifecycle,
        jobs: Jobs,
        tables: Tables,
    ) -> None:
        self._enabled = routing.endpoint_routes
        self._ipv4 = agent.ipv4
        self._sysctls = sysctls
        # Without the setting no route is desired: those of an earlier configuration are removed.
        table = of_endpoints(endpoints) if self._enabled else Table("endpoint-routes", key=_destination)
        every = SWEEP if self._enabled else math.inf
        self._reconciler = Reconciler(table, EndpointRouteTarget(endpoints, kernel), full_every=every)
        tables.add(table, self._reconciler.statuses)
        lifecycle.append(Hook("forward packets to pods", self._start))
        jobs.observe("reconcile", self._reconciler)
        if self._enabled:
            jobs.observe("watch routes", self._hints, self._reconcile)

    async def _start(self) -> None:
        if self._enabled and self._ipv4:
            self._sysctls.enforce(FORWARDING)
        self._reconciler.trigger()

    async def _hints(self) -> AsyncIterator[None]:
        async for hint in notifications(_RTMGRP_IPV4_ROUTE | _RTMGRP_IPV6_ROUTE, REMOVED):
            yield hint

    async def _reconcile(self, _: None) -> None:
        self._reconciler.trigger()


# The routes over pods' links in the kernel.


class KernelEndpointRoutes:
    """Implements :class:`~cells.endpoint.routes.EndpointRouteKernel` by netlink."""

    def __init__(self, links: HostLinks) -> None:
        self._links = links

    async def routes(self) -> list[RouteInfo]:
        """Return all routes of the main table, read in a worker thread. Raises OSError."""
        return await to_thread.run_sync(all_routes)

    def put(self, ifindex: int, address: IPAddress, mac: bytes) -> None:
        """Replace the route over the link. Raises OSError."""
        self._links.route_pod(ifindex, address, mac)

    def drop(self, ifindex: int, destination: IPNetwork) -> None:
        """Delete the route; a missing one is a no-op. Raises OSError."""
        self._links.remove_route(ifindex, destination)


cell = module(
    "endpoint-routes",
    "Routes to this node's pods",
    provide(EndpointRouteKeeper),
    provide_private(KernelEndpointRoutes, as_=(EndpointRouteKernel,)),
    invoke(EndpointRouteKeeper),
)
