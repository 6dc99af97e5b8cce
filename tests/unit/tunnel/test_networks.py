"""Pod CIDRs of nodes in the tunnel, and node IDs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from ipaddress import IPv4Address, ip_address, ip_network

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cells.base.addresses import Family, IPAddress
from cells.cluster import node_ids
from cells.cluster.ipcache.rows import Source
from cells.cluster.node_ids import NodeAddressID, NodeIDs, node_map
from cells.cluster.nodes.node import CILIUM_INTERNAL_IP, INTERNAL_IP, ClusterNode, NodeIP
from cells.maps.records.cluster import NodeValue
from cells.tunnel.remote import remote_networks, unreachable_nodes
from lifecycle import Table
from tests.support.examples import scaled

BOTH = (Family.IPV4, Family.IPV6)
SELF = "default/self"


def node(
    name: str, *ips: str, cidrs: tuple[str, ...] = (), local: bool = False, router: str = ""
) -> ClusterNode:
    addresses = [NodeIP(INTERNAL_IP, ip_address(ip)) for ip in ips]
    if router:
        addresses.append(NodeIP(CILIUM_INTERNAL_IP, ip_address(router)))
    found = [ip_network(cidr) for cidr in cidrs]
    return ClusterNode(
        cluster="default",
        name=name,
        source=Source.LOCAL if local else Source.KUBERNETES,
        addresses=tuple(addresses),
        ipv4_alloc_cidrs=tuple(cidr for cidr in found if cidr.version == 4),
        ipv6_alloc_cidrs=tuple(cidr for cidr in found if cidr.version == 6),
    )


def ends(*nodes: ClusterNode) -> dict[str, str]:
    return {str(cidr): str(row.endpoint) for cidr, row in remote_networks(nodes, BOTH, SELF).items()}


def test_ranges_of_both_families_end_at_the_nodes_ipv4_address() -> None:
    other = node("b", "2001:db8::2", "192.0.2.2", cidrs=("10.2.0.0/24", "fd00:2::/112"))
    assert ends(other) == {"10.2.0.0/24": "192.0.2.2", "fd00:2::/112": "192.0.2.2"}


def test_the_local_node_has_no_tunnel_entry_before_it_is_published() -> None:
    for local in (True, False):
        assert ends(node("self", "192.0.2.1", cidrs=("10.1.0.0/24",), local=local)) == {}


def test_a_family_that_is_off_has_no_ranges() -> None:
    other = node("b", "192.0.2.2", cidrs=("10.2.0.0/24", "fd00:2::/112"))
    found = remote_networks([other], [Family.IPV6], SELF)
    assert [str(cidr) for cidr in found] == ["fd00:2::/112"]


def test_a_node_without_an_ipv4_address_is_reported_as_unreachable() -> None:
    rows = [node("b", "2001:db8::2", cidrs=("fd00:2::/112",), router="10.2.0.1")]
    assert ends(*rows) == {}
    assert unreachable_nodes(rows, SELF) == ["node default/b has no IPv4 address, which the tunnel needs"]


def test_over_ipv6_ranges_end_at_the_nodes_ipv6_address() -> None:
    both, without = node("b", "192.0.2.2", "2001:db8::2", cidrs=("10.2.0.0/24",)), node("c", "192.0.2.3")
    found = remote_networks([both, without], BOTH, SELF, Family.IPV6)
    assert {str(row.endpoint) for row in found.values()} == {"2001:db8::2"}
    wrong = unreachable_nodes([both, without], SELF, Family.IPV6)
    assert wrong == ["node default/c has no IPv6 address, which the tunnel needs"]


class Numbers:
    """Nodes, and the addresses that have numbers."""

    def __init__(self) -> None:
        self.nodes: Table[str, ClusterNode] = Table("nodes", key=lambda row: row.full_name)
        self._ids = NodeIDs(lambda: SELF)
        self._table = self._ids.table(self.nodes)
        self.forget_restored = self._ids.forget_restored

    def restored(self, rows: Mapping[IPAddress, int]) -> None:
        self._ids.restored(rows)
        self._table.wake()

    def rows(self, nodes: Iterable[ClusterNode]) -> dict[IPAddress, NodeAddressID]:
        with self.nodes.txn() as txn:
            txn.replace_all(nodes)
        return {row.ip: row for row in self._table.all()}


def numbers(ids: Numbers, *nodes: ClusterNode) -> dict[str, int]:
    return {str(ip): row.id for ip, row in ids.rows(nodes).items()}


def test_all_addresses_of_a_node_share_its_number() -> None:
    ids = Numbers()
    ids.restored({})
    found = numbers(ids, node("b", "192.0.2.2", "2001:db8::2", router="10.2.0.1"), node("c", "192.0.2.3"))
    assert found == {"192.0.2.2": 1, "2001:db8::2": 1, "10.2.0.1": 1, "192.0.2.3": 2}


def test_the_key_that_a_node_publishes_is_beside_its_number_and_changes_alone() -> None:
    """As ``cilium-dbg nodeid list`` shows it."""
    ids = Numbers()
    ids.restored({IPv4Address("192.0.2.2"): 7})
    target = node_map(None)  # type: ignore[arg-type]  # it is not written to
    published = node("b", "192.0.2.2", router="10.2.0.1")
    for key in (0, 3, 4, 255):
        rows = ids.rows([msgspec.structs.replace(published, encryption_key=key)])
        assert {target.value_of(row) for row in rows.values()} == {NodeValue(7, key)}


def test_no_node_id_is_allocated_before_the_saved_ones_are_restored() -> None:
    ids = Numbers()
    assert numbers(ids, node("b", "192.0.2.2")) == {}
    ids.restored({IPv4Address("192.0.2.2"): 7, IPv4Address("192.0.2.3"): 1})
    assert numbers(ids, node("b", "192.0.2.2")) == {"192.0.2.2": 7}


def test_a_number_of_a_node_that_may_yet_come_back_is_not_given_away() -> None:
    ids = Numbers()
    ids.restored({IPv4Address("192.0.2.3"): 1})
    assert numbers(ids, node("b", "192.0.2.2")) == {"192.0.2.2": 2}
    ids.forget_restored()
    assert numbers(ids, node("b", "192.0.2.2"), node("d", "192.0.2.4"))["192.0.2.4"] == 1


def test_the_first_node_without_a_number_gets_the_next_that_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_ids, "MAX_ID", 2)
    ids = Numbers()
    ids.restored({})
    b, c, d, e = (node(name, f"192.0.2.{number}") for number, name in enumerate("bcde", 2))
    assert numbers(ids, b, c, d, e) == {"192.0.2.2": 1, "192.0.2.3": 2}
    assert numbers(ids, c, d, e) == {"192.0.2.3": 2, "192.0.2.4": 1}
    assert numbers(ids, d, e) == {"192.0.2.4": 1, "192.0.2.5": 2}


@pytest.mark.parametrize("size", [20, 200])
def test_a_changed_node_has_no_other_numbered_again(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    made: list[str] = []

    def counted(ip: IPAddress, number: int, name: str, spi: int) -> NodeAddressID:
        made.append(name)
        return NodeAddressID(ip, number, name, spi)

    monkeypatch.setattr(node_ids, "NodeAddressID", counted)
    ids = Numbers()
    ids.restored({})
    nodes = [node(f"n{number}", f"192.0.2.{number}") for number in range(1, size + 1)]
    before = ids.rows(nodes)
    made.clear()
    nodes[7] = msgspec.structs.replace(nodes[7], encryption_key=3)
    after = ids.rows(nodes)
    assert made == ["default/n8"]
    assert [ip for ip, row in after.items() if row != before[ip]] == [IPv4Address("192.0.2.8")]
    assert len(ids.rows(nodes[1:])) == size - 1
    assert made == ["default/n8"]


@settings(max_examples=scaled(60), deadline=None)
@given(
    st.lists(st.sets(st.integers(1, 12)), min_size=1, max_size=8),
    st.dictionaries(st.integers(1, 12), st.integers(1, 9)),
)
def test_numbers_are_distinct_and_stay(rounds: list[set[int]], before: dict[int, int]) -> None:
    """Nodes come and go: no two have one number at a time, and who stays keeps its own."""
    ids = Numbers()
    ids.restored({IPv4Address(f"192.0.2.{name}"): number for name, number in before.items()})
    known: dict[str, int] = {}
    for names in rounds:
        rows = [node(f"n{name}", f"192.0.2.{name}", f"2001:db8::{name}") for name in names]
        found = {row.node: row.id for row in ids.rows(rows).values()}
        assert len(found) == len(names) == len(set(found.values()))
        assert all(found[name] == number for name, number in known.items() if name in found)
        known = found
