"""Services with backends on another node, and masquerading, by direct routing and through the tunnel.

Two nodes with a pod each; a client outside is a neighbour of the nodes. The agents restart for each mode.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from hive.lab import agent_process
from hive.lab.cluster import TUNNEL, Cluster
from hive.lab.namespaces import Namespaces
from hive.lab.node import ROOT, Lab, exclusive
from tests.support.namespaces import need_root
from tests.support.sockets import FAMILY, opened, seen_by_server
from tests.support.two_nodes import OUTSIDE
from tests.support.waiting import eventually

pytestmark = pytest.mark.node
TARGET = 8080
OWN = ("", TARGET)

NAME = f"across-{os.getpid()}"
UNSERVED = 3
"""The number of a service without endpoints."""
SETTINGS = ("--enable-ipv6=true", "--enable-node-port=true", "--enable-ipv6-masquerade=true")
ROUTED = "--kube-proxy-replacement=true"
"""Pods and devices pass each other packets, past the host's stack."""
MODES = {
    "native-snat": (),
    "native-dsr": ("--bpf-lb-mode=dsr",),
    "tunnel-snat": (TUNNEL,),
    "routed-dsr": (ROUTED, "--bpf-lb-mode=dsr"),
    "routed-tunnel": (ROUTED, TUNNEL),
}
ANSWERED = 1 << 18
"""Bytes that go each way: many packets, some as large as they may be."""


def service(number: int) -> str:
    """Of the pod of that node."""
    return f"""
apiVersion: v1
kind: Service
metadata: {{name: pod-{number}, namespace: default}}
spec:
  type: NodePort
  clusterIP: {cluster_ip(number, 4)}
  clusterIPs: ["{cluster_ip(number, 4)}", "{cluster_ip(number, 6)}"]
  ipFamilies: [IPv4, IPv6]
  ports:
  - {{name: tcp, port: {TARGET}, nodePort: {node_port(number)}, protocol: TCP}}
  - {{name: udp, port: {TARGET}, nodePort: {node_port(number)}, protocol: UDP}}
---"""


def slices(number: int, addresses: dict[int, str]) -> str:
    return "".join(
        f"""
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  name: pod-{number}-{version}
  namespace: default
  labels: {{kubernetes.io/service-name: pod-{number}}}
addressType: IPv{version}
endpoints: [{{addresses: ["{ip}"]}}]
ports: [{{name: tcp, port: {TARGET}, protocol: TCP}}, {{name: udp, port: {TARGET}, protocol: UDP}}]
---"""
        for version, ip in addresses.items()
    )


def cluster_ip(number: int, version: int) -> str:
    return f"10.96.0.{number}" if version == 4 else f"fd00:96::{number}"


def node_port(number: int) -> int:
    return 30080 + number


class World:
    """The nodes, their pods' addresses by family, and the client outside."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.pods: list[dict[int, str]] = []

    @property
    def nodes(self) -> list[Lab]:
        return self.cluster.nodes()

    def node(self, number: int, version: int) -> str:
        place = self.cluster.place(self.nodes[number - 1])
        return place.ipv4 if version == 4 else place.ipv6

    @contextmanager
    def pod(self, number: int) -> Iterator[Namespaces]:
        with self.nodes[number - 1].open_pod(f"pod-{number}") as found:
            yield found

    def start(self, *settings: str) -> None:
        wanted = self.cluster.settings((*settings, *SETTINGS))
        for lab in self.nodes:
            agent_process.crash(lab)
        pids = {lab: agent_process.start(lab, *wanted) for lab in self.nodes}
        for lab, pid in pids.items():
            agent_process.wait_ready(lab, pid)


@pytest.fixture(scope="module")
def made() -> Iterator[World]:
    need_root()
    found = World(Cluster(NAME))
    try:
        with exclusive():
            found.cluster.make(2, 1)
        found.start()
        for number, lab in enumerate(found.nodes, 1):
            pod = found.cluster.add_pod(lab, f"pod-{number}")
            assert pod.ipv4
            assert pod.ipv6
            found.pods.append({4: pod.ipv4, 6: pod.ipv6})
        text = "".join(service(number) + slices(number, found.pods[number - 1]) for number in (1, 2))
        found.cluster.manifests.copy("services.yaml", text + service(UNSERVED))
        yield found
    finally:
        with exclusive():
            found.cluster.remove(found.nodes)
    assert not list(ROOT.glob(f"{NAME}*"))


@pytest.fixture(
    scope="module",
    params=MODES,
)
def world(request: pytest.FixtureRequest, made: World) -> World:
    """The agents, started anew in that mode, once they know of each other and of the services."""
    mode = str(request.param)
    made.start(*MODES[mode])
    for version in (4, 6):
        for number, other in ((1, 2), (2, 1)):
            to = (made.pods[other - 1][version], TARGET)
            port = (made.node(number, version), node_port(other))
            with made.pod(number) as pod, made.pod(other) as server, made.cluster.network.open() as outside:
                eventually(partial(by_tcp, pod, server, version, to))
                eventually(partial(by_tcp, outside, server, version, port))
    return made


def by_tcp(client: Namespaces, server: Namespaces, version: int, to: tuple[str, int], size: int = 1) -> str:
    """The client that the server saw; empty without an answer."""
    seen: list[str] = []
    with (
        opened(server, version, socket.SOCK_STREAM) as listener,
        opened(client, version, socket.SOCK_STREAM) as asking,
    ):
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("", TARGET))
        listener.listen()

        def serve() -> None:
            try:
                connection, peer = listener.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(5)
                read(connection, size)
                connection.sendall(bytes(size))
                seen.append(str(peer[0]))

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            asking.connect(to)
            asking.sendall(bytes(size))
            whole = read(asking, size)
            peer = str(asking.getpeername()[0])
        except OSError:
            return ""
        finally:
            thread.join()
    assert peer == to[0]
    return seen[0] if whole and seen else ""


def read(sock: socket.socket, size: int) -> bool:
    while size:
        try:
            chunk = sock.recv(size)
        except OSError:
            return False
        if not chunk:
            return False
        size -= len(chunk)
    return True


def seen(world: World, node: int, version: int, mode: str) -> set[str]:
    """The address that a backend on the other node may see, for an external client of this node."""
    if mode in {"native-dsr", "routed-dsr"}:
        return {OUTSIDE[version]}
    if mode == "native-snat":
        return {world.node(node, version)}
    with world.nodes[node - 1].open() as inside_node:
        return set(inside_node.run(own_addresses, version))


def own_addresses(version: int) -> list[str]:
    from pyroute2 import IPRoute

    with IPRoute() as ip:
        return [
            row.get_attr("IFA_LOCAL") or row.get_attr("IFA_ADDRESS")
            for row in ip.get_addr(family=FAMILY[version])
        ]


def mode_of(request: pytest.FixtureRequest) -> str:
    return str(request.node.callspec.params["world"])


@pytest.mark.parametrize("version", [4, 6])
def test_clients_outside_reach_backends_of_another_node(
    world: World, version: int, request: pytest.FixtureRequest
) -> None:
    for node, backend in ((1, 2), (2, 1)):
        to = (world.node(node, version), node_port(backend))
        allowed = seen(world, node, version, mode_of(request))
        with world.pod(backend) as server, world.cluster.network.open() as outside:
            assert by_tcp(outside, server, version, to, ANSWERED) in allowed
            assert seen_by_server(outside, server, version, OWN, to, 1000) in allowed


@pytest.mark.parametrize("version", [4, 6])
def test_backends_of_the_node_asked_see_the_client_itself(world: World, version: int) -> None:
    for node in (1, 2):
        to = (world.node(node, version), node_port(node))
        with world.pod(node) as server, world.cluster.network.open() as outside:
            assert by_tcp(outside, server, version, to, ANSWERED) == OUTSIDE[version]
            assert seen_by_server(outside, server, version, OWN, to, 1000) == OUTSIDE[version]


@pytest.mark.parametrize("version", [4, 6])
def test_pods_reach_services_of_another_node_as_who_they_are(world: World, version: int) -> None:
    for number, other in ((1, 2), (2, 1)):
        to = (cluster_ip(other, version), TARGET)
        with world.pod(number) as client, world.pod(other) as server:
            assert by_tcp(client, server, version, to, ANSWERED) == world.pods[number - 1][version]
            assert seen_by_server(client, server, version, OWN, to, 1000) == world.pods[number - 1][version]


@pytest.mark.parametrize("version", [4, 6])
def test_pods_reach_node_ports_of_both_nodes(world: World, version: int) -> None:
    for node in (1, 2):
        to = (world.node(node, version), node_port(2))
        with world.pod(1) as client, world.pod(2) as server:
            assert by_tcp(client, server, version, to, ANSWERED)
            assert seen_by_server(client, server, version, OWN, to, 1000)


@pytest.mark.parametrize("version", [4, 6])
def test_pods_of_both_nodes_are_masqueraded_to_who_is_outside(world: World, version: int) -> None:
    for number in (1, 2):
        to = (OUTSIDE[version], TARGET)
        with world.pod(number) as client, world.cluster.network.open() as outside:
            assert by_tcp(client, outside, version, to, ANSWERED) == world.node(number, version)
            assert seen_by_server(client, outside, version, OWN, to, 1000) == world.node(number, version)


@pytest.mark.parametrize("version", [4, 6])
def test_node_ports_without_endpoints_refuse_pods_of_both_nodes_and_clients_outside(
    world: World, version: int
) -> None:
    for node in (1, 2):
        to = (world.node(node, version), node_port(UNSERVED))
        with world.pod(1) as pod, world.cluster.network.open() as outside:
            assert [refused(client, version, to) for client in (pod, outside)] == ["TCP UDP", "TCP UDP"]


def refused(client: Namespaces, version: int, to: tuple[str, int]) -> str:
    """By which protocols a client is refused."""
    found = []
    for name, kind in (("TCP", socket.SOCK_STREAM), ("UDP", socket.SOCK_DGRAM)):
        with opened(client, version, kind) as asking:
            try:
                asking.connect(to)
                asking.send(b"?")
                asking.recv(1)
            except ConnectionRefusedError:
                found.append(name)
            except TimeoutError:
                pass
    return " ".join(found)
