"""However the body of a hook, a job or a constructor ends: the hive ends, and reports the true reason."""

import asyncio
import contextlib
import re
import sys
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from lifecycle import (
    BuildError,
    Hive,
    HiveError,
    Hook,
    Jobs,
    Lifecycle,
    Shutdown,
    StartError,
    StopError,
    exit_code,
    invoke,
)
from lifecycle.errors import BodyError, ExitRequestedError
from lifecycle.testing import eventually, no_leaks

pytestmark = pytest.mark.anyio


class Killed(BaseException):
    """One of an application, which is not an Exception."""


async def await_a_cancelled_task() -> None:
    """The usual ``task.cancel(); await task``."""
    task = asyncio.ensure_future(anyio.sleep_forever())
    await asyncio.sleep(0)
    task.cancel()
    await task


async def be_cancelled() -> None:
    """The task itself is cancelled."""
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await anyio.sleep_forever()


async def cancel_oneself_and_return() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


async def exit_with_three() -> None:
    sys.exit(3)


async def exit_with_a_text() -> None:
    sys.exit("no licence")


async def exit_well() -> None:
    sys.exit()


async def interrupt() -> None:
    raise KeyboardInterrupt


async def kill() -> None:
    raise Killed("for good")


async def close() -> None:
    raise GeneratorExit


async def fail_among_others() -> None:
    raise BaseExceptionGroup("several", [ValueError("bad"), SystemExit(4)])


ENDINGS: list[tuple[Callable[[], Coroutine[Any, Any, None]], str, int]] = [
    (await_a_cancelled_task, "UnexpectedCancelError: it awaited something that was cancelled", 1),
    (be_cancelled, "UnexpectedCancelError: it awaited something that was cancelled", 1),
    (exit_with_three, "called sys.exit(3)", 3),
    (exit_with_a_text, "no licence", 1),
    (exit_well, "called sys.exit(0)", 0),
    (interrupt, "was interrupted", 130),
    (kill, "BodyError: it raised Killed, which is not an Exception: for good", 1),
    (close, "BodyError: it raised GeneratorExit, which is not an Exception", 1),
    (fail_among_others, "called sys.exit(4)", 4),
]
endings = pytest.mark.parametrize(
    ("end", "message", "code"), ENDINGS, ids=lambda one: getattr(one, "__name__", "")
)


class Daemon:
    """Three hooks, one after the other, of which the middle one ends as given."""

    def __init__(self) -> None:
        self.stopped: list[str] = []

    def hive(self, middle: Callable[[], AbstractAsyncContextManager[object]]) -> Hive:
        def build(lifecycle: Lifecycle) -> None:
            lifecycle.append(Hook("below", stop=lambda: self.stop("below")))
            lifecycle.enter("middle", middle)
            lifecycle.append(Hook("above", stop=lambda: self.stop("above")))

        return Hive(invoke(build), stop_timeout=60, stop_budget=60)

    async def stop(self, name: str) -> None:
        self.stopped.append(name)


@endings
async def test_a_base_exception_in_a_start_stops_started_hooks(
    end: Callable[[], Awaitable[None]], message: str, code: int
) -> None:
    @asynccontextmanager
    async def middle() -> Any:
        await end()
        yield

    daemon = Daemon()
    async with no_leaks():
        with anyio.fail_after(30), pytest.raises(StartError) as raised:
            await daemon.hive(middle).start()
    assert message in str(raised.value)
    assert exit_code(raised.value) == code
    assert daemon.stopped == ["below"]


@endings
async def test_a_base_exception_in_a_stop_lets_all_hooks_stop(
    end: Callable[[], Awaitable[None]], message: str, code: int
) -> None:
    @asynccontextmanager
    async def middle() -> Any:
        yield
        await end()

    daemon = Daemon()
    async with no_leaks():
        with anyio.fail_after(30), pytest.raises(StopError) as raised:
            async with daemon.hive(middle).started():
                pass
    assert message in str(raised.value)
    assert exit_code(raised.value) == code
    assert daemon.stopped == ["above", "below"]


@endings
async def test_a_job_that_raises_base_exception_ends_the_hive_and_a_cancelled_one_is_retried(
    end: Callable[[], Awaitable[None]], message: str, code: int
) -> None:
    runs = 0
    again = anyio.Event()

    async def work() -> None:
        nonlocal runs
        runs += 1
        if runs > 1:
            again.set()
        else:
            await end()

    def build(jobs: Jobs, lifecycle: Lifecycle) -> None:
        jobs.one_shot("other", anyio.sleep_forever)
        jobs.one_shot("job", work)

    hive = Hive(invoke(build))
    async with no_leaks():
        with anyio.fail_after(30):
            if "UnexpectedCancelError" in message:
                async with hive.started():
                    await again.wait()
                assert runs == 2
            else:
                with pytest.raises((ExitRequestedError, BodyError)) as raised:
                    async with hive.started():
                        await anyio.sleep_forever()
                assert exit_code(raised.value) == code
                assert message in f"{type(raised.value).__name__}: {raised.value}"


async def test_a_stop_that_cancels_its_own_task_and_returns_has_ended_well() -> None:
    def build(lifecycle: Lifecycle) -> None:
        lifecycle.append(Hook("hook", stop=cancel_oneself_and_return))

    async with no_leaks():
        with anyio.fail_after(30):
            async with Hive(invoke(build)).started():
                pass


async def test_a_start_that_cancels_its_own_task_and_returns_ends_the_hive() -> None:
    def build(lifecycle: Lifecycle) -> None:
        lifecycle.append(Hook("hook", cancel_oneself_and_return))

    hive = Hive(invoke(build))
    async with no_leaks():
        with anyio.fail_after(30), pytest.raises((StartError, StopError), match="UnexpectedCancelError"):
            async with hive.started():
                await anyio.sleep_forever()


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), Killed("x"), asyncio.CancelledError()])
async def test_a_constructor_ends_the_start_by_name(error: BaseException) -> None:
    def build() -> None:
        raise error

    with pytest.raises(BuildError, match=r"build \(hive\) at .*test_endings.py:"):
        await Hive(invoke(build)).start()


async def test_errors_of_a_fatal_job_and_of_the_stop_are_both_reported() -> None:
    async def fail() -> None:
        raise HiveError("the lock is lost")

    async def stop() -> None:
        raise OSError("disk full")

    def build(jobs: Jobs, lifecycle: Lifecycle) -> None:
        lifecycle.append(Hook("disk", stop=stop))
        jobs.one_shot("lock", fail, fatal=True)

    with pytest.raises(HiveError, match="the lock is lost") as raised:
        async with Hive(invoke(build)).started():
            await anyio.sleep_forever()
    assert "hook 'disk' (hive) failed to stop: OSError: disk full" in raised.value.__notes__[0]


async def test_a_request_between_the_start_and_the_block_ends_the_block() -> None:
    """The loop runs others between the last hook's start and the block."""

    def build(lifecycle: Lifecycle, shutdown: Shutdown) -> None:
        async def start() -> None:
            asyncio.get_running_loop().call_soon(shutdown.request, HiveError("too late"))

        lifecycle.append(Hook("hook", start))

    with anyio.fail_after(30), pytest.raises(HiveError, match="too late"):
        async with Hive(invoke(build)).started():
            await anyio.sleep_forever()


async def test_a_request_from_a_thread_is_noticed_at_once() -> None:
    hive = Hive(invoke(lambda: None))

    async def work() -> None:
        async with hive.started():
            await anyio.to_thread.run_sync(hive.shutdown.request, HiveError("from a thread"))
            await anyio.sleep_forever()

    with anyio.fail_after(30), pytest.raises(HiveError, match="from a thread"):
        await work()


def test_a_shutdown_request_without_an_exception_raises_type_error() -> None:
    with pytest.raises(TypeError, match=r"Shutdown.request\('why'\): expected an exception"):
        Shutdown().request("why")  # type: ignore[arg-type]  # the mistake


async def test_cancelling_the_task_of_the_hooks_stops_them_in_order() -> None:
    daemon = Daemon()

    @asynccontextmanager
    async def middle() -> Any:
        yield
        daemon.stopped.append("middle")

    async with no_leaks():
        await daemon.hive(middle).start()
        (task,) = (task for task in asyncio.all_tasks() if task.get_name() == "hive: hooks")
        task.cancel()
        with anyio.fail_after(30), contextlib.suppress(asyncio.CancelledError):
            await task
    assert daemon.stopped == ["above", "middle", "below"]


@pytest.mark.parametrize("turns", range(9))
def test_a_loop_that_is_torn_down_at_any_moment_stops_what_has_started_in_order(turns: int) -> None:
    """asyncio.run() cancels all there is when its coroutine returns, while a hive starts or runs."""
    started, daemon = list[str](), Daemon()

    @asynccontextmanager
    async def middle() -> Any:
        started.append("middle")
        yield
        daemon.stopped.append("middle")

    async def main() -> None:
        task = asyncio.create_task(daemon.hive(middle).start())
        for _ in range(turns):
            await asyncio.sleep(0)
        assert turns < 8 or task.done()

    asyncio.run(main())
    assert daemon.stopped in (["above", "middle", "below"], ["middle", "below"], ["below"], [])
    assert ("middle" in daemon.stopped) == bool(started)
    assert turns < 8 or len(daemon.stopped) == 3


@pytest.mark.parametrize("end", [SystemExit(3), KeyboardInterrupt()], ids=["exit", "interrupt"])
def test_an_exit_in_a_task_that_a_hook_has_made_ends_the_loop_with_every_hook_stopped_in_order(
    end: BaseException,
) -> None:
    daemon = Daemon()

    async def leave() -> None:
        raise end

    @asynccontextmanager
    async def middle() -> Any:
        async with anyio.create_task_group() as group:
            group.start_soon(leave)
            yield

    with pytest.raises(type(end)):
        asyncio.run(daemon.hive(middle).run())
    assert daemon.stopped == ["above", "below"]


async def test_a_start_that_leaves_a_scope_open_is_reported_by_name_and_others_stop() -> None:
    daemon = Daemon()

    @asynccontextmanager
    async def middle() -> Any:
        anyio.CancelScope().__enter__()
        yield
        daemon.stopped.append("middle")

    hive = daemon.hive(middle)
    with (
        anyio.fail_after(30),
        pytest.raises(StopError, match=r"hook 'middle' .* failed to stop: RuntimeError"),
    ):
        async with hive.started():
            pass
    assert (daemon.stopped, hive.left_behind) == (["above", "middle", "below"], [])


@pytest.mark.parametrize("where", ["start", "job"])
async def test_a_stop_inside_what_it_would_wait_for_is_refused(where: str) -> None:
    async def stop() -> None:
        await hive.stop()

    def build(lifecycle: Lifecycle, jobs: Jobs) -> None:
        if where == "start":
            lifecycle.append(Hook("own", stop))
        else:
            jobs.one_shot("own", stop, fatal=True)

    hive = Hive(invoke(build), name="daemon")
    why = (
        r"stop\(\) was called in hook '.*own|build.*' \(daemon\), which it would wait for; a hook or job ends"
    )
    with anyio.fail_after(30):
        with pytest.raises((StartError, HiveError), match=why):
            async with hive.started():
                await anyio.sleep_forever()


async def test_a_hive_may_stop_another_in_a_hook() -> None:
    other = Hive(name="other")

    async def stop() -> None:
        await other.stop()

    def build(lifecycle: Lifecycle) -> None:
        lifecycle.append(Hook("own", other.start, stop))

    async with no_leaks(), Hive(invoke(build)).started():
        pass


async def test_a_run_ends_when_the_hive_is_stopped_from_outside() -> None:
    async def start() -> None:
        up.set()

    def build(lifecycle: Lifecycle) -> None:
        lifecycle.append(Hook("own", start))

    up = anyio.Event()
    hive = Hive(invoke(build))
    with anyio.fail_after(30):
        running = asyncio.ensure_future(hive.run())
        await up.wait()
        await anyio.lowlevel.checkpoint()
        await hive.stop()
        assert await running == 0


async def test_who_is_cancelled_twice_still_waits_for_the_stop() -> None:
    stopping, go_on = anyio.Event(), anyio.Event()
    done = []

    async def stop() -> None:
        stopping.set()
        await go_on.wait()
        done.append("stopped")

    def build(lifecycle: Lifecycle) -> None:
        lifecycle.append(Hook("slow", stop=stop))

    async def main() -> None:
        async with Hive(invoke(build)).started():
            started.set()
            await anyio.sleep_forever()

    started = anyio.Event()
    task = asyncio.ensure_future(main())
    with anyio.fail_after(30):
        await started.wait()
        task.cancel()
        await stopping.wait()
        for _ in range(3):
            task.cancel()
            for _ in range(10):
                await anyio.lowlevel.checkpoint()
            assert not task.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert done == ["stopped"]


async def test_a_stop_that_fails_is_raised_instead_of_a_cancellation() -> None:
    async def fail() -> None:
        raise OSError("disk full")

    def build(lifecycle: Lifecycle) -> None:
        lifecycle.append(Hook("save", stop=fail))

    async def main() -> None:
        async with Hive(invoke(build)).started():
            started.set()
            await anyio.sleep_forever()

    started = anyio.Event()
    task = asyncio.ensure_future(main())
    await started.wait()
    task.cancel()
    with pytest.raises(StopError, match=r"hook 'save' .* failed to stop: OSError: disk full"):
        await task


@pytest.mark.parametrize("where", ["constructor", "hook", "job"])
async def test_a_run_that_a_cell_broke_prints_where_in_the_cell_and_last_what_failed(
    where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async def fail() -> None:
        raise OSError("no such device")

    def build(lifecycle: Lifecycle, jobs: Jobs) -> None:
        if where == "constructor":
            raise OSError("no such device")
        if where == "hook":
            lifecycle.append(Hook("open", fail))
        jobs.one_shot("read", fail, fatal=True)

    assert await Hive(invoke(build)).run() == 1
    printed = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("time=")]
    first, *lines, last = printed
    assert first == "Traceback (most recent call last):"
    files = [line.split('"')[1] for line in lines if line.startswith('  File "')]
    assert set(files) == {__file__}
    ends = {
        "constructor": r"hive: .*build \(hive\) at .*test_endings.py:\d+ raised OSError: no such device",
        "hook": r"hive did not start: hook 'open' \(hive\) failed to start: OSError: no such device",
        "job": r"hive: OSError: no such device",
    }
    assert re.fullmatch(ends[where], last)


async def test_errors_of_a_task_group_are_named_not_counted() -> None:
    async def fail_in_a_task() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(fail)

    async def fail() -> None:
        raise OSError("the worker died")

    def build(jobs: Jobs) -> None:
        jobs.one_shot("read", fail_in_a_task, retries=0)

    async with Hive(invoke(build)).started() as hive:
        await eventually(lambda: any(one.error for one in hive.health.snapshot()))
        assert "OSError: the worker died" in {one.error for one in hive.health.snapshot()}

    def open_it(lifecycle: Lifecycle) -> None:
        lifecycle.append(Hook("open", fail_in_a_task))

    with pytest.raises(StartError, match=r"hook 'open' \(hive\) failed to start: OSError: the worker died$"):
        await Hive(invoke(open_it)).start()
