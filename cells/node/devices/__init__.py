"""The node's network devices and their addresses, as a table.

Source: watches rtnetlink, fills Table[Device] (key: ifindex). Pods' links (lxc*, tmp*) are left out.
Needs:  AgentConfig, HostLinks, DeviceSettings.
Gives:  Table[Device], PodMtu; what needs them starts once the first list is in.
Why:    the pod range, the MTU and the host addresses in the datapath's maps follow from the devices, and
        change with them.
"""

from cells.node.devices.device import OURS, Device, PodMtu, addressed, native_uplinks, uplinks
from cells.node.devices.kernel import netlink_kernel
from cells.node.devices.settings import DeviceSettings, matches
from cells.node.devices.source import device_table
from lifecycle import config, module, provide, provide_private

__all__ = [
    "OURS",
    "Device",
    "DeviceSettings",
    "PodMtu",
    "addressed",
    "cell",
    "matches",
    "native_uplinks",
    "uplinks",
]

cell = module(
    "devices",
    "Network devices of the node and their addresses",
    config(DeviceSettings),
    provide(device_table, PodMtu),
    provide_private(netlink_kernel),
)
