"""Which routes there should be, and their keeping.

For:    pods that send to pods of other nodes.   Needs: ReadTable[ClusterNode], Table[Device], RouteKernel.
Gives:  DirectRoutes, DirectRoute, wanted(), RouteKernel.
Source: Cilium 1.17, the Linux node handler's direct routes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from typing import Final, Protocol

import msgspec

from cells.cluster.nodes import ClusterNode
from cells.ipam import Family, IPAddress, IPNetwork
from cells.node.devices import Device
from cells.node.direct_routes.settings import DirectRouteSettings
from cells.node.netlink import news
from lifecycle import (
    BatchError,
    HiveError,
    Jobs,
    Logger,
    ReadTable,
    Reconciler,
    Table,
    Tables,
    minutes,
)

SWEEP: Final = minutes(1)
HINT: Final = "set direct-routing-skip-unreachable to leave such nodes out"

_RTMGRP_IPV4_ROUTE, _RTMGRP_IPV6_ROUTE = 0x40, 0x400
_RTM_DELROUTE: Final = 25
_TABLE, _PROTOCOL, _TYPE = 20, 21, 23
"""Of an rtmsg, behind the header of 16 bytes."""
REMOVED: Final = news.passing(
    (
        news.kinds(_RTM_DELROUTE),
        news.Field(news.LOAD_BYTE, _TABLE, (254,)),
        news.Field(news.LOAD_BYTE, _PROTOCOL, (2,)),
        news.Field(news.LOAD_BYTE, _TYPE, (1,)),
    )
)
"""A unicast route of the main table with our protocol is gone."""


class DirectRoute(msgspec.Struct, frozen=True):
    """A range of another node's pods, and the way there."""

    destination: IPNetwork
    gateway: IPAddress | None
    """The node's own address; None when it has none of the family."""
    node: str
    """``cluster/name``."""


class RouteKernel(Protocol):
    """The node's main routing table, as far as this cell touches it. Methods raise OSError."""

    async def routes(self) -> Mapping[IPNetwork, IPAddress]:
        """Our routes: gateway by destination."""
        ...

    async def put(self, routes: Mapping[IPNetwork, IPAddress]) -> Mapping[IPNetwork, Exception]:
        """Set routes over gateways on a link of the node; those that failed: Unreachable, OSError."""
        ...

    async def drop(self, destinations: Collection[IPNetwork]) -> None:
        """Remove our routes; gone already is fine."""
        ...


class UnreachableError(HiveError):
    """Raised for a node that is behind a router: it would have to know of our pods."""


def wanted(nodes: Iterable[ClusterNode]) -> dict[IPNetwork, DirectRoute]:
    """A route for each range of each other node; the table ``nodes`` gives no two nodes the same."""
    return {
        cidr: DirectRoute(cidr, node.node_ip(Family.of(cidr)), node.full_name)
        for node in nodes
        if not node.local
        for cidr in node.all_cidrs()
    }


class Routes:
    """The kernel as a reconciler's target; only routes of ours are seen."""

    def __init__(
        self, table: ReadTable[DirectRoute], kernel: RouteKernel, log: Logger, *, skip_unreachable: bool
    ) -> None:
        self._table = table
        self._kernel = kernel
        self._log = log
        self._skip = skip_unreachable
        self._told: set[str] = set()

    async def dump(self) -> Mapping[IPNetwork, DirectRoute]:
        """The routes there are: those that are as wanted, and others without a node."""
        found = {}
        for destination, gateway in (await self._kernel.routes()).items():
            row = self._table.get(destination)
            same = row is not None and row.gateway == gateway
            found[destination] = row if row is not None and same else DirectRoute(destination, gateway, "")
        return found

    async def put(self, batch: Mapping[IPNetwork, DirectRoute]) -> None:
        """Set them. Raises BatchError."""
        failures: dict[IPNetwork, Exception] = {}
        ways: dict[IPNetwork, IPAddress] = {}
        for destination, route in batch.items():
            if route.gateway is None:
                text = f"node {route.node} has no {Family.of(destination).text} address"
                failures[destination] = HiveError(f"{text} to reach {destination} by")
            else:
                ways[destination] = route.gateway
        for destination, error in (await self._kernel.put(ways)).items():
            if self._skip and isinstance(error, UnreachableError):
                self._tell(f"{batch[destination].node} is left out: {error}")
            else:
                failures[destination] = error
        for destination, error in failures.items():
            hint = f"; {HINT}" if isinstance(error, UnreachableError) else ""
            self._tell(f"no route to {destination} of {batch[destination].node}: {error}{hint}", wrong=True)
        if failures:
            raise BatchError(failures)

    async def drop(self, batch: Collection[IPNetwork]) -> None:
        """Remove them."""
        await self._kernel.drop(batch)
        self._told.clear()

    def _tell(self, text: str, *, wrong: bool = False) -> None:
        """Once: it is tried again and again."""
        if text not in self._told:
            self._told.add(text)
            (self._log.error if wrong else self._log.warning)(text)


class DirectRoutes:
    """Maintains the routes if the setting asks for them. Removed ones are restored at once."""

    def __init__(
        self,
        settings: DirectRouteSettings,
        nodes: ReadTable[ClusterNode],
        devices: Table[Device],
        kernel: RouteKernel,
        *,
        jobs: Jobs,
        tables: Tables,
        log: Logger,
    ) -> None:
        if not settings.auto_direct_node_routes:
            return
        table = nodes.derive(wanted, name="direct-routes")
        target = Routes(table, kernel, log, skip_unreachable=settings.direct_routing_skip_unreachable)
        self._reconciler = Reconciler(table, target, full_every=SWEEP)
        tables.add(table, self._reconciler.statuses)
        jobs.observe("reconcile", self._reconciler)
        jobs.observe("watch devices", devices.changes, self._look)
        jobs.observe("watch routes", self._hints, self._look)

    async def _hints(self) -> AsyncIterator[None]:
        async for hint in news.hints(_RTMGRP_IPV4_ROUTE | _RTMGRP_IPV6_ROUTE, REMOVED):
            yield hint

    async def _look(self, _: object) -> None:
        self._reconciler.trigger()
