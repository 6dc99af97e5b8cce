"""Waiting for one key of a table."""

from collections.abc import Awaitable, Callable

import anyio
import pytest

from lifecycle import ReadTable, Table

pytestmark = pytest.mark.anyio

Row = tuple[str, int]


def rows() -> Table[str, Row]:
    return Table("rows", key=lambda row: row[0])


def put(table: Table[str, Row], *new: Row) -> None:
    with table.txn() as txn:
        for row in new:
            txn.put(row)


def delete(table: Table[str, Row], key: str) -> None:
    with table.txn() as txn:
        txn.delete(key)


class Waiting:
    """A wait in a task of its own."""

    def __init__(self) -> None:
        self.got: list[object] = []

    async def run(self, wait: Callable[[], Awaitable[object]]) -> None:
        self.got.append(await wait())


async def test_a_row_that_is_there_is_not_waited_for() -> None:
    table = rows()
    put(table, ("a", 1))
    with anyio.fail_after(30):
        assert await table.wait_for("a") == ("a", 1)
        assert await table.wait_changed("a", None) == ("a", 1)
        await table.wait_removed("b")


@pytest.mark.parametrize("derived", [False, True], ids=["table", "derived"])
async def test_each_wait_ends_when_its_key_is_as_it_should_be(derived: bool) -> None:
    table = rows()
    seen: ReadTable[str, Row] = table.filter(lambda row: row[1] > 0) if derived else table
    there, big, vanished, other = Waiting(), Waiting(), Waiting(), Waiting()
    async with anyio.create_task_group() as group:
        group.start_soon(there.run, lambda: seen.wait_for("a"))
        group.start_soon(big.run, lambda: seen.wait_for("a", lambda row: row[1] > 5))
        group.start_soon(other.run, lambda: seen.wait_for("b"))
        await anyio.wait_all_tasks_blocked()
        put(table, ("a", 1))
        await anyio.wait_all_tasks_blocked()
        assert (there.got, big.got, other.got) == ([("a", 1)], [], [])
        group.start_soon(vanished.run, lambda: seen.wait_removed("a"))
        await anyio.wait_all_tasks_blocked()
        put(table, ("a", 7))
        await anyio.wait_all_tasks_blocked()
        assert (big.got, vanished.got) == ([("a", 7)], [])
        delete(table, "a")
        await anyio.wait_all_tasks_blocked()
        assert (vanished.got, other.got) == ([None], [])
        group.cancel_scope.cancel()


async def test_following_a_key_misses_no_change_that_lasts() -> None:
    table, changes = rows(), list[Row | None]()

    async def follow() -> None:
        seen: Row | None = None
        while True:
            seen = await table.wait_changed("a", seen)
            changes.append(seen)

    async with anyio.create_task_group() as group:
        group.start_soon(follow)
        await anyio.wait_all_tasks_blocked()
        put(table, ("a", 1))
        put(table, ("a", 2))
        await anyio.wait_all_tasks_blocked()
        put(table, ("a", 3))
        put(table, ("a", 2))
        await anyio.wait_all_tasks_blocked()
        delete(table, "a")
        await anyio.wait_all_tasks_blocked()
        assert changes == [("a", 2), None]
        group.cancel_scope.cancel()


async def test_changes_of_other_keys_wake_no_waiter() -> None:
    table, looked = rows(), list[Row]()

    def look(row: Row) -> bool:
        looked.append(row)
        return row[1] > 5

    put(table, ("a", 1))
    async with anyio.create_task_group() as group:
        group.start_soon(table.wait_for, "a", look)
        await anyio.wait_all_tasks_blocked()
        for number in range(10):
            put(table, ("b", number))
            await anyio.wait_all_tasks_blocked()
        assert looked == [("a", 1)]
        put(table, ("a", 6))


async def test_a_wait_that_is_cancelled_leaves_nothing_and_disturbs_no_other() -> None:
    table, first, second = rows(), Waiting(), Waiting()
    async with anyio.create_task_group() as group:
        with anyio.CancelScope() as scope:
            group.start_soon(second.run, lambda: table.wait_for("a"))
            async with anyio.create_task_group() as inner:
                inner.start_soon(first.run, lambda: table.wait_for("a"))
                await anyio.wait_all_tasks_blocked()
                scope.cancel()
        assert len(table._listeners) == 1
        put(table, ("a", 1))
    assert (first.got, second.got) == ([], [("a", 1)])
    assert len(table._listeners) == 0


async def test_what_a_derived_table_raises_ends_the_wait() -> None:
    table, raised = rows(), list[str]()
    shares = table.map(lambda row: 8 // row[1])

    async def wait() -> None:
        try:
            await shares.wait_for("a")
        except ZeroDivisionError as error:
            raised.append(str(error))

    async with anyio.create_task_group() as group:
        group.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        put(table, ("a", 0))
    assert raised == ["integer division or modulo by zero"]
