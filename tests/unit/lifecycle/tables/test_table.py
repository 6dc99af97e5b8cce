"""Tables: what they hold, and what watchers get; test_table_model.py has the whole of it at random."""

from collections.abc import Hashable
from dataclasses import dataclass
from ipaddress import ip_network
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lifecycle import Change, Promise, Table
from lifecycle.tables import LPM, transaction
from lifecycle.tables import core as table_module
from tests.support.steps import counted_steps


@dataclass(frozen=True, slots=True)
class Row:
    key: str
    value: int = 0


def rows() -> Table[str, Row]:
    return Table("rows", key=lambda row: row.key)


def put(table: Table[str, Row], *new: Row) -> None:
    with table.txn() as txn:
        for row in new:
            txn.put(row)


def delete(table: Table[str, Row], *keys: str) -> None:
    with table.txn() as txn:
        for key in keys:
            txn.delete(key)


def test_a_row_is_found_by_its_key() -> None:
    table = rows()
    put(table, Row("a", 1), Row("b", 2))
    put(table, Row("a", 3))
    assert table.get("a") == Row("a", 3)
    assert table.get("c") is None
    assert table.all() == [Row("b", 2), Row("a", 3)]
    assert (len(table), "b" in table, table.revision) == (2, True, 2)


def test_one_row_is_put_in_a_transaction_of_its_own() -> None:
    table = rows()
    changes = table.changes()
    table.put(Row("a"))
    assert [change.row for change in changes.take()] == [Row("a")]
    with table.txn(), pytest.raises(RuntimeError, match="a transaction is open already"):
        table.put(Row("b"))
    unhashable: Table[Any, Any] = Table("lists", key=lambda row: row)
    with pytest.raises(TypeError, match=r"table lists: the key \[1\] of a row"):
        unhashable.put([1])
    assert table.all() == [Row("a")]


def test_a_transaction_that_raises_changes_nothing() -> None:
    table = rows()
    watcher = table.changes()

    def fail() -> None:
        with table.txn() as txn:
            txn.put(Row("a"))
            assert txn.get("a") == Row("a")
            raise OSError("half-way")

    with pytest.raises(OSError, match="half-way"):
        fail()
    assert table.all() == []
    assert watcher.take() == []
    put(table, Row("b"))  # and the next one is not blocked


def test_a_table_has_one_writer() -> None:
    table = rows()
    with table.txn(), pytest.raises(RuntimeError, match="table rows: a transaction is open already"):
        table.txn().__enter__()


def test_a_transaction_is_of_no_use_once_it_is_over() -> None:
    table = rows()
    with table.txn() as txn:
        txn.put(Row("a"))
    with pytest.raises(RuntimeError, match="table rows: this transaction is over; open another one"):
        txn.put(Row("b"))
    with pytest.raises(RuntimeError, match="this transaction is over"):
        txn.delete("a")
    assert table.all() == [Row("a")]


def test_a_write_to_a_transaction_without_its_block_is_refused() -> None:
    table = rows()
    with pytest.raises(RuntimeError, match="table rows: this transaction is not open: write inside `with"):
        table.txn().put(Row("a"))
    with pytest.raises(RuntimeError, match="this transaction is not open"):
        transaction(table)[table].delete("a")
    assert table.all() == []


def test_all_rows_may_be_replaced_at_once() -> None:
    table = rows()
    put(table, Row("a", 1), Row("b", 1))
    watcher = table.changes()
    watcher.take()
    with table.txn() as txn:
        txn.put(Row("c", 1))
        txn.replace_all([Row("b", 1), Row("d", 1)])
        assert txn.get("c") is None
    assert {row.key for row in table.all()} == {"b", "d"}
    assert [(change.key, change.deleted) for change in watcher.take()] == [("a", True), ("d", False)]


def test_a_snapshot_stays_as_it_was() -> None:
    table = rows()
    put(table, Row("a", 1), Row("b", 1))
    before = table.snapshot()
    assert before is table.snapshot()
    put(table, Row("a", 2))
    delete(table, "b")
    after = table.snapshot()
    assert before.items() == [("a", Row("a", 1), 1), ("b", Row("b", 1), 1)]
    assert (before.get("a"), before.get("c"), "b" in before, len(before)) == (Row("a", 1), None, True, 2)
    assert (after.all(), after.revision, before.revision) == ([Row("a", 2)], 3, 1)


def test_rows_are_found_by_an_index() -> None:
    table: Table[str, Row] = Table(
        "rows", key=lambda row: row.key, indexes={"value": lambda row: [row.value]}
    )
    put(table, Row("a", 1), Row("b", 1), Row("c", 2))
    by_value = table.by("value")
    assert by_value.get(1) == [Row("a", 1), Row("b", 1)]
    assert by_value.one(2) == Row("c", 2)
    assert by_value.one(3) is None
    put(table, Row("a", 2))
    delete(table, "b")
    assert (by_value.get(1), by_value.values(), 1 in by_value, 2 in by_value) == ([], [2], False, True)
    with pytest.raises(LookupError, match="table rows: 2 rows have value 2, not one"):
        by_value.one(2)
    with pytest.raises(LookupError, match="table rows has no index 'valu'; it has: value"):
        table.by("valu")


def test_a_write_that_an_index_refuses_changes_nothing() -> None:
    table: Table[str, Row] = Table(
        "rows", key=lambda row: row.key, indexes={"share": lambda row: [6 // row.value]}
    )
    put(table, Row("a", 2))
    watcher = table.changes()
    watcher.take()
    with pytest.raises(ZeroDivisionError):
        put(table, Row("a", 3), Row("b", 0))
    assert table.all() == [Row("a", 2)]
    assert table.by("share").values() == [3]
    assert (table.revision, watcher.take()) == (1, [])


def test_rows_inserted_and_deleted_between_two_reads_emit_no_change() -> None:
    table = rows()
    watcher = table.changes()
    for number in range(100):
        put(table, Row(str(number)))
        delete(table, str(number))
    assert len(watcher._pending) == 0


def test_a_revision_of_another_life_is_refused() -> None:
    table = rows()
    put(table, Row("a"))
    with pytest.raises(LookupError, match="table rows: revision 2 is yet to come \\(now 1\\); start from 0"):
        table.changes(since=2)


def test_a_watcher_gets_all_rows_first_and_then_changes() -> None:
    table = rows()
    put(table, Row("a", 1), Row("b", 1))
    watcher = table.changes()
    assert watcher.take() == [Change("a", None, Row("a", 1), 1), Change("b", None, Row("b", 1), 1)]
    put(table, Row("a", 2))
    delete(table, "b")
    assert watcher.take() == [Change("a", Row("a", 1), Row("a", 2), 2), Change("b", Row("b", 1), None, 3)]
    assert watcher.take() == []


def test_changes_that_were_not_fetched_are_merged() -> None:
    table = rows()
    put(table, Row("a", 1))
    watcher = table.changes()
    watcher.take()
    put(table, Row("a", 2), Row("came and went", 1))
    put(table, Row("a", 3))
    delete(table, "came and went")
    assert watcher.take() == [Change("a", Row("a", 1), Row("a", 3), 3)]
    put(table, Row("a", 4))
    put(table, Row("a", 3))
    assert watcher.take() == []


def test_a_filtering_watcher_gets_only_matching_changes() -> None:
    table = rows()
    put(table, Row("a", 1), Row("b", -1))
    watcher = table.changes(only=lambda _key, old, now: any(one and one.value > 0 for one in (old, now)))
    assert [change.row for change in watcher.take()] == [Row("a", 1)]
    put(table, Row("b", -2), Row("c", 3))
    delete(table, "a")
    assert [(change.old, change.row) for change in watcher.take()] == [
        (None, Row("c", 3)),
        (Row("a", 1), None),
    ]
    put(table, Row("c", -3))
    put(table, Row("c", -4))  # what is pending is sent as it is now
    assert [(change.old, change.row) for change in watcher.take()] == [(Row("c", 3), Row("c", -4))]
    put(table, Row("c", -5))
    assert watcher.take() == []


@pytest.mark.anyio
async def test_changes_outside_its_filter_wake_no_watcher() -> None:
    table = rows()
    watcher = table.changes(only=lambda _key, _old, now: now is None)
    put(table, Row("a", 1))
    with anyio.move_on_after(0) as waited:
        await watcher.wait()
    assert waited.cancelled_caught
    delete(table, "a")
    await watcher.wait()
    assert [change.old for change in watcher.take()] == [Row("a", 1)]


def test_a_filter_that_raises_is_the_matter_of_its_watcher_alone() -> None:
    """Who writes and who else reads has no part in it; what could not be decided on is not lost."""
    table = rows()
    before = table.map(lambda row: row.value)

    def odd(key: Hashable, old: Row | None, row: Row | None) -> bool:
        if row is not None and row.value > 1:
            raise ValueError(f"{key} is too large")
        return False

    watcher = table.changes(only=odd)
    after, watched = table.map(lambda row: row.value), table.changes()
    put(table, Row("a", 1))
    assert (before.all(), after.all(), watcher.take()) == ([1], [1], [])
    put(table, Row("a", 2), Row("b", 1), Row("c", 3))
    assert (before.all(), after.all(), len(watched.take())) == ([2, 1, 3], [2, 1, 3], 3)
    with pytest.raises(ValueError, match="is too large"):
        watcher.take()
    assert [change.key for change in watcher.take()] == ["a", "c"]
    delete(table, "a")
    assert (before.all(), after.all(), watcher.take()) == ([1, 3], [1, 3], [])


def test_many_rows_are_removed_at_once_in_steps_that_grow_with_their_number() -> None:
    def removal(count: int) -> int:
        table = rows()
        put(table, *(Row(str(number)) for number in range(count)))
        with counted_steps() as steps:
            delete(table, *(str(number) for number in range(count)))
        return steps.lines

    assert removal(16_000) < 20 * removal(1000)


def test_writing_an_equal_row_emits_no_change() -> None:
    table = rows()
    put(table, Row("a", 1))
    put(table, Row("a", 1))
    delete(table, "nobody")
    assert table.revision == 1


def test_a_watcher_from_a_revision_gets_newer_rows_and_deletions() -> None:
    table = rows()
    put(table, Row("a"), Row("b"), Row("c"))
    put(table, Row("d"))
    delete(table, "a")
    delete(table, "b")
    put(table, Row("b", 2))
    assert table.changes(since=2).take() == [
        Change("a", Row("a"), None, 3),
        Change("b", None, Row("b", 2), 5),
    ]


def test_who_comes_back_too_late_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "REMEMBERED_DELETIONS", 2)
    table = rows()
    put(table, *(Row(str(number)) for number in range(5)))
    for number in range(4):
        delete(table, str(number))
    with pytest.raises(
        LookupError, match="table rows: deletions after revision 1 are forgotten; start from 0"
    ):
        table.changes(since=1)
    assert [change.key for change in table.changes(since=3).take()] == ["2", "3"]
    assert [change.key for change in table.changes().take()] == ["4"]


def test_a_dropped_watcher_gets_no_more_changes() -> None:
    table = rows()
    watcher = table.changes()
    assert len(table._listeners) == 1
    del watcher
    assert len(table._listeners) == 0


@pytest.mark.anyio
async def test_a_waiting_watcher_wakes_up() -> None:
    table = rows()
    batches: list[list[Change[str, Row]]] = []

    async def watch() -> None:
        async for batch in table.changes():
            batches.append(batch)  # noqa: PERF401  # endless: an extend would never be seen

    async with anyio.create_task_group() as group:
        group.start_soon(watch)
        await anyio.wait_all_tasks_blocked()
        assert batches == []
        put(table, Row("a"))
        put(table, Row("b"))
        await anyio.wait_all_tasks_blocked()
        assert [[change.key for change in batch] for batch in batches] == [["a", "b"]]
        assert not batches[0][0].deleted
        group.cancel_scope.cancel()


@pytest.mark.anyio
async def test_a_table_is_initialized_when_every_source_is_done() -> None:
    table = rows()
    first, second = table.initializer("kernel"), table.initializer("disk")
    assert not table.initialized
    assert table.uninitialized_by == ["disk", "kernel"]
    waited = []

    async def wait() -> None:
        await table.wait_initialized()
        waited.append(True)

    async with anyio.create_task_group() as group:
        group.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        first.done()
        first.done()
        await anyio.wait_all_tasks_blocked()
        assert not waited
        second.done()
    assert waited
    assert table.initialized
    with pytest.raises(RuntimeError, match="table rows is initialized already"):
        table.initializer("late")


@pytest.mark.anyio
async def test_a_table_without_sources_is_initialized() -> None:
    with anyio.fail_after(30):
        await rows().wait_initialized()


@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from("abc"), st.none() | st.integers(0, 2)), max_size=3), max_size=8
    ),
    st.integers(0, 8),
)
def test_a_watcher_that_comes_back_knows_as_much_as_one_that_stayed(
    history: list[list[tuple[str, int | None]]], leave_at: int
) -> None:
    table, known, since = rows(), dict[Hashable, Row](), 0
    for number, writes in enumerate(history):
        if number == leave_at:
            known, since = {row.key: row for row in table.all()}, table.revision
        with table.txn() as txn:
            for key, value in writes:
                if value is None:
                    txn.delete(key)
                else:
                    txn.put(Row(key, value))
    for change in table.changes(since).take():
        if change.row is None:
            known.pop(change.key, None)
        else:
            known[change.key] = change.row
    assert known == {row.key: row for row in table.all()}


@pytest.mark.anyio
async def test_a_promise_gives_its_value_to_everyone_who_waits() -> None:
    promise: Promise[int] = Promise()
    got: list[int] = []

    async def wait() -> None:
        got.append(await promise.wait())

    async with anyio.create_task_group() as group:
        group.start_soon(wait)
        group.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        assert (got, promise.resolved) == ([], False)
        promise.resolve(3)
    assert (got, promise.resolved) == ([3, 3], True)
    with pytest.raises(RuntimeError, match="resolved or failed before"):
        promise.resolve(4)


@pytest.mark.anyio
async def test_a_failed_promise_raises_for_everyone_who_waits() -> None:
    promise: Promise[int] = Promise()
    promise.fail(OSError("no socket"))
    for _ in range(2):
        with pytest.raises(OSError, match="no socket"):
            await promise.wait()
    assert not promise.resolved


def test_an_index_by_a_text_is_refused() -> None:
    """A text is many values, one for each letter: never what is meant."""

    def name(row: Row) -> str:
        return row.key

    with pytest.raises(TypeError, match=r"index 'name': its function at .*test_table.py:\d+ gives one value"):
        Table("rows", key=lambda row: row.key, indexes={"name": name})
    table: Table[str, Row] = Table("rows", key=lambda row: row.key, indexes={"name": lambda row: row.key})
    with pytest.raises(TypeError, match="table rows: index 'name': its function gave 'eth0', one value"):
        put(table, Row("eth0"))
    assert table.all() == []


@pytest.mark.parametrize(
    ("spec", "row", "why"),
    [
        (lambda row: 3, Row("eth0"), "gave 3, expected hashable values"),
        (lambda row: [[1]], Row("eth0"), "gave \\[\\[1\\]\\], expected hashable values"),
        (LPM(lambda row: "10.0.0.0/8"), Row("eth0"), "gave '10.0.0.0/8', one value"),  # type: ignore[arg-type,return-value]  # the mistake
        (LPM(lambda row: ip_network("10.0.0.0/8")), Row("eth0"), "gave IPv4Network.*, one value"),
    ],
)
def test_an_index_function_without_values_is_reported_by_name(spec: Any, row: Row, why: str) -> None:
    table: Table[str, Row] = Table("rows", key=lambda row: row.key, indexes={"name": spec})
    with pytest.raises(TypeError, match=f"table rows: index 'name': its function {why}"):
        put(table, row)
    assert table.all() == []


def test_keys_and_indexes_that_are_no_functions_are_refused() -> None:
    with pytest.raises(TypeError, match="table rows: its key is 'key': expected a function"):
        Table("rows", key="key")  # type: ignore[arg-type]  # the mistake
    with pytest.raises(TypeError, match="table rows: index 'name' is 'key': expected a function"):
        Table("rows", key=lambda row: row, indexes={"name": "key"})  # type: ignore[arg-type]  # the mistake
    table: Table[Any, list[int]] = Table("rows", key=lambda row: row)
    with pytest.raises(TypeError, match=r"table rows: the key \[1\] of a row"), table.txn() as txn:
        txn.put([1])
