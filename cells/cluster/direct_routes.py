"""Routes to the pods of other nodes in the same network (auto-direct-node-routes).

Reconciler: the table ``nodes`` in, routes of the main table out; ``direct-routes`` has the desired routes,
            ``direct-routes-status`` their states.
Why:        without a tunnel, routes lead packets to the nodes of pods.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec
from anyio import to_thread

from cells.base.addresses import Family, IPAddress, IPNetwork
from cells.cluster.nodes.node import ClusterNode
from cells.config import AgentConfig
from cells.netlink.connection import (
    LOAD_BYTE,
    Field,
    ForeignRouteError,
    NetlinkError,
    message_filter,
    notifications,
    of_types,
)
from cells.netlink.rows import foreign_routes, own_gateways
from cells.node.devices import Device
from lifecycle import (
    BatchError,
    HiveError,
    Jobs,
    Logger,
    ReadTable,
    Reconciler,
    Settings,
    Table,
    Tables,
    config,
    invoke,
    minutes,
    module,
    provide,
    provide_private,
)

if TYPE_CHECKING:
    from pyroute2 import IPRoute

__all__ = [
    "DirectRoute",
    "DirectRouteKernel",
    "DirectRouteSettings",
    "DirectRoutes",
    "DirectRouting",
    "cell",
    "wanted",
]


# Whether direct routes are used.


class DirectRouteSettings(Settings, frozen=True):
    """Settings of the routes to other nodes."""

    auto_direct_node_routes: bool = False
    """Install a route to every other node's pods via that node, for nodes that share a network."""

    direct_routing_skip_unreachable: bool = False
    """Skip nodes that are behind a router, with a warning; otherwise that is an error."""

    def faults(self) -> Iterator[str]:
        if self.direct_routing_skip_unreachable and not self.auto_direct_node_routes:
            yield "direct-routing-skip-unreachable needs auto-direct-node-routes"


class DirectRouting(msgspec.Struct, frozen=True):
    """Whether this node has routes to other nodes' pods in the same network."""

    used: bool


def direct_routing(settings: DirectRouteSettings) -> DirectRouting:
    """The setting auto-direct-node-routes."""
    return DirectRouting(settings.auto_direct_node_routes)


# The desired routes, and their reconciliation.
#
# Source: Cilium 1.17, the Linux node handler's direct routes.

SWEEP: Final = minutes(1)
HINT: Final = "set direct-routing-skip-unreachable to leave such nodes out"

_RTMGRP_IPV4_ROUTE, _RTMGRP_IPV6_ROUTE = 0x40, 0x400
_RTM_DELROUTE: Final = 25
_TABLE, _PROTOCOL, _TYPE = 20, 21, 23
"""Offsets of rtm_table, rtm_protocol and rtm_type in a message, after the header of 16 bytes."""
REMOVED: Final = message_filter(
    (
        of_types(_RTM_DELROUTE),
        Field(LOAD_BYTE, _TABLE, (254,)),
        Field(LOAD_BYTE, _PROTOCOL, (2,)),
        Field(LOAD_BYTE, _TYPE, (1,)),
    )
)
"""Matches the deletion of a unicast route in the main table with our protocol."""


class DirectRoute(msgspec.Struct, frozen=True):
    """A range of another node's pods, and its gateway."""

    destination: IPNetwork
    gateway: IPAddress | None
    """The node's own address; None if it has none of the family."""
    node: str
    """``cluster/name``."""


class DirectRouteKernel(Protocol):
    """Our routes in the node's main routing table. Methods raise OSError."""

    async def routes(self) -> Mapping[IPNetwork, IPAddress]:
        """Our routes: gateways by destination."""
        ...

    async def put(self, routes: Mapping[IPNetwork, IPAddress]) -> Mapping[IPNetwork, Exception]:
        """Add or replace routes over gateways on a link of the node.

        Returns failed ones: Unreachable, OSError.
        """
        ...

    async def drop(self, destinations: Collection[IPNetwork]) -> None:
        """Remove our routes; missing ones are ignored."""
        ...


class BehindRouterError(HiveError):
    """A node behind a router, which would need a route to our pods."""


def wanted(nodes: Iterable[ClusterNode], families: Collection[Family]) -> dict[IPNetwork, DirectRoute]:
    """A route for each range of these families of each other node.

    The table ``nodes`` never has the same range for two nodes.
    """
    return {
        cidr: DirectRoute(cidr, node.node_ip(family), node.full_name)
        for node in nodes
        if not node.local
        for family in families
        for cidr in node.alloc_cidrs(family)
    }


def direct_routes(
    nodes: ReadTable[str, ClusterNode], agent: AgentConfig
) -> ReadTable[IPNetwork, DirectRoute]:
    """The table ``direct-routes``, of the enabled families."""
    on = {Family.IPV4: agent.ipv4, Family.IPV6: agent.ipv6}
    families = [family for family in Family if on[family]]
    return nodes.derive(lambda rows: wanted(rows, families), name="direct-routes")


class DirectRouteTarget:
    """The kernel as a reconciler's target; it sees only our routes."""

    def __init__(self, kernel: DirectRouteKernel, log: Logger, *, skip_unreachable: bool) -> None:
        self._kernel = kernel
        self._log = log
        self._skip = skip_unreachable
        self._reported: set[str] = set()

    async def observe(self) -> Mapping[IPNetwork, IPAddress]:
        """The gateways of the present routes."""
        return await self._kernel.routes()

    def matches(self, row: DirectRoute, observed: IPAddress) -> bool:
        """Whether the route has this gateway."""
        return row.gateway == observed

    async def put(self, batch: Mapping[IPNetwork, DirectRoute]) -> None:
        """Add or replace routes. If a gateway is unusable, a route over an earlier one is removed.

        Raises BatchError.
        """
        failures: dict[IPNetwork, Exception] = {}
        gateways: dict[IPNetwork, IPAddress] = {}
        for destination, route in batch.items():
            if route.gateway is None:
                text = f"node {route.node} has no {Family.of(destination).text} address"
                failures[destination] = HiveError(f"{text} to reach {destination} by")
            else:
                gateways[destination] = route.gateway
        refused = await self._kernel.put(gateways)
        lost = {*failures, *(to for to, error in refused.items() if not isinstance(error, ForeignRouteError))}
        if lost:
            await self._kernel.drop(lost)
        for destination, error in refused.items():
            if self._skip and isinstance(error, BehindRouterError):
                self._report(f"{batch[destination].node} is left out: {error}")
            else:
                failures[destination] = error
        for destination, error in failures.items():
            hint = f"; {HINT}" if isinstance(error, BehindRouterError) else ""
            self._report(f"no route to {destination} of {batch[destination].node}: {error}{hint}", wrong=True)
        if failures:
            raise BatchError(failures)

    async def drop(self, batch: Collection[IPNetwork]) -> None:
        """Remove them."""
        await self._kernel.drop(batch)
        self._reported.clear()

    def _report(self, text: str, *, wrong: bool = False) -> None:
        """Log once, as the reconciler retries."""
        if text not in self._reported:
            self._reported.add(text)
            (self._log.error if wrong else self._log.warning)(text)


class DirectRoutes:
    """Maintains the routes if the setting is on, and restores removed ones at once.

    Otherwise, it removes routes of an earlier agent to present nodes.
    """

    def __init__(
        self,
        settings: DirectRouteSettings,
        routes: ReadTable[IPNetwork, DirectRoute],
        devices: Table[int, Device],
        kernel: DirectRouteKernel,
        *,
        jobs: Jobs,
        tables: Tables,
        log: Logger,
    ) -> None:
        self._routes = routes
        self._kernel = kernel
        if not settings.auto_direct_node_routes:
            jobs.one_shot("remove direct routes", self._remove)
            return
        target = DirectRouteTarget(kernel, log, skip_unreachable=settings.direct_routing_skip_unreachable)
        self._reconciler = Reconciler(routes, target, full_every=SWEEP, put_early=True)
        tables.add(routes, self._reconciler.statuses)
        jobs.observe("reconcile", self._reconciler)
        jobs.observe("watch devices", devices.changes, self._trigger)
        jobs.observe("watch routes", self._deleted_routes, self._trigger)

    async def _remove(self) -> None:
        await self._routes.wait_initialized()
        found = await self._kernel.routes()
        gateways = {row.destination: row.gateway for row in self._routes.all()}
        if left := [to for to, gateway in found.items() if gateways.get(to) == gateway]:
            await self._kernel.drop(left)

    async def _deleted_routes(self) -> AsyncIterator[None]:
        async for hint in notifications(_RTMGRP_IPV4_ROUTE | _RTMGRP_IPV6_ROUTE, REMOVED):
            yield hint

    async def _trigger(self, _: object) -> None:
        self._reconciler.trigger()


# The routes in the kernel, by pyroute2 in worker threads.
#
# Source: rtnetlink(7). Our routes have a gateway and the kernel's own protocol number, as Cilium's have: the
#         kernel makes none with a gateway, and systemd-networkd takes no such route for its own.

RTPROT_KERNEL: Final = 2
RT_TABLE_MAIN: Final = 254
_MISSING: Final = frozenset({3, 19, 101})  # ESRCH, ENODEV, ENETUNREACH


class KernelDirectRoutes:
    """The real :class:`~cells.cluster.direct_routes.DirectRouteKernel`."""

    async def routes(self) -> Mapping[IPNetwork, IPAddress]:
        """Gateways by destination. Raises NetlinkError."""
        return await to_thread.run_sync(_routes)

    async def put(self, routes: Mapping[IPNetwork, IPAddress]) -> Mapping[IPNetwork, Exception]:
        """Replace the routes to these destinations. Returns failed ones."""
        return await to_thread.run_sync(_put, routes) if routes else {}

    async def drop(self, destinations: Collection[IPNetwork]) -> None:
        """Remove routes with a gateway and our protocol. Raises NetlinkError."""
        await to_thread.run_sync(_drop, destinations)


@contextmanager
def _opened() -> Iterator[IPRoute]:
    from pyroute2 import IPRoute
    from pyroute2 import NetlinkError as Refused

    try:
        with IPRoute(strict_check=True) as ip:
            yield ip
    except Refused as error:
        raise NetlinkError(error.code, "list routes") from error


def _routes() -> dict[IPNetwork, IPAddress]:
    return dict(own_gateways())


def _put(routes: Mapping[IPNetwork, IPAddress]) -> dict[IPNetwork, Exception]:
    from pyroute2 import NetlinkError as Refused

    failures: dict[IPNetwork, Exception] = {}
    foreign = foreign_routes()
    with _opened() as ip:
        links: dict[IPAddress, int | Exception] = {}
        for destination, gateway in routes.items():
            if destination in foreign:
                failures[destination] = ForeignRouteError(destination, foreign[destination])
                continue
            if gateway not in links:
                links[gateway] = _link(ip, gateway)
            link = links[gateway]
            if isinstance(link, Exception):
                failures[destination] = link
                continue
            way: dict[str, Any] = {"dst": str(destination), "gateway": str(gateway), "oif": link}
            try:
                ip.route("replace", proto=RTPROT_KERNEL, table=RT_TABLE_MAIN, **way)
            except Refused as error:
                failures[destination] = NetlinkError(error.code, f"set route {destination} via {gateway}")
    return failures


def _link(ip: IPRoute, gateway: IPAddress) -> int | Exception:
    """The link in the network of the address, or why there is none."""
    from pyroute2 import NetlinkError as Refused

    try:
        (row,) = ip.route("get", dst=str(gateway))
    except Refused as error:
        return NetlinkError(error.code, f"look up the route to {gateway}")
    via = row.get_attr("RTA_GATEWAY")
    if via is not None and ip_address(via) != gateway:
        return BehindRouterError(f"route to {gateway} contains gateway {via}, must be directly reachable")
    return int(row.get_attr("RTA_OIF"))


def _drop(destinations: Collection[IPNetwork]) -> None:
    from pyroute2 import NetlinkError as Refused

    found = [(to, gateway) for to, gateway in own_gateways() if to in destinations]
    if not found:
        return
    with _opened() as ip:
        for destination, gateway in found:
            try:
                ip.route("del", dst=str(destination), gateway=str(gateway), proto=RTPROT_KERNEL)
            except Refused as error:
                if error.code not in _MISSING:
                    raise NetlinkError(error.code, f"remove route {destination} via {gateway}") from error


def kernel() -> DirectRouteKernel:
    """The node's routes."""
    return KernelDirectRoutes()


cell = module(
    "direct-routes",
    "Routes to other nodes' pods",
    config(DirectRouteSettings),
    provide(DirectRoutes, direct_routing),
    provide_private(direct_routes, kernel),
    invoke(DirectRoutes),
)
