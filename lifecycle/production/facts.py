"""Metrics of every hive."""

import time
from collections import Counter
from collections.abc import Iterator

from lifecycle.injection import Profile
from lifecycle.jobs import JobMetrics
from lifecycle.process import Family, HealthTree, counter, gauge, process_age, warning_counts
from lifecycle.tables import Reconciler, Tables

__all__ = ["hive_families"]

JOB_LABELS = "module job kind"


def hive_families(health: HealthTree, jobs: JobMetrics, profile: Profile, tables: Tables) -> Iterator[Family]:
    """Metrics of health, hooks, jobs, reconcilers, tables, the log and the process."""
    statuses = health.snapshot()
    levels = Counter(status.level for status in statuses)
    yield gauge(
        "lifecycle_health",
        "Modules and their parts by health.",
        {level: levels[level] for level in ("ok", "degraded", "stopped", "unknown")},
        "level",
    )
    degraded = {status.module: float(status.level == "degraded") for status in statuses}
    yield gauge("lifecycle_degraded", "Whether the module is degraded.", degraded, "module")
    took = {(timing.module, timing.name): timing.took for timing in profile.timings if timing.kind == "start"}
    yield gauge("lifecycle_hook_start_seconds", "What each hook took to start.", took, "module hook")
    yield from _jobs(jobs)
    yield from _tables(jobs, tables)
    lines = dict(warning_counts())
    yield counter("lifecycle_log_trouble_total", "Lines logged at warning and above.", lines, "level module")
    yield gauge("lifecycle_process_age_seconds", "Since the process began.", process_age())
    yield counter("lifecycle_process_cpu_seconds_total", "Processor time it has used.", time.process_time())


def _jobs(jobs: JobMetrics) -> Iterator[Family]:
    """Metrics of jobs; N replaces any number in a name, as there may be a job for each of many objects."""
    totals = jobs.totals()
    for name, text, values in (
        (
            "runs",
            "Runs of jobs that have ended, failed ones included.",
            [total.runs for total in totals.values()],
        ),
        ("failures", "Runs of jobs that have failed.", [total.failures for total in totals.values()]),
        ("seconds", "Time that jobs have run for.", [total.seconds for total in totals.values()]),
    ):
        series = dict(zip(totals, values, strict=True))
        yield counter(f"lifecycle_job_{name}_total", text, series, JOB_LABELS)
    running = {labels: total.running for labels, total in totals.items()}
    yield gauge("lifecycle_job_running", "Jobs that run at this moment.", running, JOB_LABELS)


def _tables(jobs: JobMetrics, tables: Tables) -> Iterator[Family]:
    all_tables = tables.all()
    names = Counter(table.name for table in all_tables)
    rows = {table.name: len(table) for table in all_tables if names[table.name] == 1}
    yield gauge("lifecycle_table_rows", "Rows of each table.", rows, "table")
    reconcilers = [
        (module, reconciler)
        for module, _, reconciler in jobs.observers()
        if isinstance(reconciler, Reconciler)
    ]
    for name, text, values in (
        (
            "batches",
            "Batches written.",
            {module: reconciler.statistics.batches for module, reconciler in reconcilers},
        ),
        (
            "failures",
            "Objects that failed.",
            {module: reconciler.statistics.failures for module, reconciler in reconcilers},
        ),
        (
            "drift",
            "Objects changed by someone else.",
            {module: reconciler.statistics.drift for module, reconciler in reconcilers},
        ),
    ):
        yield counter(f"lifecycle_reconciler_{name}_total", text, values, "module")
    failing = {module: reconciler.failing for module, reconciler in reconcilers}
    yield gauge("lifecycle_reconciler_failing", "Objects that differ from their rows.", failing, "module")
