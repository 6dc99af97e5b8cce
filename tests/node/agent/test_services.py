"""Services of a folder of manifests, as pods reach them and as the agent's clients see them."""

from __future__ import annotations

from pathlib import Path

import pytest

from cells.maps.map import open_map
from hive.client import ask
from hive.lab import pods
from hive.lab.agent_process import api_socket
from hive.lab.node import Lab
from tests.node.agent.cluster_services import PORT, VIP, manifests, reached
from tests.support.agents import known_pods, serving, terminated
from tests.support.waiting import eventually

pytestmark = pytest.mark.node

SERVICES = Path("/sys/fs/bpf/tc/globals/cilium_lb4_services_v2")


def entries() -> int:
    with open_map(SERVICES) as services:
        return sum(1 for _ in services.items())


def test_pods_reach_a_service_which_outlives_the_agent_and_goes_with_its_object(
    node: Lab, tmp_path: Path
) -> None:
    known_pods(tmp_path, "client", "one", "two")
    pid = serving(node, f"--manifests-dir={tmp_path}")
    client, one, two = (pods.add(node, name) for name in ("client", "one", "two"))
    file = tmp_path / "web.yaml"
    file.write_text(manifests(one.ipv4))
    eventually(lambda: len(ask("/v1/service", api_socket(pid))) == 1)
    assert reached(node, client, one)
    (service,) = ask("/v1/service", api_socket(pid))
    spec = service["status"]["realized"]
    assert spec["frontend-address"] == {"ip": VIP, "port": PORT, "protocol": "TCP", "scope": "external"}
    assert [one["ip"] for one in spec["backend-addresses"]] == [one.ipv4]
    assert (spec["flags"]["namespace"], spec["flags"]["name"]) == ("shop", "web")
    assert terminated(node, pid) == 0
    assert reached(node, client, one)
    file.write_text(manifests(two.ipv4))
    pid = serving(node, f"--manifests-dir={tmp_path}")
    eventually(lambda: reached(node, client, two))
    (again,) = ask("/v1/service", api_socket(pid))
    assert again["spec"]["id"] == spec["id"]
    file.unlink()
    with node.open() as run:
        eventually(lambda: run.run(entries) == 0)
    assert ask("/v1/service", api_socket(pid)) == []
