"""Requests take turns with everything else the loop does."""

from __future__ import annotations

import asyncio

import pytest

from cells.http.turns import Turns

pytestmark = pytest.mark.anyio


async def test_one_request_a_round_in_the_order_they_came() -> None:
    turns, seen = Turns(), list[int | str]()

    async def request(number: int) -> None:
        await turns.take()
        seen.append(number)

    def other(rounds: int) -> None:
        seen.append("other")
        if rounds > 1:
            asyncio.get_running_loop().call_soon(other, rounds - 1)

    asyncio.get_running_loop().call_soon(other, 12)
    async with asyncio.TaskGroup() as group:
        for number in range(5):
            group.create_task(request(number))
    assert [each for each in seen if each != "other"] == [0, 1, 2, 3, 4]
    between = "".join("." if each == "other" else str(each) for each in seen).strip(".")
    assert [*"01234"] == [each for each in between.split(".") if each]  # never two between two rounds


async def test_who_goes_away_is_passed_over() -> None:
    turns, seen = Turns(), list[int]()

    async def request(number: int) -> None:
        await turns.take()
        seen.append(number)

    tasks = [asyncio.create_task(request(number)) for number in range(4)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    tasks[2].cancel()
    await asyncio.wait(tasks)
    assert seen == [0, 3]
    await request(4)
    assert seen == [0, 3, 4]
