"""The map cilium_ipcache in the kernel.

For:    Ipcache. Needs: Maps. Gives: KernelIpcache.
"""

from collections.abc import Mapping

from cells.ipam import IPNetwork
from cells.maps import IpcacheKey, IpcacheValue, Maps, map_by_id


class KernelIpcache:
    """The real :class:`~cells.cluster.ipcache.rows.IpcacheMap`."""

    def __init__(self, maps: Maps) -> None:
        self._maps = maps

    def dump(self) -> Mapping[IPNetwork, IpcacheValue]:
        """Through a descriptor of its own, as the loop may use the other one meanwhile."""
        ipcache = self._maps.ipcache
        with map_by_id(ipcache.id, ipcache.spec.name) as table:
            rows = list(table.items())
        return {IpcacheKey.unpack(key).network: IpcacheValue.unpack(value) for key, value in rows}

    def lookup(self, prefix: IPNetwork) -> IpcacheValue | None:
        """The longest prefix that covers it."""
        found = self._maps.ipcache.lookup(IpcacheKey.of(prefix).pack())
        return None if found is None else IpcacheValue.unpack(found)

    def update(self, prefix: IPNetwork, value: IpcacheValue) -> None:
        """Write the row."""
        self._maps.ipcache.update(IpcacheKey.of(prefix).pack(), value.pack())

    def delete(self, prefix: IPNetwork) -> None:
        """Remove the row."""
        self._maps.ipcache.delete(IpcacheKey.of(prefix).pack())

    def void_verdicts(self) -> None:
        """The node's epoch: a new row, too, may take a flow from an identity it had by a shorter prefix."""
        self._maps.epochs.bump()
