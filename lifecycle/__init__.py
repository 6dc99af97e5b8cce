"""A hive of dependency-injected cells: wired by type hints, checked as a whole, started and stopped in order.

Needs:  nothing of networks; dependency-injector, anyio, structlog, msgspec.
Gives:  the names below. Compose cells (module, provide, invoke, ...) and run them with Hive.
"""

from typing import TYPE_CHECKING

from lifecycle.process import (  # first: it imports structlog without rich
    Logger,
    configure_logging,
    log_level,
    set_log_level,
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
from lifecycle.hooks import (
    Event,
    Events,
    Hook,
    HookEvent,
    JobEvent,
    Lifecycle,
    ModuleEvent,
    Promise,
    Shutdown,
)
from lifecycle.injection import (
    Cell,
    ModuleId,
    Profile,
    Timing,
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
from lifecycle.jobs import Backoff, JobMetrics, Jobs, JobStats, Observer, Stretch, Timer
from lifecycle.process.health import Health, HealthStatus, HealthTree
from lifecycle.settings import (
    MAC,
    Duration,
    Loaded,
    Option,
    Quantity,
    RenamedFrom,
    Secret,
    Setting,
    Settings,
    Sources,
    milliseconds,
    minutes,
    refuse,
    seconds,
)
from lifecycle.tables import (
    LPM,
    BatchError,
    BatchFailures,
    Change,
    Derived,
    Initializer,
    ObjectStatus,
    PatchTarget,
    RateLimit,
    ReadTable,
    ReconcileError,
    Reconciler,
    Snapshot,
    Snapshots,
    Sorted,
    Statistics,
    Table,
    Tables,
    Target,
    snapshot,
)

if TYPE_CHECKING:
    from lifecycle.command import main
    from lifecycle.graph import Graph

__all__ = [
    "LPM",
    "MAC",
    "Backoff",
    "BatchError",
    "BatchFailures",
    "BuildError",
    "Cell",
    "Change",
    "Derived",
    "Duration",
    "Event",
    "Events",
    "Fault",
    "Graph",
    "GraphError",
    "Health",
    "HealthStatus",
    "HealthTree",
    "Hive",
    "HiveError",
    "HiveView",
    "Hook",
    "HookEvent",
    "HookTimeoutError",
    "Initializer",
    "InnerHive",
    "JobEvent",
    "JobMetrics",
    "JobStats",
    "Jobs",
    "Lifecycle",
    "Loaded",
    "Logger",
    "Member",
    "ModuleEvent",
    "ModuleId",
    "Modules",
    "Named",
    "NotStartedError",
    "ObjectStatus",
    "Observer",
    "Option",
    "PatchTarget",
    "Profile",
    "Promise",
    "Quantity",
    "RateLimit",
    "ReadTable",
    "ReconcileError",
    "Reconciler",
    "RenamedFrom",
    "Secret",
    "Setting",
    "Settings",
    "SettingsError",
    "Shutdown",
    "Snapshot",
    "Snapshots",
    "Sorted",
    "Sources",
    "StartError",
    "Statistics",
    "StopError",
    "Stretch",
    "Table",
    "Tables",
    "Target",
    "Timer",
    "Timing",
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
    "log_level",
    "main",
    "milliseconds",
    "minutes",
    "module",
    "nest",
    "provide",
    "provide_private",
    "refuse",
    "replace",
    "results",
    "seconds",
    "set_log_level",
    "snapshot",
    "supply",
]


def __getattr__(name: str) -> object:
    """Graph and main, when asked for: an agent that starts has no use for them."""
    if name == "Graph":
        from lifecycle.graph import Graph

        return Graph
    if name == "main":
        from lifecycle.command import main

        return main
    raise AttributeError(f"module 'lifecycle' has no attribute {name!r}")
