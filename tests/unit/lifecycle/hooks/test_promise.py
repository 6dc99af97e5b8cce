"""A value that arrives later in the start-up, and asking the hive to end."""

import asyncio

import anyio
import anyio.lowlevel
import pytest

from lifecycle import Hive, Hook, Lifecycle, Promise, Shutdown, StartError, invoke, provide
from lifecycle.testing import no_leaks

pytestmark = pytest.mark.anyio


async def test_all_who_wait_get_the_value_and_so_do_those_who_come_later() -> None:
    promise: Promise[int] = Promise()
    async with no_leaks():
        waiting = [asyncio.ensure_future(promise.wait()) for _ in range(3)]
        await anyio.wait_all_tasks_blocked()
        assert not promise.resolved
        promise.resolve(7)
        assert promise.resolved
        assert [await one for one in waiting] == [7, 7, 7]
        assert await promise.wait() == 7


async def test_all_who_wait_get_the_failure() -> None:
    promise: Promise[int] = Promise()
    waiting = asyncio.ensure_future(promise.wait())
    await anyio.wait_all_tasks_blocked()
    promise.fail(OSError("no disk"))
    for one in (waiting, promise.wait()):
        with pytest.raises(OSError, match="no disk"):
            await one
    assert not promise.resolved


@pytest.mark.parametrize("settled", ["resolved", "failed"])
async def test_a_promise_is_settled_once(settled: str) -> None:
    promise: Promise[int | None] = Promise()
    if settled == "resolved":
        promise.resolve(None)
    else:
        promise.fail(OSError("no"))
    with pytest.raises(RuntimeError, match="resolved or failed before"):
        promise.resolve(1)
    with pytest.raises(RuntimeError, match="resolved or failed before"):
        promise.fail(OSError("again"))


async def test_one_who_waits_may_be_cancelled_and_the_others_wait_on() -> None:
    promise: Promise[int] = Promise()
    first, second = (asyncio.ensure_future(promise.wait()) for _ in range(2))
    await anyio.wait_all_tasks_blocked()
    first.cancel()
    await anyio.wait_all_tasks_blocked()
    promise.resolve(1)
    assert await second == 1
    assert first.cancelled()


class Daemon:
    """Resolves the promise in its hook, or fails it."""

    def __init__(self, promise: Promise[int], lifecycle: Lifecycle) -> None:
        self.promise = promise
        lifecycle.append(Hook("daemon", self.start))

    async def start(self) -> None:
        await anyio.lowlevel.checkpoint()
        self.promise.fail(OSError("no disk"))


class Api:
    """Its hook does not depend on the daemon, but awaits what that one promises."""

    def __init__(self, promise: Promise[int], lifecycle: Lifecycle) -> None:
        lifecycle.append(Hook("api", promise.wait))


def promise() -> Promise[int]:
    return Promise()


async def test_a_promise_that_fails_fails_the_hooks_that_await_it() -> None:
    async with no_leaks():
        with pytest.raises(StartError, match=r"hook 'api' .* failed to start: OSError: no disk"):
            await Hive(provide(promise, Daemon, Api), invoke(Daemon, Api)).start()


async def test_the_first_request_to_end_counts_and_late_listeners_hear_of_it() -> None:
    shutdown, heard = Shutdown(), list[str]()
    shutdown.listen(lambda: heard.append("early"))
    first = OSError("first")
    shutdown.request(first)
    shutdown.request(OSError("second"))
    shutdown.listen(lambda: heard.append("late"))
    assert shutdown.error is first
    assert heard == ["early", "late"]
