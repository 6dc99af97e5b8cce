"""The BPF maps of the node, pinned where Cilium's tools look for them; and the pool of policy maps.

It opens or makes the maps, and keeps them pinned; other cells fill them.
Why:    pinned maps outlive the agent, so a restart takes them over and loses no flow. Of a map with another
        layout or size the entries are taken over into a new one, or the start refuses; programs
        loaded earlier keep the old one until they are reloaded.

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


# The watchdog: maps stay pinned, and hive_policies leads to each endpoint's policy map. Without its pin a map
# works on until the agent ends; then the next one starts without what was in it.

INTERVAL: Final = seconds(30)
PIN, POLICY = "pin", "policy"
_index = struct.Struct("<I").pack


class MapWatchdog:
    """A job; what it cannot put right fails it, which shows as degraded, and is tried again."""

    def __init__(self, maps: Maps, policies: PolicyMaps, jobs: Jobs, log: Logger) -> None:
        self.found: Counter[str] = Counter({PIN: 0, POLICY: 0})
        """How often what was found wrong since the start."""
        self._maps = maps
        self._policies = policies
        self._log = log
        jobs.timer("compare pins", self.compare, INTERVAL)

    async def compare(self) -> None:
        """Look at every pin and every entry of hive_policies, and put right what differs. Raises OSError."""
        pinned = {path: table.id for path, table in self._pins().items()}
        for path in await to_thread.run_sync(unpinned, pinned):
            table = self._pins().get(path)
            if table is None or table.id != pinned[path]:
                continue  # it was given back meanwhile
            self.found[PIN] += 1
            self._log.warning("pin of a map was removed, created again", map=path.name)
            path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            replace_pin(table.fd, path)
        lost = await to_thread.run_sync(partial(enter_lost, self._maps.policies.id, self._policies.all()))
        for policy in lost:
            self.found[POLICY] += 1
            self._log.warning(
                "policy map was detached from its endpoint, attached again", endpoint=policy.endpoint_id
            )
            self._maps.epochs.advance(policy.endpoint_id)  # written by the thread

    def _pins(self) -> dict[Path, Map]:
        directory = self._maps.directory
        own = {directory / policy_name(each.endpoint_id): each.map for each in self._policies.used}
        return self._maps.pins() | own


def unpinned(wanted: Mapping[Path, int]) -> list[Path]:
    """Paths at which the map of that id is not pinned: for a worker thread, 10 us each."""
    return [path for path, number in wanted.items() if not _is_pinned(path, number)]


def _is_pinned(path: Path, number: int) -> bool:
    try:
        with open_map(path) as table:
            return table.id == number
    except BpfError:
        return False


def enter_lost(policies_id: int, policies: Collection[PolicyMap]) -> list[PolicyMap]:
    """Those that hive_policies did not lead to, entered again: waits for RCU when there are any.

    For a worker thread: opens the map again, by its id. Raises BpfError.
    """
    with map_by_id(policies_id, writable=True) as table:
        lost = [each for each in policies if table.lookup(_index(each.endpoint_id)) != _index(each.map.id)]
        if lost:
            table.update_batch([(_index(each.endpoint_id), _index(each.map.fd)) for each in lost])
    return lost


# The cells.


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
