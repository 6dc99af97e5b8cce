"""Multi-pool ranges never overlap between nodes, whatever is requested, released or changed in pools."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from ipaddress import ip_network

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cells.kubernetes.objects.cilium_node import AllocatedPool, CiliumNode
from cells.kubernetes.objects.cilium_pools import CiliumPodIPPool
from cells.operator.multi_pool import pool_spec
from cells.operator.multi_pool.ledger import PoolLedger, usable
from cells.operator.pod_cidrs import NodePatch, with_pools
from tests.integration.operator.recordings import Json, load
from tests.support.counts import Count
from tests.support.examples import scaled


def pool(name: str, *cidrs: str, mask: int = 28) -> CiliumPodIPPool:
    body = {"metadata": {"name": name}, "spec": {"ipv4": {"cidrs": cidrs, "maskSize": mask}}}
    return msgspec.convert(body, CiliumPodIPPool)


class Cluster:
    """CiliumNodes with requests that are fulfilled at once unless the server is away."""

    def __init__(self) -> None:
        self.ledger = PoolLedger()
        self.nodes: dict[str, Json] = {}
        self.errors: dict[str, str] = {}
        self.away = False

    def define(self, *pools: CiliumPodIPPool, vanished: tuple[str, ...] = ()) -> None:
        changed: dict[str, CiliumPodIPPool | None] = {one.name: one for one in pools}
        self._fulfil(self.ledger.define(changed | dict.fromkeys(vanished)))

    def add(
        self,
        name: str,
        requested: Mapping[str, int] | None = None,
        allocated: Mapping[str, list[str]] | None = None,
    ) -> None:
        self.report({name: self.body(name, requested or {}, allocated or {})})

    def body(self, name: str, requested: Mapping[str, int], allocated: Mapping[str, list[str]]) -> Json:
        asked = [{"pool": key, "needed": {"ipv4-addrs": need}} for key, need in requested.items()]
        has = [{"pool": key, "cidrs": cidrs} for key, cidrs in allocated.items()]
        meta = {"name": name, "uid": f"uid-{name}"}
        return {"metadata": meta, "spec": {"ipam": {"pools": {"requested": asked, "allocated": has}}}}

    def report(self, changed: Mapping[str, Json | None]) -> None:
        for name, body in changed.items():
            if body is None:
                self.nodes.pop(name, None)
                self.errors.pop(name, None)
            else:
                self.nodes[name] = body
        rows = {
            name: None if body is None else msgspec.convert(body, CiliumNode)
            for name, body in changed.items()
        }
        self._fulfil(self.ledger.update(rows))

    def ranges(self, name: str, of: str = "p") -> list[str]:
        pools = self.nodes[name]["spec"]["ipam"]["pools"].get("allocated") or []
        return [cidr for one in pools if one["pool"] == of for cidr in one["cidrs"]]

    def ask(self, name: str, of: str, need: int) -> None:
        """The agent asks for so many addresses."""
        body = msgspec.json.decode(msgspec.json.encode(self.nodes[name]))
        body["spec"]["ipam"]["pools"]["requested"] = [{"pool": of, "needed": {"ipv4-addrs": need}}]
        self.report({name: body})

    def give_back(self, name: str, keep: int) -> None:
        """The agent keeps so many ranges of each pool."""
        body = msgspec.json.decode(msgspec.json.encode(self.nodes[name]))
        for one in body["spec"]["ipam"]["pools"].get("allocated") or []:
            one["cidrs"] = one["cidrs"][:keep]
        self.report({name: body})

    def _fulfil(self, patches: Mapping[str, NodePatch | None]) -> None:
        for name, patch in patches.items():
            self.errors[name] = patch.error if patch is not None else ""
            if patch is None or patch.pools is None or self.away:
                continue
            body = msgspec.json.decode(msgspec.json.encode(self.nodes[name]))
            if (live := with_pools(patch, patch.pools, body)) is not None:
                self.report({name: live})


ZERO = st.just(0)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.sampled_from("abc"), st.sampled_from("pq"), st.integers(0, 40)),
        st.tuples(st.just("keep"), st.sampled_from("abc"), st.just("p"), st.integers(0, 3)),
        st.tuples(st.sampled_from(["delete", "away", "back"]), st.sampled_from("abc"), st.just("p"), ZERO),
        st.tuples(st.sampled_from(["shrink", "widen", "drop"]), st.just("a"), st.sampled_from("pq"), ZERO),
    ),
    max_size=30,
)  # fmt: skip


@settings(max_examples=scaled(80), deadline=None)
@given(ACTIONS)
def test_no_two_nodes_share_an_address_and_none_waits_beside_a_free_range(
    actions: list[tuple[str, str, str, int]],
) -> None:
    cluster = Cluster()
    cluster.define(pool("p", "10.0.0.0/26"), pool("q", "10.0.0.32/27", mask=29))  # q is half of p
    for what, name, of, number in actions:
        if what in {"ask", "keep"} and name not in cluster.nodes:
            cluster.add(name)
        if what == "ask":
            cluster.ask(name, of, number)
        elif what == "keep":
            cluster.give_back(name, number)
        elif what == "delete":
            cluster.report({name: None})
        elif what == "drop":
            cluster.define(vanished=(of,))
        elif what in {"shrink", "widen"}:
            cidrs = ["10.0.0.0/26" if of == "p" else "10.0.0.32/27"] + ["10.1.0.0/28"] * (what == "widen")
            cluster.define(pool(of, *cidrs, mask=28 if of == "p" else 29))
        else:
            cluster.away = what == "away"
            cluster.report(dict(cluster.nodes))
        networks = [network for held in cluster.ledger.held().values() for _, network in held]
        for at, one in enumerate(networks):
            assert not any(one.overlaps(other) for other in networks[at + 1 :])
    cluster.away = False
    cluster.report(dict(cluster.nodes))
    for name, held in cluster.ledger.held().items():
        assert sorted(str(network) for _, network in held) == sorted(
            cluster.ranges(name, "p") + cluster.ranges(name, "q")
        )


def test_a_node_that_found_the_pool_empty_is_served_when_a_range_comes_free() -> None:
    cluster = Cluster()
    cluster.define(pool("p", "10.0.0.0/27"))
    cluster.add("a", {"p": 20})
    cluster.add("b", {"p": 5})
    assert cluster.errors["b"] == 'failed to allocate ipv4 address for node "b" from pool "p": pool empty'
    cluster.give_back("a", 1)
    assert cluster.ranges("b") == []  # a still asks for both
    cluster.ask("a", "p", 8)
    cluster.give_back("a", 1)
    assert cluster.ranges("b") == ["10.0.0.16/28"]
    assert cluster.errors["b"] == ""


def test_ranges_of_nodes_are_adopted_without_a_pool_and_each_address_once() -> None:
    cluster = Cluster()
    cluster.define(pool("p", "10.10.0.0/24", mask=26))
    bodies = {
        "a": cluster.body("a", {"p": 8}, {}),
        "m": cluster.body("m", {"p": 8}, {"p": ["10.10.0.0/26"]}),
        "n": cluster.body("n", {"p": 8}, {"p": ["10.10.0.0/26"]}),
        "o": cluster.body("o", {"p": 8}, {"gone": ["10.99.0.0/26"]}),
        "q": cluster.body("q", {"p": 8}, {"p": ["10.200.0.0/26"]}),
    }
    cluster.report(bodies)
    assert cluster.ranges("m") == ["10.10.0.0/26"]
    assert cluster.ranges("n") not in ([], ["10.10.0.0/26"])
    assert cluster.errors["n"] == "unable to reuse from pool p: cidr 10.10.0.0/26 has already been allocated"
    assert cluster.ranges("o", "gone") == ["10.99.0.0/26"]
    assert cluster.errors["o"] == "cannot reuse from non-existing pool: gone"
    assert cluster.ranges("q") == ["10.200.0.0/26"]
    assert cluster.errors["q"] == (
        "unable to reuse from pool p: cidr 10.200.0.0/26 is not part of the requested pool"
    )
    assert cluster.ranges("a") == ["10.10.0.192/26"]
    cluster.ask("n", "p", 9)  # its agent continues: what it lost is no longer reported
    assert cluster.errors["n"] == ""


def test_the_ranges_of_a_pool_that_is_made_again_under_another_name_are_not_given_out_twice() -> None:
    cluster = Cluster()
    cluster.define(pool("p", "10.0.0.0/24"))
    cluster.add("a", {"p": 5})
    cluster.define(pool("renamed", "10.0.0.0/24"), vanished=("p",))
    cluster.add("b", {"renamed": 5})
    assert (cluster.ranges("a"), cluster.ranges("b", "renamed")) == (["10.0.0.0/28"], ["10.0.0.16/28"])


def test_an_invalid_pool_change_is_rejected_and_reported() -> None:
    cluster = Cluster()
    cluster.define(pool("p", "10.0.0.0/24"), pool("over", "10.1.0.0/24", "10.1.0.128/25"))
    cluster.define(pool("p", "10.0.0.0/24", mask=26))
    assert cluster.ledger.faults == {
        "p": 'cannot change IPv4 mask size in existing pool "p"',
        "over": "requested CIDR 10.1.0.128/25 collides with clusterCIDR: 10.1.0.0/24, nodeMask: 28",
    }
    cluster.add("a", {"p": 1, "over": 1})
    assert cluster.ranges("a") == ["10.0.0.0/28"]
    assert (
        'from pool "over": definition cannot be applied: requested CIDR 10.1.0.128/25' in cluster.errors["a"]
    )
    cluster.ask("a", "p", 1000)
    assert 'from pool "p": pool empty, and its new definition is not in force: cannot' in cluster.errors["a"]
    cluster.define(pool("p", "10.0.0.0/24"))
    assert cluster.errors["a"].endswith('from pool "p": pool empty')


def test_a_range_that_was_given_and_never_seen_is_not_given_to_another() -> None:
    cluster = Cluster()
    cluster.define(pool("p", "10.0.0.0/24"))
    cluster.away = True
    cluster.add("a", {"p": 5})
    cluster.ask("a", "p", 6)  # the object as it was before the range was written
    cluster.away = False
    cluster.add("b", {"p": 5})
    cluster.ask("a", "p", 7)
    assert (cluster.ranges("a"), cluster.ranges("b")) == (["10.0.0.0/28"], ["10.0.0.16/28"])


def test_concurrent_changes_of_an_agent_are_not_overwritten() -> None:
    ledger = PoolLedger()
    ledger.define({"p": pool("p", "10.0.0.0/24")})
    cluster = Cluster()
    body = cluster.body("a", {"p": 20}, {"p": ["10.0.0.0/28"]})
    patch = ledger.update({"a": msgspec.convert(body, CiliumNode)})["a"]
    assert patch is not None
    assert patch.pools is not None
    assert patch.pools.allocated == (AllocatedPool("p", ("10.0.0.0/28", "10.0.0.16/28")),)
    assert with_pools(patch, patch.pools, cluster.body("a", {"p": 0}, {})) is None
    assert with_pools(patch, patch.pools, body) is body


def test_ranges_are_counted_as_recorded_but_for_those_too_small_to_have_a_first_and_a_last(
    count: Count,
) -> None:
    recorded = load("mp_capacity")
    ledger = PoolLedger()
    for request in recorded["steps"][0]["by_test"]:
        row = msgspec.convert(request["body"], CiliumPodIPPool)
        ledger.define({row.name: row})
    wanted = recorded["allocated"]
    outcomes: Counter[str] = Counter()
    for request in recorded["steps"][1]["by_test"]:
        node = msgspec.convert(request["body"], CiliumNode)
        patch = ledger.update({node.name: node})[node.name]
        assert patch is not None
        assert patch.pools is not None
        found = patch.pools.allocated[0].cidrs or ()
        mask = int(found[0].partition("/")[2])
        if mask in {31, 32, 127, 128}:  # Cilium counts none in them, and gives the whole pool to one node
            needed = node.spec.ipam.pools.requested[0].needed if node.spec.ipam.pools.requested else None
            assert needed is not None
            small = 1 if mask in {32, 128} else 2
            assert len(found) == -(-(needed.ipv4 or needed.ipv6) // small)
            outcomes["every address of a small range counts"] += 1
        else:
            assert len(found) == len(wanted[node.name])
            outcomes["as many ranges as recorded"] += 1
    count("capacity of ranges", outcomes)


def test_pools_to_make_are_read_as_the_chart_writes_them() -> None:
    assert pool_spec("ipv4-cidrs:10.0.0.0/16,10.2.0.0/16;ipv4-mask-size:24; ipv6-cidrs:fd00::/104") == {
        "ipv4": {"cidrs": ["10.0.0.0/16", "10.2.0.0/16"], "maskSize": 24},
        "ipv6": {"cidrs": ["fd00::/104"]},
    }
    for text, wrong in (
        ("ipv4-cidrs", "expected KEY:VALUE"),
        ("foo:1", "expected ipv4-cidrs, ipv4-mask-size"),
        ("ipv4-cidrs:fd00::/64", "expected an IPv4 network"),
        ("ipv4-mask-size:x", "expected a prefix length"),
    ):
        with pytest.raises(ValueError, match=wrong):
            pool_spec(text)


def test_addresses_of_wide_ranges_are_those_an_agent_hands_out() -> None:
    texts = ("10.0.0.0/28", "10.0.0.0/31", "10.0.0.0/32", "fd00::/124", "fd00::/96")
    assert [usable(ip_network(text)) for text in texts] == [14, 2, 1, 14, 65534]
