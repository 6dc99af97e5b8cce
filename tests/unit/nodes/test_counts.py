"""Nodes as metrics: how many there are, and what became of them."""

from ipaddress import ip_address

import pytest

from cells.base.metrics import Collector
from cells.cluster.ipcache.rows import Source
from cells.cluster.nodes import NodeCounts, node_metrics
from cells.cluster.nodes.node import INTERNAL_IP, ClusterNode, NodeIP
from lifecycle import Hive, ReadTable, Table, invoke, module, provide
from lifecycle.testing import eventually

pytestmark = pytest.mark.anyio


def node(name: str, ip: str) -> ClusterNode:
    return ClusterNode(
        cluster="default",
        name=name,
        source=Source.KUBERNETES,
        addresses=(NodeIP(INTERNAL_IP, ip_address(ip)),),
    )


async def series(collector: Collector) -> dict[str, object]:
    return {family.name: dict(family.series) for family in await collector.collect()}


async def test_nodes_that_come_change_and_go_are_counted() -> None:
    nodes: Table[str, ClusterNode] = Table("nodes", key=lambda one: one.full_name)

    def known() -> ReadTable[str, ClusterNode]:
        return nodes

    counting = module("counts", "Counts", provide(known, NodeCounts), invoke(NodeCounts))
    async with Hive(counting).started() as hive:
        counts = hive.get(NodeCounts)
        with nodes.txn() as txn:
            txn.put(node("a", "192.0.2.1"))
        await eventually(lambda: counts.events["add", "k8s"] == 1)
        with nodes.txn() as txn:
            txn.put(node("a", "192.0.2.2"))
            txn.put(node("b", "192.0.2.3"))
        await eventually(lambda: counts.events["add", "k8s"] == 2)
        with nodes.txn() as txn:
            txn.delete("default/a")
        await eventually(lambda: counts.events["delete", "k8s"] == 1)
        assert await series(node_metrics(counts)) == {
            "cilium_nodes_all_num": {(): 1},
            "cilium_nodes_all_events_received_total": {
                ("add", "k8s"): 2,
                ("update", "k8s"): 1,
                ("delete", "k8s"): 1,
            },
        }
