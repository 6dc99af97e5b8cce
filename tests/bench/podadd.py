"""Adding and deleting pods: our plugin and agent against Debian's ptp + host-local.

After each round the result is checked: link, address, program, state. Rounds are interleaved.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.bench.nodes import PluginNode, our_node, ptp_node
from tests.bench.stats import Row, Sample, percentile
from tests.bench.tools import tool

IN_SEQUENCE = 100  # pods of one round, one at a time
AT_ONCE = (1, 10, 50)


@dataclass(frozen=True, slots=True)
class Batch:
    """The times in ms of one round of one command, over all its pods."""

    p50: float
    p99: float
    makespan: float  # of one batch, the mean
    cpu: float  # a pod: the plugin, what it started, and the agent


def run(node: PluginNode, spawn: Path, command: str, count: int, at_once: int) -> Batch:
    """Run ``command`` for the node's first ``count`` pods; raises RuntimeError if one fails."""
    pods = node.pods[:count]
    before = node.agent_cpu()
    result = subprocess.run(
        [spawn, str(at_once), node.plugin, command, "/usr/lib/cni", node.netconf],
        input="".join(f"{pod.container} {pod.netns}\n" for pod in pods),
        preexec_fn=node.namespaces.enter,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    agent = node.agent_cpu() - before
    rows = [[int(word) for word in line.split()[1:]] for line in result.stdout.splitlines()]
    failed = [row for row in rows if row[3]]
    if len(rows) != count or failed:
        raise RuntimeError(f"{node.name}: {command}: {len(failed)} of {count} failed {result.stderr}")
    batches = [rows[i : i + at_once] for i in range(0, count, at_once)]
    latencies = [(end - start) / 1e6 for start, end, _, _ in rows]
    return Batch(
        p50=percentile(latencies, 0.5),
        p99=percentile(latencies, 0.99),
        makespan=sum(max(row[1] for row in batch) for batch in batches) / len(batches) / 1e6,
        cpu=(sum(row[2] for row in rows) + agent) / count / 1e6,
    )


FIGURES: tuple[tuple[str, str, int, str, Callable[[Batch], float], float | None], ...] = (
    ("ADD one at a time, p50", "ms", 1, "ADD", lambda batch: batch.p50, 5),
    ("ADD one at a time, p99", "ms", 1, "ADD", lambda batch: batch.p99, 2.5),
    ("ADD one at a time, CPU a pod", "ms", 1, "ADD", lambda batch: batch.cpu, 5),
    ("ADD 10 at once, p50", "ms", 10, "ADD", lambda batch: batch.p50, None),
    ("ADD 10 at once, makespan", "ms", 10, "ADD", lambda batch: batch.makespan, None),
    ("ADD 50 at once, p50", "ms", 50, "ADD", lambda batch: batch.p50, 8),
    ("ADD 50 at once, makespan", "ms", 50, "ADD", lambda batch: batch.makespan, 4.5),
    ("ADD 50 at once, CPU a pod", "ms", 50, "ADD", lambda batch: batch.cpu, 5),
    ("DEL one at a time, p50", "ms", 1, "DEL", lambda batch: batch.p50, 20),
    ("DEL 10 at once, p50", "ms", 10, "DEL", lambda batch: batch.p50, None),
    ("DEL 50 at once, p50", "ms", 50, "DEL", lambda batch: batch.p50, 10),
)


def measure(folder: Path, rounds: int) -> list[Row]:
    """Return every figure of :data:`FIGURES`, a value a round for both sides."""
    spawn = tool("spawn", folder)
    values: dict[tuple[str, str, int], list[Batch]] = defaultdict(list)
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(make(folder, IN_SEQUENCE)) for make in (our_node, ptp_node)]
        for index in range(rounds + 1):
            for at_once in AT_ONCE:
                for node in nodes:
                    added = run(node, spawn, "ADD", IN_SEQUENCE, at_once)
                    node.verify_added(IN_SEQUENCE)
                    deleted = run(node, spawn, "DEL", IN_SEQUENCE, at_once)
                    node.verify_deleted()
                    if index:  # the first round warms up
                        values[node.name, "ADD", at_once].append(added)
                        values[node.name, "DEL", at_once].append(deleted)
    rows = []
    for what, unit, at_once, command, figure, target in FIGURES:
        ours, peer = (
            Sample(tuple(figure(batch) for batch in values[node.name, command, at_once])) for node in nodes
        )
        rows.append(Row(what, unit, ours, nodes[1].name, peer, target))
    return rows
