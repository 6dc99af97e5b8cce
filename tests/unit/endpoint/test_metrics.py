"""Endpoints as metrics: how many in which state, what is enforced, which identities there are."""

from __future__ import annotations

from pathlib import Path

from cells.endpoint import Level
from cells.endpoint.metrics import families
from cells.endpoint.policy import Enforcement
from tests.unit.endpoint.fakes import Node, request


def told(node: Node) -> dict[str, dict[tuple[str, ...], object]]:
    """Every family's series."""
    return {family.name: dict(family.series) for family in families(node.endpoints, node.policy)}


def test_endpoints_are_told_by_the_state_that_is_shown(tmp_path: Path) -> None:
    node = Node(tmp_path)
    assert told(node)["cilium_endpoint_state"] == {}
    node.endpoints.create(request(1))
    broken = node.endpoints.create(request(2))
    node.kernel.refuse = "fill"
    node.build(broken.id, Level.POLICY)
    got = told(node)
    assert got["cilium_endpoint"] == {(): 2}
    assert got["cilium_endpoint_state"] == {("ready",): 1, ("not-ready",): 1}
    assert got["cilium_policy_endpoint_enforcement_status"]["none",] == 2
    assert got["cilium_policy_max_revision"] == {(): 1}
    assert got["cilium_endpoint_regenerations_total"] == {("success",): 2, ("fail",): 1, ("failure",): 0}
    assert got["cilium_policy_regeneration_total"] == {(): 2}
    stats = got["cilium_endpoint_regeneration_time_stats_seconds"]
    assert stats == got["cilium_policy_regeneration_time_stats_seconds"]
    assert stats.keys() == {("total", "success"), ("total", "failure")}


def test_what_is_enforced_and_which_identities_there_are(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.policy.enforcement = Enforcement.ALWAYS
    node.endpoints.create(request(1))
    got = told(node)
    status = got["cilium_policy_endpoint_enforcement_status"]
    assert (status["both",], status["none",], len(status)) == (1, 0, 7)
    assert got["cilium_identity"] == {("reserved",): 11, ("cluster_local",): 1}
    assert got["cilium_identity_label_sources"] == {("reserved",): 11, ("k8s",): 1}
