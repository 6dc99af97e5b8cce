"""The veth pair cilium_host and cilium_net, through which the node itself talks to its pods.

Needs: the node's links (RouterLinks, a Protocol).   Gives: Pair, ensure_pair(), set_addresses().

Repeating any of it on a pair that is right touches nothing: a restart must not be felt.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_interface, ip_network
from typing import Protocol

from cells.netlink import (
    CreatedLink,
    IPAddress,
    IPInterface,
    IPNetwork,
    LinkInfo,
    NetlinkError,
    VethPair,
    random_mac,
)
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

    def addresses(self) -> Mapping[int, Sequence[IPInterface]]:
        """The addresses of every link, by index."""
        ...

    def add_address(self, ifindex: int, name: str, address: IPAddress) -> None:
        """Add as a /32 or /128."""
        ...

    def remove_address(self, ifindex: int, name: str, address: IPInterface) -> None:
        """Remove, with the route to it alone."""
        ...

    def set_routes(self, ifindex: int, gateway: IPAddress, network: IPNetwork) -> None:
        """Gateway on the link, network through it; equal routes stay."""
        ...

    def routes(self, ifindex: int) -> Sequence[IPNetwork]:
        """Destinations of the routes over a link."""
        ...

    def remove_route(self, ifindex: int, network: IPNetwork) -> None:
        """Remove; gone already is fine."""
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


def lasting(addresses: Iterable[IPInterface]) -> list[IPInterface]:
    """Without the link-local IPv6 addresses, which the kernel gives and takes."""
    return [address for address in addresses if address.version == 4 or not address.is_link_local]


def set_addresses(
    links: RouterLinks,
    ifindex: int,
    routers: Mapping[IPAddress, IPNetwork],
    strays: Iterable[IPAddress],
    log: Logger,
) -> None:
    """The router's addresses, one of each family, as the only ones on cilium_host; routes to their pods.

    ``routers`` is address to network of its pods; ``strays`` are pods outside of it, which get a route each.
    What is new is there before the old goes. What cannot be taken off is logged: it harms nobody until it is
    tried again, at the next start.
    """
    wanted = {ip_interface(ip): network for ip, network in routers.items()}
    gateways = {ip.version: ip for ip in routers}
    alone = {ip_network(ip): gateways[ip.version] for ip in strays if ip.version in gateways}
    present = lasting(links.addresses().get(ifindex, ()))
    for address, network in wanted.items():
        if address not in present:
            links.add_address(ifindex, HOST, address.ip)
        links.set_routes(ifindex, address.ip, network)
    for stray, gateway in alone.items():
        links.set_routes(ifindex, gateway, stray)
    try:
        for address in present:
            if address not in wanted:
                links.remove_address(ifindex, HOST, address)
        # IPv4 routes went with the address that was their source; IPv6 ones only forget it.
        stay = {*wanted.values(), *(address.network for address in wanted), *alone}
        for network in links.routes(ifindex):
            if network not in stay and not network.is_link_local and not network.is_multicast:
                links.remove_route(ifindex, network)
    except NetlinkError as error:
        # What happened is in the one line; where in our code does not matter.
        log.error("Failed to remove old router IPs", device=HOST, error=str(error))  # noqa: TRY400
