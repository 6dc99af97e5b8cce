"""Jobs: work in the background that may fail and is tried again.

Needs:  Health of the module.
Gives:  Jobs (injectable, module scoped), Timer.

A job begins when the hooks of the constructor that asked for Jobs have started, and is cancelled before they
stop. One that raises is contained: logged, reported as degraded, tried again after a growing pause. Only one
marked fatal ends the hive.
"""

import random
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import anyio
import anyio.abc
import msgspec

from lifecycle.health import Health
from lifecycle.logs import Logger
from lifecycle.shutdown import Shutdown

__all__ = ["Backoff", "Jobs", "Timer"]

Item = TypeVar("Item")
Work = Callable[[], Awaitable[object]]


class Backoff(msgspec.Struct, frozen=True):
    """Pauses between tries, in seconds: growing, with a jitter of half, up to a maximum."""

    first: float = 0.1
    factor: float = 2.0
    maximum: float = 60.0

    def pause(self, failures: int) -> float:
        """The pause after so many failures in a row."""
        whole = min(self.maximum, self.first * self.factor ** min(failures - 1, 32))
        return whole * (0.5 + random.random() / 2)  # noqa: S311  # spreads load, guards no secret


class Timer:
    """A job that runs again and again."""

    def __init__(self) -> None:
        self._triggered = anyio.Event()

    def trigger(self) -> None:
        """Run now instead of at the end of the interval; while it runs, once more right after."""
        self._triggered.set()

    async def wait(self, interval: float) -> None:
        """Until the interval is over or someone triggers."""
        with anyio.move_on_after(interval):
            await self._triggered.wait()
        self._triggered = anyio.Event()


class Jobs:
    """Starts jobs. Those added before the hive runs begin with it, later ones at once."""

    def __init__(self, owner: str, health: Health, log: Logger, shutdown: Shutdown, backoff: Backoff) -> None:
        self._owner = owner
        self._health = health
        self._log = log
        self._shutdown = shutdown
        self._backoff = backoff
        self._queued: list[tuple[str, Callable[[], Coroutine[Any, Any, None]]]] = []
        self._group: anyio.abc.TaskGroup | None = None
        self._over = False

    def one_shot(self, name: str, work: Work, *, retries: int | None = None, fatal: bool = False) -> None:
        """Run `work` until it returns once.

        It is tried again after every failure, at most `retries` times; None is without end, or not at all
        for a fatal job. When the tries are used up the job stays degraded, or, fatal, ends the hive.
        """
        tries = 0 if retries is None and fatal else retries

        async def run() -> None:
            health = self._health.child(name)
            health.ok("running")
            failures = 0
            while True:
                try:
                    await work()
                except Exception as error:  # noqa: BLE001  # containing them is what a job is for
                    failures += 1
                    if tries is not None and failures > tries:
                        health.degraded("failed for good", error)
                        self._log.error("job failed for good", job=name, tries=failures, exc_info=error)
                        if fatal:
                            self._shutdown.request(error)
                        return
                    await self._contain(name, health, error, failures)
                else:
                    health.stopped("done")
                    return

        self._add(name, run)

    def timer(self, name: str, work: Work, interval: float) -> Timer:
        """Run `work` every `interval` seconds, the first time after one interval or when triggered.

        The interval counts from the end of a run. After a failure the pause grows up to the interval.
        `math.inf` runs it on triggers only.
        """
        timer = Timer()

        async def run() -> None:
            health = self._health.child(name)
            health.ok("waiting")
            failures = 0
            pause = interval
            while True:
                await timer.wait(pause)
                pause = interval
                try:
                    await work()
                except Exception as error:  # noqa: BLE001  # containing them is what a job is for
                    failures += 1
                    pause = min(interval, self._backoff.pause(failures))
                    self._report(name, health, error, failures)
                else:
                    failures = 0
                    health.ok()

        self._add(name, run)
        return timer

    def observe(
        self, name: str, items: Callable[[], AsyncIterable[Item]], work: Callable[[Item], Awaitable[object]]
    ) -> None:
        """Await `work(item)` for each item of the iteration that `items()` makes.

        When the iteration or the work fails, a new iteration is made after a pause: let it begin with
        everything there is, as Table.changes does. The job ends when the iteration does.
        """

        async def run() -> None:
            health = self._health.child(name)
            health.ok("watching")
            failures = 0
            while True:
                try:
                    async with _closing(items()) as found:
                        async for item in found:
                            await work(item)
                            failures = 0
                            health.ok()
                except Exception as error:  # noqa: BLE001  # containing them is what a job is for
                    failures += 1
                    await self._contain(name, health, error, failures)
                else:
                    health.stopped("nothing more to watch")
                    return

        self._add(name, run)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The hook of the jobs: begins them, and cancels them at the end."""
        async with anyio.create_task_group() as group:
            self._group = group
            for name, run in self._queued:
                group.start_soon(run, name=f"{self._owner}: {name}")
            self._queued.clear()
            try:
                yield
            finally:
                self._over = True
                self._group = None
                group.cancel_scope.cancel()

    def _add(self, name: str, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if self._over:
            raise RuntimeError(f"job {name!r} of {self._owner}: the hive is stopping")
        if self._group is None:
            self._queued.append((name, run))
        else:
            self._group.start_soon(run, name=f"{self._owner}: {name}")

    async def _contain(self, name: str, health: Health, error: Exception, failures: int) -> None:
        self._report(name, health, error, failures)
        await anyio.sleep(self._backoff.pause(failures))

    def _report(self, name: str, health: Health, error: Exception, failures: int) -> None:
        health.degraded("failed, will be tried again", error)
        self._log.warning("job failed, will be tried again", job=name, failures=failures, exc_info=error)


@asynccontextmanager
async def _closing(items: AsyncIterable[Item]) -> AsyncIterator[AsyncIterable[Item]]:
    """Close an asynchronous generator in this task, not whenever it is collected."""
    try:
        yield items
    finally:
        if isinstance(items, AsyncGenerator):
            await items.aclose()
