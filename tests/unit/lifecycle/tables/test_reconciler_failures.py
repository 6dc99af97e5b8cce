"""Reconcilers with a failing target: what is tried again, when, and what is reported."""

import math

import pytest
import structlog

from lifecycle import BatchError, Hive, Jobs, Reconciler, invoke, module
from lifecycle.tables import BatchFailures, ObjectStatus
from lifecycle.testing import VirtualClock
from tests.unit.lifecycle.tables.reconciled import FakeTarget, Row, rows, world

pytestmark = pytest.mark.anyio


async def test_an_object_that_fails_is_tried_again_later_and_later() -> None:
    async with world(rows(), full_every=math.inf) as w:
        w.target.take_calls()
        w.target.bad, w.target.reports_which = {"a"}, True
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
        w.target.take_calls()
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


async def test_a_failing_derived_table_degrades_health_and_is_retried() -> None:
    table, target = rows(Row("a", 2)), FakeTarget()

    def inverse(found: list[Row]) -> dict[str, Row]:
        return {row.key: Row(row.key, 6 // row.value) for row in found}

    reconciler: Reconciler[str, Row] = Reconciler(table.derive(inverse), target, full_every=60)

    def run(jobs: Jobs) -> None:
        jobs.observe("sync", reconciler)

    with VirtualClock() as clock:
        async with Hive(module("m", "M", invoke(run))).started() as hive:
            await clock.run_until_idle()
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


def test_a_target_without_an_operation_is_refused_when_the_reconciler_is_made() -> None:
    class Disk:
        async def observe(self) -> dict[str, Row]:
            return {}

    with pytest.raises(TypeError, match=r"^reconciler rows: .*Disk has no matches, put, drop$"):
        Reconciler(rows(), Disk(), full_every=10)  # type: ignore[arg-type]  # the mistake


async def test_the_log_has_a_line_when_a_reconciler_begins_to_fail_and_when_it_works_again() -> None:
    with structlog.testing.capture_logs() as lines:
        async with world(rows(Row("a")), FakeTarget(bad={"a"}), full_every=math.inf) as w:
            await w.advance(60)
            w.target.bad.clear()
            await w.advance(60)
    found = [(line["event"], line.get("reason"), line.get("error")) for line in lines if "job" in line]
    assert found == [
        ("job degraded", "1 of 1 objects failed, the first: a", "no memory"),
        ("job works again", None, None),
    ]
