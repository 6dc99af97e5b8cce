"""Hooks: order, roll-back, cancellation from outside."""

import asyncio
from collections.abc import Awaitable, Callable

import anyio
import anyio.abc
import anyio.lowlevel
import pytest

from lifecycle import (
    Hive,
    HiveError,
    Hook,
    Lifecycle,
    Shutdown,
    StartError,
    StopError,
    invoke,
    module,
    provide,
)

pytestmark = pytest.mark.anyio

Log = list[str]


class Base:
    name = "base"

    def __init__(self, lifecycle: Lifecycle) -> None:
        register(lifecycle, self.name)


class Left(Base):
    name = "left"

    def __init__(self, base: Base, lifecycle: Lifecycle) -> None:
        super().__init__(lifecycle)


class Right(Base):
    name = "right"

    def __init__(self, base: Base, lifecycle: Lifecycle) -> None:
        super().__init__(lifecycle)


class Between:
    """Has no hook itself: order passes through it."""

    def __init__(self, left: Left) -> None: ...


class Top(Base):
    name = "top"

    def __init__(self, between: Between, right: Right, lifecycle: Lifecycle) -> None:
        super().__init__(lifecycle)


log: Log = []
behaviour: dict[str, Callable[[], Awaitable[object]]] = {}
diamond = module("diamond", "Diamond", provide(Base, Left, Right, Between, Top), invoke(Top))
STARTS = ["base +", "left +", "right +", "top +"]


@pytest.fixture(autouse=True)
def _fresh() -> None:
    log.clear()
    behaviour.clear()


def register(lifecycle: Lifecycle, name: str) -> None:
    async def start() -> None:
        await anyio.lowlevel.checkpoint()
        await act(f"{name} +")

    async def stop() -> None:
        await anyio.lowlevel.checkpoint()
        await act(f"{name} -")

    lifecycle.append(Hook(name, start, stop, start_timeout=5, stop_timeout=5))


async def act(what: str) -> None:
    if what in behaviour:
        await behaviour[what]()
    log.append(what)


async def boom() -> None:
    raise OSError("boom")


def our_tasks() -> set[str]:
    return {task.get_name() for task in asyncio.all_tasks() if "hook" in task.get_name()}


async def test_users_start_after_what_they_use_and_stop_before_it() -> None:
    async with Hive(diamond, sequential=True).started():
        assert log == STARTS
        log.clear()
    assert log == ["top -", "right -", "left -", "base -"]
    assert our_tasks() == set()


async def test_siblings_start_at_the_same_time() -> None:
    met = asyncio.Barrier(2)
    behaviour.update({"left +": met.wait, "right +": met.wait, "left -": met.wait, "right -": met.wait})
    async with Hive(diamond).started():
        assert log[0] == "base +"
        assert log[-1] == "top +"
        assert set(log) == set(STARTS)


async def test_hooks_of_one_constructor_run_in_the_order_they_were_appended() -> None:
    class Many:
        def __init__(self, lifecycle: Lifecycle) -> None:
            for number in range(4):
                register(lifecycle, str(number))

    async with Hive(provide(Many), invoke(Many)).started():
        assert log == ["0 +", "1 +", "2 +", "3 +"]
    assert log[4:] == ["3 -", "2 -", "1 -", "0 -"]


@pytest.mark.parametrize("failing", STARTS)
@pytest.mark.parametrize("sequential", [True, False])
async def test_a_hook_that_fails_to_start_stops_all_that_had_started(
    failing: str, *, sequential: bool
) -> None:
    behaviour[failing] = boom
    with pytest.raises(StartError) as caught:
        await Hive(diamond, sequential=sequential).start()
    name = failing.split(maxsplit=1)[0]
    assert str(caught.value) == f"hive did not start: hook '{name}' (diamond) failed to start: OSError: boom"
    assert [str(error) for error in caught.value.exceptions] == ["boom"]
    started = {line.split()[0] for line in log if line.endswith("+")}
    stopped = {line.split()[0] for line in log if line.endswith("-")}
    assert started == stopped
    assert our_tasks() == set()


@pytest.mark.parametrize("failing", STARTS)
async def test_a_hook_that_fails_to_stop_keeps_no_other_from_stopping(failing: str) -> None:
    name = failing.split(maxsplit=1)[0]
    behaviour[f"{name} -"] = boom
    hive = Hive(diamond)
    await hive.start()
    with pytest.raises(StopError) as caught:
        await hive.stop()
    assert (
        str(caught.value) == f"hive did not stop well: hook '{name}' (diamond) failed to stop: OSError: boom"
    )
    assert {line for line in log if line.endswith("-")} == {"base -", "left -", "right -", "top -"} - {
        f"{name} -"
    }


async def test_a_failed_roll_back_reports_both_errors() -> None:
    behaviour.update({"top +": boom, "base -": boom})
    with pytest.raises(StartError) as caught:
        await Hive(diamond).start()
    assert str(caught.value).splitlines() == [
        "hive did not start:",
        "- hook 'top' (diamond) failed to start: OSError: boom",
        "- hook 'base' (diamond) failed to stop: OSError: boom",
    ]


async def test_a_start_cancelled_from_outside_stops_all_that_had_started() -> None:
    behaviour["top +"] = anyio.sleep_forever
    with anyio.move_on_after(30) as outside:
        async with anyio.create_task_group() as group:
            group.start_soon(Hive(diamond).start)
            while "right +" not in log or "left +" not in log:
                await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
    assert not outside.cancelled_caught
    assert {"left -", "right -", "base -"} <= set(log)
    assert log[-1] == "base -"
    assert our_tasks() == set()


async def test_a_block_cancelled_from_outside_runs_every_stop_to_its_end() -> None:
    async def slow_stop() -> None:
        for _ in range(5):
            await anyio.lowlevel.checkpoint()

    behaviour.update({f"{name} -": slow_stop for name in ("base", "left", "right", "top")})
    with anyio.CancelScope() as scope:
        async with Hive(diamond).started():
            scope.cancel()
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert {"top -", "left -", "right -", "base -"} <= set(log)


async def test_a_task_cancelled_by_asyncio_itself_runs_every_stop() -> None:
    """As Ctrl-C does to the main task."""
    ready = anyio.Event()

    async def main() -> None:
        async with Hive(diamond).started():
            ready.set()
            await anyio.sleep_forever()

    task = asyncio.create_task(main())
    await ready.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert log[-1] == "base -"


async def test_a_start_that_ends_just_as_it_is_cancelled_is_stopped_in_full() -> None:
    """The roll-back comes when the start's last await is done but its task has not run on yet."""
    gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def fail_with_gate_open() -> None:
        while "left here" not in log:
            await anyio.lowlevel.checkpoint()
        gate.set_result(None)
        raise OSError("boom")

    async def left() -> None:
        log.append("left here")
        await gate

    async def left_stop() -> None:
        await anyio.sleep(0.001)

    behaviour.update({"right +": fail_with_gate_open, "left +": left, "left -": left_stop})
    with pytest.raises(StartError):
        await Hive(diamond).start()
    assert [line for line in log if "left" in line] == ["left here", "left +", "left -"]


async def test_hooks_are_registered_while_constructing_only() -> None:
    retained = []

    class Keeper:
        def __init__(self, lifecycle: Lifecycle) -> None:
            retained.append(lifecycle)

    async with Hive(provide(Keeper), invoke(Keeper)).started():
        with pytest.raises(
            RuntimeError, match="hook 'late' of Keeper: hooks are registered while constructing only"
        ):
            retained[0].append(Hook("late"))


async def test_a_shutdown_with_an_error_ends_the_block_with_it() -> None:
    async def main() -> None:
        async with Hive(diamond).started() as hive:
            hive.get(Shutdown).request(HiveError("no more"))
            await anyio.sleep_forever()

    with pytest.raises(HiveError, match="no more"):
        await main()
    assert log[-1] == "base -"


async def test_a_shutdown_while_starting_rolls_back() -> None:
    class Quitter:
        def __init__(self, base: Base, lifecycle: Lifecycle, shutdown: Shutdown) -> None:
            async def start() -> None:
                shutdown.request()
                await anyio.sleep_forever()

            lifecycle.append(Hook("quitter", start))

    with pytest.raises(StartError, match="hive did not start: asked to end meanwhile"):
        await Hive(provide(Base, Quitter), invoke(Quitter)).start()
    assert log == ["base +", "base -"]


async def test_an_error_in_the_block_wins_over_one_at_stop() -> None:
    behaviour["base -"] = boom
    with pytest.raises(ValueError, match="mine") as caught:
        async with Hive(diamond).started():
            raise ValueError("mine")
    assert caught.value.__notes__ == [
        "hive did not stop well: hook 'base' (diamond) failed to stop: OSError: boom"
    ]


async def test_a_hive_starts_once() -> None:
    hive = Hive(diamond)
    await hive.start()
    await hive.stop()
    await hive.stop()
    with pytest.raises(RuntimeError, match="a hive starts once"):
        await hive.start()


async def test_every_constructor_and_hook_is_timed() -> None:
    async with Hive(diamond).started() as hive:
        pass
    steps = {(timing.kind, timing.name) for timing in hive.profile.timings}
    assert {("construct", "Between"), ("start", "top"), ("stop", "base"), ("invoke", "Top")} <= steps
    assert all(timing.began > 0 and timing.took >= 0 for timing in hive.profile.timings)


async def test_the_graph_knows_the_hooks_and_their_order() -> None:
    hive = Hive(diamond)
    graph = hive.graph()
    after = {
        hook.name: {found.name for found in graph.hooks if found.id in hook.after} for hook in graph.hooks
    }
    assert after == {"base": set(), "left": {"base"}, "right": {"base"}, "top": {"left", "right"}}
    async with hive.started():  # what graph() built is what runs
        assert set(log) == set(STARTS)
