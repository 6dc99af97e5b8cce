"""The map cilium_lxc in the kernel.

For:    LocalAddresses. Needs: Maps. Gives: KernelLxc.
"""

from collections.abc import Mapping

from cells.ipam import IPAddress
from cells.maps import LxcKey, LxcValue, Maps, map_by_id


class KernelLxc:
    """The real :class:`~cells.node.local_addresses.rows.LxcMap`."""

    def __init__(self, maps: Maps) -> None:
        self._maps = maps

    def dump(self) -> Mapping[IPAddress, LxcValue]:
        """Through a descriptor of its own, as the loop may use the other one meanwhile."""
        lxc = self._maps.lxc
        with map_by_id(lxc.id, lxc.spec.name) as table:
            rows = list(table.items())
        return {LxcKey.unpack(key).ip: LxcValue.unpack(value) for key, value in rows}

    def lookup(self, ip: IPAddress) -> LxcValue | None:
        """The address's row."""
        found = self._maps.lxc.lookup(LxcKey(ip).pack())
        return None if found is None else LxcValue.unpack(found)

    def update(self, ip: IPAddress, value: LxcValue) -> None:
        """Write the row."""
        self._maps.lxc.update(LxcKey(ip).pack(), value.pack())

    def delete(self, ip: IPAddress) -> None:
        """Remove the row."""
        self._maps.lxc.delete(LxcKey(ip).pack())

    def void_verdicts(self) -> None:
        """The node's epoch."""
        self._maps.epochs.bump()
