"""Rotation of a node's WireGuard key under traffic of two nodes loses no packet."""

from __future__ import annotations

import base64
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import click
import pytest
from scapy.layers.inet import IP, UDP

from hive.client import ask
from hive.lab import agent_process
from hive.lab.children import Child
from hive.lab.cluster import Cluster
from hive.lab.cluster.commands import up_cluster
from hive.lab.namespaces import inside
from hive.lab.node import Lab, exclusive
from hive.lab.traffic.flows import Received, Sent, udp_receiver, udp_sender, udp_socket
from tests.support.agents import serving
from tests.support.two_nodes import SETTINGS, address, asked, captured, joined_by_etcd, reaches
from tests.support.waiting import eventually

pytestmark = [pytest.mark.node, pytest.mark.timeout(180)]

NAME = f"rotation-{os.getpid()}"
WIREGUARD = ("--enable-wireguard=true", "--enable-wireguard-userspace-fallback=true")
RATE = 250.0
"""Packets a second, each way: buffers hold those of a second, where wireguard-go has to wait."""
PATH = "/encryption/rotation"
SECOND = {"cilium_wg1", "cilium_wg2"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes with a pod each, and etcd."""
    if shutil.which("wireguard-go") is None:
        pytest.fail("wireguard-go is not installed: apt-get install wireguard-go", pytrace=False)
    with joined_by_etcd(NAME, *WIREGUARD) as found:
        first, second = found.nodes()
        eventually(partial(reaches, first, pod_of(found, first), address(second)))
        yield found


def pod_of(cluster: Cluster, lab: Lab) -> str:
    return f"pod-{cluster.number(lab)}-1"


def rotate(lab: Lab) -> None:
    pid = agent_process.running(lab)
    assert pid is not None
    ask(PATH, agent_process.api_socket(pid), method="POST")


def state(lab: Lab) -> dict[str, Any]:
    return dict(asked(lab, PATH))


def public_key(lab: Lab) -> str:
    return str(state(lab)["public_key"])


def second_devices(lab: Lab) -> set[str]:
    with lab.open() as node:
        return SECOND & set(node.run(os.listdir, "/sys/class/net"))


def settings(cluster: Cluster) -> list[str]:
    return cluster.settings((*SETTINGS, *WIREGUARD))


def start(cluster: Cluster, lab: Lab) -> None:
    agent_process.wait_ready(lab, agent_process.start(lab, *settings(cluster)))


def complete(cluster: Cluster, lab: Lab, before: str) -> bool:
    """Whether the node has another key, and no node a second device."""
    return rotated(lab, before) and not any(map(second_devices, cluster.nodes()))


def losses(flows: dict[str, tuple[Sent, Received]], cluster: Cluster) -> list[str]:
    """What was lost, by flow, and what the nodes' programs and devices know about it."""
    found = [
        f"{flow}: {sent}, {received}"
        for flow, (sent, received) in flows.items()
        if sent.errors or sent.packets != received.packets
    ]
    return found + [known_of_losses(lab) for lab in cluster.nodes() if found]


def known_of_losses(lab: Lab) -> str:
    dropped = {
        (one["labels"]["direction"], one["labels"]["reason"]): one["value"]
        for one in asked(lab, "/v1/metrics/")
        if one["name"] == "cilium_drop_count_total"
    }
    with lab.open() as node:
        devices = node.run(Path("/proc/net/dev").read_text)
    return f"{lab.name}: {dropped}\n{devices}"


@contextmanager
def talking(cluster: Cluster) -> Iterator[list[str]]:
    """Losses of packets from the first node's pod to the second's and back; known once the block is left."""
    first, second = cluster.nodes()
    found: list[str] = []
    there, back = address(second), address(first)
    with first.open_pod(pod_of(cluster, first)) as one, second.open_pod(pod_of(cluster, second)) as two:
        with inside(one):
            own = udp_socket()
        with inside(two):
            other = udp_socket()
        with own, other:
            receivers: list[Child[Received]] = [two.start(udp_receiver, other), one.start(udp_receiver, own)]
            senders: list[Child[Sent]] = [
                one.start(udp_sender, (there, other.getsockname()[1]), RATE),
                two.start(udp_sender, (back, own.getsockname()[1]), RATE),
            ]
            try:
                yield found
                sent = [each.finish(within=60) for each in senders]
                received = [each.finish(within=60) for each in receivers]
            finally:
                for one_sender in senders:
                    one_sender.kill()
                for one_receiver in receivers:
                    one_receiver.kill()
    assert min(one.packets for one in sent) > RATE
    found += losses(dict(zip(("there", "back"), zip(sent, received, strict=True), strict=True)), cluster)


def rotated(lab: Lab, before: str) -> bool:
    now = state(lab)
    return not now["next_key"] and now["public_key"] != before


def rotation(cluster: Cluster, lab: Lab) -> list[str]:
    """What is lost while the key of a node is rotated."""
    before = public_key(lab)
    with talking(cluster) as packets:
        rotate(lab)
        eventually(partial(complete, cluster, lab, before))
    assert state(lab)["missed"] == []
    return packets


def test_no_packet_is_lost_while_a_key_is_rotated(cluster: Cluster) -> None:
    for lab in cluster.nodes():
        assert rotation(cluster, lab) == []


def test_no_packet_is_lost_in_native_routing_with_encrypted_nodes() -> None:
    with joined_by_etcd(f"{NAME}-native", *WIREGUARD, "--encrypt-node=true", tunnel=False) as cluster:
        first, second = cluster.nodes()
        eventually(partial(reaches, first, pod_of(cluster, first), address(second)))
        assert rotation(cluster, second) == []


def test_no_packet_is_lost_in_strict_mode() -> None:
    """A packet that no device takes is dropped there: it may not leave in clear text."""
    strict = ("--enable-encryption-strict-mode=true", "--encryption-strict-mode-cidr=10.244.0.0/16")
    with joined_by_etcd(f"{NAME}-strict", *WIREGUARD, *strict, tunnel=False) as cluster:
        first, second = cluster.nodes()
        eventually(partial(reaches, first, pod_of(cluster, first), address(second)))
        with first.open() as node:
            capture: Child[list[bytes]] = node.start(captured)
            assert rotation(cluster, second) == []
            packets = capture.finish(within=60)
    assert [each for each in packets if b"\x0a\xf4" in each[26:34]] == [], "a pod's address in clear text"


def test_pods_packets_are_encrypted_by_all_devices_while_a_key_is_rotated(cluster: Cluster) -> None:
    first, second = cluster.nodes()
    pods = [ip_address(address(lab)).packed for lab in (first, second)]
    with first.open() as node:
        capture: Child[list[bytes]] = node.start(captured)
        rotation(cluster, second)
        packets = capture.finish(within=60)
    between = [IP(each[14:]) for each in packets if each[12:14] == b"\x08\x00"]
    ports = Counter(each[UDP].dport for each in between if UDP in each)
    assert ports.keys() == {51871, 51872, 51873}
    assert min(ports.values()) > RATE / 2, "each step waits a second for packets on their way"
    assert not any(pod in each for each in packets for pod in pods), "an address of a pod in clear text"


MOMENTS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "it is announced": lambda _: True,
    "packets leave by the second devices": lambda now: now["step"] == "announced" and not now["waits_for"],
    "the next key is in force": lambda now: now["step"] == "in force",
    "packets leave by the first devices": lambda now: now["step"] == "in force" and not now["waits_for"],
}
"""When an agent is killed, by the state of the rotation."""


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("killed", ["the node with the new key", "the other node"])
def test_a_rotation_is_completed_when_an_agent_is_killed(cluster: Cluster, killed: str, moment: str) -> None:
    first, second = cluster.nodes()
    lab = second if killed == "the node with the new key" else first

    before = public_key(second)
    with talking(cluster) as packets:
        rotate(second)
        eventually(lambda: MOMENTS[moment](state(second)), every=0.02)
        agent_process.crash(lab)
        start(cluster, lab)
        eventually(partial(complete, cluster, second, before))
    assert (state(second)["missed"], packets) == ([], [])


def begins_rotation(lab: Lab) -> bool:
    """Whether it does; it refuses until all nodes are known, and while another one rotates its key."""
    rotate(lab)
    return True


def test_keys_of_two_nodes_are_rotated_one_after_the_other(cluster: Cluster) -> None:
    nodes = cluster.nodes()

    before = {lab: public_key(lab) for lab in nodes}
    with talking(cluster) as packets:
        with ThreadPoolExecutor() as pool:  # before either knows of the other, or one is refused at first
            list(pool.map(lambda lab: eventually(partial(begins_rotation, lab)), nodes))
        for lab in nodes:
            eventually(partial(complete, cluster, lab, before[lab]))
    assert ([state(lab)["missed"] for lab in nodes], packets) == ([[], []], [])


def test_a_node_that_joins_during_a_rotation_takes_part(cluster: Cluster) -> None:
    first, second = cluster.nodes()
    before = public_key(second)
    agent_process.crash(first)
    rotate(second)
    eventually(lambda: state(second)["waits_for"] == [f"default/{first.name}"])
    up_cluster(cluster, 3, 1, 1, (*SETTINGS, *WIREGUARD), etcd=True)  # it starts the first node's agent, too
    third = cluster.nodes()[2]
    try:
        eventually(partial(complete, cluster, second, before))
        assert state(second)["missed"] == []
        eventually(partial(reaches, third, pod_of(cluster, third), address(second)))
    finally:
        with exclusive():
            cluster.remove([third])


KEYS = ("network.cilium.io/wg-pub-key", "network.cilium.io/hive-wg-rotation")


def other_node(name: str, number: int, *values: str) -> dict[str, Any]:
    """Its CiliumNode, with these values of the annotations in KEYS."""
    return {
        "apiVersion": "cilium.io/v2",
        "kind": "CiliumNode",
        "metadata": {"name": name, "annotations": dict(zip(KEYS, values, strict=False))},
        "spec": {
            "addresses": [{"type": "InternalIP", "ip": f"192.0.2.{number}"}],
            "ipam": {"podCIDRs": [f"10.9.{number}.0/24"]},
            "encryption": {"key": 255},
        },
    }


def key(number: int) -> str:
    return base64.b64encode(bytes([9, *bytes(30), number])).decode()


def known(lab: Lab) -> set[str]:
    return {one["name"] for one in asked(lab, "/v1/cluster/nodes").get("nodes-added", [])}


def test_nodes_of_cilium_are_not_waited_for_and_others_are(node: Lab, tmp_path: Path) -> None:
    folder = tmp_path / "objects"
    folder.mkdir()
    (folder / "cilium.json").write_text(json.dumps(other_node("cilium", 2, key(2))))
    serving(node, f"--manifests-dir={folder}", *WIREGUARD, "--enable-l7-proxy=false")
    eventually(lambda: "default/cilium" in known(node))
    before = public_key(node)
    eventually(partial(begins_rotation, node))
    eventually(lambda: rotated(node, before))
    assert state(node)["missed"] == []
    away = folder / "away.json"
    away.write_text(json.dumps(other_node("away", 3, key(3), "ready")))
    eventually(lambda: "default/away" in known(node))
    before = public_key(node)
    rotate(node)
    eventually(lambda: state(node)["waits_for"] == ["default/away"])
    with pytest.raises(click.ClickException, match="runs already, step: announced"):
        rotate(node)
    away.unlink()
    eventually(lambda: rotated(node, before))
    away.write_text(json.dumps(other_node("away", 3, key(3), key(4))))
    eventually(lambda: second_devices(node) == {"cilium_wg2"})
    with pytest.raises(click.ClickException, match="one after the other: wait for default/away"):
        rotate(node)
    away.unlink()
    eventually(lambda: not second_devices(node))
