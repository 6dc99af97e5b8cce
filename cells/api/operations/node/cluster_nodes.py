"""The nodes of the cluster as the API tells them.

Needs: ClusterNode.   Gives: node_element(), NodeWatchers.
Source: Cilium 1.17, NodeElement of api/v1/openapi.yaml, and GET /cluster/nodes with its Client-Id.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from cells.api.models import node as wire
from cells.api.models.status import NodeElement
from cells.api.models.v1 import NodeAddressing, NodeAddressingElement
from cells.cluster.nodes import ClusterNode
from cells.ipam import Family, IPAddress

CLIENT_SECONDS: Final = 900.0
"""How long a client that watches the nodes is remembered."""


def node_element(node: ClusterNode) -> NodeElement:
    """A node, with the address others reach it by, and all its others as secondary ones."""
    primary = {family: node.node_ip(family) for family in Family}
    return NodeElement(
        name=node.full_name,
        primary_address=_addressing(
            {
                family: NodeAddressingElement(
                    enabled=True,
                    ip=str(ip or ""),
                    alloc_range=str(next(iter(node.alloc_cidrs(family)), "")),
                )
                for family, ip in primary.items()
                if ip is not None or node.alloc_cidrs(family)
            }
        ),
        secondary_addresses=[
            NodeAddressingElement(enabled=True, ip=str(each.ip), address_type=each.type)
            for each in node.addresses
            if each.ip not in primary.values()
        ],
        health_endpoint_address=_pair(node.health),
        ingress_address=_pair(node.ingress),
        source=node.source.value,
    )


def _pair(addresses: Sequence[IPAddress]) -> NodeAddressing | None:
    if not addresses:
        return None
    return _addressing({Family.of(ip): NodeAddressingElement(enabled=True, ip=str(ip)) for ip in addresses})


def _addressing(found: Mapping[Family, NodeAddressingElement]) -> NodeAddressing:
    return NodeAddressing(ipv4=found.get(Family.IPV4), ipv6=found.get(Family.IPV6))


class _Watcher(msgspec.Struct):
    asked: float
    """When it asked last, by the monotonic clock."""
    told: dict[str, NodeElement]


class NodeWatchers:
    """The clients that ask again and again for what has changed."""

    def __init__(self) -> None:
        self._watchers: dict[int, _Watcher] = {}

    def answer(
        self, name: str, number: int, nodes: Iterable[NodeElement], now: float | None = None
    ) -> wire.ClusterNodeStatus:
        """All nodes, for a client that is not known; else those that came and went since it asked.

        One that changed went as it was and came as it is. ``name`` is this node's.
        """
        now = time.monotonic() if now is None else now
        self._watchers = {
            known: each for known, each in self._watchers.items() if now - each.asked < CLIENT_SECONDS
        }
        found = {node.name: node for node in nodes}
        watcher = self._watchers.get(number)
        if watcher is None:
            number = secrets.randbelow(1 << 31) + 1  # nor one from before a restart
            watcher = self._watchers[number] = _Watcher(now, {})
        before, watcher.told, watcher.asked = watcher.told, found, now
        added = [node for key, node in found.items() if before.get(key) != node]
        removed = [node for key, node in before.items() if found.get(key) != node]
        return wire.ClusterNodeStatus(
            self_name=name, client_id=number, nodes_added=added or None, nodes_removed=removed or None
        )
