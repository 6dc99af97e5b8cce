"""The rows of cilium_ipcache: written where they differ, compared as a whole now and then.

For:    Ipcache. Needs: Table[IpcacheEntry], the map. Gives: IpcacheRows, a reconciler's target; IpcacheMap.

Every change voids the verdicts that the datapath remembers, once for all rows changed together.
"""

from collections.abc import Collection, Mapping
from typing import Final, Protocol

from anyio import to_thread

from cells.cluster.ipcache.entry import IpcacheEntry, Source
from cells.ipam import IPNetwork
from cells.maps import IpcacheValue
from lifecycle import BatchError, Logger, NotStartedError, ReadTable

NOBODY: Final = "unknown//"
"""The resource of rows that differ from what is claimed, where all are compared."""


class IpcacheMap(Protocol):
    """The map itself, in the words of this cell. All raise OSError."""

    def dump(self) -> Mapping[IPNetwork, IpcacheValue]:
        """Every row there is; called in a thread, at any time."""
        ...

    def lookup(self, prefix: IPNetwork) -> IpcacheValue | None:
        """What the datapath finds for the prefix: its row, or that of the longest one around it."""
        ...

    def update(self, prefix: IPNetwork, value: IpcacheValue) -> None:
        """Write the row."""
        ...

    def delete(self, prefix: IPNetwork) -> None:
        """Remove the row; gone already is fine."""
        ...

    def void_verdicts(self) -> None:
        """Have the datapath decide anew about the next packet of every flow."""
        ...


class IpcacheRows:
    """What the map holds, beside what is claimed."""

    def __init__(self, table: ReadTable[IpcacheEntry], kernel: IpcacheMap, log: Logger) -> None:
        self._table = table
        self._kernel = kernel
        self._log = log
        self._left: dict[IPNetwork, IpcacheValue] | None = None

    async def read(self) -> None:
        """Take note of what a former agent left. Raises OSError."""
        self.left(await to_thread.run_sync(self._kernel.dump))

    def left(self, rows: Mapping[IPNetwork, IpcacheValue]) -> None:
        """These rows are what a former agent left."""
        self._left = dict(rows)

    @property
    def leftovers(self) -> Mapping[IPNetwork, IpcacheValue]:
        """Rows that nobody has claimed yet; raises NotStartedError before they are known."""
        if self._left is None:
            raise NotStartedError("Ipcache was used before the hook 'read the ipcache' ran: depend on it")
        return self._left

    def holds(self, prefix: IPNetwork, wanted: IpcacheValue, known: IpcacheEntry | None) -> bool:
        """Whether the map has this already: we wrote or read it, and it is found. Raises OSError.

        ``known`` is the row of the table.
        """
        left = self.leftovers
        if known is None and not left:
            return False
        last = left.get(prefix) if known is None else known.value
        return last == wanted and self._kernel.lookup(prefix) == wanted

    def lookup(self, prefix: IPNetwork) -> IpcacheValue | None:
        """What the datapath finds for the prefix. Raises OSError."""
        return self._kernel.lookup(prefix)

    def write(self, values: Mapping[IPNetwork, IpcacheValue | None]) -> None:
        """Write rows, or remove those whose value is None. Tries all; raises the first OSError."""
        if values and (failures := self._set_each(values)):
            raise next(iter(failures.values()))

    def settled(self, prefixes: Collection[IPNetwork]) -> None:
        """These are claimed, or removed: no leftovers any more."""
        if self._left:
            for prefix in prefixes:
                self._left.pop(prefix, None)

    async def dump(self) -> Mapping[IPNetwork, IpcacheEntry]:
        """Every row, as its claim where it is what is claimed."""
        held = await to_thread.run_sync(self._kernel.dump)
        self._left = {prefix: value for prefix, value in held.items() if prefix not in self._table}
        return {prefix: self._entry(prefix, value) for prefix, value in held.items()}

    async def put(self, batch: Mapping[IPNetwork, IpcacheEntry]) -> None:
        """Write rows that are not as claimed. Raises BatchError."""
        if failures := self._set_each({prefix: row.value for prefix, row in batch.items()}):
            raise BatchError(failures)

    async def drop(self, batch: Collection[IPNetwork]) -> None:
        """Remove rows that nobody claims. Raises BatchError."""
        if failures := self._set_each(dict.fromkeys(batch)):
            raise BatchError(failures)
        self._log.info("rows of cilium_ipcache removed that nobody claims", rows=len(batch))

    def _entry(self, prefix: IPNetwork, value: IpcacheValue) -> IpcacheEntry:
        row = self._table.get(prefix)
        if row is not None and row.value == value:
            return row
        return IpcacheEntry(prefix=prefix, identity=value.identity, source=Source.UNSPEC, resource=NOBODY)

    def _set_each(self, values: Mapping[IPNetwork, IpcacheValue | None]) -> dict[IPNetwork, OSError]:
        failures: dict[IPNetwork, OSError] = {}
        for prefix, value in values.items():
            try:
                if value is None:
                    self._kernel.delete(prefix)
                else:
                    self._kernel.update(prefix, value)
            except OSError as error:
                failures[prefix] = error
        self._kernel.void_verdicts()
        return failures
