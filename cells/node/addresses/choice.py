"""Which of a node's addresses others know it by.

Needs: values.   Gives: NodeAddress, InternalIP, choose().
Source: Cilium 1.17, the node's primary addresses: the Node object's InternalIP, the option, the system.
"""

from collections.abc import Iterable
from enum import StrEnum

import msgspec

from cells.ipam import Family, IPAddress
from cells.node.addresses.settings import can_be_reached
from cells.node.devices import Device, uplinks


class Origin(StrEnum):
    """How an address came to be the node's."""

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
    """The address, None if the node has none of this family that others can reach.

    ``route_source``: what the kernel would send from over the default route.
    """
    if internal is not None:
        return NodeAddress(family, internal, Origin.NODE_OBJECT)
    if configured is not None:
        return NodeAddress(family, configured, Origin.SETTING)
    if route_source is not None and can_be_reached(route_source):
        return NodeAddress(family, route_source, Origin.DEFAULT_ROUTE)
    found = (address.ip for device in uplinks(devices) for address in device.addresses)
    for ip in found:
        if Family.of(ip) is family and can_be_reached(ip):
            return NodeAddress(family, ip, Origin.DEVICE)
    return None
