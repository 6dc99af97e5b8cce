"""Removes ended connections from the conntrack maps, at intervals that fit the traffic.

Job: walks the maps with programs in the kernel, off the event loop.
Needs:  Collector, ExposedEndpoints.   Gives: Table[ConntrackMap] (hive db show conntrack).
Why:    the datapath only renews lifetimes; without this, ended connections would push live ones out of full
        maps.

Settings: conntrack-gc-interval, conntrack-gc-max-interval.
"""

from collections.abc import Iterable

from cells.datapath import Collector
from cells.datapath.conntrack.gc import ConntrackGC, ConntrackMap, Passes, Walk, conntrack_table
from cells.datapath.conntrack.settings import ConntrackSettings
from cells.observe.metrics import Collector as MetricsCollector
from cells.observe.metrics import Family
from lifecycle import Member, Table, config, invoke, module, provide, provide_private

__all__ = ["ConntrackGC", "ConntrackMap", "Passes", "Walk", "cell"]


def walk(collector: Collector) -> Walk:
    """The node's conntrack maps."""
    return collector


def conntrack_metrics(table: Table[ConntrackMap], passes: Passes) -> Member[MetricsCollector]:
    """The passes as metrics."""

    async def collect() -> Iterable[Family]:
        from cells.datapath.conntrack.metrics import families

        return families(table.all(), passes)

    return MetricsCollector("conntrack", collect)


cell = module(
    "conntrack",
    "Removal of ended connections",
    config(ConntrackSettings),
    provide(conntrack_table, conntrack_metrics),
    provide_private(walk, ConntrackGC, Passes),
    invoke(ConntrackGC),
)
