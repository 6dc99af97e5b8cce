"""The pods' gateway: its addresses, one of each family, and the devices cilium_host and cilium_net.

Reconciler: claims the addresses, then keeps the pair, its programs, addresses and routes as the table
            ``router`` has them, and has Sysctls restore the kernel settings.
Why:        pods' routes name these addresses, so they outlive restarts; they are claimed after the pods' own,
            so that a new choice is never the address of a running pod.
"""

import re
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Final, Protocol

import msgspec

from cells.base.addresses import Family, IPAddress, IPNetwork
from cells.config import AgentConfig
from cells.config.shared import PodRouting
from cells.datapath.datapath import Datapath
from cells.maps.records.endpoints import NodeConfig
from cells.netlink.connection import LOAD_BYTE, Field, message_filter, notifications, of_types
from cells.netlink.links import HostLinks
from cells.node.devices import Device, PodMtu, addressed
from cells.node.ipam import Ipam
from cells.node.ipam.allocator import Allocation
from cells.node.ipam.ranges import IpamError, PodRange
from cells.node.router_kernel import HOST, NET, RouterKernel, RouterObject, lasting, wanted
from cells.node.sysctl import Sysctls
from lifecycle import (
    HiveError,
    Hook,
    Jobs,
    Lifecycle,
    Logger,
    NotStartedError,
    Reconciler,
    Table,
    Tables,
    UsageError,
    module,
    provide,
    provide_private,
    seconds,
)
from lifecycle.settings import read_regular
from lifecycle.tables import ReconcileError

__all__ = ["Addressing", "RestoredPods", "Router", "cell"]


# Which kernel settings the way through cilium_host depends on.
#
# Source: Cilium 1.17; kernel Documentation/networking/ip-sysctl.rst.


def router_settings() -> dict[str, str]:
    """Names and values: packets of pods come in on links that have no route back to them."""
    device_settings = {"rp_filter": "0", "forwarding": "1", "accept_local": "1", "send_redirects": "0"}
    return {"net/ipv4/conf/all/rp_filter": "0"} | {
        f"net/ipv4/conf/{device}/{name}": value
        for device in (HOST, NET)
        for name, value in device_settings.items()
    }


def router_settings6() -> dict[str, str]:
    """Names and values for IPv6. Forwarding is a setting of the whole node; see :func:`listening`."""
    device_settings = {"disable_ipv6": "0", "accept_ra": "0", "forwarding": "1"}
    return {
        f"net/ipv6/conf/{device}/{name}": value
        for device in (HOST, NET)
        for name, value in device_settings.items()
    } | {"net/ipv6/conf/all/forwarding": "1"}


def listening(devices: Iterable[str], read: Callable[[str], str | None]) -> dict[str, str]:
    """What must be written before IPv6 is forwarded, once: whether to listen on is for the node to say.

    Forwarding ends what routers have advertised to a device, the default route too, unless its accept_ra
    is 2: so that is what devices get that listen to routers so far.
    """
    return {f"net/ipv6/conf/{name}/accept_ra": "2" for name in devices if _listens(name, read)}


def _listens(device: str, read: Callable[[str], str | None]) -> bool:
    """Whether routers' advertisements change the device's addresses and routes now."""
    accepts, forwards = (read(f"net/ipv6/conf/{device}/{name}") for name in ("accept_ra", "forwarding"))
    return accepts == "1" and forwards == "0"


# Which address the router has.
#
# Source: Cilium 1.17, the router's address; what it was before is in past.py.

OWNER = "router"


class RestoredPods(Protocol):
    """Pods that outlive a restart of the agent; their hook has claimed their addresses."""

    def strays(self) -> list[IPAddress]:
        """Their addresses outside this node's ranges, without another route."""
        ...


class RouterAllocator(Protocol):
    """The address allocator, as far as the router needs it. Methods raise IpamError."""

    @property
    def ranges(self) -> Mapping[Family, IPNetwork]:
        """The networks of this node's pods."""
        ...

    @property
    def default_pool(self) -> str:
        """The name of the pool."""
        ...

    def allocate(self, ip: IPAddress, owner: str, pool: str) -> Allocation:
        """This address."""
        ...

    def allocate_next(self, owner: str, *, family: Family) -> tuple[Allocation, ...]:
        """A free address of this family."""
        ...


def choose_address(
    family: Family, found: Iterable[IPAddress], addresses: RouterAllocator, log: Logger
) -> IPAddress:
    """Claim the router's address of a family: the first it had before that can be had, else a free one.

    Raises HiveError when the range has none left.
    """
    lost = False
    for candidate in (ip for ip in found if Family.of(ip) is family):
        try:
            return addresses.allocate(candidate, OWNER, addresses.default_pool).ip
        except IpamError as error:
            log.warning("Unable to restore router IP from filesystem", ip=str(candidate), error=str(error))
            lost = True
    if lost:
        log.warning("Router IP could not be re-allocated: a new one will cause brief network disruption")
    try:
        return addresses.allocate_next(OWNER, family=family)[0].ip
    except IpamError as error:
        raise HiveError(
            f"Unable to allocate router IP for family {family}: {error}; "
            f"every address of {addresses.ranges[family]} is taken, choose a larger {family}-range"
        ) from error


# Which addresses the router had before this start.
#
# Source: Cilium 1.17, restoring the router's addresses from globals/node_config.h below the state directory.

FILE: Final = Path("globals", "node_config.h")
"""Below the directory of the endpoints' states. Only read: we have no such file ourselves."""

_RAW: Final = {"cilium.v4.internal.raw ": 4, "cilium.v6.internal.raw ": 6, " ROUTER_IP ": 6}
"""Markers before sixteen bytes in C, and the family of the address; an IPv4 address is the last four."""
_GATEWAY: Final = re.compile(r"#define IPV4_GATEWAY (0x[0-9a-fA-F]{1,8})\s*$")
_BYTE: Final = re.compile(r"0x[0-9a-fA-F]{1,2}")


def remembered(
    pinned: NodeConfig | None, on_device: Iterable[IPAddress], path: Path, log: Logger
) -> list[IPAddress]:
    """The address in the programs' maps, else that of cilium_host, else that in the file.

    The pinned maps come first: anyone may change the device, and the running pods use what the programs know.
    """
    known = (pinned.router_ip6, pinned.router_ip) if pinned is not None else ()
    found = [ip for ip in known if ip is not None]
    found += [ip for ip in on_device if ip not in found]
    try:
        text = read_regular(path).decode(errors="replace")
    except FileNotFoundError:
        text = ""
    except OSError as error:
        log.warning("Unable to read router IPs of an earlier agent", path=str(path), error=str(error))
        text = ""
    return found + [ip for ip in addresses_in(text) if ip not in found]


def addresses_in(text: str) -> list[IPAddress]:
    """The router's addresses of a node_config.h, at most one of each family; other lines do not count."""
    found: dict[int, IPAddress] = {}
    for line in text.splitlines():
        if (legacy := _GATEWAY.search(line)) is not None:
            # a number as the kernel's C reads it: its bytes in memory are the address
            found[4] = IPv4Address(int(legacy[1], 16).to_bytes(4, sys.byteorder))
        for marker, version in _RAW.items():
            if marker in line:
                data = bytes(int(each, 16) for each in _BYTE.findall(line.partition(marker)[2]))
                if len(data) == 16:
                    found[version] = IPv4Address(data[12:]) if version == 4 else IPv6Address(data)
    return [found[version] for version in (6, 4) if version in found and int(found[version])]


# The router of this node: the addresses its pods send to, and the devices behind it.

LOOPBACK: Final = "lo"
INTERVAL: Final = seconds(30)

_RTMGRP_TC: Final = 0x8
_RTMGRP_IPV4_ROUTE: Final = 0x40
_RTMGRP_IPV6_ROUTE: Final = 0x400
_RTM_NEWROUTE, _RTM_DELROUTE = 24, 25
_RTM_DELQDISC, _RTM_DELTFILTER = 37, 45
_PROTOCOL: Final = 21
"""Where an rtmsg names who made the route, behind the header of 16 bytes."""
_BY_PEOPLE: Final = (3, 4)
"""RTPROT_BOOT, which our own have, and RTPROT_STATIC: not what the kernel or a routing daemon makes."""
CHANGED: Final = message_filter(
    (of_types(_RTM_DELQDISC, _RTM_DELTFILTER),),
    (of_types(_RTM_NEWROUTE, _RTM_DELROUTE), Field(LOAD_BYTE, _PROTOCOL, _BY_PEOPLE)),
)
"""What may concern the router and does not show in the table of devices."""


class Addressing(msgspec.Struct, frozen=True):
    """The node's addresses of one family in the API (NodeAddressingElement)."""

    ip: IPAddress
    """The router's."""
    alloc_range: IPNetwork | None
    """The primary one of pods; None where another IPAM plugin gives the addresses."""


class RouterSysctls:
    """The kernel settings of the router."""

    def __init__(self, agent: AgentConfig, sysctls: Sysctls, devices: Table[int, Device]) -> None:
        self._ipv6 = agent.ipv6
        self._sysctls = sysctls
        self._devices = devices

    def write(self) -> None:
        """Write them all; those of the pair are lost when the pair is created again."""
        self._sysctls.keep(router_settings())
        if self._ipv6:
            others = [each.name for each in self._devices.all() if each.name not in (HOST, NET, LOOPBACK)]
            self._sysctls.write(listening(others, self._sysctls.read))
            self._sysctls.keep(router_settings6())


def router_kernel(links: HostLinks, datapath: Datapath, sysctls: RouterSysctls, log: Logger) -> RouterKernel:
    """The pair of devices."""
    return RouterKernel(links, datapath, log, write_settings=sysctls.write)


class RouterAddresses:
    """Claims the router's addresses: what it had before, or what is set."""

    def __init__(
        self,
        ipam: Ipam,
        routing: PodRouting,
        links: HostLinks,
        datapath: Datapath,
        devices: Table[int, Device],
        agent: AgentConfig,
        log: Logger,
    ) -> None:
        self._ipam = ipam
        self.own_routes = routing.own_routes
        """Whether each pod has a route of its own over its link."""
        self._links = links
        self._datapath = datapath
        self._devices = devices
        self._past = agent.state / FILE
        self._log = log

    @property
    def ranges(self) -> Mapping[Family, IPNetwork]:
        """The networks of this node's pods."""
        return self._ipam.ranges

    def claim(self) -> dict[Family, Addressing]:
        """Of each family that is on; no pod gets them, nor the node's own. Raises HiveError."""
        local = self._ipam.local_routers
        if local and not self.own_routes:
            raise UsageError(
                f"Cannot specify local-router-{next(iter(local))} without enable-endpoint-routes: set it, too"
            )
        for device in addressed(self._devices.all()):
            for address in device.addresses:
                self._ipam.exclude(address.ip, "node-ip")
        host = self._links.find(HOST)
        on_device = lasting(self._links.addresses().get(host.ifindex, ())) if host is not None else []
        before = remembered(
            self._datapath.known_node(), [each.ip for each in on_device], self._past, self._log
        )
        ranges = self._ipam.ranges
        found = {
            family: Addressing(self._address(family, local.get(family), before), ranges.get(family))
            for family in self._ipam.families
        }
        self._ipam.forget_retired()
        return found

    def _address(self, family: Family, local: IPAddress | None, before: Iterable[IPAddress]) -> IPAddress:
        """The router's: the one that is set, which no pod gets then, or one of the range."""
        if local is None:
            return choose_address(family, before, self._ipam, self._log)
        self._ipam.exclude(local, OWNER)
        if self._ipam.covers(local):
            self._log.warning(f"local-router-{family} is in this node's range of pods", address=str(local))
        return local


class Router:
    """Made by its hook, after restored endpoints have claimed their addresses; the devices stay at stop.

    While the agent runs, what is removed or changed is made right again: at once on a kernel event, else
    within half a minute.
    """

    endpoint_routes: bool
    """Whether each pod has a route of its own."""

    def __init__(
        self,
        restored: RestoredPods,
        addresses: RouterAddresses,
        kernel: RouterKernel,
        sysctls: RouterSysctls,
        devices: Table[int, Device],
        ranges: Table[IPNetwork, PodRange],
        mtu: PodMtu,
        *,
        lifecycle: Lifecycle,
        jobs: Jobs,
        tables: Tables,
        log: Logger,
    ) -> None:
        self._restored = restored
        self._addresses = addresses
        self.endpoint_routes = addresses.own_routes
        self._kernel = kernel
        self._sysctls = sysctls
        self._ranges = ranges
        self._mtu = mtu
        self._log = log
        self._made: Mapping[Family, Addressing] | None = None
        self._objects = devices.derive(self._wanted, name="router")
        self._reconciler = Reconciler(self._objects, self._kernel, full_every=INTERVAL)
        tables.add(self._objects, self._reconciler.statuses)
        lifecycle.append(Hook("set up the router", self._start))
        jobs.observe("reconcile", self._reconciler)
        jobs.observe("watch devices", devices.changes, self._look_at_devices)
        jobs.observe("watch ranges of pods", ranges.changes, self._look_at_ranges)
        jobs.observe("watch routes and filters", self._hints, self._look)

    @property
    def gateways(self) -> tuple[IPAddress, ...]:
        """The pods' gateways, one of each family that is on: IPv6, then IPv4."""
        return tuple(each.ip for each in self.addressing().values())

    def addressing(self) -> Mapping[Family, Addressing]:
        """What pods and plugins must know, by family: IPv6, then IPv4; without those that are off."""
        if self._made is None:
            raise NotStartedError("Router was read before the hook 'set up the router' ran: depend on Router")
        return self._made

    def _wanted(self, devices: object) -> Mapping[str, RouterObject]:
        """The objects; they follow the devices, as the pair has the MTU of the pods' links."""
        del devices
        if self._made is None:
            return {}
        routers = {each.ip: each.alloc_range for each in self._made.values()}
        others = [each.network for each in self._ranges.all()]
        return wanted(routers, self._restored.strays(), self._mtu(), others)

    async def _start(self) -> None:
        self._made = self._addresses.claim()
        self._objects.wake()
        await self._make()
        self._sysctls.write()
        addresses = {str(family): str(each.ip) for family, each in self._made.items()}
        self._log.info("router set up", **addresses, device=HOST)

    async def _make(self) -> None:
        """The first run is part of the start: if it fails, so does the start.

        Leftovers that cannot be removed do not count: they are harmless, and removing them is retried.
        """
        try:
            await self._reconciler.sweep()
        except ReconcileError as error:
            needed = [why for key, why in error.failures.items() if key in self._objects]
            if needed:
                if isinstance(needed[0], HiveError):
                    raise needed[0] from error
                raise HiveError(f"Failed to set up the router: {needed[0]}") from needed[0]
            self._log.warning("Failed to remove old router IPs", device=HOST, error=str(error))

    async def _look_at_devices(self, changes: object) -> None:
        del changes
        self._reconciler.trigger()

    async def _look_at_ranges(self, _: object) -> None:
        """Route all ranges; the primary one is published, and the router's address stays."""
        if self._made is not None:
            now = self._addresses.ranges
            self._made = {
                family: Addressing(each.ip, now.get(family, each.alloc_range))
                for family, each in self._made.items()
            }
            self._objects.wake()

    async def _hints(self) -> AsyncIterator[None]:
        async for hint in notifications(_RTMGRP_TC | _RTMGRP_IPV4_ROUTE | _RTMGRP_IPV6_ROUTE, CHANGED):
            yield hint

    async def _look(self, _: None) -> None:
        self._reconciler.trigger()


cell = module(
    "router",
    "Gateway of this node's pods",
    provide(Router),
    provide_private(RouterSysctls, router_kernel, RouterAddresses),
)
