"""The veth pair cilium_host and cilium_net, through which the node itself talks to its pods.

Needs: the node's links (RouterLinks, a Protocol).   Gives: Pair, ensure_pair(), set_addresses().

Repeating any of it on a pair that is right touches nothing: a restart must not be felt.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Interface, IPv4Network
from typing import Protocol

from cells.netlink import CreatedLink, LinkInfo, VethPair, random_mac
from lifecycle import Logger

HOST = "cilium_host"
NET = "cilium_net"
_TX_QUEUE_LENGTH = 1000


class RouterLinks(Protocol):
    """The node's links; cells.netlink.HostLinks. Methods raise NetlinkError."""

    def find(self, name: str) -> LinkInfo | None:
        """The link of that name."""
        ...

    def create_veth(self, pair: VethPair) -> CreatedLink:
        """Create a pair, both ends down."""
        ...

    def set_device(self, ifindex: int, name: str, mtu: int) -> None:
        """MTU, queue length 1000, no ARP, up."""
        ...

    def addresses(self) -> Mapping[int, Sequence[IPv4Interface]]:
        """The addresses of every link, by index."""
        ...

    def add_address(self, ifindex: int, name: str, address: IPv4Address) -> None:
        """Add as a /32."""
        ...

    def remove_address(self, ifindex: int, name: str, address: IPv4Interface) -> None:
        """Remove, with the route to it alone."""
        ...

    def set_routes(self, ifindex: int, gateway: IPv4Address, network: IPv4Network) -> None:
        """Gateway on the link, network through it; equal routes stay."""
        ...

    async def reap(self, ifindexes: Iterable[int]) -> None:
        """Delete, off the loop."""
        ...


@dataclass(frozen=True, slots=True)
class Pair:
    """Both ends."""

    host: LinkInfo
    net: LinkInfo


async def ensure_pair(links: RouterLinks, mtu: int, log: Logger) -> Pair:
    """The pair as it is when it is one, else a new one in place of what has its names; up, without ARP."""
    pair = found_pair(links)
    if pair is None:
        obstacles = [link for name in (HOST, NET) if (link := links.find(name)) is not None]
        for link in obstacles:
            log.warning("link is not half of our pair, making it anew", link=link.name, kind=link.kind)
        await links.reap(link.ifindex for link in obstacles)
        links.create_veth(VethPair(HOST, random_mac(), NET, random_mac(), mtu, None))
        pair = found_pair(links)
        if pair is None:
            raise RuntimeError(f"{HOST} and {NET} were created, and are no pair")
    for link in (pair.host, pair.net):
        if not link.up or link.arp or link.mtu != mtu or link.tx_queue_length != _TX_QUEUE_LENGTH:
            links.set_device(link.ifindex, link.name, mtu)
    return pair


def found_pair(links: RouterLinks) -> Pair | None:
    """The two links by their names, if they are the ends of one pair."""
    host, net = links.find(HOST), links.find(NET)
    if host is None or net is None or {host.kind, net.kind} != {"veth"}:
        return None
    if host.peer_ifindex != net.ifindex or host.link_netnsid is not None:
        return None
    return Pair(host, net)


def set_addresses(links: RouterLinks, ifindex: int, router: IPv4Address, pods: IPv4Network) -> None:
    """The router's address as the only one on cilium_host, and the route to the pods with it as source.

    The new address and routes are there before the old ones go.
    """
    wanted = IPv4Interface(router)
    present = links.addresses().get(ifindex, ())
    if wanted not in present:
        links.add_address(ifindex, HOST, router)
    links.set_routes(ifindex, router, pods)
    for address in present:
        if address != wanted:
            links.remove_address(ifindex, HOST, address)
