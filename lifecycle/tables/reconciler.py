"""A reconciler: makes something outside equal to a table, and keeps it equal.

Everything is compared at the start and every `full_every` seconds (a sweep); in between, only changes of the
table are written. Failures are retried, each object after a pause of its own.

Nothing is touched before the table is initialized and `after` (a restore, for example) has returned: a table
that is empty at the start deletes nothing.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any, Generic, Literal, TypeVar, cast

import anyio
import msgspec

from lifecycle.errors import described
from lifecycle.hints.keys import type_name
from lifecycle.hooks.spans import span
from lifecycle.jobs.job import Backoff
from lifecycle.jobs.time_slice import TimeSlice
from lifecycle.process.health import Health
from lifecycle.tables.changes import Changes
from lifecycle.tables.rate_limit import RateLimit, TokenBucket
from lifecycle.tables.read_table import ReadTable
from lifecycle.tables.snapshot import Snapshot
from lifecycle.tables.table import Table
from lifecycle.tables.target import BatchError, ObjectStatus, ReconcileError, Statistics, Target, WriteThrough

__all__ = ["Reconciler"]

Key = TypeVar("Key", bound=Hashable)
Row = TypeVar("Row")
Item = TypeVar("Item")
Action = Literal["put", "drop"]
State = Literal["pending", "done", "failed"]

BATCH = 256
NOTED = 256
"""Maximum number of objects that are recorded in one transaction after a comparison."""
STEP = 16
"""Number of objects that are compared between two readings of the clock."""
SHRINK = 16
"""Factor by which batches shrink with every failure, so that one bad object does not delay others."""


class _Work(msgspec.Struct):
    """An object that may differ from its row."""

    due: float = 0.0
    failures: int = 0
    error: Exception | None = None


class Reconciler(Generic[Key, Row]):
    """Makes `target` equal to `source`; run it with ``jobs.observe("reconcile", reconciler)``.

    `full_every`, in seconds, may be math.inf: then it sweeps at the start and when triggered. `put_early`
    puts rows at once and delays only drops until the source is initialized: for rows that are useful before
    all of them are known. `rate_limit` delays calls of the target's put and drop; later changes are merged by
    key into larger batches.

    With `write_through`, the writer of the table calls :meth:`write_now`, so changes are not followed: the
    reconciler handles only what others change in the target and what the target refuses, and only refused
    objects have statuses. The target is a WriteThrough.
    """

    def __init__(
        self,
        source: ReadTable[Key, Row],
        target: Target[Key, Row, Any],
        *,
        full_every: float,
        name: str = "",
        after: Callable[[], Awaitable[object]] | None = None,
        put_early: bool = False,
        batch: int = BATCH,
        backoff: Backoff | None = None,
        rate_limit: RateLimit | None = None,
        write_through: bool = False,
    ) -> None:
        self.name = name or source.name
        needs = ["observe", "matches", "put", "drop", *(["write_now"] if write_through else [])]
        if lacks := [method for method in needs if not callable(getattr(target, method, None))]:
            kind = type_name(type(target))
            raise TypeError(f"reconciler {self.name}: its target {kind} has no {', '.join(lacks)}")
        self.statistics = Statistics()
        self._source = source
        self._target = target
        self._full_every = full_every
        self._after = after
        self._put_early = put_early
        self._batch = batch
        self._backoff = backoff or Backoff()
        self._write_through = write_through
        self._bucket = TokenBucket(rate_limit) if rate_limit is not None else None
        self._statuses: Table[Key, ObjectStatus] = Table(f"{self.name}-status", key=_key_of)
        self._watch: Changes[Key, Row] | None = None
        self._taken = -1  # the revision of the source up to which changes are in _work
        self._work: dict[Key, _Work] = {}
        self._may_drop = False
        self._swept = False
        self._pruned = False  # whether a sweep has searched for objects to drop
        self._sweep_due = -math.inf
        self._sweep_failures = 0
        self._sweep_error: Exception | None = None
        self._news = False
        self._waiters: list[tuple[Key, int, anyio.Event]] = []
        self._running = False

    @property
    def failing(self) -> int:
        """Number of objects with a failed last attempt."""
        return len(self._failed())

    @property
    def statuses(self) -> ReadTable[Key, ObjectStatus]:
        """The progress of each object, as a table."""
        return self._statuses

    async def wait_realised(self, key: Key) -> None:
        """Wait until the present row, its absence or a later one has reached the target.

        While an object fails, the wait continues; its status has the error.
        """
        revision = self._source.revision
        if not self._is_realised(key, revision):
            waiter = (key, revision, anyio.Event())
            self._waiters.append(waiter)
            try:
                await waiter[2].wait()
            finally:
                self._waiters.remove(waiter)

    def trigger(self) -> None:
        """Sweep now, or after the work in progress."""
        self._sweep_due = -math.inf
        if self._watch is not None:
            self._watch.wake()

    def write_now(self, keys: Iterable[Key]) -> None:
        """Write the rows with these keys, or their absence, at once; also before a first sweep.

        Raises BatchError; the next sweep repeats what failed.
        """
        if not self._write_through:
            raise RuntimeError(f"{self.name} follows its table: make it with write_through=True")
        get = self._source.get
        rows = {key: get(key) for key in keys}
        target = cast("WriteThrough[Key, Row]", self._target)
        try:
            target.write_now(rows)
        except BatchError as error:
            self._note_now(rows, error.failures)
            raise
        if self._work or len(self._statuses):
            self._note_now(rows, {})
        else:  # the usual case, for which pods wait
            removed = list(rows.values()).count(None)
            self.statistics.puts += len(rows) - removed
            self.statistics.drops += removed

    def _note_now(self, rows: Mapping[Key, Row | None], failures: Mapping[Key, Exception]) -> None:
        put = [key for key, row in rows.items() if row is not None]
        self._written("put", put, failures, pause=False)
        removed = [key for key, row in rows.items() if row is None]
        self._written("drop", removed, failures, pause=False)

    async def sweep(self) -> None:
        """Make everything equal once, before run() continues: for start hooks.

        Waits until it may write. Raises ReconcileError if objects failed, and the error of the target's
        observe().
        """
        if self._running:
            raise RuntimeError(f"{self.name} is being reconciled: trigger() a sweep")
        await self._wait_for_gate()
        await self._sweep()
        for _, action, keys in list(self._batches(math.inf)):
            await self._wait_for_rate(None)
            await self._write(action, keys)
        if failed := self._failed():
            raise ReconcileError(self.name, failed)

    async def run(self, health: Health) -> None:
        """Reconcile for ever, reporting to `health`. It may be called again after an error of the source."""
        self._running = True
        try:
            if self._may_drop:
                await self._loop(health)
            elif self._put_early:
                await self._loop_with_gate(health)
            else:
                waits = ", ".join(self._source.uninitialized_by) or "what comes before"
                health.ok(f"waiting for {self._source.name}: {waits}")
                await self._wait_for_gate()
                await self._loop(health)
        finally:
            self._running = False

    async def _wait_for_gate(self) -> None:
        if not self._may_drop:
            await self._source.wait_initialized()
            if self._after is not None:
                await self._after()
            self._may_drop = True
            self.trigger()

    async def _loop_with_gate(self, health: Health) -> None:
        failed: list[Exception] = []
        async with anyio.create_task_group() as group:

            async def cancel_on_failure(work: Callable[[], Awaitable[None]]) -> None:
                try:
                    await work()
                except Exception as error:  # noqa: BLE001  # raised below, not wrapped in a group
                    failed.append(error)
                    group.cancel_scope.cancel()

            group.start_soon(cancel_on_failure, self._wait_for_gate)
            group.start_soon(cancel_on_failure, partial(self._loop, health))
        raise failed[0]

    async def _loop(self, health: Health) -> None:
        while True:
            self._take()
            if self._sweep_due <= anyio.current_time():
                await self._try_sweep()
            self._news = False
            for failures, action, keys in list(self._batches(anyio.current_time())):
                if await self._wait_for_rate(health) and self._news:
                    break  # into larger batches
                await self._write(action, keys)
                if failures and self._news:  # new work precedes the remaining retries
                    break
            self._report(health)
            await asyncio.sleep(0)
            with anyio.move_on_after(self._next_due() - anyio.current_time()):
                await self._watching().wait()

    async def _wait_for_rate(self, health: Health | None) -> bool:
        """Wait until the rate limit allows a call. Returns whether that took any time."""
        if self._bucket is None or not (pause := self._bucket.pause()):
            return False
        if health is not None:
            self._report(health, held_up=True)
        began = anyio.current_time()
        while pause:
            await anyio.sleep(pause)
            pause = self._bucket.pause()
        self.statistics.held_up += anyio.current_time() - began
        self._take()
        return True

    def _watching(self) -> Changes[Key, Row]:
        if self._watch is None:
            self._watch = self._source.changes()
        return self._watch

    def _take(self) -> None:
        """Record changes.

        Rows are read after this without an await in between: otherwise a row that changes, is written and
        changes back would look unchanged, and stay.
        """
        if self._write_through:
            self._taken = self._source.revision
            return
        changed: dict[Key, Action] = {}
        for change in self._watching().take():
            key = change.key
            self._work[key] = _Work()  # earlier failures concerned another row
            changed[key] = "drop" if change.row is None else "put"
        self._taken = self._source.revision
        if changed:
            self._news = True
            now = time.time()
            with self._statuses.txn() as statuses:
                for key, action in changed.items():
                    statuses.put(ObjectStatus(key, action, "pending", now))
        self._wake_waiters()

    async def _try_sweep(self) -> None:
        try:
            await self._sweep()
        except Exception as error:  # noqa: BLE001  # any error of the target is reported and retried
            self._sweep_error = error
            self._sweep_failures += 1
            self._sweep_due = anyio.current_time() + self._backoff.pause(self._sweep_failures)

    async def _sweep(self) -> None:
        """Compare everything; differences become work."""
        self._sweep_due = math.inf  # later triggers request another sweep
        began, statistics = time.perf_counter(), self.statistics
        try:
            may_drop = self._may_drop
            actual = await self._target.observe()
            self._take()
            await self._compare(actual, self._source.snapshot(), may_drop=may_drop)
        except BaseException as error:
            self._sweep_due = -math.inf
            statistics.failed_sweeps += isinstance(error, Exception)
            raise
        statistics.sweeps += 1
        statistics.last_sweep = time.perf_counter() - began
        self._sweep_error, self._sweep_failures = None, 0
        self._sweep_due = min(self._sweep_due, anyio.current_time() + self._full_every)

    async def _compare(self, actual: Mapping[Key, Any], rows: Snapshot[Key, Row], *, may_drop: bool) -> None:
        """Replace the work by the differences; drops that are not yet allowed wait for a later sweep.

        In slices: ``rows`` is a snapshot. What changes meanwhile arrives as a later change, or is written
        through: then refused objects stay work.
        """
        work: dict[Key, _Work] = {}
        previous, matches = self._work, self._target.matches
        before = set(previous)
        time_slice = TimeSlice()
        for part in _parts(rows, STEP):
            for key, row, _ in part:
                if key not in actual or not matches(row, actual[key]):
                    work[key] = previous.get(key) or _Work()
            await time_slice.pause()
        present = rows.keys()
        for keys in _parts(list(actual) if may_drop else [], STEP):
            work |= {key: previous.get(key) or _Work() for key in keys if key not in present}
            await time_slice.pause()
        if self._pruned:
            self.statistics.drift += sum(key not in self._work for key in work)
        work |= {key: item for key, item in self._work.items() if key not in before}
        for item in work.values():
            item.due = -math.inf
        self._work = work
        self._swept = True
        self._pruned |= may_drop
        await self._note_compared(rows)
        self._wake_waiters()

    async def _note_compared(self, rows: Snapshot[Key, Row]) -> None:
        now, status_table, present = time.time(), self._statuses, rows.keys()
        time_slice = TimeSlice()
        noted = [] if self._write_through else [*present]
        for keys in _parts([*noted, *(key for key in self._work if key not in present)], NOTED):
            with status_table.txn() as statuses:
                for key in keys:
                    work, status = self._work.get(key), status_table.get(key)
                    if work is None:
                        action: Action = "put"
                        state: State = "done"
                    elif work.failures == 0:
                        action, state = "put" if key in present else "drop", "pending"
                    else:
                        continue
                    if status is None or status.state != state or status.action != action:
                        statuses.put(ObjectStatus(key, action, state, now))
            await time_slice.pause()
        for keys in _parts(list(status_table.keys()), NOTED):
            with status_table.txn() as statuses:
                for key in keys:
                    if key not in self._work and (self._write_through or key not in present):
                        statuses.delete(key)
            await time_slice.pause()

    def _batches(self, now: float) -> Iterator[tuple[int, Action, list[Key]]]:
        """Due work by number of failures: first what never failed, then by due time."""
        groups: dict[tuple[int, Action], list[Key]] = {}
        for key, work in self._work.items():
            if self._swept and work.due <= now:
                action: Action = "put" if key in self._source else "drop"
                if action == "put" or self._may_drop:
                    groups.setdefault((work.failures, action), []).append(key)
        again: list[tuple[float, tuple[int, Action, list[Key]]]] = []
        for (failures, action), keys in sorted(groups.items(), key=lambda item: item[0][1], reverse=True):
            size = max(1, self._batch // SHRINK ** min(failures, 8))
            for begin in range(0, len(keys), size):
                part = keys[begin : begin + size]
                if failures == 0:
                    yield 0, action, part
                else:
                    again.append((self._work[part[0]].due, (failures, action, part)))
        again.sort(key=lambda item: item[0])
        yield from (item for _, item in again)

    async def _write(self, action: Action, keys: Iterable[Key]) -> None:
        source, failures = self._source, dict[Key, Exception]()
        rows = {key: source.get(key) for key in keys}
        batch = {key: row for key, row in rows.items() if (row is not None) == (action == "put")}
        if not batch:
            return
        self.statistics.batches += 1
        if self._bucket is not None:
            self._bucket.take()
        try:
            with span("reconcile", {"lifecycle.table": source.name, "lifecycle.objects": len(batch)}):
                if action == "put":
                    await self._target.put(batch)  # type: ignore[arg-type]  # no row is None here
                else:
                    await self._target.drop(list(batch))
        except BatchError as error:
            failures = {key: error.failures[key] for key in batch if key in error.failures}
        except Exception as error:  # noqa: BLE001  # any error of the target becomes the object's status
            failures = dict.fromkeys(batch, error)
        self._written(action, batch, failures)
        await asyncio.sleep(0)
        self._take()

    def _written(
        self, action: Action, batch: Iterable[Key], failures: Mapping[Key, Exception], *, pause: bool = True
    ) -> None:
        statistics, written = self.statistics, 0
        now = time.time()
        with self._statuses.txn() as statuses:
            for key in batch:
                if (error := failures.get(key)) is not None:
                    work = self._work.setdefault(key, _Work())
                    work.failures += 1
                    work.error = error
                    work.due = -math.inf
                    if pause:
                        work.due = anyio.current_time() + self._backoff.pause(work.failures)
                    statistics.failures += 1
                    status = ObjectStatus(key, action, "failed", now, work.failures, described(error))
                    statuses.put(status)
                    continue
                written += 1
                self._work.pop(key, None)
                if action == "put" and not self._write_through:
                    statuses.put(ObjectStatus(key, action, "done", now))
                elif key in self._statuses:
                    statuses.delete(key)
        if action == "put":
            statistics.puts += written
        else:
            statistics.drops += written
        self._wake_waiters()

    def _is_realised(self, key: Key, revision: int) -> bool:
        looked = self._pruned or (self._swept and key in self._source)
        return looked and revision <= self._taken and key not in self._work

    def _wake_waiters(self) -> None:
        for key, revision, event in self._waiters:
            if self._is_realised(key, revision):
                event.set()

    def _failed(self) -> dict[Key, Exception]:
        return {key: work.error for key, work in self._work.items() if work.error is not None}

    def _next_due(self) -> float:
        due = [self._sweep_due]
        if self._swept:
            due += [work.due for key, work in self._work.items() if self._may_drop or key in self._source]
        return min(due)

    def _report(self, health: Health, *, held_up: bool = False) -> None:
        if self._sweep_error is not None:
            health.degraded("cannot be compared, will be tried again", self._sweep_error)
        elif failed := self._failed():
            key, error = next(iter(failed.items()))
            health.degraded(f"{len(failed)} of {len(self._source)} objects failed, the first: {key}", error)
        elif held_up:
            health.ok(f"{len(self._source)} objects; waiting for the rate limit: {len(self._work)}")
        else:
            health.ok(f"{len(self._source)} objects")


def _key_of(status: ObjectStatus) -> Any:
    return status.key


def _parts(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    remaining = iter(items)
    while part := list(islice(remaining, size)):
        yield part
