"""Derived tables: always what their function makes of the rows, worked out when someone looks."""

import anyio
import pytest

from lifecycle import Change, Derived, Table


def numbers(name: str = "numbers") -> Table[int, int]:
    return Table(name, key=lambda number: number)


def put(table: Table[int, int], *rows: int) -> None:
    with table.txn() as txn:
        for row in rows:
            txn.put(row)


def squares(rows: list[int]) -> dict[str, int]:
    return {str(row): row * row for row in rows}


def test_a_derived_table_follows_its_source() -> None:
    source = numbers()
    derived = source.derive(squares)
    assert (derived.name, derived.all()) == ("numbers-squares", [])
    put(source, 2, 3)
    assert (derived.get("3"), len(derived), "2" in derived, derived.revision) == (9, 2, True, 1)
    with source.txn() as txn:
        txn.delete(2)
    assert derived.all() == [9]
    assert not hasattr(derived, "txn")


def test_a_watcher_of_a_derived_table_gets_only_changed_rows() -> None:
    source = numbers()
    parities = source.derive(lambda rows: {"even": any(row % 2 == 0 for row in rows)}, name="parities")
    watcher = parities.changes()
    assert watcher.take() == [Change("even", None, False, 1)]
    put(source, 1)
    assert watcher.take() == []
    put(source, 2)
    assert watcher.take() == [Change("even", False, True, 2)]


def test_a_burst_of_writes_runs_the_function_once() -> None:
    source, runs = numbers(), []

    def total(rows: list[int]) -> dict[str, int]:
        runs.append(len(rows))
        return {"total": sum(rows)}

    derived = source.derive(total)
    watcher = derived.changes()
    for number in range(5):
        put(source, number)
    assert watcher.take()[0].row == 10
    assert derived.get("total") == 10
    assert runs == [0, 5]


def test_a_derived_table_may_have_an_index() -> None:
    source = numbers()
    derived = source.derive(squares, indexes={"last digit": lambda square: [square % 10]})
    put(source, 2, 8, 3)
    assert sorted(derived.by("last digit").get(4)) == [4, 64]
    with source.txn() as txn:
        txn.delete(2)
    assert derived.by("last digit").one(4) == 64
    assert 9 in derived.by("last digit")
    assert set(derived.by("last digit").values()) == {4, 9}


def test_an_error_of_the_function_reaches_who_reads_and_not_who_writes() -> None:
    source = numbers()
    inverse = source.derive(lambda rows: {row: 6 // row for row in rows}, name="inverse")
    watcher = inverse.changes()
    put(source, 0)
    for read in (inverse.all, lambda: inverse.get(1), watcher.take, inverse.snapshot, inverse.changes):
        with pytest.raises(ZeroDivisionError):
            read()
    with source.txn() as txn:
        txn.replace_all([2])
    assert [change.row for change in watcher.take()] == [3]


@pytest.mark.anyio
async def test_a_join_follows_both_and_waits_for_both() -> None:
    left, right = numbers("left"), numbers("right")
    first, second = left.initializer("kernel"), right.initializer("disk")
    both = Derived("both", lambda a, b: {row: row for row in a if row in b}, left, right)
    batches: list[list[object]] = []

    async def watch() -> None:
        async for batch in both.derive(lambda rows: {"all": tuple(rows)}, name="again").changes():
            batches.append([change.row for change in batch])  # noqa: PERF401  # endless

    async with anyio.create_task_group() as group:
        group.start_soon(watch)
        group.start_soon(both.wait_initialized)
        put(left, 1, 2)
        await anyio.wait_all_tasks_blocked()
        put(right, 2)
        await anyio.wait_all_tasks_blocked()
        assert batches == [[()], [(2,)]]
        assert both.uninitialized_by == ["kernel", "disk"]
        first.done()
        assert not both.initialized
        second.done()
        with anyio.fail_after(30):
            await both.wait_initialized()
        assert both.initialized
        group.cancel_scope.cancel()


def test_a_dropped_derived_table_stops_listening() -> None:
    source = numbers()
    derived = source.derive(squares)
    assert len(source._listeners) == 1
    del derived
    assert len(source._listeners) == 0
