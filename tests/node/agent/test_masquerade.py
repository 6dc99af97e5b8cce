"""Pods reach a server outside, which sees the node's address."""

from __future__ import annotations

import subprocess

import pytest

from hive.client import ask
from hive.lab import pods
from hive.lab.agent_process import api_socket
from hive.lab.node import NODE_ADDRESS, Lab
from tests.node.agent.masqueraded import (
    DUAL,
    NODE6,
    OUTSIDE6,
    command,
    echoed,
    refused,
    seen_by_tcp_server,
    seen_by_udp_server,
)
from tests.support.agents import serving, terminated
from tests.support.waiting import eventually

pytestmark = pytest.mark.node

NODE = {4: NODE_ADDRESS, 6: NODE6}
LONGER_THAN_A_PACKET = 5000


def give_ipv6(lab: Lab) -> None:
    """The lab's uplink has IPv4 alone."""
    with lab.open() as node, lab.open_outside() as outside:
        node.run(command, f"address add {NODE6}/64 dev uplink nodad")
        outside.run(command, f"address add {OUTSIDE6}/64 dev node nodad")


def test_a_pod_is_the_node_to_a_server_outside(node: Lab) -> None:
    give_ipv6(node)
    pid = serving(node, *DUAL)
    pod = pods.add(node, "client")
    status = ask("/v1/healthz", api_socket(pid))["masquerading"]
    assert (status["mode"], status["enabledProtocols"]) == ("BPF", {"ipv4": True, "ipv6": True})
    for version in (4, 6):
        assert seen_by_tcp_server(node, pod, version) == NODE[version]
        assert seen_by_udp_server(node, pod, version, 100) == NODE[version]
        assert seen_by_udp_server(node, pod, version, LONGER_THAN_A_PACKET) == NODE[version]
        assert echoed(node, pod, version)
        assert refused(node, pod, version)
    # Another address of the device, and programs that another program detaches: both are followed.
    with node.open() as run:
        run.run(subprocess.check_call, ["tc", "filter", "del", "dev", "uplink", "egress"])
    eventually(lambda: seen_by_tcp_server(node, pod, 4) == NODE_ADDRESS)
    assert terminated(node, pid) == 0
    assert seen_by_tcp_server(node, pod, 4) == NODE_ADDRESS
    serving(node, *DUAL, "--enable-ipv4-masquerade=false", "--enable-ipv6-masquerade=false")
    with node.open_outside() as outside:
        outside.run(command, f"route add {pod.ipv4} via {NODE_ADDRESS}")
    assert seen_by_tcp_server(node, pod, 4) == pod.ipv4
