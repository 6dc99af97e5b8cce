"""The eBPF programs that forward pods' packets, in the kernel and on interfaces.

Edge: compiled C (``bpf/``, made into ``objects/`` by ``build.py``) loaded onto the node's maps with libbpf.
Needs:  AgentConfig, Maps, HostLinks.   Gives: Datapath, and Collector, which removes connections.
Why:    programs are shared by all endpoints and differ only through maps, so adding a pod loads nothing, and
        an upgrade replaces the entries of one map: small dispatchers stay attached and jump to whatever
        generation is in force. What is in the kernel forwards on while no agent runs.
"""

from collections.abc import Iterable

from cells.datapath.collector import Collected, Collector
from cells.datapath.datapath import TUNNEL_LINK, Datapath, HostPolicy
from cells.datapath.drivers import is_ours
from cells.datapath.generation import read_object
from cells.datapath.libbpf import LoadedObject, LoadError
from cells.datapath.settings import (
    AGGREGATION,
    PACKAGED_OBJECTS,
    DatapathSettings,
    HostRouting,
    MonitorNotifications,
    host_routing,
)
from cells.datapath.watchdog import DatapathWatchdog
from cells.observe import metrics
from lifecycle import Member, config, invoke, module, provide

__all__ = [
    "AGGREGATION",
    "PACKAGED_OBJECTS",
    "TUNNEL_LINK",
    "Collected",
    "Collector",
    "Datapath",
    "DatapathSettings",
    "DatapathWatchdog",
    "HostPolicy",
    "HostRouting",
    "LoadError",
    "LoadedObject",
    "MonitorNotifications",
    "cell",
    "host_routing",
    "is_ours",
    "read_object",
]


def watchdog_metrics(watchdog: DatapathWatchdog) -> Member[metrics.Collector]:
    """What the watchdog found, as a metric."""

    async def collect() -> Iterable[metrics.Family]:
        text = "Programs that someone else took out of force, or unpinned."
        return [metrics.counter("hive_datapath_watchdog_faults_total", text, watchdog.found)]

    return metrics.Collector("datapath-watchdog", collect)


cell = module(
    "datapath",
    "eBPF programs of the node",
    config(DatapathSettings),
    provide(Datapath, Collector, DatapathWatchdog, watchdog_metrics, host_routing),
    invoke(DatapathWatchdog),
)
