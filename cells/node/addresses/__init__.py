"""The node's own addresses, one of each family: by which others know the node.

Source: fills Table[NodeAddress] (key: family) from the Node object, the settings, the kernel's default route
and the devices, in this order, and follows them.
Needs:  AgentConfig, AddressSettings, Table[Device]; ReadTable[InternalIP], if provided.
Gives:  NodeAddresses, Table[NodeAddress].
Why:    a node may have addresses on lo, several uplinks, or uplinks without addresses; which of them others
        reach it by follows from none of the devices alone.
"""

from cells.node.addresses.choice import InternalIP, NodeAddress, choose
from cells.node.addresses.kernel import DefaultRoute
from cells.node.addresses.of_devices import device_addresses
from cells.node.addresses.select import (
    AddressUse,
    DeviceAddress,
    DeviceAddresses,
    direct_routing_device,
    masquerade_address,
    node_addresses,
)
from cells.node.addresses.settings import AddressSettings
from cells.node.addresses.source import NodeAddresses, address_table, default_route
from lifecycle import config, invoke, module, provide, provide_private

__all__ = [
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


cell = module(
    "node-addresses",
    "The node's own addresses",
    config(AddressSettings),
    provide(address_table, NodeAddresses),
    provide_private(default_route),
    invoke(NodeAddresses),
)
