"""Address claims of changing nodes: the incremental result equals a full recomputation."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, ip_interface

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cells.cluster.ipcache.rows import Source
from cells.cluster.nodes import claim_validation
from cells.cluster.nodes.claim_validation import CLAIMS, NodeGrants, claims_of, without_refused_claims
from cells.cluster.nodes.node import CILIUM_INTERNAL_IP, INTERNAL_IP, ClusterNode, NodeIP
from cells.node.devices import Device
from lifecycle import ReadTable, Table
from lifecycle.tables import LPM
from tests.support.examples import scaled

SELF = "default/n1"
DEVICES = [
    Device(2, "eth0", "", bytes(6), 1500, True, (ip_interface("10.0.0.9/29"),)),
    Device(3, "eth1", "", bytes(6), 1500, True, (ip_interface("10.0.0.130/26"),)),
]
BASE = IPv4Address("10.0.0.0")
SIZES = (20, 200)


class Claims:
    """Claims of nodes and devices of this one, and the tables that follow from them."""

    def __init__(self) -> None:
        self.claimed: Table[str, ClusterNode] = Table(
            "claimed-nodes", key=lambda node: node.full_name, indexes={CLAIMS: LPM(claims_of)}
        )
        self.devices: Table[int, Device] = Table("devices", key=lambda device: device.ifindex)
        self.granted: ReadTable[str, ClusterNode] = NodeGrants(self.claimed, lambda: SELF).table(self.devices)

    def anew(self) -> dict[str, ClusterNode]:
        """What all of them give at once."""
        return without_refused_claims(self.claimed.all(), self.devices.all(), SELF)


def node(number: int, *ranges: IPv4Network, at: int, router: int, created: str = "") -> ClusterNode:
    """Addresses count from BASE."""
    return ClusterNode(
        cluster="default",
        name=f"n{number}",
        source=Source.LOCAL if number == 1 else Source.CUSTOM_RESOURCE,
        addresses=(NodeIP(INTERNAL_IP, BASE + at), NodeIP(CILIUM_INTERNAL_IP, BASE + router)),
        health=(BASE + router + 1,),
        ipv4_alloc_cidrs=ranges,
        created=created,
    )


RANGES = st.builds(
    lambda start, bits: IPv4Network((int(BASE) + 8 * start, bits), strict=False),
    st.integers(0, 24),
    st.sampled_from([0, 8, 25, 26, 27, 28, 29, 29, 29, 32]),
)
NODES = st.builds(
    lambda number, ranges, at, router, created: node(number, *ranges, at=at, router=router, created=created),
    st.integers(1, 8),
    st.lists(RANGES, max_size=2),
    st.integers(0, 200),
    st.integers(0, 200),
    st.sampled_from(["", "1", "2"]),
)
OTHERS = NODES.filter(lambda one: one.name != "n1")
CHANGES = st.lists(OTHERS | st.integers(2, 8), min_size=1, max_size=3) | st.lists(
    NODES | st.integers(1, 8) | st.sampled_from(DEVICES), min_size=1, max_size=3
)


@settings(max_examples=scaled(300), deadline=None)
@given(st.lists(CHANGES, min_size=6, max_size=20))
def test_what_changes_leave_is_what_all_claims_give_at_once(
    rounds: Iterable[list[ClusterNode | Device | int]],
) -> None:
    claims = Claims()
    with claims.claimed.txn() as rows:
        rows.put(node(1, IPv4Network("10.0.0.0/26"), at=201, router=1, created="2"))
    for changes in rounds:
        for change in changes:
            if isinstance(change, Device):
                with claims.devices.txn() as devices:
                    if change.ifindex in claims.devices:
                        devices.delete(change.ifindex)
                    else:
                        devices.put(change)
                continue
            with claims.claimed.txn() as rows:
                if isinstance(change, ClusterNode):
                    rows.put(change)
                elif f"default/n{change}" in claims.claimed:
                    rows.delete(f"default/n{change}")
        assert {one.full_name: one for one in claims.granted.all()} == claims.anew()


@pytest.mark.parametrize("size", SIZES)
def test_a_changed_node_costs_one_node_whatever_the_size_of_the_cluster(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    looked_at: list[int] = []

    def counted(nodes: list[ClusterNode], devices: list[Device], name: str) -> dict[str, ClusterNode]:
        looked_at.append(len(nodes))
        return without_refused_claims(nodes, devices, name)

    monkeypatch.setattr(claim_validation, "without_refused_claims", counted)
    claims = Claims()
    members = [
        node(one, IPv4Network((int(BASE) + 256 * one, 24)), at=100_000 + one, router=256 * one + 1)
        for one in range(1, size + 1)
    ]
    with claims.claimed.txn() as rows:
        for one in members:
            rows.put(one)
    assert len(claims.granted) == size
    changed = msgspec.structs.replace(members[5], annotations={"note": "new"})
    for row in (changed, None, changed):  # another annotation; it leaves; it joins
        looked_at.clear()
        with claims.claimed.txn() as rows:
            if row is None:
                rows.delete(changed.full_name)
            else:
                rows.put(row)
        assert claims.granted.get(changed.full_name) == row
        assert looked_at == [2 if row is not None else 1]  # it, and this node
