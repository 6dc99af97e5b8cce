"""Jobs: work in the background that may fail and is tried again, and how often it did."""

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
