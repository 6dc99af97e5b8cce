"""The router in the kernel: the veth pair cilium_host and cilium_net, which connects the node to its pods.

Every operation is a no-op on a configured pair, so that a restart does not disturb traffic.
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
    """The node's links; implemented by cells.netlink.HostLinks. Methods raise NetlinkError."""

    def find(self, name: str) -> LinkInfo | None:
        """Return the link with a name, or None."""
        ...

    def addresses(self) -> Mapping[int, Sequence[IPInterface]]:
        """Return the addresses of every link, by index."""
        ...

    async def routes(self, ifindex: int) -> Sequence[RouteInfo]:
        """Return the routes over a link."""
        ...

    async def reap(self, ifindexes: Iterable[int]) -> None:
        """Delete links without blocking the event loop."""
        ...

    def create_veth(self, pair: VethPair) -> object:
        """Create a veth pair, both ends down."""
        ...

    def set_device(self, ifindex: int, name: str, mtu: int) -> None:
        """Set MTU and a queue length of 1000, disable ARP, and bring the link up."""
        ...

    def add_address(self, ifindex: int, name: str, address: IPAddress) -> None:
        """Add an address, as /32 or /128."""
        ...

    def remove_address(self, ifindex: int, name: str, address: IPInterface) -> None:
        """Remove an address and the route to it."""
        ...

    def set_route(
        self, ifindex: int, destination: IPNetwork, gateway: IPAddress | None, source: IPAddress | None
    ) -> None:
        """Set a route through the gateway, or on the link; replaces a route to the same destination."""
        ...

    def remove_route(self, ifindex: int, network: IPNetwork) -> None:
        """Remove a route; a missing one is not an error."""
        ...


class DevicePair(msgspec.Struct, frozen=True):
    """Both ends of the pair."""

    host: LinkInfo
    net: LinkInfo


class Macs(msgspec.Struct, frozen=True):
    """MAC addresses of a new pair."""

    host: bytes
    net: bytes


async def ensure_pair(links: RouterLinks, mtu: int, log: Logger, macs: Macs | None = None) -> DevicePair:
    """Return the pair, up and without ARP; create it if it is missing.

    Links with its names that are not a pair are replaced. A new pair has ``macs``, else random ones.
    """
    pair = find_pair(links)
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
        pair = find_pair(links)
        if pair is None:
            raise RuntimeError(f"{HOST} and {NET} were created, but are not a veth pair")
    for link in (pair.host, pair.net):
        if not is_configured(link, mtu):
            links.set_device(link.ifindex, link.name, mtu)
    return pair


def is_configured(link: LinkInfo, mtu: int) -> bool:
    """Whether an end of the pair is up, without ARP, with this MTU and our queue length."""
    return link.up and not link.arp and link.mtu == mtu and link.tx_queue_length == _TX_QUEUE_LENGTH


def find_pair(links: RouterLinks) -> DevicePair | None:
    """Return the two links by their names; None if they are not one veth pair."""
    host, net = links.find(HOST), links.find(NET)
    if host is None or net is None or {host.kind, net.kind} != {"veth"}:
        return None
    if host.peer_ifindex != net.ifindex or host.link_netnsid is not None:
        return None
    return DevicePair(host, net)


def without_link_local(addresses: Iterable[IPInterface]) -> list[IPInterface]:
    """Return the addresses without IPv6 link-local ones, which the kernel manages."""
    return [address for address in addresses if address.version == 4 or not address.is_link_local]


# Objects of the router in the kernel: rows of the table ``router``.


class DeviceObject(msgspec.Struct, frozen=True):
    """An end of the pair: up, without ARP."""

    name: str
    mtu: int

    @property
    def key(self) -> str:
        """The key of its row."""
        return f"device {self.name}"


class NodeObject(msgspec.Struct, frozen=True):
    """The programs' configuration: router addresses, pod networks, and the indexes of the pair."""

    routers: tuple[tuple[IPAddress, IPNetwork | None], ...]

    @property
    def key(self) -> str:
        """The key of its row."""
        return "node"


class ProgramsObject(msgspec.Struct, frozen=True):
    """The programs on the pair."""

    @property
    def key(self) -> str:
        """The key of its row."""
        return "programs"


class AddressObject(msgspec.Struct, frozen=True):
    """An address of cilium_host."""

    address: IPInterface

    @property
    def key(self) -> str:
        """The key of its row."""
        return f"address {self.address}"


class RouteObject(msgspec.Struct, frozen=True):
    """A route over cilium_host."""

    destination: IPNetwork
    gateway: IPAddress | None
    source: IPAddress | None

    @property
    def key(self) -> str:
        """The key of its row."""
        return f"route {self.destination}"


RouterObject = DeviceObject | NodeObject | ProgramsObject | AddressObject | RouteObject
ORDER = (DeviceObject, NodeObject, ProgramsObject, AddressObject, RouteObject)
"""Order of creation; each object needs those before it."""


def router_objects(
    routers: Mapping[IPAddress, IPNetwork | None],
    outside_pods: Iterable[IPAddress],
    mtu: int,
    secondary_networks: Iterable[IPNetwork] = (),
) -> dict[str, RouterObject]:
    """Return all objects by key: addresses of the router, and routes to the pods behind it.

    ``routers`` maps each address to the primary network of its pods, if there is one. ``outside_pods`` are
    pods outside of it, with a route each; ``secondary_networks`` are further networks of pods.
    """
    gateways = {ip.version: ip for ip in routers}
    networks = dict(routers.items())
    found: list[RouterObject] = [DeviceObject(HOST, mtu), DeviceObject(NET, mtu)]
    found += [NodeObject(tuple(networks.items())), ProgramsObject()]
    found += [AddressObject(ip_interface(ip)) for ip in routers]
    for ip, network in networks.items():
        if network is not None:
            found += routes(ip, network)
    for network in secondary_networks:
        if network.version in gateways and network not in networks.values():
            found += routes(gateways[network.version], network)
    for outside in outside_pods:
        if outside.version in gateways:
            found += routes(gateways[outside.version], ip_network(outside))
    return {each.key: each for each in found}


def routes(gateway: IPAddress, network: IPNetwork) -> list[RouteObject]:
    """Return the routes to a network behind the router: the gateway on the link, the network through it.

    For IPv6 the network is on the link and the kernel adds the route to the address, because it rejects a
    local gateway ("Gateway can not be a local address").
    """
    if isinstance(gateway, IPv4Address):
        return [RouteObject(ip_network(gateway), None, None), RouteObject(network, gateway, gateway)]
    return [RouteObject(network, None, gateway)]


# The target of the router's reconciler.
#
# Writing an object that is already configured changes nothing, so that a restart does not disturb traffic.


class RouterPrograms(Protocol):
    """The node's programs; implemented by cells.datapath.Datapath. Methods raise OSError."""

    def set_node(self, node: NodeConfig) -> None:
        """Write the programs' configuration of the node."""
        ...

    def has_node(self, node: NodeConfig) -> bool:
        """Whether the programs have this configuration."""
        ...

    def known_node(self) -> NodeConfig | None:
        """Return the programs' configuration, or None."""
        ...

    def attach_host(self, ifindex_host: int, ifindex_net: int) -> None:
        """Attach the programs to the pair."""
        ...

    def serves_host(self, ifindex_host: int, ifindex_net: int) -> bool:
        """Whether the programs are attached to the pair."""
        ...


class RouterKernel(Target[str, RouterObject, RouterObject]):
    """Observes, creates and removes the objects of the router, with few system calls."""

    def __init__(
        self,
        links: RouterLinks,
        programs: RouterPrograms,
        log: Logger,
        *,
        write_settings: Callable[[], None],
    ) -> None:
        """``write_settings`` is called before a pair gets addresses, as a new one has default settings."""
        self._links = links
        self._programs = programs
        self._log = log
        self._write_settings = write_settings

    @property
    def pair(self) -> DevicePair:
        """The pair. Raises HiveError if it does not exist."""
        pair = find_pair(self._links)
        if pair is None:
            raise HiveError(f"{HOST} is missing, or is not one end of the agent's veth pair")
        return pair

    # The reconciler's target

    async def observe(self) -> Mapping[str, RouterObject]:
        """Return the present objects; configuration and programs only if they are current."""
        pair = find_pair(self._links)
        if pair is None:
            return {}
        host, net = pair.host.ifindex, pair.net.ifindex
        found: list[RouterObject] = [
            DeviceObject(link.name, link.mtu)
            for link in (pair.host, pair.net)
            if is_configured(link, link.mtu)
        ]
        node = self._programs.known_node()
        if node is not None:
            routers = routers_of(node)
            if self._programs.has_node(node_config(pair, routers)):
                found.append(NodeObject(routers))
        if self._programs.serves_host(host, net):
            found.append(ProgramsObject())
        found += [AddressObject(each) for each in without_link_local(self._links.addresses().get(host, ()))]
        found += [
            RouteObject(route.destination, route.gateway, route.source)
            for route in await self._links.routes(host)
            if not (route.by_kernel or route.destination.is_link_local or route.destination.is_multicast)
        ]
        return {each.key: each for each in found}

    async def put(self, batch: Mapping[str, RouterObject]) -> None:
        """Create or change objects in their order. Raises BatchError."""
        with BatchFailures(OSError, HiveError) as failures:
            for each in sorted(batch.values(), key=lambda one: ORDER.index(type(one))):
                with failures.of(each.key):
                    await self._create(each)

    async def drop(self, batch: Collection[str]) -> None:
        """Remove addresses, then routes. Raises BatchError.

        The kernel removes IPv4 routes with the address that is their source; IPv6 routes only lose the
        source.
        """
        host = self.pair.host.ifindex
        present = {
            AddressObject(each).key: each
            for each in without_link_local(self._links.addresses().get(host, ()))
        }
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

    async def _create(self, wanted: RouterObject) -> None:
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
        """Return the pair's MAC addresses in the programs' configuration, or None."""
        node = self._programs.known_node()
        return None if node is None or not any(node.host_mac) else Macs(node.host_mac, node.net_mac)


def routers_of(node: NodeConfig) -> tuple[tuple[IPAddress, IPNetwork | None], ...]:
    """Return address and network of each enabled family: IPv6, then IPv4."""
    found: list[tuple[IPAddress, IPNetwork | None]] = []
    if node.router_ip6 is not None:
        found.append((node.router_ip6, node.pod_cidr6))
    if node.router_ip is not None:
        found.append((node.router_ip, node.pod_cidr))
    return tuple(found)


def node_config(pair: DevicePair, routers: Collection[tuple[IPAddress, IPNetwork | None]]) -> NodeConfig:
    """Return the programs' configuration; a disabled family has neither address nor network."""
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
