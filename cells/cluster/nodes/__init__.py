"""The nodes of the cluster: this one and all others, from their objects.

Source and controller: Table[Node], Table[CiliumNode] and SharedNodes in, the table ``nodes`` out. What the
        kvstore tells counts before a CiliumNode, and that before a Node; this node's row is what its agent
        has found and chosen, and what it writes to its CiliumNode (and, with annotate-k8s-node, to its Node).
Needs:  AgentConfig, IpamSettings, Kubernetes' tables; Router and NodeAddresses for this node's row.
Gives:  ReadTable[ClusterNode] (table ``nodes``, initialized once all sources and this node are known),
        AssignedPodCIDRs (Ipam waits for it), ReadTable[InternalIP] (for NodeAddresses), NodeSettings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, cast

from cells.cluster.nodes.annotate import NodeAnnotations
from cells.cluster.nodes.counts import NodeCounts, node_metrics
from cells.cluster.nodes.guard import RefusedClaims, claim_events, guarded
from cells.cluster.nodes.information import NodeInformation
from cells.cluster.nodes.local import LocalNode, LocalNodeStore
from cells.cluster.nodes.node import CILIUM_INTERNAL_IP, EXTERNAL_IP, INTERNAL_IP, ClusterNode, NodeIP
from cells.cluster.nodes.parse import Fault, ParsedNode, parse_cilium_node, parse_ip, parse_node
from cells.cluster.nodes.publish import CiliumNodePublisher
from cells.cluster.nodes.reader import NodeReader
from cells.cluster.nodes.settings import NodeSettings
from cells.config import AgentConfig
from cells.ipam import AssignedPodCIDRs, AssignedPools, Family, IpamSettings
from cells.kubernetes import CiliumNode, Node
from cells.node.addresses import InternalIP
from cells.node.devices import Device
from lifecycle import (
    Derived,
    Named,
    ReadTable,
    Table,
    Tables,
    after,
    config,
    group,
    invoke,
    module,
    provide,
    provide_private,
)

__all__ = [
    "CILIUM_INTERNAL_IP",
    "EXTERNAL_IP",
    "INTERNAL_IP",
    "ClusterNode",
    "Fault",
    "NodeIP",
    "NodeReader",
    "NodeSettings",
    "ParsedNode",
    "SharedNodes",
    "cell",
    "parse_cilium_node",
    "parse_ip",
    "parse_node",
]

SharedNodes = Annotated[ReadTable[ClusterNode], Named("shared")]
"""Nodes known from other sources than objects, by ``cluster/name``; they take precedence over objects."""


def reader(agent: AgentConfig, ipam: IpamSettings, settings: NodeSettings) -> NodeReader:
    """How objects of nodes are read."""
    return NodeReader(agent.cluster_name, ipam.ipam, settings)


def node_table(
    nodes: Table[Node],
    cilium_nodes: Table[CiliumNode],
    read: NodeReader,
    local: LocalNodeStore,
    others: SharedNodes | None,
    devices: Table[Device] | None,
    agent: AgentConfig,
    tables: Tables,
) -> ReadTable[ClusterNode]:
    """The table ``nodes``, by ``cluster/name``: what objects say, without what nodes may not claim."""
    parsed = nodes.outer_join(cilium_nodes, read.read).flat_map(
        lambda node: (node,), key=lambda node: node.full_name, name="nodes-of-objects"
    )
    if others is not None:
        parsed = parsed.outer_join(others, _second_first, name="nodes-shared")
    claimed = parsed.outer_join(local.table, _own_first, name="claimed-nodes")

    def granted(nodes: list[ClusterNode], own: Sequence[Device] = ()) -> Mapping[str, ClusterNode]:
        return guarded(nodes, own, f"{agent.cluster_name}/{agent.node_name}")

    sources = (claimed, devices) if devices is not None else (claimed,)
    table: ReadTable[ClusterNode] = Derived("nodes", granted, *sources, indexes={"address": _addresses})
    tables.add(table)
    return table


def _second_first(parsed: ClusterNode | None, other: ClusterNode | None) -> ClusterNode:
    return other or cast("ClusterNode", parsed)


def _own_first(parsed: ClusterNode | None, own: ClusterNode | None) -> ClusterNode:
    return own or cast("ClusterNode", parsed)  # a key is in one of the two tables


def _addresses(node: ClusterNode) -> tuple[object, ...]:
    return tuple({each.ip for each in node.addresses})


def internal_ips(nodes: Table[Node], agent: AgentConfig, read: NodeReader) -> ReadTable[InternalIP]:
    """The first InternalIP of each family in this node's Node object."""
    own = nodes.filter(lambda node: node.name == agent.node_name, name="own-node")
    return own.flat_map(
        lambda node: _internal(read.parse(node)), key=lambda row: row.family, name="own-internal-ips"
    )


def _internal(parsed: ParsedNode) -> list[InternalIP]:
    first: dict[Family, InternalIP] = {}
    for each in parsed.addresses:
        if each.type == INTERNAL_IP:
            first.setdefault(Family.of(each.ip), InternalIP(Family.of(each.ip), each.ip))
    return list(first.values())


def assigned(information: NodeInformation) -> AssignedPodCIDRs:
    """The ranges this node was given."""
    return information


@after(LocalNode, ReadTable[ClusterNode], NodeAnnotations, CiliumNodePublisher)
def keep() -> None:
    """The nodes are known whether or not anybody asks."""


def assigned_pools(information: NodeInformation) -> AssignedPools:
    """What this node's CiliumNode says of pools."""
    return information


cell = group(
    module(
        "node-objects",
        "This node, by its objects",
        config(NodeSettings),
        provide(reader, internal_ips, assigned, assigned_pools, NodeInformation),
    ),
    module(
        "nodes",
        "The nodes of the cluster",
        provide(node_table, node_metrics, LocalNodeStore),
        provide_private(NodeCounts),
        provide(RefusedClaims, claim_events),
        invoke(RefusedClaims),
    ),
    module(
        "local-node",
        "This node, for the others",
        provide(LocalNode),
        provide_private(CiliumNodePublisher, NodeAnnotations),
        invoke(keep),
    ),
)
