"""Recorded layouts of devices and addresses: which address serves what."""

from __future__ import annotations

from ipaddress import ip_address, ip_network
from typing import Any

import pytest

from cells.node.addresses import (
    DeviceAddress,
    DeviceAddresses,
    direct_routing_device,
    masquerade_address,
    node_addresses,
)
from tests.unit.services.replay import load

CASES = load("node_addresses")["cases"]


def devices_of(case: Any) -> list[DeviceAddresses]:
    return [
        DeviceAddresses(
            name=device["name"],
            index=device["index"],
            type=device["type"],
            up=device["up"],
            selected=device["selected"],
            addresses=tuple(
                DeviceAddress(ip_address(one["addr"]), one["scope"], one.get("secondary", False))
                for one in device["addrs"]
            ),
        )
        for device in case["devices"]
    ]


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["description"]))
def test_node_port_addresses_of_a_recorded_layout_are_reproduced(case: Any) -> None:
    devices, config, expected = devices_of(case), case["config"], case["expect"]
    node_ips = [ip_address(one["IP"]) for one in case["node_ips"]]
    ranges = [ip_network(text) for text in config.get("nodeport-addresses", ())]
    rows = node_addresses(devices, node_ips, node_port_ranges=ranges)
    assert {(str(one.address), one.device, one.node_port, one.primary) for one in rows} == {
        (one["address"], one["device"], one["node_port"], one["primary"])
        for one in expected["node_addresses"]
    }
    derive_from = config.get("derive-masquerade-ip-addr-from-device", "")
    for device, sources in expected["bpf_masquerade_source"].items():
        found = {
            f"ipv{version}": masquerade_address(rows, device, version, derive_from=derive_from)
            for version in (4, 6)
        }
        assert {name: str(address) for name, address in found.items()} == sources
    wanted = config.get("direct-routing-device", "")
    assert direct_routing_device(devices, node_ips, wanted) == expected["direct_routing_device"]
