"""An agent with unusual paths: the plugin finds it through the agent's CNI configuration."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hive import syscalls
from hive.client import ask
from hive.lab import agent_process, pods
from hive.lab.kernel import machine_links
from hive.lab.node import Lab, wait_exited
from hive.lab.traffic.probe import ping
from tests.support.agents import invoke
from tests.support.waiting import eventually

pytestmark = pytest.mark.node

RUN = Path("/run/elsewhere")
BPF = Path("/run/bpf")


@pytest.fixture
def lab(node: Lab) -> Iterator[Lab]:
    """A node with an agent in other places."""
    with node.open() as inside:
        inside.run(BPF.mkdir)
        inside.run(syscalls.mount, "bpf", BPF, "bpf")
    start(node)
    yield node
    agent_process.crash(node)


def start(node: Lab) -> None:
    pid = agent_process.start(node, f"--state-dir={RUN}", f"--bpf-root={BPF}", "--agent-health-port=19879")

    def serves() -> bool:
        assert not wait_exited(pid, 0), agent_process.log_end(node)
        with node.open() as inside:
            return bool(inside.run(ask, "/v1/healthz", RUN / "cilium.sock")) and node.cni_conf.exists()

    eventually(serves)


def endpoints(node: Lab) -> list[str]:
    with node.open() as inside:
        return [
            one["status"]["networking"]["addressing"][0]["ipv4"]
            for one in inside.run(ask, "/v1/endpoint", RUN / "cilium.sock")
        ]


def test_pods_are_added_and_deleted_with_an_agent_in_other_directories(lab: Lab) -> None:
    (plugin,) = json.loads(lab.cni_conf.read_text())["plugins"]
    assert plugin["agent-socket"] == str(RUN / "cni.sock")
    first, second = pods.add(lab, "first"), pods.add(lab, "second")
    assert sorted(endpoints(lab)) == sorted([first.ipv4, second.ipv4])
    agent_process.crash(lab)
    with lab.open() as inside, lab.open_pod("first") as pod:
        assert len(pod.run(ping, second.ipv4, 2)) == 2
        assert invoke(lab, "first", "DEL").code == 0
        assert len(inside.run(os.listdir, RUN / "deleteQueue")) == 2  # and the lockfile
        start(lab)
        assert inside.run(os.listdir, RUN / "deleteQueue") == ["lockfile"]
    assert endpoints(lab) == [second.ipv4]
    assert invoke(lab, "second", "DEL").code == 0
    with lab.open() as inside:
        eventually(lambda: not [name for name in inside.run(machine_links) if name.startswith("lxc")])
        assert inside.run(os.listdir, "/run/cilium") == ["cilium-cni.log"]  # of the delete that was queued
        assert not {"tc", "cilium"} & set(inside.run(os.listdir, "/sys/fs/bpf"))
