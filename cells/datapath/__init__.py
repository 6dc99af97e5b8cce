"""The node's eBPF programs: loading, replacing and attaching them, and garbage collection of connections.

The compiled objects (``bpf/``, compiled into ``objects/`` by ``build.py``) are loaded onto the node's maps
with libbpf. All endpoints share the programs, which differ only through maps, so adding a pod loads nothing.
Small dispatchers stay attached and tail-call the active programs, so an upgrade only replaces the entries of
one map. The programs keep forwarding while no agent runs.
"""

from collections.abc import Iterable
from typing import Final

from cells.base import metrics
from cells.datapath.collector import ConntrackCollector
from cells.datapath.datapath import Datapath
from cells.datapath.settings import DatapathSettings, host_routing, service_programs
from lifecycle import Jobs, Logger, Member, config, invoke, module, provide, seconds

__all__ = ["DatapathWatchdog", "cell"]


# The watchdog. A dispatcher without its entry drops the pods' packets; without pins, the next start would
# attach to every interface again.

INTERVAL: Final = seconds(30)


class DatapathWatchdog:
    """Restore removed entries and pins of the programs, every 30 seconds.

    A repair that fails marks the job's health as degraded, and is retried.
    """

    def __init__(self, datapath: Datapath, jobs: Jobs, log: Logger) -> None:
        self.found = 0
        """Number of programs restored since the start."""
        self._datapath = datapath
        self._log = log
        jobs.timer("compare programs", self.compare, INTERVAL)

    async def compare(self) -> None:
        """Check the entries and pins, and restore missing ones."""
        if wrong := await self._datapath.repair():
            self.found += len(wrong)
            self._log.warning("programs were detached by others, attached again", programs=", ".join(wrong))


def watchdog_metrics(watchdog: DatapathWatchdog) -> Member[metrics.Collector]:
    """Export the watchdog's repairs as a metric."""

    async def collect() -> Iterable[metrics.MetricFamily]:
        text = "Programs that others detached or unpinned."
        return [metrics.counter("hive_datapath_watchdog_faults_total", text, watchdog.found)]

    return metrics.Collector("datapath-watchdog", collect)


cell = module(
    "datapath",
    "eBPF programs of the node",
    config(DatapathSettings),
    provide(Datapath, ConntrackCollector, DatapathWatchdog, watchdog_metrics, host_routing, service_programs),
    invoke(DatapathWatchdog),
)
