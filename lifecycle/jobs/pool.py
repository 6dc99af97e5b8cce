"""A queue of items that are processed in parallel, but in order for each key."""

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

import anyio

from lifecycle.errors import BodyError, ExitRequestedError, as_failure
from lifecycle.jobs.job import Backoff, Job

__all__ = ["Pool"]

Item = TypeVar("Item")


class Pool(Generic[Item]):
    """Queues items; put() never waits, so callers must bound their number."""

    def __init__(
        self,
        work: Callable[[Item], Awaitable[object]],
        at_once: int,
        key: Callable[[Item], Hashable] | None,
        backoff: Backoff,
    ) -> None:
        self._work = work
        self._at_once = at_once
        self._key = key
        self._backoff = backoff
        self._count = 0
        self._queues: dict[Hashable, deque[Item]] = {}
        """Items by key; the first of each is running or waits for its retry."""
        self._ready: deque[Hashable] = deque()
        """Keys without a running or waiting item."""
        self._changed = anyio.Event()
        self._failures: dict[Hashable, int] = {}
        self._busy: set[Hashable] = set()

    def __len__(self) -> int:
        """Number of queued and running items."""
        return sum(map(len, self._queues.values()))

    def put(self, item: Item) -> None:
        """Queue the item after the others of its key."""
        self._count += 1
        key = (self._count,) if self._key is None else self._key(item)
        if (queue := self._queues.get(key)) is not None:
            queue.append(item)
            return
        self._queues[key] = deque([item])
        self._free(key)

    async def empty(self) -> None:
        """Wait until all items are processed."""
        while self._queues:
            await self._changed.wait()

    async def run(self, job: Job, stopping: "anyio.Event") -> None:
        """Process items until it is stopping and all are processed."""
        self._ready = deque(self._queues)  # including items that were cancelled while running
        self._failures.clear()
        self._busy.clear()
        try:
            async with anyio.create_task_group() as group:
                for _ in range(self._at_once):
                    group.start_soon(self._worker, job, stopping)
                await stopping.wait()
                self._wake()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            job.items_left = len(self)

    async def _worker(self, job: Job, stopping: "anyio.Event") -> None:
        while not (stopping.is_set() and not self._queues):
            if not self._ready:
                await self._changed.wait()
                continue
            key = self._ready.popleft()
            self._busy.add(key)
            error = await self._attempt(self._queues[key][0], job)
            self._busy.discard(key)
            if error is None:
                self._done(key, job)
            else:
                self._try_again(key, error, job)

    async def _attempt(self, item: Item, job: Job) -> Exception | None:
        began = job.meter.begin()
        try:
            with job.span():
                await self._work(item)
        except BaseException as error:  # jobs contain errors
            job.meter.ended(began, error)
            if isinstance(error, asyncio.CancelledError) and anyio.current_effective_deadline() == -math.inf:
                raise
            failure = as_failure(error, f"job {job.name!r}")
            if isinstance(failure, ExitRequestedError | BodyError):
                raise failure from error
            return failure
        job.meter.ended(began, None)
        return None

    def _done(self, key: Hashable, job: Job) -> None:
        if self._failures.pop(key, None) is not None and not self._failures:
            job.health.ok()
        queue = self._queues[key]
        queue.popleft()
        if queue:
            self._free(key)
        else:
            del self._queues[key]
            self._wake()

    def _try_again(self, key: Hashable, error: Exception, job: Job) -> None:
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        job.report_item(error, failures, len(self._failures))
        asyncio.get_running_loop().call_later(self._backoff.pause(failures), self._free, key)

    def _free(self, key: Hashable) -> None:
        if key in self._queues and key not in self._ready and key not in self._busy:
            self._ready.append(key)
            self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()
