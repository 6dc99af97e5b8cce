"""Numbers and addresses of the other nodes, as the datapath knows them.

Controller: the table ``nodes`` in, the table ``node-ids`` out.
Reconciler: ``node-ids`` in, the map cilium_node_map_v2 out; its only writer.
Needs:      AgentConfig, ReadTable[ClusterNode], Maps.   Gives: ReadTable[NodeAddressID].
Why:        the tunnel believes what comes from these addresses, and from no others. Numbers outlive the
            agent: they are read back from the pinned map.
"""

from __future__ import annotations

from typing import Final

from cells.cluster.node_ids.ids import NodeAddressID, NodeIDs
from cells.cluster.node_ids.target import KernelNodeMap, NodeIDRows, NodeMap
from cells.cluster.nodes import ClusterNode
from cells.config import AgentConfig
from cells.maps import Maps
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

__all__ = ["NodeAddressID", "NodeIDs", "NodeMap", "cell"]

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
