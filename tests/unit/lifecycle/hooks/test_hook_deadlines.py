"""Hooks that are overdue, that cannot be cancelled, that spend the stop budget: bounded, and reported."""

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import pytest

from lifecycle import Cell, Hive, Hook, Lifecycle, StartError, StopError, group, invoke, module, provide
from lifecycle.testing import VirtualClock
from tests.unit.lifecycle.hooks.base import Base, fresh, log

__all__ = ["fresh"]
pytestmark = pytest.mark.anyio

Act = Callable[[], Awaitable[object]]


def above_base(name: str, start: Act | None = None, stop: Act | None = None, **limits: float) -> Cell:
    """A hook that needs Base."""

    def above(base: Base, lifecycle: Lifecycle) -> None:
        lifecycle.append(Hook(name, start, stop, **limits))

    return invoke(above)


async def outcome(clock: VirtualClock, work: Awaitable[object]) -> tuple[BaseException | None, float]:
    """How it ended, and after how many seconds of the clock."""
    task = asyncio.ensure_future(work)
    took = await clock.until(task.done)
    return task.exception(), round(took, 3)


def message_lines(error: BaseException | None) -> list[str]:
    """The message, without what differs from run to run."""
    text = re.sub(r"\S*?([\w.]+\.py):\d+", r"\1:N", str(error))
    text = re.sub(r"for \d+\.\d s", "for N s", text)  # by the real clock
    return re.sub(r"\w+\.<locals>\.", "", text).splitlines()


async def test_an_overdue_start_is_reported_as_a_tree_of_waiting_hooks() -> None:
    async def wait_for_the_kernel() -> None:
        await asyncio.sleep(60)

    @asynccontextmanager
    async def inner() -> AsyncIterator[None]:
        await wait_for_the_kernel()
        yield

    class Slow:
        def __init__(self, base: Base, lifecycle: Lifecycle) -> None:
            lifecycle.enter("slow", inner, start_timeout=7)

    class Other:
        def __init__(self, base: Base, lifecycle: Lifecycle) -> None:
            lifecycle.append(Hook("other", anyio.sleep_forever))

    class User:
        def __init__(self, slow: Slow, lifecycle: Lifecycle) -> None:
            lifecycle.append(Hook("user"))

    class Both:
        def __init__(self, slow: Slow, other: Other, lifecycle: Lifecycle) -> None:
            lifecycle.append(Hook("both"))

    class Top:
        def __init__(self, user: User, lifecycle: Lifecycle) -> None:
            lifecycle.append(Hook("top"))

    cells = module("m", "M", provide(Base, Slow, Other, User, Both, Top), invoke(Top, Both))
    with VirtualClock(patience=0.1) as clock:
        error, took = await outcome(clock, Hive(cells).start())
    assert isinstance(error, StartError)
    assert took == 7
    assert message_lines(error) == [
        "hive did not start: hook 'slow' (m) did not start within 7 s; pending hooks:",
        "    hook 'slow' (m) has been starting for N s",
        "        in inner at test_hook_deadlines.py:N",
        "        in wait_for_the_kernel at test_hook_deadlines.py:N",
        "        in sleep at tasks.py:N",
        "        ├─ hook 'user' (m) waits for it",
        "        │      └─ hook 'top' (m) waits for it",
        "        └─ hook 'both' (m) waits for it, and for hook 'other' (m)",
        "    hook 'other' (m) has been starting for N s",
        "        in sleep_forever at _eventloop.py:N",
        "        in sleep at _eventloop.py:N",
        "        in AsyncIOBackend.sleep at _asyncio.py:N",
        "        in sleep at tasks.py:N",
    ]
    assert log == ["base +", "base -"]


async def test_each_hook_has_its_own_deadline_or_that_of_the_hive() -> None:
    for limits, expected in (({}, 50), ({"start_timeout": 3.0}, 3)):
        hive = Hive(provide(Base), above_base("slow", anyio.sleep_forever, None, **limits), start_timeout=50)
        with VirtualClock(patience=0.1) as clock:
            error, took = await outcome(clock, hive.start())
        assert f"hook 'slow' (hive) did not start within {expected} s" in str(error)
        assert took == expected


async def test_an_overdue_stop_is_cancelled_and_reported_and_the_rest_stops() -> None:
    hive = Hive(provide(Base), above_base("stuck", None, anyio.sleep_forever, stop_timeout=4))
    with VirtualClock(patience=0.1) as clock:
        await hive.start()
        error, took = await outcome(clock, hive.stop())
    assert isinstance(error, StopError)
    assert took == 4
    lines = message_lines(error)
    assert lines[0] == "hive did not stop well: hook 'stuck' (hive) did not stop within 4 s; pending hooks:"
    assert lines[-1] == "        └─ hook 'base' (hive) waits for it"
    assert log == ["base +", "base -"]
    assert hive.left_behind == []


@pytest.fixture
def thread() -> Callable[[], Awaitable[object]]:
    """Something that waits in a worker thread and cannot be cancelled."""
    began, over = threading.Event(), threading.Event()

    def stubborn_syscall() -> None:
        began.set()
        over.wait(20)

    async def wait_in_thread() -> None:
        try:
            await anyio.to_thread.run_sync(stubborn_syscall)
        finally:
            log.append("thread over")

    wait_in_thread.began, wait_in_thread.over = began, over  # type: ignore[attr-defined]  # for the test
    return wait_in_thread


async def let_end(thread: Act) -> None:
    """End the thread, and wait until the task that awaits it has seen it."""
    thread.over.set()  # type: ignore[attr-defined]  # set by the fixture
    with anyio.fail_after(30):
        while len(asyncio.all_tasks()) > 2 or "thread over" not in log:  # noqa: ASYNC110  # tasks have no event
            await anyio.sleep(0.001)


async def test_a_stop_stuck_in_a_thread_is_named_left_behind_and_the_rest_stops(thread: Act) -> None:
    hive = Hive(provide(Base), above_base("stuck", None, thread, stop_timeout=4))
    with VirtualClock(patience=0.1) as clock:
        await hive.start()
        stopping = asyncio.ensure_future(hive.stop())
        await clock.run_until_idle()
        thread.began.wait(5)  # type: ignore[attr-defined]  # set by the fixture
        error, took = await outcome(clock, stopping)
    assert isinstance(error, StopError)
    assert took == 5  # its deadline, and a second to end once cancelled
    text = "\n".join(message_lines(error))
    assert "hook 'stuck' (hive) was cancelled while stopping and runs on: it is left behind\n" in text
    assert "        in wait_in_thread at test_hook_deadlines.py:N\n" in text
    assert "        in stubborn_syscall at test_hook_deadlines.py:N (worker thread)\n" in text
    assert log == ["base +", "base -"]
    assert hive.left_behind == ["hook 'stuck' (hive)"]
    await let_end(thread)


async def test_a_start_stuck_in_a_thread_does_not_hold_up_the_roll_back(thread: Act) -> None:
    async def boom() -> None:
        await anyio.lowlevel.checkpoint()
        raise OSError("boom")

    hive = Hive(provide(Base), above_base("stuck", thread, stop_timeout=2), above_base("failing", boom))
    with VirtualClock(patience=0.1) as clock:
        error, took = await outcome(clock, hive.start())
    assert isinstance(error, StartError)
    assert took == 2
    lines = message_lines(error)
    assert lines[:3] == [
        "hive did not start:",
        "- hook 'failing' (hive) failed to start: OSError: boom",
        "- hook 'stuck' (hive) was cancelled while starting and runs on: it is left behind",
    ]
    assert log == ["base +", "base -"]
    await let_end(thread)


def above(below: type, name: str, start: Act | None = None, stop: Act | None = None) -> type:
    """A class with a hook that needs that of another."""

    def init(self: object, below: object, lifecycle: Lifecycle) -> None:
        lifecycle.append(Hook(name, start, stop))

    init.__annotations__ = {"below": below, "lifecycle": Lifecycle}
    return type(f"Floor{name}", (), {"__init__": init})


def tower(stops: dict[str, Act]) -> Cell:
    """Hooks 0 to 4 in a row on Base, each needing the one below."""
    kinds: list[type] = [Base]
    for name in "01234":

        async def stop(name: str = name) -> None:
            log.append(f"{name} reached")
            await stops.get(name, anyio.lowlevel.checkpoint)()
            log.append(f"{name} -")

        kinds.append(above(kinds[-1], name, None, stop))
    return group(provide(*kinds), invoke(kinds[-1]))


async def test_when_the_stop_budget_is_spent_every_hook_is_still_reached_in_order() -> None:
    cells = tower({"4": anyio.sleep_forever, "2": anyio.sleep_forever})
    hive = Hive(cells, stop_timeout=40, stop_budget=50)
    with VirtualClock(patience=0.1) as clock:
        await hive.start()
        error, took = await outcome(clock, hive.stop())
    assert took == 50
    lines = message_lines(error)
    assert lines[0] == "hive did not stop well:"
    assert lines[1] == "- hook '4' (hive) did not stop within 40 s; pending hooks:"
    assert "- the stop budget of 50 s is spent; pending hooks:" in lines
    assert log[1:4] == ["4 reached", "3 reached", "3 -"]
    assert log[4:] == ["2 reached", "1 reached", "0 reached", "base -"]
    assert hive.left_behind == []


async def test_a_thread_cannot_outlast_the_stop_budget(thread: Act) -> None:
    hive = Hive(tower({"3": thread}), stop_timeout=1000, stop_budget=50)
    with VirtualClock(patience=0.1) as clock:
        await hive.start()
        error, took = await outcome(clock, hive.stop())
    assert took == pytest.approx(51.1, abs=0.2)
    assert "hook '3' (hive) was cancelled while stopping and runs on" in str(error)
    assert log[-5:] == ["3 reached", "2 reached", "1 reached", "0 reached", "base -"]
    await let_end(thread)


async def test_the_budget_bounds_a_roll_back_too(thread: Act) -> None:
    hive = Hive(
        provide(Base), above_base("stuck", thread, start_timeout=3, stop_timeout=1000), stop_budget=20
    )
    with VirtualClock(patience=0.1) as clock:
        error, took = await outcome(clock, hive.start())
    assert isinstance(error, StartError)
    assert took == pytest.approx(24.1, abs=0.2)
    assert log == ["base +", "base -"]
    await let_end(thread)


async def test_a_deep_chain_of_waiting_hooks_is_abbreviated() -> None:
    kinds: list[type] = [Base]
    for number in range(1500):
        kinds.append(above(kinds[-1], str(number), None if number else anyio.sleep_forever))
    hive = Hive(provide(*kinds), invoke(kinds[-1]), start_timeout=5)
    with VirtualClock(patience=0.1) as clock:
        error, _ = await outcome(clock, hive.start())
    lines = message_lines(error)
    assert lines[-1] == "    and 1440 more"
    assert len(lines) < 80
