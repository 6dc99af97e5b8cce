"""Nodes and what became of them, as Cilium's metrics.

Needs: Table[ClusterNode].   Gives: NodeCounts, node_metrics.
Source: Cilium 1.17, cilium_nodes_all_num and cilium_nodes_all_events_received_total.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from cells.cluster.nodes.node import ClusterNode
from cells.observe.metrics import Collector, Family, counter, gauge
from lifecycle import Change, Jobs, Member, ReadTable


class NodeCounts:
    """Counts nodes that came, changed or went, by where that was told."""

    def __init__(self, nodes: ReadTable[ClusterNode], *, jobs: Jobs) -> None:
        self._nodes = nodes
        self.events: Counter[tuple[str, str]] = Counter()
        """(event, source) -> how many."""
        jobs.observe("events", nodes.changes, self._follow)

    def __len__(self) -> int:
        return len(self._nodes)

    async def _follow(self, changes: Iterable[Change[ClusterNode]]) -> None:
        for change in changes:
            node = change.row or change.old
            if node is None:
                continue
            event = "delete" if change.row is None else "add" if change.old is None else "update"
            self.events[event, node.source] += 1


def node_metrics(counts: NodeCounts) -> Member[Collector]:
    """How many there are, and how many events."""

    async def collect() -> Iterable[Family]:
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
