"""How long the agent's event loop runs without a pause while fifty pods are added at once.

The loop measures itself: lifecycle/process/loop_lag.py.
"""

from __future__ import annotations

from pathlib import Path

from hive.client import ask
from hive.lab import agent_process
from lifecycle.process.loop_lag import BOUNDS, LagHistogram
from tests.bench.nodes import our_node
from tests.bench.podadd import run
from tests.bench.stats import Figure, Sample
from tests.bench.tools import tool

AT_ONCE, BATCHES = 50, 2
TARGET = 20.0
"""Limit in ms for 99.9 % of the histogram."""


def histogram(pid: int) -> LagHistogram:
    """Return all histogram of the agent's loop so far."""
    loop = ask("/hive/loop", agent_process.api_socket(pid))
    if tuple(loop["bounds"]) != BOUNDS:
        raise RuntimeError("the agent is of another version: its bounds are others")
    return LagHistogram(tuple(loop["counts"]))


def measure(folder: Path, rounds: int) -> list[Figure]:
    """Return the median and p99.9 of the histogram of adding and of deleting, a value a round."""
    spawn = tool("spawn", folder)
    count = AT_ONCE * BATCHES
    found: dict[str, list[LagHistogram]] = {"ADD": [], "DEL": []}
    with our_node(folder, count, "bench-lag") as node:
        assert node.agent is not None
        for index in range(rounds + 1):
            for command, seen in found.items():
                before = histogram(node.agent)
                run(node, spawn, command, count, AT_ONCE)
                if command == "DEL":
                    node.verify_deleted()
                between = histogram(node.agent) - before
                if index:  # the first round warms up
                    seen.append(between)
    return [
        Figure(
            f"loop lag, {AT_ONCE} {command} at once, {what}",
            "ms",
            Sample(tuple(one.within(share) * 1000 for one in seen)),
            TARGET if what == "p99.9" else None,
        )
        for command, seen in found.items()
        for what, share in (("median", 0.5), ("p99.9", 0.999))
    ]
