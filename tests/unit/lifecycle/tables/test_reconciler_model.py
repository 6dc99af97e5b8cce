"""A reconciler at random: a target that fails, is slow and is changed by others, jobs that crash.

Whatever happens, it writes nothing but what the table has at that moment, touches nothing before it may, and
once all is well again the target equals the table and no waiter is left.
"""

import asyncio
import math
from collections.abc import Collection, Coroutine, Hashable, Mapping
from typing import Any, TypeVar

import anyio
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lifecycle import BatchError, HealthTree, Promise, Reconciler, Table
from lifecycle.jobs.job import Backoff
from lifecycle.tables import RateLimit
from lifecycle.testing import VirtualClock
from tests.support.examples import scaled

T = TypeVar("T")
Row = tuple[str, int]

FULL_EVERY = 100.0
KEYS = "abcd"


class Target:
    """A dict; some keys fail, in one of three ways, and every call may take its time."""

    def __init__(self, table: Table[str, Row], rows: dict[str, Row]) -> None:
        self.table = table
        self.rows = rows
        self.bad: set[str] = set()
        self.way = "before"
        self.dump_fails = False
        self.takes = 0.0
        self.calls: list[str] = []
        self.written_at: list[float] = []

    async def observe(self) -> Mapping[str, Row]:
        self.calls.append("dump")
        held = dict(self.rows)
        await anyio.sleep(self.takes)
        if self.dump_fails:
            raise OSError("cannot be listed")
        return held

    def matches(self, row: Row, observed: Row) -> bool:
        return row == observed

    async def put(self, batch: Mapping[str, Row]) -> None:
        self.calls.append("put")
        for key, row in batch.items():
            assert row == self.table.get(key), "what the table says now"
        await self._do(batch, dict(batch))

    async def drop(self, batch: Collection[str]) -> None:
        self.calls.append("drop")
        assert not [key for key in batch if key in self.table], "nothing the table has"
        await self._do(batch, {})

    async def _do(self, keys: Collection[str], new: Mapping[str, Row]) -> None:
        self.written_at.append(anyio.current_time())
        bad = self.bad & set(keys)
        if self.way == "before" and bad:
            raise OSError("refused")
        await anyio.sleep(self.takes / 2)
        for key in keys:
            if key in bad:
                if self.way == "in between":
                    raise OSError("broken off")
            elif key in new:
                self.rows[key] = new[key]
            else:
                self.rows.pop(key, None)
        await anyio.sleep(self.takes / 2)
        if bad:
            raise BatchError({key: OSError("refused") for key in bad})


class Reconciled(RuleBasedStateMachine):
    """The table's writer, the target's other users, the clock and the operator, in any order."""

    keys = st.sampled_from(KEYS)
    writes = st.lists(st.tuples(keys, st.none() | st.integers(0, 2)), max_size=4)

    @initialize(
        held=st.sets(keys),
        put_early=st.booleans(),
        batch=st.integers(1, 4),
        sweeps=st.booleans(),
        limit=st.sampled_from((None, RateLimit(1), RateLimit(1, burst=3))),
    )
    def begin(
        self, held: set[str], put_early: bool, batch: int, sweeps: bool, limit: RateLimit | None
    ) -> None:
        self.limit = limit
        self.loop = asyncio.new_event_loop()
        self.table: Table[str, Row] = Table("rows", key=lambda row: row[0])
        self.source = self.table.initializer("source")
        self.restored: Promise[None] = Promise()
        self.put_early = put_early
        self.target = Target(self.table, {key: (key, 0) for key in held})
        self.untouched = set(held)
        self.past: dict[Hashable, list[Row | None]] = {key: [None] for key in KEYS}
        self.changed_by_others: set[str] = set()
        self.health = HealthTree()
        self.reconciler: Reconciler[str, Row] = Reconciler(
            self.table,
            self.target,
            full_every=FULL_EVERY if sweeps else math.inf,
            after=self.restored.wait,
            put_early=put_early,
            batch=batch,
            backoff=Backoff(first=1, maximum=10),
            rate_limit=limit,
        )
        self.clock = VirtualClock()
        self.run(self.enter())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    async def enter(self) -> None:
        self.clock.__enter__()
        self.waiters = set[asyncio.Task[None]]()
        self.job = asyncio.create_task(self.reconcile())

    async def reconcile(self) -> None:
        """As a job does it."""
        while True:
            await self.reconciler.run(self.health.reporter("sync"))

    @rule(writes=writes)
    def write(self, writes: list[tuple[str, int | None]]) -> None:
        with self.table.txn() as txn:
            for key, value in writes:
                if value is None:
                    txn.delete(key)
                else:
                    txn.put((key, value))
        for key in KEYS:
            self.past[key].append(self.table.get(key))

    @rule(bad=st.sets(keys), way=st.sampled_from(("before", "in between", "named")), dump=st.booleans())
    def fail(self, bad: set[str], way: str, dump: bool) -> None:
        self.target.bad, self.target.way, self.target.dump_fails = bad, way, dump

    @rule(takes=st.sampled_from((0.0, 1.0, 30.0)))
    def be_slow(self, takes: float) -> None:
        self.target.takes = takes

    @rule(key=keys, value=st.none() | st.integers(0, 2))
    def others_change(self, key: str, value: int | None) -> None:
        if value is None:
            self.target.rows.pop(key, None)
            self.untouched.discard(key)
        else:
            self.target.rows[key] = (key, value)
        self.changed_by_others.add(key)

    @rule(seconds=st.sampled_from((0.0, 0.5, 3.0, 40.0, 250.0)))
    def time_passes(self, seconds: float) -> None:
        self.run(self.clock.advance(seconds))
        assert not self.job.done(), self.job

    @rule()
    def everything_is_known(self) -> None:
        self.source.done()

    @rule()
    def restore_is_done(self) -> None:
        if not self.restored.resolved:
            self.restored.resolve(None)

    @rule()
    def the_job_is_cancelled_and_begins_again(self) -> None:
        self.run(self.end())
        self.job = self.loop.create_task(self.reconcile())

    async def end(self) -> None:
        self.job.cancel()
        await asyncio.wait({self.job})

    @rule()
    def trigger(self) -> None:
        self.reconciler.trigger()

    @rule(key=keys)
    def wait(self, key: str) -> None:
        async def wait() -> None:
            seen = len(self.past[key]) - 1
            await self.reconciler.wait_realised(key)
            if key not in self.changed_by_others:
                assert self.target.rows.get(key) in self.past[key][seen:], "the row as it was, or a later one"

        self.waiters.add(self.loop.create_task(wait()))

    @rule()
    def all_is_well_again(self) -> None:
        self.everything_is_known()
        self.restore_is_done()
        self.fail(set(), "before", dump=False)
        self.run(self.clock.advance(100))  # what is slow ends
        self.be_slow(0.0)
        if self.changed_by_others:  # only a sweep finds that
            self.reconciler.trigger()
        self.run(self.clock.advance(30))
        rows = {row[0]: row for row in self.table.all()}
        assert self.target.rows == rows
        statuses = self.reconciler.statuses.all()
        assert {status.key: (status.action, status.state) for status in statuses} == dict.fromkeys(
            rows, ("put", "done")
        )
        assert self.health.snapshot()[0].level == "ok"
        assert all(waiter.done() for waiter in self.waiters), "nobody waits"
        self.changed_by_others.clear()
        self.target.calls.clear()
        self.run(self.clock.advance(FULL_EVERY))
        assert set(self.target.calls) <= {"dump"}, "what is equal is not written"

    @invariant()
    def nothing_is_touched_before_it_may_be(self) -> None:
        if hasattr(self, "loop") and not (self.table.initialized and self.restored.resolved):
            assert "drop" not in self.target.calls
            assert self.untouched <= set(self.target.rows)
            if not self.put_early:
                assert self.target.calls == []

    @invariant()
    def it_keeps_to_the_rate_limit(self) -> None:
        if (limit := getattr(self, "limit", None)) is not None:
            times = self.target.written_at
            for at, first in enumerate(times):
                for count, last in enumerate(times[at:], 1):
                    assert count <= limit.burst + (last - first) * limit.calls + 1e-6

    @invariant()
    def no_waiter_has_failed(self) -> None:
        for waiter in getattr(self, "waiters", ()):
            assert not waiter.done() or waiter.exception() is None

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.run(self.end())
            for waiter in self.waiters:
                waiter.cancel()
            self.run(asyncio.wait(self.waiters) if self.waiters else asyncio.sleep(0))
            self.clock.__exit__(None, None, None)
            self.loop.close()


TestReconciled = Reconciled.TestCase
TestReconciled.settings = settings(max_examples=scaled(60), stateful_step_count=30, deadline=None)
