"""How often jobs ran and failed, and how long they took, as plain data to export."""

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
    """One job, since it was added. A run is a try, or, where items are observed, the work on one of them."""

    module: str
    name: str
    kind: JobKind
    runs: int
    """Runs that have ended, failed ones included."""
    failures: int
    running: int
    """Runs going on: 0 or 1, of a pool as many as there are."""
    seconds: float
    """Duration of all runs that have ended."""
    last_seconds: float
    longest_seconds: float
    last_ended: float | None = None
    """When the last run ended, in seconds since the epoch."""
    interval: float = 0.0
    """Seconds between runs; 0 for what does not run by the clock."""
    retry_first: float = 0.0
    """Seconds before the first try after a failure; it grows with each further one."""
    failures_in_a_row: int = 0
    last_error: str = ""
    """What the last run failed with, empty when it did not."""
    last_succeeded: float | None = None
    last_failed: float | None = None
    """When a run did so last, in seconds since the epoch."""


class JobTotals(msgspec.Struct):
    """The jobs of a module with one name but for its numbers, counted together; ended jobs still count."""

    runs: int = 0
    failures: int = 0
    running: int = 0
    """Runs going on now."""
    seconds: float = 0.0
    """Duration of all runs that have ended."""

    def add(self, stats: JobStats) -> None:
        """Count one job more."""
        self.runs += stats.runs
        self.failures += stats.failures
        self.running += stats.running
        self.seconds += stats.seconds


class Meter:
    """Counts the runs of one job: a run is a ``with`` block, one that raises has failed."""

    __slots__ = (
        "_began", "_in_a_row", "_kind", "_last", "_last_error", "_last_failed", "_last_succeeded", "_longest",
        "_running", "_runs", "_seconds", "_stats", "failures", "interval", "module", "name", "over", "place",
        "retry_first",
    )  # fmt: skip

    def __init__(self, module: str, name: str, kind: JobKind, place: Place | None = None) -> None:
        self.module = module
        self.name = name
        self.place = place
        """Where it was added."""
        self.over = False
        """Whether it has ended by itself."""
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
        """The counts as a value: made when asked for, reused until they change."""

    def __enter__(self) -> None:
        self._stats = None
        self._running += 1
        self._began = asyncio.get_running_loop().time()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ended(self._began, error)

    def begin(self) -> float:
        """Count a run that begins beside others; gives its beginning, for ended()."""
        self._stats = None
        self._running += 1
        return asyncio.get_running_loop().time()

    def ended(self, began: float, error: BaseException | None) -> None:
        """Count a run that has ended, by a failure or well."""
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
        """Count a failure, seen by a block or not."""
        self._stats = None
        self._runs += 1
        self.failures += 1
        self._in_a_row += 1
        self._last_failed, self._last_error = time.time(), described(error)

    def stats(self) -> JobStats:
        """What was counted so far; the same object until that changes."""
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
    """The jobs of a hive that are there: those that ended by themselves too, unless added while it ran."""

    def __init__(self) -> None:
        self._meters: dict[Meter, None] = {}
        self._removed: dict[tuple[str, str, JobKind], JobTotals] = {}
        self._observers: dict[Meter, object] = {}

    def snapshot(self) -> list[JobStats]:
        """Every job, in the order they were added."""
        return [meter.stats() for meter in self._meters]

    def totals(self) -> dict[tuple[str, str, JobKind], JobTotals]:
        """By module, name and kind; a number in a name reads ``N``. What is counted here only grows."""
        found = {what: msgspec.structs.replace(removed) for what, removed in self._removed.items()}
        for meter in self._meters:
            _add(found, meter.stats())
        return found

    def observers(self) -> list[tuple[str, str, object]]:
        """What jobs do nothing but run, such as a Reconciler or its sweep: module, name of the job, it."""
        return [(meter.module, meter.name, observer) for meter, observer in self._observers.items()]

    def observed_by(self, meter: Meter, observer: object) -> None:
        """The job does nothing but run this observer, or one of its methods."""
        self._observers[meter] = observer

    def live(self, module: str, name: str) -> Place | None:
        """Where the job of this name was added, if there is one that has not ended."""
        live = (one for one in self._meters if (one.module, one.name, one.over) == (module, name, False))
        return next((one.place for one in live), None)

    def meter(self, module: str, name: str, kind: JobKind, place: Place | None = None) -> Meter:
        """Count a new job."""
        meter = Meter(module, name, kind, place)
        self._meters[meter] = None
        return meter

    def forget(self, meter: Meter) -> None:
        """The job is removed."""
        if meter in self._meters:
            del self._meters[meter]
            _add(self._removed, meter.stats())
        self._observers.pop(meter, None)


def _add(totals: dict[tuple[str, str, JobKind], JobTotals], stats: JobStats) -> None:
    what = (stats.module, re.sub(r"\d+", "N", stats.name), stats.kind)
    totals.setdefault(what, JobTotals()).add(stats)
