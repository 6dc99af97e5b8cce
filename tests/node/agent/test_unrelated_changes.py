"""A constantly changing rule disturbs no flow that it does not select, even of the same pods."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hive.client import ask
from hive.lab import pods
from hive.lab.agent_process import api_socket
from hive.lab.namespaces import inside
from hive.lab.node import Lab
from hive.lab.traffic.flows import udp_receiver, udp_sender, udp_socket
from tests.node.agent.conversations import conversation, flows
from tests.node.agent.manifests import write
from tests.support.agents import known_pods, serving
from tests.support.waiting import eventually

pytestmark = pytest.mark.node

CHANGES = 1000
RATE = 1000.0
"""Packets a second."""


def policy(name: str, **ingress: Any) -> dict[str, Any]:
    """For every pod of the namespace."""
    metadata = {"name": name, "namespace": "default"}
    spec = {"endpointSelector": {}, "ingress": [ingress]}
    return {"apiVersion": "cilium.io/v2", "kind": "CiliumNetworkPolicy", "metadata": metadata, "spec": spec}


def unrelated(turn: int) -> dict[str, Any]:
    """Of a pod that is not there, by other ports each time."""
    ports = [{"ports": [{"port": str(1 + turn % 60000), "protocol": "UDP"}]}]
    return policy("often", fromEndpoints=[{"matchLabels": {"app": "nobody"}}], toPorts=ports)


def test_a_thousand_changes_of_an_unrelated_rule_lose_nothing(node: Lab, tmp_path: Path) -> None:
    manifests = tmp_path / "manifests"
    manifests.mkdir()
    write(manifests, "all", policy("all", fromEndpoints=[{}]))
    write(manifests, "often", unrelated(0))
    known_pods(manifests, "source", "target")
    pid = serving(node, f"--manifests-dir={manifests}")
    source, target = pods.add(node, "source"), pods.add(node, "target")

    def revision() -> int:
        return int(ask("/v1/policy", api_socket(pid))["revision"])

    def realized() -> bool:
        policy_status = ask("/v1/endpoint/pod-name:default:target", api_socket(pid))["status"]["policy"][
            "realized"
        ]
        return int(policy_status["policy-revision"]) == revision() and any(
            f'"port":{1 + CHANGES}' in rule["rule"] for rule in policy_status["l4"]["ingress"]
        )

    before = revision()
    with (
        conversation(node, source, target) as talk,
        node.open_pod("source") as sending,
        node.open_pod("target") as receiving,
    ):
        with inside(receiving):
            datagrams = udp_socket()
        with datagrams:
            arriving = receiving.start(udp_receiver, datagrams)
            leaving = sending.start(udp_sender, (target.ipv4, datagrams.getsockname()[1]), RATE)
        try:
            for turn in range(1, CHANGES + 1):
                write(manifests, "often", unrelated(turn))
                if turn % 100 == 0:
                    flows(talk)
            eventually(realized)
            flows(talk)
            sent, received = leaving.finish(within=60), arriving.finish(within=60)
        finally:
            leaving.kill()
            arriving.kill()
    assert revision() > before + 1, "more than once while packets went"
    assert sent.packets > 0
    assert (sent.errors, sent.packets - received.packets) == (0, 0)
