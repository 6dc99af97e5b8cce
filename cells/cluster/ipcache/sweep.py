"""The whole of cilium_ipcache compared with what is claimed, now and then.

Reconciler: Table[IpcacheEntry] in, the map out; the table ``ipcache-status`` tells what the kernel refuses.
Needs:  IpcacheRows.   Gives: IpcacheSweep.

Claims are in the map already. This is for what others changed, what the kernel refused, and what a former
agent left; the last goes only when every source of claims is known. A map has hundreds of thousands of rows,
so it is read in a thread and compared in stretches. A row may change meanwhile: what is to be written is
looked up again just before.
"""

import time
from collections.abc import AsyncIterator, Hashable, Mapping
from typing import Final, Literal

from cells.cluster.ipcache.entry import IpcacheEntry, Prefix
from cells.cluster.ipcache.rows import IpcacheRows
from cells.maps import IpcacheValue
from lifecycle import Logger, ObjectStatus, ReconcileError, Stretch, Table

BATCH: Final = 128
"""Rows written at once."""


class IpcacheSweep:
    """Makes the map equal to the table."""

    def __init__(self, table: Table[IpcacheEntry], rows: IpcacheRows, log: Logger) -> None:
        self._table = table
        self._rows = rows
        self._log = log
        self.refused: Table[ObjectStatus] = Table("ipcache-status", key=lambda status: status.key)
        """The rows that the kernel refuses, by prefix."""

    async def run(self) -> None:
        """Once. Raises ReconcileError for rows that the kernel refused, OSError when it cannot be read."""
        await self._table.wait_initialized()
        held = await self._rows.dump()
        differ = [prefix async for prefix in self._differing(held)]
        failures: dict[Hashable, Exception] = {}
        removed, stretch = 0, Stretch()
        for begin in range(0, len(differ), BATCH):
            values = {prefix: self._wanted(prefix) for prefix in differ[begin : begin + BATCH]}
            refused = self._rows.write_each(values)
            failures.update(refused)
            self._rows.settled(prefix for prefix in values if prefix not in refused)
            removed += sum(value is None and prefix not in refused for prefix, value in values.items())
            await stretch.pause()
        if removed:
            self._log.info("removed unclaimed rows of cilium_ipcache", rows=removed)
        self._tell(failures)
        if failures:
            raise ReconcileError("ipcache", failures)

    async def _differing(self, held: Mapping[Prefix, IpcacheValue]) -> AsyncIterator[Prefix]:
        """Prefixes whose row is another one than is claimed."""
        stretch = Stretch()
        for prefix, value in held.items():
            if self._wanted(prefix) != value:
                yield prefix
            await stretch.pause()
        for key in list(self._table.keys()):
            if key not in held and key in self._table:
                yield str(key)
            await stretch.pause()

    def _wanted(self, prefix: Prefix) -> IpcacheValue | None:
        row = self._table.get(prefix)
        return None if row is None else row.value

    def _tell(self, failures: Mapping[Hashable, Exception]) -> None:
        now = time.time()
        with self.refused.txn() as statuses:
            for status in self.refused.all():
                if status.key not in failures:
                    statuses.delete(status.key)
            for prefix, error in failures.items():
                before = self.refused.get(prefix)
                times = before.failures + 1 if before is not None else 1
                action: Literal["put", "drop"] = "put" if prefix in self._table else "drop"
                statuses.put(ObjectStatus(prefix, action, "failed", now, times, f"OSError: {error}"))
