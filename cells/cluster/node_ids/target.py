"""cilium_node_map_v2, as the table ``node-ids`` says.

Needs: Maps.   Gives: NodeIDRows, a reconciler's target; NodeMap, KernelNodeMap.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from anyio import to_thread

from cells.cluster.node_ids.ids import NodeAddressID
from cells.ipam import IPAddress
from cells.maps import Maps, NodeKey, NodeValue, map_by_id
from lifecycle import BatchFailures, ReadTable


class NodeMap(Protocol):
    """cilium_node_map_v2, as far as this cell touches it. Methods raise OSError."""

    def numbers(self) -> Mapping[IPAddress, int]:
        """All addresses in it; called in a thread, at any time."""
        ...

    def put(self, ip: IPAddress, number: int) -> None:
        """Write a row."""
        ...

    def drop(self, ip: IPAddress) -> None:
        """Remove a row; gone already is fine."""
        ...


class KernelNodeMap:
    """The real :class:`NodeMap`."""

    def __init__(self, maps: Maps) -> None:
        self._maps = maps

    def numbers(self) -> Mapping[IPAddress, int]:
        """Through a descriptor of its own, as the loop may use the other one meanwhile."""
        with map_by_id(self._maps.nodes.id) as table:
            return {NodeKey.unpack(key).ip: NodeValue.unpack(value).id for key, value in table.items()}

    def put(self, ip: IPAddress, number: int) -> None:
        """Write a row."""
        self._maps.nodes.update(NodeKey(ip).pack(), NodeValue(number).pack())

    def drop(self, ip: IPAddress) -> None:
        """Remove a row."""
        self._maps.nodes.delete(NodeKey(ip).pack())


class NodeIDRows:
    """The map as a reconciler's target."""

    def __init__(self, kernel: NodeMap, table: Callable[[], ReadTable[NodeAddressID]]) -> None:
        self._kernel = kernel
        self._table = table

    async def read(self) -> Mapping[IPAddress, int]:
        """The numbers of all addresses in it."""
        return await to_thread.run_sync(self._kernel.numbers)

    async def dump(self) -> Mapping[IPAddress, NodeAddressID]:
        """Every row, as that of the table where it has the same number."""
        found = {}
        for ip, number in (await self.read()).items():
            row = self._table().get(ip)
            same = row is not None and row.id == number
            found[ip] = row if row is not None and same else NodeAddressID(ip, number, "")
        return found

    async def put(self, batch: Mapping[IPAddress, NodeAddressID]) -> None:
        """Write rows. Raises BatchError."""
        self._each(batch, lambda ip: self._kernel.put(ip, batch[ip].id))

    async def drop(self, batch: Collection[IPAddress]) -> None:
        """Remove rows. Raises BatchError."""
        self._each(batch, self._kernel.drop)

    @staticmethod
    def _each(batch: Collection[IPAddress], do: Callable[[IPAddress], object]) -> None:
        with BatchFailures(OSError) as failures:
            for ip in batch:
                with failures.of(ip):
                    do(ip)
