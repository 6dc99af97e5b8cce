"""The veth pair cilium_host and cilium_net, through which the node itself talks to its pods.

Needs: the node's links (RouterLinks, RouterWriter, Protocols).
Gives: Pair, Macs, ensure_pair(), found_pair(), is_right().

Repeating any of it on a pair that is right touches nothing: a restart must not be felt.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

from cells.node.netlink import (
    IPAddress,
    IPInterface,
    IPNetwork,
    LinkInfo,
    RouteInfo,
    VethPair,
    random_mac,
)
from lifecycle import Logger

HOST = "cilium_host"
NET = "cilium_net"
_TX_QUEUE_LENGTH = 1000


class RouterLinks(Protocol):
    """The node's links; cells.node.netlink.HostLinks. Methods raise NetlinkError."""

    def find(self, name: str) -> LinkInfo | None:
        """The link of that name."""
        ...

    def addresses(self) -> Mapping[int, Sequence[IPInterface]]:
        """The addresses of every link, by index."""
        ...

    async def routes(self, ifindex: int) -> Sequence[RouteInfo]:
        """The routes over a link."""
        ...

    async def reap(self, ifindexes: Iterable[int]) -> None:
        """Delete, off the loop."""
        ...


class RouterWriter(Protocol):
    """What changes the node's links; cells.node.netlink.NodeNetwork. Methods raise NetlinkError."""

    async def create_veth(self, pair: VethPair) -> None:
        """Create a pair, both ends down."""
        ...

    async def set_device(self, ifindex: int, name: str, mtu: int) -> None:
        """MTU, queue length 1000, no ARP, up."""
        ...

    async def add_address(self, ifindex: int, name: str, address: IPAddress) -> None:
        """Add as a /32 or /128."""
        ...

    async def remove_address(self, ifindex: int, name: str, address: IPInterface) -> None:
        """Remove, with the route to it alone."""
        ...

    async def set_route(
        self, ifindex: int, destination: IPNetwork, gateway: IPAddress | None, source: IPAddress | None
    ) -> None:
        """Through the gateway, or on the link; in place of another route to the destination."""
        ...

    async def remove_route(self, ifindex: int, destination: IPNetwork) -> None:
        """Remove; gone already is fine."""
        ...


class Pair(msgspec.Struct, frozen=True):
    """Both ends."""

    host: LinkInfo
    net: LinkInfo


class Macs(NamedTuple):
    """Those a new pair gets."""

    host: bytes
    net: bytes


async def ensure_pair(
    links: RouterLinks, writer: RouterWriter, mtu: int, log: Logger, macs: Macs | None = None
) -> Pair:
    """The pair as it is when it is one, else a new one in place of what has its names; up, without ARP.

    A new one has ``macs``, else random ones.
    """
    pair = found_pair(links)
    if pair is None:
        obstacles = [link for name in (HOST, NET) if (link := links.find(name)) is not None]
        for link in obstacles:
            log.warning("link is not half of our pair, creating it again", link=link.name, kind=link.kind)
        await links.reap(link.ifindex for link in obstacles)
        macs = macs or Macs(random_mac(), random_mac())
        await writer.create_veth(VethPair(HOST, macs.host, NET, macs.net, mtu, None))
        pair = found_pair(links)
        if pair is None:
            raise RuntimeError(f"{HOST} and {NET} were created, and are no pair")
    for link in (pair.host, pair.net):
        if not is_right(link, mtu):
            await writer.set_device(link.ifindex, link.name, mtu)
    return pair


def is_right(link: LinkInfo, mtu: int) -> bool:
    """Whether an end of the pair is up, without ARP, and has this MTU."""
    return link.up and not link.arp and link.mtu == mtu and link.tx_queue_length == _TX_QUEUE_LENGTH


def found_pair(links: RouterLinks) -> Pair | None:
    """The two links by their names, if they are the ends of one pair."""
    host, net = links.find(HOST), links.find(NET)
    if host is None or net is None or {host.kind, net.kind} != {"veth"}:
        return None
    if host.peer_ifindex != net.ifindex or host.link_netnsid is not None:
        return None
    return Pair(host, net)


def lasting(addresses: Iterable[IPInterface]) -> list[IPInterface]:
    """Without the link-local IPv6 addresses, which the kernel gives and takes."""
    return [address for address in addresses if address.version == 4 or not address.is_link_local]
