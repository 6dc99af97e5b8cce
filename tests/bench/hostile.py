"""Adding pods while thousands of hostile connections stand at one of the agent's HTTP servers.

They are made from inside the node: silent, half a request, many requests without reading the answers, bodies
that never come. Meanwhile pods are added one at a time, the port of the probes is asked, and the agent's
memory is looked at. Rounds are interleaved.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from hive.lab.children import Child
from hive.lab.namespaces import Namespaces
from tests.bench.nodes import our_node
from tests.bench.podadd import Batch, run
from tests.bench.stats import Figure, Row, Sample
from tests.bench.tools import tool
from tests.support.hostile import CONNECTIONS, SECONDS, Target, attack, probe
from tests.support.waiting import eventually

PODS = 100
PROBES = 20
TARGETS: dict[str, Target] = {
    "the probes' port": ("127.0.0.1", 9879),
    "the metrics' port": ("127.0.0.1", 9962),
    "cilium.sock": "/run/cilium/cilium.sock",
}
SLOWEST_ADD, SLOWEST_PROBE, MOST_MEMORY = 2.0, 100.0, 16.0
"""Times the p99 of an agent that is left alone; ms; MiB."""


def slowest_probe() -> float:
    """Return the ms of the slowest of some probes."""
    times = []
    for _ in range(PROBES):
        began = time.perf_counter()
        if probe() != 200:
            raise RuntimeError("the probe failed")
        times.append((time.perf_counter() - began) * 1000)
    return max(times)


def memory(pid: int) -> float:
    """Return the resident memory in MiB."""
    text = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(text.partition("VmRSS:")[2].split()[0]) / 1024


def _besieged(inside: Namespaces, target: Target, folder: Path, during: Callable[[], Batch]) -> Batch:
    ready = folder / "hostile-ready"
    ready.unlink(missing_ok=True)
    attackers: Child[int] = inside.start(attack, target, os.fspath(ready))
    try:
        eventually(ready.exists, within=3 * SECONDS)
        return during()
    finally:
        attackers.finish(within=30)


def measure(folder: Path, rounds: int) -> list[Row | Figure]:
    """Return p99 of an ADD, the slowest probe and the memory, for every attacked server."""
    spawn = tool("spawn", folder)
    alone: list[Batch] = []
    besieged: dict[str, list[Batch]] = defaultdict(list)
    probes: dict[str, list[float]] = defaultdict(list)
    grown: dict[str, list[float]] = defaultdict(list)
    with our_node(folder, PODS, "bench-hostile", "--prometheus-serve-addr=:9962") as node:
        pid = node.agent
        assert pid is not None

        def added() -> Batch:
            batch = run(node, spawn, "ADD", PODS, 1)
            node.verify_added(PODS)
            return batch

        for _ in range(rounds + 1):
            alone.append(added())
            run(node, spawn, "DEL", PODS, 1)
            node.verify_deleted()
            with node.lab.open() as inside:
                for what, target in TARGETS.items():
                    before = memory(pid)

                    def during(
                        inside: Namespaces = inside, what: str = what, before: float = before
                    ) -> Batch:
                        batch = added()
                        probes[what].append(inside.run(slowest_probe))
                        grown[what].append(memory(pid) - before)
                        return batch

                    besieged[what].append(_besieged(inside, target, folder, during))
                    run(node, spawn, "DEL", PODS, 1)
                    node.verify_deleted()
    rows: list[Row | Figure] = []
    for what in TARGETS:  # the first round warms up
        ours, peer = (Sample(tuple(batch.p99 for batch in side[1:])) for side in (besieged[what], alone))
        load = f"{CONNECTIONS} connections at {what}"
        rows.append(Row(f"ADD, p99, {load}", "ms", ours, "none", peer, SLOWEST_ADD, faster=False))
        rows.append(Figure(f"slowest probe, {load}", "ms", Sample(tuple(probes[what][1:])), SLOWEST_PROBE))
        rows.append(Figure(f"memory, {load}", "MiB", Sample(tuple(grown[what][1:])), MOST_MEMORY))
    return rows
