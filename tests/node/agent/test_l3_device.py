"""A device without Ethernet headers: traffic of pods and of clients outside."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from hive.lab import pods
from hive.lab.node import Lab
from tests.node.agent.masqueraded import echoed, seen_by_tcp_server, seen_by_udp_server
from tests.node.agent.masqueraded import refused as refused_outside
from tests.node.agent.node_ports import (
    ELSEWHERE,
    FAR_PORT,
    IPV6_MTU,
    LONGER_THAN_A_PACKET,
    MEGABYTE,
    NODE,
    NODE_PORT,
    OUTSIDE,
    SETTINGS,
    TARGET,
    answered,
    command,
    datagram,
    give_addresses,
    refused,
    service,
    slices,
)
from tests.support.agents import known_pods, serving, terminated
from tests.support.sockets import opened
from tests.support.tun import tun_wire
from tests.support.waiting import eventually

pytestmark = pytest.mark.node

WAN = {4: "203.0.113.10", 6: "fd53::10"}
"""The node's addresses there."""
CLIENT = {4: "203.0.113.1", 6: "fd53::1"}


@pytest.fixture
def wan(node: Lab) -> Iterator[None]:
    """A tun device of the node with its other end outside."""
    give_addresses(node)
    with node.open() as here, node.open_outside() as there:
        ends = [(here, WAN), (there, CLIENT)]
        with tun_wire("wan", *((where, [f"{own[4]}/24", f"{own[6]}/64"]) for where, own in ends)):
            yield


def start(node: Lab, folder: Path) -> int:
    (folder / "far.yaml").write_text(service("far", FAR_PORT) + slices("far", ELSEWHERE))
    (folder / "none.yaml").write_text(service("none", 30082) + slices("none", {}))
    known_pods(folder, "server", "client")
    return serving(node, f"--manifests-dir={folder}", *SETTINGS)


def serve_pod(node: Lab, folder: Path) -> pods.Attached:
    pod = pods.add(node, "server")
    assert pod.ipv4
    assert pod.ipv6
    (folder / "near.yaml").write_text(service("near", NODE_PORT) + slices("near", {4: pod.ipv4, 6: pod.ipv6}))
    eventually(lambda: answered(node, 4, (WAN[4], NODE_PORT), pod) is not None)
    return pod


def test_a_pod_is_the_node_behind_a_device_without_ethernet(node: Lab, wan: None, tmp_path: Path) -> None:
    serving(node, "--enable-ipv6=true", "--ipv6-range=fd00:5::/112")
    pod = pods.add(node, "client")
    for version in (4, 6):
        assert seen_by_tcp_server(node, pod, version, CLIENT) == WAN[version]
        for size in (100, LONGER_THAN_A_PACKET):
            assert seen_by_udp_server(node, pod, version, size, CLIENT) == WAN[version]
        assert echoed(node, pod, version, CLIENT)
        assert refused_outside(node, pod, version, CLIENT)
        # By the other device with that one's address.
        assert seen_by_tcp_server(node, pod, version) == NODE[version]


def test_clients_come_by_a_device_without_ethernet(node: Lab, wan: None, tmp_path: Path) -> None:
    pid = start(node, tmp_path)
    pod = serve_pod(node, tmp_path)

    def served() -> None:
        for version in (4, 6):
            near, far = (WAN[version], NODE_PORT), (WAN[version], FAR_PORT)
            assert answered(node, version, near, pod, MEGABYTE) == (CLIENT[version], WAN[version])
            assert answered(node, version, far, None, MEGABYTE) == (NODE[version], WAN[version])
            for size in (100, LONGER_THAN_A_PACKET):
                assert datagram(node, version, near, pod, size) == CLIENT[version]
                assert datagram(node, version, far, None, size) == NODE[version]
            assert refused(node, version, near, socket.SOCK_DGRAM)
            assert refused(node, version, near, socket.SOCK_STREAM)
            assert refused(node, version, (WAN[version], 30082), socket.SOCK_STREAM)

    served()
    # Backends behind it are reached from the other device, too.
    with node.open() as here:
        for version, ip in ELSEWHERE.items():
            here.run(command, f"-{version} route replace {ip} via {CLIENT[version]}")
    for version in (4, 6):
        far = NODE[version], FAR_PORT
        assert answered(node, version, far, None, MEGABYTE) == (NODE[version], NODE[version])
        assert datagram(node, version, far, None, 100) == NODE[version]
        assert answered(node, version, (NODE[version], NODE_PORT), pod) == (OUTSIDE[version], NODE[version])
    # The next agent has them in force before it looks at devices, and goes on.
    terminated(node, pid)
    assert answered(node, 4, (WAN[4], NODE_PORT), pod) == (CLIENT[4], WAN[4])
    start(node, tmp_path)
    served_again = answered(node, 6, (WAN[6], NODE_PORT), pod)
    assert served_again == (CLIENT[6], WAN[6])


def test_with_dsr_packets_to_a_backend_carry_the_service_address(
    node: Lab, wan: None, tmp_path: Path
) -> None:
    (tmp_path / "far.yaml").write_text(service("far", FAR_PORT) + slices("far", ELSEWHERE))
    mode = "--routing-mode=native", "--bpf-lb-mode=dsr"
    serving(node, f"--manifests-dir={tmp_path}", *SETTINGS, *mode)
    with node.open_outside() as outside:
        # The backend is where the client is, and has to take packets that come from itself.
        outside.run(Path("/proc/sys/net/ipv4/conf/node/accept_local").write_text, "1")
        for size in (100, LONGER_THAN_A_PACKET):
            with (
                opened(outside, 4, socket.SOCK_DGRAM) as server,
                opened(outside, 4, socket.SOCK_DGRAM) as client,
            ):
                server.bind((ELSEWHERE[4], TARGET))
                client.sendto(bytes(size), (WAN[4], FAR_PORT))
                question, sender = server.recvfrom(size + 1)
                assert (len(question), sender[0]) == (size, CLIENT[4])
        with opened(outside, 6, socket.SOCK_DGRAM) as client:
            client.connect((WAN[6], FAR_PORT))
            client.send(bytes(1500 - 48))
            eventually(lambda: client.getsockopt(socket.IPPROTO_IPV6, IPV6_MTU) == 1500 - 24)
