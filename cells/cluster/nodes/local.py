"""This node's row in the table ``nodes``, and its annotations.

Controller: addresses, router and Node object of this node in; its row of the table ``nodes`` out.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

import msgspec

from cells.base.addresses import Family, IPAddress, IPNetwork
from cells.cluster.encryption import EncryptionKey
from cells.cluster.ipcache.rows import Source
from cells.cluster.nodes import parse
from cells.cluster.nodes.node import (
    CILIUM_INTERNAL_IP,
    INTERNAL_IP,
    WIREGUARD_ROTATION,
    ClusterNode,
    NodeIP,
)
from cells.cluster.nodes.parse import NodeReader, ParsedNode, annotations_of
from cells.config import AgentConfig
from cells.kubernetes.api_server import KubernetesAPI
from cells.kubernetes.objects.core import NODES, Node
from cells.node.addresses import NodeAddresses
from cells.node.ipam.ranges import PodRange
from cells.node.router import Router
from cells.observe.bootstrap import HealthAddressesClaimed
from lifecycle import Backoff, Hook, Jobs, Lifecycle, Logger, Table, Tables, after

__all__ = ["HealthAddress", "LocalNode", "LocalNodeStore", "NodeAnnotations", "read_boot_id"]

PREFIX = "network.cilium.io/"
"""Prefix of annotations."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Changes with every boot of the kernel (random(4))."""


class HealthAddress(msgspec.Struct, frozen=True):
    """An address of this node's health endpoint."""

    ip: IPAddress


class LocalNodeStore:
    """The table ``local-node``: one row, once it is complete; and the contributions of other cells."""

    def __init__(self, tables: Tables, keys: Table[str, EncryptionKey] | None = None) -> None:
        self.health: Table[Family, HealthAddress] = Table(
            "health-addresses", key=lambda row: Family.of(row.ip)
        )
        """Addresses of the health endpoint by family, from its cell."""
        tables.add(self.health)
        self.table: Table[str, ClusterNode] = Table("local-node", key=lambda node: node.full_name)
        self.keys = keys
        """The node's published key, if it encrypts: one row."""
        self.first = self.table.initializer("local node")
        tables.add(self.table)

    def key(self) -> EncryptionKey:
        """The node's published key."""
        return next(iter(self.keys.all()), EncryptionKey()) if self.keys is not None else EncryptionKey()


def local_node(
    name: str,
    cluster: str,
    *,
    own: Mapping[Family, IPAddress],
    routers: Mapping[Family, IPAddress],
    cidrs: Mapping[Family, tuple[IPNetwork, ...]],
    node: Node | None,
    reader: NodeReader,
    health: tuple[IPAddress, ...] = (),
    boot_id: str = "",
    key: EncryptionKey = EncryptionKey(),  # noqa: B008  # immutable
) -> ClusterNode:
    """The row: addresses of its Node object or its own; router, ranges and health as in use."""
    parsed = reader.parse(node) if node is not None else ParsedNode()
    addresses = [each for each in parsed.addresses if each.type != CILIUM_INTERNAL_IP]
    shown = {Family.of(each.ip) for each in addresses}
    addresses += [NodeIP(INTERNAL_IP, ip) for family, ip in own.items() if family not in shown]
    addresses += [NodeIP(CILIUM_INTERNAL_IP, ip) for ip in routers.values()]
    addresses.sort(key=lambda each: (each.type == CILIUM_INTERNAL_IP, each.ip.version))
    published = {PREFIX + parse.WIREGUARD_KEY: key.wireguard, WIREGUARD_ROTATION: key.rotation}
    return ClusterNode(
        cluster=cluster,
        name=name,
        source=Source.LOCAL,
        addresses=tuple(addresses),
        ipv4_alloc_cidrs=cidrs.get(Family.IPV4, ()),
        ipv6_alloc_cidrs=cidrs.get(Family.IPV6, ()),
        health=health,
        encryption_key=key.number or parsed.encryption_key,
        wireguard_key=key.wireguard,
        labels=reader.labels(node) if node is not None else {},
        annotations=annotations_of(node) | {name: value for name, value in published.items() if value},
        boot_id=boot_id,
    )


def read_boot_id() -> str:
    """The boot id of the running kernel; empty if it has none."""
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


@after(HealthAddressesClaimed | None)
class LocalNode:
    """Maintains the row of this node; it is complete once the hook has run."""

    def __init__(
        self,
        store: LocalNodeStore,
        agent: AgentConfig,
        addresses: NodeAddresses,
        router: Router,
        ranges: Table[IPNetwork, PodRange],
        reader: NodeReader,
        nodes: Table[tuple[str, str], Node],
        *,
        lifecycle: Lifecycle,
        jobs: Jobs,
    ) -> None:
        self._store = store
        self._agent = agent
        self._addresses = addresses
        self._router = router
        self._ranges = ranges
        self._reader = reader
        self._nodes = nodes
        self._boot_id = ""
        lifecycle.append(Hook("report the local node", self._start))
        jobs.observe("watch addresses", addresses.table.changes, self._refresh_row)
        jobs.observe("watch ranges of pods", ranges.changes, self._refresh_row)
        jobs.observe("watch addresses of the health endpoint", store.health.changes, self._refresh_row)
        jobs.observe("watch the Node object", self._own_changes, self._refresh_row)
        if store.keys is not None:
            jobs.observe("watch the key", store.keys.changes, self._refresh_row)

    async def _start(self) -> None:
        self._boot_id = read_boot_id()
        self._refresh()
        self._store.first.done()

    async def _own_changes(self) -> AsyncIterator[None]:
        key = ("", self._agent.node_name)
        seen = self._nodes.get(key)
        while True:
            seen = await self._nodes.wait_changed(key, seen)
            yield

    async def _refresh_row(self, _: object) -> None:
        self._refresh()

    def _cidrs(self) -> dict[Family, tuple[IPNetwork, ...]]:
        """The ranges from which addresses are allocated, the primary one of each family first."""
        rows = [row for row in self._ranges.all() if row.state != "retired"]
        rows.sort(key=lambda row: row.state)
        return {family: tuple(row.network for row in rows if row.family is family) for family in Family}

    def _refresh(self) -> None:
        made = self._router.addressing()
        row = local_node(
            self._agent.node_name,
            self._agent.cluster_name,
            own=self._addresses.all(),
            routers={family: each.ip for family, each in made.items()},
            cidrs=self._cidrs(),
            node=self._nodes.get(("", self._agent.node_name)),
            reader=self._reader,
            health=tuple(sorted((row.ip for row in self._store.health.all()), key=lambda ip: ip.version)),
            boot_id=self._boot_id,
            key=self._store.key(),
        )
        with self._store.table.txn() as txn:
            txn.replace_all([row])


# Annotations of the Node object, with annotate-k8s-node.
#
# Reconciler: this node's row in, annotations out. The table ``k8s-node-annotations`` has the desired ones,
#             even without an API server.
# Source:     Cilium 1.17, AnnotateNode: current keys only, by the status subresource, retried forever.

_NAMES = {
    Family.IPV4: (parse.IPV4_CIDR, parse.IPV4_HEALTH, parse.IPV4_INGRESS, parse.IPV4_ROUTER),
    Family.IPV6: (parse.IPV6_CIDR, parse.IPV6_HEALTH, parse.IPV6_INGRESS, parse.IPV6_ROUTER),
}


class Annotation(msgspec.Struct, frozen=True):
    """One annotation of this node's Node object."""

    key: str
    value: str


def node_annotations(node: ClusterNode) -> Iterator[Annotation]:
    """The annotations of a node; fields without a value have none."""
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
    """Writes the annotations when they change."""

    def __init__(
        self,
        reader: NodeReader,
        agent: AgentConfig,
        store: LocalNodeStore,
        api: KubernetesAPI,
        *,
        jobs: Jobs,
        tables: Tables,
        log: Logger,
    ) -> None:
        if not reader.annotates:
            return
        self._agent = agent
        self._api = api
        self._log = log
        self.table = store.table.flat_map(
            node_annotations, key=lambda one: one.key, name="k8s-node-annotations"
        )
        """The desired annotations."""
        tables.add(self.table)
        jobs.one_shot("update-k8s-node-annotations", self._write, backoff=Backoff(first=1.0))

    async def _write(self) -> None:
        """Write all annotations, now and after every change. Raises KubernetesError; the job repeats it."""
        if not self._api.enabled:
            return
        async for _ in self.table.changes():
            wanted = {one.key: one.value for one in self.table.all()}
            body = {"metadata": {"annotations": wanted}}
            await self._api.reachable()
            await self._api.client.patch(NODES, self._agent.node_name, body, subresource="status")
            self._log.info("Updated annotations of the Node object", node=self._agent.node_name)
