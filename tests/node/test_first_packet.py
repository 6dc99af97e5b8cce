"""A pod's first packet is not lost: the network works once the pod has its address."""

from __future__ import annotations

import socket

import pytest

from hive.lab import pods
from hive.lab.children import Stop
from hive.lab.node import Lab
from hive.lab.traffic.probe import ping

pytestmark = pytest.mark.node
PODS = 25  # one in three lost its first packet when the link's ends came up in the wrong order


def speak_at_once(stop: Stop, target: str) -> list[float]:
    """Send to ``target`` the moment there is a route to it; seconds until the answer, or nothing."""
    while not stop.wait(0):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            if not sock.connect_ex((target, 9)):
                return ping(target, 1)
    return []


@pytest.mark.parametrize("target", ["pod", "node"])
def test_the_first_packet_of_a_pod_is_answered(lab: Lab, target: str) -> None:
    first = pods.add(lab, "first")
    unanswered = []
    for number in range(PODS):
        name = f"pod-{number}"
        lab.hold_pod(name)
        with lab.open_pod(name) as pod:
            speaking = pod.start(speak_at_once, first.ipv4 if target == "pod" else first.gateway)
            pods.call(lab, name, "ADD")
            if not speaking.result(within=60):
                unanswered.append(name)
    assert unanswered == []
