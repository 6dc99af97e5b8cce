"""The map cilium_ipcache in the kernel.

For:    Ipcache. Needs: Maps. Gives: KernelIpcache.
"""

from collections.abc import Mapping

from cells.cluster.ipcache.entry import Prefix
from cells.maps import IpcacheValue, Maps, ipcache_key, ipcache_prefix, map_by_id


class KernelIpcache:
    """The real :class:`~cells.cluster.ipcache.rows.IpcacheMap`."""

    def __init__(self, maps: Maps) -> None:
        self._maps = maps

    def dump(self) -> Mapping[Prefix, IpcacheValue]:
        """Through a descriptor of its own, as the loop may use the other one meanwhile."""
        ipcache = self._maps.ipcache
        with map_by_id(ipcache.id, ipcache.spec.name) as table:
            rows = list(table.items())
        return {ipcache_prefix(key): IpcacheValue.unpack(value) for key, value in rows}

    def lookup(self, prefix: Prefix) -> IpcacheValue | None:
        """The longest prefix that covers it."""
        found = self._maps.ipcache.lookup(ipcache_key(prefix))
        return None if found is None else IpcacheValue.unpack(found)

    def update(self, prefix: Prefix, value: IpcacheValue) -> None:
        """Write the row."""
        self._maps.ipcache.update(ipcache_key(prefix), value.pack())

    def delete(self, prefix: Prefix) -> None:
        """Remove the row."""
        self._maps.ipcache.delete(ipcache_key(prefix))

    def void_verdicts(self) -> None:
        """The node's epoch: a new row, too, may take a flow from an identity it had by a shorter prefix."""
        self._maps.epochs.bump()
