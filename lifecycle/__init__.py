"""A hive of dependency-injected cells: wired by type hints, checked whole, started and stopped in order."""

import gc
from typing import TYPE_CHECKING

_collecting = gc.isenabled()
gc.disable()  # imported objects stay: searching them for garbage takes a tenth of the time
try:
    from lifecycle.process import (  # first: imports structlog without rich
        Logger,
        configure_logging,
    )

    # isort: split
    from lifecycle.errors import (
        BuildError,
        Fault,
        GraphError,
        HiveError,
        HookTimeoutError,
        NotStartedError,
        SettingsError,
        StartError,
        StopError,
        UsageError,
        exit_code,
        explain,
    )
    from lifecycle.hints import Member, Named, results
    from lifecycle.hive import Hive, HiveView, InnerHive, Modules, nest
    from lifecycle.hooks import Events, Hook, Lifecycle, Promise, Shutdown
    from lifecycle.injection import (
        Cell,
        ModuleId,
        Profile,
        after,
        config,
        config_private,
        decorate,
        group,
        invoke,
        module,
        provide,
        provide_private,
        replace,
        supply,
    )
    from lifecycle.jobs import Backoff, JobMetrics, Jobs, Timer
    from lifecycle.process.health import Health, HealthStatus, HealthTree
    from lifecycle.settings import Duration, Secret, Settings, Sources, milliseconds, minutes, seconds
    from lifecycle.tables import BatchError, Change, Derived, ReadTable, Reconciler, Table, Tables, Target
finally:
    if _collecting:
        gc.enable()

if TYPE_CHECKING:
    from lifecycle.command import main

__all__ = [
    "Backoff",
    "BatchError",
    "BuildError",
    "Cell",
    "Change",
    "Derived",
    "Duration",
    "Events",
    "Fault",
    "GraphError",
    "Health",
    "HealthStatus",
    "HealthTree",
    "Hive",
    "HiveError",
    "HiveView",
    "Hook",
    "HookTimeoutError",
    "InnerHive",
    "JobMetrics",
    "Jobs",
    "Lifecycle",
    "Logger",
    "Member",
    "ModuleId",
    "Modules",
    "Named",
    "NotStartedError",
    "Profile",
    "Promise",
    "ReadTable",
    "Reconciler",
    "Secret",
    "Settings",
    "SettingsError",
    "Shutdown",
    "Sources",
    "StartError",
    "StopError",
    "Table",
    "Tables",
    "Target",
    "Timer",
    "UsageError",
    "after",
    "config",
    "config_private",
    "configure_logging",
    "decorate",
    "exit_code",
    "explain",
    "group",
    "invoke",
    "main",
    "milliseconds",
    "minutes",
    "module",
    "nest",
    "provide",
    "provide_private",
    "replace",
    "results",
    "seconds",
    "supply",
]


_MOVED = {
    "lifecycle.graph": "Graph",
    "lifecycle.hooks": "Event HookEvent JobEvent ModuleEvent",
    "lifecycle.injection": "Timing",
    "lifecycle.jobs": "JobStats Observer",
    "lifecycle.process": "log_level set_log_level",
    "lifecycle.settings": "Loaded MAC Option Quantity RenamedFrom Setting refuse",
    "lifecycle.tables": "BatchFailures Initializer LPM ObjectStatus PatchTarget RateLimit ReconcileError"
    " Snapshot Snapshots Sorted Statistics snapshot",
}
"""Names that were here in version 0.1, with the package that has them now. Removed in 0.3."""


def __getattr__(name: str) -> object:
    """Import `main` and moved names on demand: an agent that starts does not need them."""
    if name == "main":
        from lifecycle.command import main

        return main
    for package, names in _MOVED.items():
        if name in names.split():
            import warnings
            from importlib import import_module

            text = f"lifecycle.{name} is {package}.{name} since version 0.2"
            warnings.warn(text, DeprecationWarning, stacklevel=2)
            return getattr(import_module(package), name)
    raise AttributeError(f"module 'lifecycle' has no attribute {name!r}")
