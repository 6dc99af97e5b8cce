"""Numbers and addresses of the other nodes, as the datapath knows them.

Controller: the table ``nodes`` in, the table ``node-ids`` out.
Reconciler: ``node-ids`` in, the map cilium_node_map_v2 out; its only writer.
Why:        the tunnel believes what comes from these addresses, and from no others. Numbers outlive the
            agent: they are read back from the pinned map.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final, Protocol

import msgspec
from anyio import to_thread

from cells.base.addresses import IPAddress
from cells.cluster.nodes.node import ClusterNode
from cells.config import AgentConfig
from cells.maps.map import map_by_id
from cells.maps.node_maps import Maps
from cells.maps.records.cluster import NodeKey, NodeValue
from lifecycle import (
    BatchFailures,
    Derived,
    Hook,
    Jobs,
    Lifecycle,
    ReadTable,
    Reconciler,
    Tables,
    after,
    invoke,
    module,
    provide,
    seconds,
)

__all__ = ["NodeAddressID", "NodeIDs", "NodeMap", "cell"]


# A number for every other node.
#
# Source: Cilium 1.17, the node IDs of its Linux node handler.

LAST: Final = 0xFFFF
"""Numbers are 1 to this; 0 is the node itself, or unknown."""


class NodeAddressID(msgspec.Struct, frozen=True):
    """An address of another node, and the number of the node, which all its addresses share."""

    ip: IPAddress
    id: int
    node: str
    """``cluster/name``."""


class NodeIDs:
    """Gives each node the number that one of its addresses had before, else the lowest that is free."""

    def __init__(self, own: Callable[[], str]) -> None:
        """``own``: ``cluster/name`` of this node, which objects may name before its agent does."""
        self._own = own
        self._ready = False
        self._of: dict[str, int] = {}
        self._known: dict[IPAddress, int] = {}
        self.exhausted = 0
        """Nodes that have none, for there is no number left."""

    def restored(self, rows: Mapping[IPAddress, int]) -> None:
        """Restore the numbers that an earlier agent gave. Until then none is allocated."""
        self._known.update(rows)
        self._ready = True

    def forget_restored(self) -> None:
        """All nodes are known: numbers that none of them has are free again."""
        self._known.clear()

    def rows(self, nodes: Iterable[ClusterNode]) -> dict[IPAddress, NodeAddressID]:
        """The addresses of all nodes but this one. Of one that two nodes claim, the first by name has it."""
        if not self._ready:
            return {}
        own = self._own()
        others = sorted(
            (node for node in nodes if not node.local and node.full_name != own),
            key=lambda node: node.full_name,
        )
        present = {node.full_name for node in others}
        self._of = {name: number for name, number in self._of.items() if name in present}
        self.exhausted = 0
        found: dict[IPAddress, NodeAddressID] = {}
        for node in others:
            number = self._of.get(node.full_name) or self._choose(node)
            if not number:
                self.exhausted += 1
                continue
            self._of[node.full_name] = number
            for each in node.addresses:
                found.setdefault(each.ip, NodeAddressID(each.ip, number, node.full_name))
        return found

    def _choose(self, node: ClusterNode) -> int:
        taken = set(self._of.values())
        for each in node.addresses:
            before = self._known.get(each.ip)
            if before and before not in taken:
                return before
        taken.update(self._known.values())
        return next((number for number in range(1, LAST + 1) if number not in taken), 0)


# cilium_node_map_v2, as the table ``node-ids`` says.


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


INTERVAL: Final = seconds(30)


def node_map(maps: Maps) -> NodeMap:
    """This node's."""
    return KernelNodeMap(maps)


def node_ids(
    agent: AgentConfig,
    nodes: ReadTable[ClusterNode],
    kernel: NodeMap,
    *,
    lifecycle: Lifecycle,
    jobs: Jobs,
    tables: Tables,
) -> ReadTable[NodeAddressID]:
    """The ``node-ids`` table, by address: in the map as soon as a node is known, out of it once all are."""
    ids = NodeIDs(lambda: f"{agent.cluster_name}/{agent.node_name}")
    table: Derived[NodeAddressID] = Derived("node-ids", ids.rows, nodes)
    target = NodeIDRows(kernel, lambda: table)
    reconciler = Reconciler(table, target, full_every=INTERVAL, put_early=True)

    async def restore() -> None:
        ids.restored(await target.read())
        table.wake()

    async def free() -> None:
        await nodes.wait_initialized()
        table.all()
        ids.forget_restored()

    tables.add(table, reconciler.statuses)
    lifecycle.append(Hook("read the numbers of nodes", restore))
    jobs.observe("reconcile", reconciler)
    jobs.one_shot("free numbers", free)
    return table


@after(ReadTable[NodeAddressID])
def keep() -> None:
    """The map is kept whether or not anybody asks."""


cell = module("node-ids", "Numbers of the other nodes", provide(node_ids, node_map), invoke(keep))
