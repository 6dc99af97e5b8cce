"""Pod addresses of this node: a host-scope allocator over the ranges of each address family.

Controller: allocations in memory; endpoints keep theirs on disk and claim them again after a restart. The
        ranges in use are kept in pod-ranges.json in the state directory, which auto goes on with: pods keep
        their addresses though the node got another one.
Needs:  IpamSettings, AgentConfig, Table[Device] (for ranges that are auto); AssignedPodCIDRs, where somebody
        provides what Kubernetes has decided.   Gives: Ipam, Table[PodRange]; metrics.

Settings: ipam, ipv4-range, ipv6-range, ipv6-cluster-alloc-cidr, ipam-default-ip-pool.
"""

from collections.abc import Iterable

from cells.ipam.addresses import AddressRange, Family, IPAddress, IPNetwork, text_of
from cells.ipam.allocator import Allocation, Allocator, IpamError
from cells.ipam.assigned import AssignedPodCIDRs
from cells.ipam.expiration import EXPIRATION, Clock
from cells.ipam.kept import KeptRanges, kept_ranges
from cells.ipam.node_ipam import Ipam
from cells.ipam.ranges import PodRange
from cells.ipam.settings import IpamSettings, automatic_range, nested_range
from cells.observe.metrics import Collector
from cells.observe.metrics import Family as MetricFamily
from lifecycle import Member, Table, config, module, provide, provide_private

__all__ = [
    "EXPIRATION",
    "AddressRange",
    "Allocation",
    "Allocator",
    "AssignedPodCIDRs",
    "Clock",
    "Family",
    "IPAddress",
    "IPNetwork",
    "Ipam",
    "IpamError",
    "IpamSettings",
    "KeptRanges",
    "PodRange",
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


cell = module(
    "ipam",
    "Pod addresses",
    config(IpamSettings),
    provide(Ipam, pod_ranges, ipam_metrics),
    provide_private(Clock),
)
