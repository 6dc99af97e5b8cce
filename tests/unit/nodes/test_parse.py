"""Reading Node and CiliumNode objects: pod CIDRs in Cilium's order of precedence."""

from __future__ import annotations

import json
from ipaddress import IPv4Network, ip_address

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cells.base.addresses import Family
from cells.cluster.ipcache.rows import Source
from cells.cluster.nodes.node import CILIUM_INTERNAL_IP, INTERNAL_IP, ClusterNode, NodeIP
from cells.cluster.nodes.parse import (
    NodeReader,
    NodeSettings,
    ParsedNode,
    parse_cilium_node,
    parse_node,
    shared_node,
)
from cells.kubernetes.objects.cilium_node import CILIUM_NODES, CiliumNode
from cells.kubernetes.objects.core import NODES, Node
from tests.support.examples import scaled

V4_KEY, V4_OLD = "network.cilium.io/ipv4-pod-cidr", "io.cilium.network.ipv4-pod-cidr"
V6_KEY, V6_OLD = "network.cilium.io/ipv6-pod-cidr", "io.cilium.network.ipv6-pod-cidr"


def node(spec: object = None, annotations: object = None, status: object = None) -> Node:
    given = {
        "metadata": {"name": "n1", "annotations": annotations},
        "spec": spec or {},
        "status": status or {},
    }
    return NODES.decoder.decode(json.dumps(given))


def cilium(spec: object) -> CiliumNode:
    return CILIUM_NODES.decoder.decode(json.dumps({"metadata": {"name": "n1"}, "spec": spec}))


def ranges(parsed: ParsedNode) -> tuple[list[str], list[str]]:
    return [str(each) for each in parsed.cidrs[Family.IPV4]], [
        str(each) for each in parsed.cidrs[Family.IPV6]
    ]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"podCIDRs": ["10.1.0.0/24"]}, (["10.1.0.0/24"], [])),
        ({"podCIDRs": ["fd00::/112", "10.1.0.7/24"]}, (["10.1.0.0/24"], ["fd00::/112"])),
        ({"podCIDRs": ["10.1.0.0/24", "10.2.0.0/24"]}, (["10.2.0.0/24"], [])),
        ({"podCIDR": "10.3.0.0/24"}, (["10.3.0.0/24"], [])),
        ({"podCIDR": "10.3.0.0/24", "podCIDRs": ["fd00::/112"]}, ([], ["fd00::/112"])),
        ({"podCIDR": "fd00::/112", "podCIDRs": []}, ([], ["fd00::/112"])),
        ({}, ([], [])),
    ],
)
def test_pod_cidrs_are_read_from_the_spec(spec: object, expected: object) -> None:
    parsed = parse_node(node(spec))
    assert ranges(parsed) == expected
    assert not parsed.faults


def test_an_invalid_pod_cidr_is_logged_and_the_others_are_used() -> None:
    parsed = parse_node(node({"podCIDRs": ["10.1.0.0", "fd00::/112"]}))
    assert ranges(parsed) == ([], ["fd00::/112"])
    (fault,) = parsed.faults
    assert (fault.level, fault.text, fault.value) == ("warning", "Invalid PodCIDR value for node", "10.1.0.0")


def test_three_pod_cidrs_are_refused() -> None:
    parsed = parse_node(
        node({"podCIDRs": ["10.1.0.0/24", "fd00::/112", "10.2.0.0/24"], "podCIDR": "10.1.0.0/24"})
    )
    assert ranges(parsed) == ([], [])
    (fault,) = parsed.faults
    assert fault.text == "Invalid PodCIDRs expected 1 or 2 PodCIDRs, received 3"
    assert fault.level == "error"


@pytest.mark.parametrize(
    ("annotations", "expected"),
    [
        ({V4_KEY: "10.9.0.0/24"}, (["10.9.0.0/24"], [])),
        ({V4_OLD: "10.8.0.0/24"}, (["10.8.0.0/24"], [])),
        ({V4_KEY: "10.9.0.0/24", V4_OLD: "10.8.0.0/24"}, (["10.9.0.0/24"], [])),
        ({V4_KEY: "", V4_OLD: "10.8.0.0/24"}, ([], [])),
        ({V4_KEY: "10.9.0.0/24", V6_OLD: "fd09::/112"}, (["10.9.0.0/24"], ["fd09::/112"])),
        ({V6_KEY: "10.9.0.0/24"}, ([], [])),
    ],
)
def test_annotations_fill_in_fields_that_the_spec_lacks(annotations: object, expected: object) -> None:
    assert ranges(parse_node(node(None, annotations), annotations=True)) == expected
    assert ranges(parse_node(node(None, annotations))) == ([], [])


def test_the_spec_wins_over_annotations_family_by_family() -> None:
    both = node({"podCIDR": "10.1.0.0/24"}, {V4_KEY: "10.9.0.0/24", V6_KEY: "fd09::/112"})
    assert ranges(parse_node(both, annotations=True)) == (["10.1.0.0/24"], ["fd09::/112"])


def test_an_invalid_annotation_is_a_bug_of_who_wrote_it() -> None:
    (fault,) = parse_node(node(None, {V4_KEY: "ten"}), annotations=True).faults
    assert (fault.level, fault.text) == ("error", "BUG, invalid IPv4 annotation CIDR in node")


def test_annotations_give_addresses_and_the_encryption_key() -> None:
    parsed = parse_node(
        node(
            None,
            {
                "io.cilium.network.ipv4-health-ip": "10.1.0.5",
                "network.cilium.io/ipv4-Ingress-ip": "10.1.0.6",
                "network.cilium.io/ipv4-cilium-host": "10.1.0.1",
                "network.cilium.io/encryption-key": "300",
            },
        ),
        annotations=True,
    )
    assert list(map(str, parsed.health)) == ["10.1.0.5"]
    assert list(map(str, parsed.ingress)) == ["10.1.0.6"]
    assert [(each.type, str(each.ip)) for each in parsed.addresses] == [("CiliumInternalIP", "10.1.0.1")]
    assert parsed.encryption_key == 0


def test_only_internal_and_external_addresses_count() -> None:
    addresses = [
        {"type": "Hostname", "address": "n1"},
        {"type": "InternalIP", "address": "192.0.2.1"},
        {"type": "ExternalIP", "address": ""},
        {"type": "ExternalIP", "address": "198.51.100.300"},
    ]
    parsed = parse_node(node(status={"addresses": addresses}))
    assert [(each.type, str(each.ip)) for each in parsed.addresses] == [("InternalIP", "192.0.2.1")]
    assert [fault.text for fault in parsed.faults] == ["Ignoring invalid node IP"]


def test_a_ciliumnode_gives_several_ranges_with_those_of_pools_last() -> None:
    parsed = parse_cilium_node(
        cilium(
            {
                "addresses": [{"type": "InternalIP", "ip": "192.0.2.1"}, {"type": "InternalIP", "ip": "x"}],
                "ipam": {
                    "podCIDRs": ["10.1.0.0/24", "nonsense", "fd00::/112", "10.2.0.0/24"],
                    "pools": {"allocated": [{"pool": "default", "cidrs": ["10.3.0.0/28", "10.1.0.0/24"]}]},
                },
                "health": {"ipv4": "10.1.0.5"},
            }
        )
    )
    assert ranges(parsed) == (["10.1.0.0/24", "10.2.0.0/24", "10.3.0.0/28"], ["fd00::/112"])
    assert [str(each.ip) for each in parsed.addresses] == ["192.0.2.1"]
    assert list(map(str, parsed.health)) == ["10.1.0.5"]
    assert not parsed.faults


def test_a_ciliumnode_counts_first_and_the_node_fills_in() -> None:
    known = node(
        {"podCIDR": "10.7.0.0/24"},
        status={"addresses": [{"type": "InternalIP", "address": f"192.0.2.{last}"} for last in (9, 1)]},
    )
    cilium_node = cilium(
        {"ipam": {"podCIDRs": ["10.7.0.0/25"]}, "addresses": [{"type": "InternalIP", "ip": "192.0.2.1"}]}
    )
    read = NodeReader("default", "kubernetes", NodeSettings()).read
    row = read(known, cilium_node)
    assert (row.full_name, str(row.node_ip(Family.IPV4))) == ("default/n1", "192.0.2.1")
    assert list(map(str, row.all_cidrs())) == ["10.7.0.0/25"]
    assert row.source == "custom-resource"
    row = read(known, None)
    assert (str(row.node_ip(Family.IPV4)), row.source) == ("192.0.2.9", "k8s")
    assert list(map(str, row.all_cidrs())) == ["10.7.0.0/24"]


def test_where_the_operator_decides_a_range_of_the_node_object_does_not_count() -> None:
    row = NodeReader("default", "cluster-pool", NodeSettings()).read(node({"podCIDR": "10.7.0.0/24"}), None)
    assert not list(row.all_cidrs())


def test_labels_that_a_pattern_matches_are_left_out() -> None:
    settings = NodeSettings(exclude_node_label_patterns=("^beta", "zone$"))
    assert settings.chosen_labels({"beta.x": "1", "zone": "a", "keep": "2"}) == {"keep": "2"}


@settings(max_examples=scaled(60), deadline=None)
@given(
    st.lists(
        st.text(max_size=20) | st.sampled_from(["10.0.0.0/8", "fd00::/64", "::/0", "1.2.3.4/33"]), max_size=4
    )
)
def test_nothing_a_node_may_hold_breaks_the_reading(texts: list[str]) -> None:
    parsed = parse_node(
        node({"podCIDRs": texts, "podCIDR": "".join(texts)}, {V4_KEY: "".join(texts)}), annotations=True
    )
    for family, cidrs in parsed.cidrs.items():
        assert all(Family.of(cidr) is family for cidr in cidrs)
        assert len(cidrs) <= 1


@pytest.mark.parametrize(
    ("claimed", "refused", "left"),
    [
        (["InternalIP 192.0.2.1"], [], ["192.0.2.1"]),
        (["InternalIP 203.0.113.9"], ["203.0.113.9"], ["192.0.2.1"]),
        (["InternalIP 192.0.2.1", "ExternalIP 203.0.113.9"], ["203.0.113.9"], ["192.0.2.1"]),
        (["Other 203.0.113.9", "InternalIP 192.0.2.1"], ["203.0.113.9"], ["192.0.2.1"]),
        (["InternalIP 192.0.2.1", "CiliumInternalIP 10.0.1.1"], [], ["192.0.2.1", "10.0.1.1"]),
        (["InternalIP 203.0.113.9", "InternalIP 2001:db8::1"], ["203.0.113.9"], ["2001:db8::1", "192.0.2.1"]),
    ],
)
def test_addresses_that_the_node_itself_has_not_are_refused(
    claimed: list[str], refused: list[str], left: list[str]
) -> None:
    """The kubelet states no address of a family that it does not use."""
    pairs = [dict(zip(("type", "ip"), one.split(), strict=True)) for one in claimed]
    reader = NodeReader("default", "cluster-pool", NodeSettings())
    known = node(status={"addresses": [{"type": "InternalIP", "address": "192.0.2.1"}]})
    row = reader.read(known, cilium({"addresses": pairs}))
    assert row.refused == tuple(f"address {ip} is not in its Node" for ip in refused)
    assert [str(each.ip) for each in row.addresses] == left


@pytest.mark.parametrize(
    ("claimed", "refused", "left"),
    [
        (["10.7.0.0/24"], [], ["10.7.0.0/24"]),
        (["10.7.0.128/25", "fd07::/112"], [], ["10.7.0.128/25", "fd07::/112"]),
        (["203.0.113.0/24"], ["203.0.113.0/24"], ["10.7.0.0/24"]),
        (["10.7.0.0/24", "10.6.0.0/15"], ["10.6.0.0/15"], ["10.7.0.0/24"]),
        ([], [], ["10.7.0.0/24"]),
    ],
)
def test_where_kubernetes_assigns_ranges_those_that_the_node_itself_has_not_are_refused(
    claimed: list[str], refused: list[str], left: list[str]
) -> None:
    """An annotation confirms nothing: agents write it."""
    reader = NodeReader("default", "kubernetes", NodeSettings(annotate_k8s_node=True))
    known = node({"podCIDR": "10.7.0.0/24"}, {V4_KEY: "203.0.113.0/24"})
    row = reader.read(known, cilium({"ipam": {"podCIDRs": claimed}}))
    assert row.refused == tuple(f"range {cidr} is in none of its Node" for cidr in refused)
    assert list(map(str, row.all_cidrs())) == left


def in_store(*addresses: str, ranges: tuple[str, ...] = ("10.7.0.0/24",)) -> ClusterNode:
    return ClusterNode(
        cluster="default",
        name="n1",
        source=Source.KVSTORE,
        addresses=tuple(NodeIP(kind, ip_address(ip)) for kind, ip in (one.split() for one in addresses)),
        ipv4_alloc_cidrs=tuple(map(IPv4Network, ranges)),
    )


def test_a_node_in_the_store_has_what_its_objects_have() -> None:
    reader = NodeReader("default", "cluster-pool", NodeSettings())
    known = reader.read(
        node(status={"addresses": [{"type": INTERNAL_IP, "address": "192.0.2.1"}]}),
        cilium({"ipam": {"podCIDRs": ["10.7.0.0/24"]}}),
    )
    honest = in_store(f"{INTERNAL_IP} 192.0.2.1", f"{CILIUM_INTERNAL_IP} 10.7.0.1")
    assert shared_node(honest, known) == honest
    assert shared_node(honest, None) is honest
    forged = shared_node(
        in_store(
            f"{INTERNAL_IP} 203.0.113.9",
            f"{CILIUM_INTERNAL_IP} 10.7.0.1",
            ranges=("10.7.0.0/24", "203.0.113.0/24"),
        ),
        known,
    )
    assert set(forged.addresses) == set(honest.addresses)
    assert list(map(str, forged.all_cidrs())) == ["10.7.0.0/24"]
    where = "its CiliumNode or Node"
    assert forged.refused == (
        f"address 203.0.113.9 is not in {where}",
        f"range 203.0.113.0/24 is in none of {where}",
    )
