"""Leaks: what a block leaves behind is named."""

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from functools import partial

import anyio
import pytest

from lifecycle.testing import LeakError, no_leaks

pytestmark = pytest.mark.anyio


async def leaks_of(work: Callable[[], Awaitable[object]]) -> str:
    """The report about what the work leaves behind."""
    with pytest.raises(LeakError) as caught:
        async with no_leaks():
            await work()
    return str(caught.value)


async def test_resources_closed_before_the_end_are_not_leaks() -> None:
    async with no_leaks():
        async with anyio.create_task_group() as group:
            group.start_soon(anyio.sleep, 0)
        await anyio.to_thread.run_sync(os.getpid)
        os.close(os.open("/dev/null", os.O_RDONLY))


async def test_a_task_that_is_left_is_named_with_where_it_is() -> None:
    task = None

    async def forget() -> None:
        nonlocal task
        task = asyncio.create_task(anyio.Event().wait(), name="forgotten")
        await asyncio.sleep(0)

    assert "task 'forgotten', in Event.wait at" in await leaks_of(forget)
    assert task is not None
    task.cancel()


async def test_a_descriptor_that_is_left_is_named_with_what_it_is() -> None:
    descriptor = -1

    async def keep() -> None:
        nonlocal descriptor
        descriptor = os.open("/dev/null", os.O_RDONLY)

    text = await leaks_of(keep)
    assert f"descriptor {descriptor}, /dev/null" in text
    os.close(descriptor)


async def test_a_descriptor_that_was_there_and_is_another_file_now_is_a_leak() -> None:
    descriptor = os.open("/dev/zero", os.O_RDONLY)

    async def exchange() -> None:
        other = os.open("/dev/null", os.O_RDONLY)
        os.dup2(other, descriptor)
        os.close(other)

    assert f"descriptor {descriptor}, /dev/null" in await leaks_of(exchange)
    os.close(descriptor)


async def test_a_thread_that_is_left_is_named() -> None:
    go = threading.Event()
    thread = threading.Thread(target=go.wait, name="forgotten")
    with pytest.raises(LeakError, match="thread 'forgotten'"):
        async with no_leaks():
            thread.start()
    go.set()
    thread.join()


async def test_a_worker_thread_still_at_work_is_a_leak() -> None:
    go = threading.Event()
    async with anyio.create_task_group() as group:

        async def leave() -> None:
            group.start_soon(partial(anyio.to_thread.run_sync, go.wait))
            await asyncio.sleep(0)

        assert "a call in a worker thread" in await leaks_of(leave)
        go.set()


async def test_the_error_of_the_block_comes_first() -> None:
    async with anyio.create_task_group() as group:

        async def fail() -> None:
            group.start_soon(anyio.sleep_forever)
            raise KeyError

        with pytest.raises(KeyError):
            await leaks_of(fail)
        group.cancel_scope.cancel()
