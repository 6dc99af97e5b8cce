"""Clients outside are served by XDP in the driver of the receiving device."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from cells.maps.bpf import program_by_id, program_info
from cells.maps.map import open_map
from cells.netlink.links import xdp_of
from hive.client import ask
from hive.lab import pods
from hive.lab.agent_process import api_socket
from hive.lab.node import OUTSIDE_ADDRESS, Lab
from tests.node.agent.node_ports import (
    ELSEWHERE,
    FAR_PORT,
    GLOBALS,
    NODE,
    NODE_PORT,
    OUTSIDE,
    SETTINGS,
    answered,
    command,
    datagram,
    give_addresses,
    service,
    slices,
)
from tests.node.agent.offloads import ETHTOOL_STXCSUM, like_a_wire, set_feature
from tests.support.agents import known_pods, serving, terminated
from tests.support.waiting import eventually

pytestmark = pytest.mark.node

MEGABYTE = 1 << 20


def driver_program(lab: Lab, *, generic: bool = False) -> str:
    """The name of the program in the driver of the node's device; empty if there is none."""

    def look() -> str:
        found = xdp_of(socket.if_nametoindex("uplink"))
        number = found.generic if generic else found.native
        return program_info(program_by_id(number)).name if number else ""

    with lab.open() as node:
        return str(node.run(look))


def entered(lab: Lab) -> bool:
    """Whether a program is in force for drivers."""

    def look() -> bool:
        with open_map(GLOBALS / "hive_xdp_entry") as entry:
            return any(True for _ in entry.items())

    with lab.open() as node:
        return bool(node.run(look))


def prepare(lab: Lab, folder: Path, *settings: str) -> int:
    (folder / "far.yaml").write_text(service("far", FAR_PORT) + slices("far", ELSEWHERE))
    known_pods(folder, "server")
    return serving(lab, f"--manifests-dir={folder}", *SETTINGS, *settings)


def serve_pod(lab: Lab, folder: Path) -> pods.Attached:
    pod = pods.add(lab, "server")
    assert pod.ipv4
    assert pod.ipv6
    (folder / "near.yaml").write_text(service("near", NODE_PORT) + slices("near", {4: pod.ipv4, 6: pod.ipv6}))
    return pod


def acceleration(pid: int) -> str:
    port = ask("/v1/healthz", api_socket(pid))["kube-proxy-replacement"]["features"]["nodePort"]
    return str(port["acceleration"])


def test_clients_outside_are_served_in_the_driver(node: Lab, tmp_path: Path) -> None:
    give_addresses(node)
    like_a_wire(node, tmp_path)
    pid = prepare(node, tmp_path, "--bpf-lb-acceleration=native")
    assert acceleration(pid) == "Native"
    assert driver_program(node) == "cil_xdp_entry"
    pod = serve_pod(node, tmp_path)
    eventually(lambda: answered(node, 4, (NODE[4], NODE_PORT), pod) is not None)
    for version in (4, 6):
        near, far = (NODE[version], NODE_PORT), (NODE[version], FAR_PORT)
        assert answered(node, version, near, pod, MEGABYTE) == (OUTSIDE[version], NODE[version])
        assert answered(node, version, far, None, MEGABYTE) == (NODE[version], NODE[version])
        assert datagram(node, version, near, pod, 100) == OUTSIDE[version]
        assert datagram(node, version, far, None, 100) == NODE[version]
    # What another program detaches is attached again.
    with node.open() as inside:
        inside.run(command, "link set uplink xdp off")
    eventually(lambda: driver_program(node) == "cil_xdp_entry")
    # Another agent that is not to accelerate takes it off, and serves on.
    terminated(node, pid)
    assert driver_program(node) == "cil_xdp_entry"
    pid = prepare(node, tmp_path, "--bpf-lb-acceleration=disabled")
    assert acceleration(pid) == "Disabled"
    eventually(lambda: driver_program(node) == "")
    assert not entered(node)
    assert answered(node, 4, (NODE[4], NODE_PORT), pod, MEGABYTE) == (OUTSIDE_ADDRESS, NODE[4])


def test_before_the_stack_clients_are_served_whatever_the_driver(node: Lab, tmp_path: Path) -> None:
    give_addresses(node)
    with node.open_outside() as outside:
        outside.run(set_feature, "node", ETHTOOL_STXCSUM, 0)
    pid = prepare(node, tmp_path, "--bpf-lb-acceleration=generic")
    assert acceleration(pid) == "Generic"
    assert (driver_program(node), driver_program(node, generic=True)) == ("", "cil_xdp_entry")
    pod = serve_pod(node, tmp_path)
    eventually(lambda: answered(node, 4, (NODE[4], NODE_PORT), pod) is not None)
    for version in (4, 6):
        near, far = (NODE[version], NODE_PORT), (NODE[version], FAR_PORT)
        assert answered(node, version, near, pod, MEGABYTE) == (OUTSIDE[version], NODE[version])
        assert answered(node, version, far, None, MEGABYTE) == (NODE[version], NODE[version])


def devices_status(pid: int) -> dict[int, str]:
    """What became of each native device, by its index."""
    rows = ask("/statedb/dump/native-devices-status", api_socket(pid))["native-devices-status"]
    return {row["key"]: row["obj"]["state"] for row in rows}


def test_a_driver_without_native_xdp_is_served_by_tc_or_refused(node: Lab, tmp_path: Path) -> None:
    give_addresses(node)
    like_a_wire(node, tmp_path)
    with node.open() as inside:
        inside.run(command, "link add slow type bridge")
        inside.run(command, "address add 203.0.113.20/24 dev slow")
        inside.run(command, "link set slow up")
        slow = inside.run(socket.if_nametoindex, "slow")
    pid = prepare(node, tmp_path, "--bpf-lb-acceleration=best-effort", "--devices=uplink,slow")
    assert acceleration(pid) == "Best-Effort"
    pod = serve_pod(node, tmp_path)
    assert driver_program(node) == "cil_xdp_entry"
    assert devices_status(pid)[slow] == "done"
    for address in (NODE[4], "203.0.113.20"):
        with node.open_outside() as outside:
            outside.run(command, f"route replace 203.0.113.20 via {NODE[4]}")
        eventually(lambda: answered(node, 4, (address, NODE_PORT), pod) is not None)  # noqa: B023
    terminated(node, pid)
    pid = prepare(node, tmp_path, "--bpf-lb-acceleration=native", "--devices=uplink,slow")
    eventually(lambda: devices_status(pid)[slow] == "failed")
    assert driver_program(node) == "cil_xdp_entry"
    assert answered(node, 4, ("203.0.113.20", NODE_PORT), pod) is not None, "meanwhile the stack serves"
