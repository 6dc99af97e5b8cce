"""Two lab nodes on one network: pods reach each other over both families, whichever node is killed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from hive.client import ask
from hive.lab import agent_process
from hive.lab.children import Child
from hive.lab.cluster import Cluster
from hive.lab.kernel import lab_links
from hive.lab.namespaces import inside
from hive.lab.node import ROOT, Lab, exclusive
from hive.lab.traffic.flows import Received, Sent, udp_receiver, udp_sender, udp_socket
from hive.lab.traffic.probe import routes
from tests.support.namespaces import need_root
from tests.support.two_nodes import asked, hive, reaches
from tests.support.waiting import eventually

pytestmark = pytest.mark.node

NAME = f"twins-{os.getpid()}"
SETTINGS = ("--enable-ipv6=true",)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes with a pod each, both families on."""
    need_root()
    links = lab_links()
    found = Cluster(NAME)
    try:
        hive("lab", "up", "--name", f"{NAME}-1", "--nodes", "2", "--pods", "1", *SETTINGS)
        yield found
    finally:
        with exclusive():
            found.remove(found.nodes())
    assert not list(ROOT.glob(f"{NAME}*"))
    assert not lab_links() - links


def addresses(cluster: Cluster, pod: str) -> list[str]:
    (found,) = json.loads(hive("lab", "get", "--name", NAME, "pod", pod, "-o", "json"))
    return [one["ip"] for one in found["status"]["podIPs"]]


def rows(lab: Lab, path: str) -> list[dict[str, object]]:
    answer = asked(lab, path)
    found = answer["nodes-added"] if isinstance(answer, dict) else answer
    assert isinstance(found, list)
    return found


def test_pods_of_two_nodes_reach_each_other_over_both_families(cluster: Cluster) -> None:
    first, second = cluster.nodes()
    for lab, pod, other in ((first, "pod-1-1", "pod-2-1"), (second, "pod-2-1", "pod-1-1")):
        for address in addresses(cluster, other):
            eventually(partial(reaches, lab, pod, address))


def test_every_agent_knows_both_nodes(cluster: Cluster) -> None:
    for lab in cluster.nodes():
        found = {str(row["name"]): row["source"] for row in rows(lab, "/v1/cluster/nodes")}
        names = {f"default/{each.name}" for each in cluster.nodes()}
        assert set(found) == names
        assert found[f"default/{lab.name}"] == "local"
    first, second = cluster.nodes()
    place = cluster.place(second)
    known = {row["cidr"]: row["identity"] for row in rows(first, "/v1/ip")}
    assert known[f"{place.ipv4}/32"] == 6
    assert known[f"{place.ipv6}/128"] == 6


@pytest.mark.parametrize("policy", [None, "pod-1-1"])
def test_no_packet_between_nodes_is_lost_while_an_agent_is_killed_and_comes_back(
    cluster: Cluster, policy: str | None
) -> None:
    """Also by a policy that selects the sender by labels, which its node alone has given an identity."""
    first, second = cluster.nodes()
    target = addresses(cluster, "pod-2-1")[0]
    cluster.manifests.write("policy", [allowing(policy)] if policy else [])
    if policy:
        eventually(lambda: "'policy-enabled': 'ingress'" in str(rows(second, "/v1/endpoint")))
    with first.open_pod("pod-1-1") as one, second.open_pod("pod-2-1") as two:
        with inside(two):
            sock = udp_socket()
        with sock:
            receiver: Child[Received] = two.start(udp_receiver, sock)
            sender: Child[Sent] = one.start(udp_sender, (target, sock.getsockname()[1]), 500.0)
            for lab in (first, second):
                agent_process.crash(lab)
                pid = agent_process.start(lab, *cluster.settings(), *SETTINGS)
                agent_process.wait_ready(lab, pid)
            sent = sender.finish(within=60)
            received = receiver.finish(within=60)
    assert sent.packets > 200
    assert received.packets == sent.packets


def allowing(app: str) -> dict[str, object]:
    """Only pods of this app reach the pod of the second node."""
    return {
        "apiVersion": "cilium.io/v2",
        "kind": "CiliumNetworkPolicy",
        "metadata": {"name": "only", "namespace": "default"},
        "spec": {
            "endpointSelector": {"matchLabels": {"app": "pod-2-1"}},
            "ingress": [{"fromEndpoints": [{"matchLabels": {"app": app}}]}],
        },
    }


def test_a_node_that_goes_takes_its_routes_with_it(cluster: Cluster) -> None:
    first = cluster.nodes()[0]
    third = cluster.node(3)
    try:
        hive("lab", "up", "--name", f"{NAME}-1", "--nodes", "3", "--pods", "0", *SETTINGS)
        wanted = {f"default/{lab.name}" for lab in cluster.nodes()}
        eventually(lambda: {str(row["name"]) for row in rows(first, "/v1/cluster/nodes")} == wanted)
        destination = cluster.place(third).pod_cidrs[0]
        with first.open() as node:
            eventually(lambda: destination in node.run(destinations))
    finally:
        with exclusive():
            cluster.remove([third])
    with first.open() as node:
        eventually(lambda: destination not in node.run(destinations))


def destinations() -> set[str]:
    return {route.destination for route in routes()}


def test_objects_are_applied_to_all_nodes(cluster: Cluster, tmp_path: Path) -> None:
    manifest = tmp_path / "shop.yaml"
    manifest.write_text("apiVersion: v1\nkind: Namespace\nmetadata: {name: shop}\n")
    assert "namespace/shop applied" in hive("lab", "apply", "--name", NAME, "-f", str(manifest))
    assert "shop" in hive("lab", "get", "--name", NAME, "namespaces")
    for lab in cluster.nodes():
        pid = agent_process.running(lab)
        assert pid is not None
        socket = agent_process.api_socket(pid)
        eventually(partial(knows_shop, socket))


def knows_shop(socket: Path) -> bool:
    return "shop" in json.dumps(ask("/statedb/dump/k8s-namespaces", socket))


def test_down_by_the_name_of_the_cluster_takes_all_its_nodes(cluster: Cluster) -> None:
    nodes = cluster.nodes()
    assert hive("lab", "down", "--name", NAME).splitlines() == [f"{lab.name}  removed" for lab in nodes]
    assert cluster.nodes() == []
