"""Remote nodes: identities of their addresses in the ipcache, and routes to their pods."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

import msgspec
import pytest
import structlog

from cells.base.addresses import Family
from cells.cluster import ipcache, remote_nodes
from cells.cluster.direct_routes import wanted
from cells.cluster.identity.identities import Identities, NodeAllocator, identity_table
from cells.cluster.identity.numbers import CLUSTER, REMOTE_NODE, WORLD, WORLD_IPV4, WORLD_IPV6
from cells.cluster.ipcache import IdentityFollower
from cells.cluster.ipcache.rows import IpcacheEntry, IpcacheTarget, Source
from cells.cluster.nodes.node import ClusterNode
from cells.cluster.nodes.parse import RulePeers, RulePeerSettings
from cells.cluster.remote_nodes import claims_of
from cells.config import AgentConfig, AgentSettings
from lifecycle import Hive, Lifecycle, Member, ReadTable, Table, invoke, provide, replace, supply
from lifecycle.testing import eventually
from tests.unit.ipcache.fakes import FakeIpcacheMap
from tests.unit.remote_nodes.nodes import node

pytestmark = pytest.mark.anyio

BOTH = {Family.IPV4: WORLD_IPV4, Family.IPV6: WORLD_IPV6}


def claims(node: ClusterNode, world: dict[Family, int]) -> dict[str, tuple[int, str]]:
    return {
        str(claim.prefix): (claim.identity, str(claim.tunnel_endpoint)) for claim in claims_of(node, world)
    }


def test_addresses_are_the_nodes_and_ranges_lead_to_it() -> None:
    assert claims(node(2, "10.2.0.0/24", "fd02::/112"), BOTH) == {
        "192.0.2.2/32": (REMOTE_NODE, "0.0.0.0"),
        "2001:db8::2/128": (REMOTE_NODE, "0.0.0.0"),
        "10.2.0.1/32": (REMOTE_NODE, "192.0.2.2"),
        "10.2.0.0/24": (WORLD_IPV4, "192.0.2.2"),
        "fd02::/112": (WORLD_IPV6, "192.0.2.2"),
    }


def test_a_family_that_is_off_is_not_claimed() -> None:
    assert set(claims(node(2, "10.2.0.0/24", "fd02::/112"), {Family.IPV4: WORLD})) == {
        "192.0.2.2/32",
        "10.2.0.1/32",
        "10.2.0.0/24",
    }


def test_the_own_node_is_not_claimed() -> None:
    assert not claims(node(1, "10.1.0.0/24", source=Source.LOCAL), BOTH)


def test_a_route_for_each_range_of_each_other_node() -> None:
    rows = [node(1, "10.1.0.0/24", source=Source.LOCAL), node(2, "10.2.0.0/24", "10.5.0.0/24", "fd02::/112")]
    routes = {str(key): (str(row.gateway), row.node) for key, row in wanted(rows, list(Family)).items()}
    assert routes == {
        "10.2.0.0/24": ("192.0.2.2", "default/n2"),
        "10.5.0.0/24": ("192.0.2.2", "default/n2"),
        "fd02::/112": ("2001:db8::2", "default/n2"),
    }


@asynccontextmanager
async def claiming(
    nodes: Table[str, ClusterNode], kernel: FakeIpcacheMap, *, labelled: bool = False, by_cidr: bool = False
) -> AsyncIterator[Hive]:
    def needed(_: Table[str, IpcacheEntry]) -> None: ...

    known: set[int] = set()

    class Policies:
        """IdentityFollower."""

        def ensure_identity(self, identity: int, labels: Collection[str]) -> None:
            there = {value.identity for value in kernel.rows.values()}
            assert identity in known or identity not in there, "policies know it first"
            known.add(identity)

    def follower() -> Member[IdentityFollower]:
        return Policies()

    agent = AgentConfig(AgentSettings(), Lifecycle("test"), structlog.get_logger())
    hive = Hive(
        ipcache.cell,
        remote_nodes.cell,
        supply(agent),
        supply(nodes, type=ReadTable[str, ClusterNode]),
        supply(RulePeers(nodes_by_labels=labelled, nodes_by_cidr=by_cidr, pods_by_cidr=False)),
        supply(Identities(identity_table(), NodeAllocator(CLUSTER))),
        provide(follower),
        replace(IpcacheTarget, kernel.target),
        invoke(needed),
    )
    async with hive.started():
        yield hive


async def test_claims_follow_nodes_that_come_change_and_go() -> None:
    nodes: Table[str, ClusterNode] = Table("nodes", key=lambda row: row.full_name)
    kernel = FakeIpcacheMap()

    def identities() -> dict[str, int]:
        return {str(prefix): value.identity for prefix, value in kernel.rows.items()}

    async with claiming(nodes, kernel):
        with nodes.txn() as txn:
            txn.put(node(2, "10.2.0.0/24"))
            txn.put(node(3))
        await eventually(lambda: identities().get("192.0.2.2/32") == REMOTE_NODE)
        await eventually(lambda: identities().get("10.2.0.0/24") == WORLD)
        with nodes.txn() as txn:
            txn.put(node(4, "10.2.0.0/24", name="n2"))
        await eventually(lambda: identities().get("192.0.2.4/32") == REMOTE_NODE)
        await eventually(lambda: "192.0.2.2/32" not in identities())
        with nodes.txn() as txn:
            txn.delete("default/n2")
        await eventually(lambda: set(identities()) == {"192.0.2.3/32", "10.3.0.1/32"})


async def test_a_range_of_two_nodes_leads_to_the_first_by_name() -> None:
    nodes: Table[str, ClusterNode] = Table("nodes", key=lambda row: row.full_name)
    kernel = FakeIpcacheMap()

    def leads_to() -> dict[str, str]:
        return {str(prefix): str(value.tunnel_endpoint) for prefix, value in kernel.rows.items()}

    async with claiming(nodes, kernel):
        for number in (2, 3):
            with nodes.txn() as txn:
                txn.put(node(number, "10.2.0.0/24"))
            await eventually(
                lambda: len(leads_to()) == 2 * len(nodes) + 1
            )  # two addresses of each; the range
        assert leads_to()["10.2.0.0/24"] == "192.0.2.2"
        with nodes.txn() as txn:
            txn.delete("default/n2")
        await eventually(lambda: leads_to().get("10.2.0.0/24") == "192.0.2.3")


async def test_a_claim_of_another_node_to_our_pod_cidr_is_ignored() -> None:
    nodes: Table[str, ClusterNode] = Table("nodes", key=lambda row: row.full_name)
    kernel = FakeIpcacheMap()
    agent = AgentConfig(AgentSettings(), Lifecycle("test"), structlog.get_logger())
    ours, moved = (
        node(1, cidr, name=agent.node_name, source=Source.LOCAL) for cidr in ("10.1.0.0/24", "10.9.0.0/24")
    )
    async with claiming(nodes, kernel):
        with nodes.txn() as txn:
            txn.put(node(2, "10.1.0.0/24"))
            txn.put(node(3, "10.1.0.128/25"))
        await eventually(lambda: {"10.1.0.0/24", "10.1.0.128/25"} <= set(kernel.rows))
        with nodes.txn() as txn:
            txn.put(ours)
        await eventually(lambda: set(kernel.rows).isdisjoint({"10.1.0.0/24", "10.1.0.128/25"}))
        assert "192.0.2.2/32" in kernel.rows, "the node itself is known"
        with nodes.txn() as txn:
            txn.put(moved)
        await eventually(lambda: {"10.1.0.0/24", "10.1.0.128/25"} <= set(kernel.rows))


async def test_nodes_have_identities_by_their_labels_where_those_count() -> None:
    nodes: Table[str, ClusterNode] = Table("nodes", key=lambda row: row.full_name)
    kernel = FakeIpcacheMap()

    def identity(address: str) -> int:
        return {str(prefix): value.identity for prefix, value in kernel.rows.items()}.get(f"{address}/32", 0)

    async with claiming(nodes, kernel, labelled=True) as hive:
        known = hive.get(Identities)
        with nodes.txn() as txn:
            for number, role in ((2, "worker"), (3, "worker"), (4, "control-plane")):
                txn.put(msgspec.structs.replace(node(number), labels={"role": role}))
        await eventually(lambda: all(identity(f"192.0.2.{number}") for number in (2, 3, 4)))
        assert identity("192.0.2.2") == identity("192.0.2.3") == identity("10.2.0.1")
        assert identity("192.0.2.4") not in {identity("192.0.2.2"), REMOTE_NODE}
        (worker,) = (one for one in known.all() if one.id == identity("192.0.2.2"))
        assert worker.labels == ("node:role=worker", "reserved:remote-node")
        with nodes.txn() as txn:
            txn.put(msgspec.structs.replace(node(4), labels={"role": "worker"}))
        await eventually(lambda: identity("192.0.2.4") == worker.id)
        await eventually(lambda: not any("node:role=control-plane" in one.labels for one in known.all()))


async def test_networks_of_policies_can_select_nodes_by_their_addresses() -> None:
    nodes: Table[str, ClusterNode] = Table("nodes", key=lambda row: row.full_name)
    kernel = FakeIpcacheMap()

    def identity(prefix: str) -> int:
        return {str(prefix): value.identity for prefix, value in kernel.rows.items()}.get(prefix, 0)

    for labelled, more in ((False, ()), (True, ("node:role=worker",))):
        with nodes.txn() as txn:
            txn.put(msgspec.structs.replace(node(2), labels={"role": "worker"}))
        async with claiming(nodes, kernel, labelled=labelled, by_cidr=True) as hive:
            known = hive.get(Identities)
            await eventually(lambda: identity("10.2.0.1/32") and identity("192.0.2.2/32"))
            for prefix in ("192.0.2.2/32", "10.2.0.1/32"):
                (found,) = (one for one in known.all() if one.id == identity(prefix))
                assert found.labels == (f"cidr:{prefix}", *more, "reserved:remote-node")
            with nodes.txn() as txn:
                txn.delete("default/n2")
            await eventually(lambda: not identity("192.0.2.2/32"))
            assert not any("cidr:192.0.2.2/32" in one.labels for one in known.all())


def test_an_unknown_match_mode_is_refused() -> None:
    RulePeerSettings(policy_cidr_match_mode=("nodes", "pods")).validate()
    with pytest.raises(
        ValueError, match="policy-cidr-match-mode=node: expected nodes, pods, both, or nothing"
    ):
        RulePeerSettings(policy_cidr_match_mode=("node",)).validate()


async def test_known_nodes_are_claimed_while_others_are_late_and_leftovers_stay_until_then() -> None:
    """As where a remote cluster cannot be reached: the nodes of the own one do not wait for it."""
    nodes: Table[str, ClusterNode] = Table("nodes", key=lambda row: row.full_name)
    late = nodes.initializer("a remote cluster")
    kernel = FakeIpcacheMap()
    kernel.put({"192.0.2.99/32": 300})
    async with claiming(nodes, kernel):
        with nodes.txn() as txn:
            txn.put(node(2))
        await eventually(lambda: kernel.identities.get("192.0.2.2/32") == REMOTE_NODE)
        assert "192.0.2.99/32" in kernel.rows
        late.done()
        await eventually(lambda: "192.0.2.99/32" not in kernel.rows)
