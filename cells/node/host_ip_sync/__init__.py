"""The node's own addresses in cilium_lxc; they and the world as claims in the ipcache.

Reconciler: reads Table[Device] and the router's address; every change, all once a minute.
Needs:  Maps, Ipcache, Table[Device], Router.   Gives: HostIPSync; what needs it starts after the first run.
        The tables host-addresses and host-addresses-status tell what should be in the maps, and
        what is.
Why:    the datapath takes an address for the node's, and its traffic for the host's, only by these entries.
"""

from cells.node.host_ip_sync.kernel import host_maps
from cells.node.host_ip_sync.settings import HostIPSettings
from cells.node.host_ip_sync.sync import HostIPSync, HostMaps
from lifecycle import config, invoke, module, provide, provide_private

__all__ = ["HostIPSync", "HostMaps", "cell"]


cell = module(
    "host-ip-sync",
    "Addresses of the node in the datapath's maps",
    config(HostIPSettings),
    provide(HostIPSync),
    provide_private(host_maps),
    invoke(HostIPSync),
)
