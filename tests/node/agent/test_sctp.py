"""SCTP through services and out of the node, as real packets: the kernel may lack SCTP."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path

import pytest
from scapy.layers.sctp import SCTP, SCTPChunkData

from hive.lab import agent_process, pods
from hive.lab.namespaces import Namespaces
from hive.lab.node import Lab
from tests.node.agent.node_ports import ELSEWHERE, FAR_PORT, NODE, OUTSIDE, give_addresses
from tests.node.agent.node_ports import NODE_PORT as PORT
from tests.support.agents import known_pods, serving
from tests.support.sockets import opened
from tests.support.waiting import eventually

pytestmark = pytest.mark.node

VIP = {4: "10.96.0.32", 6: "fd00:96::32"}
CLIENT_PORT = 40132
SETTINGS = (
    *("--enable-ipv6=true", "--ipv6-range=fd00:5::/112", "--enable-sctp=true"),
    "--kube-proxy-replacement=true",
)
ONE_PACKET, SEVERAL = 100, 3000
"""Bytes of a message that fits into a packet, and of one that takes fragments."""


def manifest(
    name: str, vip: dict[int, str], port: int, backends: dict[int, str], target: int | None = None
) -> str:
    """A service and its slices; node port, port and target are one, as SCTP needs it."""
    text = f"""
apiVersion: v1
kind: Service
metadata: {{name: {name}, namespace: shop}}
spec:
  type: NodePort
  clusterIP: {vip[4]}
  clusterIPs: ["{vip[4]}", "{vip[6]}"]
  ipFamilies: [IPv4, IPv6]
  ports: [{{name: sctp, port: {port}, nodePort: {port}, targetPort: {target or port}, protocol: SCTP}}]
---"""
    for version, ip in backends.items():
        text += f"""
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{name: {name}-{version}, namespace: shop, labels: {{kubernetes.io/service-name: {name}}}}}
addressType: IPv{version}
endpoints: [{{addresses: ["{ip}"]}}]
ports: [{{name: sctp, port: {target or port}, protocol: SCTP}}]
---"""
    return text


class Speaker:
    """An end that sends SCTP from one port and hears what comes to it."""

    def __init__(self, sock: socket.socket, version: int, port: int) -> None:
        self._socket = sock
        self._version = version
        self._port = port

    def override(self, to: str, port: int, text: bytes) -> None:
        """One packet, with its checksum."""
        self._socket.sendto(
            bytes(SCTP(sport=self._port, dport=port, tag=7) / SCTPChunkData(data=text)), (to, 0)
        )

    def hear(self) -> tuple[str, int, bytes]:
        """Sender and message at this port: address, port and message. Raises TimeoutError.

        A packet with a wrong checksum is ignored, as an SCTP stack does.
        """
        while True:
            packet, peer = self._socket.recvfrom(65535)
            heard = packet[(packet[0] & 15) * 4 :] if self._version == 4 else packet
            spoken = SCTP(heard)
            if spoken.dport == self._port and bytes(spoken) == bytes(_summed(spoken)):
                return str(ip_address(peer[0])), spoken.sport, bytes(spoken[SCTPChunkData].data)


def _summed(packet: SCTP) -> SCTP:
    again = packet.copy()
    del again.chksum
    return again


@contextmanager
def speaking(where: Namespaces, version: int, port: int, own: str = "") -> Iterator[Speaker]:
    with opened(where, version, socket.SOCK_RAW, socket.IPPROTO_SCTP) as sock:
        if own:
            sock.bind((own, 0))
        yield Speaker(sock, version, port)


def exchanged(
    client: Speaker, to: tuple[str, int], server: Speaker, size: int
) -> tuple[tuple[str, int], tuple[str, int]]:
    """A message and its answer: the peer that the server saw, and the one that the client saw."""
    question = bytes(range(256)) * (size // 256) + bytes(size % 256)
    client.override(*to, question)
    peer, port, heard = server.hear()
    assert heard == question
    server.override(peer, port, question[::-1])
    answerer, answered_from, answer = client.hear()
    assert answer == question[::-1]
    return (peer, port), (answerer, answered_from)


@pytest.fixture
def server(node: Lab, tmp_path: Path) -> pods.Attached:
    """A pod that SCTP services lead to."""
    give_addresses(node)
    known_pods(tmp_path, "client", "server")
    serving(node, f"--manifests-dir={tmp_path}", *SETTINGS)
    pod = pods.add(node, "server")
    pods.add(node, "client")
    assert pod.ipv4
    assert pod.ipv6
    (tmp_path / "near.yaml").write_text(manifest("near", VIP, PORT, {4: pod.ipv4, 6: pod.ipv6}))
    far = {4: "10.96.0.33", 6: "fd00:96::33"}
    (tmp_path / "far.yaml").write_text(manifest("far", far, FAR_PORT, ELSEWHERE))
    return pod


def test_sctp_reaches_pods_by_services_and_the_world_by_the_node(
    node: Lab, server: pods.Attached, tmp_path: Path
) -> None:
    with node.open_pod("server") as there, node.open_pod("client") as pod, node.open_outside() as outside:
        for version in (4, 6):
            with (
                speaking(there, version, PORT) as serves,
                speaking(pod, version, CLIENT_PORT) as inside,
                speaking(outside, version, CLIENT_PORT, OUTSIDE[version]) as client,
                speaking(outside, version, FAR_PORT, ELSEWHERE[version]) as elsewhere,
            ):
                near, far = (NODE[version], PORT), (NODE[version], FAR_PORT)
                eventually(lambda: exchanged(client, near, serves, ONE_PACKET))  # noqa: B023
                eventually(lambda: exchanged(client, far, elsewhere, ONE_PACKET))  # noqa: B023
                for size in (ONE_PACKET, SEVERAL):
                    # A cluster address, of a pod: the server sees the pod, and the pod the service.
                    seen, answered = exchanged(inside, (VIP[version], PORT), serves, size)
                    assert seen[1] == CLIENT_PORT
                    assert answered == (VIP[version], PORT)
                    # A node port, from outside: by a pod of the node, and by one elsewhere.
                    seen, answered = exchanged(client, near, serves, size)
                    assert seen == (OUTSIDE[version], CLIENT_PORT)
                    assert answered == near
                    seen, answered = exchanged(client, far, elsewhere, size)
                    assert seen == (NODE[version], CLIENT_PORT)  # its port stays
                    assert answered == far
                    # Out of the node, behind its address.
                    seen, answered = exchanged(inside, (OUTSIDE[version], CLIENT_PORT), client, size)
                    assert seen == (NODE[version], CLIENT_PORT)
                    assert answered == (OUTSIDE[version], CLIENT_PORT)
    (tmp_path / "other.yaml").write_text(
        manifest("other", {4: "10.96.0.34", 6: "fd00:96::34"}, 30090, {}, target=9000)
    )
    eventually(lambda: "9000" in agent_process.log_end(node, 1000))
    assert "SCTP keeps its port" in agent_process.log_end(node, 1000)
