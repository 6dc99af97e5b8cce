"""Which of the node's addresses serve NodePorts, and which it speaks from.

Source: the ``node-addresses`` table of Cilium: one NodePort address per family and device, the one that
Kubernetes knows the node by if the device has it, else the first private one, else the first public one; and
one primary address, which prefers public ones. The row ``*`` is what masquerading falls back to.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_network

import msgspec

from cells.node.devices import matches

IPAddress = IPv4Address | IPv6Address
Prefix = IPv4Network | IPv6Network

LINK_SCOPE = 253
"""rtnetlink's RT_SCOPE_LINK."""

MAX_SCOPE = 252
"""``local-max-addr-scope``: addresses of a larger scope are the node's own business."""

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
    """A device as far as its addresses go. ``selected`` devices are those the datapath is attached to."""

    name: str
    index: int
    type: str = "device"
    up: bool = True
    selected: bool = False
    addresses: tuple[DeviceAddress, ...] = ()


class AddressUse(msgspec.Struct, frozen=True, gc=False, order=True):
    """An address of the node, on a device or as the fallback."""

    device: str
    address: IPAddress
    node_port: bool = False
    primary: bool = False


def is_public(address: IPAddress) -> bool:
    """Whether the address is meant for the whole world."""
    return not any(address in network for network in _NOT_PUBLIC if network.version == address.version)


def node_addresses(
    devices: Iterable[DeviceAddresses],
    node_ips: Sequence[IPAddress] = (),
    *,
    node_port_ranges: Sequence[Prefix] = (),
    max_scope: int = MAX_SCOPE,
) -> list[AddressUse]:
    """The rows of the table, by device and address. ``node_ips`` come in the order of the Node object."""
    devices = sorted(devices, key=lambda one: one.index)
    found = [row for one in devices for row in _of_device(one, node_ips, node_port_ranges, max_scope)]
    found += _fallbacks(devices)
    return sorted(found, key=lambda one: (one.device, one.address.version, one.address))


def masquerade_address(
    rows: Iterable[AddressUse], device: str, version: int, *, derive_from: str = ""
) -> IPAddress | None:
    """What packets that leave by a device come from; ``derive_from`` names another device to ask first.

    It may be one of ``lo``, where the node has no other, as in Cilium 1.17.
    """
    wanted = derive_from or device
    primary = {one.device: one.address for one in rows if one.primary and one.address.version == version}
    return primary.get(wanted, primary.get(FALLBACK))


def direct_routing_device(
    devices: Iterable[DeviceAddresses], node_ips: Sequence[IPAddress], wanted: str = ""
) -> str | None:
    """The device towards other nodes: the first that ``wanted`` names, the only one, or the one with the
    node's address. ``eth+`` names all devices that begin with eth; the first has the lowest index.
    """
    selected = sorted((one for one in devices if one.selected), key=lambda one: one.index)
    if (asked := next((one.name for one in selected if matches(wanted, one.name)), None)) is not None:
        return asked
    if len(selected) == 1:
        return selected[0].name
    with_node_ip = (
        one.name for one in selected if any(address.address in node_ips for address in one.addresses)
    )
    return next(with_node_ip, None)


def _of_device(
    device: DeviceAddresses,
    node_ips: Sequence[IPAddress],
    node_port_ranges: Sequence[Prefix],
    max_scope: int,
) -> list[AddressUse]:
    is_host, is_dummy = device.name == HOST_DEVICE, device.type == "dummy"
    if not (device.up or is_dummy) or not (is_host or is_dummy or device.selected or device.name == LOOPBACK):
        return []
    kept = [
        one.address
        for one in sorted(device.addresses, key=_order)
        if (one.scope <= max_scope or (is_host and one.scope == LINK_SCOPE)) and not one.address.is_loopback
    ]
    primary = {_pick(kept, version, node_ips, public_first=True) for version in (4, 6)}
    if is_host or not (device.up or node_port_ranges):
        node_port: set[IPAddress | None] = set()
    elif node_port_ranges:
        node_port = {one for one in kept if any(one in prefix for prefix in node_port_ranges)}
    else:
        node_port = {_pick(kept, version, node_ips, public_first=False) for version in (4, 6)}
    return [AddressUse(device.name, one, one in node_port, one in primary) for one in kept]


def _order(address: DeviceAddress) -> tuple[object, ...]:
    return (
        address.secondary,
        address.scope,
        not is_public(address.address),
        address.address.version,
        int(address.address),
    )


def _pick(
    addresses: Sequence[IPAddress], version: int, node_ips: Sequence[IPAddress], *, public_first: bool
) -> IPAddress | None:
    own = [one for one in addresses if one.version == version]
    known = next((one for one in node_ips if one in own), None)
    preferred = [one for one in own if is_public(one) == public_first]
    return known or next(iter(preferred or own), None)


def _fallbacks(devices: Iterable[DeviceAddresses]) -> Iterable[AddressUse]:
    """The best address of each family on any device but our own and those of pods, up or down."""
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
