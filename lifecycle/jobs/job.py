"""One job: its runs, its health, and whether a failure ends the hive or degrades its health."""

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import anyio
import msgspec

from lifecycle.errors import (
    BodyError,
    ExitRequestedError,
    HiveError,
    StopError,
    as_failure,
    is_garbage_collected,
)
from lifecycle.hints.places import caller
from lifecycle.hooks.checks import awaitable, check_seconds
from lifecycle.hooks.events import Events, JobEvent, JobStep
from lifecycle.hooks.pending import task_stack
from lifecycle.hooks.spans import span
from lifecycle.jobs.metrics import Meter
from lifecycle.process.health import Health
from lifecycle.process.logs import Logger

__all__ = ["Backoff", "Job", "ObserverHealth", "Work", "log_fields"]

Work = Callable[[], Awaitable[object]]


class Backoff(msgspec.Struct, frozen=True):
    """Pauses between retries, in seconds: growing up to a maximum, with a jitter of half."""

    first: float = 0.1
    factor: float = 2.0
    maximum: float = 60.0

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError unless the pauses are numbers that grow."""
        for name in ("first", "factor", "maximum"):
            check_seconds(getattr(self, name), f"{name} of a Backoff", caller())
        if self.factor < 1:
            raise ValueError(f"factor of a Backoff at {caller()} is {self.factor}: expected 1 or more")

    def pause(self, failures: int) -> float:
        """Return the pause after this number of failures in a row."""
        whole = min(self.maximum, self.first * self.factor ** min(failures - 1, 32))
        return whole * (0.5 + random.random() / 2)  # noqa: S311  # spreads load, guards no secret


class _EndOfHive(Exception):  # noqa: N818  # no fault of its own: it carries one out of the job's loop
    """The error of the work, as the cause, must end the hive."""


class Job:
    """One job, with counted runs and its health."""

    health: Health
    """Set once it has started."""

    def __init__(
        self,
        name: str,
        run: Callable[["Job"], Coroutine[Any, Any, None]],
        meter: Meter,
        health: Health,
        log: Logger,
        backoff: Backoff,
        forget: Callable[["Job"], None] | None,
        *,
        events: Events,
        is_cancelled: Callable[[], bool],
        end_hive: Callable[[Exception], None],
    ) -> None:
        self.name = name
        self.meter = meter
        self.backoff = backoff
        self.failures = 0
        """Number of failures in a row."""
        self.started = False
        self.drain = 0.0
        """Seconds for which it may continue after the stop has started."""
        self.items_left = 0
        """Number of unfinished items of a pool that was cancelled."""
        self._scope: anyio.CancelScope | None = None
        self._ending = False
        self._run = run
        self._parent = health
        self._log = log
        self._forget = forget
        self._events = events
        self._is_cancelled = is_cancelled
        self._end_hive = end_hive
        self._task: asyncio.Task[Any] | None = None

    async def run(self) -> None:
        """Run the job from its start to its end."""
        self.health, self.started = self._parent.child(self.name), True
        self._task = asyncio.current_task()
        try:
            with anyio.CancelScope() as self._scope:
                if self._ending:
                    self.end_soon()
                await self._run(self)
            if self.drain and self._scope.cancelled_caught:
                left = {"items_left": self.items_left} if self.items_left else {}
                self._log.warning("job cut off: its drain is over", job=self.name, drain=self.drain, **left)
        except _EndOfHive as end:
            failure = end.__cause__
            assert isinstance(failure, Exception)  # noqa: S101  # as it was raised
            self.meter.over = True
            self._record("ended the hive", self.failures, failure)
            self.health.degraded("ended the hive", failure)
            self._log.error("job ends the hive", job=self.name, **log_fields(failure))
            self._end_hive(failure)

    def span(self) -> AbstractContextManager[object]:
        """A span around one run."""
        return span(f"job {self.name}", {"lifecycle.module": self.meter.module, "lifecycle.job": self.name})

    def end_soon(self) -> None:
        """The stop has started: let the job end within its drain, or cancel it now."""
        self._ending = True
        if self._scope is None:  # it has not started
            return
        if self.drain:
            self._scope.deadline = anyio.current_time() + self.drain
        else:
            self._scope.cancel()

    def pending_status(self) -> list[str]:
        """Return a status line with what the job awaits, while it runs."""
        if self._task is None or self._task.done():
            return []
        return [
            f"job {self.name!r} has not ended",
            *(f"    {line}" for line in task_stack(self._task, _OURS)),
        ]

    async def attempt(self, work: Work, *, metered: bool = True) -> Exception | None:
        """Run `work` once; returns its error. Unless `metered`, the work counts its own failures."""
        counted = self.meter.failures
        try:
            if metered:
                with self.meter, self.span():
                    await awaitable(work(), work, "work")
            else:
                await work()
        except BaseException as error:  # jobs contain errors
            if self._is_cancelled() and isinstance(error, asyncio.CancelledError | StopError):
                raise  # an inner hive failed to stop: a retry could not report it
            if is_garbage_collected(self._task):
                raise
            failure = as_failure(error, f"job {self.name!r}")
        else:
            self.works()
            return None
        self.failures += 1
        if self.meter.failures == counted:
            self.meter.failed(failure)
        if isinstance(failure, ExitRequestedError | BodyError):
            raise _EndOfHive from failure
        await self._absorb_cancellation()
        return failure

    async def _absorb_cancellation(self) -> None:
        """Clear a cancellation by other code, so that it does not reach other jobs."""
        task = asyncio.current_task()
        while task is not None and task.cancelling() and not self._is_cancelled():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0)
            task.uncancel()

    async def attempt_again(self, work: Work, *, forgive: bool) -> Exception | None:
        """As attempt(). After a success, health recovers and, with `forgive`, pauses start small again."""

        def report_running() -> None:
            self.health.ok("running")
            if forgive:
                self.works()

        timer = asyncio.get_running_loop().call_later(self.backoff.maximum, report_running)
        try:
            return await self.attempt(work)
        finally:
            timer.cancel()

    async def pause(self, error: Exception, stopping: "anyio.Event | None" = None) -> None:
        """Report the failure and wait before the next run; return at once if `stopping` is set."""
        self.report(error)
        with anyio.move_on_after(self.backoff.pause(self.failures)):
            await (anyio.sleep_forever() if stopping is None else stopping.wait())

    def _record(self, step: JobStep, failures: int = 0, error: BaseException | None = None) -> None:
        self._events.emit(JobEvent(step, self.name, self.meter.module, failures, error))

    def works(self) -> None:
        """Reset failures after a success."""
        if self.failures:
            self._record("recovered", self.failures)
            self.failures = 0

    def report(self, error: Exception) -> None:
        """Log a failure after which the job is retried."""
        self._record("failed", self.failures, error)
        self.health.degraded("failed, will be tried again", error)
        self._log.warning(
            "job failed, will be tried again", job=self.name, failures=self.failures, **log_fields(error)
        )

    def report_item(self, error: Exception, failures: int, failing: int) -> None:
        """Report that the work on one item failed and will be retried; `failing` items do."""
        self.health.degraded(f"{failing} failed, will be tried again", error)
        self._log.warning(
            "item failed, will be tried again", job=self.name, failures=failures, **log_fields(error)
        )

    def done(self, message: str) -> None:
        """Report that the job has ended."""
        self._record("ended")
        self.health.stopped(message)
        self.meter.over = True
        if self._forget is not None:
            self._forget(self)


class ObserverHealth(Health):
    """Health of an observer, which handles failures itself: logs the first failure and the recovery."""

    __slots__ = ("_degraded", "_job", "_log")

    def __init__(self, job: Job, log: Logger) -> None:
        super().__init__(job.health._tree, job.health._module)  # noqa: SLF001  # in its place
        self._job, self._log, self._degraded = job.name, log, False

    def ok(self, message: str = "") -> None:
        """Report that all is well."""
        if self._degraded:
            self._log.info("job works again", job=self._job)
        self._degraded = False
        super().ok(message)

    def degraded(self, message: str, error: BaseException | None = None) -> None:
        """Report a failure that is being retried."""
        if not self._degraded:
            fields = log_fields(error) if isinstance(error, Exception) else {}
            self._log.warning("job degraded", job=self._job, reason=message, **fields)
        self._degraded = True
        super().degraded(message, error)


# frames outside of the job's work
_OURS = frozenset({__file__, str(Path(__file__).with_name("jobs.py"))})


def log_fields(error: Exception) -> dict[str, Any]:
    """Fields of a log line: one line for an error that the node causes, a traceback for a possible bug."""
    return {"error": str(error)} if isinstance(error, OSError | HiveError) else {"exc_info": error}
