"""Policy metrics."""

from functools import partial
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest

from cells.observe import metrics
from cells.policy import PolicySettings
from cells.policy.control import RulePolicy
from cells.policy.control.view import PolicyCounts, families
from cells.policy.maps import NodePolicy
from cells.policy.rules import PolicyOptions, RuleSource
from lifecycle.testing import eventually
from tests.support.ports import free_port
from tests.support.scrape import scraped
from tests.unit.policy.room import WEB, Room, room


def policy(name: str, *groups: str) -> dict[str, Any]:
    sets = [{"cidrGroupRef": group} for group in groups]
    spec = {"endpointSelector": {}, "egress": [{"toCIDRSet": sets}] if sets else [{}]}
    metadata = {"name": name, "namespace": "shop"}
    return {"kind": "CiliumNetworkPolicy", "metadata": metadata, "spec": spec}


def test_policies_that_use_a_cidr_group_that_exists_are_counted() -> None:
    world = RulePolicy(NodePolicy(PolicySettings()), PolicyOptions())
    world.set_groups({"partners": (ip_network("192.0.2.0/24"),)})
    for one in (
        policy("none"),
        policy("known", "partners"),
        policy("both", "partners", "gone"),
        policy("x", "gone"),
    ):
        world.apply(one)
    found = {family.name: dict(family.series) for family in families(world, PolicyCounts())}
    assert found["cilium_cidrgroups_referenced"] == {(): 2}
    assert found["cilium_policy"] == {(): 4}


def cnp(**spec: Any) -> dict[str, Any]:
    """A policy of the pods of a namespace."""
    metadata = {"name": "cart", "namespace": "shop"}
    return {"kind": "CiliumNetworkPolicy", "metadata": metadata, "spec": {"endpointSelector": {}, **spec}}


def ports(**above: Any) -> list[dict[str, Any]]:
    return [{"ports": [{"port": "80", "protocol": "TCP"}], **above}]


PEER: dict[str, Any] = {"fromEndpoints": [{}]}
HEADER = {"headerMatches": [{"name": "X-Key", "value": "1"}]}


@pytest.mark.parametrize(
    ("spec", "features"),
    [
        ({"ingress": [{}]}, set()),
        ({"ingress": [PEER]}, {"l3"}),
        ({"egress": [{"toEntities": ["world"]}]}, {"l3"}),
        ({"egress": [{"toPorts": ports()}]}, set()),
        ({"ingressDeny": [PEER]}, {"deny", "l3"}),
        ({"egressDeny": [{"toCIDR": ["192.0.2.0/24"]}]}, {"deny", "l3"}),
        ({"ingress": [{"fromCIDRSet": [{"cidrGroupRef": "corp"}]}]}, {"ingress_cidr_group", "l3"}),
        ({"egress": [{"toCIDRSet": [{"cidrGroupRef": "corp"}]}]}, {"l3"}),
        ({"ingress": [{"fromNodes": [{}]}]}, {"host_network", "l3"}),
        ({"egress": [{"toFQDNs": [{"matchName": "a.example"}]}]}, {"fqdn"}),
        ({"egress": [{"toPorts": ports(rules={"dns": [{"matchPattern": "*"}]})}]}, {"dns"}),
        ({"ingress": [{"toPorts": ports(rules={"http": [{"path": "/"}]})}]}, {"http"}),
        ({"ingress": [{"toPorts": ports(rules={"http": [HEADER]})}]}, {"http", "http_header_matches"}),
        ({"ingress": [{"toPorts": ports(rules={"kafka": [{"topic": "t"}]})}]}, {"other_l7"}),
        ({"egress": [{"toPorts": ports(serverNames=["a.example"])}]}, {"sni_allow_list"}),
        ({"ingress": [{**PEER, "authentication": {"mode": "required"}}]}, {"l3", "mutual_auth"}),
        ({"ingress": [PEER], "enableDefaultDeny": {"ingress": False}}, {"l3", "non_defaultdeny"}),
        ({"ingress": [PEER], "enableDefaultDeny": {"ingress": True}}, {"l3"}),
    ],
)
def test_rules_are_counted_by_what_they_use_when_they_come_and_go(
    spec: dict[str, Any], features: set[str]
) -> None:
    world = RulePolicy(NodePolicy(PolicySettings()), PolicyOptions(enable_node_selector_labels=True))
    world.apply(cnp(**spec))
    assert used(world) == ({f"{name}_policies" for name in features}, set())
    world.apply(cnp(ingress=[{}]))
    assert used(world) == ({f"{name}_policies" for name in features},) * 2
    world.delete(RuleSource("CiliumNetworkPolicy", "shop", "cart"))
    assert used(world) == ({f"{name}_policies" for name in features},) * 2


def test_a_network_policy_with_peers_is_one_of_layer_3() -> None:
    world = RulePolicy(NodePolicy(PolicySettings()), PolicyOptions())
    for name, spec in (
        ("closed", {"policyTypes": ["Ingress"]}),
        ("open", {"ingress": [{}]}),
        ("some", {"ingress": [{"from": [{"podSelector": {}}]}]}),
    ):
        metadata = {"name": name, "namespace": "shop"}
        world.apply({"kind": "NetworkPolicy", "metadata": metadata, "spec": {"podSelector": {}, **spec}})
    assert series(world)["l3_policies"] == {("add",): 2, ("delete",): 0}


def series(world: RulePolicy) -> dict[str, dict[tuple[str, ...], Any]]:
    """Features of rules, by the names of their metrics."""
    before, after = "cilium_feature_network_policies_", "_total"
    return {
        family.name.removeprefix(before).removesuffix(after): dict(family.series)
        for family in families(world, PolicyCounts())
        if family.name.startswith(before)
    }


def used(world: RulePolicy) -> tuple[set[str], set[str]]:
    """Features of rules that came, and of rules that went; each at most once."""
    found = series(world)
    assert all(value <= 1 for each in found.values() for value in each.values())
    added, deleted = ({name for name, each in found.items() if each[way,]} for way in ("add", "delete"))
    return added, deleted


def has_objects(node: Room, valid: list[bool]) -> bool:
    """Whether there are as many objects, of which these are valid."""
    return [one.valid for one in node.objects.all()] == valid


@pytest.mark.anyio
async def test_the_port_serves_how_many_objects_came_and_went(tmp_path: Path) -> None:
    port = free_port()
    given = {"manifests-dir": str(tmp_path), "prometheus-serve-addr": f":{port}"}
    refused = WEB.replace('"8080"', '"70000"')
    async with room(tmp_path, given, metrics.cell) as node:
        for text, valid in ((WEB, True), (refused, False), (WEB, True)):
            node.write(text)
            await eventually(partial(has_objects, node, [valid]))
        (tmp_path / "policy.yaml").unlink()
        await eventually(partial(has_objects, node, []))
        found = await scraped(port)
    name = "cilium_feature_network_policies_cilium_network_policies_total"
    assert found[name] == {("add",): 3, ("delete",): 1}
