"""Jobs: when they run, what happens when they crash, how health shows it."""

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Mapping

import anyio
import anyio.lowlevel
import pytest

from lifecycle import (
    Change,
    Health,
    HealthStatus,
    HealthTree,
    Hive,
    Hook,
    Jobs,
    Lifecycle,
    Table,
    invoke,
    module,
    provide,
)
from lifecycle.hooks.shutdown import Shutdown
from lifecycle.jobs.job import Backoff
from lifecycle.process.logs import logger_for
from lifecycle.testing import eventually

pytestmark = pytest.mark.anyio

Plan = Callable[[Jobs], object]


class Bench:
    """Jobs as one constructor gets them, with short pauses."""

    def __init__(self) -> None:
        self.health = HealthTree()
        self.shutdown = Shutdown()
        backoff = Backoff(first=0.001, maximum=0.01)
        self.jobs = Jobs("Bench", self.health.reporter("m"), logger_for("m"), self.shutdown, backoff)

    def status(self, name: str) -> HealthStatus:
        found = [status for status in self.health.snapshot() if status.module == f"m.{name}"]
        return found[0] if found else HealthStatus(name, "unknown", "", 0)

    async def until(self, fact: Callable[[], bool]) -> None:
        await eventually(fact)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def failing(times: int, then: Callable[[], object]) -> Callable[[], Awaitable[None]]:
    left = [times]

    async def work() -> None:
        if left[0]:
            left[0] -= 1
            raise OSError("no route")
        then()

    return work


async def test_jobs_begin_when_the_hooks_have_started_and_end_before_they_stop() -> None:
    log: list[str] = []

    class Owner:
        def __init__(self, lifecycle: Lifecycle, jobs: Jobs) -> None:
            jobs.one_shot("job", self.job)
            lifecycle.append(Hook("hook", self.start, self.stop))

        async def start(self) -> None:
            await anyio.lowlevel.checkpoint()
            log.append("hook started")

        async def stop(self) -> None:
            log.append("hook stopped")

        async def job(self) -> None:
            log.append("job began")
            try:
                await anyio.sleep_forever()
            finally:
                log.append("job ended")

    async with Hive(module("m", "M", provide(Owner), invoke(Owner))).started():
        await anyio.wait_all_tasks_blocked()
    assert log == ["hook started", "job began", "job ended", "hook stopped"]


async def test_a_one_shot_is_tried_again_until_it_succeeds(bench: Bench) -> None:
    done = anyio.Event()
    bench.jobs.one_shot("job", failing(3, done.set))
    async with bench.jobs.running():
        with anyio.fail_after(30):
            await done.wait()
        await bench.until(lambda: bench.status("job").level == "stopped")
    assert bench.status("job").message == "done"


async def test_a_one_shot_gives_up_after_its_retries(bench: Bench) -> None:
    bench.jobs.one_shot("job", failing(5, lambda: None), retries=2)
    async with bench.jobs.running():
        await bench.until(lambda: bench.status("job").message == "failed for good")
    assert bench.status("job").level == "degraded"
    assert bench.status("job").error == "OSError: no route"
    assert not bench.shutdown.requested


async def test_a_fatal_one_shot_ends_the_hive_with_its_error(bench: Bench) -> None:
    bench.jobs.one_shot("job", failing(1, lambda: None), fatal=True)
    async with bench.jobs.running():
        await bench.until(lambda: bench.shutdown.requested)
    assert isinstance(bench.shutdown.error, OSError)


async def test_while_a_job_is_failing_it_is_degraded_and_others_go_on(bench: Bench) -> None:
    runs = 0

    async def well() -> None:
        nonlocal runs
        runs += 1

    bench.jobs.one_shot("ill", failing(10**9, lambda: None))
    bench.jobs.timer("well", well, 0.001)
    async with bench.jobs.running():
        await bench.until(lambda: bench.status("ill").level == "degraded" and runs > 3)
    assert bench.status("ill").error == "OSError: no route"
    assert bench.status("well").level == "ok"


async def test_a_timer_runs_at_its_interval_and_when_triggered(bench: Bench) -> None:
    runs = 0

    async def work() -> None:
        nonlocal runs
        runs += 1

    timer = bench.jobs.timer("job", work, math.inf)
    async with bench.jobs.running():
        await anyio.wait_all_tasks_blocked()
        assert runs == 0
        timer.trigger()
        timer.trigger()
        await bench.until(lambda: runs == 1)
        await anyio.wait_all_tasks_blocked()
        assert runs == 1


async def test_a_trigger_while_the_timer_runs_is_not_lost(bench: Bench) -> None:
    runs = 0
    gate = anyio.Event()

    async def work() -> None:
        nonlocal runs
        runs += 1
        await gate.wait()

    timer = bench.jobs.timer("job", work, math.inf)
    async with bench.jobs.running():
        timer.trigger()
        await bench.until(lambda: runs == 1)
        timer.trigger()
        gate.set()
        await bench.until(lambda: runs == 2)


async def test_a_timer_that_fails_is_tried_again_sooner_than_its_interval(bench: Bench) -> None:
    done = anyio.Event()
    timer = bench.jobs.timer("job", failing(2, done.set), 3600)
    async with bench.jobs.running():
        timer.trigger()
        with anyio.fail_after(30):
            await done.wait()
        await bench.until(lambda: bench.status("job").level == "ok")


async def test_observing_a_table_survives_a_crash_of_the_work_and_sees_everything_again(bench: Bench) -> None:
    table: Table[str, str] = Table("letters", key=str.lower)
    seen: list[str] = []
    crashes = [OSError("once")]

    async def work(batch: object) -> None:
        if crashes:
            raise crashes.pop()
        seen.extend(change.row for change in batch)  # type: ignore[attr-defined]  # batches of changes

    with table.txn() as txn:
        txn.put("a")
        txn.put("b")
    bench.jobs.observe("job", table.changes, work)
    async with bench.jobs.running():
        await bench.until(lambda: seen == ["a", "b"])
        with table.txn() as txn:
            txn.put("c")
        await bench.until(lambda: seen == ["a", "b", "c"])
        assert bench.status("job").level == "ok"


@pytest.mark.parametrize(
    ("changed", "meanwhile"),
    [
        ({"c": "c", "a": None, "b": None}, {}),
        ({"c": "c"}, {"a": None, "b": None, "c": None}),
        ({"c": "c", "a": None}, {"a": "A", "b": None, "c": "C"}),
    ],
)
async def test_a_deletion_is_not_lost_when_the_work_fails_once(
    bench: Bench, changed: Mapping[str, str | None], meanwhile: Mapping[str, str | None]
) -> None:
    table: Table[str, str] = Table("letters", key=str.lower)
    built: dict[Hashable, str] = {}
    crashes = [meanwhile]

    async def work(batch: list[Change[str, str]]) -> None:
        for change in batch:
            built.pop(change.key, None)
            if change.row is not None:
                built[change.key] = change.row
            if change.key == "c" and crashes:
                write(crashes.pop())
                raise OSError("once")

    def write(rows: Mapping[str, str | None]) -> None:
        with table.txn() as txn:
            for key, row in rows.items():
                txn.put(row) if row else txn.delete(key)

    write({"a": "a", "b": "b"})
    bench.jobs.observe("job", table.changes, work)
    async with bench.jobs.running():
        await bench.until(lambda: len(built) == 2)
        write(changed)
        table.put("d")
        await bench.until(lambda: not crashes and sorted(built.values()) == sorted(table.all()))
        await bench.until(lambda: bench.status("job").level == "ok")


async def test_a_job_that_writes_the_table_it_observes_leaves_others_their_turn(bench: Bench) -> None:
    table: Table[str, tuple[str, int]] = Table("counts", key=lambda row: row[0])

    async def count(batch: list[Change[str, tuple[str, int]]]) -> None:
        for change in batch:
            if change.row is not None:
                table.put((change.row[0], change.row[1] + 1))

    bench.jobs.observe("job", table.changes, count)
    async with bench.jobs.running():
        table.put(("a", 0))
        for _ in range(100):
            await anyio.lowlevel.checkpoint()
        found = table.get("a")
        assert found is not None
        assert found[1] < 1000


async def test_an_observed_generator_is_closed_in_the_jobs_own_task(bench: Bench) -> None:
    closed = []

    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
            await anyio.sleep_forever()
        finally:
            closed.append(anyio.get_current_task().name)

    async def work(number: int) -> None:
        raise OSError("no")

    bench.jobs.observe("job", numbers, work)
    async with bench.jobs.running():
        await bench.until(lambda: len(closed) == 2)
    assert set(closed) == {"Bench: job"}


async def test_an_iteration_that_ends_ends_the_job(bench: Bench) -> None:
    async def numbers() -> AsyncIterator[int]:
        yield 1

    async def work(number: int) -> None: ...

    bench.jobs.observe("job", numbers, work)
    async with bench.jobs.running():
        await bench.until(lambda: bench.status("job").level == "stopped")


async def test_a_job_may_be_added_while_running_but_not_after(bench: Bench) -> None:
    done = anyio.Event()
    async with bench.jobs.running():
        bench.jobs.one_shot("late", failing(0, done.set))
        with anyio.fail_after(30):
            await done.wait()
    with pytest.raises(RuntimeError, match="job 'too late' of Bench: the hive is stopping"):
        bench.jobs.one_shot("too late", failing(0, done.set))


def test_pauses_grow_up_to_a_maximum() -> None:
    backoff = Backoff(first=1, factor=2, maximum=8)
    for failures, whole in ((1, 1), (2, 2), (3, 4), (4, 8), (5, 8), (10_000, 8)):
        assert whole / 2 <= backoff.pause(failures) <= whole


def test_health_has_level_reason_and_time() -> None:
    now = [100.0]
    tree = HealthTree(clock=lambda: now[0])
    health = tree.reporter("agent.ipam")
    child = health.child("expire")
    assert [(one.module, one.level) for one in tree.snapshot()] == [
        ("agent.ipam", "unknown"),
        ("agent.ipam.expire", "unknown"),
    ]
    health.ok("ready")
    now[0] = 200.0
    health.ok("still ready")
    child.degraded("cannot expire", OSError("disk full"))
    assert tree.snapshot() == [
        HealthStatus("agent.ipam", "ok", "still ready", 100.0),
        HealthStatus("agent.ipam.expire", "degraded", "cannot expire", 200.0, "OSError: disk full"),
    ]
    now[0] = 300.0
    child.stopped()
    assert tree.snapshot()[1] == HealthStatus("agent.ipam.expire", "stopped", "", 300.0)
    assert isinstance(child, Health)


async def test_work_that_returns_nothing_to_await_is_named(bench: Bench) -> None:
    bench.jobs.one_shot("job", lambda: 3, retries=0)  # type: ignore[arg-type,return-value]  # the mistake
    async with bench.jobs.running():
        await bench.until(lambda: bench.status("job").message == "failed for good")
    error = bench.status("job").error
    assert error is not None
    assert error.startswith("TypeError: its work returned 3, nothing to await: expected a coroutine function")
    assert "test_jobs.py:" in error
