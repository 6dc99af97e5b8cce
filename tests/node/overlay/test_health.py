"""Two nodes probe each other: each reports how it reaches the other, and when that ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from hive.client import ask
from hive.lab import agent_process
from hive.lab.cluster import Cluster
from hive.lab.node import Lab
from tests.support.two_nodes import asked, joined_by_etcd
from tests.support.waiting import eventually

pytestmark = [pytest.mark.node, pytest.mark.timeout(240)]

NAME = f"health-{os.getpid()}"
SETTINGS = ("--enable-health-checking=true", "--connectivity-probe-frequency-ratio=0")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes that probe each other every 10 seconds."""
    with joined_by_etcd(NAME, *SETTINGS) as found:
        yield found


def reported(lab: Lab) -> dict[str, Any]:
    """Name of each node -> the path to its primary address, as health.sock has it."""
    pid = agent_process.running(lab)
    assert pid is not None
    answer = ask("/v1beta/status", agent_process.api_socket(pid).with_name("health.sock"))
    return {one["name"].partition("/")[2]: one["host"]["primary-address"] for one in answer["nodes"] or ()}


def answered(path: dict[str, Any]) -> bool:
    return all(path.get(kind, {}).get("latency", 0) > 0 for kind in ("icmp", "http"))


def both_answer(lab: Lab) -> bool:
    found = reported(lab)
    return len(found) == 2 and all(map(answered, found.values()))


def test_each_node_reaches_the_other_until_its_agent_is_killed(cluster: Cluster) -> None:
    first, second = cluster.nodes()
    for lab in (first, second):
        eventually(partial(both_answer, lab), 60)
        assert asked(lab, "/v1/healthz")["cluster"]["ciliumHealth"] == {"state": "Ok"}
    agent_process.crash(second)
    eventually(lambda: "connection refused" in reported(first)[second.name]["http"].get("status", ""), 60)
    lost = reported(first)
    assert lost[second.name]["icmp"]["latency"] > 0
    assert answered(lost[first.name])
