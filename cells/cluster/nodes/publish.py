"""This node's CiliumNode: what other agents and the operator know of it.

Reconciler: this node's row and its Node object in, the CiliumNode out: made, kept, made again when deleted.
        The table ``ciliumnode`` is what it should say, also where there is no API server.
Needs:  NodeSettings, LocalNodeStore, NodeAddresses, KubernetesAPI, Table[Node], Table[CiliumNode].
Gives:  CiliumNodePublisher.
Source: Cilium 1.17, NodeDiscovery.UpdateCiliumNodeResource and mutateNodeResource.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, Final

import anyio
import msgspec

from cells.cluster.nodes.local import LocalNodeStore, local_node, read_boot_id
from cells.cluster.nodes.node import CILIUM_INTERNAL_IP, ClusterNode
from cells.cluster.nodes.parse import parse_ip
from cells.cluster.nodes.settings import NodeSettings
from cells.cluster.nodes.told import NodeReader
from cells.config import AgentConfig
from cells.ipam import Family, IPAddress, IpamSettings
from cells.kubernetes import CILIUM_NODES, CiliumNode, ForgottenObject, KubernetesAPI, Node
from cells.node.addresses import NodeAddress, NodeAddresses
from lifecycle import Jobs, Logger, ReadTable, Table, Tables, minutes

Body = dict[str, Any]
PATIENCE: Final = 10.0
"""Seconds to wait for the Node objects before the CiliumNode is made without an owner, who is added later."""
AGAIN: Final = minutes(10)
"""How often it is looked at, besides every change."""


def wanted(local: ClusterNode, node: Node | None, mode: str) -> Body:
    """What the CiliumNode of this node says, as far as its agent decides it.

    Ranges are the agent's to tell in mode kubernetes alone: in cluster-pool they are the operator's.
    """
    spec: Body = {
        "addresses": [{"type": each.type, "ip": str(each.ip)} for each in local.addresses],
        "health": _pair(local.health),
        "ingress": _pair(local.ingress),
        "encryption": {"key": local.encryption_key} if local.encryption_key else {},
    }
    told = {"bootid": local.boot_id, "instance-id": local.provider_id, "nodeidentity": local.node_identity}
    spec.update({key: value for key, value in told.items() if value})
    if mode == "kubernetes" and any(local.all_cidrs()):
        spec["ipam"] = {"podCIDRs": [str(cidr) for cidr in local.all_cidrs()]}
    metadata: Body = {
        "name": local.name,
        "labels": dict(local.labels),
        "annotations": dict(local.annotations),
    }
    if node is not None and node.metadata.uid:
        owner = {"apiVersion": "v1", "kind": "Node", "name": node.name, "uid": node.metadata.uid}
        metadata["ownerReferences"] = [owner]
    kept = {key: value for key, value in metadata.items() if value}
    return {"apiVersion": "cilium.io/v2", "kind": "CiliumNode", "metadata": kept, "spec": spec}


def _pair(addresses: tuple[IPAddress, ...]) -> Body:
    return {str(Family.of(ip)): str(ip) for ip in addresses}


def merged(live: Body, want: Body, families: set[Family]) -> Body | None:
    """The object with what the agent decides put in; None when it says so already.

    What others write stays: the operator's ranges and pools, labels and annotations of other people. The
    router's address stays, too, while this agent has not found its own.
    """
    found = deepcopy(live)
    metadata, spec = found.setdefault("metadata", {}), found.setdefault("spec", {})
    for key in ("labels", "annotations"):
        if key in want["metadata"]:
            metadata[key] = (metadata.get(key) or {}) | want["metadata"][key]
    if "ownerReferences" in want["metadata"] and not metadata.get("ownerReferences"):
        metadata["ownerReferences"] = want["metadata"]["ownerReferences"]
    fresh = {key: value for key, value in want["spec"].items() if key not in {"addresses", "ipam"}}
    spec.update({key: value for key, value in fresh.items() if value or spec.get(key)})
    spec["addresses"] = want["spec"]["addresses"] + _kept_routers(spec, want["spec"]["addresses"], families)
    if "ipam" in want["spec"]:
        spec["ipam"] = (spec.get("ipam") or {}) | want["spec"]["ipam"]
    return None if found == live else found


def _kept_routers(spec: Mapping[str, Any], ours: list[Body], families: set[Family]) -> list[Body]:
    known = {Family.of(ip) for each in ours if each["type"] == CILIUM_INTERNAL_IP and (ip := _ip(each))}
    return [
        each
        for each in spec.get("addresses") or ()
        if each.get("type") == CILIUM_INTERNAL_IP and (ip := _ip(each)) and Family.of(ip) in families - known
    ]


def _ip(address: Mapping[str, Any]) -> IPAddress | None:
    return parse_ip(str(address.get("ip", "")))


class CiliumNodePublisher:
    """Keeps the object as it should be, for ever."""

    def __init__(
        self,
        settings: NodeSettings,
        agent: AgentConfig,
        ipam: IpamSettings,
        store: LocalNodeStore,
        addresses: NodeAddresses,
        found: Table[NodeAddress],
        reader: NodeReader,
        api: KubernetesAPI,
        nodes: Table[Node],
        cilium_nodes: Table[CiliumNode],
        forgotten: Table[ForgottenObject],
        *,
        jobs: Jobs,
        tables: Tables,
        log: Logger,
    ) -> None:
        self._agent = agent
        self._mode = ipam.ipam
        self._store = store
        self._addresses = addresses
        self._reader = reader
        self._api = api
        self._nodes = nodes
        self._log = log
        told: ReadTable[CiliumNode] = store.table.map(self._told, name="ciliumnode")
        tables.add(told)
        if not settings.auto_create_cilium_node_resource:
            return
        self._timer = jobs.timer("write the CiliumNode", self._write, AGAIN)
        own_node = nodes.filter(lambda row: row.key == self._own, name="own-node-watched")
        own_cilium = cilium_nodes.filter(lambda row: row.key == self._own, name="own-cilium-node-watched")
        jobs.observe("publish this node", store.table.changes, self._look)
        jobs.observe("publish addresses", found.changes, self._look)
        jobs.observe("publish the Node object", own_node.changes, self._look)
        jobs.observe("keep the CiliumNode", own_cilium.changes, self._look)
        jobs.observe("lost objects", forgotten.changes, self._look)

    def _told(self, local: ClusterNode) -> CiliumNode:
        return msgspec.convert(wanted(local, None, self._mode), CiliumNode)

    @property
    def _own(self) -> tuple[str, str]:
        return ("", self._agent.node_name)

    async def _look(self, _: object) -> None:
        self._timer.trigger()

    def _local(self) -> ClusterNode:
        """This node's row; before its router is there, what is known of it."""
        row = self._store.table.get(f"{self._agent.cluster_name}/{self._agent.node_name}")
        return row or local_node(
            self._agent.node_name,
            self._agent.cluster_name,
            own=self._addresses.all(),
            routers={},
            cidrs={},
            node=self._nodes.get(self._own),
            reader=self._reader,
            boot_id=read_boot_id(),
        )

    async def _write(self) -> None:
        """Have the object say what it should. Raises KubernetesError: it is tried again."""
        if not self._api.enabled:
            return
        await self._api.reachable()
        with anyio.move_on_after(PATIENCE):
            await self._nodes.wait_initialized()
        want = wanted(self._local(), self._nodes.get(self._own), self._mode)
        on = {Family.IPV4: self._agent.ipv4, Family.IPV6: self._agent.ipv6}
        families = {family for family, enabled in on.items() if enabled}
        if await self._api.keep(CILIUM_NODES, want, lambda live: merged(live, want, families)):
            self._log.info("CiliumNode written", node=self._agent.node_name)
