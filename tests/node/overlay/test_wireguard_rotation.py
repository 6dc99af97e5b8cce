"""A node's WireGuard key is rotated while pods of two nodes talk: no packet is lost, whatever agents do."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from hive.client import ask
from hive.lab import agent_process
from hive.lab.children import Child
from hive.lab.cluster import Cluster
from hive.lab.namespaces import inside
from hive.lab.node import Lab
from hive.lab.traffic.flows import Received, Sent, udp_receiver, udp_sender, udp_socket
from hive.lab.traffic.probe import ping
from tests.support.two_nodes import SETTINGS, asked, joined_by_etcd
from tests.support.waiting import eventually

pytestmark = [pytest.mark.node, pytest.mark.timeout(180)]

NAME = f"rotation-{os.getpid()}"
WIREGUARD = ("--enable-wireguard=true", "--enable-wireguard-userspace-fallback=true")
RATE = 250.0
"""Packets a second, each way: buffers hold those of a second, where wireguard-go has to wait."""
ATTEMPTS = 3
"""Where it has to wait for longer, it drops packets, too: one of so many attempts must lose none."""
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


def address(lab: Lab) -> str:
    """Of its pod."""
    endpoints = [one["status"] for one in asked(lab, "/v1/endpoint")]
    (pod,) = (one for one in endpoints if one["external-identifiers"].get("pod-name"))
    return str(pod["networking"]["addressing"][0]["ipv4"])


def reaches(lab: Lab, pod: str, target: str) -> bool:
    with lab.open_pod(pod) as namespaces:
        return bool(namespaces.run(ping, target, 1))


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


def lost(sent: Sent, received: Received) -> int:
    return sent.errors + sent.packets - received.packets


@contextmanager
def talking(cluster: Cluster) -> Iterator[list[int]]:
    """Packets lost from the first node's pod to the second's and back; known once the block is left."""
    first, second = cluster.nodes()
    found: list[int] = []
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
    found += [lost(one, other) for one, other in zip(sent, received, strict=True)]


def lossless(attempt: Callable[[], list[int]]) -> bool:
    """Whether one of the attempts lost nothing."""
    return any(attempt() == [0, 0] for _ in range(ATTEMPTS))


def rotated(lab: Lab, before: str) -> bool:
    now = state(lab)
    return not now["next_key"] and now["public_key"] != before


def test_no_packet_is_lost_while_a_key_is_rotated(cluster: Cluster) -> None:
    first, second = cluster.nodes()

    def attempt(lab: Lab) -> list[int]:
        before = public_key(lab)
        with talking(cluster) as packets:
            rotate(lab)
            eventually(partial(complete, cluster, lab, before))
        assert state(lab)["missed"] == []
        return packets

    assert lossless(partial(attempt, second))
    assert lossless(partial(attempt, first))


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

    def attempt() -> list[int]:
        before = public_key(second)
        with talking(cluster) as packets:
            rotate(second)
            eventually(lambda: MOMENTS[moment](state(second)), every=0.02)
            agent_process.crash(lab)
            start(cluster, lab)
            eventually(partial(complete, cluster, second, before))
        assert state(second)["missed"] == []
        return packets

    assert lossless(attempt)
