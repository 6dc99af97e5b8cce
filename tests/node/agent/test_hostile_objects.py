"""CiliumNodes and CiliumEndpoints with forged claims, against a running agent and its kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hive.client import ask
from hive.lab import agent_process, pods
from hive.lab.node import NODE_ADDRESS, OUTSIDE_ADDRESS, Lab
from hive.lab.traffic.probe import ping, routes
from tests.node.agent.manifests import pod, write
from tests.support.agents import serving
from tests.support.waiting import eventually

pytestmark = pytest.mark.node
HONEST = "10.99.0.0/24"
NATIVE = ("--routing-mode=native", "--auto-direct-node-routes=true", "--enable-ipv4-masquerade=true")


def cilium_node(*ranges: str) -> dict[str, Any]:
    """Of a neighbour, with these ranges of pods."""
    return {
        "apiVersion": "cilium.io/v2",
        "kind": "CiliumNode",
        "metadata": {"name": "evil", "creationTimestamp": "2020-01-01T00:00:00Z"},
        "spec": {
            "addresses": [{"type": "InternalIP", "ip": OUTSIDE_ADDRESS}],
            "ipam": {"podCIDRs": list(ranges)},
        },
    }


def cilium_endpoint(name: str, ip: str) -> dict[str, Any]:
    return {
        "apiVersion": "cilium.io/v2",
        "kind": "CiliumEndpoint",
        "metadata": {"name": name, "namespace": "default"},
        "status": {
            "id": 1,
            "identity": {"id": 4711},
            "networking": {"addressing": [{"ipv4": ip}], "node": OUTSIDE_ADDRESS},
        },
    }


def identity_of(pid: int, ip: str) -> int:
    """By the ipcache; 0 for an address that has no entry of its own."""
    found = ask("/v1/ip", agent_process.api_socket(pid))
    return next((int(one["identity"]) for one in found if one["cidr"] == f"{ip}/32"), 0)


def test_a_node_and_its_endpoints_take_nothing_of_others(node: Lab, tmp_path: Path) -> None:
    write(tmp_path, "client", pod("client", {"app": "client"}))
    pid = serving(node, f"--manifests-dir={tmp_path}", *NATIVE)
    client = pods.add(node, "client")
    with node.open() as host, node.open_pod("client") as inside:
        before = set(host.run(routes))
        network = f"{NODE_ADDRESS.rpartition('.')[0]}.0/24"
        own = f"{client.ipv4.rpartition('.')[0]}.0/24"
        write(
            tmp_path,
            "evil",
            cilium_node("0.0.0.0/0", network, own, "169.254.0.0/16", HONEST),
            cilium_endpoint("host", NODE_ADDRESS),
            cilium_endpoint("pod", client.ipv4),
            cilium_endpoint("honest", "10.99.0.7"),
        )
        eventually(lambda: any(str(one.destination) == HONEST for one in host.run(routes)))
        eventually(lambda: identity_of(pid, "10.99.0.7") == 4711)
        assert {one for one in host.run(routes) if str(one.destination) != HONEST} == before
        assert identity_of(pid, NODE_ADDRESS) == 1
        assert identity_of(pid, client.ipv4) not in (0, 4711)
        assert host.run(ping, OUTSIDE_ADDRESS, 1)
        assert inside.run(ping, NODE_ADDRESS, 1)
        log = agent_process.log_end(node, 200)
        assert (
            log.count("refusing an address or range of a node")
            == 4 + log.count(": in use here, not announced")
            == 5
        )
        assert log.count("refusing a CiliumEndpoint") == 2
        modules = ask("/v1/healthz", agent_process.api_socket(pid))["modules"]
        degraded = " ".join(one["message"] for one in modules if one["level"] == "Degraded")
        assert "range 0.0.0.0/0 is every address" in degraded
        assert "is an address of node" in degraded
        (tmp_path / "evil.yaml").unlink()
        eventually(lambda: set(host.run(routes)) == before)
        assert identity_of(pid, NODE_ADDRESS) == 1
        assert host.run(ping, OUTSIDE_ADDRESS, 1)
