"""HTTP requests share the event loop fairly with other work."""

from __future__ import annotations

import asyncio
import re

import pytest

from lifecycle.http.fair_queue import FairQueue

pytestmark = pytest.mark.anyio


async def test_requests_come_in_order_each_with_a_round_for_others_before_it() -> None:
    queue, seen = FairQueue(), list[str]()

    async def request(name: str) -> None:
        await queue.wait(None)
        seen.append(name)

    def other(rounds: int) -> None:
        seen.append(".")
        if rounds > 1:
            asyncio.get_running_loop().call_soon(other, rounds - 1)

    asyncio.get_running_loop().call_soon(other, 20)
    async with asyncio.TaskGroup() as group:
        for name in "abcde":
            group.create_task(request(name))
    assert re.fullmatch(r"a\.{2,3}b\.\.c\.\.d\.\.e", "".join(seen).strip("."))


async def test_a_disconnected_client_loses_its_turn() -> None:
    queue, seen = FairQueue(), list[int]()

    async def request(number: int) -> None:
        await queue.wait(None)
        seen.append(number)

    tasks = [asyncio.create_task(request(number)) for number in range(4)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    tasks[2].cancel()
    await asyncio.wait(tasks)
    assert seen == [0, 3]
    await request(4)
    assert seen == [0, 3, 4]
