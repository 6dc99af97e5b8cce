"""Reconcilers: what they write, when they must not, and what they tell of it."""

import math
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
import pytest

from lifecycle import (
    BatchError,
    BatchFailures,
    HealthStatus,
    Hive,
    Jobs,
    ObjectStatus,
    Promise,
    ReconcileError,
    Reconciler,
    Table,
    invoke,
    module,
)
from lifecycle.jobs.job import Backoff
from lifecycle.testing import VirtualClock

pytestmark = pytest.mark.anyio


@dataclass(frozen=True, slots=True)
class Row:
    key: str
    value: int = 0


@dataclass
class FakeTarget:
    """A dict of rows that remembers its calls; `bad` keys fail, `kind` says how."""

    rows: dict[str, Row] = field(default_factory=dict)
    calls: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    bad: set[str] = field(default_factory=set)
    tells_which: bool = False
    dump_fault: Exception | None = None
    takes: float = 0.0

    async def dump(self) -> Mapping[str, Row]:
        await anyio.lowlevel.checkpoint()
        self.calls.append(("dump", ()))
        if self.dump_fault is not None:
            raise self.dump_fault
        return dict(self.rows)

    async def put(self, batch: Mapping[str, Row]) -> None:
        await self._do("put", batch, lambda key: self.rows.update({key: batch[key]}))

    async def drop(self, batch: Collection[str]) -> None:
        await self._do("drop", batch, lambda key: self.rows.pop(key, None))

    async def _do(self, name: str, batch: Collection[str], do: Callable[[str], object]) -> None:
        self.calls.append((name, tuple(batch)))
        await anyio.sleep(self.takes)
        if self.bad & set(batch) and not self.tells_which:
            raise OSError("no memory")
        for key in batch:
            if key not in self.bad:
                do(key)
        if failures := {key: OSError(f"no memory for {key}") for key in batch if key in self.bad}:
            raise BatchError(failures)

    def told(self) -> list[str]:
        """The calls since the last time: ``put a b``."""
        told = [" ".join((name, *keys)) for name, keys in self.calls]
        self.calls.clear()
        return told


@dataclass
class World:
    """A table, a target, a reconciler between them, in time that passes when told to."""

    table: Table[Row]
    target: FakeTarget
    reconciler: Reconciler[str, Row]
    hive: Hive
    clock: VirtualClock

    def put(self, *rows: Row) -> None:
        with self.table.txn() as txn:
            for row in rows:
                txn.put(row)

    def delete(self, *keys: str) -> None:
        with self.table.txn() as txn:
            for key in keys:
                txn.delete(key)

    @property
    def health(self) -> HealthStatus:
        return next(one for one in self.hive.health.snapshot() if one.module == "m.sync")

    @property
    def states(self) -> dict[object, str]:
        return {status.key: f"{status.action} {status.state}" for status in self.reconciler.statuses.all()}

    async def settle(self) -> list[str]:
        await self.clock.settle()
        return self.target.told()

    async def advance(self, seconds: float) -> list[str]:
        await self.clock.advance(seconds)
        return self.target.told()


def rows(*rows: Row) -> Table[Row]:
    table: Table[Row] = Table("rows", key=lambda row: row.key)
    with table.txn() as txn:
        for row in rows:
            txn.put(row)
    return table


@asynccontextmanager
async def world(
    table: Table[Row],
    target: FakeTarget | None = None,
    *,
    full_every: float = 600,
    gate: Promise[None] | None = None,
    put_early: bool = False,
    batch: int = 256,
) -> AsyncIterator[World]:
    target = target or FakeTarget()
    after = gate.wait if gate else None
    reconciler: Reconciler[str, Row] = Reconciler(
        table,
        target,
        full_every=full_every,
        after=after,
        put_early=put_early,
        batch=batch,
        backoff=Backoff(first=1, maximum=8),
    )

    def run(jobs: Jobs) -> None:
        jobs.observe("sync", reconciler)

    with VirtualClock() as clock:
        async with Hive(module("m", "M", invoke(run))).started() as hive:
            await clock.settle()
            yield World(table, target, reconciler, hive, clock)


async def test_it_makes_the_target_equal_at_the_start() -> None:
    held = {"a": Row("a"), "b": Row("b", 1), "x": Row("x")}
    async with world(rows(Row("a"), Row("b"), Row("c")), FakeTarget(held)) as w:
        assert w.target.rows == {"a": Row("a"), "b": Row("b"), "c": Row("c")}
        assert w.target.told() == ["dump", "put b c", "drop x"]
        assert (w.health.level, w.health.message) == ("ok", "3 objects")
        assert w.states == {"a": "put done", "b": "put done", "c": "put done"}
        statistics = w.reconciler.statistics
        assert (statistics.sweeps, statistics.puts, statistics.drops, statistics.drift) == (1, 2, 1, 0)


async def test_then_it_writes_what_changes_and_nothing_else() -> None:
    async with world(rows(Row("a"), Row("b"))) as w:
        w.target.told()
        w.put(Row("a", 1), Row("c"))
        w.put(Row("c", 2))
        w.delete("b")
        assert await w.settle() == ["put a c", "drop b"]
        w.put(Row("a", 1))
        assert await w.settle() == []
        assert w.target.rows == {"a": Row("a", 1), "c": Row("c", 2)}


async def test_a_row_that_changes_and_changes_back_while_others_are_written_is_not_missed() -> None:
    async with world(rows(), full_every=math.inf, batch=1) as w:
        w.target.takes = 1
        w.put(Row("a"), Row("b", 1))
        assert await w.settle() == ["dump", "put a"]
        w.put(Row("b", 2))
        assert await w.advance(1) == ["put b"]
        w.put(Row("b", 1))
        assert await w.advance(10) == ["put b"]
        assert w.target.rows == {"a": Row("a"), "b": Row("b", 1)}


async def test_what_is_new_goes_before_what_failed() -> None:
    async with world(rows(), FakeTarget(bad=set("abcd")), full_every=math.inf, batch=1) as w:
        w.put(*map(Row, "abcd"))
        await w.settle()
        w.target.told()
        w.target.takes = 10
        assert len(await w.advance(1)) == 1
        assert len(await w.advance(10)) == 1  # by now all others are due
        w.put(Row("new"))
        assert await w.advance(10) == ["put new"]


async def test_a_sweep_now_and_then_finds_what_others_changed() -> None:
    async with world(rows(Row("a"), Row("b")), full_every=60) as w:
        w.target.told()
        w.target.rows |= {"a": Row("a", 9), "x": Row("x")}
        assert await w.advance(59) == []
        assert await w.advance(1) == ["dump", "put a", "drop x"]
        assert await w.advance(60) == ["dump"]
        assert w.reconciler.statistics.drift == 2
        w.reconciler.trigger()
        assert await w.settle() == ["dump"]


async def test_without_an_interval_it_sweeps_at_the_start_and_when_triggered() -> None:
    async with world(rows(Row("a")), full_every=math.inf) as w:
        assert w.target.told() == ["dump", "put a"]
        assert await w.advance(1e6) == []
        w.reconciler.trigger()
        w.reconciler.trigger()
        assert await w.settle() == ["dump"]


async def test_an_empty_table_at_the_start_wipes_nothing() -> None:
    table = rows()
    source = table.initializer("kubernetes")
    async with world(table, FakeTarget({"a": Row("a"), "b": Row("b")})) as w:
        await w.advance(3600)
        w.put(Row("a"))
        w.delete("a")
        assert await w.advance(3600) == []
        assert (w.health.level, w.health.message) == ("ok", "waiting for rows: kubernetes")
        w.put(Row("b"))
        source.done()
        assert await w.settle() == ["dump", "drop a"]


async def test_nor_does_it_drop_before_what_it_is_to_come_after() -> None:
    restored: Promise[None] = Promise()
    async with world(rows(), FakeTarget({"a": Row("a")}), gate=restored) as w:
        assert await w.advance(3600) == []
        assert w.health.message == "waiting for rows: what comes before"
        restored.resolve(None)
        assert await w.settle() == ["dump", "drop a"]


async def test_a_failed_restore_is_told_and_nothing_touched() -> None:
    restored: Promise[None] = Promise()
    restored.fail(OSError("disk full"))
    async with world(rows(), FakeTarget({"a": Row("a")}), gate=restored) as w:
        assert await w.advance(3600) == []
        assert (w.health.level, w.health.error) == ("degraded", "OSError: disk full")


async def test_it_may_put_early_but_never_drops_early() -> None:
    table = rows(Row("a"))
    source = table.initializer("kubernetes")
    restored: Promise[None] = Promise()
    held = FakeTarget({"x": Row("x"), "y": Row("y")})
    async with world(table, held, gate=restored, put_early=True) as w:
        assert w.target.told() == ["dump", "put a"]
        w.put(Row("b"))
        assert await w.settle() == ["put b"]
        w.delete("a", "b")
        w.put(Row("y"))
        assert await w.advance(3600) == ["put y", *["dump"] * 6]
        source.done()
        assert await w.settle() == []
        restored.resolve(None)
        assert await w.settle() == ["dump", "drop x a b"]
        assert w.states == {"y": "put done"}


async def test_a_failed_restore_beside_early_puts_is_told_as_it_is() -> None:
    restored: Promise[None] = Promise()
    async with world(rows(Row("a")), FakeTarget({"x": Row("x")}), gate=restored, put_early=True) as w:
        restored.fail(OSError("disk full"))
        await w.settle()
        assert (w.health.level, w.health.error) == ("degraded", "OSError: disk full")
        await w.advance(3600)
        assert w.target.rows == {"a": Row("a"), "x": Row("x")}


async def test_an_object_that_fails_is_tried_again_later_and_later() -> None:
    async with world(rows(), full_every=math.inf) as w:
        w.target.told()
        w.target.bad, w.target.tells_which = {"a"}, True
        w.put(Row("a"), Row("b"))
        assert await w.settle() == ["put a b"]
        assert w.target.rows == {"b": Row("b")}
        assert w.health.level == "degraded"
        assert w.health.message == "1 of 2 objects failed, the first: a"
        assert w.health.error == "OSError: no memory for a"
        status = w.reconciler.statuses.get("a")
        assert status == ObjectStatus("a", "put", "failed", status.since if status else 0, 1, w.health.error)
        tries = await w.advance(64)
        assert set(tries) == {"put a"}
        assert 8 <= len(tries) <= 20  # pauses of 1, 2, 4, then 8 seconds, less up to half
        w.target.bad.clear()
        await w.advance(8)
        assert w.target.rows["a"] == Row("a")
        assert (w.health.level, w.states["a"]) == ("ok", "put done")


async def test_a_failing_object_does_not_hold_up_the_others_of_its_batch() -> None:
    table = rows(*(Row(f"{number:03}") for number in range(100)))
    async with world(table, FakeTarget(bad={"050"}), full_every=math.inf, batch=32) as w:
        assert len(w.target.rows) == 64 + 4
        await w.advance(3)
        assert len(w.target.rows) == 99
        assert w.health.message == "1 of 100 objects failed, the first: 050"


async def test_a_new_row_is_tried_at_once_whatever_the_old_one_did() -> None:
    async with world(rows(Row("a")), FakeTarget(bad={"a"}), full_every=math.inf) as w:
        await w.advance(100)
        w.target.told()
        w.target.bad.clear()
        w.put(Row("a", 1))
        assert await w.settle() == ["put a"]


async def test_a_failed_drop_is_tried_again() -> None:
    async with world(rows(Row("a")), full_every=math.inf) as w:
        w.target.bad.add("a")
        w.delete("a")
        await w.settle()
        assert w.states == {"a": "drop failed"}
        assert w.health.message == "1 of 0 objects failed, the first: a"
        w.target.bad.clear()
        await w.advance(1)
        assert (w.target.rows, w.states) == ({}, {})


async def test_a_target_that_cannot_be_compared_is_left_alone_until_it_can() -> None:
    async with world(rows(Row("a")), FakeTarget(dump_fault=OSError("no such map"))) as w:
        assert set(await w.advance(100)) == {"dump"}
        assert (w.health.level, w.health.error) == ("degraded", "OSError: no such map")
        w.target.dump_fault = None
        assert await w.advance(8) == ["dump", "put a"]
        assert w.health.level == "ok"
        assert w.reconciler.statistics.failed_sweeps > 8


async def test_changes_go_on_while_later_sweeps_fail() -> None:
    async with world(rows(Row("a")), full_every=60) as w:
        w.target.dump_fault = OSError("too big")
        await w.advance(60)
        w.put(Row("b"))
        await w.settle()
        assert w.target.rows == {"a": Row("a"), "b": Row("b")}
        assert w.health.level == "degraded"


async def test_one_can_wait_until_a_key_has_reached_the_target() -> None:
    async with (
        world(rows(), FakeTarget(bad={"a"}), full_every=math.inf) as w,
        anyio.create_task_group() as group,
    ):
        reached: list[str] = []

        async def wait(key: str) -> None:
            await w.reconciler.wait_realised(key)
            reached.append(key)

        w.put(Row("a"))
        w.put(Row("b"))
        for key in ("a", "b", "nobody"):
            group.start_soon(wait, key)
        await w.settle()
        await w.advance(3)
        assert sorted(reached) == ["b", "nobody"]
        w.target.bad.clear()
        await w.advance(8)
        assert "a" in reached
        assert w.target.rows["a"] == Row("a")
        w.delete("a")
        group.start_soon(wait, "a")
        await w.settle()
        assert reached.count("a") == 2
        assert "a" not in w.target.rows
        assert w.reconciler._waiters == []


async def test_a_wait_for_what_is_there_ends_though_others_come_and_go() -> None:
    async with world(rows(Row("b")), full_every=math.inf) as w, anyio.create_task_group() as group:
        w.target.takes = 1
        w.put(Row("a"))
        await w.settle()
        w.put(Row("c"))
        group.start_soon(w.reconciler.wait_realised, "b")
        await w.settle()
        w.delete("c")
        await w.advance(1)
        assert w.reconciler._waiters == []


async def test_absence_is_realised_only_after_a_sweep_that_may_drop() -> None:
    table = rows()
    source = table.initializer("kubernetes")
    async with (
        world(table, FakeTarget({"a": Row("a")}), put_early=True) as w,
        anyio.create_task_group() as group,
    ):
        reached = anyio.Event()

        async def wait() -> None:
            await w.reconciler.wait_realised("a")
            reached.set()

        group.start_soon(wait)
        await w.settle()
        assert not reached.is_set()
        source.done()
        await w.settle()
        assert reached.is_set()
        assert w.target.rows == {}


async def test_a_first_sweep_may_be_part_of_the_start() -> None:
    table, target = rows(Row("a"), Row("b")), FakeTarget(bad={"b"}, tells_which=True)
    reconciler: Reconciler[str, Row] = Reconciler(table, target, full_every=60)
    with pytest.raises(ReconcileError, match="rows: 1 object failed, the first b: no memory for b") as caught:
        await reconciler.sweep()
    assert set(caught.value.failures) == {"b"}
    target.bad.clear()
    await reconciler.sweep()
    assert set(target.rows) == {"a", "b"}
    target.dump_fault = OSError("no such map")
    with pytest.raises(OSError, match="no such map"):
        await reconciler.sweep()


async def test_a_sweep_cannot_be_run_beside_the_job() -> None:
    async with world(rows()) as w:
        with pytest.raises(RuntimeError, match=r"rows is being reconciled: trigger\(\) a sweep"):
            await w.reconciler.sweep()


async def test_a_derived_table_that_breaks_is_told_and_tried_again() -> None:
    table, target = rows(Row("a", 2)), FakeTarget()

    def inverse(found: list[Row]) -> dict[str, Row]:
        return {row.key: Row(row.key, 6 // row.value) for row in found}

    reconciler: Reconciler[str, Row] = Reconciler(table.derive(inverse), target, full_every=60)

    def run(jobs: Jobs) -> None:
        jobs.observe("sync", reconciler)

    with VirtualClock() as clock:
        async with Hive(module("m", "M", invoke(run))).started() as hive:
            await clock.settle()
            assert target.rows == {"a": Row("a", 3)}
            with table.txn() as txn:
                txn.put(Row("a", 0))
            await clock.advance(10)
            status = next(one for one in hive.health.snapshot() if one.module == "m.sync")
            assert (status.level, target.rows) == ("degraded", {"a": Row("a", 3)})
            with table.txn() as txn:
                txn.put(Row("a", 1))
            await clock.advance(60)
            assert target.rows == {"a": Row("a", 6)}


def test_what_fails_of_a_batch_is_collected_and_the_rest_is_done() -> None:
    done = []

    def write(error: Exception) -> None:
        with BatchFailures(OSError) as failures:
            for key in range(3):
                with failures.of(key):
                    if key == 1:
                        raise error
                    done.append(key)

    with pytest.raises(BatchError, match="1 object failed") as caught:
        write(OSError(28, "No space left on device"))
    assert (done, list(caught.value.failures)) == ([0, 2], [1])
    with pytest.raises(ValueError, match="a bug"):
        write(ValueError("a bug"))


async def test_what_changes_while_a_large_table_is_compared_reaches_the_target(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In stretches: here each lasts one step, and rows come, go, change, and change back between them."""
    monkeypatch.setattr("lifecycle.jobs.stretch.LONGEST", 0.0)
    names = [f"r{number:02}" for number in range(40)]
    stale = {name: Row(name, 7) for name in names[:20]} | {"old": Row("old")}
    async with world(rows(*(Row(name) for name in names)), FakeTarget(rows=stale), full_every=60) as w:
        seen = set()
        for turn in range(200):  # the first comparison, and what follows from it
            name = names[turn % 40]
            if turn % 3 == 0:
                w.put(Row(name, turn))
            elif turn % 3 == 1:
                w.put(Row(name, 7))
                w.put(Row(name, 0))
            else:
                w.delete(name)
            seen.add(tuple(w.target.told()))
            await anyio.lowlevel.checkpoint()
        assert len(seen) > 1
        await w.settle()
        assert w.target.rows == {row.key: row for row in w.table.all()}
        assert set(w.states.values()) == {"put done"}
        w.target.rows = {"old": Row("old"), **{name: Row(name, 3) for name in names}}
        await w.advance(60)
        assert w.target.rows == {row.key: row for row in w.table.all()}
        assert set(w.states) == set(w.target.rows)
