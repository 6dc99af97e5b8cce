"""Garbage collection of the conntrack and NAT maps, at intervals that adapt to the traffic.

The programs only extend lifetimes; without garbage collection, expired entries would push live ones out of
full LRU maps. ConntrackCollector walks the maps, off the event loop; the ``conntrack`` table and metrics show
the results.

Settings: conntrack-gc-interval, conntrack-gc-max-interval.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Final

import anyio
import msgspec

from cells.base.metrics import Collector as MetricsCollector
from cells.base.metrics import Histogram, MetricFamily, counter, gauge, histogram
from cells.datapath.collector import Collected, ConntrackCollector
from cells.observe.bootstrap import PodsExposed
from lifecycle import (
    Duration,
    Health,
    Jobs,
    Member,
    Settings,
    Table,
    after,
    config,
    invoke,
    module,
    provide,
    provide_private,
    seconds,
)

__all__ = ["ConntrackGC", "ConntrackMap", "Passes", "cell"]


# Settings.


class ConntrackSettings(Settings, frozen=True):
    """Settings of the conntrack cell."""

    conntrack_gc_interval: Duration = seconds(0)
    """Interval of conntrack garbage collection; 0: 10s to 12h, by how much the last pass removed."""

    conntrack_gc_max_interval: Duration = seconds(0)
    """Upper bound of the adaptive interval; 0: 12h."""

    def faults(self) -> Iterator[str]:
        for field in self.__struct_fields__:
            value = getattr(self, field)
            if value < 0 or 0 < value < 1:
                yield f"{field.replace('_', '-')}={value}: expected 0, or 1s and more"


# The adaptive interval.
#
# Source: Cilium 1.17, conntrack garbage collection.

START: Final = 300.0
SHORTEST: Final = 10.0
LONGEST: Final = 12 * 3600.0

MANY: Final = 0.25
"""Above this removed share the interval gets shorter."""
FEW: Final = 0.05
"""Below this removed share, except 0, the interval gets longer."""
MOST: Final = 0.9
"""Larger shares count as this one."""
GROWTH: Final = 1.5


def next_interval(expected: float, removed: float, actual: float | None = None) -> float:
    """Return the seconds until the next pass, after one that removed this share (0 to 1) of the fullest map.

    ``expected`` is the planned interval before the pass, ``actual`` the real one, None for the first pass.
    After a shorter interval, the share is scaled up. A share of 0 means that there is no traffic, and keeps
    the interval.
    """
    share = removed
    if actual is not None and 0 < actual < expected:
        share *= expected / actual
    if share > MANY:
        return max(whole(expected * (1 - min(share, MOST))), SHORTEST)
    if 0 < share < FEW:
        return min(whole(expected * GROWTH), LONGEST)
    return expected


def whole(seconds: float) -> float:
    """Round to a second, halves up."""
    return float(math.floor(seconds + 0.5))


# Passes over the maps.


class ConntrackMap(msgspec.Struct, frozen=True):
    """A row of the ``conntrack`` table: the last pass over a map, and totals. Times in seconds."""

    map: str
    max_entries: int
    seen: int
    alive: int
    deleted: int
    deleted_so_far: int
    passes: int
    at: float
    """End of the pass, in seconds since the epoch."""
    took: float
    interval: float
    """Time until the next pass."""


def conntrack_table() -> Table[str, ConntrackMap]:
    """Create the ``conntrack`` table, keyed by map."""
    return Table("conntrack", key=lambda row: row.map)


class Passes:
    """Statistics of the passes."""

    def __init__(self) -> None:
        self.durations = Histogram()
        """Of completed passes, in seconds."""
        self.failed = 0
        self.nat: dict[str, dict[tuple[str, str], int]] = {}
        """Entries of the last pass over a NAT map: by direction, alive or deleted."""


@after(PodsExposed)
class ConntrackGC:
    """Runs a pass after endpoints are restored, and then at adaptive intervals.

    A failed pass marks the health as degraded, and is retried with backoff.
    """

    def __init__(
        self,
        settings: ConntrackSettings,
        collector: ConntrackCollector,
        table: Table[str, ConntrackMap],
        passes: Passes,
        jobs: Jobs,
        health: Health,
    ) -> None:
        self._fixed = float(settings.conntrack_gc_interval)
        self._most = float(settings.conntrack_gc_max_interval)
        self._collector = collector
        self._table = table
        self._passes = passes
        self._health = health.child("passes")
        self._interval = self._fixed or self._capped(START)
        self._last: float | None = None
        jobs.observe("collect", self._due, self._pass)

    async def _due(self) -> AsyncIterator[None]:
        while True:
            yield
            await anyio.sleep(self._interval)

    async def _pass(self, _: None) -> None:
        began = anyio.current_time()
        try:
            found = await self._collector.collect()
        except Exception:
            self._passes.failed += 1
            raise
        actual = None if self._last is None else began - self._last
        self._last = began
        if not self._fixed:
            removed = max((one.deleted / one.max_entries for one in found), default=0.0)
            self._interval = self._capped(next_interval(self._interval, removed, actual))
        took = anyio.current_time() - began
        self._passes.durations.observe(took)
        self._count(found, took)

    def _capped(self, interval: float) -> float:
        return min(interval, self._most) if self._most else interval

    def _count(self, found: Sequence[Collected], took: float) -> None:
        with self._table.txn() as rows:
            for one in found:
                if one.map in _NAT:
                    self._passes.nat[one.map] = _by_direction(one)
                before = self._table.get(one.map)
                row = ConntrackMap(
                    *(one.map, one.max_entries, one.seen, one.alive, one.deleted),
                    deleted_so_far=one.deleted + (before.deleted_so_far if before else 0),
                    passes=1 + (before.passes if before else 0),
                    at=time.time(),
                    took=took,
                    interval=self._interval,
                )
                rows.put(row)
        seen, deleted = (sum(each) for each in ([one.seen for one in found], [one.deleted for one in found]))
        self._health.ok(f"{deleted} of {seen} connections expired; next pass in {Duration(self._interval)}")


# Passes over the conntrack maps as Cilium's metrics.
#
# Source: Cilium 1.17, cilium_datapath_conntrack_gc_*, cilium_datapath_nat_gc_entries, and
#         cilium_bpf_map_pressure of these maps.

_MAPS: Final = {
    "cilium_ct4_global": ("ipv4", "TCP"),
    "cilium_ct_any4_global": ("ipv4", "non-TCP"),
    "cilium_ct6_global": ("ipv6", "TCP"),
    "cilium_ct_any6_global": ("ipv6", "non-TCP"),
}
_NAT: Final = {"cilium_snat_v4_external": "ipv4", "cilium_snat_v6_external": "ipv6"}


def _by_direction(found: Collected) -> dict[tuple[str, str], int]:
    return {
        ("ingress", "alive"): found.ingress_alive,
        ("ingress", "deleted"): found.ingress_deleted,
        ("egress", "alive"): found.alive - found.ingress_alive,
        ("egress", "deleted"): found.deleted - found.ingress_deleted,
    }


def families(rows: Iterable[ConntrackMap], passes: Passes) -> Iterator[MetricFamily]:
    """Return the metrics of passes and entries."""
    all_maps = list(rows)
    found = {_MAPS[row.map]: row for row in all_maps if row.map in _MAPS}
    runs = {(*what, "completed"): row.passes for what, row in found.items()}
    runs |= {(*what, "uncompleted"): passes.failed for what in _MAPS.values()} if passes.failed else {}
    entries: dict[tuple[str, str, str], int] = {}
    for what, row in found.items():
        entries |= {(*what, "alive"): row.alive, (*what, "deleted"): row.deleted}
    labels = "family protocol status"
    yield counter(
        "cilium_datapath_conntrack_gc_runs_total",
        "Number of times that the conntrack garbage collector process was run",
        runs,
        labels,
    )
    yield gauge(
        "cilium_datapath_conntrack_gc_entries",
        "The number of alive and deleted conntrack entries at the end of a garbage collector run",
        entries,
        labels,
    )
    nat = {_NAT[row.map]: row for row in all_maps if row.map in _NAT}
    yield gauge(
        "hive_nat_gc_entries",
        "Alive and deleted entries of translated flows, two a flow, at the end of a garbage collector run",
        {
            (family, state): getattr(row, state)
            for family, row in nat.items()
            for state in ("alive", "deleted")
        },
        "family status",
    )
    yield gauge(
        "cilium_datapath_nat_gc_entries",
        "The number of alive and deleted nat entries at the end of a garbage collector run labeled by"
        " datapath family",
        {
            (_NAT[name], *which): entries
            for name, directions in passes.nat.items()
            for which, entries in directions.items()
        },
        "family direction status",
        on=False,
    )
    yield histogram(
        "cilium_datapath_conntrack_gc_duration_seconds",
        "Duration in seconds of the garbage collector process; one walk goes over all maps",
        {(*what, "completed"): passes.durations for what in found},
        labels,
    )
    yield gauge(
        "cilium_bpf_map_pressure",
        "Fill percentage of map, tagged by map name",
        {row.map.removeprefix("cilium_"): row.alive / row.max_entries for row in all_maps if row.alive},
        "map_name",
        fixed=True,
    )


def conntrack_metrics(table: Table[str, ConntrackMap], passes: Passes) -> Member[MetricsCollector]:
    """Export the passes as metrics."""

    async def collect() -> Iterable[MetricFamily]:

        return families(table.all(), passes)

    return MetricsCollector("conntrack", collect)


cell = module(
    "conntrack",
    "Removal of ended connections",
    config(ConntrackSettings),
    provide(conntrack_table, conntrack_metrics),
    provide_private(ConntrackGC, Passes),
    invoke(ConntrackGC),
)
