"""The devices that packets leave the node by, and the masquerading of pods' packets there."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_interface, ip_network
from typing import Any

import pytest
from msgspec.structs import replace

from cells.maps.records.flows import (
    DEVICE_IP_MASQ,
    DEVICE_MASQUERADE_IPV4,
    DEVICE_MASQUERADE_IPV6,
    DEVICE_REMOTE_NODES,
    DEVICE_XDP,
    DeviceConfig,
)
from cells.masquerade.devices import MasqueradeSettings, ProgramNeeds, native_devices
from cells.node.devices import Device

MAC = bytes.fromhex("0a0000000001")
RANGES = (IPv4Network("10.1.0.0/16"), IPv6Network("fd00:10:1::/64"))
BOTH = ProgramNeeds(RANGES, ipv4=True, ipv6=True)


def device(
    index: int, name: str, *addresses: str, kind: str = "", mac: bytes = MAC, named: bool = False
) -> Device:
    return Device(index, name, kind, mac, 1500, True, tuple(map(ip_interface, addresses)), named=named)


ETH0 = device(2, "eth0", "192.0.2.7/24", "192.0.2.8/24", "2001:db8::7/64")
ETH1 = device(3, "eth1", "198.51.100.7/24")


def served(*devices: Device, needs: ProgramNeeds = BOTH, **settings: Any) -> Any:
    """Names of the devices, and what they know."""
    found = native_devices(devices, MasqueradeSettings(**settings), needs, [])
    return {each.name: each.config for each in found.values()}


def test_packets_come_from_the_address_of_the_device_they_leave_by() -> None:
    found = served(ETH0, ETH1)
    assert found["eth0"] == DeviceConfig(
        *(MAC, IPv4Address("192.0.2.7"), IPv6Address("2001:db8::7"), *RANGES),
        flags=DEVICE_MASQUERADE_IPV4 | DEVICE_MASQUERADE_IPV6,
    )
    assert found["eth1"].ipv4 == IPv4Address("198.51.100.7")


def test_the_address_that_others_know_the_node_by_goes_first() -> None:
    found = native_devices([ETH0], MasqueradeSettings(), BOTH, [IPv4Address("192.0.2.8")])
    assert found[2].config.ipv4 == IPv4Address("192.0.2.8")


def test_one_device_may_have_the_address_for_all() -> None:
    found = served(ETH0, ETH1, derive_masq_ip_addr_from_device="eth1")
    assert {each.ipv4 for each in found.values()} == {IPv4Address("198.51.100.7")}


def test_a_family_that_is_off_is_left_alone() -> None:
    found = served(ETH0, needs=ProgramNeeds(RANGES, ipv4=True, ipv6=False))
    assert found["eth0"].flags == DEVICE_MASQUERADE_IPV4
    assert served(ETH0, needs=ProgramNeeds(RANGES, ipv4=False, ipv6=False)) == {}


@pytest.mark.parametrize(
    "other",
    [
        device(4, "docker0", "172.17.0.1/16", kind="bridge"),
        device(4, "flannel.1", "10.2.0.0/32", kind="vxlan"),
        device(4, "dummy0", "192.0.2.99/32", kind="dummy"),
        device(4, "wg0", "192.0.2.99/32", kind="wireguard", mac=b""),
        device(4, "cilium_host", "10.1.0.1/32", kind="veth"),
        device(4, "lo", "192.0.2.99/32", mac=bytes(6)),
    ],
    ids=lambda other: other.name,
)
def test_programs_are_attached_only_to_uplinks_of_the_node(other: Device) -> None:
    assert served(ETH0, other).keys() == {"eth0"}


def test_a_bridge_named_by_devices_has_programs() -> None:
    assert served(device(4, "docker0", "172.17.0.1/16", kind="bridge", named=True)).keys() == {"docker0"}


@pytest.mark.parametrize(
    ("names", "found"), [(("eth1",), {"eth1"}), (("eth+",), {"eth0", "eth1"}), (("wlan+",), set())]
)
def test_only_some_devices_may_masquerade(names: tuple[str, ...], found: set[str]) -> None:
    assert served(ETH0, ETH1, egress_masquerade_interfaces=names).keys() == found


def test_masquerade_networks_and_exceptions_of_the_settings_are_written() -> None:
    wide = ip_network("10.0.0.0/8")
    found = served(ETH0, ipv4_native_routing_cidr=wide, enable_ip_masq_agent=True)["eth0"]
    assert (found.native4, found.native6, found.flags & DEVICE_IP_MASQ) == (wide, RANGES[1], DEVICE_IP_MASQ)
    assert DeviceConfig.unpack(found.pack()) == found


def test_where_only_tunnels_lead_to_pods_other_nodes_see_the_node() -> None:
    tunnelled = ProgramNeeds(RANGES, ipv4=True, ipv6=True, tunnelled=True)
    assert served(ETH0, needs=tunnelled)["eth0"].flags & DEVICE_REMOTE_NODES
    assert not served(ETH0)["eth0"].flags & DEVICE_REMOTE_NODES


def test_iptables_is_refused_with_what_to_do() -> None:
    with pytest.raises(ValueError, match="masquerade by eBPF with enable-bpf-masquerade=true"):
        MasqueradeSettings(enable_bpf_masquerade=False).validate()
    off = MasqueradeSettings(
        enable_bpf_masquerade=False, enable_ipv4_masquerade=False, enable_ipv6_masquerade=False
    )
    off.validate()


@pytest.mark.parametrize(("kind", "mac"), [("tun", b""), ("wireguard", b""), ("ipip", bytes([192, 0, 2, 7]))])
def test_devices_without_ethernet_headers_are_served(kind: str, mac: bytes) -> None:
    wan = device(9, "wan", "203.0.113.7/24", kind=kind, mac=mac)
    needs = ProgramNeeds(RANGES, ipv4=True, ipv6=True, accelerated=True)
    entry = served(replace(wan, named=True), needs=needs)["wan"]
    assert (entry.l3, entry.ipv4) == (True, IPv4Address("203.0.113.7"))
    assert not entry.flags & DEVICE_XDP  # their drivers have no frames to look into
    assert ("wan" in served(wan)) == (kind == "tun")  # tunnels must be named


def test_devices_with_other_headers_are_left_alone() -> None:
    assert not served(device(9, "ib0", "203.0.113.7/24", mac=bytes(20), named=True))


def test_nothing_comes_from_the_loopback_address() -> None:
    loopback = device(1, "lo", "127.0.0.1/8", "::1/128", mac=bytes(6))
    entry = served(loopback, ETH1)["eth1"]
    assert (entry.ipv6, entry.flags) == (None, DEVICE_MASQUERADE_IPV4)
