"""Two nodes probe each other and their health endpoints, and report failures."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from hive.client import ask
from hive.lab import agent_process
from hive.lab.cluster import Cluster
from hive.lab.node import Lab
from tests.support.agents import environment
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


def reported(lab: Lab, part: str = "host") -> dict[str, Any]:
    """Name of each node -> the path to its primary address, or to its health endpoint's."""
    pid = agent_process.running(lab)
    assert pid is not None
    answer = ask("/v1beta/status", agent_process.api_socket(pid).with_name("health.sock"))
    return {
        one["name"].partition("/")[2]: one[part]["primary-address"]
        for one in answer["nodes"] or ()
        if part in one
    }


def answered(path: dict[str, Any]) -> bool:
    return all(path.get(kind, {}).get("latency", 0) > 0 for kind in ("icmp", "http"))


def both_answer(lab: Lab) -> bool:
    found = [*reported(lab).values(), *reported(lab, "health-endpoint").values()]
    return len(found) == 4 and all(map(answered, found))


def health_endpoints(lab: Lab) -> list[dict[str, Any]]:
    """Those of the node's API with the identity 4."""
    return [one for one in asked(lab, "/v1/endpoint") if one["status"]["identity"]["id"] == 4]


def shown(lab: Lab) -> str:
    """What ``cilium-health status`` prints."""
    command = [sys.executable, "-c", "from hive.dbg.health import main; main()", "status"]
    with lab.open() as node, node.popen(command, stdout=subprocess.PIPE, env=environment()) as process:
        return process.communicate(timeout=60)[0].decode()


def restart(lab: Lab) -> None:
    """Start an agent as the last one was started."""
    agent_process.wait_ready(lab, agent_process.start(lab, *agent_process.last_settings(lab)))


def test_each_node_reaches_the_other_until_its_agent_is_killed(cluster: Cluster) -> None:
    first, second = cluster.nodes()
    for lab in (first, second):
        eventually(partial(both_answer, lab), 60)
        assert asked(lab, "/v1/healthz")["cluster"]["ciliumHealth"] == {"state": "Ok"}
        assert shown(lab).count("1/1") == 4, "both nodes, and their endpoints"
    agent_process.crash(second)
    eventually(lambda: "connection refused" in reported(first)[second.name]["http"].get("status", ""), 60)
    lost = reported(first)
    assert lost[second.name]["icmp"]["latency"] > 0
    assert answered(lost[first.name])
    eventually(lambda: not answered(reported(first, "health-endpoint")[second.name]), 60)
    assert answered(reported(first, "health-endpoint")[first.name])


def test_a_health_endpoint_is_made_anew_when_it_is_taken_away_and_over_a_crash(cluster: Cluster) -> None:
    """With its addresses: other nodes go on probing it."""
    first, second = cluster.nodes()
    restart(second)
    eventually(partial(both_answer, first), 60)
    (made,) = health_endpoints(second)
    addresses = made["status"]["networking"]["addressing"]
    with second.open() as node:
        assert node.popen(["ip", "link", "delete", "lxc_health"]).wait() == 0
    eventually(lambda: [one["id"] for one in health_endpoints(second)] not in ([], [made["id"]]), 30)
    eventually(partial(both_answer, first), 60)
    agent_process.crash(second)
    restart(second)
    eventually(lambda: len(health_endpoints(second)) == 1, 30)
    (again,) = health_endpoints(second)
    assert again["status"]["networking"]["addressing"] == addresses
    eventually(partial(both_answer, second), 60)
