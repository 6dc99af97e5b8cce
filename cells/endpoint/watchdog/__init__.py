"""Sees to it that the kernel still holds what endpoints need: programs on their links, rows in maps.

Controller: compares the ``endpoints`` table with the kernel, and has what differs built anew.
Needs:  Table[Endpoint], Regenerations, Datapath, Maps, Sysctls.   Gives: EndpointWatchdog.
Why:    a pod whose filter somebody removed sends what no policy allows, and nothing else would notice. The
        kernel tells of removed filters and of reverse path filters; everything is compared every 30 seconds.
"""

from cells.endpoint.watchdog.cell import cell
from cells.endpoint.watchdog.kernel import EndpointKernel, Fault
from cells.endpoint.watchdog.settings import WatchdogSettings
from cells.endpoint.watchdog.watchdog import EndpointWatchdog

__all__ = ["EndpointKernel", "EndpointWatchdog", "Fault", "WatchdogSettings", "cell"]
