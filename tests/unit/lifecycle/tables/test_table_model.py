"""Tables at random: watchers that come, look and go, indexes, snapshots and derived tables, against a model.

Whatever happens, what a watcher got adds up to the table: nothing is lost, nothing sent twice.
"""

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from lifecycle import Derived, ReadTable, Table
from lifecycle.tables import Snapshot
from tests.support.table_watcher import Watcher


@dataclass(frozen=True, slots=True)
class Row:
    key: str
    value: int


class Tables(RuleBasedStateMachine):
    """One writer, any number of watchers of the table and of what is derived from it."""

    watchers = Bundle("watchers")
    notes = Bundle("notes")
    keys = st.sampled_from("abcd")
    writes = st.lists(st.tuples(keys, st.none() | st.integers(0, 2)), max_size=4)

    def __init__(self) -> None:
        super().__init__()
        self.table: Table[str, Row] = Table(
            "rows", key=lambda row: row.key, indexes={"value": lambda row: [row.value, -row.value]}
        )
        self.model: dict[Hashable, Row] = {}
        self.runs = 0
        self.counts: Derived[int, int] = self.table.derive(self.count)
        self.big = Derived("big", self.biggest, self.counts, self.table)
        self.snapshots: list[tuple[Snapshot[str, Row], dict[Hashable, Row]]] = []

    def count(self, rows: list[Row]) -> dict[int, int]:
        self.runs += 1
        return Counter(row.value for row in rows)

    @staticmethod
    def biggest(counts: list[int], rows: list[Row]) -> dict[str, int]:
        return {"count": max(counts), "value": max(row.value for row in rows)} if rows else {}

    @rule(target=watchers, which=st.sampled_from(("table", "counts", "big")))
    def come(self, which: str) -> Watcher[object]:
        table: ReadTable[Any, object] = getattr(self, which)
        return Watcher(table, table.changes())

    @rule(target=notes, watcher=consumes(watchers))
    def go(self, watcher: Watcher[object]) -> tuple[ReadTable[Any, object], dict[Hashable, object], int]:
        watcher.look()
        return watcher.table, watcher.known, watcher.changes.revision

    @rule(target=watchers, note=notes)
    def come_back(self, note: tuple[ReadTable[Any, object], dict[Hashable, object], int]) -> Watcher[object]:
        """With what it knew, it gets what is newer; it may have seen less of a row than the table sent."""
        table, known, revision = note
        changes, known = table.changes(revision), dict(known)
        for change in changes.take():
            assert change.revision > revision
            if change.row is None:
                known.pop(change.key, None)
            else:
                known[change.key] = change.row
        watcher = Watcher(table, changes, known)
        watcher.look()
        return watcher

    @rule(watcher=watchers)
    def look(self, watcher: Watcher[object]) -> None:
        watcher.look()

    @rule(writes=writes, fails=st.booleans())
    def write(self, writes: list[tuple[str, int | None]], fails: bool) -> None:
        model = dict(self.model)
        try:
            with self.table.txn() as txn:
                for key, value in writes:
                    if value is None:
                        txn.delete(key)
                        model.pop(key, None)
                    else:
                        txn.put(Row(key, value))
                        model[key] = Row(key, value)
                    assert txn.get(key) == model.get(key)
                if fails:
                    _ = 1 // 0
        except ZeroDivisionError:
            return
        self.model = model

    @rule(rows=st.dictionaries(keys, st.integers(0, 2)))
    def replace_all(self, rows: dict[str, int]) -> None:
        self.model = {key: Row(key, value) for key, value in rows.items()}
        with self.table.txn() as txn:
            txn.replace_all(self.model.values())

    @rule()
    def remember(self) -> None:
        self.snapshots.append((self.table.snapshot(), dict(self.model)))

    @rule(which=st.integers(0, 9))
    def forget(self, which: int) -> None:
        del self.snapshots[which : which + 1]

    @rule(which=st.integers(0, 9))
    def read_all_of_a_snapshot(self, which: int) -> None:
        for snapshot, rows in self.snapshots[which : which + 1]:
            assert {row.key: row for row in snapshot.all()} == rows
            assert [row for _, row, _ in snapshot] == snapshot.all()
            revisions = [revision for _, _, revision in snapshot.items()]
            assert revisions == sorted(revisions)
            assert max(revisions, default=0) <= snapshot.revision

    @rule()
    def read_what_is_derived(self) -> None:
        assert {key: row for key, row, _ in self.counts.snapshot().items()} == Counter(
            row.value for row in self.model.values()
        )
        runs = self.runs
        assert self.big.get("count") == max(self.counts.all(), default=None)
        assert self.runs == runs, "worked out once for all readers"

    @invariant()
    def the_table_is_the_model(self) -> None:
        assert {row.key: row for row in self.table.all()} == self.model
        assert len(self.table) == len(self.model)
        revisions = [revision for _, _, revision in self.table.snapshot().items()]
        assert revisions == sorted(revisions)

    @invariant()
    def indexes_find_every_row(self) -> None:
        by_value = self.table.by("value")
        for value in range(-2, 3):
            found = {row.key for row in by_value.get(value)}
            assert found == {row.key for row in self.model.values() if abs(value) == row.value}
            assert (value in by_value) == bool(found)

    @invariant()
    def snapshots_stay(self) -> None:
        for snapshot, rows in self.snapshots:
            assert {key: row for key in "abcd" if (row := snapshot.get(key)) is not None} == rows
            assert {key for key in "abcd" if key in snapshot} == set(rows)


TestTables = Tables.TestCase


@pytest.mark.parametrize("late", [False, True])
def test_two_watchers_at_different_paces_end_up_with_the_same(late: bool) -> None:
    table: Table[str, Row] = Table("rows", key=lambda row: row.key)
    quick = Watcher(table, table.changes())
    slow = None if late else Watcher(table, table.changes())
    for number in range(50):
        with table.txn() as txn:
            txn.put(Row("abcd"[number % 4], number))
            txn.delete("abcd"[(number + 1) % 4])
        quick.look()
    slow = slow or Watcher(table, table.changes())
    slow.look()
    assert slow.known == quick.known
