"""Three nodes and an outside host that sees the egress gateway's address, in either routing mode."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest

from hive.lab import agent_process
from hive.lab.children import Stop
from hive.lab.cluster import TUNNEL, Cluster
from hive.lab.cluster.manifests import node_objects
from hive.lab.namespaces import Namespaces, inside
from hive.lab.node import ROOT, Lab, exclusive
from hive.lab.traffic.flows import tcp_listener, udp_socket
from tests.support.namespaces import need_root
from tests.support.waiting import eventually

pytestmark = pytest.mark.node

NAME = f"egress-{os.getpid()}"
ON = "--enable-ipv4-egress-gateway=true"
NATIVE = ()
RATE = 100.0
SECOND = "192.168.50.77"
"""An address that the first gateway has besides its own."""
LARGE = 1 << 20


class Asked(NamedTuple):
    """From which addresses the host outside has seen questions, and how many had no answer."""

    seen: Counter[str]
    lost: int


def answer(stop: Stop, sock: socket.socket) -> None:
    """Answers each client with the address that it comes from."""
    sock.settimeout(0.2)
    while not stop.wait(0):
        try:
            number, peer = sock.recvfrom(64)
        except TimeoutError:
            continue
        sock.sendto(number + peer[0].encode(), peer)


def ask(stop: Stop, target: tuple[str, int]) -> Asked:
    """One question after the other, at a rate, on one socket."""
    seen: Counter[str] = Counter()
    sent = 0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect(target)
        sock.setblocking(False)

        def take() -> None:
            while True:
                try:
                    seen[sock.recv(64)[8:].decode()] += 1
                except OSError:
                    return

        while not stop.wait(1 / RATE):
            take()
            sock.send(sent.to_bytes(8, "big"))
            sent += 1
        stop.wait(0.3)
        sock.setblocking(True)
        sock.settimeout(0.5)
        try:
            while True:
                seen[sock.recv(64)[8:].decode()] += 1
        except OSError:
            pass
    return Asked(seen, sent - seen.total())


def seen_as(target: tuple[str, int]) -> str:
    """From which address one question comes; empty without an answer."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.settimeout(0.5)
        sock.connect(target)
        try:
            sock.send(bytes(8))
            return sock.recv(64)[8:].decode()
        except OSError:
            return ""


def give(stop: Stop, listener: socket.socket) -> str:
    """Send much to one who connects, once as much has come; from which address it did."""
    listener.settimeout(30)
    connection, peer = listener.accept()
    with connection:
        connection.settimeout(30)
        left = LARGE
        while left and not stop.wait(0):
            left -= len(connection.recv(min(left, 65536)))
        connection.sendall(bytes(LARGE))
    return str(peer[0])


def fetch(target: tuple[str, int]) -> int:
    """Send much, and take what comes; its bytes."""
    found = 0
    with socket.create_connection(target, timeout=30) as sock:
        sock.sendall(bytes(LARGE))
        while octets := len(sock.recv(65536)):
            found += octets
    return found


class EgressScenario:
    """The cluster, its outside and its gateway policies."""

    def __init__(self, cluster: Cluster, outside: Namespaces) -> None:
        self.cluster = cluster
        self.labs = cluster.nodes()
        self.host = cluster.place(self.labs[0]).routers[0]
        self.outside = outside
        with inside(outside):
            self.socket = udp_socket()
        self.target = (self.host, self.socket.getsockname()[1])

    def address(self, number: int) -> str:
        """Of a node."""
        return self.cluster.place(self.labs[number - 1]).ipv4

    def choose(self, *gateways: int) -> None:
        """These nodes may be gateways."""
        objects: list[dict[str, Any]] = []
        for number, lab in enumerate(self.labs, start=1):
            for one in node_objects(lab, self.cluster.place(lab)):
                labels = one["metadata"]["labels"] | ({"egress": "yes"} if number in gateways else {})
                objects.append(one | {"metadata": one["metadata"] | {"labels": labels}})
        self.cluster.manifests.write("nodes", objects)

    def have_leave(self, excluded: tuple[str, ...] = (), **gateway: str) -> None:
        """Have the first node's pod leave by a gateway."""
        spec = {
            "selectors": [{"podSelector": {"matchLabels": {"app": "a"}}}],
            "destinationCIDRs": ["0.0.0.0/0"],
            "excludedCIDRs": list(excluded),
            "egressGateway": {"nodeSelector": {"matchLabels": {"egress": "yes"}}, **gateway},
        }
        kind = {"apiVersion": "cilium.io/v2", "kind": "CiliumEgressGatewayPolicy"}
        self.cluster.manifests.write("leave", [{**kind, "metadata": {"name": "leave"}, "spec": spec}])

    def start(self, mode: tuple[str, ...]) -> None:
        """Agents in this mode, in place of others."""
        for lab in self.labs:
            if agent_process.running(lab) is not None:
                agent_process.crash(lab)
        pids = {lab: agent_process.start(lab, *self.cluster.settings((*mode, ON))) for lab in self.labs}
        for lab, pid in pids.items():
            agent_process.wait_ready(lab, pid)


@pytest.fixture(scope="module")
def scenario() -> Iterator[EgressScenario]:
    """Three nodes, a pod on the first, and a host outside that answers."""
    need_root()
    cluster = Cluster(NAME)
    try:
        with exclusive():
            cluster.make(3, 1)
        with cluster.network.open() as outside:
            found = EgressScenario(cluster, outside)
            found.choose(2, 3)
            found.start((TUNNEL,))
            with exclusive():
                cluster.add_pod(found.labs[0], "a")
            with found.socket:
                child = outside.start(answer, found.socket)
                yield found
                child.finish(within=30)
    finally:
        with exclusive():
            cluster.remove(cluster.nodes())
    assert not list(ROOT.glob(f"{NAME}*"))


def add_address(lab: Lab, ip: str) -> None:
    """Give the node another address."""
    with lab.open() as node:
        assert node.popen(["ip", "address", "replace", f"{ip}/24", "dev", "uplink"]).wait(30) == 0


@pytest.mark.parametrize("mode", [(TUNNEL,), NATIVE], ids=["tunnel", "native"])
def test_a_pod_leaves_by_its_gateway_and_the_next_one_takes_over(
    scenario: EgressScenario, mode: tuple[str, ...]
) -> None:
    if mode != (TUNNEL,):
        scenario.start(mode)
    scenario.choose(2, 3)
    with scenario.labs[0].open_pod("a") as pod, ExitStack() as stack:

        def leaves_from(address: str) -> None:
            eventually(lambda: pod.run(seen_as, scenario.target) == address, within=30)

        scenario.have_leave(excluded=(f"{scenario.host}/32",))
        leaves_from(scenario.address(1))
        scenario.have_leave()
        leaves_from(scenario.address(2))
        with inside(scenario.outside):
            listener = stack.enter_context(tcp_listener())
        giving = scenario.outside.start(give, listener)
        assert pod.run(fetch, (scenario.host, listener.getsockname()[1])) == LARGE
        assert giving.result(within=30) == scenario.address(2)

        asking = pod.start(ask, scenario.target)
        stack.callback(asking.kill)
        scenario.choose(3)
        leaves_from(scenario.address(3))
        found = asking.finish(within=30)
        assert set(found.seen) <= {scenario.address(2), scenario.address(3)}, (
            "from no other address, not for a moment"
        )
        assert found.lost < RATE * 5, "both agents follow within seconds"

        scenario.choose()
        eventually(lambda: pod.run(seen_as, scenario.target) == "", within=30)
        scenario.choose(2)
        scenario.have_leave(egressIP=SECOND)
        add_address(scenario.labs[1], SECOND)
        leaves_from(SECOND)
        scenario.choose(1)
        scenario.have_leave(interface="uplink")
        leaves_from(scenario.address(1))
