"""The chart's RBAC rules and object names, compared with those of Cilium's chart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import pytest

from tests.integration.deploy.rendered import comparable, load, recorded, rendered
from tests.support.counts import Count

helm = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed: make install-test")

Right = tuple[str, str, str, str, str]
"""Role or cluster role, group, resource, name or ``*``, verb."""

MORE: Final = {
    ("cilium", "cilium.io", "ciliumidentities"): "a heartbeat and a double write read and mark the object",
    ("cilium", "events.k8s.io", "events"): "events about objects that are not served as written",
    ("cilium-operator", "", "nodes"): "the operator reads the Node before it patches the taints",
    ("cilium-operator", "", "pods"): "disableEndpointCRD has no effect without a kvstore",
    (
        "cilium-operator",
        "cilium.io",
        "ciliumidentities",
    ): "the garbage collector sets its annotation by a patch",
    (
        "cilium-operator",
        "cilium.io",
        "ciliumloadbalancerippools/status",
    ): "conditions are written by an update of the status",
    ("cilium-operator", "cilium.io", "ciliumnodes"): "pod CIDRs are patched, where Cilium updates the object",
    ("cilium-operator", "cilium.io", "ciliumnodes/status"): "errors are written by a patch of the status",
}
"""Cluster role, group and resource of verbs that Cilium's chart does not grant, and their use."""
GENERATOR: Final = "hubble-generate-certs"
"""Of its objects the recording has the names alone."""
OWN: Final = {
    "DaemonSet/cilium-bgp-speaker": "gobgpd runs in a separate pod",
    "Role/cilium-l2-announcements": "Leases are granted in one namespace, not in all",
    "RoleBinding/cilium-l2-announcements": "Leases are granted in one namespace, not in all",
    "Role/cilium-operator": "the election's Lease is granted in one namespace, not in all",
    "RoleBinding/cilium-operator": "the election's Lease is granted in one namespace, not in all",
}
LEFT_OUT: Final = {
    "Namespace/cilium-secrets": "no Secrets are synchronised",
    "Role/cilium-config-agent": "the ConfigMap is mounted, unless daemon.configSources names others",
    "RoleBinding/cilium-config-agent": "the ConfigMap is mounted, unless daemon.configSources names others",
}
HUBBLE: Final = {"Secret/cilium-ca", "Secret/hubble-server-certs", "Service/hubble-peer"}
"""Objects that the recordings leave out where Hubble is on."""


def rights(objects: Mapping[str, Any]) -> Iterator[Right]:
    """Every right of every role."""
    for key, one in objects.items():
        if one["kind"] not in {"ClusterRole", "Role"} or one["metadata"]["name"] == GENERATOR:
            continue
        for rule in one.get("rules") or ():
            for group in rule["apiGroups"]:
                for resource in rule["resources"]:
                    for name in rule.get("resourceNames", ["*"]):
                        yield from ((key, group, resource, name, verb) for verb in rule["verbs"])


def given(objects: Mapping[str, Any]) -> set[Right]:
    """Rights of agents and of operators, whether by a role of one namespace or of the cluster."""
    return {
        ("cilium-operator" if "operator" in role else "cilium", group, resource, name, verb)
        for role, group, resource, name, verb in rights(objects)
    }


def sets() -> list[str]:
    return [name for name in comparable() if not isinstance(rendered(name), str)]


@pytest.mark.parametrize("name", sets())
def test_no_more_is_allowed_than_by_cilium_s_chart_but_for_a_reason(name: str, count: Count) -> None:
    ours = rendered(name)
    assert isinstance(ours, dict)
    allowed = {(who, group, resource, verb) for who, group, resource, _, verb in given(recorded(name))}
    for who, group, resource, _, verb in given(ours):
        if {(who, group, resource, verb), (who, group, resource, "*")} & allowed:
            count("rights", {"Cilium's chart gives them too": 1})
            continue
        reason = MORE.get((who, group, resource))
        assert reason is not None, (who, group, resource, verb)
        count("rights", {f"given here: {reason}": 1})


@pytest.mark.parametrize("name", sets())
def test_rights_that_values_take_away_are_taken_away(name: str) -> None:
    default = load("default")["rendered"]
    taken = given(default) - given(recorded(name))
    ours = rendered(name)
    assert isinstance(ours, dict)
    left = {right for right in taken & given(ours) if right[:3] not in MORE}
    assert left == set()


@pytest.mark.parametrize("name", sets())
def test_the_objects_are_those_of_cilium_s_chart_or_named(name: str) -> None:
    others = load(name).get("other_objects") or {}
    theirs = recorded(name).keys() | set(load("default")["other_objects"]) | set(others.get("added", ()))
    ours = rendered(name)
    assert isinstance(ours, dict)
    theirs -= set(others.get("removed", ()))
    mine = {key for key in ours if not key.startswith("ValidatingAdmissionPolicy")}
    assert mine - theirs - OWN.keys() - HUBBLE == set()
    assert theirs - mine - LEFT_OUT.keys() == set()
