"""Two nodes that encrypt by wireguard-go: pods reach each other, hosts between see no clear text."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from scapy.layers.inet import IP

from hive.lab import agent_process
from hive.lab.children import Child
from hive.lab.cluster import Cluster
from hive.lab.namespaces import inside
from hive.lab.node import Lab
from hive.lab.traffic.flows import Received, Sent, udp_receiver, udp_sender, udp_socket
from tests.support.two_nodes import SETTINGS, address, asked, captured, joined_by_etcd, reaches
from tests.support.waiting import eventually

pytestmark = pytest.mark.node

NAME = f"wireguard-{os.getpid()}"
WIREGUARD = ("--enable-wireguard=true", "--enable-wireguard-userspace-fallback=true")
PORT = 51871
KEY = Path("/var/run/cilium/cilium_wg0.key")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes with a pod each, a tunnel between them, and etcd."""
    if shutil.which("wireguard-go") is None:
        pytest.fail("wireguard-go is not installed: apt-get install wireguard-go", pytrace=False)
    with joined_by_etcd(NAME, *WIREGUARD) as found:
        yield found


def encryption(lab: Lab) -> dict[str, object]:
    (interface,) = asked(lab, "/v1/healthz")["encryption"]["wireguard"]["interfaces"]
    return dict(interface)


def has_peer(lab: Lab) -> bool:
    return encryption(lab)["peer-count"] == 1


def test_packets_of_pods_are_encrypted_between_the_nodes(cluster: Cluster) -> None:
    first, second = cluster.nodes()
    for lab in (first, second):
        eventually(partial(has_peer, lab))
    target = address(second)
    with first.open() as node:
        capture: Child[list[bytes]] = node.start(captured)
        for _ in range(3):
            eventually(partial(reaches, first, "pod-1-1", target))
        packets = capture.finish(within=60)
    between = [IP(each[14:]) for each in packets if each[12:14] == b"\x08\x00"]
    assert {(each.proto, each.dport) for each in between if each.proto == 17} == {(17, PORT)}
    for pod in (address(first), target):
        raw = bytes(map(int, pod.split(".")))
        assert not any(raw in each for each in packets), "an address of a pod in clear text"


def test_no_packet_is_lost_when_an_agent_is_killed(cluster: Cluster) -> None:
    first, second = cluster.nodes()
    before = encryption(second)["public-key"]
    with first.open_pod("pod-1-1") as one, second.open_pod("pod-2-1") as two:
        with inside(two):
            sock = udp_socket()
        with sock:
            receiver: Child[Received] = two.start(udp_receiver, sock)
            sender: Child[Sent] = one.start(udp_sender, (address(second), sock.getsockname()[1]), 500.0)
            restart(cluster, second)
            sent = sender.finish(within=60)
            received = receiver.finish(within=60)
    assert sent.packets > 200
    assert received.packets == sent.packets
    assert encryption(second)["public-key"] == before


def test_a_node_with_another_key_is_reached_again(cluster: Cluster) -> None:
    first, second = cluster.nodes()
    before = encryption(second)["public-key"]
    with second.open() as node:
        assert node.run(KEY.stat).st_mode & 0o777 == 0o600
        node.run(KEY.unlink)
    restart(cluster, second)
    eventually(lambda: encryption(second)["public-key"] != before)
    eventually(partial(reaches, first, "pod-1-1", address(second)))


def restart(cluster: Cluster, lab: Lab) -> None:
    """Kill the agent of the node, and start another."""
    agent_process.crash(lab)
    pid = agent_process.start(lab, *cluster.settings((*SETTINGS, *WIREGUARD)))
    agent_process.wait_ready(lab, pid)


def test_removed_wireguard_peers_are_restored(cluster: Cluster) -> None:
    first, second = cluster.nodes()
    with first.open() as node:
        node.run(partial(os.system, "ip link delete cilium_wg0"))
    eventually(partial(reaches, first, "pod-1-1", address(second)))
