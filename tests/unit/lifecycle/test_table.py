"""Tables: what watchers are told, against a model of what they must know."""

from collections.abc import Hashable
from dataclasses import dataclass

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from lifecycle import Change, Promise, Table
from lifecycle import table as table_module
from lifecycle.table import Changes


@dataclass(frozen=True, slots=True)
class Row:
    key: str
    value: int = 0


def rows() -> Table[Row]:
    return Table("rows", key=lambda row: row.key)


def put(table: Table[Row], *new: Row) -> None:
    with table.txn() as txn:
        for row in new:
            txn.put(row)


def delete(table: Table[Row], *keys: str) -> None:
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


def test_a_watcher_is_told_everything_first_and_then_what_changes() -> None:
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


def test_an_equal_row_is_no_change() -> None:
    table = rows()
    put(table, Row("a", 1))
    put(table, Row("a", 1))
    delete(table, "nobody")
    assert table.revision == 1


def test_who_comes_back_with_a_revision_is_told_what_is_newer_and_what_is_gone() -> None:
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


def test_a_dropped_watcher_is_told_no_more() -> None:
    table = rows()
    watcher = table.changes()
    assert len(table._watchers) == 1
    del watcher
    assert len(table._watchers) == 0


@pytest.mark.anyio
async def test_a_waiting_watcher_wakes_up() -> None:
    table = rows()
    told: list[list[Change[Row]]] = []

    async def watch() -> None:
        async for batch in table.changes():
            told.append(batch)  # noqa: PERF401  # endless: an extend would never be seen

    async with anyio.create_task_group() as group:
        group.start_soon(watch)
        await anyio.wait_all_tasks_blocked()
        assert told == []
        put(table, Row("a"))
        put(table, Row("b"))
        await anyio.wait_all_tasks_blocked()
        assert [[change.key for change in batch] for batch in told] == [["a", "b"]]
        assert not told[0][0].deleted
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
    with anyio.fail_after(1):
        await rows().wait_initialized()


class Watched(RuleBasedStateMachine):
    """Watchers that come, fetch and go while a table is written: what they were told adds up to the table."""

    watchers = Bundle("watchers")
    keys = st.sampled_from("abc")

    def __init__(self) -> None:
        super().__init__()
        self.table = rows()
        self.known: dict[Changes[Row], dict[Hashable, Row]] = {}

    @rule(target=watchers)
    def come(self) -> Changes[Row]:
        watcher = self.table.changes()
        self.known[watcher] = {}
        return watcher

    @rule(watcher=consumes(watchers))
    def go(self, watcher: Changes[Row]) -> None:
        del self.known[watcher]

    @rule(writes=st.lists(st.tuples(keys, st.none() | st.integers(0, 1)), max_size=4))
    def write(self, writes: list[tuple[str, int | None]]) -> None:
        with self.table.txn() as txn:
            for key, value in writes:
                if value is None:
                    txn.delete(key)
                else:
                    txn.put(Row(key, value))

    @rule(watcher=watchers)
    def fetch(self, watcher: Changes[Row]) -> None:
        known = self.known[watcher]
        batch = watcher.take()
        assert len({change.key for change in batch}) == len(batch)
        for change in batch:
            assert change.old == known.get(change.key), "what it saw last"
            assert change.row != change.old, "nothing told twice"
            if change.row is None:
                del known[change.key]
            else:
                known[change.key] = change.row
        assert [change.revision for change in batch] == sorted(change.revision for change in batch)
        assert known == {row.key: row for row in self.table.all()}, "nothing lost"

    @invariant()
    def rows_are_ordered_by_revision(self) -> None:
        revisions = [revision for _, revision in self.table._rows.values()]
        assert revisions == sorted(revisions)


TestWatched = Watched.TestCase


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
