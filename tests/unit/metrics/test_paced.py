"""Work shared by concurrent requests, never with data older than the request."""

from __future__ import annotations

import asyncio

import pytest

from cells.observe.metrics import CoalescedRuns

pytestmark = pytest.mark.anyio


async def test_a_caller_gets_the_result_of_work_started_after_its_call() -> None:
    started, go_on, count = asyncio.Semaphore(0), asyncio.Semaphore(0), 0

    async def work() -> int:
        nonlocal count
        count += 1
        started.release()
        mine = count
        await go_on.acquire()
        return mine

    paced = CoalescedRuns(work)
    async with asyncio.timeout(30):
        first = asyncio.create_task(paced.get())
        await started.acquire()
        later = [asyncio.create_task(paced.get()) for _ in range(5)]
        go_on.release()
        assert await first == 1
        await started.acquire()
        go_on.release()
        assert await asyncio.gather(*later) == [2] * 5


async def test_who_asks_gives_up_without_harm_to_others() -> None:
    go_on = asyncio.Event()

    async def work() -> str:
        await go_on.wait()
        return "done"

    paced = CoalescedRuns(work)
    async with asyncio.timeout(30):
        one, other = asyncio.create_task(paced.get()), asyncio.create_task(paced.get())
        await asyncio.sleep(0)
        one.cancel()
        go_on.set()
        assert await other == "done"


async def test_what_the_work_raises_reaches_all_and_the_next_time_is_new() -> None:
    failing = True

    async def work() -> str:
        if failing:
            raise OSError("not now")
        return "done"

    paced = CoalescedRuns(work)
    for result in await asyncio.gather(paced.get(), paced.get(), return_exceptions=True):
        assert isinstance(result, OSError)
    failing = False
    assert await paced.get() == "done"
