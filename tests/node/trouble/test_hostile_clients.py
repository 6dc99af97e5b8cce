"""Thousands of hostile connections, at each of the agent's HTTP servers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hive.client import ask
from hive.lab import agent_process
from hive.lab.node import Lab
from tests.support.agents import invoke, serving
from tests.support.hostile import SECONDS, Target, attack, probe
from tests.support.points import EVERY
from tests.support.waiting import eventually

pytestmark = pytest.mark.node

MIB = 1 << 10
"""In KiB."""


def memory(pid: int) -> int:
    """KiB of a process."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.partition("VmRSS:")[2].split()[0])


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


SERVERS = [("127.0.0.1", 9962), "/run/cilium/cilium.sock", ("127.0.0.1", 9879)]


@pytest.mark.parametrize("target", SERVERS if EVERY else SERVERS[:2], ids=str)
def test_hostile_clients_leave_pods_probes_api_and_memory_unaffected(
    target: Target, node: Lab, tmp_path: Path
) -> None:
    pid = serving(node, "--prometheus-serve-addr=:9962")
    for pod in ("before", "meanwhile"):
        node.hold_pod(pod)
    assert invoke(node, "before", "ADD").code == 0
    rss, opened, ready = memory(pid), descriptors(pid), tmp_path / "ready"
    with node.open() as inside:
        attackers = inside.start(attack, target, os.fspath(ready))
        try:
            eventually(ready.exists, within=6 * SECONDS)
            assert invoke(node, "meanwhile", "ADD").code == 0
            assert inside.run(probe) == 200
            assert len(ask("/v1/endpoint", agent_process.api_socket(pid))) == 2
            assert memory(pid) - rss <= 16 * MIB
            assert descriptors(pid) - opened <= 300
        finally:
            made = attackers.finish(within=60)
    assert made > 0
    eventually(lambda: descriptors(pid) <= opened + 8)  # pods' maps among them
    assert memory(pid) - rss <= 16 * MIB
    for pod in ("before", "meanwhile"):
        assert invoke(node, pod, "DEL").code == 0
    lines = node.agent_log.read_text().splitlines()
    assert len(lines) < 100, "a log flooded by connections"
