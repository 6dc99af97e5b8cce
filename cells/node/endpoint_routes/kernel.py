"""The routes over pods' links in the kernel.

For:    EndpointRouteKeeper.   Needs: HostLinks.   Gives: KernelRoutes.
"""

from __future__ import annotations

from anyio import to_thread

from cells.ipam import IPAddress, IPNetwork
from cells.node.netlink import HostLinks, RouteInfo, all_routes


class KernelRoutes:
    """The real :class:`~cells.node.endpoint_routes.routes.RouteKernel`."""

    def __init__(self, links: HostLinks) -> None:
        self._links = links

    async def routes(self) -> list[RouteInfo]:
        """Of the whole main table; read in a worker thread. Raises OSError."""
        return await to_thread.run_sync(all_routes)

    def put(self, ifindex: int, address: IPAddress, mac: bytes) -> None:
        """On the link, in place of another one to there. Raises OSError."""
        self._links.route_pod(ifindex, address, mac)

    def drop(self, ifindex: int, destination: IPNetwork) -> None:
        """Gone already is fine. Raises OSError."""
        self._links.remove_route(ifindex, destination)
