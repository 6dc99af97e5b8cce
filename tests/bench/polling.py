"""Adding pods while clients poll the API, against adding them without clients.

Ten clients request health, endpoints and configuration in turn: each ten times a second, as monitoring does,
or without a pause, which no client should do. Rounds are interleaved.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from hive.lab import agent_process
from tests.bench.nodes import our_node
from tests.bench.podadd import Batch, run
from tests.bench.stats import Figure, Row, Sample
from tests.bench.tools import tool

PODS, CLIENTS = 200, 10
PATHS = ("/v1/healthz", "/v1/endpoint", "/v1/config")
PAUSES = {"each 10 times a second": 100, "without a pause": 0}
TARGET = 1.5
"""Limit, as a multiple of the p99 of an agent without requests."""


@contextlib.contextmanager
def polled(program: Path, socket: Path, pause: int, answers: list[float]) -> Iterator[None]:
    """Run clients during the block, with ``pause`` ms after each answer; append the number of answers.

    Raises RuntimeError unless all of them were 200.
    """
    command: list[str | Path] = [program, socket, str(CLIENTS), str(pause), *PATHS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise RuntimeError("the API does not answer")
            yield
            out, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    count, failed = map(int, out.split())
    if failed:
        raise RuntimeError(f"{failed} of {count} answers of the API were not 200")
    answers.append(count)


def measure(folder: Path, rounds: int) -> list[Row | Figure]:
    """Measure p50 and p99 of an ADD, one at a time, for each kind of client."""
    spawn, poll = tool("spawn", folder), tool("poll", folder)
    idle: list[Batch] = []
    busy: dict[str, list[Batch]] = defaultdict(list)
    answers: dict[str, list[float]] = defaultdict(list)
    with our_node(folder, PODS, "bench-polling") as node:
        assert node.agent is not None
        socket = agent_process.api_socket(node.agent)

        def added() -> Batch:
            batch = run(node, spawn, "ADD", PODS, 1)
            node.verify_added(PODS)
            return batch

        def deleted() -> None:
            run(node, spawn, "DEL", PODS, 1)
            node.verify_deleted()

        for _ in range(rounds + 1):
            idle.append(added())
            deleted()
            for what, pause in PAUSES.items():
                with polled(poll, socket, pause, answers[what]):
                    busy[what].append(run(node, spawn, "ADD", PODS, 1))
                node.verify_added(PODS)
                deleted()
    rows: list[Row | Figure] = []
    for what in PAUSES:
        for name, target in (("p50", None), ("p99", TARGET)):
            # The first round warms up.
            ours, peer = (
                Sample(tuple(getattr(batch, name) for batch in side[1:])) for side in (busy[what], idle)
            )
            figure = f"ADD while {CLIENTS} clients ask {what}, {name}"
            rows.append(Row(figure, "ms", ours, "no requests", peer, target, faster=False))
        rows.append(Figure(f"answers to {CLIENTS} clients {what}", "", Sample(tuple(answers[what][1:]))))
    return rows
