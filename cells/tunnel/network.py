"""The tunnel's device, and routes over cilium_host, in worker threads.

Needs: VxlanLinks; pyroute2, loaded once there are routes.   Gives: TunnelNetwork, TunnelRoute.
Source: ip-link(8) on vxlan; Cilium 1.17, setupVxlanDevice and the node routes of tunnel mode.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Iterable, Mapping
from ipaddress import ip_address, ip_network
from typing import TYPE_CHECKING, Any, Final, TypeVar

import anyio.to_thread
import msgspec

from cells.ipam import IPAddress, IPNetwork
from cells.node.netlink import FoundVxlan, NetlinkError, VxlanLinks, foreign_routes, routes_over
from cells.tunnel.objects import TunnelDevice

if TYPE_CHECKING:
    from pyroute2 import IPRoute

T = TypeVar("T")

RTPROT_KERNEL: Final = 2
"""As Cilium's: what manages routes by their protocol, like systemd-networkd, leaves these alone."""
_MAIN: Final = 254
_LINK_SCOPE, _UNIVERSE = 253, 0
_GONE: Final = frozenset({errno.ESRCH, errno.ENODEV, errno.ENOENT})


class TunnelRoute(msgspec.Struct, frozen=True):
    """The way to the pods of another node, over cilium_host, whose programs know the tunnel."""

    destination: IPNetwork
    gateway: IPAddress | None
    source: IPAddress | None
    mtu: int

    @property
    def key(self) -> IPNetwork:
        """Of its row."""
        return self.destination


class TunnelNetwork:
    """Reads and writes the node's network namespace. Methods raise NetlinkError when the kernel refuses."""

    def __init__(self) -> None:
        self._links = VxlanLinks()

    async def find(self, name: str) -> FoundVxlan | None:
        """The link of that name. Asked at once: every start does, and an answer takes less than a thread."""
        return self._links.find(name)

    async def create(self, name: str, device: TunnelDevice) -> None:
        """Make the device, down. EEXIST: the name is taken."""
        await anyio.to_thread.run_sync(self._links.create, name, device.mtu, device.port, device.source_ports)

    async def set_up(self, ifindex: int, name: str, mtu: int) -> None:
        """The MTU, and up; nothing that passes is lost. EADDRINUSE: another socket has the port."""
        await anyio.to_thread.run_sync(self._links.set_up, ifindex, name, mtu)

    async def delete(self, ifindex: int) -> None:
        """Remove a link; gone already is fine."""
        await anyio.to_thread.run_sync(self._links.delete, ifindex)

    async def routes(self, name: str) -> list[TunnelRoute]:
        """The routes of ours over a link: of the kernel's protocol, and with an MTU, as its own are not."""
        ifindex = _index(name)
        known = await anyio.to_thread.run_sync(routes_over, ifindex)
        if not any(route.by_kernel and _is_network(route.destination) for route in known):
            return []
        return await self._do("list routes", lambda ip: list(_routes(ip, ifindex)))

    async def foreign(self) -> Mapping[IPNetwork, str]:
        """Destinations of routes that are not ours, and how each goes on."""
        return await anyio.to_thread.run_sync(foreign_routes)

    async def set_route(self, name: str, route: TunnelRoute) -> None:
        """In place of another route of ours to there."""
        ifindex = _index(name)
        told: dict[str, Any] = {"dst": str(route.destination), "oif": ifindex, "proto": RTPROT_KERNEL}
        told["scope"] = _LINK_SCOPE if route.gateway is None and route.destination.version == 4 else _UNIVERSE
        if route.gateway is not None:
            told["gateway"] = str(route.gateway)
        if route.source is not None:
            told["prefsrc"] = str(route.source)
        told["metrics"] = {"mtu": route.mtu}
        await self._do(f"set route {route.destination}", lambda ip: ip.route("replace", **told))

    async def remove_route(self, name: str, destination: IPNetwork) -> None:
        """Remove a route of ours; gone already is fine."""
        ifindex = _index(name)
        told = {"dst": str(destination), "oif": ifindex, "proto": RTPROT_KERNEL}
        await self._do(f"remove route {destination}", lambda ip: ip.route("del", **told), gone_is_fine=True)

    async def _do(self, what: str, work: Callable[[IPRoute], T], *, gone_is_fine: bool = False) -> T:
        return await anyio.to_thread.run_sync(_call, what, work, gone_is_fine)


def _call(what: str, work: Callable[[IPRoute], T], gone_is_fine: bool) -> T:
    from pyroute2 import IPRoute
    from pyroute2 import NetlinkError as Refused

    try:
        with IPRoute() as ip:
            return work(ip)
    except Refused as error:
        if gone_is_fine and error.code in _GONE:
            return None  # type: ignore[return-value]  # of those who remove, which return nothing
        raise NetlinkError(error.code, what) from error


def _index(name: str) -> int:
    try:
        return socket.if_nametoindex(name)
    except OSError as error:
        raise NetlinkError(errno.ENODEV, f"find {name}") from error


def _is_network(destination: IPNetwork) -> bool:
    """Whether it may be a range of pods, not the kernel's own for an address."""
    return destination.num_addresses > 1 and not (destination.is_link_local or destination.is_multicast)


def _routes(ip: IPRoute, ifindex: int) -> Iterable[TunnelRoute]:
    for family, everywhere in ((2, "0.0.0.0"), (10, "::")):  # AF_INET, AF_INET6
        for route in ip.get_routes(family=family, oif=ifindex, table=_MAIN):
            metrics = route.get_attr("RTA_METRICS")
            mtu = metrics.get_attr("RTAX_MTU") if metrics is not None else None
            if route["proto"] != RTPROT_KERNEL or not mtu or route.get_attr("RTA_OIF") != ifindex:
                continue
            gateway, source = route.get_attr("RTA_GATEWAY"), route.get_attr("RTA_PREFSRC")
            yield TunnelRoute(
                ip_network((route.get_attr("RTA_DST") or everywhere, route["dst_len"])),
                ip_address(gateway) if gateway else None,
                ip_address(source) if source else None,
                mtu,
            )
