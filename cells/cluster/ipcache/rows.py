"""The rows of cilium_ipcache: written where they differ from what is claimed.

For:    Ipcache and its sweep. Needs: Table[IpcacheEntry], the map. Gives: IpcacheRows; IpcacheMap.

Every change voids the verdicts that the datapath remembers, once for all rows changed together.
"""

from collections.abc import Iterable, Mapping
from typing import Protocol

from anyio import to_thread

from cells.cluster.ipcache.entry import IpcacheEntry, Prefix
from cells.maps import IpcacheValue
from lifecycle import NotStartedError


class IpcacheMap(Protocol):
    """The map itself, in the words of this cell. All raise OSError."""

    def dump(self) -> Mapping[Prefix, IpcacheValue]:
        """Every row there is; called in a thread, at any time."""
        ...

    def lookup(self, prefix: Prefix) -> IpcacheValue | None:
        """What the datapath finds for the prefix: its row, or that of the longest one around it."""
        ...

    def update(self, prefix: Prefix, value: IpcacheValue) -> None:
        """Write the row."""
        ...

    def delete(self, prefix: Prefix) -> None:
        """Remove the row; gone already is fine."""
        ...

    def void_verdicts(self) -> None:
        """Make the datapath evaluate the next packet of every flow again."""
        ...


class IpcacheRows:
    """What the map holds, beside what is claimed."""

    def __init__(self, kernel: IpcacheMap) -> None:
        self._kernel = kernel
        self._left: dict[Prefix, IpcacheValue] | None = None

    async def read(self) -> None:
        """Take note of what a former agent left. Raises OSError."""
        self.left(await self.dump())

    def left(self, rows: Mapping[Prefix, IpcacheValue]) -> None:
        """These rows are what a former agent left."""
        self._left = dict(rows)

    @property
    def leftovers(self) -> Mapping[Prefix, IpcacheValue]:
        """Rows that are not claimed yet; raises NotStartedError before they are known."""
        if self._left is None:
            raise NotStartedError("Ipcache was used before the hook 'read the ipcache' ran: depend on it")
        return self._left

    def holds(self, prefix: Prefix, wanted: IpcacheValue, known: IpcacheEntry | None) -> bool:
        """Whether the map has this already: we wrote or read it, and it is found. Raises OSError.

        ``known`` is the row of the table.
        """
        left = self.leftovers
        if known is None and not left:
            return False
        last = left.get(prefix) if known is None else known.value
        return last == wanted and self._kernel.lookup(prefix) == wanted

    def lookup(self, prefix: Prefix) -> IpcacheValue | None:
        """What the datapath finds for the prefix. Raises OSError."""
        return self._kernel.lookup(prefix)

    async def dump(self) -> Mapping[Prefix, IpcacheValue]:
        """Every row there is; read in a thread. Raises OSError."""
        return await to_thread.run_sync(self._kernel.dump)

    def write(self, values: Mapping[Prefix, IpcacheValue | None]) -> None:
        """Write rows, or remove those whose value is None. Tries all; raises the first OSError."""
        if failures := self.write_each(values):
            raise next(iter(failures.values()))

    def write_each(self, values: Mapping[Prefix, IpcacheValue | None]) -> dict[Prefix, OSError]:
        """The same; what the kernel refused, and why."""
        failures: dict[Prefix, OSError] = {}
        for prefix, value in values.items():
            try:
                if value is None:
                    self._kernel.delete(prefix)
                else:
                    self._kernel.update(prefix, value)
            except OSError as error:
                failures[prefix] = error
        if values:
            self._kernel.void_verdicts()
        return failures

    def settled(self, prefixes: Iterable[Prefix]) -> None:
        """These are claimed, or removed: no leftovers any more."""
        if self._left:
            for prefix in prefixes:
                self._left.pop(prefix, None)
