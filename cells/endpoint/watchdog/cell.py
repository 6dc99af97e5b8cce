"""How the endpoint watchdog is put together.

Needs: the endpoint cell, Datapath, Maps, Sysctls.   Gives: cell.
"""

from collections.abc import Iterable

from cells.datapath import Datapath
from cells.endpoint.watchdog.kernel import EndpointKernel, Fault, KernelState
from cells.endpoint.watchdog.settings import WatchdogSettings
from cells.endpoint.watchdog.watchdog import EndpointWatchdog
from cells.maps import Maps
from cells.node.sysctl import Sysctls
from cells.observe.metrics import Collector, Family, counter
from lifecycle import Member, config, invoke, module, provide, provide_private


def endpoint_kernel(datapath: Datapath, maps: Maps, sysctls: Sysctls) -> EndpointKernel:
    """This node's."""
    return KernelState(datapath, maps, sysctls)


def watchdog_metrics(watchdog: EndpointWatchdog) -> Member[Collector]:
    """What was found, as a metric."""

    async def collect() -> Iterable[Family]:
        found = {fault.value: watchdog.found[fault] for fault in Fault}
        text = "Endpoints of which something in the kernel was changed by someone else."
        return [counter("hive_endpoint_watchdog_faults_total", text, found, "what")]

    return Collector("endpoint-watchdog", collect)


cell = module(
    "endpoint-watchdog",
    "Endpoints compared with what the kernel holds of them",
    config(WatchdogSettings),
    provide_private(endpoint_kernel),
    provide(EndpointWatchdog, watchdog_metrics),
    invoke(EndpointWatchdog),
)
