"""What the agent counts and measures, in Prometheus's text form at ``prometheus-serve-addr``.

Edge: calls every cell's Collector for each scrape; off unless an address is set.
Needs:  MetricsSettings, AgentConfig, list[Member[Collector]], the hive's own counts.
Gives:  Metrics, Program; Collector, Family and Histogram, with which a cell tells its own.
Why:    names, labels and defaults are Cilium's, so that its dashboards and alerts go on working.

A cell contributes a Collector, which imports what makes the families only when it is asked:

    def ipam_metrics(ipam: Ipam) -> Member[Collector]:
        async def collect() -> Iterable[Family]:
            from cells.ipam.metrics import families

            return families(ipam)

        return Collector("ipam", collect)

Settings: prometheus-serve-addr, metrics.
"""

from cells.observe.metrics.family import Collector, Family, Histogram, counter, gauge, histogram, one_of
from cells.observe.metrics.metrics import Metrics, Program
from cells.observe.metrics.server import Exposition, MetricsServer, listen, tell_of_cells
from cells.observe.metrics.settings import Address, MetricsSettings
from lifecycle import config, invoke, module, provide

__all__ = [
    "Address",
    "Collector",
    "Exposition",
    "Family",
    "Histogram",
    "Metrics",
    "MetricsServer",
    "MetricsSettings",
    "Program",
    "cell",
    "counter",
    "gauge",
    "histogram",
    "listen",
    "one_of",
]

cell = module(
    "metrics",
    "Metrics in Prometheus's text form",
    config(MetricsSettings),
    provide(Metrics, MetricsServer),
    invoke(tell_of_cells),
)
