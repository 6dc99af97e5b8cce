"""Endpoint metrics: number per state, and results of regenerations."""

from __future__ import annotations

from pathlib import Path

from cells.endpoint import RegenerationLevel, families
from tests.unit.endpoint.fakes import Node, request


def series(node: Node) -> dict[str, dict[tuple[str, ...], object]]:
    """Every family's series."""
    return {family.name: dict(family.series) for family in families(node.endpoints)}


def test_endpoints_are_counted_by_displayed_state(tmp_path: Path) -> None:
    node = Node(tmp_path)
    assert series(node)["cilium_endpoint_state"] == {}
    node.create(request(1))
    broken = node.create(request(2))
    node.kernel.refuse = "fill"
    node.build(broken.id, RegenerationLevel.POLICY)
    got = series(node)
    assert got["cilium_endpoint"] == {(): 2}
    assert got["cilium_endpoint_state"] == {("ready",): 1, ("not-ready",): 1}
    assert got["cilium_endpoint_regenerations_total"] == {("success",): 2, ("fail",): 1, ("failure",): 0}
    assert got["cilium_policy_regeneration_total"] == {(): 2}
    stats = got["cilium_endpoint_regeneration_time_stats_seconds"]
    assert stats == got["cilium_policy_regeneration_time_stats_seconds"]
    assert stats.keys() == {("total", "success"), ("total", "failure")}
