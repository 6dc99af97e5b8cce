"""Identities, tunnel endpoints and encryption keys of nodes' addresses in the ipcache, against recordings."""

from __future__ import annotations

import json
from ipaddress import IPv4Address, ip_address
from typing import Any

from cells.base.addresses import Family
from cells.cluster.encryption import WIREGUARD_KEY
from cells.cluster.identity.numbers import RESERVED_IDENTITIES, WORLD_IPV4, WORLD_IPV6
from cells.cluster.ipcache.rows import Source, keyed
from cells.cluster.nodes.node import ClusterNode, NodeIP
from cells.cluster.remote_nodes import ContestedClaim, claims_of
from tests.support.recordings import recordings

WORLDS = {Family.IPV4: WORLD_IPV4, Family.IPV6: WORLD_IPV6}
Json = dict[str, Any]


def node_of(recorded: Json) -> ClusterNode:
    pairs = [each.split("=") for each in recorded["addresses"]]
    return ClusterNode(
        cluster=recorded["cluster"],
        name=recorded["name"],
        source=Source(recorded["source"]),
        addresses=tuple(NodeIP(kind, ip_address(ip)) for kind, ip in pairs),
        health=tuple(
            ip_address(recorded[key]) for key in ("ipv4_health_ip", "ipv6_health_ip") if recorded.get(key)
        ),
        ingress=tuple(
            ip_address(recorded[key]) for key in ("ipv4_ingress_ip", "ipv6_ingress_ip") if recorded.get(key)
        ),
        encryption_key=recorded.get("encryption_key", 0),
    )


def claimed(nodes: dict[str, ClusterNode], options: Json) -> dict[str, Json]:
    """Return the claims of all other nodes, in the form of the recordings."""
    found: dict[str, Json] = {}
    key = WIREGUARD_KEY if options["enable-wireguard"] else 0
    for node in nodes.values():
        for claim in claims_of(
            node, WORLDS, encrypted=options["encrypt-node"], firewalled=options["enable-host-firewall"]
        ):
            granted = ContestedClaim(claim, (), encrypts=not options["local_node_opted_out"]).effective
            entry = keyed(granted.entry, key) if key else granted.entry
            none = entry.tunnel_endpoint == IPv4Address(0)
            found[claim.prefix] = {
                "labels": list(RESERVED_IDENTITIES[entry.identity]),
                "source": entry.source.value,
                "tunnel_peer": "" if none else str(entry.tunnel_endpoint),
                "encrypt_key": entry.encrypt_key,
            }
    return found


def test_addresses_of_other_nodes_have_the_recorded_entries() -> None:
    cases = [json.loads(file.read_text()) for file in recordings("wireguard").glob("node_ipcache_*.json")]
    assert len(cases) == 10
    for case in cases:
        nodes: dict[str, ClusterNode] = {}
        for number, step in enumerate(case["steps"]):
            node = node_of(step["node"])
            if step["op"] == "node_upsert":
                nodes[node.full_name] = node
            else:
                del nodes[node.full_name]
            recorded = step["ipcache_metadata_after"]
            others = {prefix: one for prefix, one in recorded.items() if one["source"] != Source.LOCAL.value}
            assert claimed(nodes, case["options"]) == others, (case["name"], number)
