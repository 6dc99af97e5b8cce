"""Transactions over several tables: all of their writes appear together, or none."""

from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lifecycle import Table
from lifecycle.tables import Changes, Sorted, transaction
from tests.support.examples import scaled

Pair = tuple[int, object]
ODD = "cannot be compared with numbers"


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


def write(tables: list[Table[int, Pair]], batch: Writes) -> None:
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
            write(tables, batch)
            assert not refused
            models = after
        except TypeError:
            assert refused
        for table, model in zip(tables, models, strict=True):
            assert dict(table.all()) == model
            assert [value for _, value in table.sorted_by("order").range()] == sorted(model.values())
            found = {value: {key for key, _ in table.by("value").get(value)} for value in (0, 1, 2, ODD)}
            assert found == {value: {key for key in model if model[key] == value} for value in found}
