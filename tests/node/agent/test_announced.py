"""``type: LoadBalancer`` on a bare node: the operator assigns an address, the node announces it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hive.client import ask
from hive.lab import pods
from hive.lab.agent_process import api_socket
from hive.lab.namespaces import Namespaces
from hive.lab.node import OUTSIDE_ADDRESS, Lab
from tests.node.agent.announced import LEASE, OBJECTS, VIP, heard_neighbour, mac_of, running
from tests.node.agent.node_ports import TARGET, answered
from tests.node.agent.served import NODE, PORT, asked
from tests.support.agents import serving
from tests.support.waiting import eventually
from tests.unit.kubernetes.cluster import pod

pytestmark = pytest.mark.node

CIDR = "10.0.7.0/24"
LEASE_SECONDS = 12


class Cluster:
    """A server and an operator in the node."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        with self._lab.open() as node:
            return node.run(asked, method, path, body)

    def answers(self, path: str) -> bool:
        try:
            self.ask("GET", path)
        except OSError:
            return False
        return True


@pytest.fixture
def cluster(node: Lab, tmp_path: Path) -> Iterator[Cluster]:
    """With a pool, a policy and a service."""
    config, objects = tmp_path / "kubeconfig", tmp_path / "objects.yaml"
    known = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}, "spec": {"podCIDRs": [CIDR]}}
    objects.write_text("---\n".join(json.dumps(one) + "\n" for one in (known, pod("server", NODE))))
    found = Cluster(node)
    served = ("tests.support.apiserver", "--plain", "--port", str(PORT))
    operator = (f"--k8s-kubeconfig-path={config}", "--k8s-namespace=default", "--operator-k8s-client-qps=0")
    with node.open() as here, running(here, *served, "--kubeconfig", str(config), "--objects", str(objects)):
        eventually(lambda: found.answers("/version"))
        with running(here, "hive", "operator", *operator, f"--cluster-pool-ipv4-cidr={CIDR}"):
            eventually(lambda: all(found.answers(path) for path, _ in OBJECTS))
            for path, body in OBJECTS:
                found.ask("POST", path, body)
            yield found


def neighbour(lab: Lab) -> str:
    """Where the client outside finds the address: asks anew."""
    with lab.open_outside() as outside:
        return neighbour_of(outside)


def neighbour_of(client: Namespaces) -> str:
    """Where a client finds the address, if anywhere: asks anew."""
    client.run(_forget)
    return str(client.run(_resolve))


def _forget() -> None:
    subprocess.run(["ip", "neighbour", "flush", "to", VIP], check=True, capture_output=True)


def _resolve() -> str:
    subprocess.run(["ping", "-c1", "-W1", VIP], check=False, capture_output=True)
    return heard_neighbour()


def test_a_client_of_the_same_network_finds_and_reaches_a_load_balancer_s_address(
    node: Lab, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("K8S_NODE_NAME", NODE)
    settings = (
        *(f"--k8s-kubeconfig-path={tmp_path / 'kubeconfig'}", "--k8s-client-qps=0"),
        *(f"--ipv4-range={CIDR}", "--enable-node-port=true", "--k8s-namespace=default"),
        *("--enable-l2-announcements=true", f"--l2-announcements-lease-duration={LEASE_SECONDS}s"),
        *("--l2-announcements-renew-deadline=10s", "--l2-announcements-retry-period=500ms"),
    )
    pid = serving(node, *settings)
    server = pods.add(node, "server")
    cluster.ask(
        "POST",
        "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices",
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {"name": "web-1", "labels": {"kubernetes.io/service-name": "web"}},
            "addressType": "IPv4",
            "endpoints": [{"addresses": [server.ipv4]}],
            "ports": [{"name": "tcp", "port": TARGET, "protocol": "TCP"}],
        },
    )
    eventually(lambda: answered(node, 4, (VIP, TARGET), server) == (OUTSIDE_ADDRESS, VIP))
    assert neighbour(node) == mac_of(node, "uplink")
    leases = ask("/statedb/dump/l2-leases", api_socket(pid))["l2-leases"]
    assert [(one["obj"]["lease"], one["obj"]["holder"]) for one in leases] == [(LEASE, NODE)]

    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    eventually(lambda: not neighbour(node), within=LEASE_SECONDS + 60)

    serving(node, *settings)
    eventually(lambda: neighbour(node) == mac_of(node, "uplink"))
    assert answered(node, 4, (VIP, TARGET), server) == (OUTSIDE_ADDRESS, VIP)
