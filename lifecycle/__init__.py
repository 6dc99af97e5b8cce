"""A hive of dependency-injected cells: wired by type hints, checked as a whole, started and stopped in order.

Needs:  nothing of networks; dependency-injector, anyio, structlog, msgspec.
Gives:  the names below. Compose cells (module, provide, invoke, ...) and run them with Hive.
"""

from typing import TYPE_CHECKING

from lifecycle.logs import (  # first: it imports structlog without rich
    Logger,
    configure_logging,
    log_level,
    set_log_level,
)

# isort: split
from lifecycle.cells import (
    Cell,
    config,
    decorate,
    group,
    invoke,
    module,
    provide,
    provide_private,
    replace,
    supply,
)
from lifecycle.derived import Derived
from lifecycle.durations import Duration, milliseconds, minutes, seconds
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
from lifecycle.health import Health, HealthStatus, HealthTree
from lifecycle.hive import Hive
from lifecycle.hooks import Hook, Lifecycle
from lifecycle.job_metrics import JobMetrics, JobStats
from lifecycle.jobs import Backoff, Jobs, Observer, Timer
from lifecycle.macs import MAC
from lifecycle.named import Member, Named, results
from lifecycle.nested import InnerHive, nest
from lifecycle.profile import Profile, Timing
from lifecycle.promise import Promise
from lifecycle.quantities import Quantity
from lifecycle.reconciler import Reconciler
from lifecycle.secrets import Secret
from lifecycle.settings import Formerly, Option, Settings, refuse
from lifecycle.shutdown import Shutdown
from lifecycle.sources import Loaded, Setting, Sources
from lifecycle.switch import Modules
from lifecycle.table import Change, Initializer, ReadTable, Snapshot, Table
from lifecycle.tables import Tables
from lifecycle.target import BatchError, ObjectStatus, ReconcileError, Statistics, Target
from lifecycle.view import HiveView

if TYPE_CHECKING:
    from lifecycle.graph import Graph

__all__ = [
    "MAC",
    "Backoff",
    "BatchError",
    "BuildError",
    "Cell",
    "Change",
    "Derived",
    "Duration",
    "Fault",
    "Formerly",
    "Graph",
    "GraphError",
    "Health",
    "HealthStatus",
    "HealthTree",
    "Hive",
    "HiveError",
    "HiveView",
    "Hook",
    "HookTimeoutError",
    "Initializer",
    "InnerHive",
    "JobMetrics",
    "JobStats",
    "Jobs",
    "Lifecycle",
    "Loaded",
    "Logger",
    "Member",
    "Modules",
    "Named",
    "NotStartedError",
    "ObjectStatus",
    "Observer",
    "Option",
    "Profile",
    "Promise",
    "Quantity",
    "ReadTable",
    "ReconcileError",
    "Reconciler",
    "Secret",
    "Setting",
    "Settings",
    "SettingsError",
    "Shutdown",
    "Snapshot",
    "Sources",
    "StartError",
    "Statistics",
    "StopError",
    "Table",
    "Tables",
    "Target",
    "Timer",
    "Timing",
    "UsageError",
    "config",
    "configure_logging",
    "decorate",
    "exit_code",
    "explain",
    "group",
    "invoke",
    "log_level",
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
    "supply",
]


def __getattr__(name: str) -> object:
    """Graph, when asked for: an agent that starts has no use for it."""
    if name == "Graph":
        from lifecycle.graph import Graph

        return Graph
    raise AttributeError(f"module 'lifecycle' has no attribute {name!r}")
