"""The BPF maps of the node, pinned where Cilium's tools look for them; and the pool of policy maps.

It opens or makes the maps, and keeps them pinned; other cells fill them.
Why:    pinned maps outlive the agent, so a restart takes them over and loses no flow. Of a map with another
        layout or size the entries are taken over into a new one, or the start refuses; programs
        loaded earlier keep the old one until they are reloaded.

Settings: bpf-map-dynamic-size-ratio, bpf-ct-global-tcp-max, bpf-ct-global-any-max, bpf-policy-map-max,
bpf-nat-global-max, bpf-sock-rev-map-max, bpf-fragments-map-max, preallocate-bpf-maps, policy-map-pool.
"""

from collections.abc import Iterable

import anyio

from cells.base.metrics import Collector, MetricFamily, counter
from cells.maps.node_maps import Maps
from cells.maps.policy_maps import PolicyMaps
from cells.maps.specs import MapSettings, map_sizing
from cells.maps.watchdog import MapWatchdog
from lifecycle import Member, config, invoke, module, provide

__all__ = ["cell", "watchdog_cell"]


def map_metrics(maps: Maps, policies: PolicyMaps) -> Member[Collector]:
    """Maps as metrics."""
    one = anyio.CapacityLimiter(1)

    async def collect() -> Iterable[MetricFamily]:
        from cells.maps.metrics import families

        return await families(maps, policies, one)

    return Collector("maps", collect)


def watchdog_metrics(watchdog: MapWatchdog) -> Member[Collector]:
    """What the watchdog found, as a metric."""

    async def collect() -> Iterable[MetricFamily]:
        text = "Pins and policy maps that someone else removed."
        return [counter("hive_map_watchdog_faults_total", text, dict(watchdog.found), "what")]

    return Collector("map-watchdog", collect)


cell = module(
    "maps",
    "BPF maps and the pool of policy maps",
    config(MapSettings),
    provide(Maps, PolicyMaps, map_metrics, map_sizing),
)


watchdog_cell = module(
    "map-watchdog",
    "Repairs the pins of the maps",
    provide(MapWatchdog, watchdog_metrics),
    invoke(MapWatchdog),
)
"""For an agent with endpoints: who uses the maps alone has its own idea of policy maps."""
