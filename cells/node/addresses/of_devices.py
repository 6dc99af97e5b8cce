"""Devices as the choice of the node's addresses sees them.

Needs: Device.   Gives: device_addresses().
"""

from __future__ import annotations

from collections.abc import Collection

from cells.node.addresses.select import DeviceAddress, DeviceAddresses
from cells.node.devices import Device


def device_addresses(device: Device, native: Collection[Device]) -> DeviceAddresses:
    """The addresses of a device. ``native``: the devices with programs."""
    seen: set[int] = set()
    addresses = []
    for each in device.addresses:
        # The kernel lists the primary address first; one of IPv6 is never secondary.
        secondary = each.version == 4 and each.version in seen
        addresses.append(DeviceAddress(each.ip, secondary=secondary))
        seen.add(each.version)
    return DeviceAddresses(
        device.name, device.ifindex, device.kind, device.up, device in native, tuple(addresses)
    )
