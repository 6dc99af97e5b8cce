"""Two nodes that share only etcd: each learns the identities of the other's pods, through any failure."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hive.lab import agent_process
from hive.lab.children import Child
from hive.lab.cluster import Cluster
from hive.lab.namespaces import inside
from hive.lab.node import Lab
from hive.lab.traffic.flows import Received, Sent, udp_receiver, udp_sender, udp_socket
from tests.support.two_nodes import SETTINGS, asked, joined_by_etcd
from tests.support.waiting import eventually

pytestmark = pytest.mark.node

NAME = f"etcd-{os.getpid()}"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes with a pod each, a tunnel between them, and etcd."""
    with joined_by_etcd(NAME) as found:
        yield found


def own(lab: Lab) -> list[tuple[str, int, tuple[str, ...]]]:
    """Address, identity and labels of each pod of the node."""
    return [
        (
            one["status"]["networking"]["addressing"][0]["ipv4"],
            one["status"]["identity"]["id"],
            tuple(one["status"]["identity"]["labels"]),
        )
        for one in asked(lab, "/v1/endpoint")
    ]


def knows(lab: Lab, other: Lab) -> bool:
    """Whether a node has the other's addresses under the same identities, and their labels."""
    known = {row["cidr"]: (row["identity"], row["hostIP"]) for row in asked(lab, "/v1/ip")}
    labels = {row["id"]: tuple(row["labels"]) for row in asked(lab, "/v1/identity")}
    (host,) = (row["primary-address"]["ipv4"]["ip"] for row in nodes(lab) if row["name"].endswith(other.name))
    return all(
        known[f"{address}/32"] == (identity, host) and labels[identity] == expected
        for address, identity, expected in own(other)
    )


def nodes(lab: Lab) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = asked(lab, "/v1/cluster/nodes")["nodes-added"]
    return found


def store_state(lab: Lab) -> str:
    return str(asked(lab, "/v1/healthz")["kvstore"]["state"])


def test_pods_are_known_on_both_nodes(cluster: Cluster) -> None:
    first, second = cluster.nodes()
    for lab, other in ((first, second), (second, first)):
        eventually(partial(own, other))
        eventually(partial(knows, lab, other))
        assert {row["name"]: row["source"] for row in nodes(lab)} == {
            f"default/{lab.name}": "local",
            f"default/{other.name}": "kvstore",
        }


def test_no_packet_is_lost_while_etcd_and_an_agent_are_killed(cluster: Cluster) -> None:
    first, second = cluster.nodes()
    (target, _, _), *_ = own(second)
    before = own(second)
    with first.open_pod("pod-1-1") as one, second.open_pod("pod-2-1") as two:
        with inside(two):
            sock = udp_socket()
        with sock:
            receiver: Child[Received] = two.start(udp_receiver, sock)
            sender: Child[Sent] = one.start(udp_sender, (target, sock.getsockname()[1]), 500.0)
            cluster.store.crash()
            agent_process.crash(second)
            agent_process.wait_ready(second, agent_process.start(second, *cluster.settings(SETTINGS)))
            assert own(second) == before, "numbers are kept without the store"
            assert store_state(second) == "Failure"
            cluster.store.start()
            eventually(lambda: store_state(second) == "Ok")
            sent = sender.finish(within=60)
            received = receiver.finish(within=60)
    assert sent.packets > 200
    assert received.packets == sent.packets
    eventually(lambda: knows(first, second) and knows(second, first))


def test_a_label_of_a_namespace_changes_identities_on_both(cluster: Cluster, tmp_path: Path) -> None:
    first, second = cluster.nodes()
    before = {identity for lab in (first, second) for _, identity, _ in own(lab)}
    changed = tmp_path / "namespace.yaml"
    name = "default"
    changed.write_text(
        "apiVersion: v1\nkind: Namespace\nmetadata:\n"
        f"  name: {name}\n  labels: {{kubernetes.io/metadata.name: {name}, team: blue}}\n"
    )
    cluster.manifests.copy("namespaces.yaml", changed.read_text())
    team = "k8s:io.cilium.k8s.namespace.labels.team=blue"
    eventually(lambda: all(team in labels for lab in (first, second) for _, _, labels in own(lab)))
    eventually(lambda: knows(first, second) and knows(second, first))
    assert not before & {identity for lab in (first, second) for _, identity, _ in own(lab)}
