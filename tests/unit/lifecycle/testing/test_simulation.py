"""Simulations: virtual time, every order, crashes, lost messages; and the same again from the same seed."""

import asyncio
import os
import random
import subprocess
import sys
import threading

import anyio
import anyio.to_thread
import pytest

from lifecycle import Hive, Hook, Jobs, Lifecycle, Table, invoke
from lifecycle.testing import Simulation, StuckError, explore, simulate

ORDER = """
import anyio
from lifecycle.testing import Simulation, simulate

def scenario(world):
    async def work(name):
        await anyio.sleep(0.5)
        world.note(name)
        await anyio.to_thread.run_sync(world.note, name.upper())

    async def main():
        async with anyio.create_task_group() as group:
            for name in ("a", "b", "c", "d", "e"):
                group.start_soon(work, name)
            await anyio.sleep(0.7)
            group.start_soon(work, "late")
            group.cancel_scope.cancel()

    world.run(main, crash=True)
    world.run(main)

print([simulate(scenario, seed).events for seed in range(40)])
"""


def in_order(world: Simulation) -> None:
    async def work(name: str) -> None:
        await anyio.sleep(1)
        world.note(name)

    async def main() -> None:
        async with anyio.create_task_group() as group:
            for name in "abcd":
                group.start_soon(work, name)

    world.run(main)


def test_tasks_that_are_ready_run_in_any_order() -> None:
    orders = {tuple(simulate(in_order, seed).events) for seed in range(300)}
    assert len(orders) == 24


def test_a_seed_replays_exactly_in_another_process_with_other_hashes() -> None:
    outputs = {
        subprocess.run(
            [sys.executable, "-c", ORDER],
            env={**os.environ, "PYTHONHASHSEED": hashes},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for hashes in ("1", "2")
    }
    assert len(outputs) == 1


def test_time_passes_only_when_nothing_else_can_happen() -> None:
    def scenario(world: Simulation) -> None:
        async def main() -> float:
            began = asyncio.get_running_loop().time()
            await anyio.sleep(3600)
            return asyncio.get_running_loop().time() - began

        assert world.run(main) == pytest.approx(3600)

    explore(scenario, range(5))


def test_a_simulation_that_waits_for_ever_is_reported() -> None:
    def scenario(world: Simulation) -> None:
        world.run(anyio.Event().wait)

    with pytest.raises(StuckError, match="nothing can happen any more; what waits:") as raised:
        explore(scenario)
    assert "in Event.wait at" in str(raised.value)
    assert raised.value.__notes__ == ["in the simulation of seed 0; to replay: simulate(scenario, seed=0)"]


def lost_update(world: Simulation) -> None:
    """Two read, wait, and write: whether one is lost is a matter of order."""
    stored = 0

    async def add() -> None:
        nonlocal stored
        await anyio.lowlevel.checkpoint()
        read = stored
        if world.random.random() < 0.5:
            await anyio.lowlevel.checkpoint()
        stored = read + 1

    async def main() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(add)
            group.start_soon(add)

    world.run(main)
    assert stored == 2


def test_a_race_is_found_and_its_seed_finds_it_again() -> None:
    with pytest.raises(AssertionError) as found:
        explore(lost_update, range(500))
    seed = int(found.value.__notes__[0].rpartition("=")[2].rstrip(")"))
    for _ in range(3):
        with pytest.raises(AssertionError, match="assert 1 == 2"):
            simulate(lost_update, seed)


def test_a_crash_runs_nothing_more_and_what_is_outside_outlives_it() -> None:
    died = 0

    def scenario(world: Simulation) -> None:
        nonlocal died
        disk: list[str] = []

        async def main() -> str:
            try:
                for number in range(5):
                    await anyio.sleep(1)
                    disk.append(f"row {number}")
                await anyio.to_thread.run_sync(disk.append, "all")
            finally:
                assert not world.crashed
            return "done"

        result = world.run(main, crash=True)
        assert (result is None) == world.crashed
        assert disk == [f"row {number}" for number in range(5)][: len(disk)] or disk[-1] == "all"
        died += world.crashed
        assert world.run(main) == "done"

    explore(scenario, range(100))
    assert 0 < died < 100


def test_threads_are_calls_in_the_loop_and_random_numbers_replay() -> None:
    def scenario(world: Simulation) -> None:
        async def main() -> None:
            here = threading.get_ident()
            assert await anyio.to_thread.run_sync(threading.get_ident) == here
            assert await asyncio.to_thread(threading.get_ident) == here
            assert await asyncio.get_running_loop().run_in_executor(None, threading.get_ident) == here
            with pytest.raises(OSError, match="no such"):
                await asyncio.to_thread(_fail)
            world.note(random.random())  # noqa: S311

        world.run(main)

    assert simulate(scenario, 1).events == simulate(scenario, 1).events != simulate(scenario, 2).events


def _fail() -> None:
    raise OSError("no such")


def test_messages_are_lost_and_delayed_by_the_seed() -> None:
    def scenario(world: Simulation) -> None:
        async def main() -> None:
            for number in range(20):
                await world.delay(2)
                if not world.chance(0.5):
                    world.note(number)

        world.run(main)

    lengths = {len(simulate(scenario, seed).events) for seed in range(20)}
    assert len(lengths) > 3


def test_a_hive_with_a_table_and_a_job_runs_through_every_order() -> None:
    """Whatever the order, and wherever it dies, the next run has every row."""

    def scenario(world: Simulation) -> None:
        disk: dict[int, int] = {}

        def build(jobs: Jobs, lifecycle: Lifecycle) -> None:
            table: Table[int, int] = Table("numbers", key=int)

            async def fill() -> None:
                for number in range(5):
                    await world.delay()
                    with table.txn() as rows:
                        rows.put(number)

            async def write(batch: object) -> None:
                del batch
                await world.delay()
                if world.chance():
                    raise OSError("lost")
                disk.update((number, number) for number in table.all())

            lifecycle.append(Hook("fill", fill))
            jobs.observe("write", table.changes, write)

        async def main() -> None:
            async with Hive(invoke(build)).started():
                await anyio.sleep(100)

        world.run(main, crash=True)
        world.run(main)
        assert disk == {number: number for number in range(5)}

    explore(scenario, range(60))
