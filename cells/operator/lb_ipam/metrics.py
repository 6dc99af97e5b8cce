"""What LB-IPAM tells of itself.

For:    the operator's metrics. Needs: LBIPAM, Metrics.   Gives: tell().
Source: Cilium 1.17, metrics of the operator: gauges, whatever their names end in.
"""

from __future__ import annotations

from collections.abc import Iterable

from cells.observe.metrics import Collector, Family, Metrics, gauge
from cells.operator.lb_ipam.service import LBIPAM
from lifecycle import Hook, Lifecycle

PREFIX = "cilium_operator_lbipam"


def tell(metrics: Metrics, ipam: LBIPAM, lifecycle: Lifecycle) -> None:
    """Tell it while this operator leads."""

    async def collect() -> Iterable[Family]:
        return families(ipam)

    collector = Collector("lb-ipam", collect)

    async def start() -> None:
        metrics.add([collector])

    async def stop() -> None:
        metrics.remove([collector])

    if ipam.active:
        lifecycle.append(Hook("report metrics", start, stop))


def families(ipam: LBIPAM) -> list[Family]:
    """All of it."""
    pools, found = ipam.pools, ipam.plan
    used = {one.name: float(found.used.get(one.name, 0)) for one in pools}
    reserved = {one.name: sum(len(each.reserved) for each in one.ranges) for one in pools}
    free = {one.name: float(one.size - reserved[one.name]) - used[one.name] for one in pools}
    grants = found.grants.values()
    conflicts = sum(bool(one.conflict) for one in pools)
    return [
        gauge(f"{PREFIX}_conflicting_pools_total", "Pools in conflict.", conflicts),
        gauge(f"{PREFIX}_ips_available_total", "Addresses that are free.", free, "pool"),
        gauge(f"{PREFIX}_ips_used_total", "Addresses that services have.", used, "pool"),
        gauge(f"{PREFIX}_services_matching_total", "Services that ask for addresses.", len(grants)),
        gauge(
            f"{PREFIX}_services_unsatisfied_total",
            "Services that have not all they ask for.",
            sum(not one.satisfied for one in grants),
        ),
    ]
