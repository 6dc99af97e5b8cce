"""Packets lost while the agent is killed and started, and while the datapath changes its generation.

Each of ten pods in a ring sends 1000 numbered datagrams per second to the next; missing ones are counted.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hive.lab import agent_process, pods
from hive.lab.demo.upgrade import second_build
from hive.lab.node import Lab
from hive.lab.pods import Attached
from tests.bench.nodes import our_lab
from tests.bench.stats import Figure, Sample
from tests.bench.tools import tool

PODS, RATE, PORT = 10, 1000, 7002
EVERY = 10.0
"""Seconds from one restart to the next."""


@dataclass(frozen=True, slots=True)
class Flows:
    """Counters of the flows."""

    sent: int
    received: int
    repeated: int
    refused: int
    gap: int

    @property
    def lost(self) -> int:
        """Return the packets that were sent and never arrived."""
        return self.sent - self.received


def flows(program: Path, made: Lab, attached: list[Attached], during: Callable[[], int]) -> tuple[Flows, int]:
    """Run ``during`` while the pods communicate; return the counters and its result."""
    process = subprocess.Popen(
        [program, str(RATE), str(PORT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        for pod in attached:
            process.stdin.write(f"{made.directory / 'pods' / pod.pod} {pod.ipv4}\n")
        process.stdin.write("\n")
        process.stdin.flush()
        if process.stdout.readline() != "ready\n":
            raise RuntimeError("the flows did not start")
        times = during()
        out, _ = process.communicate("\n", timeout=60)
    finally:
        process.kill()
        process.wait()
    return Flows(*map(int, out.split())), times


@contextlib.contextmanager
def ring(name: str) -> Iterator[tuple[Lab, list[Attached]]]:
    """Create a node with the pods."""
    with our_lab(name) as (made, _):
        yield made, [pods.add(made, f"pod-{number}") for number in range(PODS)]


def restarts(made: Lab, seconds: float, settings: Callable[[int], list[str]]) -> int:
    """Kill the agent with -9 and start it repeatedly for this time; return how often."""
    until, times = time.monotonic() + seconds, 0
    while (left := until - time.monotonic()) > 0:
        time.sleep(min(EVERY / 2, left))
        if until - time.monotonic() <= 0:
            break
        agent_process.crash(made)
        pid = agent_process.start(made, "--ipv4-range=10.200.0.0/16", *settings(times))
        agent_process.wait_ready(made, pid)
        times += 1
        time.sleep(max(0.0, min(EVERY / 2, until - time.monotonic())))
    return times


def measure(folder: Path, seconds: float) -> list[Figure]:
    """Measure both, ``seconds`` of traffic each: counts, so there are no rounds."""
    program = tool("flows", folder)
    rows = []
    with ring("bench-losses") as (made, attached):
        other = f"--datapath-object={second_build(made)}"

        def same(_: int) -> list[str]:
            return []

        def alternating(number: int) -> list[str]:
            return [] if number % 2 else [other]

        for what, settings in (("kill -9 and start", same), ("kill -9 and another generation", alternating)):
            seen, times = flows(program, made, attached, partial(restarts, made, seconds, settings))
            figure = f"packets lost of {seen.sent:,}, {times} x {what}"
            rows.append(Figure(figure, "", Sample((float(seen.lost),)), 0))
            rows.append(Figure(f"longest silence of a flow, {what}", "ms", Sample((seen.gap / 1e6,))))
    return rows
