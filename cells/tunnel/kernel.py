"""The tunnel in the kernel: its objects, and the reconciler's target that creates and removes them.

Writes of unchanged objects do nothing, so that a restart does not disturb traffic.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Collection, Iterable, Mapping
from ipaddress import IPv4Address, IPv6Address
from typing import Final

import anyio.to_thread
import msgspec

from cells.base.addresses import Family, IPAddress, IPNetwork
from cells.datapath.datapath import TUNNEL_LINKS, Datapath
from cells.maps.node_maps import Maps
from cells.maps.records.cluster import (
    TUNNEL_GATEWAYS,
    TUNNEL_NOT_FOR_PODS,
    TUNNEL_OVER_IPV6,
    TUNNEL_OWN_IDENTITIES,
    TunnelConfig,
)
from cells.netlink.connection import NetlinkError
from cells.netlink.links import routes_over
from cells.netlink.overlay import FoundOverlay, OverlayLinks
from cells.netlink.rows import foreign_routes
from cells.node.sysctl import Sysctls
from cells.tunnel.settings import TunnelSettings
from lifecycle import BatchError, HiveError, Logger, Target
from lifecycle.tables import BatchFailures

__all__ = ["TunnelMaps", "TunnelNetwork", "TunnelRoute"]


# Rows of the table ``tunnel``: the tunnel's objects in the kernel.

NO_SOURCE: Final[dict[Family, IPAddress]] = {Family.IPV4: IPv4Address(0), Family.IPV6: IPv6Address(0)}
"""Unspecified source addresses: routing chooses."""


DEVICE: Final = "device"
"""Row key of the tunnel device: a node has one, of either protocol."""


class TunnelDevice(msgspec.Struct, frozen=True):
    """The tunnel device, in collect-metadata mode: packets carry their remote end."""

    protocol: str
    """vxlan or geneve; also the kernel's link kind."""
    port: int
    source_ports: tuple[int, int]
    mtu: int
    """That of the underlay; routes have the smaller MTU of inner packets."""

    @property
    def name(self) -> str:
        """Name of the link."""
        return TUNNEL_LINKS[self.protocol]

    @property
    def key(self) -> str:
        """Row key."""
        return DEVICE


class TunnelPrograms(msgspec.Struct, frozen=True):
    """The programs attached to the tunnel device."""

    @property
    def key(self) -> str:
        """Row key."""
        return "programs"


class TunnelFacts(msgspec.Struct, frozen=True):
    """The tunnel's row in hive_tunnel; once it is written, pods' programs use the tunnel."""

    mtu: int
    """MTU of the inner packets."""
    port: int
    source: IPAddress = NO_SOURCE[Family.IPV4]
    """Source address of the outer packets; unspecified: chosen by routing."""
    flags: int = 0
    """TUNNEL_OWN_IDENTITIES, TUNNEL_GATEWAYS, TUNNEL_NOT_FOR_PODS, TUNNEL_OVER_IPV6."""

    @property
    def key(self) -> str:
        """Row key."""
        return "facts"


TunnelObject = TunnelDevice | TunnelPrograms | TunnelFacts
ORDER = (TunnelDevice, TunnelPrograms, TunnelFacts)
"""The order of creation: each object requires those before it. They are removed in reverse order."""


def wanted(
    settings: TunnelSettings,
    mtu: int,
    route_mtu: int,
    own: IPAddress | None,
    local: Iterable[IPAddress],
    *,
    own_identities: bool = False,
) -> dict[str, TunnelObject]:
    """Return the wanted objects by key; none in native mode without egress gateways.

    ``own`` is the node's address of the underlay's family. It becomes the source address only if it is one of
    ``local``, those on devices: the kernel cannot send from others.
    """
    if not settings.has_tunnel:
        return {}
    source = own if own is not None and own in set(local) else NO_SOURCE[settings.underlay]
    found: list[TunnelObject] = [
        TunnelDevice(settings.tunnel_protocol, settings.port, settings.source_ports, mtu),
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


# Access to the tunnel device, and to routes over cilium_host.
#
# Source: ip-link(8) on vxlan and geneve; Cilium 1.17, setupTunnelDevice and the node routes of tunnel mode.


class TunnelRoute(msgspec.Struct, frozen=True):
    """A route to the pods of another node, over cilium_host, where the programs encapsulate packets."""

    destination: IPNetwork
    gateway: IPAddress | None
    source: IPAddress | None
    mtu: int

    @property
    def key(self) -> IPNetwork:
        """Row key."""
        return self.destination


class TunnelNetwork:
    """Access to links and routes of the node's network namespace. Methods raise NetlinkError."""

    def __init__(self) -> None:
        self._links = OverlayLinks()

    async def find(self, name: str) -> FoundOverlay | None:
        """Return the link of this name, or None. On the event loop: faster than a thread."""
        return self._links.find(name)

    async def create(self, device: TunnelDevice) -> None:
        """Create the device; it is down. EEXIST: the name is taken; EOPNOTSUPP: no kernel support."""
        await anyio.to_thread.run_sync(
            self._links.create, device.protocol, device.name, device.mtu, device.port, device.source_ports
        )

    async def set_up(self, ifindex: int, name: str, mtu: int) -> None:
        """Set the MTU and bring the device up. EADDRINUSE: another socket has the UDP port."""
        await anyio.to_thread.run_sync(self._links.set_up, ifindex, name, mtu)

    async def delete(self, ifindex: int) -> None:
        """Delete a link; a missing one is ignored."""
        await anyio.to_thread.run_sync(self._links.delete, ifindex)

    async def routes(self, name: str) -> list[TunnelRoute]:
        """Return our routes over a link: those with the kernel's protocol and an MTU metric."""
        known = await anyio.to_thread.run_sync(routes_over, _index(name))
        return [
            TunnelRoute(route.destination, route.gateway, route.source, route.mtu)
            for route in known
            if route.by_kernel and route.mtu
        ]

    async def foreign(self) -> Mapping[IPNetwork, str]:
        """Return destination and next hop of routes that are not ours."""
        return await anyio.to_thread.run_sync(foreign_routes)

    async def set_route(self, name: str, route: TunnelRoute) -> None:
        """Add or replace a route."""
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


class TunnelMaps:
    """Access to hive_tunnel. Methods raise OSError."""

    def __init__(self, maps: Maps) -> None:
        self._maps = maps

    def facts(self) -> TunnelConfig:
        """Read the configuration of the tunnel."""
        return TunnelConfig.unpack(self._maps.tunnel.lookup(bytes(4)) or bytes(TunnelConfig.SIZE))

    def set_facts(self, facts: TunnelConfig) -> None:
        """Write the configuration of the tunnel; programs use it from the next packet on."""
        self._maps.tunnel.update(bytes(4), facts.pack())


def sysctls(name: str) -> dict[str, str]:
    """Return the sysctls that disable rp_filter: decapsulated packets have no route back over the device."""
    return {f"net/ipv4/conf/{name}/rp_filter": "0"}


class TunnelKernel(Target[str, TunnelObject, TunnelObject]):
    """The reconciler's target: compares, creates and removes the objects of the tunnel."""

    def __init__(
        self,
        settings: TunnelSettings,
        links: TunnelNetwork,
        programs: Datapath,
        maps: TunnelMaps,
        sysctls: Sysctls,
        log: Logger,
    ) -> None:
        self._name = settings.link
        self._links = links
        self._programs = programs
        self._maps = maps
        self._log = log
        self._sysctls = sysctls

    async def observe(self) -> Mapping[str, TunnelObject]:
        """Read the existing objects.

        A device that is down, of another kind, or not the only one is returned with MTU 0.
        """
        found: list[TunnelObject] = []
        links = await self._found()
        link = links.get(self._name)
        right = link is not None and len(links) == 1 and link.up and _usable(link, self._name)
        for name, each in links.items():
            if link in {None, each}:
                mtu = each.mtu if right else 0
                found.append(TunnelDevice(_PROTOCOLS[name], each.port, each.source_ports, mtu))
        if link is not None and right and self._serves(link.ifindex):
            found.append(TunnelPrograms())
        facts = self._maps.facts()
        if facts != TunnelConfig():
            known = link is not None and facts.ifindex == link.ifindex
            found.append(TunnelFacts(facts.mtu if known else 0, facts.port, facts.source, facts.flags))
        return {each.key: each for each in found}

    async def put(self, batch: Mapping[str, TunnelObject]) -> None:
        """Create or change objects, in the order of ORDER. Raises BatchError."""
        with BatchFailures(OSError, HiveError) as failures:
            for each in sorted(batch.values(), key=lambda one: ORDER.index(type(one))):
                with failures.of(each.key):
                    await self._make(each)

    async def drop(self, batch: Collection[str]) -> None:
        """Clear the programs' configuration of the tunnel, then remove its device. Raises BatchError."""
        if TunnelFacts(0, 0).key in batch:
            try:
                self._maps.set_facts(TunnelConfig())
            except OSError as error:
                raise BatchError(dict.fromkeys(batch, error)) from error
        if DEVICE in batch:
            with BatchFailures(OSError) as failures, failures.of(DEVICE):
                await self._remove_all_but("")

    async def _found(self) -> dict[str, FoundOverlay]:
        """Return the existing links with the name of a tunnel device, by name."""
        found = {name: await self._links.find(name) for name in TUNNEL_LINKS.values()}
        return {name: link for name, link in found.items() if link is not None}

    async def _remove_all_but(self, wanted: str) -> None:
        for name, link in (await self._found()).items():
            if name != wanted:
                await self._links.delete(link.ifindex)
                self._log.info("tunnel removed", device=name)

    async def _make(self, wanted: TunnelObject) -> None:
        match wanted:
            case TunnelDevice():
                await self._device(wanted)
            case TunnelPrograms():
                self._attach((await self._link(self._name)).ifindex)
            case TunnelFacts():
                ifindex = (await self._link(self._name)).ifindex
                facts = TunnelConfig(ifindex, wanted.mtu, wanted.port, wanted.source, wanted.flags)
                self._maps.set_facts(facts)

    def _serves(self, ifindex: int) -> bool:
        settings = sysctls(self._name).items()
        sysctls_set = all(self._sysctls.read(name) == value for name, value in settings)
        return sysctls_set and self._programs.serves_tunnel(ifindex)

    def _attach(self, ifindex: int) -> None:
        self._sysctls.enforce(sysctls(self._name))
        self._programs.attach_tunnel(ifindex)

    async def _link(self, name: str) -> FoundOverlay:
        link = await self._links.find(name)
        if link is None:
            raise HiveError(f"device {name} does not exist")
        return link

    async def _device(self, wanted: TunnelDevice) -> None:
        """Create or change the device; another protocol or port requires a new one."""
        link = await self._links.find(wanted.name)
        if link is not None and not (_usable(link, wanted.name) and _same_ports(link, wanted)):
            self._log.warning(
                "the tunnel's device is not as configured, creating it again",
                device=wanted.name,
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
            return
        await self._remove_all_but(wanted.name)
        if not link.up or link.mtu != wanted.mtu:
            self._attach(link.ifindex)  # a killed agent may have left it down, without programs
            await self._links.set_up(link.ifindex, wanted.name, wanted.mtu)

    async def _new_device(self, wanted: TunnelDevice) -> FoundOverlay:
        """Create the device, and attach its programs before it is up.

        The device of the other protocol is removed only after the new one exists, so that a kernel without
        support keeps the old one; both may have the same port.
        """
        try:
            await self._links.create(wanted)
            link = await self._link(wanted.name)
            try:
                await self._remove_all_but(wanted.name)
                self._attach(link.ifindex)
                await self._links.set_up(link.ifindex, wanted.name, wanted.mtu)
            except BaseException:
                await self._links.delete(link.ifindex)
                raise
        except NetlinkError as error:
            if error.errno == errno.EOPNOTSUPP:
                raise HiveError(_no_device(wanted.protocol)) from error
            raise HiveError(f"the tunnel cannot be created on UDP port {wanted.port}: {error}") from error
        self._log.info("tunnel created", device=wanted.name, port=wanted.port, mtu=wanted.mtu)
        return link


_PROTOCOLS: Final = {name: protocol for protocol, name in TUNNEL_LINKS.items()}


def _no_device(protocol: str) -> str:
    return (
        f"tunnel-protocol={protocol}: this kernel has no such devices (CONFIG_{protocol.upper()}): load its"
        f" module {protocol}, or set tunnel-protocol={'vxlan' if protocol != 'vxlan' else 'geneve'}"
        " on all nodes"
    )


def _usable(link: FoundOverlay, name: str) -> bool:
    return link.kind == _PROTOCOLS[name] and link.metadata


def _same_ports(one: FoundOverlay, other: TunnelDevice) -> bool:
    return (one.port, one.source_ports) == (other.port, other.source_ports)
