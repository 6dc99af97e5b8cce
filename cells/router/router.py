"""The router of this node: the addresses its pods send to, and the devices behind it.

Needs: RestoredEndpoints, Ipam, HostLinks, Datapath, Table[Device], PodMtu, AgentConfig.   Gives: Router.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Final

from cells.config import AgentConfig
from cells.datapath import Datapath
from cells.devices import Device, PodMtu, addressed
from cells.endpoint_restore import RestoredEndpoints
from cells.ipam import Family, IPAddress, Ipam, IPNetwork
from cells.maps import NodeConfig
from cells.netlink import HostLinks
from cells.router.address import choose_address
from cells.router.pair import HOST, NET, Pair, ensure_pair, lasting, set_addresses
from cells.router.past import FILE, remembered
from cells.router.sysctl import ensure, router_settings, router_settings6
from lifecycle import Hook, Lifecycle, Logger, NotStartedError, Table

LOOPBACK: Final = "lo"


@dataclass(frozen=True, slots=True)
class Addressing:
    """What the API tells of the node's addresses of one family (NodeAddressingElement)."""

    ip: IPAddress
    """The router's."""
    alloc_range: IPNetwork


class Router:
    """Made by its hook, after restored endpoints have claimed their addresses; the devices stay at stop."""

    def __init__(
        self,
        restored: RestoredEndpoints,
        *,
        ipam: Ipam,
        links: HostLinks,
        datapath: Datapath,
        devices: Table[Device],
        mtu: PodMtu,
        agent: AgentConfig,
        lifecycle: Lifecycle,
        log: Logger,
    ) -> None:
        self._restored = restored
        self._ipam = ipam
        self._links = links
        self._datapath = datapath
        self._devices = devices
        self._mtu = mtu
        self._ipv6 = agent.ipv6
        self._past = agent.state / FILE
        self._log = log
        self._made: tuple[Mapping[Family, Addressing], Pair] | None = None
        lifecycle.append(Hook("set up the router", self._start))

    @property
    def gateways(self) -> tuple[IPAddress, ...]:
        """The pods' gateways, one of each family that is on: IPv6, then IPv4."""
        return tuple(each.ip for each in self._started()[0].values())

    @property
    def host_ifindex(self) -> int:
        """Index of cilium_host."""
        return self._started()[1].host.ifindex

    @property
    def net_ifindex(self) -> int:
        """Index of cilium_net."""
        return self._started()[1].net.ifindex

    def addressing(self) -> Mapping[Family, Addressing]:
        """What pods and plugins must know, by family: IPv6, then IPv4; without those that are off."""
        return self._started()[0]

    def _started(self) -> tuple[Mapping[Family, Addressing], Pair]:
        if self._made is None:
            raise NotStartedError("Router was read before the hook 'set up the router' ran: depend on Router")
        return self._made

    async def _start(self) -> None:
        devices = self._devices.all()
        for device in addressed(devices):
            for address in device.addresses:
                self._ipam.exclude(address.ip, "node-ip")
        pair = await ensure_pair(self._links, self._mtu(), self._log)
        ensure(router_settings())
        if self._ipv6:
            others = [each.name for each in devices if each.name not in (HOST, NET, LOOPBACK)]
            ensure(router_settings6(others))
        on_device = [each.ip for each in lasting(self._links.addresses().get(pair.host.ifindex, ()))]
        before = remembered(on_device, self._past, self._log)
        made = {
            family: Addressing(choose_address(family, before, self._ipam, self._log), network)
            for family, network in self._ipam.ranges.items()
        }
        self._datapath.set_node(node_config(pair, made))
        self._datapath.attach_host(pair.host.ifindex, pair.net.ifindex)
        routers = {each.ip: each.alloc_range for each in made.values()}
        set_addresses(self._links, pair.host.ifindex, routers, self._restored.strays(), self._log)
        self._made = (made, pair)
        told = {str(family): str(each.ip) for family, each in made.items()}
        self._log.info("router set up", **told, device=HOST)


def node_config(pair: Pair, made: Mapping[Family, Addressing]) -> NodeConfig:
    """What the programs must know; a family that is off has neither address nor network."""
    ips = [each.ip for each in made.values()]
    networks = [each.alloc_range for each in made.values()]
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
