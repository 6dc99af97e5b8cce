"""Claims of other nodes are rejected if they overlap this node's, another's, or everybody's ranges."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv4Network, ip_address, ip_interface, ip_network

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cells.base.addresses import IPNetwork
from cells.cluster.ipcache.rows import Source
from cells.cluster.nodes import claim_validation
from cells.cluster.nodes.claim_validation import RefusedClaims, without_refused_claims
from cells.cluster.nodes.node import CILIUM_INTERNAL_IP, INTERNAL_IP, ClusterNode, NodeIP
from cells.node.devices import Device
from lifecycle import Hive, ReadTable, Table, invoke, module, provide, supply
from lifecycle.testing import eventually

SELF = "default/n1"
DEVICES = [
    Device(1, "lo", "", bytes(6), 65536, True, (ip_interface("127.0.0.1/8"),)),
    Device(
        2, "eth0", "", bytes(6), 1500, True, (ip_interface("192.0.2.1/24"), ip_interface("2001:db8::1/64"))
    ),
]


def node(number: int, *cidrs: str, ip: str = "", created: str = "", local: bool = False) -> ClusterNode:
    networks = [ip_network(cidr) for cidr in cidrs]
    return ClusterNode(
        cluster="default",
        name=f"n{number}",
        source=Source.LOCAL if local else Source.CUSTOM_RESOURCE,
        addresses=(NodeIP(INTERNAL_IP, ip_address(ip or f"192.0.2.{number}")),),
        ipv4_alloc_cidrs=tuple(one for one in networks if one.version == 4),
        ipv6_alloc_cidrs=tuple(one for one in networks if one.version == 6),
        created=created,
    )


OWN = node(1, "10.1.0.0/24", "fd01::/112", local=True)


def found(*nodes: ClusterNode) -> dict[str, ClusterNode]:
    return without_refused_claims([OWN, *nodes], DEVICES, SELF)


@pytest.mark.parametrize(
    ("claimed", "reason"),
    [
        ("0.0.0.0/0", "is every address"),
        ("::/0", "is every address"),
        ("192.0.0.0/16", "has this node's own address 192.0.2.1"),
        ("192.0.2.128/25", "overlaps 192.0.2.0/24, this node's network"),
        ("2001:db8::/96", "has this node's own address 2001:db8::1"),
        ("10.1.0.64/28", "overlaps 10.1.0.0/24, this node's pods"),
        ("10.0.0.0/8", "overlaps 10.1.0.0/24, this node's pods"),
        ("127.1.0.0/24", "has addresses that are no pod's (loopback, link-local, multicast)"),
        ("ff00::/16", "has addresses that are no pod's (loopback, link-local, multicast)"),
    ],
)
def test_a_range_that_no_other_node_may_have_is_refused(claimed: str, reason: str) -> None:
    other = found(node(2, claimed, "10.2.0.0/24"))["default/n2"]
    assert [str(cidr) for cidr in other.all_cidrs()] == ["10.2.0.0/24"]
    assert other.refused == (f"range {claimed} {reason}",)


@pytest.mark.parametrize(
    ("ip", "reason"),
    [
        ("127.0.0.1", "is not an address of a node"),
        ("0.0.0.0", "is not an address of a node"),
        ("224.0.0.1", "is not an address of a node"),
        ("192.0.2.1", "is this node's own"),
        ("192.0.2.3", "is that of default/n3"),
    ],
)
def test_an_address_that_no_other_node_may_have_is_refused(ip: str, reason: str) -> None:
    older = node(3, created="2026-01-01T00:00:00Z")
    other = found(older, node(2, "10.2.0.0/24", ip=ip, created="2026-01-02T00:00:00Z"))["default/n2"]
    assert (other.addresses, other.refused) == ((), (f"address {ip} {reason}",))


ROUTED = msgspec.structs.replace(
    OWN, addresses=(*OWN.addresses, NodeIP(CILIUM_INTERNAL_IP, ip_address("10.1.0.1")))
)
"""This node, with its router in its range."""


@pytest.mark.parametrize("what", ["health", "ingress", "router"])
@pytest.mark.parametrize(
    ("ip", "reason"),
    [
        ("10.2.0.9", ""),
        ("fd02::9", ""),
        ("10.1.0.9", "is in a range of default/n1"),
        ("10.3.0.9", "is in a range of default/n3"),
        ("203.0.113.9", "is in no range of its pods"),
        ("192.0.2.1", "is this node's own"),
        ("192.0.2.3", "is that of default/n3"),
        ("169.254.1.1", "is not an address of a node"),
    ],
)
def test_what_agents_take_from_their_ranges_is_in_them(what: str, ip: str, reason: str) -> None:
    """Of another node, a pod, a service, outside: it would be sent through the tunnel to who claims it."""
    claimed = node(2, "10.2.0.0/24", "fd02::/112")
    if what == "router":
        address = NodeIP(CILIUM_INTERNAL_IP, ip_address(ip))
        claimed = msgspec.structs.replace(claimed, addresses=(*claimed.addresses, address))
    else:
        claimed = msgspec.structs.replace(claimed, **{what: (ip_address(ip),)})
    own = msgspec.structs.replace(
        ROUTED, addresses=(*ROUTED.addresses, NodeIP(CILIUM_INTERNAL_IP, ip_address("fd01::1")))
    )
    rows = without_refused_claims([own, node(3, "10.3.0.0/24"), claimed], DEVICES, SELF)
    row = rows["default/n2"]
    assert rows["default/n3"].refused == (), "the older object takes nothing of others by its router"
    if not reason:
        assert row is claimed
        return
    (text,) = row.refused
    assert text.endswith(f"address {ip} {reason}")
    assert (row.health, row.ingress, len(row.addresses)) == ((), (), 1)


def test_a_node_without_ranges_has_no_address_for_health() -> None:
    """Else it would drop its ranges, and claim any."""
    claimed = msgspec.structs.replace(node(2), health=(ip_address("203.0.113.9"),))
    row = found(claimed)["default/n2"]
    assert row.refused == ("health address 203.0.113.9 is in no range of its pods",)
    refused_range = msgspec.structs.replace(node(2, "192.0.2.0/24"), health=(ip_address("192.0.2.9"),))
    assert found(refused_range)["default/n2"].health == ()


def test_routers_may_be_outside_of_ranges_where_this_node_s_is() -> None:
    """With local-router-ipv4 in the cluster. They take no pod's address, and health may not be outside."""
    router = NodeIP(CILIUM_INTERNAL_IP, ip_address("10.254.0.2"))
    claimed = msgspec.structs.replace(
        node(2, "10.2.0.0/24"),
        addresses=(*node(2).addresses, router),
        health=(ip_address("10.254.0.3"),),
    )
    outside = NodeIP(CILIUM_INTERNAL_IP, ip_address("10.254.0.1"))
    own = msgspec.structs.replace(OWN, addresses=(*OWN.addresses, outside))
    thief = node(3)
    thief = msgspec.structs.replace(
        thief, addresses=(*thief.addresses, NodeIP(CILIUM_INTERNAL_IP, ip_address("10.2.0.9")))
    )
    rows = without_refused_claims([own, thief, claimed], DEVICES, SELF)
    assert router in rows["default/n2"].addresses
    assert rows["default/n2"].refused == ("health address 10.254.0.3 is in no range of its pods",)
    assert rows["default/n3"].refused == ("router address 10.2.0.9 is in a range of default/n2",)


def test_of_nodes_with_ranges_that_overlap_the_oldest_object_keeps_its_own() -> None:
    rows = found(
        node(2, "10.2.0.0/16", created="2026-01-02T00:00:00Z"),
        node(3, "10.2.3.0/24", created="2026-01-01T00:00:00Z"),
        node(4, "10.2.3.0/24", "10.4.0.0/24", created="2026-01-03T00:00:00Z"),
    )
    assert rows["default/n3"].refused == ()
    assert rows["default/n2"].refused == ("range 10.2.0.0/16 overlaps 10.2.3.0/24 of default/n3",)
    assert rows["default/n4"].refused == ("range 10.2.3.0/24 overlaps 10.2.3.0/24 of default/n3",)
    assert [str(cidr) for cidr in rows["default/n4"].all_cidrs()] == ["10.4.0.0/24"]


@pytest.mark.parametrize(
    ("claimed", "reason"),
    [
        ("0.0.0.0/0", "is every address"),
        ("192.0.2.0/25", "has this node's own address 192.0.2.1"),
        ("192.0.2.128/25", "overlaps 192.0.2.0/24, this node's network"),
        ("169.254.0.0/24", "has addresses that are no pod's (loopback, link-local, multicast)"),
        ("10.3.0.0/16", "overlaps 10.3.3.0/24 of default/n3"),
    ],
)
@pytest.mark.parametrize("local", [True, False])
def test_this_node_loses_no_range_and_does_not_announce_a_wrong_one(
    claimed: str, reason: str, local: bool
) -> None:
    """Also where only its object is known."""
    own = node(1, "10.1.0.0/24", claimed, created="2026-01-02T00:00:00Z", local=local)
    elder = node(3, "10.3.3.0/24", created="2026-01-01T00:00:00Z")
    younger = node(4, "10.1.0.0/16", created="2026-01-03T00:00:00Z")
    row = without_refused_claims([own, younger, elder], DEVICES, SELF)[SELF]
    assert list(row.all_cidrs()) == list(own.all_cidrs())
    assert row.unannounced == (ip_network(claimed),)
    assert row.refused == (f"range {claimed} {reason}: in use here, not announced",)


def test_a_node_with_ranges_of_its_own_announces_them_all() -> None:
    own = node(1, "10.1.0.0/24", "fd01::/112", local=True)
    router = NodeIP(CILIUM_INTERNAL_IP, ip_address("10.1.0.1"))
    own = msgspec.structs.replace(own, addresses=(*own.addresses, router))
    bridge = Device(9, "cni0", "", bytes(6), 1500, True, (ip_interface("10.1.0.2/24"),))
    assert without_refused_claims([own, node(2, "10.2.0.0/24")], [*DEVICES, bridge], SELF)[SELF] is own


RANGES = st.builds(
    lambda start, bits: IPv4Network((start << 24 | 10 << 24, bits), strict=False),
    st.integers(0, 2),
    st.integers(8, 12),
) | st.builds(
    lambda start, bits: IPv4Network((0x0A000000 + (start << 8), bits), strict=False),
    st.integers(0, 600),
    st.integers(14, 32),
)


@given(st.lists(st.tuples(st.lists(RANGES, max_size=3), st.integers(0, 5), st.sampled_from(["", "1", "2"]))))
def test_no_address_leads_to_two_nodes(claims: Iterable[tuple[list[IPv4Network], int, str]]) -> None:
    claimed = [
        msgspec.structs.replace(
            node(number, ip=f"198.51.100.{address}", created=created), ipv4_alloc_cidrs=tuple(ranges)
        )
        for number, (ranges, address, created) in enumerate(claims, 2)
    ]
    rows = found(*claimed)
    owned = [(cidr, name) for name, row in rows.items() for cidr in row.all_cidrs() if cidr.version == 4]
    for at, (one, its) in enumerate(owned):
        assert all(its == name or not one.overlaps(other) for other, name in owned[:at])
    addresses = [each.ip for row in rows.values() for each in row.addresses]
    assert len(addresses) == len(set(addresses))
    for before in claimed:
        after = rows[before.full_name]
        lost = [*before.addresses, *before.all_cidrs()]
        retained = [*after.addresses, *after.all_cidrs()]
        assert len(lost) - len(retained) == len(after.refused)
        assert after.refused or after is before


@pytest.mark.anyio
async def test_refused_claims_are_logged_and_in_health_until_withdrawn() -> None:
    nodes: Table[str, ClusterNode] = Table("nodes", key=lambda row: row.full_name)
    cell = module("nodes", "Nodes", provide(RefusedClaims), invoke(RefusedClaims))
    hive = Hive(cell, supply(nodes, type=ReadTable[str, ClusterNode]))

    def health() -> list[tuple[str, str]]:
        rows = hive.health.snapshot()
        return [(row.level, row.message) for row in rows if row.module.endswith("nodes.claims")]

    async with hive.started():
        with nodes.txn() as txn:
            txn.put(found(node(2, "0.0.0.0/0"))["default/n2"])
        text = "refused claims of nodes: default/n2: range 0.0.0.0/0 is every address"
        await eventually(lambda: health() == [("degraded", text)])
        with nodes.txn() as txn:
            txn.put(node(2))
        await eventually(lambda: [level for level, _ in health()] == ["ok"])


def test_a_node_more_has_no_range_of_the_others_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    impossible_range = claim_validation.impossible_range

    def counted(cidr: IPNetwork) -> str:
        checked.append(str(cidr))
        return impossible_range(cidr)

    monkeypatch.setattr(claim_validation, "impossible_range", counted)
    nodes = [node(number, f"10.7.{number}.0/24") for number in range(10, 100)]
    assert not any(one.refused for one in found(*nodes).values())
    checked.clear()
    rows = found(*nodes, node(100, "10.7.100.0/24"), node(101, "127.0.0.0/24"))
    assert set(checked) == {"10.7.100.0/24", "127.0.0.0/24"}
    assert [one.name for one in rows.values() if one.refused] == ["n101"]
