"""The tunnel's device, and routes over cilium_host, in worker threads.

Needs: VxlanLinks.   Gives: TunnelNetwork, TunnelRoute.
Source: ip-link(8) on vxlan; Cilium 1.17, setupVxlanDevice and the node routes of tunnel mode.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping

import anyio.to_thread
import msgspec

from cells.ipam import IPAddress, IPNetwork
from cells.node.netlink import FoundVxlan, NetlinkError, VxlanLinks, foreign_routes, routes_over
from cells.tunnel.objects import TunnelDevice


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
        known = await anyio.to_thread.run_sync(routes_over, _index(name))
        return [
            TunnelRoute(route.destination, route.gateway, route.source, route.mtu)
            for route in known
            if route.by_kernel and route.mtu
        ]

    async def foreign(self) -> Mapping[IPNetwork, str]:
        """Destinations of routes that are not ours, and how each goes on."""
        return await anyio.to_thread.run_sync(foreign_routes)

    async def set_route(self, name: str, route: TunnelRoute) -> None:
        """In place of another route of ours to there."""
        await anyio.to_thread.run_sync(
            self._links.set_route, _index(name), route.destination, route.gateway, route.source, route.mtu
        )

    async def remove_route(self, name: str, destination: IPNetwork) -> None:
        """Remove a route of ours; gone already is fine."""
        await anyio.to_thread.run_sync(self._links.remove_route, _index(name), destination)


def _index(name: str) -> int:
    try:
        return socket.if_nametoindex(name)
    except OSError as error:
        raise NetlinkError(errno.ENODEV, f"find {name}") from error
