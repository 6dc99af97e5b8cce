"""Policies as metrics."""

from ipaddress import ip_network
from typing import Any

from cells.policy import PolicySettings
from cells.policy.control import RulePolicy
from cells.policy.control.view import PolicyCounts, families
from cells.policy.maps import NodePolicy
from cells.policy.rules import PolicyOptions


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
