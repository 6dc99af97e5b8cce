"""The virtual clock: hours in milliseconds, the same every time."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable

import anyio
import anyio.to_thread
import pytest

from lifecycle import Hook, HookTimeoutError, Jobs, Lifecycle, StartError, Timer, invoke, module, provide
from lifecycle.testing import VirtualClock, started

pytestmark = pytest.mark.anyio


async def test_timers_run_in_order_each_at_its_own_time() -> None:
    seen: list[tuple[str, float]] = []

    async def every(seconds: float, name: str) -> None:
        while True:
            await anyio.sleep(seconds)
            seen.append((name, anyio.current_time() - began))

    with VirtualClock() as clock:
        began = clock.now
        async with anyio.create_task_group() as group:
            group.start_soon(every, 20.0, "slow")
            group.start_soon(every, 15.0, "fast")
            await clock.advance(45)
            group.cancel_scope.cancel()
    assert [(name, round(at)) for name, at in seen] == [
        ("fast", 15),
        ("slow", 20),
        ("fast", 30),
        ("slow", 40),
        ("fast", 45),
    ]


async def test_no_time_passes_by_itself() -> None:
    with VirtualClock() as clock:
        task = asyncio.create_task(anyio.sleep(0.001))
        await clock.run_until_idle()
        assert not task.done()
        await clock.advance(0.001)
        assert task.done()


async def test_real_time_is_back_after_the_block() -> None:
    with VirtualClock() as clock:
        await clock.advance(1e6)
    await anyio.sleep(0.001)
    assert anyio.current_time() < clock.now


class Poll:
    """Runs once an hour, and fails a given number of times."""

    def __init__(self, jobs: Jobs) -> None:
        self.runs = 0
        self.failures = 0
        self.timer: Timer = jobs.timer("poll", self.poll, 3600)

    async def poll(self) -> None:
        self.runs += 1
        if self.failures:
            self.failures -= 1
            raise OSError("no answer")


poll = module("poll", "Polls", provide(Poll), invoke(Poll))


async def test_a_job_runs_by_the_clock() -> None:
    with VirtualClock() as clock:
        async with started(poll) as hive:
            await clock.advance(3599)
            assert hive.get(Poll).runs == 0
            await clock.advance(1)
            assert hive.get(Poll).runs == 1
            await clock.advance(24 * 3600)
            assert hive.get(Poll).runs == 25


async def test_a_job_that_fails_is_tried_again_soon() -> None:
    with VirtualClock() as clock:
        async with started(poll) as hive:
            job = hive.get(Poll)
            job.failures = 3
            job.timer.trigger()
            assert await clock.until(lambda: job.runs == 4) < 1


async def test_a_hook_that_hangs_is_overdue_at_once() -> None:
    def hang(lifecycle: Lifecycle) -> None:
        lifecycle.append(Hook("hang", anyio.sleep_forever, start_timeout=300))

    with VirtualClock() as clock:
        task = asyncio.create_task(started(invoke(hang)).__aenter__())
        await clock.until(task.done)
        with pytest.raises(StartError) as caught:
            await task
    assert isinstance(caught.value.exceptions[0], HookTimeoutError)


async def test_what_runs_in_a_thread_is_waited_for() -> None:
    go, seen = threading.Event(), []

    async def work() -> None:
        await anyio.to_thread.run_sync(go.wait)
        seen.append("done")

    with VirtualClock() as clock:
        task = asyncio.create_task(work())
        threading.Timer(0.02, go.set).start()
        await clock.run_until_idle()
        assert seen == ["done"]
        await task


async def test_waiting_for_a_condition_without_timers_raises_an_error() -> None:
    with VirtualClock() as clock, pytest.raises(AssertionError, match="does not hold: no timer runs"):
        await clock.until(lambda: False)


async def test_a_condition_is_not_waited_for_beyond_its_deadline() -> None:
    with VirtualClock() as clock:
        task = asyncio.create_task(anyio.sleep(100))
        with pytest.raises(AssertionError, match="did not hold within 60 s"):
            await clock.until(task.done, within=60)
        task.cancel()


async def test_a_clock_ticks_in_whole_nanoseconds() -> None:
    """0.2 s five times is one second, whatever floats make of it, and however long the machine is up."""
    for up in (0.0, 3e5, 1e8):
        loop = asyncio.get_running_loop()
        before, loop.time = loop.time, lambda up=up: up  # type: ignore[method-assign,misc]
        ticks = 0
        try:
            with VirtualClock() as clock:

                async def tick() -> None:
                    nonlocal ticks
                    while True:
                        await anyio.sleep(0.2)
                        ticks += 1

                async with anyio.create_task_group() as group:
                    group.start_soon(tick)
                    for second in range(1, 4):
                        await clock.advance(1)
                        assert ticks == 5 * second
                    if up < 1e6:  # after years of it, a float has no nanoseconds left
                        await clock.advance(1000)
                        assert ticks == 5015
                    group.cancel_scope.cancel()
        finally:
            loop.time = before  # type: ignore[method-assign]


@pytest.mark.parametrize("kind", ["default", "own", "asyncio", "executor"])
async def test_calls_in_threads_of_every_kind_are_waited_for(kind: str) -> None:
    """Each alone: one that is not waited for must not hide behind another that is."""
    done: list[str] = []

    def work() -> None:
        time.sleep(0.02)
        done.append(kind)

    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "default": lambda: anyio.to_thread.run_sync(work),
        "own": lambda: anyio.to_thread.run_sync(work, limiter=anyio.CapacityLimiter(1)),
        "asyncio": lambda: asyncio.to_thread(work),
        "executor": lambda: asyncio.get_running_loop().run_in_executor(None, work),
    }
    with VirtualClock() as clock:
        task = asyncio.ensure_future(calls[kind]())
        await clock.run_until_idle()
        assert done == [kind]
        assert task.done()


def test_another_event_loop_is_refused_in_one_line() -> None:
    async def enter() -> None:
        with VirtualClock():
            raise AssertionError

    with pytest.raises(RuntimeError, match="needs asyncio's own event loop; this one is of uvloop"):
        anyio.run(enter, backend_options={"use_uvloop": True})


def test_a_virtual_clock_without_an_asyncio_loop_raises_an_error() -> None:
    async def enter() -> None:
        VirtualClock().__enter__()

    with pytest.raises(RuntimeError, match="needs asyncio's own event loop; none runs here"):
        anyio.run(enter, backend="trio")
    with pytest.raises(RuntimeError, match="none runs here"):
        VirtualClock().__enter__()


async def test_a_clock_inside_another_is_refused_and_the_outer_one_goes_on() -> None:
    with VirtualClock() as clock:
        with pytest.raises(RuntimeError, match="inside another"):
            VirtualClock().__enter__()
        before = clock.now
        await clock.advance(1)
        assert clock.now == before + 1


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf")])
async def test_advancing_by_an_invalid_duration_is_refused(seconds: float) -> None:
    with VirtualClock() as clock, pytest.raises(ValueError, match="expected seconds, 0 or more and finite"):
        await clock.advance(seconds)
