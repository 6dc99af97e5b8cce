"""Numbers, addresses and published keys of the other nodes, as the datapath and its tools know them.

Controller: the table ``nodes`` in, the table ``node-ids`` out.
Reconciler: ``node-ids`` in, the map cilium_node_map_v2 out; its only writer.
Why:        the tunnel believes what comes from these addresses, and from no others. Numbers outlive the
            agent: they are read back from the pinned map.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

import msgspec

from cells.base.addresses import IPAddress
from cells.cluster.nodes.node import ClusterNode
from cells.config import AgentConfig
from cells.maps.node_maps import Maps
from cells.maps.records.cluster import NodeKey, NodeValue
from cells.maps.target import Codec, MapTarget, record
from lifecycle import (
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

__all__ = ["NodeAddressID", "NodeIDTarget", "NodeIDs", "cell", "node_map"]


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
    spi: int = 0
    """The key that the node publishes: of IPsec, 255 for WireGuard; 0: none. Tools show it."""


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
                row = NodeAddressID(each.ip, number, node.full_name, node.encryption_key)
                found.setdefault(each.ip, row)
        return found

    def _choose(self, node: ClusterNode) -> int:
        taken = set(self._of.values())
        for each in node.addresses:
            before = self._known.get(each.ip)
            if before and before not in taken:
                return before
        taken.update(self._known.values())
        return next((number for number in range(1, LAST + 1) if number not in taken), 0)


# cilium_node_map_v2, as in the table ``node-ids``.

NodeIDTarget = MapTarget[IPAddress, NodeAddressID, NodeValue]
INTERVAL: Final = seconds(30)


def node_map(maps: Maps) -> NodeIDTarget:
    """This node's."""
    keys = Codec[IPAddress](lambda ip: NodeKey(ip).pack(), lambda key: NodeKey.unpack(key).ip)
    return MapTarget(lambda: (maps.nodes,), keys, record(NodeValue), lambda row: NodeValue(row.id, row.spi))


def node_ids(
    agent: AgentConfig,
    nodes: ReadTable[str, ClusterNode],
    target: NodeIDTarget,
    *,
    lifecycle: Lifecycle,
    jobs: Jobs,
    tables: Tables,
) -> ReadTable[IPAddress, NodeAddressID]:
    """The ``node-ids`` table, by address: in the map as soon as a node is known, out of it once all are."""
    ids = NodeIDs(lambda: f"{agent.cluster_name}/{agent.node_name}")
    table: Derived[IPAddress, NodeAddressID] = Derived("node-ids", ids.rows, nodes)
    reconciler = Reconciler(table, target, full_every=INTERVAL, put_early=True)

    async def restore() -> None:
        ids.restored({ip: value.id for ip, value in (await target.observe()).items()})
        table.wake()

    async def free() -> None:
        await nodes.wait_initialized()
        table.all()
        ids.forget_restored()

    tables.add(table, reconciler.statuses)
    lifecycle.append(Hook("read the node IDs", restore))
    jobs.observe("reconcile", reconciler)
    jobs.one_shot("free numbers", free)
    return table


@after(ReadTable[IPAddress, NodeAddressID])
def keep() -> None:
    """The map is maintained with or without users of this object."""


cell = module("node-ids", "Node IDs of the other nodes", provide(node_ids, node_map), invoke(keep))
