"""The encryption keys of other nodes' addresses in the ipcache, compared with recordings."""

from __future__ import annotations

import json
from ipaddress import ip_address
from typing import Any

from cells.base.addresses import Family
from cells.cluster.encryption import WIREGUARD_KEY
from cells.cluster.identity.numbers import WORLD_IPV4, WORLD_IPV6
from cells.cluster.ipcache.rows import Source, keyed
from cells.cluster.nodes.node import ClusterNode, NodeIP
from cells.cluster.remote_nodes import Contested, claims_of
from tests.support.recordings import recordings

WORLDS = {Family.IPV4: WORLD_IPV4, Family.IPV6: WORLD_IPV6}


def node_of(recorded: dict[str, Any]) -> ClusterNode:
    pairs = [each.split("=") for each in recorded["addresses"]]
    return ClusterNode(
        cluster=recorded["cluster"],
        name=recorded["name"],
        source=Source.CUSTOM_RESOURCE,
        addresses=tuple(NodeIP(kind, ip_address(ip)) for kind, ip in pairs),
        health=tuple(
            ip_address(recorded[key]) for key in ("ipv4_health_ip", "ipv6_health_ip") if recorded.get(key)
        ),
        ingress=tuple(
            ip_address(recorded[key]) for key in ("ipv4_ingress_ip", "ipv6_ingress_ip") if recorded.get(key)
        ),
        encryption_key=recorded.get("encryption_key", 0),
    )


def test_addresses_of_other_nodes_have_the_recorded_keys() -> None:
    compared = 0
    for file in sorted(recordings("wireguard").glob("node_ipcache_wireguard*.json")):
        case = json.loads(file.read_text())
        options = case["options"]
        for step in case["steps"]:
            if step["op"] != "node_upsert" or step["node"]["source"] != "custom-resource":
                continue
            claims = claims_of(node_of(step["node"]), WORLDS, encrypted=options["encrypt-node"])
            for claim in claims:
                granted = Contested(claim, (), encrypts=not options["local_node_opted_out"]).granted
                found = keyed(granted.entry, WIREGUARD_KEY).encrypt_key
                expected = step["ipcache_metadata_after"][claim.prefix]["encrypt_key"]
                assert found == expected, (case["name"], claim.prefix)
                compared += 1
    assert compared >= 50
