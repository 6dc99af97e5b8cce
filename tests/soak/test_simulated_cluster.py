"""A real agent and operator in a cluster of maximum size, through changes and failures.

After each event the agent's maps are compared with a plain model, and the operator's writes and deletions
with those required and allowed. The operator runs in virtual time, for hours.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from hive.lab.node import Lab
from tests.support.simulated_node import simulated
from tests.support.simulated_server import TROUBLES
from tests.support.simulation import Size

pytestmark = [pytest.mark.node, pytest.mark.timeout(7200)]

NODES = int(os.environ.get("SOAK_NODES", "5000"))
SIZE = Size(nodes=NODES, pods=20 * NODES, services=2 * NODES, policies=NODES // 5, workloads=NODES)
EVENTS = int(os.environ.get("SOAK_EVENTS", "60"))
WITHIN = 300.0
"""Seconds until the maps must follow."""
KILL = "kill agent"


@pytest.mark.parametrize(("seed", "read"), [(0, "endpoints"), (1, "slices")])
def test_maps_and_objects_follow_five_thousand_nodes(
    node: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, read: str
) -> None:
    monkeypatch.setenv("K8S_NODE_NAME", "node1")
    chance = random.Random(seed)  # noqa: S311 - the same each time
    with simulated(node, tmp_path, seed, SIZE, read) as cluster:
        cluster.start()
        cluster.settled(WITHIN, "the start")
        for _ in range(EVENTS):
            (trouble,) = chance.choices([*TROUBLES, KILL], [*TROUBLES.values(), 1])
            if trouble == KILL:
                cluster.kill()
            cluster.ask("trouble", trouble, chance.random())
            happened = cluster.ask("step", chance.choice([1, 1, 1, 20]))
            cluster.ask("over", trouble)
            if trouble == KILL:
                cluster.start()
            what = f"{trouble}: {'; '.join(happened)}"
            cluster.settled(WITHIN, what)
            assert not cluster.ask("faults"), what
        assert not cluster.ask("rest"), "after hours without an event"
        cluster.settled(WITHIN, "hours without an event")
