"""The routes in the kernel, by pyroute2 in worker threads.

For:    DirectRoutes.   Needs: pyroute2, loaded at the first call.   Gives: KernelRoutes.
Source: rtnetlink(7). Our routes have a gateway and the kernel's own protocol number, as Cilium's have: the
        kernel makes none with a gateway, and systemd-networkd takes no such route for its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from ipaddress import ip_address, ip_network
from socket import AF_INET, AF_INET6
from typing import TYPE_CHECKING, Any, Final

from anyio import to_thread

from cells.ipam import IPAddress, IPNetwork
from cells.node.direct_routes.routes import UnreachableError
from cells.node.netlink import ForeignRouteError, NetlinkError, foreign_routes

if TYPE_CHECKING:
    from pyroute2 import IPRoute

RTPROT_KERNEL: Final = 2
RT_TABLE_MAIN: Final = 254
RTN_UNICAST: Final = 1
_GONE: Final = frozenset({3, 19, 101})  # ESRCH, ENODEV, ENETUNREACH


class KernelRoutes:
    """The real :class:`~cells.node.direct_routes.routes.RouteKernel`."""

    async def routes(self) -> Mapping[IPNetwork, IPAddress]:
        """Gateways by destination. Raises NetlinkError."""
        return await to_thread.run_sync(_routes)

    async def put(self, routes: Mapping[IPNetwork, IPAddress]) -> Mapping[IPNetwork, Exception]:
        """Set each in place of another one to there; what failed."""
        return await to_thread.run_sync(_put, routes) if routes else {}

    async def drop(self, destinations: Collection[IPNetwork]) -> None:
        """Remove those with a gateway and our protocol. Raises NetlinkError."""
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


def _ours(ip: IPRoute) -> Iterator[tuple[IPNetwork, IPAddress]]:
    for family in (AF_INET, AF_INET6):
        for row in ip.get_routes(family=family, table=RT_TABLE_MAIN, proto=RTPROT_KERNEL, type=RTN_UNICAST):
            gateway, destination = row.get_attr("RTA_GATEWAY"), row.get_attr("RTA_DST")
            if gateway and destination:
                yield ip_network(f"{destination}/{row['dst_len']}"), ip_address(gateway)


def _routes() -> dict[IPNetwork, IPAddress]:
    with _opened() as ip:
        return dict(_ours(ip))


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
    """The link on which the address is; why there is none."""
    from pyroute2 import NetlinkError as Refused

    try:
        (row,) = ip.route("get", dst=str(gateway))
    except Refused as error:
        return NetlinkError(error.code, f"look up the route to {gateway}")
    via = row.get_attr("RTA_GATEWAY")
    if via is not None and ip_address(via) != gateway:
        return UnreachableError(f"route to {gateway} contains gateway {via}, must be directly reachable")
    return int(row.get_attr("RTA_OIF"))


def _drop(destinations: Collection[IPNetwork]) -> None:
    from pyroute2 import NetlinkError as Refused

    with _opened() as ip:
        for destination, gateway in list(_ours(ip)):
            if destination not in destinations:
                continue
            try:
                ip.route("del", dst=str(destination), gateway=str(gateway), proto=RTPROT_KERNEL)
            except Refused as error:
                if error.code not in _GONE:
                    raise NetlinkError(error.code, f"remove route {destination} via {gateway}") from error
