"""The bytes of every record, as Cilium's tools (client 1.17) read and print them."""

import struct
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_network
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cells.maps.records.cluster import IpcacheKey, IpcacheValue, ipcache_key, ipcache_prefix
from cells.maps.records.endpoints import (
    LXC_HOST,
    EndpointConfig,
    LxcKey,
    LxcValue,
    NodeConfig,
    PolicyEntry,
    PolicyKey,
)
from cells.maps.records.flows import (
    CT_IN,
    CT_OUT,
    CT_RELATED,
    CT_SERVICE,
    METRIC_EGRESS,
    METRIC_INGRESS,
    METRIC_SERVICE,
    CtEntry,
    CtKey,
    FragmentPorts,
    MetricsKey,
    MetricsValue,
)

POD_MAC = bytes.fromhex("5e0000000002")
NODE_MAC = bytes.fromhex("5e0000000001")
POD = LxcValue(ifindex=12, endpoint_id=1234, mac=POD_MAC, node_mac=NODE_MAC, identity=24583)

RECORDED: list[tuple[Any, str]] = [
    (LxcKey(IPv4Address("10.0.1.77")), "0a00014d00000000000000000000000001000000"),
    (LxcKey(IPv6Address("fd00:10:1::77")), "fd00001000010000000000000000007702000000"),
    (
        POD,
        "0c0000000000d20400000000000000005e000000000200005e0000000001000007600000000000000000000000000000",
    ),
    (LxcValue(flags=LXC_HOST), "0000000000000000" + "01" + "00" * 39),
    (IpcacheKey.host(IPv4Address("10.0.1.77")), "40000000000000010a00014d" + "00" * 12),
    (IpcacheKey.of(IPv4Network("0.0.0.0/0")), "2000000000000001" + "00" * 16),
    (IpcacheKey.of(IPv6Network("2001:db8::/32")), "400000000000000220010db8000000000000000000000000"),
    (IpcacheKey.host(IPv6Address("fd00:10:1::77")), "a000000000000002fd000010000100000000000000000077"),
    (IpcacheValue(24590, IPv4Address("192.0.2.11"), encrypt_key=3), "0e600000c000020b00000300"),
    (IpcacheValue(1 << 24 | 1, IPv4Address("192.0.2.12"), flags=1), "01000001c000020c00000001"),
    (IpcacheValue(2), "020000000000000000000000"),
    (PolicyKey(1, egress=False), "280000000100000000000000"),
    (PolicyKey(24583, egress=False, protocol=6, port=80, port_bits=16), "400000000760000000060050"),
    (PolicyKey(2, egress=False, protocol=17, port=53, port_bits=16), "400000000200000000110035"),
    (PolicyKey(3, egress=True, protocol=6, port=1024, port_bits=10), "3a0000000300000001060400"),
    (PolicyKey(9, egress=False, protocol=6), "300000000900000000060000"),
    (PolicyKey(0, egress=True), "280000000000000001000000"),
    (
        CtKey(IPv4Address("10.0.2.9"), IPv4Address("10.0.1.77"), 80, 40000, 6, CT_OUT),
        "0a0002090a00014d00509c400600",
    ),
    (
        CtKey(IPv6Address("fd00:10:2::9"), IPv6Address("fd00:10:1::77"), 80, 40000, 6, CT_OUT),
        "fd000010000200000000000000000009fd00001000010000000000000000007700509c400600",
    ),
    (FragmentPorts(40000, 53), "9c400035"),
    (
        CtKey(IPv4Address("10.0.1.77"), IPv4Address("10.0.2.9"), 8080, 40001, 6, CT_IN),
        "0a00014d0a0002091f909c410601",
    ),
    (
        CtKey(IPv4Address("10.96.0.10"), IPv4Address("10.0.1.77"), 40002, 80, 6, CT_SERVICE),
        "0a60000a0a00014d9c4200500604",
    ),
    (
        CtKey(IPv4Address("10.0.2.9"), IPv4Address("10.0.1.77"), 0, 0, 1, CT_RELATED),
        "0a0002090a00014d000000000102",
    ),
    (
        CtEntry(
            packets=10,
            octets=1000,
            lifetime=21600,
            flags=0x10,
            rx_flags_seen=0x1A,
            tx_flags_seen=0x1A,
            source_identity=24583,
            last_tx_report=900,
            last_rx_report=901,
        ),
        (
            "000000000000000000000000000000000a00000000000000e803000000000000605400001000000000001a1a"
            "076000008403000085030000"
        ),
    ),
    (
        CtEntry(
            backend_id=7,
            lifetime=500,
            flags=0x10,
            rev_nat_index=3,
            source_identity=24583,
            last_tx_report=900,
            last_rx_report=901,
        ),
        "00000000000000000700000000000000" + "00" * 16 + "f40100001000000300000000076000008403000085030000",
    ),
    (
        CtEntry(
            packets=3,
            octets=180,
            lifetime=100,
            flags=0x13,
            tx_flags_seen=2,
            rx_flags_seen=3,
            source_identity=24590,
            last_tx_report=900,
            last_rx_report=901,
        ),
        (
            "000000000000000000000000000000000300000000000000b4000000000000006400000013000000000002030e60"
            "00008403000085030000"
        ),
    ),
    (MetricsKey(0, METRIC_INGRESS), "0001000000000000"),
    (MetricsKey(0, METRIC_EGRESS, line=66, file=2), "0002420002000000"),
    (MetricsKey(133, METRIC_INGRESS, line=1234, file=1), "8501d20401000000"),
    (MetricsKey(1, METRIC_SERVICE, line=1, file=1), "0103010001000000"),
]


@pytest.mark.parametrize(("record", "data"), RECORDED, ids=lambda value: str(value)[:60])
def test_records_have_the_bytes_the_tools_read(record: Any, data: str) -> None:
    assert record.pack().hex() == data
    assert type(record).unpack(bytes.fromhex(data)) == record


@pytest.mark.parametrize(
    ("key", "entry", "data"),
    [
        ("280000000000000001000000", PolicyEntry(), "000006"),
        (
            "400000000760000000061f90",
            PolicyEntry(proxy_port=10001, auth_type=1, packets=7, octets=900),
            "27110001",
        ),
        ("400000000200000000110035", PolicyEntry(deny=True, packets=3, octets=300), "000001"),
        ("3a0000000300000001060400", PolicyEntry(packets=2, octets=100), "000000"),
        ("300000000900000000060000", PolicyEntry(), "000004"),
    ],
)
def test_a_policy_entry_repeats_what_is_wild_in_its_key(key: str, entry: PolicyEntry, data: str) -> None:
    expected = bytes.fromhex(data).ljust(8, b"\0") + struct.pack("<QQ", entry.packets, entry.octets)
    assert entry.pack(PolicyKey.unpack(bytes.fromhex(key))) == expected
    assert PolicyEntry.unpack(expected) == entry


def test_verdicts_are_compared_without_their_counters() -> None:
    assert PolicyEntry(packets=1).same_verdict(PolicyEntry(octets=2))
    assert not PolicyEntry(deny=True).same_verdict(PolicyEntry())


@pytest.mark.parametrize(
    "key",
    [
        PolicyKey(1, egress=False, port=80, port_bits=16),
        PolicyKey(1, egress=False, protocol=6, port=80),
        PolicyKey(1, egress=False, protocol=6, port=1025, port_bits=10),
    ],
)
def test_a_policy_key_that_could_never_match_is_refused(key: PolicyKey) -> None:
    with pytest.raises(ValueError, match="a port needs a protocol and no bits beyond"):
        key.pack()


def test_metrics_are_summed_over_all_cpus() -> None:
    two = MetricsValue(10, 1000).pack() + MetricsValue(3, 30).pack()
    assert MetricsValue.unpack(two) == MetricsValue(13, 1030)


def test_endpoint_and_node_configuration_sit_where_the_programs_look() -> None:
    endpoint = EndpointConfig(IPv4Address("10.0.1.77"), 1234, 24583, NODE_MAC, POD_MAC)
    wanted = "0a00014dd204000007600000000000005e000000000100005e00000000020000"
    assert endpoint.pack().hex() == wanted + "00" * 32
    dual = EndpointConfig(
        None, 1234, 24583, NODE_MAC, POD_MAC, 2, IPv6Address("fd00:10:1::77"), netns_cookie=4027
    )
    assert dual.pack()[32:].hex() == "fd000010000100000000000000000077" + "bb0f000000000000" + "00" * 8
    assert EndpointConfig.unpack(dual.pack()) == dual
    assert EndpointConfig.unpack(endpoint.pack()) == endpoint

    node = NodeConfig(IPv4Address("10.0.1.5"), 3, NODE_MAC, 4, POD_MAC, IPv4Network("10.0.0.0/16"), 1)
    data = node.pack()
    assert len(data) == 96
    assert data[:8].hex() == "0a00010503000000"
    assert data[8:24] == NODE_MAC + bytes(2) + POD_MAC + bytes(2)
    assert data[24:40].hex() == "040000000a000000ffff000001000000"
    assert NodeConfig.unpack(data) == node
    both = NodeConfig(
        *(None, 3, NODE_MAC, 4, POD_MAC, None),
        router_ip6=IPv6Address("fd00::5"),
        pod_cidr6=IPv6Network("fd00::/96"),
        aggregation=3,
    )
    assert both.pack()[40:80].hex() == "fd" + "00" * 14 + "05" + "fd" + "00" * 15 + "6000000003000000"
    assert NodeConfig.unpack(both.pack()) == both


def test_a_prefix_is_a_network_again() -> None:
    assert IpcacheKey.of(IPv4Network("10.0.0.0/8")).network == IPv4Network("10.0.0.0/8")
    assert LxcValue(flags=LXC_HOST).is_host
    assert not POD.is_host


@given(st.ip_addresses(), st.integers(0, 128))
def test_a_key_of_the_ipcache_made_of_text_is_that_of_the_network(
    address: IPv4Address | IPv6Address, bits: int
) -> None:
    network = ip_network((address, min(bits, address.max_prefixlen)), strict=False)
    key = ipcache_key(str(network))
    assert key == IpcacheKey.of(network).pack()
    assert ipcache_prefix(key) == str(network)
