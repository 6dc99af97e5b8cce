"""Pod addresses of this node: an allocator over the ranges of each address family, or of pools of them.

Controller: allocations in memory; endpoints keep theirs on disk and claim them again after a restart. The
        ranges in use are kept in pod-ranges.json in the state directory, which auto goes on with: pods keep
        their addresses though the node got another one.
        In mode multi-pool the ranges by pool are what this node's CiliumNode says; what it asks of pools and
        gives back is the table pod-pool-requests, which the CiliumNode is written from.
Needs:  IpamSettings, AgentConfig, Table[Device] (for ranges that are auto); AssignedPodCIDRs or
        AssignedPools, where somebody provides what is decided elsewhere, PodPools for what pods ask for.
Gives:  Ipam, Table[PodRange], Table[PoolRequest]; metrics.

Settings: ipam, ipv4-range, ipv6-range, ipv6-cluster-alloc-cidr, ipam-default-ip-pool,
        ipam-multi-pool-pre-allocation.
"""

from collections.abc import Iterable

from cells.ipam.addresses import AddressRange, Family, IPAddress, IPNetwork, text_of
from cells.ipam.allocator import Allocation, Allocator
from cells.ipam.assigned import AssignedPodCIDRs, AssignedPools, PodPools, PoolState
from cells.ipam.demand import PoolRequest
from cells.ipam.expiration import EXPIRATION, Clock
from cells.ipam.kept import KeptRanges, kept_ranges
from cells.ipam.node_ipam import Ipam
from cells.ipam.ranges import PodRange
from cells.ipam.refusals import IpamError, IpamLaterError
from cells.ipam.settings import IpamSettings, automatic_range, nested_range
from cells.observe.metrics import Collector
from cells.observe.metrics import Family as MetricFamily
from lifecycle import Member, Table, config, group, module, provide, provide_private

__all__ = [
    "EXPIRATION",
    "AddressRange",
    "Allocation",
    "Allocator",
    "AssignedPodCIDRs",
    "AssignedPools",
    "Clock",
    "Family",
    "IPAddress",
    "IPNetwork",
    "Ipam",
    "IpamError",
    "IpamLaterError",
    "IpamSettings",
    "KeptRanges",
    "PodPools",
    "PodRange",
    "PoolRequest",
    "PoolState",
    "automatic_range",
    "cell",
    "kept_ranges",
    "nested_range",
    "text_of",
]


def ipam_metrics(ipam: Ipam) -> Member[Collector]:
    """Addresses as metrics."""

    async def collect() -> Iterable[MetricFamily]:
        from cells.ipam.metrics import families

        return families(ipam)

    return Collector("ipam", collect)


def pod_ranges() -> Table[PodRange]:
    """The table ``pod-ranges``, by network; Ipam fills it."""
    return Table("pod-ranges", key=lambda row: row.network)


def pool_requests() -> Table[PoolRequest]:
    """The table ``pod-pool-requests``, by pool; Ipam fills it."""
    return Table("pod-pool-requests", key=lambda row: row.pool)


cell = group(
    module("ipam-settings", "Where pod addresses come from", config(IpamSettings)),
    module(
        "ipam",
        "Pod addresses",
        provide(Ipam, pod_ranges, pool_requests, ipam_metrics),
        provide_private(Clock),
    ),
)
