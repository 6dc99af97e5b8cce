"""The table ``nodes``: the nodes of the cluster from Node, CiliumNode, the kvstore and the cluster mesh.

In:   rows of Node, CiliumNode, SharedNodes and MeshNodes; this node's own state.
Out:  the table ``nodes``; this node's CiliumNode and, with annotate-k8s-node, annotations of its Node.

The kvstore has precedence over a CiliumNode, and that over a Node. Claims of a CiliumNode must be confirmed
by the Node, and claims in the kvstore by both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Annotated, cast

import msgspec

from cells.base.addresses import Family
from cells.base.metrics import Collector, FeatureValue, MetricFamily, counter, features, gauge
from cells.cluster.nodes.claim_validation import CLAIMS, NodeGrants, RefusedClaims, claim_events, claims_of
from cells.cluster.nodes.information import NodeInformation
from cells.cluster.nodes.local import LocalNode, LocalNodeStore, NodeAnnotations
from cells.cluster.nodes.node import INTERNAL_IP, ClusterNode
from cells.cluster.nodes.parse import (
    CiliumNodeSettings,
    NodeReader,
    NodeSettings,
    ParsedNode,
    RulePeerSettings,
    rule_peers,
    shared_node,
)
from cells.cluster.nodes.publish import CiliumNodePublisher, OwnCiliumNode, requested_pools
from cells.config import AgentConfig
from cells.kubernetes.objects.cilium_node import CiliumNode
from cells.kubernetes.objects.core import Node
from cells.node.addresses import InternalIP
from cells.node.devices import Device
from cells.node.ipam.pools import AssignedPodCIDRs, AssignedPools
from cells.node.ipam.settings import PodAddressing
from lifecycle import (
    Change,
    Jobs,
    Member,
    Named,
    ReadTable,
    Table,
    Tables,
    config,
    group,
    invoke,
    module,
    provide,
    provide_private,
)
from lifecycle.tables import LPM

__all__ = ["MeshNodes", "SharedNodes", "cell"]


# Metrics.
#
# Source: Cilium 1.17, cilium_nodes_all_num and cilium_nodes_all_events_received_total.


class NodeCounts:
    """Counts added, changed and removed nodes, by source."""

    def __init__(self, nodes: ReadTable[str, ClusterNode], *, jobs: Jobs) -> None:
        self._nodes = nodes
        self.events: Counter[tuple[str, str]] = Counter()
        """Number of events by (event, source)."""
        jobs.observe("events", nodes.changes, self._follow)

    def __len__(self) -> int:
        return len(self._nodes)

    async def _follow(self, changes: Iterable[Change[str, ClusterNode]]) -> None:
        for change in changes:
            node = change.row or change.old
            if node is None:
                continue
            event = "delete" if change.row is None else "add" if change.old is None else "update"
            self.events[event, node.source] += 1


def node_metrics(counts: NodeCounts) -> Member[Collector]:
    """Contribute the numbers of nodes and of events."""

    async def collect() -> Iterable[MetricFamily]:
        return [
            gauge("cilium_nodes_all_num", "Number of nodes managed", len(counts)),
            counter(
                "cilium_nodes_all_events_received_total",
                "Number of node events received",
                dict(counts.events),
                "event_type source",
            ),
        ]

    return Collector("nodes", collect)


SharedNodes = Annotated[ReadTable[str, ClusterNode], Named("shared")]
"""Nodes of the kvstore, by ``cluster/name``; they have precedence over objects."""

MeshNodes = Annotated[ReadTable[str, ClusterNode], Named("clustermesh")]
"""Nodes of remote clusters, by ``cluster/name``; initialized once all clusters have listed theirs."""


OtherNodes = Annotated[ReadTable[str, ClusterNode], Named("other")]
"""The nodes of both tables."""


def other_nodes(shared: SharedNodes | None, mesh: MeshNodes | None, agent: AgentConfig) -> OtherNodes:
    """Provide the nodes that are not objects of the own API server."""
    if mesh is None or not agent.cluster_id:
        return shared if shared is not None else Table("other-nodes", key=lambda node: node.full_name)
    if shared is None:
        return mesh
    return shared.outer_join(mesh, lambda own, remote: own or cast("ClusterNode", remote), name="other-nodes")


def reader(agent: AgentConfig, ipam: PodAddressing, settings: NodeSettings) -> NodeReader:
    """Provide the parser of node objects."""
    return NodeReader(agent.cluster_name, ipam.mode, settings)


def node_table(
    nodes: Table[tuple[str, str], Node],
    cilium_nodes: Table[tuple[str, str], CiliumNode],
    read: NodeReader,
    local: LocalNodeStore,
    others: OtherNodes,
    devices: Table[int, Device] | None,
    agent: AgentConfig,
    tables: Tables,
) -> ReadTable[str, ClusterNode]:
    """Provide the table ``nodes``, by ``cluster/name``: nodes of all sources, without refused claims."""
    parsed = nodes.outer_join(cilium_nodes, read.read).flat_map(
        lambda node: (node,), key=lambda node: node.full_name, name="nodes-of-objects"
    )
    parsed = parsed.outer_join(others, _shared_first, name="nodes-shared")
    claimed = parsed.outer_join(
        local.table, _own_first, name="claimed-nodes", indexes={CLAIMS: LPM(claims_of)}
    )
    table = NodeGrants(claimed, lambda: f"{agent.cluster_name}/{agent.node_name}").table(devices)
    tables.add(table)
    return table


def _shared_first(parsed: ClusterNode | None, other: ClusterNode | None) -> ClusterNode:
    return shared_node(other, parsed) if other is not None else cast("ClusterNode", parsed)


def _own_first(parsed: ClusterNode | None, own: ClusterNode | None) -> ClusterNode:
    if own is None or parsed is None:
        return own or cast("ClusterNode", parsed)  # a key is in one of the two tables
    return msgspec.structs.replace(own, created=parsed.created)


def internal_ips(
    nodes: Table[tuple[str, str], Node], agent: AgentConfig, read: NodeReader
) -> ReadTable[Family, InternalIP]:
    """Provide the first InternalIP of each family in this node's Node object."""
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


def peer_features(settings: RulePeerSettings) -> Member[Collector]:
    """What networks in policies select in addition, as a feature in use.

    Cilium declares ``world`` and ``remote-node``, and shows the values of policy-cidr-match-mode.
    """
    modes: FeatureValue = {(mode,): 1 for mode in settings.policy_cidr_match_mode}
    return features("rule-peer-features", lambda: {"network_policies_cidr_policies": modes})


cell = group(
    module(
        "node-objects",
        "This node, by its objects",
        config(NodeSettings, RulePeerSettings),
        provide(reader, rule_peers, peer_features, internal_ips),
        provide(NodeInformation, as_=(AssignedPodCIDRs, AssignedPools)),
    ),
    module(
        "nodes",
        "The nodes of the cluster",
        provide(node_table, node_metrics, LocalNodeStore),
        provide_private(NodeCounts, other_nodes),
        provide(RefusedClaims, claim_events),
        invoke(RefusedClaims),
    ),
    module(
        "local-node",
        "This node, for the others",
        config(CiliumNodeSettings),
        provide(LocalNode),
        provide_private(CiliumNodePublisher, OwnCiliumNode, requested_pools, NodeAnnotations),
        invoke(LocalNode, ReadTable[str, ClusterNode], NodeAnnotations, CiliumNodePublisher),
    ),
)
