"""Our plugin chained after Debian's: traffic, policy, restarts, and complete removal."""

from __future__ import annotations

import json
import socket
import subprocess
from ipaddress import ip_address, ip_network
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

from hive.lab.namespaces import inside
from hive.lab.node import NODE_ADDRESS, Lab
from hive.lab.traffic.probe import ping, tcp_echo, tcp_echo_server
from tests.node.agent.conversations import conversation, enforce, is_cut
from tests.node.chaining.chained import BRIDGE, SUBNET, chained, endpoints, network, reaches
from tests.support.agents import serving, terminated
from tests.support.chain import Chain, ChainError
from tests.support.points import EVERY
from tests.support.traffic import lossless_traffic
from tests.support.waiting import eventually

pytestmark = pytest.mark.node

HOST_PORT = 8080


PTP = {"type": "ptp"}


def links(lab: Lab) -> set[str]:
    """Names of the node's links."""
    with lab.open() as node:
        shown = node.run(_links)
    return set(shown)


def _links() -> list[str]:
    done = subprocess.run(["ip", "-j", "link"], check=True, capture_output=True)
    return [link["ifname"] for link in json.loads(done.stdout)]


@pytest.mark.parametrize("plugin", [BRIDGE, PTP] if EVERY else [BRIDGE], ids=itemgetter("type"))
def test_pods_of_another_plugin_have_endpoints_and_policy(node: Lab, plugin: dict[str, Any]) -> None:
    network(node, plugin)
    before = links(node)
    pid = chained(node)
    chain = Chain.written(node)
    assert [entry["type"] for entry in chain.network["plugins"]] == [plugin["type"], "cilium-cni"]
    one, other = chain.add("one"), chain.add("other")
    for pod in one, other:
        chain.check(pod.pod)
        assert ip_address(pod.ipv4) in ip_network(SUBNET)
    shown = {each["status"]["networking"]["addressing"][0]["ipv4"]: each["status"] for each in endpoints(pid)}
    assert shown.keys() == {one.ipv4, other.ipv4}
    assert all(each["networking"]["interface-name"].startswith("veth") for each in shown.values())

    # As without us: pod to pod, pod to node, node to pod, to and from the world.
    gateway = one.result["ips"][0]["gateway"]
    for target in (other.ipv4, gateway, NODE_ADDRESS):
        assert reaches(node, "one", target), target
    eventually(lambda: reaches(node, "one", other.ipv6))  # not before the addresses are unique
    with node.open() as here:
        assert here.run(ping, one.ipv4, 1)
        eventually(lambda: here.run(ping, one.ipv6, 1, 0.5))

    with (
        node.open_pod("one") as source,
        node.open_pod("other") as target,
        lossless_traffic(source, target, other.ipv4),  # through a restart, too
    ):
        assert terminated(node, pid) == 0
        pid = chained(node)
    assert {each["status"]["networking"]["addressing"][0]["ipv4"] for each in endpoints(pid)} == shown.keys()

    with conversation(node, one.attached, other.attached) as talk:
        assert enforce(pid, "always") == 200
        is_cut(node, talk)
    assert not reaches(node, "one", NODE_ADDRESS, 0.3)
    assert not reaches(node, "other", one.ipv4, 0.3)
    assert not reaches(node, "other", one.ipv6, 0.3)
    assert enforce(pid, "default") == 200
    assert reaches(node, "one", other.ipv4)
    assert reaches(node, "one", other.ipv6)

    chain.delete("one")
    assert [each["status"]["networking"]["addressing"][0]["ipv4"] for each in endpoints(pid)] == [other.ipv4]
    assert reaches(node, "other", gateway)
    assert terminated(node, pid) == 0  # what is deleted meanwhile is queued
    chain.delete("other")
    pid = chained(node)
    eventually(lambda: endpoints(pid) == [])
    assert {name for name in links(node) - before if name.startswith("veth")} == set()


def test_ingress_policy_of_a_chained_pod_is_enforced_on_its_link(node: Lab) -> None:
    network(node, PTP)
    pid = chained(node, "--enable-policy=always", "--allow-localhost=policy")
    pod = Chain.written(node).add("pod")
    with node.open() as here:
        assert not here.run(ping, pod.ipv4, 1, 0.5)
        assert enforce(pid, "never") == 200
        assert here.run(ping, pod.ipv4, 1)


def test_a_host_port_leads_to_a_pod_of_ours(node: Lab) -> None:
    pid = serving(node, "--cni-chaining-mode=portmap")
    chain = Chain.written(node)
    assert [entry["type"] for entry in chain.network["plugins"]] == ["cilium-cni", "portmap"]
    mapping = {"hostPort": HOST_PORT, "containerPort": 80, "protocol": "tcp"}
    with node.open() as here:
        here.run(_forward)
    pod = chain.add("web", runtime={"portMappings": [mapping]})
    with node.open_pod("web") as web, node.open_outside() as outside:
        with inside(web):
            listener = socket.create_server(("", 80))
        with listener:
            server = web.start(tcp_echo_server, listener)
            outside.run(tcp_echo, (NODE_ADDRESS, HOST_PORT), 1 << 14)
            assert enforce(pid, "always") == 200
            with pytest.raises(TimeoutError):
                outside.run(tcp_echo, (NODE_ADDRESS, HOST_PORT), 1 << 12)
            assert enforce(pid, "default") == 200
            outside.run(tcp_echo, (NODE_ADDRESS, HOST_PORT), 1 << 12)
            assert len(server.finish(within=60)) == 2
    assert pod.result["interfaces"][0]["name"].startswith("lxc")
    chain.delete("web")
    with node.open() as here:
        assert str(HOST_PORT) not in here.run(_rules)
    eventually(lambda: endpoints(pid) == [] and not any(name.startswith("lxc") for name in links(node)))


def _forward() -> None:
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")


def _rules() -> str:
    return subprocess.run(["iptables-save"], check=True, capture_output=True, text=True).stdout


def test_a_list_that_does_not_say_how_is_refused(node: Lab) -> None:
    network(node, PTP)
    pid = chained(node)
    chain = Chain.written(node)
    del chain.network["plugins"][1]["chaining-mode"]
    with pytest.raises(ChainError, match="CNI PrevResult supplied, but not in chaining mode"):
        chain.add("pod")
    assert endpoints(pid) == []
