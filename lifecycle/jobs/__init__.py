"""Jobs: background work that is retried after failures, and its metrics."""

from lifecycle.jobs.job import Backoff
from lifecycle.jobs.jobs import Jobs, Observer, Timer
from lifecycle.jobs.metrics import JobKind, JobMetrics, JobStats, JobTotals
from lifecycle.jobs.pool import Pool
from lifecycle.jobs.time_slice import TimeSlice, collector_paused

__all__ = [
    "Backoff",
    "JobKind",
    "JobMetrics",
    "JobStats",
    "JobTotals",
    "Jobs",
    "Observer",
    "Pool",
    "TimeSlice",
    "Timer",
    "collector_paused",
]
