"""Jobs: background work that is retried after failures.

A job begins after the hooks of the constructor that received Jobs have started, and is cancelled before they
stop. An error is contained: it is logged, reported as degraded health, and the job is retried after a growing
pause. An error of a fatal job ends the hive, as does any error that is not an Exception, such as that of
sys.exit().
"""

import math
import random
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Hashable,
)
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast, overload, runtime_checkable

import anyio

from lifecycle.hints.places import Place, caller
from lifecycle.hooks.checks import check_async, check_iterates, check_seconds
from lifecycle.hooks.events import Events
from lifecycle.hooks.pending import awaiting
from lifecycle.hooks.shutdown import Shutdown
from lifecycle.jobs.job import Backoff, Job, ObserverHealth, Work, log_fields
from lifecycle.jobs.metrics import JobKind, JobMetrics, JobStats
from lifecycle.jobs.pool import Pool
from lifecycle.process.health import Health
from lifecycle.process.logs import Logger

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

__all__ = ["Jobs", "Observer", "Timer"]

Item = TypeVar("Item")


class Observer(Protocol):
    """Watches something by itself and reports its own health; for example a Reconciler."""

    async def run(self, health: Health, /) -> None:
        """Watch until there is nothing more to watch. It is called again after an error."""


@runtime_checkable
class _ReturnsItems(Protocol):
    """An iteration that takes items back, as Table.changes does: it continues after a failure."""

    def put_back(self, item: Any, /) -> None:
        """Return the item, so that it comes again, merged with later changes."""


class Timer:
    """A job that runs repeatedly."""

    def __init__(self, debounce: float = 0.0) -> None:
        self._debounce = debounce
        self._triggered = anyio.Event()

    def trigger(self) -> None:
        """Run soon, without waiting for the end of the interval; if it runs now, run once more afterwards.

        Soon means at once or after the debounce pause: several triggers within it are one.
        """
        self._triggered.set()

    async def wait(self, interval: float) -> None:
        """Wait until the interval ends or a trigger comes."""
        with anyio.move_on_after(interval):
            await self._triggered.wait()
            if self._debounce:
                await anyio.sleep(self._debounce)
        self._triggered = anyio.Event()


class Jobs:
    """Starts jobs. Those added before the hive runs begin with it, later ones at once.

    The health of each job is reported under its name. Health and metrics of a job that is added later are
    removed when it is done, so there may be many, for example one for each endpoint. Two jobs of one name in
    a module are refused, except later ones: then one may begin while another is ending.
    """

    def __init__(
        self,
        owner: str,
        health: Health,
        log: Logger,
        shutdown: Shutdown,
        backoff: Backoff,
        metrics: JobMetrics | None = None,
        module: str = "",
        events: Events | None = None,
    ) -> None:
        self._owner = owner
        self._health = health
        self._log = log
        self._shutdown = shutdown
        self._backoff = backoff
        self._metrics = metrics or JobMetrics()
        self._module = module
        self._events = events or Events(log)
        self._queued: list[Job] = []
        self._jobs: dict[Job, None] = {}
        self._group: TaskGroup | None = None
        self._over = False
        self._stopping: anyio.Event | None = None
        self._forgotten = False

    def one_shot(
        self,
        name: str,
        work: Work,
        *,
        retries: int | None = None,
        fatal: bool = False,
        backoff: Backoff | None = None,
        drain: float = 0.0,
    ) -> None:
        """Run `work` until it returns once.

        The stop cancels it; with `drain`, it has that many seconds to return first, which it can observe with
        stopping(). The stop of the hooks waits for it, within the stop budget of the hive.

        It is retried after every failure, at most `retries` times; None means without limit, or never for a
        fatal job. After the last retry, the job stays degraded or, if fatal, ends the hive. A run that lasted
        longer than the longest pause counts as a success.
        """
        place = caller()
        check_async(work, f"job {name!r} of {self._owner}", place)
        check_seconds(drain, f"the drain of job {name!r} of {self._owner}", place, zero=True)
        if retries is not None and (isinstance(retries, bool) or not isinstance(retries, int) or retries < 0):
            text = f"retries of job {name!r} of {self._owner} at {place} are {retries!r}"
            raise ValueError(f"{text}: expected a whole number, 0 or more")
        tries = 0 if retries is None and fatal else retries

        async def run(job: Job) -> None:
            job.health.ok("running")
            error = await job.attempt(work)
            while error is not None:
                if tries is not None and job.failures > tries:
                    job.health.degraded("failed for good", error)
                    self._log.error("job failed for good", job=name, tries=job.failures, **log_fields(error))
                    job.meter.over = True
                    if fatal:
                        self._shutdown.request(error)
                    return
                await job.pause(error, self._stop_event())
                if self._over:
                    job.health.degraded("failed, and not tried again: the hive stops", error)
                    return
                error = await job.attempt_again(work, forgive=tries is None)
            job.done("done")

        self._add("one_shot", name, run, backoff, place).drain = drain

    def pool(
        self,
        name: str,
        work: Callable[[Item], Awaitable[object]],
        *,
        at_once: int = 8,
        key: Callable[[Item], Hashable] | None = None,
        backoff: Backoff | None = None,
        drain: float = 0.0,
    ) -> "Pool[Item]":
        """Run `work(item)` for each item that is put into the pool, up to `at_once` of them in parallel.

        Items of the same `key` run one after the other, in order. A failed item is retried after a growing
        pause, and delays only items of its key. At the stop, the pool has `drain` seconds to finish its
        items; without it, running work is cancelled. Raises ValueError if `at_once` is less than one.
        """
        place, subject = caller(), f"job {name!r} of {self._owner}"
        check_async(work, subject, place)
        check_seconds(drain, f"the drain of {subject}", place, zero=True)
        if isinstance(at_once, bool) or not isinstance(at_once, int) or at_once < 1:
            raise ValueError(
                f"at_once of {subject} at {place} is {at_once!r}: expected a whole number from 1 on"
            )
        pool: Pool[Item] = Pool(work, at_once, key, backoff or self._backoff)

        async def run(job: Job) -> None:
            job.health.ok("waiting")
            while (
                error := await job.attempt(lambda: pool.run(job, self._stop_event()), metered=False)
            ) is not None:
                await job.pause(error, self._stop_event())
            job.done("worked off")

        self._add("observe", name, run, backoff, place).drain = drain
        return pool

    async def stopping(self) -> None:
        """Wait until the hive or the module stops, in work with a `drain`."""
        await self._stop_event().wait()

    @property
    def drain(self) -> float:
        """Seconds that the slowest job may take after the stop has started."""
        return max((job.drain for job in self._jobs), default=0.0)

    def _stop_event(self) -> "anyio.Event":
        if self._stopping is None:
            self._stopping = anyio.Event()
            if self._over:
                self._stopping.set()
        return self._stopping

    def timer(
        self,
        name: str,
        work: Work,
        interval: float,
        *,
        debounce: float = 0.0,
        rest: float = 0.0,
        jitter: float = 0.0,
        backoff: Backoff | None = None,
    ) -> Timer:
        """Run `work` every `interval` seconds, first after one interval or a trigger.

        The interval counts from the end of a run and is lengthened at random by up to `jitter` times itself,
        so that many jobs do not run simultaneously. With `math.inf`, it runs on triggers only. A trigger runs
        it after `debounce` seconds, together with triggers that follow meanwhile, and at least `rest` seconds
        after the previous run. After a failure, the pause grows up to the interval. Raises ValueError if the
        interval is not positive or a pause is negative.
        """
        place, subject = caller(), f"job {name!r} of {self._owner}"
        check_async(work, subject, place)
        check_seconds(interval, f"the interval of {subject}", place)
        for option, value in {"debounce": debounce, "rest": rest, "jitter": jitter}.items():
            check_seconds(value, f"the {option} of {subject}", place, zero=True)
        timer = Timer(debounce)

        async def run(job: Job) -> None:
            job.health.ok("waiting")
            pause = interval
            while True:
                await timer.wait(pause * (1 + jitter * random.random()))  # noqa: S311  # spreads load
                pause = interval
                if (error := await job.attempt(work)) is not None:
                    job.report(error)
                    pause = min(interval, job.backoff.pause(job.failures))
                else:
                    job.health.ok()
                if rest:
                    await anyio.sleep(rest)
                    pause = max(0.0, pause - rest)

        job = self._add("timer", name, run, backoff, place)
        job.meter.interval = 0.0 if math.isinf(interval) else interval
        if (observer := getattr(work, "__self__", None)) is not None:  # a method such as reconciler.sweep
            self._metrics.observed_by(job.meter, observer)
        return timer

    @overload
    def observe(self, name: str, items: Observer, /, *, backoff: Backoff | None = None) -> None: ...
    @overload
    def observe(
        self,
        name: str,
        items: Callable[[], AsyncIterable[Item]],
        work: Callable[[Item], Awaitable[object]],
        *,
        backoff: Backoff | None = None,
    ) -> None: ...
    def observe(
        self,
        name: str,
        items: Callable[[], AsyncIterable[Item]] | Observer,
        work: Callable[[Item], Awaitable[object]] | None = None,
        *,
        backoff: Backoff | None = None,
    ) -> None:
        """Await `work(item)` for each item of the iteration that `items()` makes.

        If the work fails, an iteration that takes items back, such as Table.changes, continues after a pause:
        the changes come again, merged with later ones, and no deletion is lost. Any other iteration, and one
        that fails itself, is replaced by a new one, which should begin with all that exists. The job ends
        with the iteration. An Observer, such as a Reconciler, brings its own work.
        """
        place, subject = caller(), f"job {name!r} of {self._owner}"
        if work is not None:
            check_async(work, subject, place)
            check_iterates(items, subject, place)
        elif (watch := getattr(items, "run", None)) is None:
            raise TypeError(f"{subject} at {place}: {items!r} is not an Observer: it has no run(health)")
        else:
            check_async(watch, subject, place)

        async def run(job: Job) -> None:
            job.health.ok("watching")
            watch: Work
            if work is None:
                health = ObserverHealth(job, self._log)
                watch = lambda: cast("Observer", items).run(health)  # noqa: E731  # as short as it is
            else:
                iterations = _Iterations(cast("Callable[[], AsyncIterable[Item]]", items), work)
                watch = lambda: iterations.run(job)  # noqa: E731
            while (error := await job.attempt(watch, metered=work is None)) is not None:
                await job.pause(error)
            job.done("nothing more to watch")

        job = self._add("observe", name, run, backoff, place)
        if work is None:
            self._metrics.observed_by(job.meter, items)

    def metrics(self) -> list[JobStats]:
        """Runs, failures and durations of these jobs; JobMetrics, injectable, has those of the whole hive."""
        return [job.meter.stats() for job in self._jobs]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The hook of the jobs: begins them, and cancels them at the end."""
        try:
            with awaiting(self._unended):
                async with anyio.create_task_group() as group:
                    self._group = group
                    for job in self._queued:
                        group.start_soon(job.run, name=f"{self._owner}: {job.name}")
                    self._queued.clear()
                    try:
                        yield
                    finally:
                        self._over = True
                        self._group = None
                        if not self.drain:
                            group.cancel_scope.cancel()
                        else:
                            self._stop_event().set()
                            for job in self._jobs:
                                job.end_soon()
        except BaseExceptionGroup as errors:
            if len(errors.exceptions) == 1:  # an inner hive that failed to stop
                raise errors.exceptions[0] from None
            raise
        if self._forgotten:
            self.forget()

    def _unended(self) -> list[str]:
        """Return the jobs that still run, each with what it awaits."""
        return [line for job in self._jobs for line in job.pending_status()]

    def forget(self) -> None:
        """Remove health and metrics of ended jobs; the hive continues without them."""
        self._forgotten = True
        if self._group is None:
            for job in list(self._jobs):
                self._remove(job)

    def _add(
        self,
        kind: JobKind,
        name: str,
        run: Callable[[Job], Coroutine[Any, Any, None]],
        backoff: Backoff | None,
        place: Place,
    ) -> Job:
        if backoff is not None and not isinstance(backoff, Backoff):
            raise TypeError(f"backoff of job {name!r} at {place} is {backoff!r}: expected a Backoff")
        if self._over:
            raise RuntimeError(f"job {name!r} of {self._owner}: the hive is stopping")
        late = self._group is not None
        if not late and (existing := self._metrics.live(self._module, name)) is not None:
            module = self._module or self._owner
            raise ValueError(f"job {name!r} at {place}: {module} has one of this name, added at {existing}")
        meter = self._metrics.meter(self._module, name, kind, place)
        forget = self._remove if late else None
        meter.retry_first = (backoff or self._backoff).first
        job = Job(
            name,
            run,
            meter,
            self._health,
            self._log,
            backoff or self._backoff,
            forget,
            events=self._events,
            is_cancelled=lambda: self._over or anyio.current_effective_deadline() == -math.inf,
            end_hive=self._shutdown.request,
        )
        self._jobs[job] = None
        if self._group is None:
            self._queued.append(job)
        else:
            self._group.start_soon(job.run, name=f"{self._owner}: {name}")
        return job

    def _remove(self, job: Job) -> None:
        del self._jobs[job]
        self._metrics.forget(job.meter)
        if job.started and self._metrics.live(self._module, job.name) is None:
            job.health.remove()


class _Iterations(Generic[Item]):
    """The work on the items of an iteration, and of the iteration that replaces it after a failure."""

    def __init__(
        self, items: Callable[[], AsyncIterable[Item]], work: Callable[[Item], Awaitable[object]]
    ) -> None:
        self._items = items
        self._work = work
        self._current: AsyncIterable[Item] | None = None
        """The iteration that continues after a failure."""

    async def run(self, job: Job) -> None:
        """Work until the iteration ends. Raises its error or that of the work; call it again then."""
        iterable = self._current or self._items()
        self._current = iterable if isinstance(iterable, _ReturnsItems) else None
        async with _closing(iterable) as items:
            async for item in items:
                try:
                    with job.meter, job.span():
                        await self._work(item)
                except BaseException:
                    if isinstance(iterable, _ReturnsItems):
                        iterable.put_back(item)
                    raise
                job.works()
                job.health.ok()


@asynccontextmanager
async def _closing(items: AsyncIterable[Item]) -> AsyncIterator[AsyncIterable[Item]]:
    """Close an asynchronous generator in this task, not when it is collected."""
    try:
        yield items
    finally:
        if isinstance(items, AsyncGenerator):
            await items.aclose()
