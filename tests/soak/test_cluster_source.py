"""Failures of the object source while pods communicate, which must not be disturbed."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hive.client import ask
from hive.lab import pods
from hive.lab.agent_process import api_socket
from hive.lab.node import Lab
from tests.node.agent.manifests import POLICY, labels_of
from tests.node.agent.served import ENDPOINTS, IDENTITIES, NODE, NODES, Server, reaches, states
from tests.support.agents import serving
from tests.support.traffic import lossless_traffic
from tests.support.waiting import eventually
from tests.unit.kubernetes.cluster import pod

pytestmark = [pytest.mark.node, pytest.mark.timeout(600)]

REMOVED = 60.0
"""Seconds for which there is no source."""
PODS = "/api/v1/namespaces/default/pods"
SETTLED = 40.0
"""Seconds until rows of missing objects are deleted, and some."""


class Bare(Server):
    """A server that can begin with next to nothing."""

    def forget(self) -> None:
        """Have the next start() begin with definitions alone."""
        self._objects.write_text(
            "---\n".join(one for one in self._objects.read_text().split("---\n") if "CustomResource" in one)
        )

    def fill(self) -> None:
        """As a cluster is restored: piece by piece, this node last."""
        for name in ("server", "client"):
            self.ask("POST", PODS, pod(name, NODE, app=name))
        self.ask("POST", "/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}})


@pytest.fixture
def server(node: Lab, tmp_path: Path) -> Iterator[Bare]:
    found = Bare(node, tmp_path)
    try:
        yield found
    finally:
        found.kill()


def started(node: Lab, server: Bare) -> int:
    return serving(node, *server.settings)


def dumped(pid: int, table: str) -> str:
    return json.dumps(ask(f"/statedb/dump/{table}", api_socket(pid)))


def owner(pid: int, address: str) -> int:
    """The identity that the ipcache gives an address."""
    found: int = next(
        one["identity"] for one in ask("/v1/ip", api_socket(pid)) if one["cidr"] == f"{address}/32"
    )
    return found


def labelled(pid: int) -> set[int]:
    """The identities of this node's pods."""
    return {one["status"]["identity"]["id"] for one in ask("/v1/endpoint", api_socket(pid))}


def held(node: Lab, address: str, seconds: float) -> None:
    """Meanwhile the client reaches the server, and the stranger does not."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert reaches(node, "client", address, 10)
        assert not reaches(node, "stranger", address)


def test_a_source_may_go_for_long_come_back_empty_and_be_filled(
    node: Lab, server: Bare, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("K8S_NODE_NAME", NODE)
    server.start()
    pid = started(node, server)
    target = pods.add(node, "server")
    for name in ("client", "stranger"):
        pods.add(node, name)
    numbers = server.numbers()
    with (
        node.open_pod("client") as calling,
        node.open_pod("server") as called,
        lossless_traffic(calling, called, target.ipv4),
    ):
        server.kill()
        held(node, target.ipv4, REMOVED)
        server.forget()
        server.start()
        eventually(lambda: "default" in dumped(pid, "k8s-missing"), within=60)
        held(node, target.ipv4, 15)  # longer than the store is thought to be filled in
        assert states(pid) == {"ready"}
        eventually(lambda: server.numbers() == numbers, within=60)
        server.fill()
        eventually(lambda: "stranger" not in dumped(pid, "k8s-pods"), within=SETTLED)
        assert {"k8s:app=client"} <= labels_of(pid, "client")
        assert reaches(node, "client", target.ipv4, 10)


def test_two_nodes_that_say_they_have_a_running_pods_address_take_nothing_from_it(
    node: Lab, server: Bare, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("K8S_NODE_NAME", NODE)
    server.start()
    pid = started(node, server)
    target = pods.add(node, "server")
    pods.add(node, "client")
    with (
        node.open_pod("client") as calling,
        node.open_pod("server") as called,
        lossless_traffic(calling, called, target.ipv4),
    ):
        for number, peer in enumerate(("192.0.2.8", "192.0.2.10")):
            server.ask("POST", NODES, _node(f"peer-{number}", peer))
            server.ask("POST", ENDPOINTS, _endpoint(f"twin-{number}", target.ipv4, 700 + number, peer))
            server.ask("POST", ENDPOINTS, _endpoint(f"far-{number}", "10.9.9.9", 700 + number, peer))
        eventually(lambda: "far-1" in dumped(pid, "remote-endpoints"))
        assert owner(pid, target.ipv4) in labelled(pid), "a pod of this node is this node's to tell of"
        assert owner(pid, "10.9.9.9") == 701, "of two others the latest"
        server.ask("DELETE", f"{ENDPOINTS}/far-1")
        eventually(lambda: owner(pid, "10.9.9.9") == 700)
        for number in range(2):
            server.ask("DELETE", f"{ENDPOINTS}/twin-{number}")
        eventually(lambda: "twin" not in dumped(pid, "remote-endpoints"))


def test_an_agent_that_is_killed_while_its_source_is_away_finds_its_pods_as_they_were(
    node: Lab, server: Bare, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("K8S_NODE_NAME", NODE)
    server.start()
    pid = started(node, server)
    target = pods.add(node, "server")
    for name in ("client", "stranger"):
        pods.add(node, name)
    with (
        node.open_pod("client") as calling,
        node.open_pod("server") as called,
        lossless_traffic(calling, called, target.ipv4),
    ):
        server.kill()
        for _ in range(3):
            os.kill(pid, signal.SIGKILL)
            pid = started(node, server)
            held(node, target.ipv4, 3)
        server.start()
        eventually(lambda: states(pid) == {"ready"}, within=60)
        held(node, target.ipv4, 3)
        assert server.ask("GET", IDENTITIES)["items"]


def _node(name: str, address: str) -> dict[str, Any]:
    """A node without ranges: endpoints of it may have any address."""
    spec = {"addresses": [{"type": "InternalIP", "ip": address}]}
    return {"apiVersion": "cilium.io/v2", "kind": "CiliumNode", "metadata": {"name": name}, "spec": spec}


def _endpoint(name: str, ip: str, identity: int, peer: str) -> dict[str, Any]:
    networking = {"addressing": [{"ipv4": ip}], "node": peer}
    return {
        "apiVersion": "cilium.io/v2",
        "kind": "CiliumEndpoint",
        "metadata": {"name": name, "namespace": "default"},
        "status": {"id": 1, "identity": {"id": identity}, "networking": networking, "state": "ready"},
    }


def test_a_folder_of_manifests_may_be_emptied_and_filled(node: Lab, tmp_path: Path) -> None:
    folder = tmp_path / "manifests"
    folder.mkdir()
    files = {name: json.dumps(pod(name, "node", app=name)) for name in ("server", "client", "stranger")}
    files["policy"] = json.dumps(POLICY)

    def fill(*names: str) -> None:
        for name in names:
            (folder / f".{name}").write_text(files[name], encoding="utf-8")
            (folder / f".{name}").rename(folder / f"{name}.yaml")

    fill(*files)
    pid = serving(node, f"--manifests-dir={folder}")
    target = pods.add(node, "server")
    for name in ("client", "stranger"):
        pods.add(node, name)
    with (
        node.open_pod("client") as calling,
        node.open_pod("server") as called,
        lossless_traffic(calling, called, target.ipv4),
    ):
        held(node, target.ipv4, 1)
        for path in folder.glob("*.yaml"):
            path.unlink()
        eventually(lambda: "lost all manifests" in json.dumps(ask("/v1/healthz", api_socket(pid))), within=30)
        held(node, target.ipv4, 15)
        fill("server", "client")
        held(node, target.ipv4, 5)  # the policy is to come
        fill("policy", "stranger")
        eventually(lambda: "lost all" not in json.dumps(ask("/v1/healthz", api_socket(pid))), within=60)
        held(node, target.ipv4, 1)
