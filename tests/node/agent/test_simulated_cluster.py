"""A real agent and operator in a constantly changing cluster: each event is checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from hive.lab.node import Lab
from tests.support.simulated_node import simulated
from tests.support.simulated_server import TROUBLES
from tests.support.simulation import Size

pytestmark = [pytest.mark.node, pytest.mark.timeout(300)]

SMALL = Size(nodes=20, pods=300, services=40, policies=30, workloads=30)
EVENTS = 15


def test_maps_follow_the_cluster_through_failures_of_the_api_server_and_of_the_agent(
    node: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("K8S_NODE_NAME", "node1")
    with simulated(node, tmp_path, 1, SMALL, "endpoints") as cluster:
        cluster.start()
        cluster.settled(60, "the start")
        for _ in range(EVENTS):
            (what,) = cluster.ask("step", 1)
            cluster.settled(60, what)
        for trouble in TROUBLES:
            cluster.ask("trouble", trouble, 0.1)
            happened = cluster.ask("step", 5)
            cluster.ask("over", trouble)
            cluster.settled(90, f"{trouble}: {'; '.join(happened)}")
            assert not cluster.ask("faults"), trouble
        cluster.kill()
        happened = cluster.ask("step", 10)
        cluster.start()
        cluster.settled(60, "; ".join(happened))
