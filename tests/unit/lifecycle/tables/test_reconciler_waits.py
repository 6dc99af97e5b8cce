"""Waiting for a reconciler: until a key has reached the target, until a sweep is done."""

import math

import anyio
import pytest

from lifecycle import Reconciler
from lifecycle.tables import ReconcileError
from tests.unit.lifecycle.tables.reconciled import FakeTarget, Row, rows, world

pytestmark = pytest.mark.anyio


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
    table, target = rows(Row("a"), Row("b")), FakeTarget(bad={"b"}, reports_which=True)
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
