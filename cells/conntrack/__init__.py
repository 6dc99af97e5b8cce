"""Removes ended connections from the conntrack maps, at intervals that fit the traffic.

Job: walks the maps with programs in the kernel, off the event loop.
Needs:  Collector, ExposedEndpoints.   Gives: Table[ConntrackMap] (hive db show conntrack).
Why:    the datapath only renews lifetimes; without this, ended connections would push live ones out of full
        maps.

Settings: conntrack-gc-interval, conntrack-gc-max-interval.
"""

from cells.conntrack.gc import ConntrackGC, ConntrackMap, Walk, conntrack_table
from cells.conntrack.settings import ConntrackSettings
from cells.datapath import Collector
from lifecycle import config, invoke, module, provide, provide_private

__all__ = ["ConntrackGC", "ConntrackMap", "Walk", "cell"]


def walk(collector: Collector) -> Walk:
    """The node's conntrack maps."""
    return collector


def run(gc: ConntrackGC) -> None:
    """It is part of the agent though nobody waits for it."""
    del gc


cell = module(
    "conntrack",
    "Removal of ended connections",
    config(ConntrackSettings),
    provide(conntrack_table),
    provide_private(walk, ConntrackGC),
    invoke(run),
)
