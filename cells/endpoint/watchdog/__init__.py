"""Sees to it that the kernel still holds what endpoints need: programs on their links, rows in maps.

Controller: compares the ``endpoints`` table with the kernel, and has endpoints that differ regenerated.
Needs:  Table[Endpoint], Regenerations, Datapath, Maps, Sysctls.   Gives: EndpointWatchdog.
Why:    no policy restricts a pod whose filter was removed, and nothing else would notice. The
        kernel reports removed filters and changed reverse path filters; everything is compared every 30
        seconds.
"""

from cells.endpoint.watchdog.cell import cell
from cells.endpoint.watchdog.kernel import EndpointKernel, Fault
from cells.endpoint.watchdog.settings import WatchdogSettings
from cells.endpoint.watchdog.watchdog import EndpointWatchdog

__all__ = ["EndpointKernel", "EndpointWatchdog", "Fault", "WatchdogSettings", "cell"]
