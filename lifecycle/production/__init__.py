"""What a hive has around it in production, as cells: the service manager, probes and metrics, its watchdog.

Needs:  a hive; for probes() the extra ``http``, for traces() the extra ``otel``.
Gives:  systemd(), probes(), reload(), traces(), loop_watchdog(); Phase, which shows whether a hive starts,
        runs or stops; Reload, which reads settings again; hive_families(), what the framework counts in
        every hive.
"""

from lifecycle.hive.reload import ChangedSetting, Reload, Reloaded
from lifecycle.hooks.phase import Phase, Progress
from lifecycle.production.facts import hive_families
from lifecycle.production.loop_watch import LoopWatchdog, LoopWatchdogSettings, loop_watchdog
from lifecycle.production.probes import ProbeServer, ProbeSettings, Readiness, probes
from lifecycle.production.reload import reload
from lifecycle.production.systemd import ServiceManager, systemd
from lifecycle.production.traces import traces

__all__ = [
    "ChangedSetting",
    "LoopWatchdog",
    "LoopWatchdogSettings",
    "Phase",
    "ProbeServer",
    "ProbeSettings",
    "Progress",
    "Readiness",
    "Reload",
    "Reloaded",
    "ServiceManager",
    "hive_families",
    "loop_watchdog",
    "probes",
    "reload",
    "systemd",
    "traces",
]
