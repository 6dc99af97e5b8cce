"""A real agent in a cluster as large as they get, through change and failures, against a plain model."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from hive.lab.node import Lab
from tests.support.simulated_node import simulated
from tests.support.simulation import Size

pytestmark = [pytest.mark.node, pytest.mark.timeout(7200)]

LARGE = Size(nodes=5_000, pods=100_000, services=10_000, policies=1_000, workloads=5_000)
EVENTS = 60
WITHIN = 300.0
"""Seconds until the maps must follow; most of them are the model's."""


@pytest.mark.parametrize("seed", range(2))
def test_maps_follow_five_thousand_nodes(
    node: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setenv("K8S_NODE_NAME", "node1")
    chance = random.Random(seed)  # noqa: S311 - the same each time
    with simulated(node, tmp_path, seed, LARGE) as cluster:
        cluster.start()
        cluster.settled(WITHIN, "the start")
        for _ in range(EVENTS):
            trouble = chance.choices(["", "break", "compact", "away", "kill"], [12, 2, 2, 1, 1])[0]
            if trouble == "kill":
                cluster.kill()
            elif trouble:
                cluster.ask(trouble)
            happened = cluster.ask("step", chance.choice([1, 1, 1, 20]))
            if trouble == "kill":
                cluster.start()
            elif trouble == "away":
                cluster.ask("back")
            cluster.settled(WITHIN, f"{trouble} {'; '.join(happened)}")
