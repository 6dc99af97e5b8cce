"""Reconcilers: what they write, and when they must not."""

import math

import anyio
import pytest

from lifecycle import (
    Promise,
)
from tests.unit.lifecycle.tables.reconciled import FakeTarget, Row, rows, world

pytestmark = pytest.mark.anyio


async def test_a_reconciler_makes_the_target_equal_at_the_start() -> None:
    held = {"a": Row("a"), "b": Row("b", 1), "x": Row("x")}
    async with world(rows(Row("a"), Row("b"), Row("c")), FakeTarget(held)) as w:
        assert w.target.rows == {"a": Row("a"), "b": Row("b"), "c": Row("c")}
        assert w.target.take_calls() == ["dump", "put b c", "drop x"]
        assert (w.health.level, w.health.message) == ("ok", "3 objects")
        assert w.states == {"a": "put done", "b": "put done", "c": "put done"}
        statistics = w.reconciler.statistics
        assert (statistics.sweeps, statistics.puts, statistics.drops, statistics.drift) == (1, 2, 1, 0)


async def test_after_the_start_a_reconciler_writes_only_changes() -> None:
    async with world(rows(Row("a"), Row("b"))) as w:
        w.target.take_calls()
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
        w.target.take_calls()
        w.target.takes = 10
        assert len(await w.advance(1)) == 1
        assert len(await w.advance(10)) == 1  # by now all others are due
        w.put(Row("new"))
        assert await w.advance(10) == ["put new"]


async def test_a_sweep_now_and_then_finds_what_others_changed() -> None:
    async with world(rows(Row("a"), Row("b")), full_every=60) as w:
        w.target.take_calls()
        w.target.rows |= {"a": Row("a", 9), "x": Row("x")}
        assert await w.advance(59) == []
        assert await w.advance(1) == ["dump", "put a", "drop x"]
        assert await w.advance(60) == ["dump"]
        assert w.reconciler.statistics.drift == 2
        w.reconciler.trigger()
        assert await w.settle() == ["dump"]


async def test_without_an_interval_it_sweeps_at_the_start_and_when_triggered() -> None:
    async with world(rows(Row("a")), full_every=math.inf) as w:
        assert w.target.take_calls() == ["dump", "put a"]
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


async def test_a_reconciler_deletes_nothing_before_its_gate_is_open() -> None:
    restored: Promise[None] = Promise()
    async with world(rows(), FakeTarget({"a": Row("a")}), gate=restored) as w:
        assert await w.advance(3600) == []
        assert w.health.message == "waiting for rows: what comes before"
        restored.resolve(None)
        assert await w.settle() == ["dump", "drop a"]


async def test_a_failed_restore_degrades_health_and_changes_nothing() -> None:
    restored: Promise[None] = Promise()
    restored.fail(OSError("disk full"))
    async with world(rows(), FakeTarget({"a": Row("a")}), gate=restored) as w:
        assert await w.advance(3600) == []
        assert (w.health.level, w.health.error) == ("degraded", "OSError: disk full")


async def test_with_put_early_a_reconciler_writes_but_never_deletes_before_its_gate() -> None:
    table = rows(Row("a"))
    source = table.initializer("kubernetes")
    restored: Promise[None] = Promise()
    held = FakeTarget({"x": Row("x"), "y": Row("y")})
    async with world(table, held, gate=restored, put_early=True) as w:
        assert w.target.take_calls() == ["dump", "put a"]
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


async def test_a_failed_restore_with_early_puts_degrades_health_and_deletes_nothing() -> None:
    restored: Promise[None] = Promise()
    async with world(rows(Row("a")), FakeTarget({"x": Row("x")}), gate=restored, put_early=True) as w:
        restored.fail(OSError("disk full"))
        await w.settle()
        assert (w.health.level, w.health.error) == ("degraded", "OSError: disk full")
        await w.advance(3600)
        assert w.target.rows == {"a": Row("a"), "x": Row("x")}


async def test_what_changes_while_a_large_table_is_compared_reaches_the_target(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In stretches: here each lasts one step, and rows come, go, change, and change back between them."""
    monkeypatch.setattr("lifecycle.jobs.time_slice.LONGEST", 0.0)
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
            seen.add(tuple(w.target.take_calls()))
            await anyio.lowlevel.checkpoint()
        assert len(seen) > 1
        await w.settle()
        assert w.target.rows == {row.key: row for row in w.table.all()}
        assert set(w.states.values()) == {"put done"}
        w.target.rows = {"old": Row("old"), **{name: Row(name, 3) for name in names}}
        await w.advance(60)
        assert w.target.rows == {row.key: row for row in w.table.all()}
        assert set(w.states) == set(w.target.rows)
