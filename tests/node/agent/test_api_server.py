"""An agent with an API server that starts late, stops, and loses all its data."""

from __future__ import annotations

from typing import Any

import pytest

from hive.client import ask
from hive.lab import pods
from hive.lab.agent_process import api_socket
from hive.lab.node import Lab
from tests.node.agent.manifests import labels_of
from tests.node.agent.served import ENDPOINTS, IDENTITIES, NEXT_TRY, NODE, Server, reaches, server, states
from tests.support.agents import serving, terminated
from tests.support.waiting import eventually

__all__ = ["server"]

pytestmark = pytest.mark.node


def test_pods_of_a_cluster_outlive_its_api_server(
    node: Lab, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("K8S_NODE_NAME", NODE)
    pid = serving(node, *server.settings)
    target = pods.add(node, "server")
    pods.add(node, "client")
    assert reaches(node, "client", target.ipv4, 10), "policies know the identity once the ADD has answered"
    pods.add(node, "stranger")
    assert not reaches(node, "stranger", target.ipv4)
    assert {"k8s:app=server"} <= labels_of(pid, "server")
    numbers = server.numbers()
    assert numbers.keys() == {"server", "client", "stranger"}
    eventually(lambda: len(server.ask("GET", ENDPOINTS)["items"]) == 3)
    server.ask("POST", IDENTITIES, _identity(5000, app="client"))
    server.ask("POST", ENDPOINTS, _endpoint("far", "10.9.9.9", 5000))
    eventually(lambda: "10.9.9.9" in str(ask("/statedb/dump/remote-endpoints", api_socket(pid))))

    server.kill()
    assert terminated(node, pid) == 0
    pid = serving(node, *server.settings)
    assert reaches(node, "client", target.ipv4, 10)
    assert not reaches(node, "stranger", target.ipv4), "what nobody can tell of is not let in"
    assert states(pid) == {"restoring"}

    server.start()  # it has forgotten identities and endpoints
    eventually(lambda: server.numbers() == numbers, within=NEXT_TRY)
    eventually(lambda: len(server.ask("GET", ENDPOINTS)["items"]) == 3, within=NEXT_TRY)
    eventually(lambda: states(pid) == {"ready"}, within=NEXT_TRY)
    assert reaches(node, "client", target.ipv4, 10)
    eventually(lambda: not reaches(node, "stranger", target.ipv4))
    pods.delete(node, "stranger")
    eventually(lambda: len(server.ask("GET", ENDPOINTS)["items"]) == 2)


def _identity(number: int, **labels: str) -> dict[str, Any]:
    return {
        "apiVersion": "cilium.io/v2",
        "kind": "CiliumIdentity",
        "metadata": {"name": str(number), "labels": labels},
        "security-labels": {f"k8s:{key}": value for key, value in labels.items()},
    }


def _endpoint(name: str, ip: str, identity: int) -> dict[str, Any]:
    networking = {"addressing": [{"ipv4": ip}], "node": "192.0.2.9"}
    return {
        "apiVersion": "cilium.io/v2",
        "kind": "CiliumEndpoint",
        "metadata": {"name": name, "namespace": "default"},
        "status": {"id": 1, "identity": {"id": identity}, "networking": networking, "state": "ready"},
    }
