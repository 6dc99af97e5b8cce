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
    rivals: tuple[str, ...] = ()
    """Other nodes that claim the range; the first by name has it."""


def remote_networks(
    nodes: Iterable[ClusterNode], families: Collection[Family], name: str
) -> dict[IPNetwork, RemoteNetwork]:
    """The ranges of all nodes but this one, of families that are on; of nodes that the tunnel can reach.

    ``name``: ``cluster/name`` of this node, which objects may name before its agent does.
    """
    found: dict[IPNetwork, RemoteNetwork] = {}
    rows = sorted(nodes, key=lambda node: node.full_name)
    own = {cidr for node in rows if _is(node, name) for cidr in node.all_cidrs()}
    for node in rows:
        endpoint = node.node_ip(Family.IPV4)
        if _is(node, name) or not isinstance(endpoint, IPv4Address):
            continue
        for cidr in node.all_cidrs():
            if Family.of(cidr) not in families or cidr in own:
                continue
            first = found.get(cidr)
            if first is None:
                found[cidr] = RemoteNetwork(cidr, node.full_name, endpoint)
            else:
                rivals = (*first.rivals, node.full_name)
                found[cidr] = RemoteNetwork(cidr, first.node, first.endpoint, rivals)
    return found


def _is(node: ClusterNode, name: str) -> bool:
    """Whether it is this node."""
    return node.local or node.full_name == name


def troubles(nodes: Iterable[ClusterNode], networks: Iterable[RemoteNetwork], name: str) -> list[str]:
    """What keeps pods of other nodes from being reached, in words."""
    rows = sorted(nodes, key=lambda node: node.full_name)
    own = {cidr for node in rows if _is(node, name) for cidr in node.all_cidrs()}
    found = [
        f"node {node.full_name} has no IPv4 address, which the tunnel needs"
        for node in rows
        if not _is(node, name) and node.node_ip(Family.IPV4) is None
    ]
    found += [
        f"{each.network} is claimed by {each.node} and {', '.join(each.rivals)}: it goes to {each.node}"
        for each in networks
        if each.rivals
    ]
    found += [
        f"{cidr} is claimed by {node.full_name}, and is this node's own"
        for node in rows
        if not _is(node, name)
        for cidr in node.all_cidrs()
        if cidr in own
    ]
    return found
