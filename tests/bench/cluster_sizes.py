"""One agent and one operator in clusters of growing size: until they have settled, processor, memory.

The fake API server shares the processors with them, and encodes every object in Python: its share of the
time stands beside theirs. An operator gives ranges to all nodes; then pods, services and policies are there
at once, and an agent starts; then nodes, pods, services and policies change.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from hive.lab.node import Lab
from tests.bench.node_ranges import ELECTION
from tests.bench.nodes import lab
from tests.bench.startup import compiled, cpu, memory
from tests.bench.stats import Figure, Sample
from tests.support.operator.running import settings
from tests.support.ports import free_port
from tests.support.simulated_node import simulated
from tests.support.simulation import Size
from tests.support.waiting import eventually

NODES = (100, 500, 1_000, 2_000, 5_000)
EVENTS = 20
PATIENCE = 600.0


def size_of(nodes: int) -> Size:
    """Return a cluster of this number of nodes: 20 pods on each, a policy for five."""
    return Size(nodes=nodes, pods=20 * nodes, services=2 * nodes, policies=nodes // 5, workloads=nodes)


def measure(folder: Path, rounds: int) -> list[Figure]:
    """Measure each size once a round."""
    del folder
    compiled()
    os.environ["K8S_NODE_NAME"] = "node1"
    found: dict[tuple[str, str], list[float]] = {}
    for seed in range(rounds):
        for nodes in NODES:
            for (what, unit), value in _measured(nodes, seed).items():
                found.setdefault((f"{nodes:,} nodes: {what}", unit), []).append(value)
    return [Figure(what, unit, Sample(tuple(values))) for (what, unit), values in found.items()]


def _measured(nodes: int, seed: int) -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], float] = {}
    with (
        lab("bench-size") as node,
        TemporaryDirectory() as place,
        simulated(node, Path(place), seed, size_of(nodes), "process") as cluster,
    ):
        served = cpu(cluster.server)
        with _operator(node, Path(place), cluster.kubeconfig) as operator:
            began = time.monotonic()
            eventually(lambda: cluster.ask("ranged"), PATIENCE)
            found["operator, until all nodes have ranges", "s"] = time.monotonic() - began
            found["operator, processor for that", "s"] = cpu(operator) / 1000
            cluster.ask("fill")
            began, served = time.monotonic(), cpu(cluster.server)
            cluster.start()
            cluster.settled(PATIENCE, "the start")
            found["agent, start to settled", "s"] = time.monotonic() - began
            found["agent, processor for that", "s"] = cpu(cluster.pid) / 1000
            found["API server, processor for that", "s"] = (cpu(cluster.server) - served) / 1000
            before = cpu(cluster.pid), cpu(operator)
            for _ in range(EVENTS):
                (what,) = cluster.ask("step", 1)
                cluster.settled(PATIENCE, what)
            found["agent, processor for an event", "ms"] = (cpu(cluster.pid) - before[0]) / EVENTS
            found["operator, processor for an event", "ms"] = (cpu(operator) - before[1]) / EVENTS
            for name, pid in (("agent", cluster.pid), ("operator", operator)):
                held = memory(pid)
                found[f"{name}, PSS", "MiB"] = held["Pss"] / 1024
                found[f"{name}, RSS", "MiB"] = held["Rss"] / 1024
            cluster.kill()
    return found


@contextlib.contextmanager
def _operator(node: Lab, folder: Path, kubeconfig: str) -> Iterator[int]:
    """Start an operator in the node's network; return its pid."""
    values = {
        "k8s-kubeconfig-path": kubeconfig,
        "operator-api-serve-addr": f"127.0.0.1:{free_port()}",
        "operator-k8s-client-qps": "0",
        "skip-crd-creation": "true",
        "cluster-pool-ipv4-cidr": "10.128.0.0/9",
        **ELECTION,
    }
    settings(values, folder / "config")
    command = [sys.executable, "-m", "hive", "operator", f"--config-dir={folder / 'config'}"]
    with node.open() as inside, (folder / "operator.log").open("wb") as log:
        process = inside.popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    with process:
        try:
            yield process.pid
        finally:
            process.kill()
