"""The node's addresses, by what they serve: NodePorts, masquerading, routes to other nodes.

Pure values; no cell yet: the tables of devices and of the node feed it.
Gives: node_addresses, masquerade_address, direct_routing_device and their types.
"""

from cells.node.node_addresses.select import (
    DeviceAddress,
    DeviceAddresses,
    NodeAddress,
    direct_routing_device,
    is_public,
    masquerade_address,
    node_addresses,
)

__all__ = [
    "DeviceAddress",
    "DeviceAddresses",
    "NodeAddress",
    "direct_routing_device",
    "is_public",
    "masquerade_address",
    "node_addresses",
]
