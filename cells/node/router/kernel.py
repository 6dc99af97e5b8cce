"""The router in the kernel: the target of its reconciler.

For:    Router.   Needs: RouterLinks, RouterWriter, RouterPrograms (Protocols), how to write the settings.
Gives:  RouterKernel.

Repeating any of it on what is right touches nothing: a restart must not be felt.
"""

from collections.abc import Callable, Collection, Mapping
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Protocol

from cells.ipam import IPAddress, IPNetwork
from cells.maps import NodeConfig
from cells.node.router.objects import (
    ORDER,
    AddressObject,
    DeviceObject,
    NodeObject,
    ProgramsObject,
    RouteObject,
    RouterObject,
)
from cells.node.router.pair import (
    HOST,
    Macs,
    Pair,
    RouterLinks,
    RouterWriter,
    ensure_pair,
    found_pair,
    is_right,
    lasting,
)
from lifecycle import BatchError, BatchFailures, HiveError, Logger


class RouterPrograms(Protocol):
    """The node's programs; cells.datapath.Datapath. Methods raise OSError."""

    def set_node(self, node: NodeConfig) -> None:
        """Tell the programs about the node."""
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


class RouterKernel:
    """Compares, makes and removes the objects of the router, each in an exchange or two with the kernel."""

    def __init__(
        self,
        links: RouterLinks,
        writer: RouterWriter,
        programs: RouterPrograms,
        log: Logger,
        *,
        write_settings: Callable[[], None],
    ) -> None:
        """``write_settings`` is called before the pair gets addresses: a new one has the node's defaults."""
        self._links = links
        self.writer = writer
        """Who writes; another one may take over."""
        self._programs = programs
        self._log = log
        self._write_settings = write_settings

    @property
    def pair(self) -> Pair:
        """The two devices; HiveError when they are not there."""
        pair = found_pair(self._links)
        if pair is None:
            raise HiveError(f"{HOST} is not there, or is not half of our pair")
        return pair

    # The reconciler's target

    async def dump(self) -> Mapping[str, RouterObject]:
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
        failures: dict[str, Exception] = {}
        present = {AddressObject(each).key: each for each in lasting(self._links.addresses().get(host, ()))}
        for key, address in present.items():
            if key in batch:
                try:
                    await self.writer.remove_address(host, HOST, address)
                except OSError as error:
                    failures[key] = error
        for route in await self._links.routes(host):
            key = f"route {route.destination}"
            if key in batch:
                try:
                    await self.writer.remove_route(host, route.destination)
                except OSError as error:
                    failures[key] = error
        if failures:
            raise BatchError(failures)

    async def _make(self, wanted: RouterObject) -> None:
        match wanted:
            case DeviceObject(mtu=mtu):
                await ensure_pair(self._links, self.writer, mtu, self._log, self._macs())
            case NodeObject(routers=routers):
                self._programs.set_node(node_config(self.pair, routers))
            case ProgramsObject():
                pair = self.pair
                self._programs.attach_host(pair.host.ifindex, pair.net.ifindex)
            case AddressObject(address=address):
                host = self.pair.host.ifindex
                self._write_settings()
                if address not in self._links.addresses().get(host, ()):
                    await self.writer.add_address(host, HOST, address.ip)
            case RouteObject():
                host = self.pair.host.ifindex
                await self.writer.set_route(host, wanted.destination, wanted.gateway, wanted.source)

    def _macs(self) -> Macs | None:
        """Those the pair had when the programs were told of it."""
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


def node_config(pair: Pair, routers: Collection[tuple[IPAddress, IPNetwork | None]]) -> NodeConfig:
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
