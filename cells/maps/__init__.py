"""The node's BPF maps, pinned where Cilium's tools expect them, and the pool of policy maps.

The module opens or creates the maps and keeps them pinned; other cells fill them. Pinned maps outlive the
agent, so a restart takes them over and loses no flow. If a map has another layout or size, its entries are
migrated to a new one, or the start fails; programs loaded earlier use the old map until they are replaced.

Settings: bpf-map-dynamic-size-ratio, bpf-ct-global-tcp-max, bpf-ct-global-any-max, bpf-policy-map-max,
bpf-nat-global-max, bpf-sock-rev-map-max, bpf-fragments-map-max, preallocate-bpf-maps, policy-map-pool.
"""

import struct
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

import anyio
from anyio import to_thread

from cells.base.metrics import Collector, MetricFamily, counter
from cells.maps.bpf import BpfError, replace_pin
from cells.maps.map import Map, map_by_id, open_map
from cells.maps.node_maps import Maps
from cells.maps.policy_map import PolicyMap
from cells.maps.policy_maps import PolicyMaps
from cells.maps.specs import MapSettings, map_sizing, policy_name
from lifecycle import Jobs, Logger, Member, config, invoke, module, provide, seconds

__all__ = ["MapWatchdog", "cell", "watchdog_cell"]


# The watchdog keeps the maps pinned and each policy map in hive_policies. A map without its pin works until
# the agent ends; then its entries are lost.

INTERVAL: Final = seconds(30)
PIN, POLICY = "pin", "policy"
_index = struct.Struct("<I").pack


class MapWatchdog:
    """Restore removed pins and entries of hive_policies, every 30 seconds.

    A repair that fails marks the job's health as degraded, and is retried.
    """

    def __init__(self, maps: Maps, policies: PolicyMaps, jobs: Jobs, log: Logger) -> None:
        self.found: Counter[str] = Counter({PIN: 0, POLICY: 0})
        """Number of repairs since the start, by kind."""
        self._maps = maps
        self._policies = policies
        self._log = log
        jobs.timer("compare pins", self.compare, INTERVAL)

    async def compare(self) -> None:
        """Check all pins and all entries of hive_policies, and restore those that differ. Raises OSError."""
        pinned = {path: table.id for path, table in self._pins().items()}
        for path in await to_thread.run_sync(find_unpinned, pinned):
            table = self._pins().get(path)
            if table is None or table.id != pinned[path]:
                continue  # released in the meantime
            self.found[PIN] += 1
            self._log.warning("pin of a map was removed, created again", map=path.name)
            path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            replace_pin(table.fd, path)
        lost = await to_thread.run_sync(
            partial(restore_entries, self._maps.policies.id, self._policies.all())
        )
        for policy in lost:
            self.found[POLICY] += 1
            self._log.warning(
                "policy map was detached from its endpoint, attached again", endpoint=policy.endpoint_id
            )
            self._maps.epochs.advance(policy.endpoint_id)  # the thread's own Map does not advance it

    def _pins(self) -> dict[Path, Map]:
        directory = self._maps.directory
        own = {directory / policy_name(each.endpoint_id): each.map for each in self._policies.used}
        return self._maps.pins() | own


def find_unpinned(wanted: Mapping[Path, int]) -> list[Path]:
    """Return the paths at which the map with this id is not pinned. For a worker thread: 10 us each."""
    return [path for path, number in wanted.items() if not _is_pinned(path, number)]


def _is_pinned(path: Path, number: int) -> bool:
    try:
        with open_map(path) as table:
            return table.id == number
    except BpfError:
        return False


def restore_entries(policies_id: int, policies: Collection[PolicyMap]) -> list[PolicyMap]:
    """Enter policy maps that are missing in hive_policies, and return them.

    Waits for RCU if it writes. For a worker thread: it opens the map again by its id. Raises BpfError.
    """
    with map_by_id(policies_id, writable=True) as table:
        lost = [each for each in policies if table.lookup(_index(each.endpoint_id)) != _index(each.map.id)]
        if lost:
            table.update_batch([(_index(each.endpoint_id), _index(each.map.fd)) for each in lost])
    return lost


# The cells.


def map_metrics(maps: Maps, policies: PolicyMaps) -> Member[Collector]:
    """Export the metrics of the maps."""
    one = anyio.CapacityLimiter(1)

    async def collect() -> Iterable[MetricFamily]:
        from cells.maps.metrics import families

        return await families(maps, policies, one)

    return Collector("maps", collect)


def watchdog_metrics(watchdog: MapWatchdog) -> Member[Collector]:
    """Export the watchdog's repairs as a metric."""

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
"""Separate from ``cell``: a process without endpoints that opens the maps must not repair policy maps."""
