"""Cells for daemons in production: service manager, probes and metrics, watchdog, traces, reload."""

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
