"""Pod CIDRs of nodes never overlap, whatever is adopted, released and requested."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from ipaddress import ip_network

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cells.kubernetes.client.errors import ConflictError
from cells.kubernetes.objects.cilium_node import CiliumNode, CiliumNodeSpec, IPAMSpec
from cells.kubernetes.objects.kind import DatedMeta
from cells.operator.pod_cidrs.ledger import CidrPools, Ledger, NodePatch
from tests.support.apiserver import ApiServer, Fault, on
from tests.support.apiserver.errors import Resource
from tests.support.examples import scaled
from tests.support.operator import Operators

NODES = Resource("cilium.io", "ciliumnodes")


def node(name: str, cidrs: tuple[str, ...] = (), uid: str = "") -> CiliumNode:
    spec = CiliumNodeSpec(ipam=IPAMSpec(pod_cidrs=cidrs or None))
    return CiliumNode(DatedMeta(name=name, uid=uid or f"uid-{name}"), spec)


class Cluster:
    """CiliumNodes, and whatever requests are fulfilled."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.nodes: dict[str, CiliumNode] = {}
        self.errors: dict[str, str] = {}

    def report(self, changed: Mapping[str, CiliumNode | None]) -> None:
        for name, one in changed.items():
            if one is None:
                self.nodes.pop(name, None)
            else:
                self.nodes[name] = one
        for name, patch in self.ledger.update(changed).items():
            self.errors.pop(name, None)
            if patch is not None:
                self._fulfil(patch)

    def _fulfil(self, patch: NodePatch) -> None:
        if patch.error:
            self.errors[patch.name] = patch.error
        elif patch.cidrs is not None:
            self.report({patch.name: node(patch.name, patch.cidrs)})


CIDRS = ["10.1.0.0/25", "10.1.0.128/25", "10.1.0.0/24", "10.9.0.0/26", "192.0.2.0/24", "nonsense"]
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from("abcdefgh"),
        st.sampled_from(["add", "delete", "take", "lose"]),
        st.sampled_from(CIDRS),
    ),
    max_size=25,
)  # fmt: skip


@settings(max_examples=scaled(60), deadline=None)
@given(ACTIONS)
def test_no_two_nodes_share_an_address_and_none_waits_beside_a_free_range(
    actions: list[tuple[str, str, str]],
) -> None:
    pools = ["10.1.0.0/24", "10.9.0.0/24"]
    ranges = [one for pool in pools for one in ip_network(pool).subnets(new_prefix=25)]
    cluster = Cluster(Ledger(CidrPools(4, pools, 25), CidrPools(6, [], 112)))
    for name, action, cidr in actions:
        changed = {
            "add": cluster.nodes.get(name) or node(name),
            "delete": None,
            "take": node(name, (cidr,)),
            "lose": node(name),
        }[action]
        cluster.report({name: changed})
        networks = [one for held in cluster.ledger.held.values() for one in held]
        for number, one in enumerate(networks):
            assert not any(one.overlaps(other) for other in networks[number + 1 :])
        without = [one for one in cluster.nodes if one not in cluster.ledger.held]
        assert all(one in cluster.errors for one in without)
        if not all(any(one.overlaps(other) for other in networks) for one in ranges):
            assert "allocator full" not in cluster.errors.values()


def test_held_ranges_are_adopted_before_new_ones_are_allocated() -> None:
    cluster = Cluster(Ledger(CidrPools(4, ["10.0.0.0/8"], 24), CidrPools(6, ["fd00::/104"], 120)))
    cluster.report({"a": node("a"), "z": node("z", ("10.0.0.0/24", "fd00::/120"))})
    assert cluster.nodes["a"].spec.ipam.pod_cidrs == ("10.0.1.0/24", "fd00::100/120")


def test_a_recreated_node_gets_the_ranges_of_its_new_object() -> None:
    cluster = Cluster(Ledger(CidrPools(4, ["10.0.0.0/23"], 24), CidrPools(6, [], 112)))
    cluster.report({"a": node("a"), "b": node("b"), "c": node("c")})
    assert cluster.errors == {"c": "allocator full"}
    cluster.report({"a": node("a", ("192.0.2.0/24",), "another")})
    assert cluster.nodes["c"].spec.ipam.pod_cidrs == ("10.0.0.0/24",)


@pytest.mark.anyio
async def test_concurrent_writes_of_an_agent_survive_and_refused_writes_are_repeated(
    server: ApiServer, operators: Operators
) -> None:
    async with operators.running({"cluster-pool-ipv4-cidr": "10.0.0.0/8"}):
        server.faults.add(Fault(on("/apis/cilium.io/v2/ciliumnodes/node-a"), times=3, status=409))
        body = {
            "apiVersion": "cilium.io/v2",
            "kind": "CiliumNode",
            "metadata": {"name": "node-a"},
            "spec": {"eni": {"instance-type": "m5"}, "ipam": {}},
        }
        server.add(body)
        async with operators.client() as client:
            path = "/apis/cilium.io/v2/ciliumnodes/node-a"
            for number in range(40):
                change = {"metadata": {"labels": {"n": str(number)}}, "spec": {"bootid": str(number)}}
                media = b"application/merge-patch+json"
                with suppress(ConflictError):  # the fault hits the first request
                    await client.raw("PATCH", path, None, json.dumps(change).encode(), media)
            found = await client.raw("GET", path)
            while "podCIDRs" not in (spec := json.loads(found)["spec"])["ipam"]:
                found = await client.raw("GET", path)
        assert ip_network(spec["ipam"]["podCIDRs"][0]).subnet_of(ip_network("10.0.0.0/8"))  # type: ignore[arg-type]
        assert (spec["bootid"], spec["eni"]) == ("39", {"instance-type": "m5"})
