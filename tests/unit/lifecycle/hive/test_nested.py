"""Hives inside a hive: run by its hooks and jobs, checked and shown as a part of it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import pytest

from lifecycle import (
    Cell,
    GraphError,
    HealthTree,
    Hive,
    HiveError,
    InnerHive,
    Jobs,
    Lifecycle,
    Logger,
    Settings,
    SettingsError,
    Shutdown,
    StartError,
    StopError,
    Table,
    config,
    invoke,
    module,
    nest,
    provide,
)
from lifecycle.testing import VirtualClock, no_leaks
from tests.unit.lifecycle.hive.acts import act, behaviour, boom, fresh, hook, log

__all__ = ["fresh"]
pytestmark = pytest.mark.anyio


class Kube:
    def __init__(self, lifecycle: Lifecycle) -> None:
        hook(lifecycle, "kube")


def nodes() -> Table[str, str]:
    return Table("nodes", key=str)


class Pool(Settings, frozen=True):
    """Settings of the inner hive."""

    pool_size: int = 3
    """How many."""


class Ipam:
    def __init__(
        self, kube: Kube, nodes: Table[str, str], pool: Pool, lifecycle: Lifecycle, jobs: Jobs
    ) -> None:
        self.kube, self.nodes, self.pool = kube, nodes, pool
        hook(lifecycle, "ipam")
        jobs.timer("sync", lambda: act("sync"), 10)


def claims() -> Table[int, int]:
    return Table("claims", key=int)


class Garbage:
    def __init__(
        self,
        ipam: Ipam,
        claims: Table[int, int],
        shutdown: Shutdown,
        health: HealthTree,
        log: Logger,
        lifecycle: Lifecycle,
    ) -> None:
        self.shutdown, self.health = shutdown, health
        hook(lifecycle, "garbage")


class LeaderHive(InnerHive):
    """What only the leader runs."""


INNER = (
    module("ipam", "Addresses", config(Pool), provide(Ipam)),
    module("garbage", "Collects", provide(Garbage), invoke(Garbage)),
    provide(claims),
)


class ByHook:
    """Runs the inner hive from its start to its stop."""

    def __init__(self, inner: LeaderHive, lifecycle: Lifecycle) -> None:
        lifecycle.enter("lead", inner.started)


class ByJob:
    """Runs the inner hive for a given time, and again."""

    def __init__(self, inner: LeaderHive, jobs: Jobs) -> None:
        self.inner = inner
        jobs.one_shot("lead", inner.run)


def cells(runner: type, *inner: Cell) -> tuple[Cell, ...]:
    return (
        module("kube", "Kubernetes", provide(Kube, nodes)),
        module(
            "operator",
            "Operator",
            nest(LeaderHive, "leader", "Leader only", *(inner or INNER), share=(Kube, Table[str, str])),
            provide(runner),
            invoke(runner),
        ),
    )


def statuses(hive: Hive) -> dict[str, tuple[str, str]]:
    return {one.module: (one.level, one.message) for one in hive.health.snapshot()}


async def test_an_inner_hive_starts_and_stops_with_the_hook_that_runs_it() -> None:
    async with no_leaks(), Hive(*cells(ByHook)).started() as hive:
        assert log == ["kube +", "ipam +", "garbage +"]
        inner = hive.get(LeaderHive).current
        assert inner is not None
        assert inner.get(Ipam).kube is hive.get(Kube)
        assert inner.get(Ipam).nodes is hive.get(Table[str, str])
        with pytest.raises(HiveError, match="nothing in hive provides Ipam"):
            hive.get(Ipam)
        log.clear()
    assert log == ["garbage -", "ipam -", "kube -"]


async def test_each_run_builds_afresh_and_leaves_nothing_behind() -> None:
    seen: list[object] = []
    with VirtualClock() as clock:
        async with no_leaks(), Hive(*cells(ByJob)).started() as hive:
            inner = hive.get(LeaderHive)
            for _ in range(3):
                await clock.advance(62)
                assert inner.current is not None
                garbage = inner.current.get(Garbage)
                seen.append(garbage)
                assert garbage.health is hive.health
                assert statuses(hive) == {
                    "operator.lead": ("ok", "running"),
                    "operator.leader": ("ok", "running"),
                    "operator.leader.ipam.sync": ("ok", ""),
                }
                assert [job.name for job in hive.jobs.snapshot()] == ["lead", "sync"]
                assert [table.name for table in hive.tables.all()] == ["claims", "nodes"]
                steps = [(one.kind, one.module, one.name) for one in hive.profile.timings]
                assert steps.count(("start", "operator.leader.ipam", "ipam")) == 1
                garbage.shutdown.request(HiveError("lost the lease"))
                await clock.run_until_idle()
                assert statuses(hive)["operator.lead"] == ("degraded", "failed, will be tried again")
                assert statuses(hive)["operator.leader"] == ("degraded", "failed")
                assert len(statuses(hive)) == 2
                assert [job.name for job in hive.jobs.snapshot()] == ["lead"]
                assert [table.name for table in hive.tables.all()] == ["nodes"]
                await clock.advance(2)
    assert len(set(map(id, seen))) == 3


async def test_an_inner_hive_that_asks_to_end_ends_the_run_and_nothing_else() -> None:
    with VirtualClock() as clock:
        async with no_leaks(), Hive(*cells(ByJob)).started() as hive:
            await clock.run_until_idle()
            inner = hive.get(LeaderHive)
            assert inner.current is not None
            inner.current.shutdown.request()
            await clock.run_until_idle()
            assert log == ["kube +", "ipam +", "garbage +", "garbage -", "ipam -"]
            assert statuses(hive) == {
                "operator.lead": ("stopped", "done"),
                "operator.leader": ("stopped", "not running"),
            }
            assert not hive.shutdown.requested


async def test_a_job_contains_an_inner_hive_that_does_not_start_and_tries_again() -> None:
    behaviour["garbage +"] = boom
    with VirtualClock() as clock:
        async with no_leaks(), Hive(*cells(ByJob)).started() as hive:
            await clock.run_until_idle()
            assert log == ["kube +", "ipam +", "ipam -"]
            status = hive.health.snapshot("operator.leader")[0]
            assert status.level == "degraded"
            assert status.error == (
                "StartError: operator.leader did not start: "
                "hook 'garbage' (operator.leader.garbage) failed to start: OSError: boom"
            )
            behaviour.clear()
            await clock.advance(1)
            assert statuses(hive)["operator.leader"] == ("ok", "running")


async def test_in_a_hook_its_failure_fails_the_start_of_the_outer_hive_which_rolls_back() -> None:
    behaviour["garbage +"] = boom
    with pytest.raises(StartError) as caught:
        await Hive(*cells(ByHook)).start()
    assert str(caught.value) == (
        "hive did not start: hook 'lead' (operator) failed to start: StartError: operator.leader did not "
        "start: hook 'garbage' (operator.leader.garbage) failed to start: OSError: boom"
    )
    assert log == ["kube +", "ipam +", "ipam -", "kube -"]


async def test_a_crash_inside_ends_the_inner_hive_and_reaches_who_runs_it() -> None:
    crash = anyio.Event()

    class Crashing:
        def __init__(self, kube: Kube, lifecycle: Lifecycle) -> None:
            lifecycle.enter("crashing", self.live)
            hook(lifecycle, "above")

        @asynccontextmanager
        async def live(self) -> AsyncIterator[None]:
            async with anyio.create_task_group() as group:
                group.start_soon(self.wait_and_crash)
                yield

        async def wait_and_crash(self) -> None:
            await crash.wait()
            raise OSError("boom")

    inner = (provide(Crashing), invoke(Crashing))
    with VirtualClock() as clock:
        async with no_leaks(), Hive(*cells(ByJob, *inner)).started() as hive:
            await clock.run_until_idle()
            assert statuses(hive)["operator.leader"] == ("ok", "running")
            crash.set()
            await clock.run_until_idle()
            status = hive.health.snapshot("operator.leader")[0]
            assert (status.level, status.message) == ("degraded", "failed")
            assert status.error is not None
            assert status.error.startswith(
                "StopError: operator.leader ended: hook 'crashing' (operator.leader) crashed: "
            )
            assert log == ["kube +", "above +", "above -"]


async def test_an_overdue_outer_hook_lists_pending_inner_hooks() -> None:
    behaviour["ipam +"] = anyio.sleep_forever
    with VirtualClock() as clock:
        task = asyncio.ensure_future(Hive(*cells(ByHook), start_timeout=60).start())
        assert await clock.until(task.done) == pytest.approx(60)
    lines = [line.strip() for line in str(task.exception()).splitlines()]
    assert lines[0].endswith("hook 'lead' (operator) did not start within 60 s; pending hooks:")
    assert any(line.startswith("hook 'ipam' (operator.leader.ipam) has been starting for") for line in lines)
    assert lines[-1] == "└─ hook 'garbage' (operator.leader.garbage) waits for it"
    assert log == ["kube +", "kube -"]


@pytest.mark.parametrize("runner", [ByHook, ByJob])
async def test_what_goes_wrong_inside_at_the_stop_is_a_failure_of_the_outer_stop(runner: type) -> None:
    behaviour["ipam -"] = boom
    hive = Hive(*cells(runner))
    await hive.start()
    while "garbage +" not in log:
        await anyio.lowlevel.checkpoint()
    with pytest.raises(
        StopError, match=r"hook 'ipam' \(operator\.leader\.ipam\) failed to stop: OSError: boom"
    ):
        await hive.stop()
    assert log[-2:] == ["garbage -", "kube -"]


async def test_a_job_that_does_not_end_is_named_with_what_it_awaits() -> None:
    async def hold_out() -> None:
        with anyio.CancelScope(shield=True):
            await held.wait()

    held = asyncio.Event()

    def holds(jobs: Jobs) -> None:
        jobs.one_shot("short", anyio.lowlevel.checkpoint)
        jobs.one_shot("hold", hold_out)

    hive = Hive(module("out", "Holds out", invoke(holds)), stop_timeout=10)
    with VirtualClock() as clock:
        await hive.start()
        task = asyncio.ensure_future(hive.stop())
        await clock.until(task.done)
    held.set()
    lines = [line.strip() for line in str(task.exception()).splitlines()]
    assert "hook 'jobs of holds' (out) did not stop within 10 s; pending hooks:" in lines[0] + lines[1]
    at = lines.index("job 'hold' has not ended")
    assert "hold_out at tests/unit/lifecycle/hive/test_nested.py" in lines[at + 1]
    assert not any("job 'short'" in line for line in lines)


async def test_an_inner_hive_runs_once_at_a_time() -> None:
    async with Hive(*cells(ByHook)).started() as hive:
        with pytest.raises(RuntimeError, match=r"operator\.leader runs already"):
            async with hive.get(LeaderHive).started():
                pass
        inner = hive.get(LeaderHive).current
        assert inner is not None
        assert inner.modules.affected("operator.leader.ipam") == [
            "operator.leader.ipam",
            "operator.leader.garbage",
        ]


async def test_settings_of_an_inner_hive_are_settings_of_the_outer_one() -> None:
    hive = Hive(*cells(ByHook), settings={"pool-size": 7})
    assert [option.name for option in hive.options()] == ["pool-size"]
    async with hive.started():
        inner = hive.get(LeaderHive).current
        assert inner is not None
        assert inner.get(Ipam).pool.pool_size == 7
    with pytest.raises(SettingsError, match="pool-size"):
        Hive(*cells(ByHook), settings={"pool-size": "many"}).check()


def test_faults_of_an_inner_hive_are_faults_of_the_outer_one() -> None:
    class Needy:
        def __init__(self, jobs: Jobs, kube: Kube, absent: Garbage) -> None: ...

    bad = (module("needy", "Needy", provide(Needy), invoke(Needy)),)
    with pytest.raises(GraphError) as caught:
        Hive(*cells(ByHook, *bad)).check()
    assert "nothing provides Garbage" in str(caught.value)
    assert "operator.leader.needy" in str(caught.value)


def test_a_shared_type_without_a_provider_is_a_fault() -> None:
    with pytest.raises(GraphError) as caught:
        Hive(*cells(ByHook)[1:]).check()
    text = str(caught.value)
    assert "nothing provides Kube" in text
    assert "LeaderHive (operator.leader) at tests/unit/lifecycle/hive/test_nested.py" in text


def test_the_graph_shows_an_inner_hive_as_a_part() -> None:
    graph = Hive(*cells(ByHook)).graph()
    parents = {one.id: one.parent for one in graph.modules}
    assert parents["operator.leader.ipam"] == "operator.leader"
    assert parents["operator.leader"] == "operator"
    ids = {one.id for one in graph.constructors} | {one.id for one in graph.invokes}
    assert len(ids) == len(graph.constructors) + len(graph.invokes)
    assert all(edge.source in ids and edge.target in ids for edge in graph.edges)
    edges = {(edge.source, edge.target) for edge in graph.edges}
    assert ("operator.leader.garbage/Garbage", "operator.leader.ipam/Ipam") in edges
    assert ("operator.leader/Kube", "operator.leader/LeaderHive") in edges
    assert ("operator.leader/LeaderHive", "kube/Kube") in edges
    assert [one.name for one in graph.hooks] == ["kube", "lead", "ipam", "jobs of Ipam", "garbage"]
    assert [(one.name, one.module) for one in graph.settings] == [("pool-size", "operator.leader.ipam")]
    assert "Leader only" in graph.tree()
    assert log == []


async def test_an_inner_hive_runs_after_its_graph_was_drawn() -> None:
    hive = Hive(*cells(ByHook))
    hive.graph()
    async with hive.started():
        assert log


async def test_the_timeline_shows_what_ran_inside() -> None:
    from lifecycle.graph.timeline import timeline_of

    async with Hive(*cells(ByHook)).started() as hive:
        timeline = timeline_of(hive.graph(), hive.profile)
    assert any("operator.leader.ipam/Ipam" in span.id for span in timeline.spans if span.kind == "start")


async def test_disabling_its_module_stops_who_runs_it_and_enabling_runs_it_again() -> None:
    async with no_leaks(), Hive(*cells(ByHook)).started() as hive:
        await hive.modules.disable("operator.leader")
        assert log[3:] == ["garbage -", "ipam -"]
        await hive.modules.enable("operator.leader")
        assert log[5:] == ["ipam +", "garbage +"]


async def test_an_inner_hive_may_hold_another() -> None:
    class Deep(InnerHive):
        """Two below."""

    class RunsDeep:
        def __init__(self, deep: Deep, lifecycle: Lifecycle) -> None:
            lifecycle.enter("deep", deep.started)

    class Bottom:
        def __init__(self, kube: Kube, lifecycle: Lifecycle) -> None:
            hook(lifecycle, "bottom")

    inner = (
        nest(Deep, "deep", "Deep", provide(Bottom), invoke(Bottom), share=(Kube,)),
        module("runs", "Runs", provide(RunsDeep), invoke(RunsDeep)),
    )
    async with no_leaks(), Hive(*cells(ByHook, *inner)).started() as hive:
        assert log == ["kube +", "bottom +"]
        assert "operator.leader.deep" in {one.id for one in hive.graph().modules}
        assert statuses(hive)["operator.leader.deep"] == ("ok", "running")
    assert log[2:] == ["bottom -", "kube -"]
