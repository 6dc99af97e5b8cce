"""Runs, failures and durations of jobs, as plain data to export."""

import asyncio
import re
import time
from types import TracebackType
from typing import Literal

import msgspec

from lifecycle.errors import described
from lifecycle.hints.places import Place

__all__ = ["JobKind", "JobMetrics", "JobStats", "JobTotals", "Meter"]

JobKind = Literal["one_shot", "timer", "observe"]


class JobStats(msgspec.Struct, frozen=True):
    """One job since it was added. A run is one attempt or, for observed items, the work on one of them."""

    module: str
    name: str
    kind: JobKind
    runs: int
    """Ended runs, including failed ones."""
    failures: int
    running: int
    """Current runs: 0 or 1, for a pool up to its limit."""
    seconds: float
    """Total duration of all ended runs."""
    last_seconds: float
    longest_seconds: float
    last_ended: float | None = None
    """When the last run ended, in seconds since the epoch."""
    interval: float = 0.0
    """Seconds between runs; 0 for jobs without an interval."""
    retry_first: float = 0.0
    """Seconds before the first retry; the pause grows with each further one."""
    failures_in_a_row: int = 0
    last_error: str = ""
    """The error of the last run; empty if it succeeded."""
    last_succeeded: float | None = None
    last_failed: float | None = None
    """When a run last failed, in seconds since the epoch."""


class JobTotals(msgspec.Struct):
    """Jobs of a module with names that differ only by numbers, counted together, including ended ones."""

    runs: int = 0
    failures: int = 0
    running: int = 0
    """Current runs."""
    seconds: float = 0.0
    """Total duration of all ended runs."""

    def add(self, stats: JobStats) -> None:
        """Count one job more."""
        self.runs += stats.runs
        self.failures += stats.failures
        self.running += stats.running
        self.seconds += stats.seconds


class Meter:
    """Counts the runs of one job: a run is a ``with`` block, which has failed if it raises."""

    __slots__ = (
        "_began", "_in_a_row", "_kind", "_last", "_last_error", "_last_failed", "_last_succeeded", "_longest",
        "_running", "_runs", "_seconds", "_stats", "failures", "interval", "module", "name", "over", "place",
        "retry_first",
    )  # fmt: skip

    def __init__(self, module: str, name: str, kind: JobKind, place: Place | None = None) -> None:
        self.module = module
        self.name = name
        self.place = place
        """Where the job was added."""
        self.over = False
        """Whether the job has ended by itself."""
        self._kind: JobKind = kind
        self._began = 0.0
        self._running = 0
        self._runs = self.failures = 0
        self._seconds = self._last = self._longest = 0.0
        self._in_a_row = 0
        self._last_error = ""
        self._last_succeeded: float | None = None
        self._last_failed: float | None = None
        self.interval = self.retry_first = 0.0
        self._stats: JobStats | None = None
        """The counts as a value: made on use, reused until they change."""

    def __enter__(self) -> None:
        self._stats = None
        self._running += 1
        self._began = asyncio.get_running_loop().time()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ended(self._began, error)

    def begin(self) -> float:
        """Count the begin of a run that may overlap others. Returns its start time, for ended()."""
        self._stats = None
        self._running += 1
        return asyncio.get_running_loop().time()

    def ended(self, began: float, error: BaseException | None) -> None:
        """Count the end of a run, failed or not."""
        self._stats = None
        self._running -= 1
        if error is not None and not isinstance(error, Exception):  # cancelled: neither a run nor a failure
            return
        self._last = asyncio.get_running_loop().time() - began
        self._seconds += self._last
        self._longest = max(self._longest, self._last)
        if error is not None:
            self.failed(error)
            return
        self._runs += 1
        self._last_succeeded, self._last_error, self._in_a_row = time.time(), "", 0

    def failed(self, error: BaseException) -> None:
        """Count a failure."""
        self._stats = None
        self._runs += 1
        self.failures += 1
        self._in_a_row += 1
        self._last_failed, self._last_error = time.time(), described(error)

    def stats(self) -> JobStats:
        """Return the present counts; the same object until they change."""
        if self._stats is None:
            self._stats = JobStats(
                self.module,
                self.name,
                self._kind,
                self._runs,
                self.failures,
                self._running,
                self._seconds,
                self._last,
                self._longest,
                max(filter(None, (self._last_succeeded, self._last_failed)), default=None),
                self.interval,
                self.retry_first,
                self._in_a_row,
                self._last_error,
                self._last_succeeded,
                self._last_failed,
            )
        return self._stats


class JobMetrics:
    """The current jobs of a hive, including ended ones unless they were added while it ran."""

    def __init__(self) -> None:
        self._meters: dict[Meter, None] = {}
        self._removed: dict[tuple[str, str, JobKind], JobTotals] = {}
        self._observers: dict[Meter, object] = {}

    def snapshot(self) -> list[JobStats]:
        """Return all jobs, in the order in which they were added."""
        return [meter.stats() for meter in self._meters]

    def totals(self) -> dict[tuple[str, str, JobKind], JobTotals]:
        """By module, name and kind; a number in a name becomes ``N``. These counts only grow."""
        totals = {key: msgspec.structs.replace(removed) for key, removed in self._removed.items()}
        for meter in self._meters:
            _add(totals, meter.stats())
        return totals

    def observers(self) -> list[tuple[str, str, object]]:
        """Observers that jobs run, such as a Reconciler or its sweep: module, name of the job, observer."""
        return [(meter.module, meter.name, observer) for meter, observer in self._observers.items()]

    def observed_by(self, meter: Meter, observer: object) -> None:
        """Record that the job only runs this observer or one of its methods."""
        self._observers[meter] = observer

    def live(self, module: str, name: str) -> Place | None:
        """Where the current job of this name was added, if there is one."""
        live = (
            meter for meter in self._meters if (meter.module, meter.name, meter.over) == (module, name, False)
        )
        return next((meter.place for meter in live), None)

    def meter(self, module: str, name: str, kind: JobKind, place: Place | None = None) -> Meter:
        """Count a new job."""
        meter = Meter(module, name, kind, place)
        self._meters[meter] = None
        return meter

    def forget(self, meter: Meter) -> None:
        """Remove a job."""
        if meter in self._meters:
            del self._meters[meter]
            _add(self._removed, meter.stats())
        self._observers.pop(meter, None)


def _add(totals: dict[tuple[str, str, JobKind], JobTotals], stats: JobStats) -> None:
    key = (stats.module, re.sub(r"\d+(?![A-Za-z\d])", "N", stats.name), stats.kind)
    totals.setdefault(key, JobTotals()).add(stats)
