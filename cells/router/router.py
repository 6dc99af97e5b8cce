"""The router of this node: the address its pods send to, and the devices behind it.

Needs: RestoredEndpoints, Ipam, HostLinks, Datapath, Table[Device], AgentConfig.   Gives: Router.
"""

from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network

from cells.config import AgentConfig
from cells.datapath import Datapath
from cells.devices import Device, pod_mtu, uplinks
from cells.endpoint_restore import RestoredEndpoints
from cells.ipam import Family, Ipam
from cells.maps import NodeConfig
from cells.netlink import HostLinks
from cells.router.address import choose_address
from cells.router.pair import HOST, Pair, ensure_pair, lasting, set_addresses
from cells.router.sysctl import ensure, router_settings
from lifecycle import Hook, Lifecycle, Logger, NotStartedError, Table, UsageError


@dataclass(frozen=True, slots=True)
class Addressing:
    """What the API tells of the node's addresses (NodeAddressingElement in api.md)."""

    ip: IPv4Address
    """The router's."""
    alloc_range: IPv4Network


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
        agent: AgentConfig,
        lifecycle: Lifecycle,
        log: Logger,
    ) -> None:
        del restored  # needed before us, not by us
        self._ipam = ipam
        self._links = links
        self._datapath = datapath
        self._devices = devices
        self._configured_mtu = agent.mtu
        self._families = agent.ipv4, agent.ipv6
        self._log = log
        self._made: tuple[IPv4Address, Pair] | None = None
        lifecycle.append(Hook("set up the router", self._start))

    @property
    def ip(self) -> IPv4Address:
        """The pods' gateway."""
        return self._started()[0]

    @property
    def host_ifindex(self) -> int:
        """Index of cilium_host."""
        return self._started()[1].host.ifindex

    @property
    def net_ifindex(self) -> int:
        """Index of cilium_net."""
        return self._started()[1].net.ifindex

    def addressing(self) -> Addressing:
        """What pods and plugins must know."""
        return Addressing(self.ip, self._ipam.range)

    def _started(self) -> tuple[IPv4Address, Pair]:
        if self._made is None:
            raise NotStartedError("Router was read before the hook 'set up the router' ran: depend on Router")
        return self._made

    async def _start(self) -> None:
        if self._families != (True, False):
            raise UsageError(
                "enable-ipv6=true or enable-ipv4=false: the router is IPv4 only as yet (docs/status.md);"
                " leave both as they are by default"
            )
        devices = self._devices.all()
        for device in uplinks(devices):
            for address in device.addresses:
                self._ipam.exclude(address.ip, "node-ip")
        pair = await ensure_pair(self._links, pod_mtu(self._configured_mtu, devices), self._log)
        ensure(router_settings())
        found = [address.ip for address in lasting(self._links.addresses().get(pair.host.ifindex, []))]
        ip = IPv4Address(int(choose_address(Family.IPV4, found, self._ipam, self._log)))
        self._datapath.set_node(
            NodeConfig(
                router_ip=ip,
                host_ifindex=pair.host.ifindex,
                host_mac=pair.host.mac,
                net_ifindex=pair.net.ifindex,
                net_mac=pair.net.mac,
                pod_cidr=self._ipam.range,
            )
        )
        self._datapath.attach_host(pair.host.ifindex, pair.net.ifindex)
        set_addresses(self._links, pair.host.ifindex, {ip: self._ipam.range}, self._log)
        self._made = (ip, pair)
        self._log.info("router set up", ip=str(ip), pods=str(self._ipam.range), device=HOST)
