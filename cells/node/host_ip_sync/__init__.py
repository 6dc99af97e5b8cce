"""The node claims its own addresses, for the datapath to know them; and the world, in the ipcache.

Reconciler: reads Table[Device] and the router's address, and claims them by LocalAddresses and Ipcache.
Needs:  LocalAddresses, Ipcache, Table[Device], Router.   Gives: HostIPSync; what needs it starts after the
        first run. The tables host-addresses and host-addresses-status tell what should be claimed, and
        what is.
Why:    the datapath takes an address for the node's, and its traffic for the host's, only by these entries.
"""

from cells.node.host_ip_sync.settings import HostIPSettings
from cells.node.host_ip_sync.sync import HostIPSync
from lifecycle import config, invoke, module, provide

__all__ = ["HostIPSync", "cell"]


cell = module(
    "host-ip-sync",
    "Addresses of the node in the datapath's maps",
    config(HostIPSettings),
    provide(HostIPSync),
    invoke(HostIPSync),
)
