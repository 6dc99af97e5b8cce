"""Jobs by the clock: retries and back-off, debounce, jitter, metrics; and what a job must survive."""

import asyncio
import math
import random
from collections.abc import AsyncIterator

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lifecycle import (
    Backoff,
    Change,
    Health,
    HealthTree,
    Hive,
    JobMetrics,
    Jobs,
    Table,
    invoke,
    module,
    provide,
)
from lifecycle.hooks.shutdown import Shutdown
from lifecycle.jobs import JobStats
from lifecycle.process.logs import logger_for
from lifecycle.tables.changes import Changes
from lifecycle.testing import VirtualClock

pytestmark = pytest.mark.anyio


class Bench:
    """Jobs as one constructor gets them."""

    def __init__(self) -> None:
        self.health = HealthTree()
        self.metrics = JobMetrics()
        self.jobs = Jobs(
            "Bench",
            Health(self.health, "m"),
            logger_for("m"),
            Shutdown(),
            Backoff(first=1, factor=2, maximum=100),
            metrics=self.metrics,
            module="m",
        )

    def statuses(self) -> dict[str, tuple[str, str]]:
        return {one.module: (one.level, one.message) for one in self.health.snapshot()}

    def stats(self, name: str) -> JobStats:
        return next(one for one in self.metrics.snapshot() if one.name == name)


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture(autouse=True)
def _no_luck(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every random pause is the longest."""
    monkeypatch.setattr(random, "random", lambda: 1.0)


class Work:
    """Runs that take two seconds each, and fail on request."""

    def __init__(self, *, failures: int = 0) -> None:
        self.began: list[float] = []
        self.failures = failures

    async def __call__(self, item: object = None) -> None:
        self.began.append(anyio.current_time())
        await anyio.sleep(2)
        if len(self.began) <= self.failures:
            raise OSError("no route")

    def times(self, since: float) -> list[int]:
        return [round(at - since) for at in self.began]


async def test_pauses_between_tries_grow_and_a_job_may_have_its_own(bench: Bench) -> None:
    growing, steady = Work(failures=4), Work(failures=4)
    with VirtualClock() as clock:
        since = clock.now
        bench.jobs.one_shot("growing", growing)
        bench.jobs.one_shot("steady", steady, backoff=Backoff(first=5, factor=1))
        async with bench.jobs.running():
            await clock.advance(60)
    assert growing.times(since) == [0, 3, 7, 13, 23]
    assert steady.times(since) == [0, 7, 14, 21, 28]


async def test_a_try_that_lasts_counts_as_well_and_lets_pauses_begin_small_again(bench: Bench) -> None:
    began: list[float] = []

    async def serve() -> None:
        began.append(anyio.current_time())
        await anyio.sleep(0 if len(began) <= 3 else 200)
        raise OSError("lost")

    with VirtualClock() as clock:
        since = clock.now
        bench.jobs.one_shot("serve", serve)
        async with bench.jobs.running():
            await clock.advance(100)
            assert bench.statuses()["m.serve"] == ("degraded", "failed, will be tried again")
            await clock.advance(10)
            assert bench.statuses()["m.serve"] == ("ok", "running")
            await clock.advance(100)
    assert [round(at - since) for at in began] == [0, 1, 3, 7, 208]


async def test_the_interval_of_a_timer_counts_from_the_end_of_a_run_and_may_jitter(bench: Bench) -> None:
    plain, spread = Work(), Work()
    with VirtualClock() as clock:
        since = clock.now
        bench.jobs.timer("plain", plain, 10)
        bench.jobs.timer("spread", spread, 10, jitter=0.5)
        async with bench.jobs.running():
            await clock.advance(50)
    assert plain.times(since) == [10, 22, 34, 46]
    assert spread.times(since) == [15, 32, 49]


async def test_after_a_run_a_timer_rests_whatever_triggers_it_and_then_runs_once(bench: Bench) -> None:
    rested, steady = Work(), Work()
    with VirtualClock() as clock:
        since = clock.now
        timer = bench.jobs.timer("rested", rested, math.inf, rest=10)
        bench.jobs.timer("steady", steady, 15, rest=10)
        async with bench.jobs.running():
            timer.trigger()  # without a waiter for the first one
            await clock.advance(1)
            for _ in range(20):
                timer.trigger()
                await clock.advance(1)
            await clock.advance(40)
    assert rested.times(since) == [0, 12, 24]
    assert steady.times(since) == [15, 32, 49]


async def test_triggers_within_the_debounce_pause_are_one_and_never_put_it_off(bench: Bench) -> None:
    work = Work()
    with VirtualClock() as clock:
        since = clock.now
        timer = bench.jobs.timer("job", work, math.inf, debounce=5)
        async with bench.jobs.running():
            for _ in range(20):  # one a second, without end: it must run all the same
                timer.trigger()
                await clock.advance(1)
    assert work.times(since) == [5, 12, 19]


async def test_an_interval_that_ends_within_the_debounce_pause_runs_once(bench: Bench) -> None:
    work = Work()
    with VirtualClock() as clock:
        since = clock.now
        timer = bench.jobs.timer("job", work, 10, debounce=5)
        async with bench.jobs.running():
            await clock.advance(8)
            timer.trigger()
            await clock.advance(11)
    assert work.times(since) == [10]


async def test_runs_failures_and_durations_are_plain_data(bench: Bench) -> None:
    async def letters() -> AsyncIterator[str]:
        yield "a"
        yield "b"
        await anyio.sleep_forever()

    with VirtualClock() as clock:
        bench.jobs.one_shot("once", Work(failures=2))
        bench.jobs.timer("tick", Work(), 10)
        bench.jobs.observe("letters", letters, Work())
        async with bench.jobs.running():
            await clock.advance(23)
            once, tick, seen = bench.stats("once"), bench.stats("tick"), bench.stats("letters")
    assert (once.kind, once.runs, once.failures, once.running) == ("one_shot", 3, 2, 0)
    assert (once.seconds, once.last_seconds, once.longest_seconds) == pytest.approx((6, 2, 2))
    assert once.last_ended is not None
    assert (tick.kind, tick.runs, tick.failures, tick.running) == ("timer", 1, 0, 1)
    assert (seen.kind, seen.runs, seen.failures, seen.running) == ("observe", 2, 0, 0)
    assert [one.name for one in bench.jobs.metrics()] == ["once", "tick", "letters"]
    assert bench.stats("tick").runs == 1  # the one cut off at the end is not counted


async def test_an_iteration_that_fails_counts_once_and_so_does_work_that_fails(bench: Bench) -> None:
    async def broken() -> AsyncIterator[str]:
        raise OSError("gone")
        yield ""

    async def one() -> AsyncIterator[str]:
        yield ""

    with VirtualClock() as clock:
        bench.jobs.observe("source", broken, Work())
        bench.jobs.observe("work", one, Work(failures=1))
        async with bench.jobs.running():
            await clock.advance(2.5)
            assert (bench.stats("source").runs, bench.stats("source").failures) == (2, 2)
            assert (bench.stats("work").runs, bench.stats("work").failures) == (1, 1)


async def test_of_a_job_added_later_nothing_is_left_when_it_is_done(bench: Bench) -> None:
    """So that each endpoint may have its own."""
    with VirtualClock() as clock:
        bench.jobs.one_shot("early", Work())
        async with bench.jobs.running():
            for number in range(100):
                bench.jobs.one_shot(f"endpoint-{number}", Work(failures=1))
            await clock.run_until_idle()
            assert len(bench.statuses()) == 101
            await clock.advance(10)
            assert bench.statuses() == {"m.early": ("stopped", "done")}
            assert [one.name for one in bench.metrics.snapshot()] == ["early"]
            bench.jobs.one_shot("hopeless", Work(failures=9), retries=1)
            await clock.advance(10)
            assert bench.statuses()["m.hopeless"] == ("degraded", "failed for good")


async def test_a_late_job_may_have_the_name_of_one_that_still_runs(bench: Bench) -> None:
    with VirtualClock() as clock:
        async with bench.jobs.running():
            bench.jobs.one_shot("same", Work(failures=1))
            await clock.advance(1)
            bench.jobs.one_shot("same", Work())
            await clock.advance(3)
            assert "m.same" in bench.statuses()
            await clock.advance(10)
            assert bench.statuses() == {}


async def test_awaiting_something_cancelled_is_a_failure_and_not_the_end_of_the_job(bench: Bench) -> None:
    """A task of someone else is cancelled; the job that awaits it must not vanish without a word."""
    runs = 0

    async def work() -> None:
        nonlocal runs
        runs += 1
        if runs == 1:
            task = asyncio.ensure_future(anyio.sleep_forever())
            asyncio.get_running_loop().call_later(1, task.cancel)
            await task

    with VirtualClock() as clock:
        bench.jobs.one_shot("job", work)
        async with bench.jobs.running():
            await clock.advance(1.5)
            status = bench.health.snapshot("m.job")[0]
            assert status.level == "degraded"
            assert status.error is not None
            assert "UnexpectedCancelError: it awaited something that was cancelled" in status.error
            await clock.advance(10)
            assert bench.statuses()["m.job"] == ("stopped", "done")
    assert (bench.stats("job").runs, bench.stats("job").failures) == (2, 1)


async def test_a_cancelled_job_ends_at_once_without_a_failure(bench: Bench) -> None:
    with VirtualClock() as clock:
        bench.jobs.one_shot("job", anyio.sleep_forever)
        async with bench.jobs.running():
            await clock.run_until_idle()
        assert bench.stats("job") == JobStats("m", "job", "one_shot", 0, 0, 0, 0.0, 0.0, 0.0, retry_first=1)
    assert bench.statuses() == {"m.job": ("ok", "running")}


async def test_a_job_with_a_failing_task_group_is_contained(bench: Bench) -> None:
    async def work() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(anyio.sleep_forever)
            raise OSError("no route")

    with VirtualClock() as clock:
        bench.jobs.one_shot("job", work, retries=2)
        async with bench.jobs.running():
            await clock.advance(10)
    assert bench.statuses() == {"m.job": ("degraded", "failed for good")}
    assert bench.stats("job").failures == 3


class Watcher:
    """An Observer that fails once, then watches."""

    def __init__(self) -> None:
        self.runs = 0

    async def run(self, health: Health) -> None:
        self.runs += 1
        if self.runs == 1:
            raise OSError("no route")
        health.ok("3 objects")
        await anyio.sleep_forever()


async def test_an_observer_brings_its_own_work_and_reports_by_itself(bench: Bench) -> None:
    watcher = Watcher()
    with VirtualClock() as clock:
        bench.jobs.observe("reconcile", watcher)
        async with bench.jobs.running():
            await clock.run_until_idle()
            assert bench.statuses()["m.reconcile"] == ("degraded", "failed, will be tried again")
            await clock.advance(2)
            assert bench.statuses()["m.reconcile"] == ("ok", "3 objects")
            assert (bench.stats("reconcile").failures, bench.stats("reconcile").running) == (1, 1)


async def test_the_hive_lists_the_jobs_of_all_its_modules() -> None:
    seen: list[JobStats] = []

    class Owner:
        def __init__(self, jobs: Jobs) -> None:
            jobs.timer("tick", Work(), 10)

    class Exporter:
        def __init__(self, metrics: JobMetrics, owner: Owner, jobs: Jobs) -> None:
            async def export() -> None:
                seen.extend(metrics.snapshot())

            jobs.timer("export", export, 25)

    cells = (module("a", "A", provide(Owner)), module("b", "B", provide(Exporter), invoke(Exporter)))
    with VirtualClock() as clock:
        async with Hive(*cells).started() as hive:
            await clock.advance(25)
            assert hive.get(JobMetrics) is hive.jobs
    assert [(one.module, one.name, one.runs) for one in seen] == [("a", "tick", 2), ("b", "export", 0)]


STEPS = st.lists(st.sampled_from(["put a", "put b", "delete a", "fail", "wait"]), max_size=12)


@given(STEPS)
def test_whatever_fails_a_watcher_of_a_table_ends_with_what_is_in_it(steps: list[str]) -> None:
    """Runs of `observe` over a table, with failures in between: none is lost, whatever the order."""
    anyio.run(_watch_a_table, steps)


async def _watch_a_table(steps: list[str]) -> None:
    bench, held, fails = Bench(), dict[object, int](), 0
    table: Table[str, tuple[str, int]] = Table("letters", key=lambda row: row[0])

    def again() -> Changes[str, tuple[str, int]]:
        held.clear()
        return table.changes()

    async def work(batch: list[Change[str, tuple[str, int]]]) -> None:
        nonlocal fails
        if fails:
            fails -= 1
            raise OSError("no")
        held.update((change.key, change.row[1]) for change in batch if change.row is not None)
        for change in batch:
            if change.deleted:
                held.pop(change.key, None)

    bench.jobs.observe("job", again, work)
    with VirtualClock() as clock:
        async with bench.jobs.running():
            for number, step in enumerate(steps):
                what, _, key = step.partition(" ")
                fails += what == "fail"
                if what == "wait":
                    await clock.run_until_idle()
                with table.txn() as txn:
                    if what == "put":
                        txn.put((key, number))
                    elif what == "delete":
                        txn.delete(key)
            await clock.advance(3000)
    assert held == dict(table.all())
