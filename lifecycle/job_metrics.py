"""How often jobs ran, failed, and how long they took: as plain data, for whoever exports it.

Needs:  nothing.
Gives:  JobMetrics (injectable, whole hive) and its JobStats; Meter, with which a job counts.
"""

import time
from types import TracebackType
from typing import Literal

import anyio
import msgspec

__all__ = ["JobKind", "JobMetrics", "JobStats", "Meter"]

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
    """Runs going on: 0 or 1."""
    seconds: float
    """Duration of all runs that have ended."""
    last_seconds: float
    longest_seconds: float
    last_ended: float | None = None
    """When the last run ended, in seconds since the epoch."""


class Meter:
    """Counts the runs of one job: a run is a ``with`` block, one that raises has failed."""

    __slots__ = ("_began", "_last", "_last_ended", "_longest", "_runs", "_seconds", "_what", "failures")

    def __init__(self, module: str, name: str, kind: JobKind) -> None:
        self._what = (module, name, kind)
        self._began: float | None = None
        self._runs = self.failures = 0
        self._seconds = self._last = self._longest = 0.0
        self._last_ended: float | None = None

    def __enter__(self) -> None:
        self._began = anyio.current_time()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        began, self._began = self._began or 0.0, None
        if error is not None and not isinstance(error, Exception):  # cancelled: no run, and nobody's fault
            return
        self._runs += 1
        self.failures += error is not None
        self._last = anyio.current_time() - began
        self._seconds += self._last
        self._longest = max(self._longest, self._last)
        self._last_ended = time.time()

    def failed(self) -> None:
        """Count a failure that no block has seen."""
        self._runs += 1
        self.failures += 1
        self._last_ended = time.time()

    def stats(self) -> JobStats:
        """What was counted so far."""
        return JobStats(
            *self._what,
            self._runs,
            self.failures,
            int(self._began is not None),
            self._seconds,
            self._last,
            self._longest,
            self._last_ended,
        )


class JobMetrics:
    """The jobs of a hive that are there: those that ended by themselves too, unless added while it ran."""

    def __init__(self) -> None:
        self._meters: dict[Meter, None] = {}

    def snapshot(self) -> list[JobStats]:
        """Every job, in the order they were added."""
        return [meter.stats() for meter in self._meters]

    def meter(self, module: str, name: str, kind: JobKind) -> Meter:
        """Count a new job."""
        meter = Meter(module, name, kind)
        self._meters[meter] = None
        return meter

    def forget(self, meter: Meter) -> None:
        """The job is no more."""
        self._meters.pop(meter, None)
