"""This node, as it is published to others.

Controller: the node's addresses, its router, its own Node object in; its row of the table ``nodes`` out.
Needs:      AgentConfig, NodeAddresses, Router, NodeReader, Table[Node].   Gives: LocalNode, LocalNodeStore.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from cells.cluster.ipcache import Source
from cells.cluster.nodes.node import CILIUM_INTERNAL_IP, INTERNAL_IP, ClusterNode, NodeIP
from cells.cluster.nodes.parse import ParsedNode
from cells.cluster.nodes.reader import NodeReader, annotations_of
from cells.config import AgentConfig
from cells.ipam import Family, IPAddress, IPNetwork, PodRange
from cells.kubernetes import Node
from cells.node.addresses import NodeAddress, NodeAddresses
from cells.node.router import Router
from lifecycle import Hook, Jobs, Lifecycle, Table, Tables

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""A new one with every start of the kernel (random(4))."""


class LocalNodeStore:
    """The table ``local-node``: one row, once it is complete."""

    def __init__(self, tables: Tables) -> None:
        self.table: Table[ClusterNode] = Table("local-node", key=lambda node: node.full_name)
        self.first = self.table.initializer("local node")
        tables.add(self.table)


def local_node(
    name: str,
    cluster: str,
    *,
    own: Mapping[Family, IPAddress],
    routers: Mapping[Family, IPAddress],
    cidrs: Mapping[Family, tuple[IPNetwork, ...]],
    node: Node | None,
    reader: NodeReader,
    boot_id: str = "",
) -> ClusterNode:
    """The row: addresses of its Node object, or its own; router and ranges as they are in use."""
    parsed = reader.parse(node) if node is not None else ParsedNode()
    addresses = [each for each in parsed.addresses if each.type != CILIUM_INTERNAL_IP]
    shown = {Family.of(each.ip) for each in addresses}
    addresses += [NodeIP(INTERNAL_IP, ip) for family, ip in own.items() if family not in shown]
    addresses += [NodeIP(CILIUM_INTERNAL_IP, ip) for ip in routers.values()]
    addresses.sort(key=lambda each: (each.type == CILIUM_INTERNAL_IP, each.ip.version))
    return ClusterNode(
        cluster=cluster,
        name=name,
        source=Source.LOCAL,
        addresses=tuple(addresses),
        ipv4_alloc_cidrs=cidrs.get(Family.IPV4, ()),
        ipv6_alloc_cidrs=cidrs.get(Family.IPV6, ()),
        encryption_key=parsed.encryption_key,
        labels=reader.labels(node) if node is not None else {},
        annotations=annotations_of(node),
        provider_id=node.spec.provider_id if node is not None else "",
        boot_id=boot_id,
    )


def read_boot_id() -> str:
    """Of the running kernel; empty where it tells none."""
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


class LocalNode:
    """Keeps the row of this node; it is complete once the hook has run."""

    def __init__(
        self,
        store: LocalNodeStore,
        agent: AgentConfig,
        addresses: NodeAddresses,
        found: Table[NodeAddress],
        router: Router,
        ranges: Table[PodRange],
        reader: NodeReader,
        nodes: Table[Node],
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
        jobs.observe("watch addresses", found.changes, self._look)
        jobs.observe("watch ranges of pods", ranges.changes, self._look)
        jobs.observe("watch the Node object", self._own_changes, self._look)

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

    async def _look(self, _: object) -> None:
        self._refresh()

    def _cidrs(self) -> dict[Family, tuple[IPNetwork, ...]]:
        """The ranges that addresses are handed out from, the primary one of each family first."""
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
            boot_id=self._boot_id,
        )
        with self._store.table.txn() as txn:
            txn.replace_all([row])
