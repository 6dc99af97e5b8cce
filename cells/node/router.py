"""The router: the pods' gateway addresses, one per family, on the devices cilium_host and cilium_net.

Reconciler: claims the addresses, then reconciles devices, programs, addresses and routes with the table
``router``; Sysctls restores the kernel settings.

Why: pods' routes contain these addresses, so they must survive restarts. They are claimed after the pods' own
addresses, so that a new one is never that of a running pod.
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
from cells.node.router_kernel import HOST, NET, RouterKernel, RouterObject, router_objects, without_link_local
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


# Kernel settings for packets through cilium_host.
#
# Source: Cilium 1.17; kernel Documentation/networking/ip-sysctl.rst.


def router_settings() -> dict[str, str]:
    """Return kernel settings for cilium_host: pods' packets arrive on links without a route back to them."""
    device_settings = {"rp_filter": "0", "forwarding": "1", "accept_local": "1", "send_redirects": "0"}
    return {"net/ipv4/conf/all/rp_filter": "0"} | {
        f"net/ipv4/conf/{device}/{name}": value
        for device in (HOST, NET)
        for name, value in device_settings.items()
    }


def router_settings6() -> dict[str, str]:
    """Return kernel settings for IPv6. Forwarding is node-wide; see :func:`accept_ra_settings`."""
    device_settings = {"disable_ipv6": "0", "accept_ra": "0", "forwarding": "1"}
    return {
        f"net/ipv6/conf/{device}/{name}": value
        for device in (HOST, NET)
        for name, value in device_settings.items()
    } | {"net/ipv6/conf/all/forwarding": "1"}


def accept_ra_settings(devices: Iterable[str], read: Callable[[str], str | None]) -> dict[str, str]:
    """Return settings to write once before IPv6 forwarding is enabled.

    With forwarding, a device ignores router advertisements and loses the routes from them, including the
    default route, unless its accept_ra is 2. Devices that accept them now therefore get 2. They are not
    restored later: the node's administrator decides.
    """
    return {f"net/ipv6/conf/{name}/accept_ra": "2" for name in devices if _accepts_ra(name, read)}


def _accepts_ra(device: str, read: Callable[[str], str | None]) -> bool:
    """Whether the device accepts router advertisements now."""
    accepts, forwards = (read(f"net/ipv6/conf/{device}/{name}") for name in ("accept_ra", "forwarding"))
    return accepts == "1" and forwards == "0"


# Choice of the router's address. Source: Cilium 1.17.

OWNER = "router"


class RestoredPods(Protocol):
    """Pods of the previous run; their hook has claimed their addresses."""

    def addresses_outside_pod_cidrs(self) -> list[IPAddress]:
        """Return their addresses outside this node's ranges that have no route of their own."""
        ...


class RouterAllocator(Protocol):
    """The address allocator. Methods raise IpamError."""

    @property
    def ranges(self) -> Mapping[Family, IPNetwork]:
        """The primary ranges of this node's pods."""
        ...

    @property
    def default_pool(self) -> str:
        """The name of the default pool."""
        ...

    def allocate(self, ip: IPAddress, owner: str, pool: str) -> Allocation:
        """Allocate an address."""
        ...

    def allocate_next(self, owner: str, *, family: Family) -> tuple[Allocation, ...]:
        """Allocate a free address of a family."""
        ...


def choose_address(
    family: Family, found: Iterable[IPAddress], addresses: RouterAllocator, log: Logger
) -> IPAddress:
    """Claim the router's address of a family: the first previous one available, else a free one.

    Raises HiveError if the range is exhausted.
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


# Previous addresses of the router.
#
# Source: Cilium 1.17, restoring the router's addresses from globals/node_config.h below the state directory.

FILE: Final = Path("globals", "node_config.h")
"""Below the directory of the endpoints' states. Only read, because the agent does not write it."""

_RAW: Final = {"cilium.v4.internal.raw ": 4, "cilium.v6.internal.raw ": 6, " ROUTER_IP ": 6}
"""Markers before sixteen bytes in C, and the address family; the last four bytes are an IPv4 address."""
_GATEWAY: Final = re.compile(r"#define IPV4_GATEWAY (0x[0-9a-fA-F]{1,8})\s*$")
_BYTE: Final = re.compile(r"0x[0-9a-fA-F]{1,2}")


def previous_addresses(
    pinned: NodeConfig | None, on_device: Iterable[IPAddress], path: Path, log: Logger
) -> list[IPAddress]:
    """Return the router's previous addresses: from the pinned maps, cilium_host, and the file.

    The pinned maps come first, because running pods depend on them; other programs may have changed the
    device.
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
    """Return the router's addresses in a node_config.h, at most one per family."""
    found: dict[int, IPAddress] = {}
    for line in text.splitlines():
        if (legacy := _GATEWAY.search(line)) is not None:
            # an integer in host byte order: its bytes in memory are the address
            found[4] = IPv4Address(int(legacy[1], 16).to_bytes(4, sys.byteorder))
        for marker, version in _RAW.items():
            if marker in line:
                data = bytes(int(each, 16) for each in _BYTE.findall(line.partition(marker)[2]))
                if len(data) == 16:
                    found[version] = IPv4Address(data[12:]) if version == 4 else IPv6Address(data)
    return [found[version] for version in (6, 4) if version in found and int(found[version])]


# The router: addresses, devices, programs and routes.

LOOPBACK: Final = "lo"
INTERVAL: Final = seconds(30)

_RTMGRP_TC: Final = 0x8
_RTMGRP_IPV4_ROUTE: Final = 0x40
_RTMGRP_IPV6_ROUTE: Final = 0x400
_RTM_NEWROUTE, _RTM_DELROUTE = 24, 25
_RTM_DELQDISC, _RTM_DELTFILTER = 37, 45
_PROTOCOL: Final = 21
"""Offset of an rtmsg's rtm_protocol, after the header of 16 bytes."""
_STATIC_PROTOCOLS: Final = (3, 4)
"""RTPROT_BOOT, which our routes have, and RTPROT_STATIC; not those of the kernel or routing daemons."""
CHANGED: Final = message_filter(
    (of_types(_RTM_DELQDISC, _RTM_DELTFILTER),),
    (of_types(_RTM_NEWROUTE, _RTM_DELROUTE), Field(LOAD_BYTE, _PROTOCOL, _STATIC_PROTOCOLS)),
)
"""Filter of notifications that may concern the router but not the table of devices."""


class Addressing(msgspec.Struct, frozen=True):
    """The node's addressing of one family, as in the API (NodeAddressingElement)."""

    ip: IPAddress
    """The router's address."""
    alloc_range: IPNetwork | None
    """The primary range of pods; None if another IPAM plugin assigns addresses."""


class RouterSysctls:
    """The kernel settings of the router."""

    def __init__(self, agent: AgentConfig, sysctls: Sysctls, devices: Table[int, Device]) -> None:
        self._ipv6 = agent.ipv6
        self._sysctls = sysctls
        self._devices = devices

    def write(self) -> None:
        """Write all settings; a recreated pair has lost its own."""
        self._sysctls.enforce(router_settings())
        if self._ipv6:
            others = [each.name for each in self._devices.all() if each.name not in (HOST, NET, LOOPBACK)]
            self._sysctls.write(accept_ra_settings(others, self._sysctls.read))
            self._sysctls.enforce(router_settings6())


def router_kernel(links: HostLinks, datapath: Datapath, sysctls: RouterSysctls, log: Logger) -> RouterKernel:
    """Return the reconciler's target for the pair of devices."""
    return RouterKernel(links, datapath, log, write_settings=sysctls.write)


class RouterAddresses:
    """Claims the router's addresses: configured ones, previous ones, or new ones."""

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
        self.endpoint_routes = routing.endpoint_routes
        """Whether each pod has its own route over its link (enable-endpoint-routes)."""
        self._links = links
        self._datapath = datapath
        self._devices = devices
        self._header_file = agent.state / FILE
        self._log = log

    @property
    def ranges(self) -> Mapping[Family, IPNetwork]:
        """The primary ranges of this node's pods."""
        return self._ipam.ranges

    def claim(self) -> dict[Family, Addressing]:
        """Claim an address per enabled family, and exclude the node's own from allocation.

        Raises HiveError.
        """
        local = self._ipam.local_routers
        if local and not self.endpoint_routes:
            raise UsageError(
                f"Cannot specify local-router-{next(iter(local))} without enable-endpoint-routes: set it, too"
            )
        for device in addressed(self._devices.all()):
            for address in device.addresses:
                self._ipam.exclude(address.ip, "node-ip")
        host = self._links.find(HOST)
        on_device = (
            without_link_local(self._links.addresses().get(host.ifindex, ())) if host is not None else []
        )
        previous = previous_addresses(
            self._datapath.known_node(), [each.ip for each in on_device], self._header_file, self._log
        )
        ranges = self._ipam.ranges
        found = {
            family: Addressing(self._address(family, local.get(family), previous), ranges.get(family))
            for family in self._ipam.families
        }
        self._ipam.forget_retired()
        return found

    def _address(self, family: Family, local: IPAddress | None, previous: Iterable[IPAddress]) -> IPAddress:
        """Return the configured address, excluded from allocation, or one of the range."""
        if local is None:
            return choose_address(family, previous, self._ipam, self._log)
        self._ipam.exclude(local, OWNER)
        if self._ipam.covers(local):
            self._log.warning(f"local-router-{family} is in this node's range of pods", address=str(local))
        return local


class Router:
    """Sets up the router in its hook, after restored endpoints have claimed addresses; it stays after a stop.

    While the agent runs, changes by other programs are reverted: after a kernel notification, or within 30
    seconds.
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
        self.endpoint_routes = addresses.endpoint_routes
        """Whether each pod has its own route (enable-endpoint-routes)."""
        self._kernel = kernel
        self._sysctls = sysctls
        self._ranges = ranges
        self._mtu = mtu
        self._log = log
        self._addressing: Mapping[Family, Addressing] | None = None
        self._objects = devices.derive(self._desired_objects, name="router")
        self._reconciler = Reconciler(self._objects, self._kernel, full_every=INTERVAL)
        tables.add(self._objects, self._reconciler.statuses)
        lifecycle.append(Hook("set up the router", self._start))
        jobs.observe("reconcile", self._reconciler)
        jobs.observe("watch devices", devices.changes, self._follow_devices)
        jobs.observe("watch ranges of pods", ranges.changes, self._follow_ranges)
        jobs.observe("watch routes and filters", self._hints, self._trigger)

    @property
    def gateways(self) -> tuple[IPAddress, ...]:
        """The pods' gateways, one per enabled family: IPv6, then IPv4."""
        return tuple(each.ip for each in self.addressing().values())

    def addressing(self) -> Mapping[Family, Addressing]:
        """Return router address and pod range by enabled family: IPv6, then IPv4."""
        if self._addressing is None:
            raise NotStartedError("Router was read before the hook 'set up the router' ran: depend on Router")
        return self._addressing

    def _desired_objects(self, devices: object) -> Mapping[str, RouterObject]:
        """Return the desired objects. They depend on the devices, because the pair has the pods' MTU."""
        del devices
        if self._addressing is None:
            return {}
        routers = {each.ip: each.alloc_range for each in self._addressing.values()}
        others = [each.network for each in self._ranges.all()]
        return router_objects(routers, self._restored.addresses_outside_pod_cidrs(), self._mtu(), others)

    async def _start(self) -> None:
        self._addressing = self._addresses.claim()
        self._objects.wake()
        await self._initial_sweep()
        self._sysctls.write()
        addresses = {str(family): str(each.ip) for family, each in self._addressing.items()}
        self._log.info("router set up", **addresses, device=HOST)

    async def _initial_sweep(self) -> None:
        """Reconcile for the first time; an error fails the start.

        Failed removals of old objects are only logged, because those are harmless and removal is retried.
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

    async def _follow_devices(self, changes: object) -> None:
        del changes
        self._reconciler.trigger()

    async def _follow_ranges(self, _: object) -> None:
        """Route all ranges. The primary one is published; the router's address is unchanged."""
        if self._addressing is not None:
            now = self._addresses.ranges
            self._addressing = {
                family: Addressing(each.ip, now.get(family, each.alloc_range))
                for family, each in self._addressing.items()
            }
            self._objects.wake()

    async def _hints(self) -> AsyncIterator[None]:
        async for hint in notifications(_RTMGRP_TC | _RTMGRP_IPV4_ROUTE | _RTMGRP_IPV6_ROUTE, CHANGED):
            yield hint

    async def _trigger(self, _: None) -> None:
        self._reconciler.trigger()


cell = module(
    "router",
    "Gateway of this node's pods",
    provide(Router),
    provide_private(RouterSysctls, router_kernel, RouterAddresses),
)
