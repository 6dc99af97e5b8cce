"""The policy of the node itself: its labels followed, and put in force once all rules are known.

Controller: this node's labels and the rules in; the host endpoint's labels and policy out.
Why:        until the rules are known the node goes by the policy of an earlier agent, or by none, so that
            neither a start nor a restart locks it up or opens it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from ipaddress import ip_network

from cells.base.labels import CIDR, Label, cidr_label, texts
from cells.cluster.identity.identities import Identities
from cells.cluster.identity.numbers import HOST
from cells.cluster.nodes.node import ClusterNode
from cells.cluster.nodes.parse import RulePeers
from cells.endpoint.host import HostEndpoint
from cells.policy.maps import KnownRules, RealizedPolicy
from lifecycle import Change, Jobs, ReadTable, Table, invoke, module, provide

__all__ = ["HostLabels", "cell"]


# The host endpoint's labels are those of its node; its policy is in force once all rules are known.


class HostLabels:
    """Follows this node's row."""

    def __init__(
        self,
        host: HostEndpoint,
        identities: Identities,
        nodes: ReadTable[str, ClusterNode],
        rules: KnownRules | None,
        peers: RulePeers,
        realized: Table[int, RealizedPolicy],
        *,
        jobs: Jobs,
    ) -> None:
        self._host = host
        self._identities = identities
        self._nodes = nodes
        self._rules = rules
        self._selectable = peers.nodes_by_labels
        if host.enabled:
            self._realized = realized.initializer("host endpoint")
            jobs.one_shot("put in force", self._first)
        self._by_cidr = peers.nodes_by_cidr
        if host.enabled or self._selectable or self._by_cidr:
            jobs.observe("labels of the node", nodes.changes, self._follow)

    async def _first(self) -> None:
        await self._nodes.wait_initialized()
        self._label(self._nodes.all())
        if self._rules is not None:
            await self._rules.known()
        try:
            self._host.put_in_force()
        finally:
            self._realized.done()

    async def _follow(self, changes: list[Change[str, ClusterNode]]) -> None:
        self._label(change.row for change in changes if change.row is not None)

    def _label(self, nodes: Iterable[ClusterNode]) -> None:
        for node in nodes:
            if node.local:
                self._identities.label_host("node", texts(self._labels(node)))
        known = self._identities.get(HOST)
        if known is not None:
            self._host.relabel(known.labels)

    def _labels(self, node: ClusterNode) -> Iterator[Label]:
        """Those by which policies select the node, and those by which fromNodes, toNodes and networks do."""
        if self._host.enabled:
            counting, _ = self._identities.filter.split(Label("k8s", *one) for one in node.labels.items())
            yield from counting
        if self._selectable:
            yield from (Label("node", *one) for one in node.labels.items())
        if self._by_cidr:
            yield from (Label(CIDR, cidr_label(ip_network(each.ip))) for each in node.addresses)


cell = module("host-policy", "The policy of the node itself", provide(HostLabels), invoke(HostLabels))
