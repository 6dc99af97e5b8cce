"""Changes to a node while its agent is down: links cut, state corrupted, its range moved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hive.lab import agent_process, pods
from hive.lab.node import Lab
from hive.lab.traffic.probe import ping
from tests.support.account import account, agreed
from tests.support.agents import invoke, run_agent, serving

pytestmark = pytest.mark.node

STATE = Path("/run/cilium/state")
GLOBALS = Path("/sys/fs/bpf/tc/globals")


def addresses(lab: Lab) -> set[str]:
    return {ip for ip, _, _ in agreed(lab).listed.values()}


def cut(name: str) -> None:
    from pyroute2 import IPRoute

    with IPRoute() as ip:
        ip.link("del", index=ip.link_lookup(ifname=name)[0])


def test_the_endpoint_of_a_pod_without_its_link_is_removed(lab: Lab) -> None:
    first, second = pods.add(lab, "first"), pods.add(lab, "second")
    agent_process.crash(lab)
    with lab.open() as inside:
        inside.run(cut, first.host_link)
    serving(lab)
    assert addresses(lab) == {second.ipv4}
    assert invoke(lab, "first", "DEL").code == 0
    assert invoke(lab, "first", "ADD").code == 0
    assert len(addresses(lab)) == 2


def number_of(lab: Lab, address: str) -> int:
    return next(number for number, (ip, _, _) in account(lab).listed.items() if ip == address)


def spoil(number: int) -> None:
    path = STATE / str(number) / "ep_config.json"
    path.write_bytes(path.read_bytes()[:100])


def test_a_pod_with_broken_state_has_network_until_it_is_removed(lab: Lab) -> None:
    first, second = pods.add(lab, "first"), pods.add(lab, "second")
    number = number_of(lab, first.ipv4)
    agent_process.crash(lab)
    with lab.open() as inside:
        inside.run(spoil, number)
        serving(lab)
        assert {ip for ip, _, _ in account(lab).listed.values()} == {second.ipv4}
        assert (
            'Unable to read endpoint state, ignoring" module=agent.endpoint-restore'
            in lab.agent_log.read_text()
        )
        for target in (first, second):
            assert len(inside.run(ping, target.ipv4, 2)) == 2
    assert invoke(lab, "second", "DEL").code == 0
    assert invoke(lab, "first", "DEL").code == 0
    agent_process.crash(lab)
    serving(lab)
    assert addresses(lab) == set()


def test_pods_outlive_a_range_that_moves(lab: Lab) -> None:
    first, second = pods.add(lab, "first"), pods.add(lab, "second")
    agent_process.crash(lab)
    serving(lab, "--ipv4-range=10.99.0.0/24")
    assert addresses(lab) == {first.ipv4, second.ipv4}
    other = pods.add(lab, "other")
    assert other.gateway != first.gateway
    assert all(one.startswith("10.99.0.") for one in (other.ipv4, other.gateway))
    with lab.open() as inside:
        assert len(inside.run(ping, first.ipv4, 2)) == 2
    with lab.open_pod("first") as inside:
        for target in (second.ipv4, other.ipv4, other.gateway):
            assert len(inside.run(ping, target, 2)) == 2
    assert invoke(lab, "first", "DEL").code == 0
    lab.release_pod("first")
    assert pods.add(lab, "first").ipv4.startswith("10.99.0.")
    agent_process.crash(lab)
    serving(lab, "--ipv4-range=10.99.0.0/24")
    with lab.open() as inside:
        routed = inside.run(routes)
        assert second.ipv4 in routed
        assert first.ipv4 not in routed


def routes() -> set[str]:
    """Destinations of the IPv4 routes over cilium_host."""
    from pyroute2 import IPRoute

    with IPRoute() as ip:
        index = ip.link_lookup(ifname="cilium_host")[0]
        return {str(route.get("dst")) for route in ip.get_routes(family=2, oif=index, table=254)}


def test_a_full_pod_cidr_refuses_pods_with_a_reason(node: Lab) -> None:
    serving(node, "--ipv4-range=10.99.0.0/30")
    first = pods.add(node, "first")
    node.hold_pod("second")
    refusal = invoke(node, "second", "ADD")
    assert refusal.code == 1
    assert refusal.json["msg"].startswith("unable to allocate IP via local cilium agent: ")
    assert addresses(node) == {first.ipv4}
    pods.delete(node, "first")
    assert addresses(node) == set()
    assert invoke(node, "second", "ADD").code == 0


def test_deleted_maps_are_created_again(lab: Lab) -> None:
    first, second = pods.add(lab, "first"), pods.add(lab, "second")
    agent_process.crash(lab)
    with lab.open() as inside:
        for name in ("cilium_lxc", "cilium_ipcache", "hive_endpoints", "hive_policies"):
            inside.run((GLOBALS / name).unlink)
        serving(lab)
    assert addresses(lab) == {first.ipv4, second.ipv4}
    with lab.open_pod("first") as pod:
        assert len(pod.run(ping, second.ipv4, 2)) == 2


def test_a_reboot_starts_from_nothing(lab: Lab) -> None:
    """Links and maps are removed, the state on disk may remain: a stale endpoint has no owner."""
    first = pods.add(lab, "first")
    with lab.open() as inside:
        saved = inside.run((STATE / str(number_of(lab, first.ipv4)) / "ep_config.json").read_text)
    assert json.loads(saved)
    agent_process.crash(lab)
    with lab.open() as inside:
        inside.run(cut, first.host_link)
        inside.run(cut, "cilium_host")
        for pin in inside.run(pins):
            inside.run(pin.unlink)
    serving(lab)
    assert addresses(lab) == set()
    assert run_agent(lab).code == 1  # it is there
    pods.add(lab, "second")
    assert len(addresses(lab)) == 1


def pins() -> list[Path]:
    return [path for path in Path("/sys/fs/bpf").rglob("*") if path.is_file() and path.suffix != ".debug"]
