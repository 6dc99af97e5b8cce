"""Jobs that finish what they have started when the hive stops, and pools of items."""

from collections.abc import Awaitable, Callable

import anyio
import pytest
from structlog.testing import capture_logs

from lifecycle import Cell, Hive, Jobs, StopError, invoke, module
from lifecycle.jobs import Backoff, Pool
from lifecycle.testing import HiveStarter, VirtualClock, eventually

Work = Callable[[], Awaitable[object]]
SOON = Backoff(first=0.001, maximum=0.01)


def draining(work: Callable[[Jobs], Work], *, drain: float, name: str = "drains") -> Cell:
    def owner(jobs: Jobs) -> None:
        jobs.one_shot(name, work(jobs), drain=drain)

    return invoke(owner)


@pytest.mark.anyio
async def test_at_stop_a_draining_job_finishes_its_item_and_others_are_cancelled() -> None:
    events: list[str] = []

    def owner(jobs: Jobs) -> None:
        async def drains() -> None:
            await jobs.stopping()
            await anyio.sleep(0.02)
            events.append("written")

        async def cancelled() -> None:
            try:
                await anyio.sleep_forever()
            finally:
                events.append("cancelled")

        jobs.one_shot("drains", drains, drain=20.0)
        jobs.one_shot("is cancelled", cancelled)

    async with Hive(invoke(owner), stop_timeout=1.0).started() as hive:
        await eventually(lambda: all(job.running for job in hive.jobs.snapshot()))
    assert events == ["cancelled", "written"]


@pytest.mark.anyio
async def test_the_drain_is_bounded() -> None:
    def deaf(jobs: Jobs) -> Work:
        return anyio.sleep_forever

    with VirtualClock() as clock:
        hive = Hive(draining(deaf, drain=20.0), stop_timeout=1.0)
        await hive.start()
        async with anyio.create_task_group() as group:
            group.start_soon(hive.stop)
            assert await clock.until(lambda: hive.phase.stage == "stopped") == 20.0


@pytest.mark.anyio
async def test_work_that_outlasts_its_drain_is_logged_with_the_items_that_are_left() -> None:
    def deaf(jobs: Jobs) -> Work:
        return anyio.sleep_forever

    made: list[Pool[str]] = []
    with VirtualClock() as clock, capture_logs() as logs:
        hive = Hive(
            draining(deaf, drain=20.0),
            module("slow", "Slow", pool_of(made, lambda _: anyio.sleep(6), at_once=1, drain=10.0)),
            module("fast", "Fast", pool_of(made, lambda _: anyio.sleep(1), at_once=1, drain=10.0)),
        )
        await hive.start()
        for pool in made:
            for item in "abc":
                pool.put(item)
        async with anyio.create_task_group() as group:
            group.start_soon(hive.stop)
            await clock.until(lambda: hive.phase.stage == "stopped")
    cut_off = [one for one in logs if one["event"] == "job cut off: its drain is over"]
    assert sorted((one["drain"], one.get("items_left")) for one in cut_off) == [(10.0, 2), (20.0, None)]


@pytest.mark.anyio
async def test_the_budget_of_the_hive_is_shorter_than_a_long_drain() -> None:
    def deaf(jobs: Jobs) -> Work:
        return anyio.sleep_forever

    hive = Hive(draining(deaf, drain=3600.0), stop_budget=0.05)
    await hive.start()
    with pytest.raises(StopError, match=r"the stop budget of 0.05 s is spent"):
        await hive.stop()


@pytest.mark.anyio
async def test_a_failure_while_stopping_is_not_tried_again() -> None:
    tries = 0

    def fails(jobs: Jobs) -> Work:
        async def work() -> None:
            nonlocal tries
            tries += 1
            await jobs.stopping()
            raise OSError("full")

        return work

    with VirtualClock() as clock:
        hive = Hive(draining(fails, drain=5.0))
        await hive.start()
        await clock.run_until_idle()
        async with anyio.create_task_group() as group:
            group.start_soon(hive.stop)
            assert await clock.until(lambda: hive.phase.stage == "stopped") < 1.0
    assert tries == 1


def pool_of(made: list[Pool[str]], work: Callable[[str], Awaitable[object]], **options: object) -> Cell:
    def owner(jobs: Jobs) -> None:
        made.append(jobs.pool("resize", work, backoff=SOON, **options))  # type: ignore[arg-type]

    return invoke(owner)


async def test_a_pool_runs_so_many_at_once(hive: HiveStarter) -> None:
    most = running = 0
    done: list[str] = []

    async def work(item: str) -> None:
        nonlocal most, running
        running += 1
        most = max(most, running)
        await anyio.sleep(0.001)
        running -= 1
        done.append(item)

    made: list[Pool[str]] = []
    running_hive = await hive(pool_of(made, work, at_once=3))
    for number in range(20):
        made[0].put(str(number))
    await made[0].empty()
    assert (most, len(done), len(made[0])) == (3, 20, 0)
    (stats,) = running_hive.jobs.snapshot()
    assert (stats.runs, stats.failures, stats.running) == (20, 0, 0)


@pytest.mark.seeds(20)
async def test_items_of_a_key_run_in_order_and_a_failure_holds_up_its_own(hive: HiveStarter) -> None:
    done: dict[str, list[int]] = {"a": [], "b": []}
    busy: set[str] = set()
    fails = {"a0", "a2"}

    async def work(item: str) -> None:
        key = item[0]
        assert key not in busy
        busy.add(key)
        await anyio.sleep(0.01)
        busy.remove(key)
        if item in fails:
            fails.remove(item)
            raise OSError("again")
        done[key].append(int(item[1:]))

    made: list[Pool[str]] = []
    running = await hive(pool_of(made, work, at_once=4, key=lambda item: item[0]))
    for number in range(5):
        made[0].put(f"a{number}")
        made[0].put(f"b{number}")
    await made[0].empty()
    assert done == {"a": [0, 1, 2, 3, 4], "b": [0, 1, 2, 3, 4]}
    assert [one.failures for one in running.jobs.snapshot()] == [2]
    assert {one.level for one in running.health.snapshot() if one.module.endswith("resize")} == {"ok"}


@pytest.mark.anyio
async def test_a_pool_works_off_what_it_holds_at_the_stop() -> None:
    done: list[str] = []

    async def work(item: str) -> None:
        await anyio.sleep(0.002)
        done.append(item)

    made: list[Pool[str]] = []
    async with Hive(pool_of(made, work, at_once=2, drain=10.0)).started():
        for number in range(10):
            made[0].put(str(number))
    assert len(done) == 10
    async with Hive(pool_of(made, work)).started():
        made[1].put("left")
    assert done[10:] == []


@pytest.mark.parametrize("at_once", [0, -1, True, 1.5])
def test_an_invalid_number_of_workers_is_refused(at_once: object) -> None:
    async def work(item: str) -> None: ...

    with pytest.raises(Exception, match="expected a whole number from 1 on"):
        Hive(pool_of([], work, at_once=at_once)).build()
