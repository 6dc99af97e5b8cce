"""Addresses as Cilium's metrics.

For:    Metrics. Needs: Allocator. Gives: families().
Source: Cilium 1.17, cilium_ipam_capacity, cilium_ipam_events_total, cilium_ip_addresses.
"""

from __future__ import annotations

from collections.abc import Iterator

from cells.ipam.allocator import Allocator
from cells.observe.metrics import Family, counter, gauge


def families(ipam: Allocator) -> Iterator[Family]:
    """How many addresses there are and who moved; of families that are on."""
    usage = ipam.usage()
    events = {
        (action, family.value): counts[family]
        for action, counts in (("allocate", ipam.allocated), ("release", ipam.released))
        for family in usage
    }
    yield gauge(
        "cilium_ipam_capacity",
        "Total number of IPs in the IPAM pool labeled by family",
        {family.value: capacity for family, (_, capacity) in usage.items()},
        "family",
    )
    yield counter(
        "cilium_ipam_events_total",
        "Number of IPAM events received labeled by action and datapath family type",
        events,
        "action family",
    )
    yield gauge(
        "cilium_ip_addresses",
        "Number of allocated IP addresses",
        {family.value: taken for family, (taken, _) in usage.items()},
        "family",
        fixed=True,
    )
