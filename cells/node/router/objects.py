"""What the router is in the kernel, as rows of the table ``router``.

For:    Router, RouterKernel.   Needs: nothing.   Gives: RouterObject and its kinds, wanted().
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address, ip_interface, ip_network

from cells.ipam import IPAddress, IPNetwork
from cells.node.netlink import IPInterface
from cells.node.router.pair import HOST, NET


@dataclass(frozen=True, slots=True)
class DeviceObject:
    """An end of the pair: up, without ARP."""

    name: str
    mtu: int

    @property
    def key(self) -> str:
        """Of its row."""
        return f"device {self.name}"


@dataclass(frozen=True, slots=True)
class NodeObject:
    """What the programs know of the node: these addresses, networks, and the indexes of the pair."""

    routers: tuple[tuple[IPAddress, IPNetwork | None], ...]

    @property
    def key(self) -> str:
        """Of its row."""
        return "node"


@dataclass(frozen=True, slots=True)
class ProgramsObject:
    """The programs on the pair."""

    @property
    def key(self) -> str:
        """Of its row."""
        return "programs"


@dataclass(frozen=True, slots=True)
class AddressObject:
    """An address of cilium_host."""

    address: IPInterface

    @property
    def key(self) -> str:
        """Of its row."""
        return f"address {self.address}"


@dataclass(frozen=True, slots=True)
class RouteObject:
    """A route over cilium_host."""

    destination: IPNetwork
    gateway: IPAddress | None
    source: IPAddress | None

    @property
    def key(self) -> str:
        """Of its row."""
        return f"route {self.destination}"


RouterObject = DeviceObject | NodeObject | ProgramsObject | AddressObject | RouteObject
ORDER = (DeviceObject, NodeObject, ProgramsObject, AddressObject, RouteObject)
"""In which they are made; each needs those before it."""


def wanted(
    routers: Mapping[IPAddress, IPNetwork | None],
    strays: Iterable[IPAddress],
    mtu: int,
    others: Iterable[IPNetwork] = (),
) -> dict[str, RouterObject]:
    """All of them by key: the router's address of each family, and the routes to the pods behind it.

    ``routers`` is address to network of its pods, if it has one; ``strays`` are pods outside of it, which get
    a route each; ``others`` further networks of pods.
    """
    gateways = {ip.version: ip for ip in routers}
    networks = dict(routers.items())
    found: list[RouterObject] = [DeviceObject(HOST, mtu), DeviceObject(NET, mtu)]
    found += [NodeObject(tuple(networks.items())), ProgramsObject()]
    found += [AddressObject(ip_interface(ip)) for ip in routers]
    for ip, network in networks.items():
        if network is not None:
            found += routes(ip, network)
    for network in others:
        if network.version in gateways and network not in networks.values():
            found += routes(gateways[network.version], network)
    for stray in strays:
        if stray.version in gateways:
            found += routes(gateways[stray.version], ip_network(stray))
    return {each.key: each for each in found}


def routes(gateway: IPAddress, network: IPNetwork) -> list[RouteObject]:
    """The routes to a network behind the router, the gateway on the link, the network through it.

    IPv6 takes no gateway that is an address of this node ("Gateway can not be a local address"): there the
    network is on the link, and the address has its route from the kernel.
    """
    if isinstance(gateway, IPv4Address):
        return [RouteObject(ip_network(gateway), None, None), RouteObject(network, gateway, gateway)]
    return [RouteObject(network, None, gateway)]
