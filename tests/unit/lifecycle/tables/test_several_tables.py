"""Several tables at the same moment: snapshots of them, and transactions that write all of them or none."""

import threading
import tracemalloc
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lifecycle import Table
from lifecycle.tables import Changes, Snapshot, Sorted, snapshot, transaction
from tests.support.examples import scaled

Pair = tuple[int, object]
ODD = "cannot be compared with numbers"


def numbers(name: str, *rows: int) -> Table[int, int]:
    table: Table[int, int] = Table(
        name,
        key=lambda number: number,
        indexes={"parity": lambda number: [number % 2], "size": Sorted(lambda number: [number])},
    )
    write(table, *rows)
    return table


def write(table: Table[int, int], *rows: int) -> None:
    with table.txn() as txn:
        txn.replace_all(rows)


def test_several_tables_are_seen_at_the_same_moment() -> None:
    left, right = numbers("left", 1, 2), numbers("right", 3)
    total = left.join(
        right.map(lambda number: number - 2, name="less"),
        lambda one, other: one + other,
        on=lambda one: one + 2,
    )
    seen = snapshot(left, right, total)
    write(left)
    write(right, 4)
    assert (seen[left].all(), seen[right].all(), seen[total].all()) == ([1, 2], [3], [2])
    assert (left.all(), right.all(), total.all()) == ([], [4], [])


def test_a_table_that_was_not_named_is_refused() -> None:
    left, right = numbers("left"), numbers("right")
    with pytest.raises(LookupError, match=r"^table right is not in this snapshot; it is of: left$"):
        snapshot(left)[right]


def test_indexes_of_a_snapshot_stay_as_they_were() -> None:
    table = numbers("numbers", 1, 2, 3)
    held = table.snapshot()
    write(table, 5)
    assert sorted(held.by("parity").get(1)) == [1, 3]
    assert held.sorted_by("size").range(2) == [2, 3]
    assert (len(held), 2 in held, held.get(2)) == (3, True, 2)
    assert held.by("parity") is held.by("parity")
    with pytest.raises(LookupError, match=r"^table numbers has no index 'color'; it has: parity, size$"):
        held.by("color")


def test_a_snapshot_can_be_read_in_another_thread_while_the_table_is_written() -> None:
    table = numbers("numbers", *range(1000))
    held, sums = table.snapshot(), list[int]()
    reader = threading.Thread(target=lambda: sums.append(sum(held.sorted_by("size").range(high=1000))))
    reader.start()
    for number in range(200):
        write(table, number)
    reader.join()
    assert sums == [sum(range(1000))]


def test_a_snapshot_that_is_held_costs_what_has_changed_since_however_many_came_and_went() -> None:
    table: Table[int, tuple[int, int]] = Table("pairs", key=lambda pair: pair[0])
    held, latest = table.snapshot(), list[Snapshot[int, tuple[int, int]]]()
    tracemalloc.start()
    try:
        for number in range(3000):
            latest = [*latest[-3:], table.snapshot()]
            table.put((number % 7, number))
        grown, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [held.get(0), len(held)] == [None, 0]
    assert [len(one) for one in latest] == [7, 7, 7, 7]
    assert grown < 30_000, "bytes: that of a few rows, not of 3000 writes"


def pairs(name: str) -> Table[int, Pair]:
    return Table(
        name,
        key=lambda pair: pair[0],
        indexes={"value": lambda pair: [pair[1]], "order": Sorted(lambda pair: [pair[1]])},
    )


def keys_of(changes: Changes[int, Pair]) -> list[int]:
    return [change.key for change in changes.take()]


def test_a_watcher_of_one_table_sees_the_writes_to_the_other() -> None:
    left, right = pairs("left"), pairs("right")
    seen: list[tuple[int, int]] = []

    def only(key: int, old: Pair | None, new: Pair | None) -> bool:
        seen.append((len(left), len(right)))
        return True

    watches = [table.changes(only=only) for table in (left, right)]
    with transaction(left, right) as rows:
        rows[left].put((1, 1))
        rows[right].put((2, 2))
        assert (len(left), len(right)) == (0, 0)
    assert seen == [(1, 1), (1, 1)]
    assert [keys_of(watch) for watch in watches] == [[1], [2]]
    assert (left.revision, right.revision) == (1, 1)


def test_a_joined_table_never_has_half_of_a_transaction() -> None:
    left, right = pairs("left"), pairs("right")
    both = left.outer_join(right, lambda one, other: (one, other))
    with transaction(left, right) as rows:
        rows[left].put((1, 1))
        rows[right].put((1, 2))
    assert both.all() == [((1, 1), (1, 2))]


def test_a_table_without_changes_has_no_new_revision() -> None:
    left, right = pairs("left"), pairs("right")
    right.put((1, 1))
    with transaction(left, right, left) as rows:
        rows[left].put((1, 1))
        rows[right].put((1, 1))
    assert (left.revision, right.revision) == (1, 1)


def test_tables_are_checked_before_anything_is_open() -> None:
    left, right = pairs("left"), pairs("right")
    with (
        right.txn(),
        pytest.raises(RuntimeError, match=r"^table right: a transaction is open already"),
        transaction(left, right),
    ):
        pass
    with transaction(left, right) as rows:
        rows[left].put((1, 1))
        with pytest.raises(RuntimeError, match=r"^table left: a transaction is open already"):
            left.put((2, 2))
    with pytest.raises(RuntimeError, match=r"^table left: this transaction is over"):
        rows[left].put((2, 2))
    with pytest.raises(LookupError, match=r"^table right is not in this transaction; it is of: left$"):
        transaction(left)[right]
    with pytest.raises(TypeError, match=r"^transaction\(\) of 'mapped': expected a Table to write to$"):
        transaction(left, left.map(lambda pair: pair, name="mapped"))  # type: ignore[arg-type]


@pytest.mark.anyio
async def test_a_waiter_finds_both_tables_written() -> None:
    left, right = pairs("left"), pairs("right")
    found: list[Pair | None] = []

    async def wait() -> None:
        await left.wait_for(1)
        found.append(right.get(1))

    async with anyio.create_task_group() as group:
        group.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        with transaction(left, right) as rows:
            rows[left].put((1, 1))
            rows[right].put((1, 2))
    assert found == [(1, 2)]


values = st.one_of(st.none(), st.integers(0, 2), st.just(ODD))
writes = st.lists(st.tuples(st.integers(0, 1), st.integers(1, 4), values), max_size=6)
Writes = list[tuple[int, int, object]]


def write_together(tables: list[Table[int, Pair]], batch: Writes) -> None:
    with transaction(*tables) as rows:
        for side, key, value in batch:
            if value is None:
                rows[tables[side]].delete(key)
            else:
                rows[tables[side]].put((key, value))


def written(models: list[dict[int, Any]], batch: Writes) -> list[dict[int, Any]]:
    after = [dict(model) for model in models]
    for side, key, value in batch:
        after[side][key] = value
    return [{key: value for key, value in model.items() if value is not None} for model in after]


@settings(max_examples=scaled(100), deadline=None)
@given(st.lists(writes, max_size=8))
def test_tables_equal_mappings_that_are_written_together_or_not_at_all(batches: list[Writes]) -> None:
    tables = [pairs("left"), pairs("right")]
    models: list[dict[int, Any]] = [{0: 0}, {0: 0}]
    for table in tables:
        table.put((0, 0))  # so that a text can never be put in order
    for batch in batches:
        after = written(models, batch)
        refused = any(ODD in model.values() for model in after)
        try:
            write_together(tables, batch)
            assert not refused
            models = after
        except TypeError:
            assert refused
        for table, model in zip(tables, models, strict=True):
            assert dict(table.all()) == model
            assert [value for _, value in table.sorted_by("order").range()] == sorted(model.values())
            found = {value: {key for key, _ in table.by("value").get(value)} for value in (0, 1, 2, ODD)}
            assert found == {value: {key for key in model if model[key] == value} for value in found}
