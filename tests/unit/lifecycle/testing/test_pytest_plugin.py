"""The plugin for pytest, as tests of a package that only has the framework use it."""

import subprocess
import sys
from pathlib import Path

import pytest

from lifecycle import Cell, Hook, Jobs, Lifecycle, Table, invoke, provide
from lifecycle.testing import HiveStarter

ROOT = Path(__file__).parents[4]

TESTS = """
import asyncio
import threading

import pytest

from lifecycle import Hook, Jobs, Lifecycle, invoke

events = []


def shop(lifecycle: Lifecycle) -> None:
    async def start():
        events.append("start")

    async def stop():
        events.append("stop")

    lifecycle.append(Hook("shop", start, stop))


async def test_starts(hive):
    running = await hive(invoke(shop), name="first")
    assert running.name == "first"
    assert events == ["start"]


def test_has_stopped():
    assert events == ["start", "stop"]


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.mark.anyio
async def test_in_the_loop_of_anyio(hive, anyio_backend):
    await hive(invoke(shop))


async def test_leaks(hive):
    threading.Thread(target=asyncio.run, args=(asyncio.sleep(2),), name="the leak", daemon=True).start()


async def test_closes_late(hive):
    threading.Thread(target=asyncio.run, args=(asyncio.sleep(0.1),)).start()


async def test_crashes(hive):
    def crashing(jobs: Jobs) -> None:
        async def crash():
            raise LookupError("lost")

        jobs.one_shot("crash", crash, fatal=True)

    await hive(invoke(crashing))
    await asyncio.sleep(0.01)


@pytest.mark.seeds(20)
async def test_orders(hive):
    order = []

    async def note(name):
        await asyncio.sleep(0)
        order.append(name)

    await asyncio.gather(*(note(name) for name in "abc"))
    assert order != ["c", "b", "a"]
"""

INI = "[pytest]\nhive_patience = 0.5\n"


def run_pytest(folder: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "pytest", "-q", "--disable-plugin-autoload", "-panyio", "-rA"]
    command += ["-plifecycle.testing.pytest_plugin", "-pno:cacheprovider"]
    return subprocess.run(
        command,
        cwd=folder,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_package_of_its_own_uses_it(tmp_path: Path) -> None:
    (tmp_path / "test_shop.py").write_text(TESTS, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text(INI, encoding="utf-8")
    ran = run_pytest(tmp_path)
    lines = ran.stdout.splitlines()
    passed = {line.split("::")[1] for line in lines if line.startswith("PASSED")}
    failed = {line.split("::")[1].split(" ")[0] for line in lines if line.startswith("FAILED")}
    assert {"test_starts", "test_has_stopped", "test_closes_late"} <= passed
    assert "test_in_the_loop_of_anyio" in passed
    orders = {one for one in failed if one.startswith("test_orders[seed")}
    assert orders, "one of twenty orders is the last one"
    assert failed - orders == {"test_leaks", "test_crashes"}
    assert "thread 'the leak'" in ran.stdout
    assert "LookupError: lost" in ran.stdout
    assert f"pytest --hive-seed={min(orders)[len('test_orders[seed') :].rstrip(']')} " in ran.stdout


def test_seeds_without_a_simulation_are_refused(tmp_path: Path) -> None:
    for number, test in enumerate(
        (
            "@pytest.mark.seeds\nasync def test_it(hive): ...",
            "@pytest.mark.seeds(0)\nasync def test_it(hive): ...",
            "@pytest.mark.seeds(True)\nasync def test_it(hive): ...",
            "@pytest.mark.seeds(3)\nasync def test_it(): ...",
            "@pytest.mark.seeds(3)\ndef test_it(hive): ...",
        )
    ):
        (tmp_path / f"test_{number}.py").write_text(f"import pytest\n{test}\n", encoding="utf-8")
    ran = run_pytest(tmp_path)
    text = "expected seeds(count), of 1 or more, on an asynchronous test with the fixture hive"
    for number in range(5):
        assert f"test_{number}.py::test_it: {text}" in ran.stdout
    assert ran.returncode == pytest.ExitCode.INTERRUPTED


async def test_hives_stop_last_first_and_are_named_in_a_failure(hive: HiveStarter) -> None:
    events: list[str] = []

    def named(name: str) -> Cell:
        def shop(lifecycle: Lifecycle) -> None:
            async def stop() -> None:
                events.append(name)
                raise OSError(name)

            lifecycle.append(Hook(name, stop=stop))

        return invoke(shop)

    starter = HiveStarter()

    async def fails() -> None:
        async with starter.around():
            await starter(named("one"))
            await starter(named("two"))
            raise LookupError("of the test")

    with pytest.raises(LookupError, match="of the test") as caught:
        await fails()
    assert events == ["two", "one"]
    assert [note.rpartition(" ")[2] for note in caught.value.__notes__] == ["two", "one"]


@pytest.mark.seeds(5)
async def test_time_is_virtual_in_simulations(hive: HiveStarter) -> None:
    def clock() -> Table[int, int]:
        return Table("beats", key=lambda beat: beat)

    def beat(beats: Table[int, int], jobs: Jobs) -> None:
        async def once() -> None:
            beats.put(len(beats.all()))

        jobs.timer("beat", once, 3600)

    running = await hive(provide(clock), invoke(beat))
    beats = running.get(Table[int, int])
    changes = beats.changes()
    while len(beats.all()) < 3:
        await anext(changes)
