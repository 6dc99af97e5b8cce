"""Nodes from objects: their CiliumNode, and their Node for what that leaves out.

Controller: Table[Node] and Table[CiliumNode] in, rows of the table ``nodes`` out.
Needs: values.   Gives: NodeReader.
"""

from __future__ import annotations

from typing import Final

from cells.cluster.ipcache import Source
from cells.cluster.nodes.node import ClusterNode
from cells.cluster.nodes.parse import CILIUM_ANNOTATION, ParsedNode, parse_cilium_node, parse_node
from cells.cluster.nodes.settings import NodeSettings
from cells.ipam import Family
from cells.kubernetes import CiliumNode, Node

DECIDED_IN_CILIUM_NODES: Final = frozenset({"cluster-pool", "multi-pool"})
"""IPAM modes in which a range counts as a node's by its CiliumNode alone: Kubernetes may have given the node
another one, which the operator gives to others."""


class NodeReader:
    """Reads objects as the settings say."""

    def __init__(self, cluster: str, ipam_mode: str, settings: NodeSettings) -> None:
        self._cluster = cluster
        self._cidrs_of_nodes = ipam_mode not in DECIDED_IN_CILIUM_NODES
        self._settings = settings

    def parse(self, node: Node) -> ParsedNode:
        """What its Node tells, with what is wrong in it."""
        parsed = parse_node(node, annotations=self._settings.annotate_k8s_node)
        if not self._cidrs_of_nodes:
            parsed.cidrs = {Family.IPV4: [], Family.IPV6: []}
        return parsed

    def labels(self, node: Node) -> dict[str, str]:
        """Those of its labels that count."""
        return self._settings.kept_labels(node.labels)

    def read(self, node: Node | None, cilium: CiliumNode | None) -> ClusterNode:
        """The row of a node that has one of the two objects, or both."""
        told = parse_cilium_node(cilium) if cilium is not None else ParsedNode()
        if node is not None:
            told = filled(told, self.parse(node))
        known = node or cilium
        labels = self._settings.kept_labels(cilium.labels) if cilium is not None else {}
        return ClusterNode(
            cluster=self._cluster,
            name=known.name if known is not None else "",
            source=Source.KUBERNETES if cilium is None else Source.CUSTOM_RESOURCE,
            addresses=tuple(told.addresses),
            ipv4_alloc_cidrs=tuple(told.cidrs[Family.IPV4]),
            ipv6_alloc_cidrs=tuple(told.cidrs[Family.IPV6]),
            health=tuple(told.health),
            ingress=tuple(told.ingress),
            encryption_key=told.encryption_key,
            labels=labels or (self.labels(node) if node is not None else {}),
            annotations=annotations_of(cilium) or annotations_of(node),
            provider_id=(node.spec.provider_id if node is not None else "")
            or (cilium.spec.instance_id if cilium is not None else ""),
            boot_id=(cilium.spec.boot_id if cilium is not None else "")
            or (node.status.node_info.boot_id if node is not None else ""),
            node_identity=cilium.spec.node_identity if cilium is not None else 0,
            created=known.metadata.creation_timestamp if known is not None else "",
        )


def annotations_of(found: Node | CiliumNode | None) -> dict[str, str]:
    """The annotations that are Cilium's."""
    if found is None:
        return {}
    return {key: value for key, value in found.annotations.items() if CILIUM_ANNOTATION.match(key)}


def filled(first: ParsedNode, second: ParsedNode) -> ParsedNode:
    """What the first one tells, and the second one where the first says nothing."""
    return ParsedNode(
        addresses=first.addresses or second.addresses,
        cidrs={family: first.cidrs[family] or second.cidrs[family] for family in Family},
        health=first.health or second.health,
        ingress=first.ingress or second.ingress,
        encryption_key=first.encryption_key or second.encryption_key,
        faults=second.faults,
    )
