"""Passes over the conntrack maps, one after another.

Needs: ConntrackSettings, Walk (the kernel), ExposedEndpoints.
Gives: ConntrackGC, Table[ConntrackMap], Passes.
"""

import time
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

import anyio
import msgspec

from cells.datapath import Collected
from cells.datapath.conntrack.interval import START, next_interval
from cells.datapath.conntrack.settings import ConntrackSettings
from cells.endpoint.restore import ExposedEndpoints
from cells.observe.metrics import Histogram
from lifecycle import Duration, Health, Jobs, Table, after


class ConntrackMap(msgspec.Struct, frozen=True):
    """What the last pass found in one map, and all passes together removed. Times in seconds."""

    map: str
    max_entries: int
    seen: int
    alive: int
    deleted: int
    deleted_so_far: int
    passes: int
    at: float
    """When the pass ended, since the epoch."""
    took: float
    interval: float
    """Until the next one."""


class Walk(Protocol):
    """The conntrack maps in the kernel, as far as this cell touches them."""

    async def collect(self) -> tuple[Collected, ...]:
        """Remove the connections whose lifetime is over; raises OSError or HiveError."""
        ...


def conntrack_table() -> Table[ConntrackMap]:
    """The ``conntrack`` table, by map."""
    return Table("conntrack", key=lambda row: row.map)


class Passes:
    """How the passes so far went."""

    def __init__(self) -> None:
        self.durations = Histogram()
        """Of those that came to their end, in seconds."""
        self.failed = 0


@after(ExposedEndpoints)
class ConntrackGC:
    """Removes what has ended: once endpoints are restored, then at intervals that fit the traffic.

    A pass that fails is tried again after a growing pause, and shows as degraded health.
    """

    def __init__(
        self,
        settings: ConntrackSettings,
        walk: Walk,
        table: Table[ConntrackMap],
        passes: Passes,
        jobs: Jobs,
        health: Health,
    ) -> None:
        self._fixed = float(settings.conntrack_gc_interval)
        self._most = float(settings.conntrack_gc_max_interval)
        self._walk = walk
        self._table = table
        self._passes = passes
        self._health = health.child("passes")
        self._interval = self._fixed or self._capped(START)
        self._last: float | None = None
        jobs.observe("collect", self._due, self._pass)

    async def _due(self) -> AsyncIterator[None]:
        while True:
            yield
            await anyio.sleep(self._interval)

    async def _pass(self, _: None) -> None:
        began = anyio.current_time()
        try:
            found = await self._walk.collect()
        except Exception:
            self._passes.failed += 1
            raise
        actual = None if self._last is None else began - self._last
        self._last = began
        if not self._fixed:
            removed = max((one.deleted / one.max_entries for one in found), default=0.0)
            self._interval = self._capped(next_interval(self._interval, removed, actual))
        took = anyio.current_time() - began
        self._passes.durations.observe(took)
        self._tell(found, took)

    def _capped(self, interval: float) -> float:
        return min(interval, self._most) if self._most else interval

    def _tell(self, found: Sequence[Collected], took: float) -> None:
        with self._table.txn() as rows:
            for one in found:
                before = self._table.get(one.map)
                row = ConntrackMap(
                    *(one.map, one.max_entries, one.seen, one.alive, one.deleted),
                    deleted_so_far=one.deleted + (before.deleted_so_far if before else 0),
                    passes=1 + (before.passes if before else 0),
                    at=time.time(),
                    took=took,
                    interval=self._interval,
                )
                rows.put(row)
        seen, deleted = (sum(each) for each in ([one.seen for one in found], [one.deleted for one in found]))
        self._health.ok(f"{deleted} of {seen} connections had ended; next pass in {Duration(self._interval)}")
