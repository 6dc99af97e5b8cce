"""The eBPF programs that forward pods' packets, in the kernel and on interfaces.

Edge: compiled C (``bpf/``, made into ``objects/`` by ``build.py``) loaded onto the node's maps with libbpf.
Why:  programs are shared by all endpoints and differ only through maps, so adding a pod loads nothing, and an
      upgrade replaces the entries of one map: small dispatchers stay attached and jump to whatever generation
      is in force. What is in the kernel forwards on while no agent runs.
"""

from collections.abc import Iterable
from typing import Final

from cells.base import metrics
from cells.datapath.collector import ConntrackCollector
from cells.datapath.datapath import Datapath
from cells.datapath.settings import DatapathSettings, host_routing, service_programs
from lifecycle import Jobs, Logger, Member, config, invoke, module, provide, seconds

__all__ = ["DatapathWatchdog", "cell"]


# Sees to it that the programs stay in force, and pinned.
#
# Why: an attached program without the one it jumps to drops what pods send; without pins, the next start
#      would attach to every interface again.

INTERVAL: Final = seconds(30)


class DatapathWatchdog:
    """A job; what it cannot put right fails it, which shows as degraded, and is tried again."""

    def __init__(self, datapath: Datapath, jobs: Jobs, log: Logger) -> None:
        self.found = 0
        """Programs that were missing, so far."""
        self._datapath = datapath
        self._log = log
        jobs.timer("compare programs", self.compare, INTERVAL)

    async def compare(self) -> None:
        """Look at the entries and the pins, and put back what is missing."""
        if wrong := await self._datapath.repair():
            self.found += len(wrong)
            self._log.warning("programs were detached by others, attached again", programs=", ".join(wrong))


def watchdog_metrics(watchdog: DatapathWatchdog) -> Member[metrics.Collector]:
    """What the watchdog found, as a metric."""

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
