"""The nodes as the API lists them, whole and as differences."""

from __future__ import annotations

import json
from ipaddress import ip_address, ip_network
from typing import Any

import msgspec
from msgspec.structs import replace

from cells.api.operations.node_view import CLIENT_SECONDS, NodeWatchers, node_element
from cells.base.addresses import Family
from cells.cluster.ipcache.rows import Source
from cells.cluster.nodes.node import CILIUM_INTERNAL_IP, ClusterNode, NodeIP
from tests.support.recordings import recordings
from tests.unit.remote_nodes.nodes import node


def names(found: object) -> list[str]:
    return [one.name for one in found] if isinstance(found, list) else []


def ask(
    watchers: NodeWatchers, number: int, *nodes: ClusterNode, at: float = 0.0
) -> tuple[int, list[str], list[str]]:
    elements = (node_element(one, tuple(Family)) for one in nodes)
    answer = watchers.answer("default/n1", number, elements, at)
    assert isinstance(answer.client_id, int)
    return answer.client_id, names(answer.nodes_added), names(answer.nodes_removed)


ONE, TWO = node(1, "10.1.0.0/24"), node(2, "10.2.0.0/24", "fd02::/112")


def test_a_repeated_node_list_request_gets_the_changes() -> None:
    watchers = NodeWatchers()
    number, added, removed = ask(watchers, 0, ONE, TWO)
    assert (added, removed) == (["default/n1", "default/n2"], [])
    assert ask(watchers, number, ONE, TWO) == (number, [], [])
    moved = replace(TWO, ipv4_alloc_cidrs=ONE.ipv4_alloc_cidrs)
    assert ask(watchers, number, ONE, moved) == (number, ["default/n2"], ["default/n2"])
    assert ask(watchers, number, ONE) == (number, [], ["default/n2"])


def test_an_expired_node_list_client_gets_all_nodes() -> None:
    watchers = NodeWatchers()
    number, _, _ = ask(watchers, 0, ONE)
    again, added, _ = ask(watchers, number, ONE, at=CLIENT_SECONDS + 1)
    assert again != number
    assert added == ["default/n1"]


DATA = recordings("health")
EXCLUDED = {
    "cluster_nodes_same_node_again_dual": "a node that is as it was is not sent again",
}


def recorded_node(given: Any) -> ClusterNode:
    """A node's row; the recording does not name its range, in which its router is."""
    addresses = [
        NodeIP(kind, ip_address(ip)) for kind, _, ip in (t.partition("=") for t in given["addresses"])
    ]
    routers = [one.ip for one in addresses if one.type == CILIUM_INTERNAL_IP and one.ip.version == 4]
    health = [given["ipv4_health_ip"], given["ipv6_health_ip"]]
    return ClusterNode(
        cluster=given["cluster"],
        name=given["name"],
        source=Source(given["source"]),
        addresses=tuple(addresses),
        ipv4_alloc_cidrs=tuple(ip_network(f"{ip}/24", strict=False) for ip in routers),
        health=tuple(ip_address(text) for text in health if text),
        ingress=tuple(ip_address(text) for text in [given["ipv4_ingress_ip"]] if text),
    )


def by_name(answer: Any) -> Any:
    """An empty list and null mean the same, and the order nothing."""
    lists = {key: sorted(answer[key] or (), key=lambda one: one["name"]) for key in answer if "nodes" in key}
    return answer | lists


def test_nodes_and_their_changes_are_answered_as_recorded() -> None:
    cases = sorted(DATA.glob("cluster_nodes_*.json"))
    assert len(cases) == 18
    for path in cases:
        recorded = json.loads(path.read_text())
        on = {family for family in Family if recorded["options"][f"enable-{family}"]}
        watchers, nodes, last = NodeWatchers(), dict[str, ClusterNode](), 0
        for step in recorded["steps"] if path.stem not in EXCLUDED else ():
            if step["op"] != "GET /v1/cluster/nodes":
                row = recorded_node(step["node"])
                nodes.pop(row.full_name, None)
                if step["op"] == "node_upsert":
                    nodes[row.full_name] = row
                continue
            header = step["client_id_header"]
            number = last if header == "last" else int(header) if header else None
            elements = (node_element(one, on) for one in nodes.values())
            answer = json.loads(
                msgspec.json.encode(watchers.answer(recorded["options"]["local_node"], number, elements))
            )
            if "client-id" in answer:
                assert (answer["client-id"] == last) is step["same_id_as_before"], path.stem
                last, answer["client-id"] = answer["client-id"], "<CLIENT-ID>"
            assert by_name(answer) == by_name(step["answer"]), path.stem
