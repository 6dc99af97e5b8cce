"""Controllers as Cilium's metrics.

For:    Metrics. Needs: Controllers. Gives: families().
Source: Cilium 1.17, cilium_controllers_*.

The hive's other jobs, which the status shows in the same form, count among those that fail; their runs are
hive_job_runs_total.
"""

from __future__ import annotations

from collections.abc import Iterator

from cells.observe.controllers.controllers import Controllers
from cells.observe.metrics import Family, counter, gauge, histogram


def families(controllers: Controllers) -> Iterator[Family]:
    """How often controllers ran, how long that took, how many fail now."""
    yield counter(
        "cilium_controllers_runs_total",
        "Number of times that a controller process was run labeled by completion status",
        {status: spread.count for status, spread in controllers.runs.items()},
        "status",
    )
    yield histogram(
        "cilium_controllers_runs_duration_seconds",
        "Duration in seconds of the controller process labeled by completion status",
        controllers.runs,
        "status",
    )
    failing = sum(status.failures_in_a_row > 0 for status in controllers.all())
    yield gauge("cilium_controllers_failing", "Number of failing controllers", failing, fixed=True)
