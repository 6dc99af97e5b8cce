"""Pods with addresses of Debian's host-local: traffic, policy, restarts, and complete removal."""

from __future__ import annotations

import json
import subprocess
from ipaddress import ip_address, ip_network
from pathlib import Path

import pytest

from hive.client import ask
from hive.lab import pods
from hive.lab.agent_process import api_socket
from hive.lab.node import NODE_ADDRESS, Lab
from hive.lab.traffic.probe import ping
from tests.node.agent.conversations import conversation, enforce, is_cut
from tests.node.chaining.chained import endpoints, reaches
from tests.support.agents import run_agent, serving, terminated
from tests.support.chain import Chain, ChainError, addresses_of
from tests.support.traffic import lossless_traffic
from tests.support.waiting import eventually

pytestmark = pytest.mark.node

SUBNET, SUBNET6 = "10.97.0.0/16", "fd00:97::/64"
ROUTER, ROUTER6 = "169.254.23.1", "fd00:23::1"
DELEGATED = (
    "--ipam=delegated-plugin",
    "--routing-mode=native",
    "--enable-endpoint-routes=true",
    f"--local-router-ipv4={ROUTER}",
    "--enable-ipv6=true",
    f"--local-router-ipv6={ROUTER6}",
)


def network(lab: Lab, *subnets: str) -> Chain:
    """The network as the runtime knows it: our plugin, which asks host-local for addresses."""
    entry = {"type": "cilium-cni", "ipam": addresses_of(lab, *(subnets or (SUBNET, SUBNET6)))}
    return Chain(lab, {"cniVersion": "1.0.0", "name": "delegated", "plugins": [entry]})


def given(lab: Lab) -> set[str]:
    """The addresses that host-local has given away."""
    found = (lab.directory / "host-local" / "delegated").glob("*[0-9a-f]")
    return {path.name for path in found if path.name[0] in "0123456789f"}


def pod_routes(lab: Lab) -> dict[str, str]:
    """The link behind each single address, by the node's routes."""
    with lab.open() as node:
        shown = node.run(_routes)
    return dict(shown)


def _routes() -> list[tuple[str, str]]:
    found = []
    for family in ("-4", "-6"):
        done = subprocess.run(["ip", "-j", family, "route"], check=True, capture_output=True)
        found += [
            (row["dst"], row["dev"])
            for row in json.loads(done.stdout)
            if row["dev"].startswith("lxc") and "/" not in row["dst"]
        ]
    return found


def _unroute(address: str) -> None:
    subprocess.run(["ip", "route", "del", address], check=True)


def test_pods_with_addresses_of_host_local_talk_and_leave_nothing(node: Lab) -> None:
    pid = serving(node, *DELEGATED)
    chain = network(node)
    one, other = chain.add("one"), chain.add("other")
    for pod in one, other:
        chain.check(pod.pod)
        assert ip_address(pod.ipv4) in ip_network(SUBNET)
        assert ip_address(pod.ipv6) in ip_network(SUBNET6)
        assert {each["gateway"] for each in pod.result["ips"]} == {ROUTER, ROUTER6}
        assert {each["address"].partition("/")[2] for each in pod.result["ips"]} == {"32", "128"}
    assert given(node) == {one.ipv4, one.ipv6, other.ipv4, other.ipv6}
    shown = {each["status"]["networking"]["addressing"][0]["ipv4"] for each in endpoints(pid)}
    assert shown == {one.ipv4, other.ipv4}
    routes = pod_routes(node)
    assert routes.keys() == given(node)
    status = ask("/v1/healthz", api_socket(pid))["ipam"]
    assert status["status"] == "IPv4: delegated to plugin, IPv6: delegated to plugin"
    assert not status.get("allocations")

    # Pod to pod, pod to node, node to pod.
    for goal in (other.ipv4, other.ipv6, NODE_ADDRESS):
        assert reaches(node, "one", goal), goal
    with node.open() as here:
        assert here.run(ping, one.ipv4, 1)
        assert here.run(ping, one.ipv6, 1)

    # What another program removes comes back.
    with node.open() as here:
        here.run(_unroute, one.ipv4)
    eventually(lambda: pod_routes(node) == routes)

    # A restart is not felt, and policy holds in both directions.
    with (
        node.open_pod("one") as source,
        node.open_pod("other") as target,
        lossless_traffic(source, target, other.ipv4),
    ):
        assert terminated(node, pid) == 0
        pid = serving(node, *DELEGATED)
    assert len(endpoints(pid)) == 2
    with conversation(node, one.attached, other.attached) as talk:
        assert enforce(pid, "always") == 200
        is_cut(node, talk)
    assert not reaches(node, "one", NODE_ADDRESS, 0.3)
    assert not reaches(node, "other", one.ipv6, 0.3)
    assert enforce(pid, "default") == 200
    assert reaches(node, "one", other.ipv4)

    chain.delete("one")
    assert given(node) == {other.ipv4, other.ipv6}
    eventually(lambda: pod_routes(node).keys() == given(node))  # a link goes a little after the answer
    assert terminated(node, pid) == 0  # a DEL without the agent gives the address back, too
    chain.delete("other")
    assert not given(node)
    pid = serving(node, *DELEGATED)
    eventually(lambda: not endpoints(pid) and not pod_routes(node))


def test_a_full_host_local_range_fails_the_add_and_leaks_no_address(node: Lab) -> None:
    serving(node, *(each for each in DELEGATED if "ipv6" not in each))
    chain = network(node, "10.97.0.0/30")  # one address, beside its gateway's
    chain.add("one")
    with pytest.raises(
        ChainError, match=r"failed to invoke delegated plugin ADD for IPAM: .*no IP addresses"
    ):
        chain.add("other")
    assert len(given(node)) == 1
    chain.delete("one")
    again = chain.add("again")
    assert given(node) == {again.ipv4}


def test_pods_of_the_agents_own_range_may_have_routes_too_and_lose_them(node: Lab) -> None:
    native = ("--routing-mode=native", "--enable-ipv6=true")
    pid = serving(node, *native, "--enable-endpoint-routes=true")
    one, other = pods.add(node, "one"), pods.add(node, "other")
    wanted = {one.ipv4, one.ipv6, other.ipv4, other.ipv6}
    assert pod_routes(node).keys() == wanted
    assert reaches(node, "one", other.ipv4)
    assert reaches(node, "other", one.ipv6)
    with (
        node.open_pod("one") as source,
        node.open_pod("other") as target,
        lossless_traffic(source, target, other.ipv4),
    ):
        assert terminated(node, pid) == 0
        pid = serving(node, *native)
        eventually(lambda: not pod_routes(node))
        assert terminated(node, pid) == 0
        serving(node, *native, "--enable-endpoint-routes=true")
        eventually(lambda: pod_routes(node).keys() == wanted)
    assert reaches(node, "one", other.ipv6)


@pytest.mark.parametrize(
    ("settings", "spoken"),
    [
        (
            ("--ipam=delegated-plugin", "--routing-mode=native"),
            "--local-router-ipv4 must be provided when IPv4 is enabled with --ipam=delegated-plugin",
        ),
        (
            (f"--local-router-ipv4={ROUTER}", "--routing-mode=native"),
            "Cannot specify local-router-ipv4 without enable-endpoint-routes",
        ),
        (DELEGATED[:1] + DELEGATED[2:4], "Cannot specify local-router-ipv4 in tunnel mode"),
    ],
)
def test_settings_that_cannot_work_together_are_refused(
    node: Lab, settings: tuple[str, ...], spoken: str
) -> None:
    done = run_agent(node, *settings)
    assert done.code == 2
    assert spoken in done.line


def test_the_agents_own_interface_has_no_addresses_to_give(node: Lab) -> None:
    pid = serving(node, *DELEGATED)
    done = subprocess.run(
        ["curl", "-s", "-w", "%{http_code}", "-X", "POST", "--unix-socket", str(api_socket(pid)),
         "http://localhost/v1/ipam?owner=default/web"],
        capture_output=True, check=True, text=True,
    )  # fmt: skip
    assert done.stdout.endswith("502")
    assert "delegated" in done.stdout
    assert Path(api_socket(pid)).exists()
