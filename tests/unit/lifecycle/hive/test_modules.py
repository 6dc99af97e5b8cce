"""Modules switched off and on while the hive runs."""

import asyncio
import gc
import random
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lifecycle import (
    BuildError,
    Cell,
    Hive,
    HiveError,
    Hook,
    Jobs,
    Lifecycle,
    Modules,
    NotStartedError,
    Settings,
    StartError,
    StopError,
    Table,
    config,
    invoke,
    module,
    provide,
)
from lifecycle.errors import TableClosedError
from lifecycle.testing import VirtualClock, no_leaks
from tests.support.examples import scaled
from tests.unit.lifecycle.hive.acts import act, behaviour, boom, fresh, hook, log

__all__ = ["fresh"]
pytestmark = pytest.mark.anyio


class Size(Settings, frozen=True):
    """Settings of the store."""

    size: int = 3


class Disk:
    def __init__(self, lifecycle: Lifecycle) -> None:
        hook(lifecycle, "disk")


class Store:
    def __init__(self, disk: Disk, size: Size, lifecycle: Lifecycle, jobs: Jobs) -> None:
        hook(lifecycle, "store")
        jobs.timer("flush", self.flush, 10)

    async def flush(self) -> None:
        await act("flush")


class View:
    """Has no hook, but holds a store."""

    def __init__(self, store: Store) -> None:
        self.store = store


class Web:
    def __init__(self, view: View, disk: Disk, lifecycle: Lifecycle) -> None:
        self.view = view
        hook(lifecycle, "web")


class Clock:
    def __init__(self, size: Size, lifecycle: Lifecycle) -> None:
        hook(lifecycle, "clock")


def cells() -> tuple[Cell, ...]:
    return (
        module("disk", "Disk", provide(Disk)),
        module("store", "Store", config(Size), provide(Store), module("view", "View", provide(View))),
        module("web", "Web", provide(Web), invoke(Web)),
        module("clock", "Clock", provide(Clock), invoke(Clock)),
    )


def statuses(hive: Hive) -> dict[str, tuple[str, str]]:
    return {one.module: (one.level, one.message) for one in hive.health.snapshot()}


@pytest.mark.parametrize("sequential", [True, False])
async def test_disabling_stops_a_module_and_what_needs_it_against_the_arrows(*, sequential: bool) -> None:
    async with no_leaks(), Hive(*cells(), sequential=sequential).started() as hive:
        log.clear()
        assert hive.modules.affected("store") == ["store", "store.view", "web"]
        assert await hive.modules.disable("store") == ["store", "store.view", "web"]
        assert log == ["web -", "store -"]
        assert hive.modules.disabled == ["store"]
        assert await hive.modules.disable("store") == []
        log.clear()
    assert sorted(log) == ["clock -", "disk -"]


@pytest.mark.parametrize("sequential", [True, False])
async def test_enabling_starts_fresh_instances_in_order_on_what_was_left_running(*, sequential: bool) -> None:
    async with no_leaks(), Hive(*cells(), sequential=sequential).started() as hive:
        disk, store, web = hive.get(Disk), hive.get(Store), hive.get(Web)
        await hive.modules.disable("store")
        log.clear()
        assert await hive.modules.enable("store") == ["store", "store.view", "web"]
        assert log == ["store +", "web +"]
        assert hive.get(Disk) is disk
        assert hive.get(Store) is not store
        assert hive.get(Web) is not web
        assert hive.get(Web).view.store is hive.get(Store)
        assert await hive.modules.enable("store") == []
        log.clear()
    assert log.index("web -") < log.index("store -") < log.index("disk -")


async def test_a_disabled_module_reports_only_that_it_is_disabled() -> None:
    with VirtualClock() as clock:
        async with Hive(*cells()).started() as hive:
            await clock.run_until_idle()
            assert statuses(hive)["store.flush"] == ("ok", "waiting")
            assert [job.name for job in hive.jobs.snapshot()] == ["flush"]
            await hive.modules.disable("store")
            assert statuses(hive) == {
                "store": ("stopped", "disabled"),
                "store.view": ("stopped", "disabled with store"),
                "web": ("stopped", "disabled with store"),
            }
            assert hive.jobs.snapshot() == []
            with pytest.raises(NotStartedError, match="Web is not there: module store is disabled"):
                hive.get(Web)
            log.clear()
            await clock.advance(100)
            assert log == []
            await hive.modules.enable("store")
            await clock.advance(10)
            assert statuses(hive) == {"store.flush": ("ok", "")}
            assert "flush" in log


async def test_the_graph_and_the_profile_show_what_is_there() -> None:
    async with Hive(*cells()).started() as hive:
        for _ in range(3):
            await hive.modules.disable("store")
            assert [one.name for one in hive.graph().hooks] == ["disk", "clock"]
            assert {one.provides for one in hive.graph().constructors if not one.built} == {
                "Store",
                "View",
                "Web",
            }
            await hive.modules.enable("store")
        assert sorted(one.name for one in hive.graph().hooks) == [
            "clock",
            "disk",
            "jobs of Store",
            "store",
            "web",
        ]
        steps = [(one.kind, one.name) for one in hive.profile.timings]
        assert steps.count(("start", "store")) == 1
        assert steps.count(("construct", "Web")) == 1


@pytest.mark.parametrize("sequential", [True, False])
async def test_instances_of_a_disabled_module_are_garbage_collected(*, sequential: bool) -> None:
    async with Hive(*cells(), sequential=sequential).started() as hive:
        for _ in range(3):
            thrown = [weakref.ref(hive.get(kind)) for kind in (Store, View, Web)]
            await hive.modules.disable("store")
            await anyio.wait_all_tasks_blocked()
            gc.collect()
            assert [one() for one in thrown] == [None, None, None]
            await hive.modules.enable("store")
        held = hive._supervisor
        assert held is not None
        assert max(len(node.live) for node in held._alive) <= 5


async def test_what_two_disabled_modules_keep_down_comes_back_with_the_last() -> None:
    async with no_leaks(), Hive(*cells()).started() as hive:
        await hive.modules.disable("web")
        await hive.modules.disable("disk")
        log.clear()
        assert await hive.modules.enable("disk") == ["disk", "store", "store.view"]
        assert log == ["disk +", "store +"]
        assert await hive.modules.enable("web") == ["web"]
        assert log[2:] == ["web +"]


async def test_a_module_that_does_not_start_stays_disabled_and_can_be_enabled_later() -> None:
    async with no_leaks(), Hive(*cells()).started() as hive:
        await hive.modules.disable("store")
        log.clear()
        behaviour["web +"] = boom
        with pytest.raises(StartError) as caught:
            await hive.modules.enable("store")
        assert str(caught.value) == "store was not enabled: hook 'web' (web) failed to start: OSError: boom"
        assert log == ["store +", "store -"]
        assert hive.modules.disabled == ["store"]
        assert statuses(hive)["web"] == ("stopped", "disabled with store")
        behaviour.clear()
        await hive.modules.enable("store")
        assert hive.modules.disabled == []
        assert hive.get(Web).view.store is hive.get(Store)


async def test_a_module_with_a_failing_constructor_stays_disabled() -> None:
    faults: list[Exception] = []

    class Fickle:
        def __init__(self, disk: Disk) -> None:
            if faults:
                raise faults.pop()

    extra = module("fickle", "Fickle", provide(Fickle), invoke(Fickle))
    async with no_leaks(), Hive(*cells(), extra).started() as hive:
        await hive.modules.disable("disk")
        faults.append(OSError("no"))
        with pytest.raises(BuildError, match="Fickle"):
            await hive.modules.enable("disk")
        assert hive.modules.disabled == ["disk"]
        await hive.modules.enable("disk")
        assert hive.get(Fickle) is not None


async def test_a_hook_that_fails_to_stop_is_reported_and_the_module_is_disabled() -> None:
    behaviour["web -"] = boom
    async with no_leaks(), Hive(*cells()).started() as hive:
        with pytest.raises(StopError) as caught:
            await hive.modules.disable("store")
        assert str(caught.value) == "store did not stop well: hook 'web' (web) failed to stop: OSError: boom"
        assert hive.modules.disabled == ["store"]
        assert "store -" in log
        behaviour.clear()
        await hive.modules.enable("store")


async def test_an_enabling_that_is_cancelled_is_rolled_back() -> None:
    async with no_leaks(), Hive(*cells()).started() as hive:
        await hive.modules.disable("store")
        log.clear()
        behaviour["web +"] = anyio.sleep_forever
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:
                group.start_soon(hive.modules.enable, "store")
                await anyio.wait_all_tasks_blocked()
                with pytest.raises(HiveError, match="clock cannot be switched: store is being enabled"):
                    await hive.modules.disable("clock")
                scope.cancel()
        assert log == ["store +", "store -"]
        assert hive.modules.disabled == ["store"]


async def test_a_hive_that_stops_while_a_module_is_enabled_reaches_every_hook() -> None:
    caught: list[BaseException] = []

    async def enable(hive: Hive) -> None:
        try:
            await hive.modules.enable("store")
        except StartError as error:
            caught.append(error)

    async with anyio.create_task_group() as group, Hive(*cells()).started() as hive:
        await hive.modules.disable("store")
        log.clear()
        behaviour["web +"] = anyio.sleep_forever
        group.start_soon(enable, hive)
        await anyio.wait_all_tasks_blocked()
    assert str(caught[0]) == "store was not enabled: the hive is stopping"
    assert [line for line in log if line != "clock -"] == ["store +", "store -", "disk -"]


async def test_a_hook_that_crashes_after_it_was_enabled_ends_the_hive_by_its_name() -> None:
    crash = anyio.Event()

    async def wait_and_crash() -> None:
        await crash.wait()
        raise OSError("boom")

    @asynccontextmanager
    async def live() -> AsyncIterator[None]:
        async with anyio.create_task_group() as group:
            group.start_soon(wait_and_crash)
            yield
            group.cancel_scope.cancel()

    class Crash:
        def __init__(self, web: Web, lifecycle: Lifecycle) -> None:
            lifecycle.enter("crash", live)

    async def main() -> None:
        extra = module("crash", "Crash", provide(Crash), invoke(Crash))
        async with Hive(*cells(), extra).started() as hive:
            await hive.modules.disable("crash")
            await hive.modules.enable("crash")
            crash.set()
            await anyio.sleep_forever()

    with pytest.raises(StopError, match=r"^hive ended: hook 'crash' \(crash\) crashed: "):
        await main()
    assert log.index("web -") < log.index("store -") < log.index("disk -")


async def test_a_job_may_disable_the_module_it_belongs_to() -> None:
    class Suicidal:
        def __init__(self, modules: Modules, jobs: Jobs, lifecycle: Lifecycle) -> None:
            hook(lifecycle, "suicidal")
            jobs.one_shot("leave", lambda: modules.disable("suicidal"))

    extra = module("suicidal", "Suicidal", provide(Suicidal), invoke(Suicidal))
    with VirtualClock() as clock:
        async with Hive(*cells(), extra).started() as hive:
            await clock.advance(1)  # it was refused while the hive started, and tried again
            assert log[-1] == "suicidal -"
            assert hive.modules.disabled == ["suicidal"]
            await hive.modules.disable("clock")  # no switch is under way
            assert statuses(hive)["suicidal"] == ("stopped", "disabled")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("stor", "there is no module 'stor' in hive; did you mean store?"),
        ("zzz", "there is no module 'zzz' in hive"),
        ("hive", "hive is the hive itself, which is stopped and not disabled"),
    ],
)
async def test_what_cannot_be_switched_is_refused(name: str, message: str) -> None:
    hive = Hive(*cells())
    with pytest.raises(HiveError, match="module store cannot be switched: hive is not running"):
        await hive.modules.disable("store")
    async with hive.started():
        for switch in (hive.modules.disable, hive.modules.enable):
            with pytest.raises(HiveError) as caught:
                await switch(name)
            assert str(caught.value) == message
    with pytest.raises(HiveError, match="module store cannot be switched: hive is not running"):
        await hive.modules.enable("store")


SWITCHES = st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=8)


@settings(max_examples=scaled(60), deadline=None)
@given(st.integers(0, 2**32), SWITCHES, st.booleans())
def test_whatever_is_switched_runs_exactly_what_needs_nothing_disabled(
    seed: int, switches: list[tuple[bool, int]], sequential: bool
) -> None:
    """Random graphs of six modules with two constructors each, switched at random."""
    anyio.run(_switch_at_random, seed, switches, sequential)


async def _switch_at_random(seed: int, switches: list[tuple[bool, int]], sequential: bool) -> None:
    dice = random.Random(seed)  # noqa: S311  # graphs, no secrets
    running: dict[int, object] = {}
    needs: dict[int, list[int]] = {}
    kinds: list[Any] = []
    for number in range(12):
        needs[number] = dice.sample(range(number), dice.randint(0, min(number, 2)))
        kinds.append(_kind(number, [kinds[one] for one in needs[number]], needs[number], running))
    modules = [module(f"m{one}", "M", provide(*kinds[one::6]), invoke(*kinds[one::6])) for one in range(6)]
    async with Hive(*modules, sequential=sequential).started() as hive:
        off: set[int] = set()
        for enable, one in switches:
            before = dict(running)
            await (hive.modules.enable if enable else hive.modules.disable)(f"m{one}")
            off = off - {one} if enable else off | {one}
            down: set[int] = set()
            for number in range(12):
                if number % 6 in off or down & set(needs[number]):
                    down.add(number)
            assert set(running) == set(range(12)) - down
            retained = set(before) & set(running)
            assert all(running[number] is before[number] for number in retained)
    assert running == {}


def _kind(number: int, below: list[type], needs: list[int], running: dict[int, object]) -> type:
    """A class that counts as running between its hooks, and checks that what it needs runs meanwhile."""

    def init(self: Any, lifecycle: Lifecycle, first: Any = None, second: Any = None) -> None:
        held = [one for one in (first, second) if one is not None]

        async def start() -> None:
            await anyio.lowlevel.checkpoint()
            assert [running[one] for one in needs] == held
            running[number] = self

        async def stop() -> None:
            await anyio.lowlevel.checkpoint()
            assert [running[one] for one in needs] == held
            del running[number]

        lifecycle.append(Hook(str(number), start, stop))

    names = ["first", "second"][: len(below)]
    init.__annotations__ = {"lifecycle": Lifecycle, **dict(zip(names, below, strict=True))}
    return type(f"K{number}", (), {"__init__": init})


async def test_a_source_that_comes_back_is_waited_for_again() -> None:
    """Its table is another module's, and has stayed: what is missing in it may still come."""
    filling = anyio.Event()

    class Source:
        def __init__(self, names: Table[str, str], jobs: Jobs) -> None:
            self.table, self.initializer = names, names.initializer("source")
            jobs.one_shot("fill", self.fill)

        async def fill(self) -> None:
            self.table.put("first")
            await filling.wait()
            self.initializer.done()

    def names_table() -> Table[str, str]:
        return Table("names", key=str)

    cells = (
        module("names", "Names", provide(names_table)),
        module("source", "Source", provide(Source), invoke(Source)),
    )
    async with no_leaks(), Hive(*cells).started() as hive:
        names = hive.get(Table[str, str])
        for done in (False, True):
            if done:
                filling.set()
                await names.wait_initialized()
                filling = anyio.Event()
            await hive.modules.disable("source")
            assert await hive.modules.enable("source") == ["source"]
            assert names.uninitialized_by == ["source"]
        filling.set()
        with anyio.fail_after(30):
            await names.wait_initialized()
        with pytest.raises(RuntimeError, match="table names is initialized already"):
            names.initializer("late")


async def test_who_watches_a_table_of_a_disabled_module_gets_a_clear_error() -> None:
    """The watcher has found the table by its name, as a shell does: nothing stops it with the module."""

    def names_table() -> Table[str, str]:
        return Table("names", key=str)

    def keep(_: Table[str, str]) -> None: ...

    async with Hive(module("names", "Names", provide(names_table), invoke(keep))).started() as hive:
        table = hive.tables.get("names")
        table.put("before")  # type: ignore[attr-defined]  # it is a Table
        changes, mapped = table.changes(), table.map(str.upper)
        mapped_changes = mapped.changes()
        waits = [
            asyncio.ensure_future(wait)
            for wait in (
                follow(changes),
                follow(mapped_changes),
                table.wait_for("never"),
                table.wait_removed("before"),
            )
        ]
        await anyio.wait_all_tasks_blocked()
        await hive.modules.disable("names")
        with anyio.fail_after(30):
            ended = await asyncio.gather(*waits, return_exceptions=True)
        why = "table names is closed: module names was disabled; look it up again once that is enabled"
        assert [str(one) for one in ended] == [why] * 4
        assert {type(one) for one in ended} == {TableClosedError}
        assert table.all() == ["before"]
        await hive.modules.enable("names")
        again = hive.tables.get("names").changes()
        hive.get(Table[str, str]).put("after")
        assert [one.row for one in await anext(again)] == ["after"]


async def follow(changes: AsyncIterator[object]) -> None:
    async for _ in changes:
        pass
