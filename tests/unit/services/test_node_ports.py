"""Services for clients outside: device addresses, and ports reserved in the kernel."""

from __future__ import annotations

import re
from ipaddress import IPv4Address, ip_address, ip_interface, ip_network

import pytest

from cells.config.shared import ServiceSettings, service_reach
from cells.node.devices import Device
from cells.node.sysctl import reserved_ports
from cells.services.node_ports import (
    ForwardingSettings,
    Selection,
    direct_addresses,
    node_port_addresses,
)

MAC = bytes.fromhex("0a0000000001")
RANGE = (30000, 32767)


def device(index: int, name: str, *addresses: str, kind: str = "") -> Device:
    return Device(index, name, kind, MAC, 1500, True, tuple(map(ip_interface, addresses)))


ETH0 = device(2, "eth0", "10.0.0.7/24", "10.0.0.8/24", "2001:db8:1::7/64")
ETH1 = device(3, "eth1", "203.0.113.7/24")
VXLAN = device(4, "flannel.1", "10.2.0.1/32", kind="vxlan")
NODE_IPS = [IPv4Address("10.0.0.8")]


def select(*ranges: str, direct: str = "") -> Selection:
    return Selection([ip_network(each) for each in ranges], direct)


def test_each_device_serves_at_one_address_of_each_family() -> None:
    found = node_port_addresses([ETH0, ETH1, VXLAN], NODE_IPS, select())
    assert {str(ip): row.device for ip, row in found.items()} == {
        "10.0.0.8": "eth0",
        "2001:db8:1::7": "eth0",
        "203.0.113.7": "eth1",
    }


def test_ranges_choose_among_all_addresses() -> None:
    found = node_port_addresses([ETH0, ETH1], NODE_IPS, select("10.0.0.0/29"))
    assert set(map(str, found)) == {"10.0.0.7"}


@pytest.mark.parametrize(
    ("direct", "ipv4"),
    [
        ("", "10.0.0.8"),
        ("eth1", "203.0.113.7"),
        ("bond+", "192.0.2.1"),
        ("eth+", "10.0.0.8"),
        ("en+", "10.0.0.8"),
    ],
)
def test_other_nodes_are_asked_from_the_direct_routing_device(direct: str, ipv4: str) -> None:
    bonds = [device(9, "bond1", "198.51.100.1/24"), device(8, "bond0", "192.0.2.1/24")]
    found = direct_addresses([ETH0, ETH1, *bonds], NODE_IPS, select(direct=direct))
    assert found[4] == ip_address(ipv4)


@pytest.mark.parametrize(
    ("local", "reserved", "wanted"),
    [
        ("32768 60999", "", None),
        ("1024 65535", "", "30000-32767"),
        ("1024 65535", "8080,9000-9010", "8080,9000-9010,30000-32767"),
        ("1024 65535", "29000-29999,32768", "29000-32768"),
        ("1024 65535", "30000-40000", None),
    ],
)
def test_node_ports_are_excluded_from_the_ephemeral_port_range(
    local: str, reserved: str, wanted: str | None
) -> None:
    assert reserved_ports(local, reserved, RANGE) == wanted


@pytest.mark.parametrize(
    ("settings", "spoken"),
    [
        ({"bpf_lb_dsr_dispatch": "geneve"}, "bpf-lb-dsr-dispatch=geneve: not supported yet"),
        (
            {"bpf_lb_maglev_hash_seed": "AAAA"},
            "bpf-lb-maglev-hash-seed: expected base64 of 12 bytes, this is of 3",
        ),
    ],
)
def test_unsupported_load_balancing_settings_are_refused(settings: dict[str, str], spoken: str) -> None:
    with pytest.raises(ValueError, match=re.escape(spoken)):
        ForwardingSettings(**settings).validate()  # type: ignore[arg-type]


def test_kube_proxy_replacement_enables_all_service_types() -> None:
    served = service_reach(ServiceSettings(kube_proxy_replacement=True))
    assert served.node_ports
    assert served.external_ips
    assert served.host_ports
    assert served.replaces_kube_proxy
    assert not service_reach(ServiceSettings()).outside
