"""Tables and reconcilers alone: writes and changes per second."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import anyio

from lifecycle import Reconciler, Table
from tests.bench.stats import Figure, Sample

Row = tuple[int, int]

ROWS = 50_000


def measure(folder: Path, rounds: int) -> list[Figure]:
    """Return thousands of rows per second: more is better."""
    del folder
    found: dict[str, list[float]] = {name: [] for name in WORK}
    for _ in range(rounds):
        for name, work in WORK.items():
            found[name].append(_rate(work, ROWS) / 1000)
    return [Figure(f"tables: {name}", "1000/s", Sample(tuple(rates))) for name, rates in found.items()]


def _rate(work: Callable[[int], float], rows: int) -> float:
    work(rows // 10)  # warms up
    return rows / work(rows)


def _table(*, indexed: bool = False) -> Table[int, Row]:
    return Table("rows", key=_key, indexes={"value": lambda row: (row[1] % 100,)} if indexed else None)


def _key(row: Row) -> int:
    return row[0]


def _one_by_one(table: Table[int, Row], rows: int) -> float:
    began = time.perf_counter()
    for number in range(rows):
        with table.txn() as txn:
            txn.put((number, number))
    return time.perf_counter() - began


def _at_once(table: Table[int, Row], rows: int) -> float:
    began = time.perf_counter()
    with table.txn() as txn:
        for number in range(rows):
            txn.put((number, number))
    return time.perf_counter() - began


def _writes(rows: int) -> float:
    return _one_by_one(_table(), rows)


def _writes_at_once(rows: int) -> float:
    return _at_once(_table(), rows)


def _writes_indexed(rows: int) -> float:
    return _one_by_one(_table(indexed=True), rows)


def _writes_watched(rows: int) -> float:
    table = _table()
    watchers = [table.changes() for _ in range(10)]
    took = _one_by_one(table, rows)
    del watchers
    return took


def _changes(rows: int) -> float:
    """With one watcher, which reads after every hundred transactions."""
    table = _table()
    changes, count = table.changes(), 0
    began = time.perf_counter()
    for begin in range(0, rows, 100):
        for number in range(begin, begin + 100):
            with table.txn() as txn:
                txn.put((number, number))
        count += len(changes.take())
    assert count == rows
    return time.perf_counter() - began


def _replay(rows: int) -> float:
    table = _table()
    _at_once(table, rows)
    began = time.perf_counter()
    assert len(table.changes().take()) == rows
    return time.perf_counter() - began


def _derived(rows: int) -> float:
    table = _table()
    derived = table.derive(dict)
    _at_once(table, rows)
    began = time.perf_counter()
    assert len(derived) == rows
    return time.perf_counter() - began


class _Dict:
    """A target without cost."""

    def __init__(self) -> None:
        self.rows: dict[int, Row] = {}

    async def observe(self) -> Mapping[int, Row]:
        return self.rows

    def matches(self, row: Row, observed: Row) -> bool:
        return row == observed

    async def put(self, batch: Mapping[int, Row]) -> None:
        self.rows.update(batch)

    async def drop(self, batch: Collection[int]) -> None:
        for key in batch:
            del self.rows[key]


def _reconciled(rows: int) -> float:
    table, target = _table(), _Dict()
    _at_once(table, rows)
    reconciler = Reconciler(table, target, full_every=math.inf)
    began = time.perf_counter()
    anyio.run(reconciler.sweep)
    assert len(target.rows) == rows
    return time.perf_counter() - began


def _swept(rows: int) -> float:
    """Measure a sweep without differences."""
    table, target = _table(), _Dict()
    _at_once(table, rows)
    reconciler = Reconciler(table, target, full_every=math.inf)

    async def twice() -> float:
        await reconciler.sweep()
        began = time.perf_counter()
        await reconciler.sweep()
        return time.perf_counter() - began

    return anyio.run(twice)


WORK: dict[str, Callable[[int], float]] = {
    "writes, a transaction each": _writes,
    "writes, a transaction each, one index": _writes_indexed,
    "writes, a transaction each, ten watchers that do not look": _writes_watched,
    "writes in one transaction": _writes_at_once,
    "writes and changes sent": _changes,
    "rows replayed to who comes late": _replay,
    "rows derived": _derived,
    "objects reconciled": _reconciled,
    "objects compared and found equal": _swept,
}
