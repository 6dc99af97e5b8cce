"""Liveness probes of the agent's parts: their interval, and the handling of silent parts."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import anyio
import pytest

from cells.config import AgentConfig
from cells.observe.controllers import Controllers
from cells.observe.health import Probe, Probes, maps_probe, state_probe
from lifecycle import HealthTree, Hive, HiveError, Member, invoke, module, provide
from lifecycle.testing import VirtualClock

pytestmark = pytest.mark.anyio


def _needed(_: Probes) -> None:
    """Ask for them."""


@asynccontextmanager
async def asking(ask: Callable[[], Awaitable[object]]) -> AsyncIterator[Hive]:
    def disk() -> Member[Probe]:
        return Probe("disk", ask)

    cell = module("health", "one probe", provide(disk, Controllers, Probes), invoke(_needed))
    async with Hive(cell).started() as hive:
        yield hive


def reported(hive: Hive) -> list[tuple[str, str]]:
    """The health of the probe, and of its failure."""
    tree = hive.get(HealthTree)
    parts = [*tree.snapshot("health.status-probe-disk"), *tree.snapshot("health.disk")]
    return [(each.level, each.error or each.message) for each in parts]


async def test_a_probe_runs_every_five_seconds_and_reports_its_error() -> None:
    times: list[float] = []

    async def ask() -> None:
        times.append(anyio.current_time())
        if len(times) == 2:
            raise HiveError("disk is full")

    with VirtualClock() as clock:
        async with asking(ask) as hive:
            await clock.advance(1)
            assert reported(hive) == [("ok", "")]
            await clock.advance(5)
            assert reported(hive) == [("degraded", "HiveError: disk is full")]
            await clock.advance(5)
            assert reported(hive) == [("ok", "")]
            assert hive.get(Probes).stale == {}
    assert [round(after - before) for before, after in pairwise(times)] == [5, 5]


async def test_a_part_that_does_not_answer_for_a_minute_is_stale_until_it_answers_in_time() -> None:
    answer = anyio.Event()
    asked = 0

    async def ask() -> None:
        nonlocal asked
        asked += 1
        if asked == 2:
            await answer.wait()

    with VirtualClock() as clock:
        async with asking(ask) as hive:
            probes = hive.get(Probes)
            await clock.advance(5 + 59)
            assert probes.stale == {}
            await clock.advance(2)
            assert list(probes.stale) == ["disk"]
            assert reported(hive)[-1] == ("degraded", "no response from disk probe within 60 seconds")
            answer.set()
            await clock.advance(1)
            assert list(probes.stale) == ["disk"], "an answer that came too late says nothing of now"
            await clock.advance(5)
            assert (dict(probes.stale), asked, reported(hive)) == ({}, 3, [("ok", "")])


@pytest.mark.parametrize("fault", [None, HiveError("disk is full")])
async def test_the_start_waits_for_the_first_answer(fault: Exception | None) -> None:
    answer, started = anyio.Event(), anyio.Event()

    async def ask() -> None:
        await answer.wait()
        if fault is not None:
            raise fault

    async def run() -> None:
        async with asking(ask):
            started.set()

    with VirtualClock() as clock:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            await clock.advance(30)
            assert not started.is_set()
            answer.set()
            await clock.advance(0.1)
            assert started.is_set()


async def test_the_start_waits_no_longer_than_a_minute_for_what_hangs() -> None:
    stale: list[str] = []

    async def run() -> None:
        async with asking(anyio.sleep_forever) as hive:
            stale.extend(hive.get(Probes).stale)

    with VirtualClock() as clock:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            await clock.advance(59)
            assert not stale
            await clock.advance(2)
            assert stale == ["disk"]


class Place(AgentConfig):
    """Where a node's directories are; nothing is claimed."""

    def __init__(self, directory: Path) -> None:
        self.globals_dir = self.state = directory


async def test_the_nodes_directories_are_looked_at(tmp_path: Path) -> None:
    for make in (maps_probe, state_probe):
        await _probe(make(Place(tmp_path))).check()
        with pytest.raises(HiveError, match=str(tmp_path / "gone")):
            await _probe(make(Place(tmp_path / "gone"))).check()


def _probe(member: object) -> Probe:
    assert isinstance(member, Probe)
    return member
