"""Replay recordings of Cilium's BGP control plane: objects in, plans of speakers and received routes out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from ipaddress import ip_address, ip_network
from typing import Any, Final

from cells.base.addresses import Family, IPNetwork
from cells.bgp.advertisements import announced_pools, announced_services
from cells.bgp.controller import SECRETS, BGPFacts, InstancePlan, plans
from cells.bgp.speaker_state import BGPPeer, PolicyDirection, PolicyStatement, RoutePolicy
from cells.cluster.ipcache.rows import Source
from cells.cluster.nodes.node import ClusterNode, NodeIP
from cells.cluster.nodes.parse import annotations_of
from cells.kubernetes.objects.cilium_bgp import (
    CILIUM_BGP_ADVERTISEMENTS,
    CILIUM_BGP_NODE_CONFIGS,
    CILIUM_BGP_PEER_CONFIGS,
    CILIUM_BGP_PEERING_POLICIES,
    CiliumBGPNodeConfig,
)
from cells.kubernetes.objects.cilium_node import CILIUM_NODES, CiliumNode
from cells.kubernetes.objects.cilium_pools import CILIUM_POD_IP_POOLS
from cells.kubernetes.objects.core import ENDPOINT_SLICES, SERVICES
from cells.kubernetes.objects.kind import Kind
from cells.node.ipam.ranges import PodRange
from cells.services.model.claims import RefusedAddress
from lifecycle import Table
from tests.support.recordings import recordings

Json = dict[str, Any]
NODE: Final = "node-1"
LLGR_STALE: Final = 0xFFFF0006
"""A route with this community is sent only to peers with long-lived graceful restart (RFC 9494)."""
WITH_RANGES: Final = {"kubernetes", "cluster-pool"}
KINDS: Final[dict[str, Kind[Any]]] = {
    kind.kind: kind
    for kind in (
        CILIUM_BGP_ADVERTISEMENTS,
        CILIUM_BGP_NODE_CONFIGS,
        CILIUM_BGP_PEER_CONFIGS,
        CILIUM_BGP_PEERING_POLICIES,
        CILIUM_NODES,
        CILIUM_POD_IP_POOLS,
        ENDPOINT_SLICES,
        SERVICES,
        SECRETS,
    )
}


@cache
def scenarios(version: str) -> dict[str, Json]:
    """Return recordings by name: of 1.17 (s17), or of a later version (s19), which have only the results."""
    files = sorted(recordings("bgp-agent").glob(f"agent-{version}-*.json"))
    return {one["name"]: one for path in files for one in json.loads(path.read_text(encoding="utf-8"))}


class Played:
    """The current objects of a node, and the plans that follow from them."""

    def __init__(self, options: Mapping[str, str] | None) -> None:
        self._ipam = (options or {}).get("ipam", "kubernetes")
        self._secrets = (options or {}).get("bgpSecretsNamespace", "kube-system")
        self._tables: dict[str, Table[Any, Any]] = {
            kind: Table(f"played-{kind}", key=lambda row: row.key) for kind in KINDS
        }
        refused: Table[tuple[str, str, str], RefusedAddress] = Table(
            "refused", key=lambda row: (str(row.service), row.part, str(row.address))
        )
        self._services = announced_services(
            self._tables["Service"], self._tables["EndpointSlice"], refused, NODE
        )

    def apply(self, body: Json) -> None:
        """Create or update an object."""
        if (kind := KINDS.get(body["kind"])) is not None:
            self._tables[kind.kind].put(kind.stored(kind.convert(body)))

    def delete(self, kind: str, name: str, namespace: str) -> None:
        """Delete an object."""
        with self._tables[kind].txn() as rows:
            rows.delete((namespace, name))

    def config(self) -> CiliumBGPNodeConfig | None:
        """The CiliumBGPNodeConfig of the node."""
        found: CiliumBGPNodeConfig | None = self._tables["CiliumBGPNodeConfig"].get(("", NODE))
        return found

    def facts(self) -> BGPFacts | None:
        """The controller's input; None before the node is known."""
        tables = {kind: table.all() for kind, table in self._tables.items()}
        found: CiliumNode | None = self._tables["CiliumNode"].get(("", NODE))
        if found is None:
            return None
        cidrs = [ip_network(text) for text in found.spec.ipam.pod_cidrs or ()]
        pools = [
            PodRange(ip_network(text), "primary", pool.pool)
            for pool in found.spec.ipam.pools.allocated or ()
            for text in pool.cidrs or ()
        ]
        return BGPFacts(
            ClusterNode(
                cluster="default",
                name=NODE,
                source=Source.LOCAL,
                addresses=tuple(NodeIP(one.type, ip_address(one.ip)) for one in found.spec.addresses or ()),
                labels=found.labels,
                annotations=annotations_of(found),
            ),
            self.config(),
            tables["CiliumBGPPeerConfig"],
            tables["CiliumBGPAdvertisement"],
            cidrs if self._ipam in WITH_RANGES else (),
            list(announced_pools(tables["CiliumPodIPPool"], pools)) if self._ipam == "multi-pool" else (),
            self._services.all(),
            tables["Secret"] if self._secrets else (),
            self._secrets,
            tables["CiliumBGPPeeringPolicy"],
        )

    def plans(self) -> dict[str, InstancePlan]:
        """The plans of the node's instances."""
        facts = self.facts()
        return plans(facts) if facts is not None else {}


def stepped(scenario: Json) -> Iterator[tuple[Json, Played]]:
    """Yield each step with the node after it."""
    node = Played(scenario["options"])
    for step in scenario["steps"]:
        for body in step["in"].get("apply") or ():
            node.apply(body)
        for one in step["in"].get("delete") or ():
            node.delete(one["kind"], one["name"], one.get("namespace") or "")
        yield step, node


def played(scenario: Json) -> Iterator[tuple[Json, dict[str, InstancePlan]]]:
    """Yield each step with the plans after it."""
    for step, node in stepped(scenario):
        yield step, node.plans()


# What peers receive: what a speaker lets through.


def received(plan: InstancePlan, peer: BGPPeer) -> list[Json]:
    """Return the routes that a peer receives, with its view of attributes (RFC 4271 section 5, RFC 4760)."""
    versions = [Family(family.afi) for family in peer.families if family.safi == "unicast"]
    found = []
    for path in plan.paths:
        if Family.of(path.prefix) in versions:
            statement = _accepting(plan.policies, peer, path.prefix)
            if statement is not None and LLGR_STALE not in statement.communities:
                found.append(_route(plan, peer, path.prefix, statement))
    return sorted(found, key=lambda one: str(one["prefix"]))


def _accepting(policies: Sequence[RoutePolicy], peer: BGPPeer, prefix: IPNetwork) -> PolicyStatement | None:
    statements = (
        one for policy in policies if policy.direction is PolicyDirection.EXPORT for one in policy.statements
    )
    for one in statements:
        if peer.address in one.neighbors and any(prefix in match for match in one.prefixes):
            return one
    return None


def _route(plan: InstancePlan, peer: BGPPeer, prefix: IPNetwork, statement: PolicyStatement) -> Json:
    route: Json = {
        "prefix": str(prefix),
        "origin": "igp",
        "asPath": str(peer.local_asn) if peer.external else "",
    }
    if statement.communities:
        route["communities"] = sorted(map(community, statement.communities))
    if statement.large_communities:
        route["largeCommunities"] = sorted(":".join(map(str, one)) for one in statement.large_communities)
    if not peer.external:
        preference = statement.local_preference
        route["localPref"] = 100 if preference is None else preference
    return route


def community(value: int) -> str:
    """Format a community as in recordings."""
    return f"{value >> 16}:{value & 0xFFFF}"
