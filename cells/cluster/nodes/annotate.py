"""This node's ranges and addresses as annotations of its Node object, where annotate-k8s-node asks for it.

Reconciler: this node's row in, annotations out. What would be written is the table
``k8s-node-annotations``, also where there is no API server.
Needs:  NodeSettings, LocalNodeStore, KubernetesAPI.   Gives: NodeAnnotations.
Source: Cilium 1.17, AnnotateNode: today's keys only, on the status, retried for ever, without blocking
anything.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from cells.cluster.nodes import parse
from cells.cluster.nodes.local import LocalNodeStore
from cells.cluster.nodes.node import ClusterNode
from cells.cluster.nodes.settings import NodeSettings
from cells.config import AgentConfig
from cells.ipam import Family, IPAddress
from cells.kubernetes import NODES, KubernetesAPI
from lifecycle import Backoff, Jobs, Logger, Tables

PREFIX = "network.cilium.io/"
_NAMES = {
    Family.IPV4: (parse.IPV4_CIDR, parse.IPV4_HEALTH, parse.IPV4_INGRESS, parse.IPV4_ROUTER),
    Family.IPV6: (parse.IPV6_CIDR, parse.IPV6_HEALTH, parse.IPV6_INGRESS, parse.IPV6_ROUTER),
}


class Annotation(msgspec.Struct, frozen=True):
    """One annotation of this node's Node object."""

    key: str
    value: str


def node_annotations(node: ClusterNode) -> Iterator[Annotation]:
    """Those of a node; what it has not has none."""
    for family, (cidr, health, ingress, router) in _NAMES.items():
        values: dict[str, object] = {
            cidr: next(iter(node.alloc_cidrs(family)), None),
            health: _of(family, node.health),
            ingress: _of(family, node.ingress),
            router: node.router_ip(family),
        }
        for name, value in values.items():
            if value is not None:
                yield Annotation(PREFIX + name, str(value))
    if node.encryption_key:
        yield Annotation(PREFIX + parse.ENCRYPTION_KEY, str(node.encryption_key))


def _of(family: Family, addresses: tuple[IPAddress, ...]) -> IPAddress | None:
    return next((ip for ip in addresses if Family.of(ip) is family), None)


class NodeAnnotations:
    """Writes them whenever they change."""

    def __init__(
        self,
        settings: NodeSettings,
        agent: AgentConfig,
        store: LocalNodeStore,
        api: KubernetesAPI,
        *,
        jobs: Jobs,
        tables: Tables,
        log: Logger,
    ) -> None:
        if not settings.annotate_k8s_node:
            return
        self._agent = agent
        self._api = api
        self._log = log
        self.table = store.table.flat_map(
            node_annotations, key=lambda one: one.key, name="k8s-node-annotations"
        )
        """What is to be written."""
        tables.add(self.table)
        jobs.one_shot("update-k8s-node-annotations", self._write, backoff=Backoff(first=1.0))

    async def _write(self) -> None:
        """Write all now, and again after every change. Raises KubernetesError: it is tried again then."""
        if not self._api.enabled:
            return
        async for _ in self.table.changes():
            wanted = {one.key: one.value for one in self.table.all()}
            body = {"metadata": {"annotations": wanted}}
            await self._api.reachable()
            await self._api.client.patch(NODES, self._agent.node_name, body, subresource="status")
            self._log.info("Updated annotations of the Node object", node=self._agent.node_name)
