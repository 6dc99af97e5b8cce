"""Metrics of the hive and its process: health, hooks, jobs, reconcilers, tables, event loop, memory.

``Metrics`` calls both functions at each scrape. Source: Cilium's hive and statedb metrics, and Prometheus's
process collector.
"""

from __future__ import annotations

import asyncio
import os
import resource
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from cells.base.metrics import Histogram, MetricFamily, counter, gauge, histogram
from lifecycle import HealthTree, JobMetrics, Profile, ReadTable, Reconciler, Tables
from lifecycle.process import BOUNDS, LoopLag, warning_counts

COARSE = 4
"""Number of the event loop's histogram buckets per bucket of the metric."""


def hive_families(
    health: HealthTree, jobs: JobMetrics, profile: Profile, tables: Tables
) -> Iterator[MetricFamily]:
    """Yield all metrics of the hive."""
    yield from _health(health)
    yield from _hooks(profile)
    yield from _jobs(jobs)
    yield from _reconcilers(jobs)
    yield from _tables(tables)
    yield from _loop()


def _health(health: HealthTree) -> Iterator[MetricFamily]:
    statuses = health.snapshot()
    levels = Counter(status.level for status in statuses)
    yield gauge(
        "cilium_hive_status",
        "Modules and their parts by health.",
        {level: levels[level] for level in ("ok", "degraded", "stopped")},
        "status",
    )
    degraded: Mapping[str, float] = {
        status.module: float(status.level == "degraded") for status in statuses if status.level != "unknown"
    }
    yield gauge(
        "cilium_hive_degraded_status", "Whether the module is degraded.", degraded, "module", on=False
    )


def _hooks(profile: Profile) -> Iterator[MetricFamily]:
    for kind, when in (("start", "started"), ("stop", "stopped")):
        took: dict[tuple[str, ...], float] = {}
        for timing in profile.timings:
            if timing.kind == kind:
                took[timing.module, timing.name] = timing.took
        yield gauge(
            f"hive_hook_{kind}_seconds",
            f"Seconds that each hook took when it last {when}.",
            took,
            "module hook",
        )


def _jobs(jobs: JobMetrics) -> Iterator[MetricFamily]:
    totals = jobs.totals()
    labels = "module job kind"
    yield counter(
        "hive_job_runs_total",
        "Runs of background jobs that have ended, failed ones included; N stands for any number.",
        {what: total.runs for what, total in totals.items()},
        labels,
    )
    yield counter(
        "hive_job_failures_total",
        "Runs of background jobs that have failed.",
        {what: total.failures for what, total in totals.items()},
        labels,
    )
    yield counter(
        "hive_job_seconds_total",
        "Time background jobs have run for.",
        {what: total.seconds for what, total in totals.items()},
        labels,
    )
    yield gauge(
        "hive_job_running",
        "Background jobs that run at this moment.",
        {what: total.running for what, total in totals.items()},
        labels,
    )


def _reconcilers(jobs: JobMetrics) -> Iterator[MetricFamily]:
    found = {module: one.statistics for module, _, one in jobs.observers() if isinstance(one, Reconciler)}
    failing = {module: one.failing for module, _, one in jobs.observers() if isinstance(one, Reconciler)}
    for name, text, values in (
        ("count", "Batches written.", {module: one.batches for module, one in found.items()}),
        ("errors_total", "Objects that failed.", {module: one.failures for module, one in found.items()}),
        ("prune_count", "Full reconciliations.", {module: one.sweeps for module, one in found.items()}),
        (
            "prune_errors_total",
            "Full reconciliations that failed.",
            {module: one.failed_sweeps for module, one in found.items()},
        ),
    ):
        yield counter(f"cilium_reconciler_{name}", text, values, "module_id", on=False)
    yield gauge(
        "cilium_reconciler_errors_current",
        "Objects that differ from their desired state and cannot be reconciled.",
        failing,
        "module_id",
        on=False,
    )
    yield counter(
        "hive_reconciler_drift_total",
        "Objects changed by other programs.",
        {module: one.drift for module, one in found.items()},
        "module_id",
    )


def _tables(tables: Tables) -> Iterator[MetricFamily]:
    known: list[ReadTable[Any, object]] = tables.all()
    names = Counter(table.name for table in known)
    alone = [table for table in known if names[table.name] == 1]
    yield gauge(
        "cilium_statedb_table_objects",
        "Rows of a table.",
        {table.name: len(table) for table in alone},
        "table",
        on=False,
    )
    yield gauge(
        "cilium_statedb_table_revision",
        "How often a table has changed.",
        {table.name: table.revision for table in alone},
        "table",
        on=False,
    )


def _loop() -> Iterator[MetricFamily]:
    lag = LoopLag.of(asyncio.get_running_loop())
    if lag is None:  # not our event loop
        return
    counts = lag.histogram.counts
    coarse = Histogram(BOUNDS[::COARSE])
    for position, count in enumerate(counts):
        coarse.counts[-(-position // COARSE)] += count
    coarse.sum = lag.seconds
    yield histogram(
        "hive_loop_stretch_seconds",
        "Seconds that the event loop was busy without a break while other tasks were ready.",
        coarse,
    )
    yield gauge("hive_loop_longest_seconds", "The longest time without a break since the start.", lag.longest)


# Metrics of the process, from the kernel.
#
# Source: Prometheus's process collector, proc_pid_stat(5), getrlimit(2).

_TICKS: Final = os.sysconf("SC_CLK_TCK")
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
# fields of /proc/self/stat, counted from behind the command's name
_USER, _SYSTEM, _STARTED, _VIRTUAL, _RESIDENT = 11, 12, 19, 20, 21


def process_families(prefix: str) -> Iterator[MetricFamily]:
    """Yield CPU time, memory, file descriptors and logged warnings; ``prefix`` begins every name."""
    fields = _stat()
    cpu = (int(fields[_USER]) + int(fields[_SYSTEM])) / _TICKS
    facts = {
        f"{prefix}_process_open_fds": ("Number of open file descriptors.", sum(1 for _ in os.scandir(_FDS))),
        f"{prefix}_process_max_fds": (
            "Maximum number of open file descriptors.",
            _limit(resource.RLIMIT_NOFILE),
        ),
        f"{prefix}_process_virtual_memory_bytes": ("Virtual memory size in bytes.", int(fields[_VIRTUAL])),
        f"{prefix}_process_virtual_memory_max_bytes": (
            "Maximum amount of virtual memory available in bytes.",
            _limit(resource.RLIMIT_AS),
        ),
        f"{prefix}_process_resident_memory_bytes": (
            "Resident memory size in bytes.",
            int(fields[_RESIDENT]) * _PAGE,
        ),
        f"{prefix}_process_start_time_seconds": (
            "Start time of the process since unix epoch in seconds.",
            _boot_time() + int(fields[_STARTED]) / _TICKS,
        ),
    }
    yield counter(
        f"{prefix}_process_cpu_seconds_total",
        "Total user and system CPU time spent in seconds.",
        cpu,
        fixed=True,
    )
    for name, (text, value) in facts.items():
        yield gauge(name, text, value, fixed=True)
    logged: dict[tuple[str, ...], float] = {}
    for (level, module), count in warning_counts().items():
        key = ("warning" if level == "warning" else "error", module.rpartition(".")[2] or "init")
        logged[key] = logged.get(key, 0) + count
    yield counter(
        f"{prefix}_errors_warnings_total", "Lines logged as error or warning.", logged, "level subsystem"
    )


_FDS: Final = Path("/proc/self/fd")


def _stat() -> list[str]:
    text = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
    return text.rpartition(")")[2].split()


def _boot_time() -> int:
    """Return the boot time in Unix seconds, from the kernel.

    Computed from two clocks, it would vary between scrapes.
    """
    with Path("/proc/stat").open(encoding="ascii") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("btime "))


def _limit(what: int) -> float:
    soft = resource.getrlimit(what)[0]
    return float(0xFFFFFFFFFFFFFFFF if soft == resource.RLIM_INFINITY else soft)
