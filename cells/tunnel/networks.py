"""Which node has which pods: the table ``tunnel-networks``.

Controller: the table ``nodes`` in, ranges of the other nodes' pods out.
Needs:      rows of the nodes' table.   Gives: RemoteNetwork, remote_networks(), claims.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from ipaddress import IPv4Address

import msgspec

from cells.cluster.nodes import ClusterNode
from cells.ipam import Family, IPNetwork


class RemoteNetwork(msgspec.Struct, frozen=True):
    """A range of pods on another node."""

    network: IPNetwork
    node: str
    """``cluster/name``."""
    endpoint: IPv4Address
    """Where the tunnel to it ends: the address of the node."""


def remote_networks(
    nodes: Iterable[ClusterNode], families: Collection[Family], name: str
) -> dict[IPNetwork, RemoteNetwork]:
    """The ranges of all nodes but this one, of families that are on; of nodes that the tunnel can reach.

    ``name``: ``cluster/name`` of this node, which objects may name before its agent does.
    """
    found: dict[IPNetwork, RemoteNetwork] = {}
    for node in nodes:
        endpoint = node.node_ip(Family.IPV4)
        if _is(node, name) or not isinstance(endpoint, IPv4Address):
            continue
        for cidr in node.all_cidrs():
            if Family.of(cidr) in families:
                found[cidr] = RemoteNetwork(cidr, node.full_name, endpoint)
    return found


def _is(node: ClusterNode, name: str) -> bool:
    """Whether it is this node."""
    return node.local or node.full_name == name


def troubles(nodes: Iterable[ClusterNode], name: str) -> list[str]:
    """What keeps pods of other nodes from being reached, in words."""
    return [
        f"node {node.full_name} has no IPv4 address, which the tunnel needs"
        for node in sorted(nodes, key=lambda node: node.full_name)
        if not _is(node, name) and node.node_ip(Family.IPV4) is None
    ]
