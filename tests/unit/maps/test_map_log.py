"""The agent's writes to a map, as followers receive them."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import pytest

from cells.maps.map_log import MapLog

pytestmark = pytest.mark.anyio


async def test_a_change_during_delivery_is_returned_at_once() -> None:
    log = MapLog()
    log.note(b"1", b"one")
    seen = log.since(0)[-1].number
    log.note(b"2", None)
    with anyio.fail_after(30):
        await log.wait(seen)
    assert [change.key for change in log.since(seen)] == [b"2"]


async def test_the_next_change_ends_the_wait_and_so_does_who_wakes_it() -> None:
    log = MapLog()
    endings: tuple[Callable[[], None], ...] = (lambda: log.note(b"1", b"one"), log.wake)
    for ends in endings:
        over = anyio.Event()

        async def wait(over: anyio.Event) -> None:
            await log.wait(len(log.since(0)))
            over.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait, over)
            await anyio.wait_all_tasks_blocked()
            assert not over.is_set()
            ends()
            with anyio.fail_after(30):
                await over.wait()
