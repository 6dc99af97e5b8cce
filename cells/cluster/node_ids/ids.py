"""A number for every other node.

Needs: the table ``nodes``.   Gives: NodeIDs.
Source: Cilium 1.17, the node IDs of its Linux node handler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

import msgspec

from cells.cluster.nodes import ClusterNode
from cells.ipam import IPAddress

LAST: Final = 0xFFFF
"""Numbers are 1 to this; 0 is the node itself, or unknown."""


class NodeAddressID(msgspec.Struct, frozen=True):
    """An address of another node, and the number of the node, which all its addresses share."""

    ip: IPAddress
    id: int
    node: str
    """``cluster/name``."""


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
                found.setdefault(each.ip, NodeAddressID(each.ip, number, node.full_name))
        return found

    def _choose(self, node: ClusterNode) -> int:
        taken = set(self._of.values())
        for each in node.addresses:
            before = self._known.get(each.ip)
            if before and before not in taken:
                return before
        taken.update(self._known.values())
        return next((number for number in range(1, LAST + 1) if number not in taken), 0)
