"""Masquerading follows changes of devices, addresses and ip-masq-agent's file under traffic."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from hive.client import ask
from hive.lab import pods
from hive.lab.agent_process import api_socket
from hive.lab.node import NODE_ADDRESS, OUTSIDE_ADDRESS, Lab
from tests.node.agent.masqueraded import DUAL, command, seen_by_tcp_server
from tests.support.agents import serving
from tests.support.tun import tun_wire
from tests.support.waiting import eventually

pytestmark = pytest.mark.node

WAN, CLIENT = {4: "203.0.113.10", 6: "fd53::10"}, {4: "203.0.113.1", 6: "fd53::1"}
MOVED = {4: "203.0.113.11", 6: "fd53::11"}
NATIVE = {4: "198.51.100.9"}
"""A server in a network where pods' addresses mean something."""
BEHIND = {4: OUTSIDE_ADDRESS}


def native(pid: int) -> set[str]:
    """Names of the devices with programs."""
    return {
        row["obj"]["name"] for row in ask("/statedb/dump/native-devices", api_socket(pid))["native-devices"]
    }


def test_devices_and_their_addresses_are_followed(node: Lab) -> None:
    pid = serving(node, *DUAL)
    pod = pods.add(node, "client")
    assert native(pid) == {"uplink"}
    with node.open() as here, node.open_outside() as there, ExitStack() as until_removed:
        ends = [(where, [f"{own[4]}/24", f"{own[6]}/64"]) for where, own in ((here, WAN), (there, CLIENT))]
        until_removed.enter_context(tun_wire("wan", *ends))
        eventually(lambda: native(pid) == {"uplink", "wan"})
        for version in (4, 6):
            eventually(lambda: seen_by_tcp_server(node, pod, version, CLIENT) == WAN[version])  # noqa: B023
        here.run(command, "link set wan name wide")
        eventually(lambda: native(pid) == {"uplink", "wide"})
        for version, length in ((4, 24), (6, 64)):
            assert seen_by_tcp_server(node, pod, version, CLIENT) == WAN[version]
            here.run(command, f"address del {WAN[version]}/{length} dev wide")
            more = " nodad" if version == 6 else ""
            here.run(command, f"address add {MOVED[version]}/{length} dev wide{more}")
            eventually(lambda: seen_by_tcp_server(node, pod, version, CLIENT) == MOVED[version])  # noqa: B023
        until_removed.close()
        eventually(lambda: native(pid) == {"uplink"})
        assert seen_by_tcp_server(node, pod, 4) == NODE_ADDRESS


def test_settings_say_where_pods_keep_their_addresses(node: Lab, tmp_path: Path) -> None:
    file = tmp_path / "ip-masq-agent" / "config"
    networks = "198.51.100.0/24"
    settings = (
        *(f"--ipv4-native-routing-cidr={networks}", "--egress-masquerade-interfaces=up+"),
        *("--enable-ip-masq-agent=true", f"--ip-masq-agent-config-path={file}"),
    )
    file.parent.mkdir()
    file.write_text("nonMasqueradeCIDRs: []")
    serving(node, *settings)
    pod = pods.add(node, "client")
    assert pod.ipv4
    with node.open() as here, node.open_outside() as there:
        there.run(command, f"address add {NATIVE[4]} dev lo")
        there.run(command, f"route add {pod.ipv4} via {NODE_ADDRESS}")
        here.run(command, f"route add {networks} via {OUTSIDE_ADDRESS}")
        assert seen_by_tcp_server(node, pod, 4, NATIVE) == pod.ipv4
        eventually(lambda: seen_by_tcp_server(node, pod, 4, BEHIND) == NODE_ADDRESS)
        # Another network of the file, taken and given up while the agent runs.
        file.write_text(f"nonMasqueradeCIDRs: [{OUTSIDE_ADDRESS}/32]")
        eventually(lambda: seen_by_tcp_server(node, pod, 4, BEHIND) == pod.ipv4)
        file.write_text("nonMasqueradeCIDRs: [10.0.0.0/8]")
        eventually(lambda: seen_by_tcp_server(node, pod, 4, BEHIND) == NODE_ADDRESS)
        # A device that is none of those named: pods keep their addresses.
        ends = [(where, [f"{own[4]}/24"]) for where, own in ((here, WAN), (there, CLIENT))]
        with tun_wire("wan", *ends):
            there.run(command, f"route replace {pod.ipv4} via {WAN[4]}")
            assert seen_by_tcp_server(node, pod, 4, CLIENT) == pod.ipv4
