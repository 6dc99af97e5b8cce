"""Ids, addresses and published keys of other nodes, for the datapath and its tools.

Controller: the table ``nodes`` in, the table ``node-ids`` out.
Reconciler: ``node-ids`` in, the map cilium_node_map_v2 out; its only writer.
Why:        the tunnel accepts packets from these addresses only. Ids outlive the agent: they are read back
            from the pinned map.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from cells.base.addresses import IPAddress
from cells.cluster.nodes.node import ClusterNode
from cells.config import AgentConfig
from cells.maps.node_maps import Maps
from cells.maps.records.cluster import NodeKey, NodeValue
from cells.maps.target import Codec, MapTarget, record
from lifecycle import (
    Hook,
    Jobs,
    Lifecycle,
    ReadTable,
    Reconciler,
    Tables,
    invoke,
    module,
    provide,
    seconds,
)
from lifecycle.tables import Incremental, Input, Plan

__all__ = ["NodeAddressID", "NodeIDTarget", "NodeIDs", "cell", "node_map"]


# Allocation of node ids.
#
# Source: Cilium 1.17, the node IDs of its Linux node handler.

MAX_ID: Final = 0xFFFF
"""The highest id; 0 is this node, or an unknown one."""


class NodeAddressID(msgspec.Struct, frozen=True):
    """An address of another node, and the id of the node, which all its addresses share."""

    ip: IPAddress
    id: int
    node: str
    """``cluster/name``."""
    spi: int = 0
    """The node's published key: IPsec's SPI, 255 for WireGuard; 0: none. Tools show it."""


class NodeIDs:
    """Allocates node ids: the restored id of one of the node's addresses, or the lowest free one."""

    def __init__(self, own: Callable[[], str]) -> None:
        """``own`` returns ``cluster/name`` of this node, which has no id even before its row is local."""
        self._own = own
        self._ready = False
        self._numbered = False
        """Whether all nodes have been processed once."""
        self._ids: dict[str, int] = {}
        """Ids by node."""
        self._taken: set[int] = set()
        """Ids in use."""
        self._free_from = 1
        """The lowest id that may be free."""
        self._rows: dict[str, tuple[IPAddress, ...]] = {}
        """Addresses with rows, by node."""
        self._restored: dict[IPAddress, int] = {}
        """Ids of a previous agent, by address, until all nodes are known."""
        self._reserved: frozenset[int] = frozenset()
        """The ids in _restored."""
        self._without: set[str] = set()
        """Nodes without an id, as all are in use."""

    def restored(self, rows: Mapping[IPAddress, int]) -> None:
        """Restore the ids of an earlier agent. Until then, none is allocated."""
        self._restored.update(rows)
        self._reserved = frozenset(self._restored.values())
        self._ready = True

    def forget_restored(self) -> None:
        """Free the restored ids that no node has; called once all nodes are known."""
        self._restored.clear()
        self._reserved = frozenset()
        self._free_from = 1

    def table(self, nodes: ReadTable[str, ClusterNode]) -> Incremental[IPAddress, NodeAddressID]:
        """The addresses of all other nodes; the table of nodes has no address twice."""
        return Incremental("node-ids", self._plan, nodes)

    def _plan(self, _: str, nodes: Input[str, ClusterNode]) -> Plan[IPAddress, NodeAddressID]:
        if not self._ready:
            return {}, lambda: None
        rows, own = nodes.rows(), self._own()
        changed = {*nodes.changed, *self._without} if self._numbered else rows.keys()
        present = {name: rows[name][0] for name in changed if name in rows and name != own}
        others = {name: node for name, node in present.items() if not node.local}
        for name in changed:
            if name not in others:
                self._release(name)
        writes: dict[IPAddress, NodeAddressID | None] = {}
        now: dict[str, tuple[IPAddress, ...]] = {}
        for name in changed:
            writes |= dict.fromkeys(self._rows.get(name, ()))
        for name in sorted(others):
            node = others[name]
            number = self._ids.get(name) or self._allocate(node)
            if not number:
                self._without.add(name)
                continue
            self._without.discard(name)
            now[name] = tuple(each.ip for each in node.addresses)
            for ip in now[name]:
                writes[ip] = NodeAddressID(ip, number, name, node.encryption_key)

        def remember() -> None:
            for name in changed:
                self._rows.pop(name, None)
            self._rows |= now
            self._numbered = True

        return writes, remember

    def _release(self, name: str) -> None:
        self._without.discard(name)
        if number := self._ids.pop(name, 0):
            self._taken.discard(number)
            self._free_from = min(self._free_from, number)

    def _allocate(self, node: ClusterNode) -> int:
        """Allocate an id for the node; 0 if all are in use."""
        before = (self._restored.get(each.ip, 0) for each in node.addresses)
        number = next((one for one in before if one and one not in self._taken), 0)
        if not number:
            lowest = range(self._free_from, MAX_ID + 1)
            number = next((one for one in lowest if one not in self._taken and one not in self._reserved), 0)
            self._free_from = number or MAX_ID + 1
        if number:
            self._ids[node.full_name] = number
            self._taken.add(number)
        return number


# The table ``node-ids`` to the map cilium_node_map_v2.

NodeIDTarget = MapTarget[IPAddress, NodeAddressID, NodeValue]
INTERVAL: Final = seconds(30)


def node_map(maps: Maps) -> NodeIDTarget:
    """Provide the map cilium_node_map_v2 as a reconciler's target."""
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
    """The ``node-ids`` table, by address: added at once, deleted only when all nodes are known."""
    ids = NodeIDs(lambda: f"{agent.cluster_name}/{agent.node_name}")
    table = ids.table(nodes)
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


cell = module(
    "node-ids",
    "Node IDs of the other nodes",
    provide(node_ids, node_map),
    invoke(ReadTable[IPAddress, NodeAddressID]),
)
