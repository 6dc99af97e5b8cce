"""The router's writes while the agent starts: packed messages, which take no time to load.

For:    Router.   Needs: HostLinks.   Gives: StartWriter.
"""

from cells.node.netlink import HostLinks, IPAddress, IPInterface, IPNetwork, VethPair


class StartWriter:
    """A :class:`~cells.node.router.pair.RouterWriter` whose every method is one synchronous exchange."""

    def __init__(self, links: HostLinks) -> None:
        self._links = links

    async def create_veth(self, pair: VethPair) -> None:
        """Create a pair, both ends down."""
        self._links.create_veth(pair)

    async def set_device(self, ifindex: int, name: str, mtu: int) -> None:
        """MTU, queue length 1000, no ARP, up."""
        self._links.set_device(ifindex, name, mtu)

    async def add_address(self, ifindex: int, name: str, address: IPAddress) -> None:
        """Add as a /32 or /128."""
        self._links.add_address(ifindex, name, address)

    async def remove_address(self, ifindex: int, name: str, address: IPInterface) -> None:
        """Remove, with the route to it alone."""
        self._links.remove_address(ifindex, name, address)

    async def set_route(
        self, ifindex: int, destination: IPNetwork, gateway: IPAddress | None, source: IPAddress | None
    ) -> None:
        """Through the gateway, or on the link; in place of another route to the destination."""
        self._links.set_route(ifindex, destination, gateway, source)

    async def remove_route(self, ifindex: int, destination: IPNetwork) -> None:
        """Remove; gone already is fine."""
        self._links.remove_route(ifindex, destination)
