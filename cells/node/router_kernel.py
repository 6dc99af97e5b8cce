"""The veth pair cilium_host and cilium_net, through which the node itself talks to its pods.

Repeating any of it on a pair that is right touches nothing: a restart must not be felt.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_interface, ip_network
from typing import Protocol

import msgspec

from cells.maps.records.endpoints import NodeConfig
from cells.netlink.messages import IPAddress, IPInterface, IPNetwork, VethPair
from cells.netlink.rows import LinkInfo, RouteInfo, random_mac
from lifecycle import HiveError, Logger, Target
from lifecycle.tables import BatchFailures

HOST = "cilium_host"
NET = "cilium_net"
_TX_QUEUE_LENGTH = 1000


class RouterLinks(Protocol):
    """The node's links; cells.netlink.HostLinks. Methods raise NetlinkError."""

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

    def create_veth(self, pair: VethPair) -> object:
        """Create a pair, both ends down."""
        ...

    def set_device(self, ifindex: int, name: str, mtu: int) -> None:
        """MTU, queue length 1000, no ARP, up."""
        ...

    def add_address(self, ifindex: int, name: str, address: IPAddress) -> None:
        """Add as a /32 or /128."""
        ...

    def remove_address(self, ifindex: int, name: str, address: IPInterface) -> None:
        """Remove, with the route to it alone."""
        ...

    def set_route(
        self, ifindex: int, destination: IPNetwork, gateway: IPAddress | None, source: IPAddress | None
    ) -> None:
        """Through the gateway, or on the link; in place of another route to the destination."""
        ...

    def remove_route(self, ifindex: int, network: IPNetwork) -> None:
        """Remove; a missing one is fine."""
        ...


class DevicePair(msgspec.Struct, frozen=True):
    """Both ends."""

    host: LinkInfo
    net: LinkInfo


class Macs(msgspec.Struct, frozen=True):
    """Those a new pair gets."""

    host: bytes
    net: bytes


async def ensure_pair(links: RouterLinks, mtu: int, log: Logger, macs: Macs | None = None) -> DevicePair:
    """The pair as it is when it is one, else a new one in place of what has its names; up, without ARP.

    A new one has ``macs``, else random ones.
    """
    pair = found_pair(links)
    if pair is None:
        obstacles = [link for name in (HOST, NET) if (link := links.find(name)) is not None]
        for link in obstacles:
            log.warning(
                "link is not one end of the agent's veth pair, creating it again",
                link=link.name,
                kind=link.kind,
            )
        await links.reap(link.ifindex for link in obstacles)
        macs = macs or Macs(random_mac(), random_mac())
        links.create_veth(VethPair(HOST, macs.host, NET, macs.net, mtu, None))
        pair = found_pair(links)
        if pair is None:
            raise RuntimeError(f"{HOST} and {NET} were created, but are not a veth pair")
    for link in (pair.host, pair.net):
        if not is_right(link, mtu):
            links.set_device(link.ifindex, link.name, mtu)
    return pair


def is_right(link: LinkInfo, mtu: int) -> bool:
    """Whether an end of the pair is up, without ARP, and has this MTU."""
    return link.up and not link.arp and link.mtu == mtu and link.tx_queue_length == _TX_QUEUE_LENGTH


def found_pair(links: RouterLinks) -> DevicePair | None:
    """The two links by their names, if they are the ends of one pair."""
    host, net = links.find(HOST), links.find(NET)
    if host is None or net is None or {host.kind, net.kind} != {"veth"}:
        return None
    if host.peer_ifindex != net.ifindex or host.link_netnsid is not None:
        return None
    return DevicePair(host, net)


def lasting(addresses: Iterable[IPInterface]) -> list[IPInterface]:
    """Without the link-local IPv6 addresses, which the kernel gives and takes."""
    return [address for address in addresses if address.version == 4 or not address.is_link_local]


# What the router is in the kernel, as rows of the table ``router``.


class DeviceObject(msgspec.Struct, frozen=True):
    """An end of the pair: up, without ARP."""

    name: str
    mtu: int

    @property
    def key(self) -> str:
        """Of its row."""
        return f"device {self.name}"


class NodeObject(msgspec.Struct, frozen=True):
    """What the programs know of the node: these addresses, networks, and the indexes of the pair."""

    routers: tuple[tuple[IPAddress, IPNetwork | None], ...]

    @property
    def key(self) -> str:
        """Of its row."""
        return "node"


class ProgramsObject(msgspec.Struct, frozen=True):
    """The programs on the pair."""

    @property
    def key(self) -> str:
        """Of its row."""
        return "programs"


class AddressObject(msgspec.Struct, frozen=True):
    """An address of cilium_host."""

    address: IPInterface

    @property
    def key(self) -> str:
        """Of its row."""
        return f"address {self.address}"


class RouteObject(msgspec.Struct, frozen=True):
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


# The router in the kernel: the target of its reconciler.
#
# Repeating any of it on what is right touches nothing: a restart must not be felt.


class RouterPrograms(Protocol):
    """The node's programs; cells.datapath.Datapath. Methods raise OSError."""

    def set_node(self, node: NodeConfig) -> None:
        """Configure the programs for the node."""
        ...

    def has_node(self, node: NodeConfig) -> bool:
        """Whether they know it."""
        ...

    def known_node(self) -> NodeConfig | None:
        """What they know."""
        ...

    def attach_host(self, ifindex_host: int, ifindex_net: int) -> None:
        """Attach to the pair."""
        ...

    def serves_host(self, ifindex_host: int, ifindex_net: int) -> bool:
        """Whether they are attached to it."""
        ...


class RouterKernel(Target[str, RouterObject, RouterObject]):
    """Compares, makes and removes the objects of the router, each in an exchange or two with the kernel."""

    def __init__(
        self,
        links: RouterLinks,
        programs: RouterPrograms,
        log: Logger,
        *,
        write_settings: Callable[[], None],
    ) -> None:
        """``write_settings`` is called before the pair gets addresses: a new one has the node's defaults."""
        self._links = links
        self._programs = programs
        self._log = log
        self._write_settings = write_settings

    @property
    def pair(self) -> DevicePair:
        """The two devices; HiveError when they are not there."""
        pair = found_pair(self._links)
        if pair is None:
            raise HiveError(f"{HOST} is missing, or is not one end of the agent's veth pair")
        return pair

    # The reconciler's target

    async def observe(self) -> Mapping[str, RouterObject]:
        """What there is of it; of the programs, and of what they know, only whether it is right."""
        pair = found_pair(self._links)
        if pair is None:
            return {}
        host, net = pair.host.ifindex, pair.net.ifindex
        found: list[RouterObject] = [
            DeviceObject(link.name, link.mtu) for link in (pair.host, pair.net) if is_right(link, link.mtu)
        ]
        node = self._programs.known_node()
        if node is not None:
            routers = routers_of(node)
            if self._programs.has_node(node_config(pair, routers)):
                found.append(NodeObject(routers))
        if self._programs.serves_host(host, net):
            found.append(ProgramsObject())
        found += [AddressObject(each) for each in lasting(self._links.addresses().get(host, ()))]
        found += [
            RouteObject(route.destination, route.gateway, route.source)
            for route in await self._links.routes(host)
            if not (route.by_kernel or route.destination.is_link_local or route.destination.is_multicast)
        ]
        return {each.key: each for each in found}

    async def put(self, batch: Mapping[str, RouterObject]) -> None:
        """Make them, those first that others need. Raises BatchError."""
        with BatchFailures(OSError, HiveError) as failures:
            for each in sorted(batch.values(), key=lambda one: ORDER.index(type(one))):
                with failures.of(each.key):
                    await self._make(each)

    async def drop(self, batch: Collection[str]) -> None:
        """Remove addresses, then routes. Raises BatchError.

        IPv4 routes go with the address that was their source; IPv6 ones only forget it.
        """
        host = self.pair.host.ifindex
        present = {AddressObject(each).key: each for each in lasting(self._links.addresses().get(host, ()))}
        with BatchFailures(OSError) as failures:
            for key, address in present.items():
                if key in batch:
                    with failures.of(key):
                        self._links.remove_address(host, HOST, address)
            for route in await self._links.routes(host):
                key = f"route {route.destination}"
                if key in batch:
                    with failures.of(key):
                        self._links.remove_route(host, route.destination)

    async def _make(self, wanted: RouterObject) -> None:
        match wanted:
            case DeviceObject(mtu=mtu):
                await ensure_pair(self._links, mtu, self._log, self._macs())
            case NodeObject(routers=routers):
                self._programs.set_node(node_config(self.pair, routers))
            case ProgramsObject():
                pair = self.pair
                self._programs.attach_host(pair.host.ifindex, pair.net.ifindex)
            case AddressObject(address=address):
                host = self.pair.host.ifindex
                self._write_settings()
                if address not in self._links.addresses().get(host, ()):
                    self._links.add_address(host, HOST, address.ip)
            case RouteObject():
                host = self.pair.host.ifindex
                self._links.set_route(host, wanted.destination, wanted.gateway, wanted.source)

    def _macs(self) -> Macs | None:
        """Those the pair had when the programs were configured."""
        node = self._programs.known_node()
        return None if node is None or not any(node.host_mac) else Macs(node.host_mac, node.net_mac)


def routers_of(node: NodeConfig) -> tuple[tuple[IPAddress, IPNetwork | None], ...]:
    """Address and network of each family that is on: IPv6, then IPv4."""
    found: list[tuple[IPAddress, IPNetwork | None]] = []
    if node.router_ip6 is not None:
        found.append((node.router_ip6, node.pod_cidr6))
    if node.router_ip is not None:
        found.append((node.router_ip, node.pod_cidr))
    return tuple(found)


def node_config(pair: DevicePair, routers: Collection[tuple[IPAddress, IPNetwork | None]]) -> NodeConfig:
    """What the programs must know; a family that is off has neither address nor network."""
    ips = [ip for ip, _ in routers]
    networks = [network for _, network in routers]
    return NodeConfig(
        router_ip=next((ip for ip in ips if isinstance(ip, IPv4Address)), None),
        host_ifindex=pair.host.ifindex,
        host_mac=pair.host.mac,
        net_ifindex=pair.net.ifindex,
        net_mac=pair.net.mac,
        pod_cidr=next((each for each in networks if isinstance(each, IPv4Network)), None),
        router_ip6=next((ip for ip in ips if isinstance(ip, IPv6Address)), None),
        pod_cidr6=next((each for each in networks if isinstance(each, IPv6Network)), None),
    )
