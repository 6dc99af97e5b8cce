"""The node's network devices and their addresses, as a table.

Source: watches rtnetlink, fills Table[Device] (key: ifindex). Pods' links (lxc*, tmp*) are left out.
Needs:  HostLinks, DeviceSettings.   Gives: Table[Device]; what needs it starts once the first list is in.
Why:    the pod range, the MTU and the host addresses in the datapath's maps follow from the devices, and
        change with them.
"""

from cells.devices.device import Device, addressed, pod_mtu, uplinks
from cells.devices.kernel import netlink_kernel
from cells.devices.settings import DeviceSettings
from cells.devices.source import device_table
from lifecycle import config, module, provide, provide_private

__all__ = ["Device", "addressed", "cell", "pod_mtu", "uplinks"]

cell = module(
    "devices",
    "Network devices of the node and their addresses",
    config(DeviceSettings),
    provide(device_table),
    provide_private(netlink_kernel),
)
