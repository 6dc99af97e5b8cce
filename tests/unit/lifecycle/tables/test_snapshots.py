"""Snapshots: tables as they were at one moment, with their indexes, alone and together."""

import threading
import tracemalloc

import pytest

from lifecycle import Table
from lifecycle.tables import Snapshot, Sorted, snapshot


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
