"""Controllers: when they run, and their counters."""

import anyio
import pytest

from cells.observe.controllers import Controllers, ControllerState, Rules
from lifecycle import HealthTree, Hive, Jobs, invoke, module, provide
from lifecycle.testing import VirtualClock
from tests.unit.controllers.work import Work, _needed, running

pytestmark = pytest.mark.anyio


def status(controllers: Controllers, name: str) -> ControllerState:
    return next(each for each in controllers.all() if each.name == name)


async def test_a_controller_runs_at_once_and_then_at_its_interval() -> None:
    with VirtualClock() as clock:
        async with running() as controllers:
            work = Work()
            controllers.update("sync", work, Rules(interval=10))
            await clock.advance(25)
            assert work.pauses == [10, 10]
            assert (status(controllers, "sync").successes, status(controllers, "sync").interval) == (3, 10)


async def test_failures_wait_linearly_longer_up_to_a_bound() -> None:
    with VirtualClock() as clock:
        async with running() as controllers:
            work = Work(fails=4)
            controllers.update("sync", work, Rules(retry_base=2, retry_maximum=5))
            await clock.advance(7)
            failing = status(controllers, "sync")
            assert (failing.failures, failing.failures_in_a_row, failing.successes) == (3, 3, 0)
            assert failing.last_error == "[Errno 12] no memory today"
            await clock.advance(60)
            assert work.pauses == [2, 4, 5, 5]
            well = status(controllers, "sync")
            assert (well.failures, well.failures_in_a_row, well.successes, well.last_error) == (4, 0, 1, "")
            assert well.last_failure is not None


async def test_without_retries_the_interval_counts_after_a_failure_too() -> None:
    with VirtualClock() as clock:
        async with running() as controllers:
            work = Work(fails=1)
            controllers.update("sync", work, Rules(interval=30, retries=False))
            await clock.advance(31)
            assert work.pauses == [30]


async def test_triggers_of_a_controller_are_merged_into_one_run() -> None:
    with VirtualClock() as clock:
        async with running() as controllers:
            work = Work()
            controllers.update("sync", work)
            await clock.advance(100)
            assert len(work.times) == 1
            assert controllers.trigger("sync")
            assert controllers.trigger("sync")
            await clock.advance(1)
            assert len(work.times) == 2
            assert not controllers.trigger("another")


async def test_a_trigger_during_a_run_causes_one_more_run() -> None:
    runs = 0
    go_on = anyio.Event()

    async def work() -> None:
        nonlocal runs
        runs += 1
        await go_on.wait()

    with VirtualClock() as clock:
        async with running() as controllers:
            controllers.update("sync", work)
            await clock.advance(1)
            controllers.trigger("sync")
            controllers.trigger("sync")
            go_on.set()
            await clock.advance(1)
            assert runs == 2


async def test_an_update_keeps_uuid_and_counters() -> None:
    with VirtualClock() as clock:
        async with running() as controllers:
            before, after = Work(), Work()
            controllers.update("sync", before)
            await clock.advance(1)
            uuid = status(controllers, "sync").uuid
            controllers.update("sync", after)
            await clock.advance(1)
            assert (len(before.times), len(after.times)) == (1, 1)
            assert (status(controllers, "sync").uuid, status(controllers, "sync").successes) == (uuid, 2)


async def test_a_removed_controller_leaves_nothing_behind() -> None:
    with VirtualClock() as clock:
        cell = module("controllers", "over jobs", provide(Controllers), invoke(_needed))
        async with Hive(cell).started() as hive:
            controllers = hive.get(Controllers)
            controllers.update("mine", Work(fails=1000), owner="endpoint-7")
            controllers.update("others", Work(), owner="endpoint-8")
            await clock.advance(1)
            assert [each.name for each in controllers.of("endpoint-7")] == ["mine"]
            controllers.remove_of("endpoint-7")
            await clock.advance(1)
            assert [each.name for each in controllers.all()] == ["others"]
            modules = [each.module for each in hive.get(HealthTree).snapshot()]
            assert not [each for each in modules if each.endswith(".mine")]


async def test_jobs_of_other_modules_are_listed_as_controllers() -> None:
    def other(jobs: Jobs) -> None:
        jobs.timer("sweep", Work(fails=1000), 60)

    cell = module(
        "agent", "both", module("controllers", "c", provide(Controllers), invoke(_needed)),
        module("ipam", "i", invoke(other)),
    )  # fmt: skip
    with VirtualClock() as clock:
        async with Hive(cell).started() as hive:
            await clock.advance(61)
            found = status(hive.get(Controllers), "agent.ipam.sweep")
            assert (found.interval, found.failures > 0, found.successes) == (60, True, 0)
            assert found.last_error == "OSError: [Errno 12] no memory today"
            assert found.uuid == status(hive.get(Controllers), "agent.ipam.sweep").uuid


async def test_a_controller_removed_before_its_first_run_never_runs() -> None:
    async with running() as controllers:
        work = Work()
        controllers.update("sync", work)
        controllers.trigger("sync")
        controllers.remove("sync")
        await anyio.wait_all_tasks_blocked()
        assert work.times == []


def test_controllers_can_be_made_before_there_is_an_event_loop() -> None:
    def early(controllers: Controllers) -> None:
        controllers.update("sync", Work())

    Hive(module("controllers", "over jobs", provide(Controllers), invoke(early))).graph()
