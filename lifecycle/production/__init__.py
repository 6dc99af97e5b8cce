"""What a hive has around it in production, as cells: the service manager, probes, metrics, reload, traces.

Needs:  a hive; for probes() the extra ``http``, for traces() the extra ``otel``.
Gives:  systemd(), loop_watchdog(); Phase, which says whether a hive starts, runs or stops.
"""

from lifecycle.hooks.phase import Phase, Progress
from lifecycle.production.loop_watch import LoopWatchdog, LoopWatchdogSettings, loop_watchdog
from lifecycle.production.systemd import ServiceManager, systemd

__all__ = [
    "LoopWatchdog",
    "LoopWatchdogSettings",
    "Phase",
    "Progress",
    "ServiceManager",
    "loop_watchdog",
    "systemd",
]
