"""Restarting an agent that has endpoints: the time until all are exposed and regenerated, and it serves.

The agent is killed with -9 and started again on the same node; it reports the steps in its timeline and its
log. Numbers of endpoints take turns within a round.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from hive.client import ask
from hive.lab import agent_process
from tests.bench.nodes import PluginNode, our_node
from tests.bench.podadd import run
from tests.bench.startup import compiled, wait_serving
from tests.bench.stats import Figure, Sample
from tests.bench.tools import tool

COUNTS = (0, 50, 250)
EXPOSED_WITHIN = 100.0
"""Limit in ms from the start of the hook, for each number of endpoints."""
REGENERATED_LINE = re.compile(r"regenerated=(\d+) total=\d+ milliseconds=([\d.]+)")
RESTORE, EXPOSE = "agent.endpoint-restore/RestoredEndpoints:0", "agent.endpoint-restore/ExposedEndpoints:0"


@dataclass(frozen=True, slots=True)
class Restart:
    """ms of one restart."""

    restored: float
    """Duration of the restore hook: everything claimed, leftovers removed."""
    exposed: float
    """From the start of the restore hook until all are visible; the datapath is loaded in between."""
    regenerated: float
    """Duration of regenerating all of them, beside other hooks."""
    serving: float
    """From the start of the process until the agent serves."""


def restart(node: PluginNode, count: int) -> Restart:
    """Kill the agent and start another, which must find all its endpoints."""
    made = node.lab
    agent_process.crash(made)
    made.cni_conf.unlink(missing_ok=True)
    made.agent_log.write_bytes(b"")
    began = time.monotonic()
    pid = agent_process.start(made, "--ipv4-range=10.200.0.0/16")
    serving = wait_serving(made, pid, began) * 1000
    timeline = ask("/hive/timeline", agent_process.api_socket(pid))
    starts = [span for span in timeline["spans"] if span["kind"] == "start"]
    took = {span["id"]: span["took"] * 1000 for span in starts}
    began_at = {span["id"]: span["began"] * 1000 for span in starts}
    line = REGENERATED_LINE.search(made.agent_log.read_text())
    if line is None or int(line[1]) != count:
        raise RuntimeError(f"{count} endpoints, but: {line and line[0]}\n{agent_process.log_end(made)}")
    exposed = began_at[EXPOSE] + took[EXPOSE] - began_at[RESTORE]
    return Restart(took[RESTORE], exposed, float(line[2]), serving)


def measure(folder: Path, rounds: int) -> list[Figure]:
    """Return every step for each number of endpoints, a value a round."""
    compiled()
    spawn = tool("spawn", folder)
    found: dict[int, list[Restart]] = defaultdict(list)
    with contextlib.ExitStack() as stack:
        nodes = {}
        for count in COUNTS:
            node = nodes[count] = stack.enter_context(our_node(folder, count, f"bench-restore-{count}"))
            if count:
                run(node, spawn, "ADD", count, 10)
                node.verify_added(count)
        for index in range(rounds + 1):
            for count, node in nodes.items():
                measured = restart(node, count)
                if index:  # the first round warms up
                    found[count].append(measured)
    rows = []
    for count in COUNTS:
        restarts = found[count]
        rows += [
            Figure(f"{count} endpoints: restored", "ms", Sample(tuple(one.restored for one in restarts))),
            Figure(
                f"{count} endpoints: hook start to all exposed",
                "ms",
                Sample(tuple(one.exposed for one in restarts)),
                EXPOSED_WITHIN,
            ),
            Figure(
                f"{count} endpoints: regenerated",
                "ms",
                Sample(tuple(one.regenerated for one in restarts)),
            ),
            Figure(
                f"{count} endpoints: kill -9, process start to serving",
                "ms",
                Sample(tuple(one.serving for one in restarts)),
            ),
        ]
    return rows
