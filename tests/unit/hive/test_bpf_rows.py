"""Map entries as text, against the output of Cilium's client for the same bytes."""

from ipaddress import IPv4Address, IPv4Network, IPv6Address

import pytest

from cells.maps.records.endpoints import EndpointConfig, NodeConfig
from cells.maps.records.flows import FragmentPorts
from hive.maps.bpf_rows import describe
from tests.unit.conformance.bpf_recordings import REPLAYED, entries, load, maps, printed

MAC = bytes(range(6))
LISTS = [
    name for name in REPLAYED if load(name)["stdout"] and not {"-o", "lb", "nat"} & set(load(name)["argv"])
]
PRINTED = {
    "cilium_lxc": ("address", "identity", "ifindex"),
    "cilium_ipcache": ("identity", "tunnel endpoint"),
    "cilium_policy": ("identity", "port/protocol", "packets"),
    "cilium_metrics": ("packets", "bytes"),
    "cilium_ct": ("protocol", "direction", "source", "destination", "packets"),
}


@pytest.mark.parametrize("name", [name for name in LISTS if not name.endswith(("policy_get", "ipcache_get"))])
def test_each_bpf_row_is_printed_as_cilium_dbg_prints_it(name: str) -> None:
    lines = printed(name)
    for pin, table in maps(name).items():
        spoken = next((columns for kind, columns in PRINTED.items() if pin.startswith(kind)), ())
        for key, value in entries(table):
            row = describe(pin, key, value * (2 if pin == "cilium_metrics" else 1))
            assert row is not None
            words = [str(row[column]).replace("[", "").replace("]", "") for column in spoken if column in row]
            assert any(
                all(word in line.replace("[", "").replace("]", "") for word in words) for line in lines
            ), row


@pytest.mark.parametrize("name", ["cilium_lb4_services_v2", "something", "cilium_policy_v2_00001"])
def test_a_map_that_is_not_known_is_shown_in_bytes(name: str) -> None:
    assert describe(name, b"\1\2", b"\3") == {"key": "01 02", "value": "03"}


def test_our_own_maps_are_read() -> None:
    endpoint = EndpointConfig(IPv4Address("10.0.0.1"), 7, 256, MAC, MAC, 2, IPv6Address("fd00::1"), 9)
    row = describe("hive_endpoints", (5).to_bytes(4, "little"), endpoint.pack())
    assert row == {
        "ifindex": 5,
        "endpoint": 7,
        "identity": 256,
        "ipv4": "10.0.0.1",
        "ipv6": "fd00::1",
        "pod mac": "00:01:02:03:04:05",
        "host mac": "00:01:02:03:04:05",
        "flags": "any source",
        "netns cookie": 9,
    }
    chained = EndpointConfig(None, 8, 256, MAC, MAC, 0b11101)
    row = describe("hive_endpoints", (6).to_bytes(4, "little"), chained.pack())
    assert row is not None
    assert row["flags"] == "neighbours passed to the host, egress program, routed by the host, 0x10"
    node = NodeConfig(IPv4Address("10.0.0.9"), 4, MAC, 3, MAC, IPv4Network("10.0.0.0/24"), 7)
    node_row = describe("hive_node", bytes(4), node.pack())
    assert node_row is not None
    assert node_row["events"] == "drops, traces, policy verdicts"
    assert (node_row["router ipv4"], node_row["ipv4 range"], node_row["router ipv6"]) == (
        "10.0.0.9",
        "10.0.0.0/24",
        "",
    )
    assert describe("hive_policies", bytes(4), bytes(4)) is None
    assert describe("hive_policies", b"\7\0\0\0", b"\2\1\0\0") == {"endpoint": 7, "map id": 258}


def test_fragments_of_both_families_are_read() -> None:
    ports = FragmentPorts(53, 4242).pack()
    key = IPv4Address("10.0.0.2").packed + IPv4Address("10.0.0.1").packed + b"\x12\x34\x11\0"
    row = describe("cilium_ipv4_frag_datagrams", key, ports)
    assert row == {
        "source": "10.0.0.1",
        "destination": "10.0.0.2",
        "id": 0x1234,
        "protocol": "UDP",
        "source port": 53,
        "destination port": 4242,
    }
    key6 = IPv6Address("fd00::2").packed + IPv6Address("fd00::1").packed + b"\0\0\x12\x34\x11\0\0\0"
    row6 = describe("cilium_ipv6_frag_datagrams", key6, ports)
    assert row6 == (row or {}) | {"source": "fd00::1", "destination": "fd00::2"}
