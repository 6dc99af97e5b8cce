"""A node with a fake API server that stops and restarts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hive.client import ask
from hive.lab.agent_process import api_socket
from hive.lab.node import Lab
from hive.lab.traffic.probe import ping
from tests.node.agent.manifests import POLICY
from tests.support.apiserver import ADMIN_TOKEN
from tests.support.waiting import eventually
from tests.unit.apiserver.replay import RECORDINGS
from tests.unit.kubernetes.cluster import pod

PORT = 8001
NODE = "node1"
CRDS = ("ciliumendpoints", "ciliumidentities", "ciliumnetworkpolicies", "ciliumnodes")
IDENTITIES = "/apis/cilium.io/v2/ciliumidentities"
POLICIES = "/apis/cilium.io/v2/namespaces/default/ciliumnetworkpolicies"
NODES = "/apis/cilium.io/v2/ciliumnodes"
ENDPOINTS = "/apis/cilium.io/v2/namespaces/default/ciliumendpoints"
FAR_NODE = {
    "apiVersion": "cilium.io/v2",
    "kind": "CiliumNode",
    "metadata": {"name": "node2"},
    "spec": {
        "addresses": [{"type": "InternalIP", "ip": "192.0.2.9"}],
        "ipam": {"podCIDRs": ["10.9.9.0/24"]},
    },
}
"""A node that does not exist: CiliumEndpoints of other nodes are accepted within its range."""
NEXT_TRY = 60.0
"""Upper bound in seconds of an agent's reconnect interval after its server was down."""


def asked(method: str, path: str, body: Any = None, host: str = "127.0.0.1") -> Any:
    """Return the server's response; to be run in its namespace."""
    request = urllib.request.Request(  # the address is ours
        f"http://{host}:{PORT}{path}",
        method=method,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {ADMIN_TOKEN}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
        return json.loads(answer.read())


class Server:
    """The fake API server, in the node's network namespace."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self._lab = lab
        self.kubeconfig = folder / "kubeconfig"
        node_object = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}}
        objects = [node_object, pod("server", NODE, app="server"), pod("client", NODE, app="client")]
        objects += [pod("stranger", NODE, app="stranger")]
        objects += [json.loads((RECORDINGS / "fixtures" / f"crd_{one}.json").read_bytes()) for one in CRDS]
        self._objects = folder / "objects.yaml"
        self._objects.write_text("---\n".join(json.dumps(one) + "\n" for one in objects), encoding="utf-8")
        self._environment = os.environ | {"TMPDIR": str(folder)}  # where a killed one leaves its keys
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def settings(self) -> tuple[str, ...]:
        """Return the settings of an agent that uses this server."""
        return (
            f"--k8s-kubeconfig-path={self.kubeconfig}",
            "--k8s-client-qps=0",
            "--ipv4-range=10.0.7.0/24",  # no operator gives the node its range
        )

    def start(self) -> None:
        """Start with the same objects each time."""
        command = [sys.executable, "-m", "tests.support.apiserver", "--plain", "--port", str(PORT)]
        command += ["--kubeconfig", str(self.kubeconfig), "--objects", str(self._objects)]
        with self._lab.open() as node:
            self._process = node.popen(
                command, stdout=subprocess.DEVNULL, cwd=Path.cwd(), env=self._environment
            )
        for path in (IDENTITIES, ENDPOINTS, POLICIES, NODES):
            eventually(lambda path=path: self.ask("GET", path) is not None)  # type: ignore[misc]
        self.ask("POST", POLICIES, POLICY)
        self.ask("POST", NODES, FAR_NODE)

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        if self._process is not None:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """Return its response."""
        with self._lab.open() as node:
            return node.run(asked, method, path, body)

    def numbers(self) -> dict[str, int]:
        """Return the numbers of identities, by the label app."""
        found = self.ask("GET", IDENTITIES)["items"]
        return {one["security-labels"]["k8s:app"]: int(one["metadata"]["name"]) for one in found}


@pytest.fixture
def server(node: Lab, tmp_path: Path) -> Iterator[Server]:
    found = Server(node, tmp_path)
    try:
        found.start()
        yield found
    finally:
        found.kill()


def reaches(lab: Lab, name: str, ip: str, patience: float = 0.5) -> bool:
    """Return whether a response arrives within ``patience`` seconds."""
    with lab.open_pod(name) as inside:
        return bool(inside.run(ping, ip, 1, patience))


def states(pid: int) -> set[str]:
    return {one["status"]["state"] for one in ask("/v1/endpoint", api_socket(pid))}
