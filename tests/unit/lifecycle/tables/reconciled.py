"""A reconciler in virtual time, its table, and a fake of its target."""

from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio

from lifecycle import (
    BatchError,
    HealthStatus,
    Hive,
    Jobs,
    Promise,
    Reconciler,
    Table,
    invoke,
    module,
)
from lifecycle.jobs.job import Backoff
from lifecycle.testing import VirtualClock


@dataclass(frozen=True, slots=True)
class Row:
    key: str
    value: int = 0


@dataclass
class FakeTarget:
    """A dict of rows that records its calls; `bad` keys fail, `kind` is the fault."""

    rows: dict[str, Row] = field(default_factory=dict)
    calls: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    bad: set[str] = field(default_factory=set)
    reports_which: bool = False
    dump_fault: Exception | None = None
    takes: float = 0.0

    async def observe(self) -> Mapping[str, Row]:
        await anyio.lowlevel.checkpoint()
        self.calls.append(("dump", ()))
        if self.dump_fault is not None:
            raise self.dump_fault
        return dict(self.rows)

    def matches(self, row: Row, observed: Row) -> bool:
        return row == observed

    async def put(self, batch: Mapping[str, Row]) -> None:
        await self._do("put", batch, lambda key: self.rows.update({key: batch[key]}))

    async def drop(self, batch: Collection[str]) -> None:
        await self._do("drop", batch, lambda key: self.rows.pop(key, None))

    async def _do(self, name: str, batch: Collection[str], do: Callable[[str], object]) -> None:
        self.calls.append((name, tuple(batch)))
        await anyio.sleep(self.takes)
        if self.bad & set(batch) and not self.reports_which:
            raise OSError("no memory")
        for key in batch:
            if key not in self.bad:
                do(key)
        if failures := {key: OSError(f"no memory for {key}") for key in batch if key in self.bad}:
            raise BatchError(failures)

    def take_calls(self) -> list[str]:
        """Return the calls since the last time: ``put a b``."""
        calls = [" ".join((name, *keys)) for name, keys in self.calls]
        self.calls.clear()
        return calls


@dataclass
class World:
    """A table, a target and a reconciler between them, in virtual time."""

    table: Table[str, Row]
    target: FakeTarget
    reconciler: Reconciler[str, Row]
    hive: Hive
    clock: VirtualClock

    def put(self, *rows: Row) -> None:
        with self.table.txn() as txn:
            for row in rows:
                txn.put(row)

    def delete(self, *keys: str) -> None:
        with self.table.txn() as txn:
            for key in keys:
                txn.delete(key)

    @property
    def health(self) -> HealthStatus:
        return next(one for one in self.hive.health.snapshot() if one.module == "m.sync")

    @property
    def states(self) -> dict[object, str]:
        return {status.key: f"{status.action} {status.state}" for status in self.reconciler.statuses.all()}

    async def settle(self) -> list[str]:
        await self.clock.run_until_idle()
        return self.target.take_calls()

    async def advance(self, seconds: float) -> list[str]:
        await self.clock.advance(seconds)
        return self.target.take_calls()


def rows(*rows: Row) -> Table[str, Row]:
    table: Table[str, Row] = Table("rows", key=lambda row: row.key)
    with table.txn() as txn:
        for row in rows:
            txn.put(row)
    return table


@asynccontextmanager
async def world(
    table: Table[str, Row],
    target: FakeTarget | None = None,
    *,
    full_every: float = 600,
    gate: Promise[None] | None = None,
    put_early: bool = False,
    batch: int = 256,
) -> AsyncIterator[World]:
    target = target or FakeTarget()
    after = gate.wait if gate else None
    reconciler: Reconciler[str, Row] = Reconciler(
        table,
        target,
        full_every=full_every,
        after=after,
        put_early=put_early,
        batch=batch,
        backoff=Backoff(first=1, maximum=8),
    )

    def run(jobs: Jobs) -> None:
        jobs.observe("sync", reconciler)

    with VirtualClock() as clock:
        async with Hive(module("m", "M", invoke(run))).started() as hive:
            await clock.run_until_idle()
            yield World(table, target, reconciler, hive, clock)
