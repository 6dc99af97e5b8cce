"""Hooks that are contexts, and that crash."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import anyio
import pytest

from lifecycle import Cell, Hive, Lifecycle, StopError, group, invoke, provide
from tests.unit.lifecycle.hooks.base import Base, fresh, log

__all__ = ["fresh"]
pytestmark = pytest.mark.anyio


async def boom() -> None:
    raise OSError("boom")


async def test_a_context_is_entered_and_left_in_one_task_and_may_hold_a_task_group() -> None:
    tasks = []

    class Group:
        def __init__(self, base: Base, lifecycle: Lifecycle) -> None:
            lifecycle.enter("group", self.live)

        @asynccontextmanager
        async def live(self) -> AsyncIterator[None]:
            tasks.append(asyncio.current_task())
            async with anyio.create_task_group() as group:
                group.start_soon(anyio.sleep_forever)
                yield
                tasks.append(asyncio.current_task())
                group.cancel_scope.cancel()
            log.append("left the group")

    async with Hive(provide(Base, Group), invoke(Group)).started():
        assert log == ["base +"]
    assert log == ["base +", "left the group", "base -"]
    assert tasks[0] is tasks[1]


def crashing(context: Callable[[], AbstractAsyncContextManager[object]]) -> Cell:
    class Crashing:
        def __init__(self, base: Base, lifecycle: Lifecycle) -> None:
            lifecycle.enter("crashing", context)

    return group(provide(Base, Crashing), invoke(Crashing))


async def test_a_crash_inside_a_context_ends_the_hive_and_the_block() -> None:
    @asynccontextmanager
    async def context() -> AsyncIterator[None]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(boom)
            yield

    with pytest.raises(StopError, match=r"^hive ended: hook 'crashing' \(hive\) crashed: OSError: boom$"):
        async with Hive(crashing(context)).started():
            await anyio.sleep_forever()
    assert log == ["base +", "base -"]


async def test_a_context_that_ends_by_itself_is_a_crash() -> None:
    @asynccontextmanager
    async def context() -> AsyncIterator[None]:
        async with anyio.create_task_group() as tasks:
            yield_scope = tasks.cancel_scope
            asyncio.get_running_loop().call_soon(yield_scope.cancel)
            yield

    with pytest.raises(
        StopError, match="crashed: RuntimeError: its context ended while the hive was running"
    ):
        async with Hive(crashing(context)).started():
            await anyio.sleep_forever()
