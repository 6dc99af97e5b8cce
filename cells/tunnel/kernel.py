"""The tunnel in the kernel: the target of its reconciler.

Repeating any of it on what is right touches nothing: a restart must not be felt.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Collection, Iterable, Mapping
from ipaddress import IPv4Address, IPv6Address
from typing import Final, Protocol

import anyio.to_thread
import msgspec

from cells.base.addresses import Family, IPAddress, IPNetwork
from cells.datapath.datapath import TUNNEL_LINK, Datapath
from cells.maps.records.cluster import (
    TUNNEL_GATEWAYS,
    TUNNEL_NOT_FOR_PODS,
    TUNNEL_OVER_IPV6,
    TUNNEL_OWN_IDENTITIES,
    TunnelConfig,
)
from cells.netlink.connection import NetlinkError
from cells.netlink.links import routes_over
from cells.netlink.rows import foreign_routes
from cells.netlink.vxlan import FoundVxlan, VxlanLinks
from cells.node.sysctl import Sysctls
from cells.tunnel.settings import TunnelSettings
from lifecycle import BatchError, HiveError, Logger, Target
from lifecycle.tables import BatchFailures

__all__ = ["TunnelLinks", "TunnelMaps", "TunnelRoute", "TunnelRoutes"]


# What the tunnel is in the kernel, as rows of the table ``tunnel``.

NO_SOURCE: Final[dict[Family, IPAddress]] = {Family.IPV4: IPv4Address(0), Family.IPV6: IPv6Address(0)}
"""In place of an address that packets are sent from: routing chooses."""


class TunnelDevice(msgspec.Struct, frozen=True):
    """The device, in collect-metadata mode: it has no other end of its own."""

    port: int
    source_ports: tuple[int, int]
    mtu: int
    """The underlay's: routes say how much less fits inside."""

    @property
    def key(self) -> str:
        """Of its row."""
        return f"device {TUNNEL_LINK}"


class TunnelPrograms(msgspec.Struct, frozen=True):
    """The programs on the device."""

    @property
    def key(self) -> str:
        """Of its row."""
        return "programs"


class TunnelFacts(msgspec.Struct, frozen=True):
    """What the programs of pods know of the tunnel; once they do, they use it."""

    mtu: int
    """Of the packets inside."""
    port: int
    source: IPAddress = NO_SOURCE[Family.IPV4]
    """The address packets are sent from; 0.0.0.0, ``::``: whichever routing chooses."""
    flags: int = 0
    """TUNNEL_OWN_IDENTITIES, TUNNEL_GATEWAYS, TUNNEL_NOT_FOR_PODS, TUNNEL_OVER_IPV6."""

    @property
    def key(self) -> str:
        """Of its row."""
        return "facts"


TunnelObject = TunnelDevice | TunnelPrograms | TunnelFacts
ORDER = (TunnelDevice, TunnelPrograms, TunnelFacts)
"""In which they are made; each needs those before it. They go the other way round."""


def wanted(
    settings: TunnelSettings,
    mtu: int,
    route_mtu: int,
    own: IPAddress | None,
    local: Iterable[IPAddress],
    *,
    own_identities: bool = False,
) -> dict[str, TunnelObject]:
    """All of them by key; none in native mode, unless for egress gateways.

    ``own``: the address of the underlay's family that other nodes know this one by. It counts if it is one of
    ``local``, those on devices: the kernel sends from no other.
    """
    if not settings.has_tunnel:
        return {}
    source = own if own is not None and own in set(local) else NO_SOURCE[settings.underlay]
    found: list[TunnelObject] = [
        TunnelDevice(settings.port, settings.source_ports, mtu),
        TunnelPrograms(),
        TunnelFacts(
            route_mtu,
            settings.port,
            source,
            TUNNEL_OWN_IDENTITIES * own_identities
            | TUNNEL_GATEWAYS * settings.enable_ipv4_egress_gateway
            | TUNNEL_NOT_FOR_PODS * (not settings.tunnelled)
            | TUNNEL_OVER_IPV6 * (settings.underlay is Family.IPV6),
        ),
    ]
    return {each.key: each for each in found}


# The tunnel's device, and routes over cilium_host, in worker threads.
#
# Source: ip-link(8) on vxlan; Cilium 1.17, setupVxlanDevice and the node routes of tunnel mode.


class TunnelRoute(msgspec.Struct, frozen=True):
    """The way to the pods of another node, over cilium_host, where the programs know the tunnel."""

    destination: IPNetwork
    gateway: IPAddress | None
    source: IPAddress | None
    mtu: int

    @property
    def key(self) -> IPNetwork:
        """Of its row."""
        return self.destination


class TunnelNetwork:
    """Reads and writes the node's network namespace. Methods raise NetlinkError when the kernel refuses."""

    def __init__(self) -> None:
        self._links = VxlanLinks()

    async def find(self, name: str) -> FoundVxlan | None:
        """The link of that name. Asked at once: every start does, and an answer takes less than a thread."""
        return self._links.find(name)

    async def create(self, name: str, device: TunnelDevice) -> None:
        """Make the device, down. EEXIST: the name is taken."""
        await anyio.to_thread.run_sync(self._links.create, name, device.mtu, device.port, device.source_ports)

    async def set_up(self, ifindex: int, name: str, mtu: int) -> None:
        """The MTU, and up; nothing that passes is lost. EADDRINUSE: another socket has the port."""
        await anyio.to_thread.run_sync(self._links.set_up, ifindex, name, mtu)

    async def delete(self, ifindex: int) -> None:
        """Remove a link; a missing one is ignored."""
        await anyio.to_thread.run_sync(self._links.delete, ifindex)

    async def routes(self, name: str) -> list[TunnelRoute]:
        """The routes of ours over a link: of the kernel's protocol, and with an MTU, as its own are not."""
        known = await anyio.to_thread.run_sync(routes_over, _index(name))
        return [
            TunnelRoute(route.destination, route.gateway, route.source, route.mtu)
            for route in known
            if route.by_kernel and route.mtu
        ]

    async def foreign(self) -> Mapping[IPNetwork, str]:
        """Destinations of routes that are not ours, and how each goes on."""
        return await anyio.to_thread.run_sync(foreign_routes)

    async def set_route(self, name: str, route: TunnelRoute) -> None:
        """In place of another route of ours to there."""
        await anyio.to_thread.run_sync(
            self._links.set_route, _index(name), route.destination, route.gateway, route.source, route.mtu
        )

    async def remove_route(self, name: str, destination: IPNetwork) -> None:
        """Remove a route of ours; a missing one is ignored."""
        await anyio.to_thread.run_sync(self._links.remove_route, _index(name), destination)


def _index(name: str) -> int:
    try:
        return socket.if_nametoindex(name)
    except OSError as error:
        raise NetlinkError(errno.ENODEV, f"find {name}") from error


# What the tunnel touches of the kernel, in the words of this cell.


class TunnelLinks(Protocol):
    """The node's links; TunnelNetwork. Methods raise NetlinkError."""

    async def find(self, name: str) -> FoundVxlan | None:
        """The link of that name."""
        ...

    async def create(self, name: str, device: TunnelDevice) -> None:
        """Make the device, down."""
        ...

    async def set_up(self, ifindex: int, name: str, mtu: int) -> None:
        """The MTU, and up."""
        ...

    async def delete(self, ifindex: int) -> None:
        """Remove a link."""
        ...


class TunnelRoutes(Protocol):
    """The node's routes; TunnelNetwork. Methods raise NetlinkError."""

    async def routes(self, name: str) -> list[TunnelRoute]:
        """Those of ours over the link of that name."""
        ...

    async def set_route(self, name: str, route: TunnelRoute) -> None:
        """In place of another one of ours to there."""
        ...

    async def foreign(self) -> Mapping[IPNetwork, str]:
        """Destinations of routes that are not ours, and how each goes on."""
        ...

    async def remove_route(self, name: str, destination: IPNetwork) -> None:
        """Remove; a missing one is ignored."""
        ...


class TunnelMaps(Protocol):
    """hive_tunnel. Methods raise OSError."""

    def facts(self) -> TunnelConfig:
        """What the programs know of the tunnel."""
        ...

    def set_facts(self, facts: TunnelConfig) -> None:
        """Have them know this from the next packet on."""
        ...


SYSCTLS: Final = {f"net/ipv4/conf/{TUNNEL_LINK}/rp_filter": "0"}
"""What comes out has no route back over the device."""


class TunnelKernel(Target[str, TunnelObject, TunnelObject]):
    """Compares, makes and removes the objects of the tunnel."""

    def __init__(
        self,
        links: TunnelLinks,
        programs: Datapath,
        maps: TunnelMaps,
        sysctls: Sysctls,
        log: Logger,
    ) -> None:
        self._links = links
        self._programs = programs
        self._maps = maps
        self._log = log
        self._sysctls = sysctls

    async def observe(self) -> Mapping[str, TunnelObject]:
        """What there is of it; a device that is down, or not ours by its kind, as one with MTU 0."""
        found: list[TunnelObject] = []
        link = await self._links.find(TUNNEL_LINK)
        if link is not None:
            right = link.up and _usable(link)
            found.append(TunnelDevice(link.port, link.source_ports, link.mtu if right else 0))
            if right and self._programs.serves_tunnel(link.ifindex):
                found.append(TunnelPrograms())
        facts = self._maps.facts()
        if facts != TunnelConfig():
            known = link is not None and facts.ifindex == link.ifindex
            found.append(TunnelFacts(facts.mtu if known else 0, facts.port, facts.source, facts.flags))
        return {each.key: each for each in found}

    async def put(self, batch: Mapping[str, TunnelObject]) -> None:
        """Make them, those first that others need. Raises BatchError."""
        with BatchFailures(OSError, HiveError) as failures:
            for each in sorted(batch.values(), key=lambda one: ORDER.index(type(one))):
                with failures.of(each.key):
                    await self._make(each)

    async def drop(self, batch: Collection[str]) -> None:
        """Have the programs forget the tunnel, then remove its device. Raises BatchError."""
        failures: dict[str, Exception] = {}
        if TunnelFacts(0, 0).key in batch:
            try:
                self._maps.set_facts(TunnelConfig())
            except OSError as error:
                raise BatchError(dict.fromkeys(batch, error)) from error
        device = TunnelDevice(0, (0, 0), 0).key
        if device in batch and (link := await self._links.find(TUNNEL_LINK)) is not None:
            try:
                await self._links.delete(link.ifindex)
                self._log.info("tunnel removed", device=TUNNEL_LINK)
            except OSError as error:
                failures[device] = error
        if failures:
            raise BatchError(failures)

    async def _make(self, wanted: TunnelObject) -> None:
        match wanted:
            case TunnelDevice():
                await self._device(wanted)
            case TunnelPrograms():
                self._programs.attach_tunnel((await self._link()).ifindex)
            case TunnelFacts():
                ifindex = (await self._link()).ifindex
                facts = TunnelConfig(ifindex, wanted.mtu, wanted.port, wanted.source, wanted.flags)
                self._maps.set_facts(facts)

    async def _link(self) -> FoundVxlan:
        link = await self._links.find(TUNNEL_LINK)
        if link is None:
            raise HiveError(f"{TUNNEL_LINK} is not there")
        return link

    async def _device(self, wanted: TunnelDevice) -> None:
        """In place where the kernel can: only another port takes another device."""
        link = await self._links.find(TUNNEL_LINK)
        if link is not None and not (_usable(link) and _same_ports(link, wanted)):
            self._log.warning(
                "the tunnel's device is not as configured, creating it again",
                device=TUNNEL_LINK,
                kind=link.kind,
                port=link.port,
                wanted_port=wanted.port,
            )
            await self._links.delete(link.ifindex)
            link = None
        if link is None:
            link = await self._new_device(wanted)
            if (facts := self._maps.facts()) != TunnelConfig():
                self._maps.set_facts(msgspec.structs.replace(facts, ifindex=link.ifindex))
        elif not link.up or link.mtu != wanted.mtu:
            await self._links.set_up(link.ifindex, TUNNEL_LINK, wanted.mtu)

    async def _new_device(self, wanted: TunnelDevice) -> FoundVxlan:
        """Attach the programs before any packet arrives."""
        try:
            await self._links.create(TUNNEL_LINK, wanted)
            link = await self._link()
            try:
                self._sysctls.keep(SYSCTLS)
                self._programs.attach_tunnel(link.ifindex)
                await self._links.set_up(link.ifindex, TUNNEL_LINK, wanted.mtu)
            except BaseException:
                await self._links.delete(link.ifindex)
                raise
        except NetlinkError as error:
            raise HiveError(f"the tunnel cannot be made on UDP port {wanted.port}: {error}") from error
        self._log.info("tunnel made", device=TUNNEL_LINK, port=wanted.port, mtu=wanted.mtu)
        return link


def _usable(link: FoundVxlan) -> bool:
    return link.kind == "vxlan" and link.metadata


def _same_ports(one: FoundVxlan, other: TunnelDevice) -> bool:
    return (one.port, one.source_ports) == (other.port, other.source_ports)
