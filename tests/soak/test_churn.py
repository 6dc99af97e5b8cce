"""After a hundred thousand pods (or SOAK_CHURN), created and deleted, the agent is unchanged."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from hive.lab import agent_process, pods
from hive.lab.kernel import bpf_objects, pod_resources
from hive.lab.node import Lab
from tests.soak.memory import GROWTH, size
from tests.support.account import agreed
from tests.support.waiting import eventually

CHURN = int(os.environ.get("SOAK_CHURN", "100000"))
"""ADDs, each with its DEL."""
WARM_UP = 2000
"""ADDs before the first look: caches are full by then, and the allocator has its pools."""
AT_ONCE = 4
SAMPLES = 10

pytestmark = [pytest.mark.node, pytest.mark.timeout(120 + CHURN // 10)]


def churn(plugin: Path, configuration: Path, numbers: Iterable[int]) -> None:
    """Add and delete that many containers, some at once; run inside the node."""
    batch: list[dict[str, str]] = []
    for number in numbers:
        name = f"pod-{number % AT_ONCE}"
        environment = {
            "CNI_CONTAINERID": hashlib.sha256(b"%d" % number).hexdigest(),
            "CNI_NETNS": f"/run/netns/{name}",
            "CNI_IFNAME": "eth0",
            "CNI_PATH": str(plugin.parent),
            "CNI_ARGS": f"IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME={name}",
        }
        batch.append(environment)
        if len(batch) == AT_ONCE:
            for command in ("ADD", "DEL"):
                _all(plugin, configuration, command, batch)
            batch.clear()


def _all(plugin: Path, configuration: Path, command: str, batch: list[dict[str, str]]) -> None:
    running = []
    for environment in batch:
        with configuration.open("rb") as stdin:
            running.append(
                subprocess.Popen(
                    [plugin],
                    stdin=stdin,
                    stdout=subprocess.PIPE,
                    env=environment | {"CNI_COMMAND": command},
                )
            )
    for process in running:
        stdout, _ = process.communicate(timeout=60)
        assert process.returncode == 0, f"{command}: {stdout.decode()}"


def test_churn_of_pods_leaks_no_memory_descriptors_or_maps(lab: Lab, tmp_path: Path) -> None:
    pid = agent_process.running(lab)
    assert pid is not None
    stays = pods.add(lab, "stays")
    for number in range(AT_ONCE):
        lab.hold_pod(f"pod-{number}")
    configuration = tmp_path / "configuration"
    configuration.write_bytes(pods.network_configuration(lab))
    with lab.open() as node:
        node.run(churn, pods.PLUGIN, configuration, range(WARM_UP))
        agreed(lab)
        before, had, kernel = size(pid), node.run(pod_resources), node.run(bpf_objects)
        print(f"after {WARM_UP}: {before}")  # noqa: T201 (the course of it, shown on failure)
        step = max(AT_ONCE, CHURN // SAMPLES // AT_ONCE * AT_ONCE)
        for done in range(WARM_UP, WARM_UP + CHURN, step):
            node.run(churn, pods.PLUGIN, configuration, range(done, done + step))
            print(f"after {done + step}: {size(pid)}")  # noqa: T201
        assert {ip for ip, _, _ in agreed(lab).listed.values()} == {stays.ipv4}
        assert node.run(pod_resources) == had
        assert node.run(bpf_objects).map_ids == kernel.map_ids
    eventually(lambda: size(pid).descriptors <= before.descriptors)
    after = size(pid)
    assert after.threads <= before.threads
    assert after.resident - before.resident <= GROWTH
