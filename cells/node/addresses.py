"""The node's own addresses, one per family, which other nodes and clients use; and NodePort addresses.

Source: fills the table ``node-addresses`` (key: family) from the Node object, the settings, the kernel's
default route and the devices, in this order, and follows their changes.

Why: a node may have addresses on lo, several uplinks, or uplinks without addresses, so the devices alone do
not determine its address.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Sequence
from contextlib import closing
from enum import StrEnum
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final

import msgspec

from cells.base.addresses import Family
from cells.config import AgentConfig
from cells.netlink.connection import LOAD_BYTE, Field, message_filter, notifications, of_types
from cells.node.devices import Device, matches, uplinks
from lifecycle import (
    Hook,
    Jobs,
    Lifecycle,
    Logger,
    ReadTable,
    Settings,
    Table,
    config,
    invoke,
    module,
    provide,
    provide_private,
)

__all__ = [
    "HOST_DEVICE",
    "AddressSettings",
    "AddressUse",
    "DefaultRoute",
    "DeviceAddress",
    "DeviceAddresses",
    "InternalIP",
    "NodeAddress",
    "NodeAddresses",
    "address_table",
    "cell",
    "choose",
    "device_addresses",
    "direct_routing_device",
    "masquerade_address",
    "node_addresses",
]


# Settings.

AUTO: Final = "auto"


class AddressSettings(Settings, frozen=True):
    """The node's addresses, if they cannot be detected."""

    ipv4_node: str = AUTO
    """The node's IPv4 address, if its Node object has no InternalIP; auto: the source of its default route.
    """

    ipv6_node: str = AUTO
    """The node's IPv6 address, if its Node object has no InternalIP; auto: the source of its default route.
    """

    def address(self, family: Family) -> IPAddress | None:
        """Return the configured address, or None for auto."""
        text = self.ipv4_node if family is Family.IPV4 else self.ipv6_node
        return None if text in {AUTO, ""} else ip_address(text)

    def faults(self) -> Iterator[str]:
        for family, example in ((Family.IPV4, "192.0.2.7"), (Family.IPV6, "2001:db8::7")):
            try:
                ip = self.address(family)
            except ValueError:
                ip = None
                fits = False
            else:
                fits = ip is None or (Family.of(ip) is family and is_reachable(ip))
            if not fits:
                text = self.ipv4_node if family is Family.IPV4 else self.ipv6_node
                yield f"{family}-node={text}: expected auto, or an address of the node such as {example}"


def is_reachable(ip: IPAddress) -> bool:
    """Whether other nodes can reach a node by such an address."""
    return not (ip.is_loopback or ip.is_link_local or ip.is_multicast or ip.is_unspecified)


# Choice of the node's address.
#
# Source: Cilium 1.17, the node's primary addresses: the Node object's InternalIP, the option, the system.


class Origin(StrEnum):
    """The source of a node address."""

    NODE_OBJECT = "Node object"
    SETTING = "setting"
    DEFAULT_ROUTE = "default route"
    DEVICE = "device"


class NodeAddress(msgspec.Struct, frozen=True):
    """The node's own address of a family."""

    family: Family
    ip: IPAddress
    origin: Origin


class InternalIP(msgspec.Struct, frozen=True):
    """The first InternalIP of a family in this node's Node object."""

    family: Family
    ip: IPAddress


def choose(
    family: Family,
    *,
    internal: IPAddress | None,
    configured: IPAddress | None,
    route_source: IPAddress | None,
    devices: Iterable[Device],
) -> NodeAddress | None:
    """Return the node's address of a family; None if it has none that others can reach.

    ``route_source`` is the source address of the default route.
    """
    if internal is not None:
        return NodeAddress(family, internal, Origin.NODE_OBJECT)
    if configured is not None:
        return NodeAddress(family, configured, Origin.SETTING)
    if route_source is not None and is_reachable(route_source):
        return NodeAddress(family, route_source, Origin.DEFAULT_ROUTE)
    found = (address.ip for device in uplinks(devices) for address in device.addresses)
    for ip in found:
        if Family.of(ip) is family and is_reachable(ip):
            return NodeAddress(family, ip, Origin.DEVICE)
    return None


# NodePort addresses, and source addresses of masqueraded packets.
#
# Source: the ``node-addresses`` table of Cilium (pkg/datapath/tables/node_address.go). Per family and device,
#         one address serves NodePorts: the Node object's if the device has it, else the first private one,
#         else the first public one. One address is primary, with a preference for public ones. The row ``*``
#         is the fallback for masquerading.

IPAddress = IPv4Address | IPv6Address
Prefix = IPv4Network | IPv6Network

LINK_SCOPE = 253
"""rtnetlink's RT_SCOPE_LINK."""

MAX_SCOPE = 252
"""Cilium's default of ``local-max-addr-scope``: addresses with a larger scope are not used."""

HOST_DEVICE = "cilium_host"
LOOPBACK = "lo"
FALLBACK = "*"
POD_PREFIX = "lxc"

_NOT_PUBLIC = tuple(
    map(
        ip_network,
        (
            *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
            *("192.0.0.0/24", "192.0.2.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24"),
            *("203.0.113.0/24", "224.0.0.0/4"),
            *("::1/128", "100::/64", "2001:db8::/48", "fc00::/7", "fe80::/10", "ff00::/8"),
        ),
    )
)


class DeviceAddress(msgspec.Struct, frozen=True, gc=False):
    """An address of a device, with its rtnetlink scope."""

    address: IPAddress
    scope: int = 0
    secondary: bool = False


class DeviceAddresses(msgspec.Struct, frozen=True, gc=False):
    """The addresses of a device. Programs are attached to ``selected`` devices."""

    name: str
    index: int
    type: str = "device"
    up: bool = True
    selected: bool = False
    addresses: tuple[DeviceAddress, ...] = ()


class AddressUse(msgspec.Struct, frozen=True, gc=False, order=True):
    """An address of the node and its uses, on a device or as the fallback."""

    device: str
    address: IPAddress
    node_port: bool = False
    primary: bool = False


def is_public(address: IPAddress) -> bool:
    """Whether the address is public (not in a private or reserved network)."""
    return not any(address in network for network in _NOT_PUBLIC if network.version == address.version)


def node_addresses(
    devices: Iterable[DeviceAddresses],
    node_ips: Sequence[IPAddress] = (),
    *,
    node_port_ranges: Sequence[Prefix] = (),
) -> list[AddressUse]:
    """Return the rows of Cilium's table, by device and address.

    ``node_ips`` are in the order of the Node object.
    """
    devices = sorted(devices, key=lambda one: one.index)
    found = [row for one in devices for row in _device_addresses(one, node_ips, node_port_ranges)]
    found += _fallbacks(devices)
    return sorted(found, key=lambda one: (one.device, one.address.version, one.address))


def masquerade_address(
    rows: Iterable[AddressUse], device: str, version: int, *, derive_from: str = ""
) -> IPAddress | None:
    """Return the source address of masqueraded packets that leave by a device.

    ``derive_from`` names another device for the address. It may be an address of ``lo`` if the node has no
    other, as in Cilium 1.17.
    """
    wanted = derive_from or device
    primary = {one.device: one.address for one in rows if one.primary and one.address.version == version}
    return primary.get(wanted, primary.get(FALLBACK))


def direct_routing_device(
    devices: Iterable[DeviceAddresses], node_ips: Sequence[IPAddress], wanted: str = ""
) -> str | None:
    """Return the device towards other nodes, or None.

    It is the first device that ``wanted`` names, the only selected one, or the one with the node's address.
    ``eth+`` matches all names that start with eth; the lowest index is the first.
    """
    selected = sorted((one for one in devices if one.selected), key=lambda one: one.index)
    if (named := next((one.name for one in selected if matches(wanted, one.name)), None)) is not None:
        return named
    if len(selected) == 1:
        return selected[0].name
    with_node_ip = (
        one.name for one in selected if any(address.address in node_ips for address in one.addresses)
    )
    return next(with_node_ip, None)


def _device_addresses(
    device: DeviceAddresses,
    node_ips: Sequence[IPAddress],
    node_port_ranges: Sequence[Prefix],
) -> list[AddressUse]:
    is_host, is_dummy = device.name == HOST_DEVICE, device.type == "dummy"
    if not (device.up or is_dummy) or not (is_host or is_dummy or device.selected or device.name == LOOPBACK):
        return []
    usable = [
        one.address
        for one in sorted(device.addresses, key=_sort_key)
        if (one.scope <= MAX_SCOPE or (is_host and one.scope == LINK_SCOPE)) and not one.address.is_loopback
    ]
    primary = {_choose(usable, version, node_ips, public_first=True) for version in (4, 6)}
    if is_host or not (device.up or node_port_ranges):
        node_port: set[IPAddress | None] = set()
    elif node_port_ranges:
        node_port = {one for one in usable if any(one in prefix for prefix in node_port_ranges)}
    else:
        node_port = {_choose(usable, version, node_ips, public_first=False) for version in (4, 6)}
    return [AddressUse(device.name, one, one in node_port, one in primary) for one in usable]


def _sort_key(address: DeviceAddress) -> tuple[object, ...]:
    return (
        address.secondary,
        address.scope,
        not is_public(address.address),
        address.address.version,
        int(address.address),
    )


def _choose(
    addresses: Sequence[IPAddress], version: int, node_ips: Sequence[IPAddress], *, public_first: bool
) -> IPAddress | None:
    own = [one for one in addresses if one.version == version]
    known = next((one for one in node_ips if one in own), None)
    preferred = [one for one in own if is_public(one) == public_first]
    return known or next(iter(preferred or own), None)


def _fallbacks(devices: Iterable[DeviceAddresses]) -> Iterable[AddressUse]:
    """Yield the best address per family on any device, up or down, except ours and pods'."""
    candidates = [
        (
            not device.selected,
            not is_public(one.address),
            one.scope,
            device.index,
            int(one.address),
            one.address,
        )
        for device in devices
        if device.name != HOST_DEVICE and not device.name.startswith(POD_PREFIX)
        for one in device.addresses
        if not one.secondary
    ]
    for version in (4, 6):
        own = [one for one in candidates if one[-1].version == version]
        if own:
            best = min(own, key=lambda one: one[:-1])[-1]
            if version == 6 or not best.is_loopback:
                yield AddressUse(FALLBACK, best, primary=True)


# Conversion of rows of the table ``devices``.


def device_addresses(device: Device, native: Collection[Device]) -> DeviceAddresses:
    """Return the addresses of a device. ``native`` are the devices with programs."""
    seen: set[int] = set()
    addresses = []
    for each in device.addresses:
        # The kernel lists the primary address first; IPv6 addresses are never secondary.
        secondary = each.version == 4 and each.version in seen
        addresses.append(DeviceAddress(each.ip, secondary=secondary))
        seen.add(each.version)
    return DeviceAddresses(
        device.name, device.ifindex, device.kind, device.up, device in native, tuple(addresses)
    )


# The source address of the default route.

OUTSIDE: Final = {
    Family.IPV4: (socket.AF_INET, "198.41.0.4"),
    Family.IPV6: (socket.AF_INET6, "2001:503:ba3e::2:30"),
}
"""Addresses on the Internet (a.root-servers.net), to which nodes only have the default route.

No packets are sent. Documentation addresses are unsuitable, because some nodes blackhole them.
"""
_PORT: Final = 9  # discard

_RTMGRP_IPV4_ROUTE: Final = 0x40
_RTMGRP_IPV6_ROUTE: Final = 0x400
_RTM_NEWROUTE, _RTM_DELROUTE = 24, 25
_PREFIX_LENGTH: Final = 17
"""Offset of an rtmsg's rtm_dst_len, after the header of 16 bytes."""
DEFAULT_ROUTES: Final = message_filter(
    (of_types(_RTM_NEWROUTE, _RTM_DELROUTE), Field(LOAD_BYTE, _PREFIX_LENGTH, (0,)))
)


class DefaultRoute:
    """Source addresses of the default route, by connecting a datagram socket."""

    def source(self, family: Family) -> IPAddress | None:
        """Return the source address of packets by the default route; None without such a route."""
        kind, outside = OUTSIDE[family]
        try:
            with closing(socket.socket(kind, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)) as probe:
                probe.connect((outside, _PORT))
                return ip_address(probe.getsockname()[0])
        except OSError:  # no route, or no such family on this node
            return None

    def hints(self) -> AsyncIterator[None]:
        """Yield once at start, then after every change of a default route."""
        return notifications(_RTMGRP_IPV4_ROUTE | _RTMGRP_IPV6_ROUTE, DEFAULT_ROUTES)


# The table of the node's addresses.


def address_table() -> Table[Family, NodeAddress]:
    """Return the ``node-addresses`` table, by family; NodeAddresses fills it."""
    return Table("node-addresses", key=lambda row: row.family)


def default_route() -> DefaultRoute:
    """Return this node's default route."""
    return DefaultRoute()


class NodeAddresses:
    """The node's own addresses. Dependents start once they are known."""

    table: Table[Family, NodeAddress]
    """The table ``node-addresses``, which this fills."""

    def __init__(
        self,
        agent: AgentConfig,
        settings: AddressSettings,
        table: Table[Family, NodeAddress],
        devices: Table[int, Device],
        route: DefaultRoute,
        internal: ReadTable[Family, InternalIP] | None = None,
        *,
        lifecycle: Lifecycle,
        jobs: Jobs,
        log: Logger,
    ) -> None:
        enabled_by_family = {Family.IPV6: agent.ipv6, Family.IPV4: agent.ipv4}
        self._families = [family for family, enabled in enabled_by_family.items() if enabled]
        self._settings = settings
        self.table = table
        """The table ``node-addresses``."""
        self._devices = devices
        self._route = route
        self._internal = internal
        self._log = log
        self._first = table.initializer("read devices and routes")
        lifecycle.append(Hook("find the node's addresses", self._start))
        jobs.observe("watch devices", devices.changes, self._on_change)
        jobs.observe("watch default routes", route.hints, self._on_change)
        if internal is not None:
            jobs.observe("watch the Node object", internal.changes, self._on_change)

    def get(self, family: Family) -> IPAddress | None:
        """Return the node's address of the family; None if it has none that others can reach."""
        found = self.table.get(family)
        return None if found is None else found.ip

    def all(self) -> dict[Family, IPAddress]:
        """Return the node's addresses: IPv6, then IPv4."""
        return {family: ip for family in self._families if (ip := self.get(family)) is not None}

    async def _start(self) -> None:
        await self._devices.wait_initialized()
        self._refresh()
        self._first.done()
        present = {address.ip for device in self._devices.all() for address in device.addresses}
        for row in self.table.all():
            if row.origin is Origin.SETTING and row.ip not in present:
                self._log.warning(
                    f"{row.family}-node={row.ip} is on none of the node's devices: others may not reach it"
                )

    async def _on_change(self, _: object) -> None:
        self._refresh()

    def _refresh(self) -> None:
        devices = self._devices.all()
        with self.table.txn() as rows:
            for family in self._families:
                internal = self._internal.get(family) if self._internal is not None else None
                found = choose(
                    family,
                    internal=internal.ip if internal is not None else None,
                    configured=self._settings.address(family),
                    route_source=self._route.source(family),
                    devices=devices,
                )
                before = self.table.get(family)
                if found is not None:
                    rows.put(found)
                elif before is not None:
                    rows.delete(family)
                if found != before:
                    shown = f"{found.ip} ({found.origin})" if found is not None else "none"
                    self._log.info("address of the node", family=str(family), ip=shown)


cell = module(
    "node-addresses",
    "The node's own addresses",
    config(AddressSettings),
    provide(address_table, NodeAddresses),
    provide_private(default_route),
    invoke(NodeAddresses),
)
