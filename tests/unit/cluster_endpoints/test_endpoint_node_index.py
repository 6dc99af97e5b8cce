"""The endpoints that a node change affects are found by an index, whatever the cluster's size."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Network, ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cells.cluster.ipcache.rows import Source
from cells.cluster.nodes.node import (
    INTERNAL_IP,
    AddressHolders,
    ChangedNodeAddresses,
    ClusterNode,
    EndpointNodeIndex,
    NodeIP,
    is_at,
)
from cells.kubernetes.objects.cilium_endpoint import SlimEndpoint
from lifecycle import Table

ADDRESSES = st.integers(0, 1200).map(lambda number: str(IPv4Address("10.0.0.0") + number)) | st.integers(
    0, 1 << 18
).map(lambda number: str(ip_address("fd00::") + number))
RANGES = st.builds(
    lambda number, bits: IPv4Network((0x0A000000 + number, bits), strict=False),
    st.integers(0, 1200),
    st.sampled_from([16, 22, 24, 25, 30, 32]),
) | st.builds(
    lambda number, bits: IPv6Network(((0xFD << 120) + number, bits), strict=False),
    st.integers(0, 1 << 18),
    st.sampled_from([64, 111, 112, 120, 128]),
)


def node(name: str, addresses: Iterable[str], ranges: Iterable[IPv4Network | IPv6Network]) -> ClusterNode:
    return ClusterNode(
        cluster="default",
        name=name,
        source=Source.KUBERNETES,
        addresses=tuple(NodeIP(INTERNAL_IP, ip_address(one)) for one in addresses),
        ipv4_alloc_cidrs=tuple(one for one in ranges if isinstance(one, IPv4Network)),
        ipv6_alloc_cidrs=tuple(one for one in ranges if isinstance(one, IPv6Network)),
    )


def endpoint(number: int, at: str, addresses: Iterable[str]) -> SlimEndpoint:
    prefixes = [f"{one}/{128 if ':' in one else 32}" for one in addresses]
    return SlimEndpoint(("shop", f"web-{number}"), 300, at, " ".join(prefixes))


ENDPOINTS = st.builds(endpoint, st.integers(0, 9), ADDRESSES, st.lists(ADDRESSES, max_size=2))
NODES = st.builds(node, st.sampled_from("abc"), st.lists(ADDRESSES, max_size=2), st.lists(RANGES, max_size=2))


@given(st.lists(ENDPOINTS | st.integers(0, 9), max_size=30), NODES)
def test_all_endpoints_that_a_node_concerns_are_around_it(
    changes: Iterable[SlimEndpoint | int], changed: ClusterNode
) -> None:
    places, present = EndpointNodeIndex(), dict[tuple[str, str], SlimEndpoint]()
    for change in changes:
        key = ("shop", f"web-{change}") if isinstance(change, int) else change.key
        if (old := present.pop(key, None)) is not None:
            places.remove(old)
        if not isinstance(change, int):
            present[key] = change
            places.add(change)
    concerned = {key for key, one in present.items() if is_at(ChangedNodeAddresses([changed]), one)}
    mine = {each.ip for each in changed.addresses}
    assert concerned == {
        key
        for key, one in present.items()
        for ip in map(ip_address, [prefix.partition("/")[0] for prefix in one.prefixes])
        if ip in mine or any(ip in cidr for cidr in changed.all_cidrs())
    } | {key for key, one in present.items() if ip_address(one.node) in mine}
    assert concerned <= set(places.around(changed)) <= present.keys()


@pytest.mark.parametrize("nodes", [20, 200])
def test_around_a_node_are_its_pods_whatever_the_size_of_the_cluster(nodes: int) -> None:
    places = EndpointNodeIndex()
    for at in range(nodes):
        for number in range(20):
            ip = str(IPv4Address("10.0.0.10") + 256 * at + number)
            places.add(endpoint(100 * at + number, str(IPv4Address("172.16.0.0") + at), [ip]))
    changed = node("n", ["172.16.0.7"], [IPv4Network("10.0.7.0/24")])
    assert set(places.around(changed)) == {("shop", f"web-{700 + number}") for number in range(20)}


@given(st.lists(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5)), max_size=3), max_size=6))
def test_holders_of_ranges_follow_the_nodes(rounds: Iterable[list[tuple[str, int]]]) -> None:
    """A range that moves from one node to another at once is the other's."""
    nodes: Table[str, ClusterNode] = Table("nodes", key=lambda row: row.full_name)
    holders, held = AddressHolders(nodes), dict[int, str]()
    for moves in rounds:
        for name, number in moves:
            held = {at: of for at, of in held.items() if of != name and at != number} | {number: name}
        with nodes.txn() as rows:
            rows.replace_all(
                node(name, [], [IPv4Network((0x0A000000 + 256 * number, 24))])
                for number, name in held.items()
            )
        for number in range(6):
            found = holders.of_range((4, 0x0A000007 + 256 * number))
            assert (found.name if found is not None else None) == held.get(number)
