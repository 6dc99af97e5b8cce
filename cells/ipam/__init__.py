"""Pod addresses of this node: a host-scope allocator over one IPv4 range.

Controller: allocations in memory; endpoints keep theirs on disk and claim them again after a restart.
Needs:  IpamSettings, Table[Device] (for ipv4-range=auto).   Gives: Ipam.

Settings: ipam, ipv4-range, ipam-default-ip-pool.
"""

from cells.ipam.addresses import AddressRange
from cells.ipam.allocator import Allocation, Allocator, IpamError
from cells.ipam.expiration import EXPIRATION, Clock
from cells.ipam.node_ipam import Ipam
from cells.ipam.settings import IpamSettings, automatic_range
from lifecycle import config, module, provide, provide_private

__all__ = [
    "EXPIRATION",
    "AddressRange",
    "Allocation",
    "Allocator",
    "Clock",
    "Ipam",
    "IpamError",
    "IpamSettings",
    "automatic_range",
    "cell",
]

cell = module("ipam", "Pod addresses", config(IpamSettings), provide(Ipam), provide_private(Clock))
