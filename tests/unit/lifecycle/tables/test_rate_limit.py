"""Reconcilers with a rate limit: how often they call, and what becomes of changes meanwhile."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import anyio
import anyio.lowlevel
import pytest

from lifecycle import Hive, Jobs, Reconciler, Table, invoke, module
from lifecycle.jobs.job import Backoff
from lifecycle.tables import RateLimit
from lifecycle.testing import VirtualClock

pytestmark = pytest.mark.anyio

Row = tuple[str, int]


@dataclass
class FakeTarget:
    """Rows, and when they were put and dropped."""

    rows: dict[str, Row] = field(default_factory=dict)
    calls: list[tuple[float, str]] = field(default_factory=list)
    fails: bool = False

    async def observe(self) -> Mapping[str, Row]:
        await anyio.lowlevel.checkpoint()
        return dict(self.rows)

    def matches(self, row: Row, observed: Row) -> bool:
        return row == observed

    async def put(self, batch: Mapping[str, Row]) -> None:
        await self._called("put", batch)
        self.rows.update(batch)

    async def drop(self, batch: Collection[str]) -> None:
        await self._called("drop", batch)
        for key in batch:
            del self.rows[key]

    async def _called(self, name: str, batch: Collection[str]) -> None:
        await anyio.lowlevel.checkpoint()
        self.calls.append((round(anyio.current_time(), 6), " ".join((name, *batch))))
        if self.fails:
            raise OSError("busy")


class World:
    """A table with rows that reach a target as fast as a limit allows, in time that passes on request."""

    def __init__(self, limit: RateLimit, batch: int = 256) -> None:
        self.table: Table[str, Row] = Table("rows", key=lambda row: row[0])
        self.target = FakeTarget()
        self.reconciler = Reconciler(
            self.table,
            self.target,
            full_every=math.inf,
            rate_limit=limit,
            batch=batch,
            backoff=Backoff(first=0.1, maximum=0.1),
        )

        def run(jobs: Jobs) -> None:
            jobs.observe("sync", self.reconciler)

        self.hive = Hive(module("m", "M", invoke(run)))

    def put(self, *rows: Row) -> None:
        with self.table.txn() as txn:
            for row in rows:
                txn.put(row)

    @property
    def health(self) -> str:
        return next(one.message for one in self.hive.health.snapshot() if one.module == "m.sync")


async def test_calls_are_so_far_apart_and_changes_meanwhile_go_into_one() -> None:
    world = World(RateLimit(2))
    with VirtualClock() as clock:
        start = clock.now
        async with world.hive.started():
            await clock.run_until_idle()
            for number in range(4):
                world.put(("a", number), (f"k{number}", 0))
                await clock.advance(0.1)
            assert [text for _, text in world.target.calls] == ["put a k0"]
            assert world.health == "3 objects; waiting for the rate limit: 2"
            await clock.advance(0.1)
            [(at, text)] = world.target.calls[1:]
            assert (round(at - start, 3), text) == (0.5, "put a k1 k2 k3")
            assert world.target.rows["a"] == ("a", 3)
            await clock.advance(5)
            assert len(world.target.calls) == 2
            assert world.health == "5 objects"
            assert world.reconciler.statistics.held_up == pytest.approx(0.4)


async def test_a_burst_goes_at_once_and_then_it_is_the_rate() -> None:
    world = World(RateLimit(1, per=2, burst=3), batch=1)
    with VirtualClock() as clock:
        start = clock.now
        world.put(*((key, 0) for key in "abcdef"))
        async with world.hive.started():
            await clock.advance(10)
    assert [round(at - start, 3) for at, _ in world.target.calls] == [0, 0, 0, 2, 4, 6]


async def test_what_is_undone_meanwhile_is_not_written_and_costs_no_call() -> None:
    world = World(RateLimit(1))
    with VirtualClock() as clock:
        async with world.hive.started():
            world.put(("a", 0))
            await clock.run_until_idle()
            world.put(("b", 0))
            await clock.advance(0.5)
            with world.table.txn() as txn:
                txn.delete("b")
                txn.put(("c", 0))
            await clock.advance(1)
            texts = [text for _, text in world.target.calls]
            assert texts[:2] == ["put a", "put c"]
            assert "b" not in world.target.rows


async def test_failures_are_tried_again_at_the_rate() -> None:
    world = World(RateLimit(1))
    world.target.fails = True
    with VirtualClock() as clock:
        start = clock.now
        async with world.hive.started():
            world.put(("a", 0))
            await clock.advance(3.5)
            assert [round(at - start, 3) for at, _ in world.target.calls] == [0, 1, 2, 3]
            world.target.fails = False
            await clock.advance(1)
            assert world.target.rows == {"a": ("a", 0)}


async def test_a_sweep_in_a_start_hook_keeps_to_it() -> None:
    world = World(RateLimit(10), batch=1)
    world.put(*((key, 0) for key in "abc"))
    with VirtualClock() as clock:
        start = clock.now
        async with anyio.create_task_group() as group:
            group.start_soon(world.reconciler.sweep)
            await clock.advance(1)
    assert [round(at - start, 3) for at, _ in world.target.calls] == [0, 0.1, 0.2]


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ({"calls": 0}, "rate limit: calls is 0; expected a number above 0"),
        ({"calls": math.inf}, "rate limit: calls is inf; expected a number above 0"),
        ({"calls": 1, "per": -1.0}, "rate limit: per is -1.0; expected a number above 0"),
        ({"calls": 1, "burst": 0}, "rate limit: burst is 0; expected 1 or more"),
    ],
)
def test_a_limit_that_makes_no_sense_is_refused(limit: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        RateLimit(**limit)  # type: ignore[arg-type]  # a burst is whole
