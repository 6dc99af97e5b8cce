"""Which addresses of the node serve node ports, and which one it asks other nodes from.

Needs: nothing.   Gives: NodePortAddress, node_port_addresses(), direct_addresses().
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

import msgspec

from cells.node.addresses import AddressUse, device_addresses, direct_routing_device, node_addresses
from cells.node.devices import Device, native_uplinks

IPAddress = IPv4Address | IPv6Address
IPNetwork = IPv4Network | IPv6Network


class NodePortAddress(msgspec.Struct, frozen=True):
    """A row of the table ``node-port-addresses``."""

    ip: IPAddress
    device: str


class Selection(msgspec.Struct, frozen=True):
    """What decides about addresses."""

    ranges: Sequence[IPNetwork]
    """``nodeport-addresses``."""
    direct_device: str
    """``direct-routing-device``."""
    chosen: bool
    """Whether the setting ``devices`` names devices."""


def _uses(
    devices: Iterable[Device], node_ips: Sequence[IPAddress], selection: Selection
) -> tuple[list[AddressUse], str | None]:
    """The use of every address, and the device towards other nodes."""
    devices = list(devices)
    native = native_uplinks(devices, chosen=selection.chosen)
    rows = [device_addresses(each, native) for each in devices]
    direct = direct_routing_device(rows, node_ips, selection.direct_device)
    return node_addresses(rows, node_ips, node_port_ranges=selection.ranges), direct


def node_port_addresses(
    devices: Iterable[Device], node_ips: Sequence[IPAddress], selection: Selection
) -> Mapping[IPAddress, NodePortAddress]:
    """Where node ports are served, by address. ``node_ips``: by which others know the node."""
    uses, _ = _uses(devices, node_ips, selection)
    return {one.address: NodePortAddress(one.address, one.device) for one in uses if one.node_port}


def direct_device(devices: Iterable[Device], node_ips: Sequence[IPAddress], selection: Selection) -> str:
    """The device towards other nodes, empty if there is none."""
    return _uses(devices, node_ips, selection)[1] or ""


def direct_addresses(
    devices: Iterable[Device], node_ips: Sequence[IPAddress], selection: Selection
) -> Mapping[int, IPAddress]:
    """What packets to backends on other nodes come from, by family: 4, 6.

    Of the device towards other nodes the address that serves node ports, else its primary one, else the
    node's own.
    """
    uses, direct = _uses(devices, node_ips, selection)
    found: dict[int, IPAddress] = {}
    for version in (4, 6):
        own = [one for one in uses if one.device == direct and one.address.version == version]
        served = [one.address for one in own if one.node_port]
        primary = [one.address for one in own if one.primary]
        of_node = [one for one in node_ips if one.version == version]
        if candidates := [*served, *primary, *of_node]:
            found[version] = candidates[0]
    return found
