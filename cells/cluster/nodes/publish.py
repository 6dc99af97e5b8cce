"""This node's CiliumNode, which other agents and the operator read.

Reconciler: this node's row and its Node object in, the CiliumNode out: created, updated, recreated. The table
            ``ciliumnode`` has its desired contents, even without an API server. In IPAM mode multi-pool, it
            requests addresses of pools and releases ranges, as Ipam's table requires.
Source:     Cilium 1.17, NodeDiscovery.UpdateCiliumNodeResource and mutateNodeResource.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from copy import deepcopy
from functools import partial
from typing import Any, Final

import anyio
import msgspec

from cells.base.addresses import Family, IPAddress, IPNetwork
from cells.cluster.nodes.local import LocalNodeStore, local_node, read_boot_id
from cells.cluster.nodes.node import CILIUM_INTERNAL_IP, ClusterNode
from cells.cluster.nodes.parse import (
    CILIUM_ANNOTATION,
    CiliumNodeSettings,
    NodeReader,
    parse_cidr,
    parse_ip,
)
from cells.config import AgentConfig
from cells.kubernetes.api_server import KubernetesAPI
from cells.kubernetes.objects.cilium_node import CILIUM_NODES, CiliumNode
from cells.kubernetes.objects.core import Node
from cells.kubernetes.resources import Resources
from cells.node.addresses import NodeAddresses
from cells.node.ipam.pools import PoolRequest
from cells.node.ipam.ranges import PodRange
from cells.node.ipam.settings import PodAddressing
from lifecycle import Jobs, Logger, Table, Tables, minutes

Body = dict[str, Any]
OWNER_TIMEOUT: Final = 10.0
"""Seconds to wait for Node objects before the CiliumNode is created without its owner, which is added later.
"""
COMPARE_INTERVAL: Final = minutes(10)
"""Interval of comparisons, in addition to those at changes."""


def wanted(local: ClusterNode, node: Node | None, mode: str) -> Body:
    """The fields of this node's CiliumNode that its agent owns.

    The agent writes ranges in mode kubernetes only: in cluster-pool the operator does.
    """
    spec: Body = {
        "addresses": [{"type": each.type, "ip": str(each.ip)} for each in local.addresses],
        "health": _pair(local.health),
        "ingress": _pair(local.ingress),
        "encryption": {"key": local.encryption_key} if local.encryption_key else {},
    }
    known = {"bootid": local.boot_id, "nodeidentity": local.node_identity}
    spec.update({key: value for key, value in known.items() if value})
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
    present = {key: value for key, value in metadata.items() if value}
    return {"apiVersion": "cilium.io/v2", "kind": "CiliumNode", "metadata": present, "spec": spec}


def _pair(addresses: tuple[IPAddress, ...]) -> Body:
    return {str(Family.of(ip)): str(ip) for ip in addresses}


def merged(
    live: Body, want: Body, families: set[Family], requests: Collection[PoolRequest] | None = None
) -> Body | None:
    """The object with the agent's fields; None if it has them already.

    Fields of others stay: the operator's ranges and pools, annotations that are not Cilium's; also the
    router's address while this agent has no router yet. Owner, labels and annotations of Cilium are copied
    from the Node once it is known, as node selectors use them.
    """
    found = deepcopy(live)
    metadata, spec = found.setdefault("metadata", {}), found.setdefault("spec", {})
    owned = "ownerReferences" in want["metadata"]
    if owned and "health" in want["spec"]:  # before the node is complete, its keys may be missing
        withdrawn = {key for key in metadata.get("annotations") or () if CILIUM_ANNOTATION.match(key)}
        for key in withdrawn - want["metadata"].get("annotations", {}).keys():
            del metadata["annotations"][key]
    for key in ("labels", "annotations"):
        if key in want["metadata"]:
            metadata[key] = (metadata.get(key) or {}) | want["metadata"][key]
    if owned:
        metadata["ownerReferences"] = want["metadata"]["ownerReferences"]
        if "labels" in want["metadata"]:
            metadata["labels"] = want["metadata"]["labels"]
        else:
            metadata.pop("labels", None)
    fresh = {key: value for key, value in want["spec"].items() if key not in {"addresses", "ipam"}}
    spec.update({key: value for key, value in fresh.items() if value or spec.get(key)})
    spec["addresses"] = want["spec"]["addresses"] + _existing_routers(
        spec, want["spec"]["addresses"], families
    )
    if "ipam" in want["spec"]:
        spec["ipam"] = (spec.get("ipam") or {}) | want["spec"]["ipam"]
    if requests is not None:
        found = with_pools(found, requests)
    return None if found == live else found


def _existing_routers(spec: Mapping[str, Any], ours: list[Body], families: set[Family]) -> list[Body]:
    known = {Family.of(ip) for each in ours if each["type"] == CILIUM_INTERNAL_IP and (ip := _ip(each))}
    return [
        each
        for each in spec.get("addresses") or ()
        if each.get("type") == CILIUM_INTERNAL_IP and (ip := _ip(each)) and Family.of(ip) in families - known
    ]


def _ip(address: Mapping[str, Any]) -> IPAddress | None:
    return parse_ip(str(address.get("ip", "")))


def requested_field(requests: Iterable[PoolRequest]) -> list[Body]:
    """Return the value of ``spec.ipam.pools.requested``."""
    counts = [(one.pool, {"ipv4-addrs": one.ipv4, "ipv6-addrs": one.ipv6}) for one in requests]
    return [
        {"pool": pool, "needed": {key: count for key, count in needed.items() if count}}
        for pool, needed in sorted(counts, key=lambda one: one[0])
        if any(needed.values())
    ]


def with_pools(body: Body, requests: Collection[PoolRequest]) -> Body:
    """A CiliumNode that requests these addresses, without the ranges that are released."""
    found = deepcopy(body)
    ipam = found["spec"]["ipam"] = dict(found["spec"].get("ipam") or {})
    pools = ipam["pools"] = dict(ipam.get("pools") or {})
    wanted = requested_field(requests)
    if _counts(pools.get("requested") or ()) != _counts(wanted):
        pools["requested"] = wanted
    released = {(one.pool, network) for one in requests for network in one.released}
    left = [
        {
            **one,
            "cidrs": [
                text for text in one.get("cidrs") or () if (one["pool"], parse_cidr(text)) not in released
            ],
        }
        for one in pools.get("allocated") or ()
    ]
    if released:
        pools["allocated"] = [one for one in left if one["cidrs"]]
    return found


def with_ranges(body: Body, ranges: Iterable[PodRange], requests: Collection[PoolRequest]) -> Body:
    """A new CiliumNode with the ranges of the addresses of this node's pods."""
    released = {(one.pool, network) for one in requests for network in one.released}
    by_pool: dict[str, list[str]] = {}
    for row in sorted(ranges, key=lambda row: (row.pool, row.network.version, str(row.network))):
        if (row.pool, row.network) not in released:
            by_pool.setdefault(row.pool, []).append(str(row.network))
    found = deepcopy(body)
    found["spec"]["ipam"] = {"pools": {"requested": requested_field(requests)}}
    if by_pool:
        found["spec"]["ipam"]["pools"]["allocated"] = [
            {"pool": pool, "cidrs": cidrs} for pool, cidrs in by_pool.items()
        ]
    return found


def _counts(requested: Iterable[Body]) -> dict[str, tuple[int, int]]:
    needed = {one["pool"]: one.get("needed") or {} for one in requested}
    return {pool: (one.get("ipv4-addrs") or 0, one.get("ipv6-addrs") or 0) for pool, one in needed.items()}


class OwnCiliumNode:
    """The desired contents of this node's CiliumNode, without its pools."""

    def __init__(
        self,
        agent: AgentConfig,
        ipam: PodAddressing,
        store: LocalNodeStore,
        addresses: NodeAddresses,
        reader: NodeReader,
        nodes: Table[tuple[str, str], Node],
        tables: Tables,
    ) -> None:
        self._agent = agent
        self._mode = ipam.mode
        self._store = store
        self._addresses = addresses
        self._reader = reader
        self._nodes = nodes
        tables.add(store.table.map(self._cilium_node, name="ciliumnode"))

    @property
    def key(self) -> tuple[str, str]:
        """The key of this node's objects."""
        return ("", self._agent.node_name)

    @property
    def families(self) -> set[Family]:
        """The enabled address families."""
        on = {Family.IPV4: self._agent.ipv4, Family.IPV6: self._agent.ipv6}
        return {family for family, enabled in on.items() if enabled}

    def follow(self, jobs: Jobs, notify: Callable[[object], Awaitable[None]]) -> None:
        """Call ``notify`` whenever the contents may have changed."""
        own_node = self._nodes.filter(lambda row: row.key == self.key, name="own-node-watched")
        jobs.observe("publish this node", self._store.table.changes, notify)
        jobs.observe("publish addresses", self._addresses.table.changes, notify)
        jobs.observe("publish the Node object", own_node.changes, notify)

    async def wanted(self) -> Body:
        """Its contents; without the owner, who is added later, where Nodes are not known for a while."""
        with anyio.move_on_after(OWNER_TIMEOUT):
            await self._nodes.wait_initialized()
        node, local = self._nodes.get(self.key), self._local()
        if node is not None:  # the row may still have the labels of an earlier version
            local = msgspec.structs.replace(local, labels=self._reader.labels(node))
        want = wanted(local, node, self._mode)
        if not len(self._store.table):  # the health endpoint is not known yet: keep the object's value
            del want["spec"]["health"]
        return want

    def _cilium_node(self, local: ClusterNode) -> CiliumNode:
        return msgspec.convert(wanted(local, None, self._mode), CiliumNode)

    def _local(self) -> ClusterNode:
        """This node's row; before the router exists, the part that is known."""
        row = self._store.table.get(f"{self._agent.cluster_name}/{self._agent.node_name}")
        return row or local_node(
            self._agent.node_name,
            self._agent.cluster_name,
            own=self._addresses.all(),
            routers={},
            cidrs={},
            node=self._nodes.get(self.key),
            reader=self._reader,
            boot_id=read_boot_id(),
            key=self._store.key(),
        )


class RequestedPools(msgspec.Struct, frozen=True):
    """Requested and assigned pools of this node; empty unless the IPAM mode is multi-pool."""

    requests: Table[str, PoolRequest] | None
    ranges: Table[IPNetwork, PodRange]


def requested_pools(
    ipam: PodAddressing, requests: Table[str, PoolRequest] | None, ranges: Table[IPNetwork, PodRange]
) -> RequestedPools:
    """The requests of Ipam."""
    return RequestedPools(requests if ipam.pooled else None, ranges)


class CiliumNodePublisher:
    """Keeps the CiliumNode equal to its desired contents."""

    def __init__(
        self,
        settings: CiliumNodeSettings,
        own: OwnCiliumNode,
        pools: RequestedPools,
        api: KubernetesAPI,
        resources: Resources,
        *,
        jobs: Jobs,
        log: Logger,
    ) -> None:
        self._own = own
        self._pools = pools
        self._api = api
        self._rate = settings.ipam_cilium_node_update_rate
        self._log = log
        if not settings.auto_create_cilium_node_resource:
            return
        self._timer = jobs.timer("write the CiliumNode", self._write, COMPARE_INTERVAL)
        own_cilium = resources.table(CILIUM_NODES).filter(
            lambda row: row.key == own.key, name="own-cilium-node-watched"
        )
        own.follow(jobs, self._trigger)
        jobs.observe("keep the CiliumNode", own_cilium.changes, self._trigger)
        jobs.observe("missing objects", resources.missing_objects.table.changes, self._trigger)
        if pools.requests is not None:
            jobs.observe("publish requests of pools", pools.requests.changes, self._trigger_paced)

    async def _trigger(self, _: object) -> None:
        self._timer.trigger()

    async def _trigger_paced(self, _: object) -> None:
        """Write requests for pools, and compare again after a pause, as every few pods change them."""
        self._timer.trigger()
        await anyio.sleep(self._rate)

    async def _write(self) -> None:
        """Update the object if it differs from the desired contents.

        Raises KubernetesError; the job repeats it.
        """
        if not self._api.enabled:
            return
        await self._api.reachable()
        want, families = await self._own.wanted(), self._own.families
        made, change = want, partial(merged, want=want, families=families)
        if self._pools.requests is not None:
            await self._pools.requests.wait_initialized()
            requests = self._pools.requests.all()
            made = with_ranges(want, self._pools.ranges.all(), requests)
            change = partial(merged, want=want, families=families, requests=requests)
        if await self._api.create_or_update(CILIUM_NODES, made, change):
            self._log.info("CiliumNode written", node=self._own.key[1])
