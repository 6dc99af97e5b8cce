"""API clients: answers per second, latency of a request, and start time of the command.

Ten clients measure the rate, one the latency; of an idle agent, and of one that adds and deletes pods, ten at
a time, without a pause. Rounds are interleaved.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from hive.lab import agent_process
from tests.bench.nodes import PluginNode, our_node
from tests.bench.podadd import run
from tests.bench.polling import polled
from tests.bench.stats import Figure, Row, Sample, percentile
from tests.bench.tools import tool

PODS, AT_ONCE = 50, 10
SECONDS = 2.0
"""Duration of each figure in a round."""
PATHS = ("/v1/config", "/v1/endpoint")
SLOWEST = 150.0
"""Limit in ms for the command."""
STARTS = 5


@contextlib.contextmanager
def busy(node: PluginNode, spawn: Path) -> Iterator[None]:
    """Add and delete pods during the block. Raises RuntimeError if one fails."""
    over = threading.Event()
    failed: list[BaseException] = []

    def churn() -> None:
        try:
            while not over.is_set():
                for command in ("ADD", "DEL"):
                    run(node, spawn, command, PODS, AT_ONCE)
        except BaseException as error:  # noqa: BLE001  # raised in the thread that joins
            failed.append(error)

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    if failed:
        raise RuntimeError("pods could not be added meanwhile") from failed[0]


def latencies(path: Path, target: str) -> list[float]:
    """Return the ms of each request of one client, over one connection. Raises RuntimeError."""
    connection = http.client.HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX)
    took = []
    with contextlib.closing(connection):
        connection.sock.connect(str(path))
        end = time.perf_counter() + SECONDS
        while (began := time.perf_counter()) < end:
            connection.request("GET", target)
            answer = connection.getresponse()
            answer.read()
            if answer.status != http.client.OK:
                raise RuntimeError(f"GET {target} was answered with {answer.status}")
            took.append((time.perf_counter() - began) * 1000)
    return took


def answers(folder: Path, rounds: int) -> list[Row | Figure]:
    """Return requests per second and p99, idle and busy."""
    spawn, poll = tool("spawn", folder), tool("poll", folder)
    rates: dict[str, list[float]] = defaultdict(list)
    slow: dict[tuple[str, str], list[float]] = defaultdict(list)
    with our_node(folder, PODS, "bench-clients") as node:
        assert node.agent is not None
        path = agent_process.api_socket(node.agent)
        for _ in range(rounds):
            for state in ("idle", "busy"):
                with busy(node, spawn) if state == "busy" else contextlib.nullcontext():
                    counted: list[float] = []
                    began = time.monotonic()
                    with polled(poll, path, 0, counted):
                        time.sleep(SECONDS)
                    rates[state].append(counted[0] / (time.monotonic() - began))
                    for target in PATHS:
                        slow[state, target].append(percentile(latencies(path, target), 0.99))
    found: list[Row | Figure] = [
        Figure(f"API, requests a second, 10 clients, agent {state}", "1/s", Sample(tuple(values)))
        for state, values in rates.items()
    ]
    for target in PATHS:
        alone, beside = (Sample(tuple(slow[state, target])) for state in ("idle", "busy"))
        what = f"GET {target}, p99, agent busy"
        found.append(Row(what, "ms", beside, "idle", alone, None, faster=False))
    return found


def commands(folder: Path, rounds: int) -> list[Row | Figure]:
    """Return the duration of ``hive status`` beside that of a Python that does nothing."""
    with our_node(folder, 0, "bench-commands") as node:
        assert node.agent is not None
        path = agent_process.api_socket(node.agent)
        ours = [sys.executable, "-m", "hive", "status", "--brief", "-H", str(path)]
        nothing = [sys.executable, "-c", "pass"]
        took: dict[str, list[float]] = defaultdict(list)
        for _ in range(rounds + 1):
            for name, command in (("ours", ours), ("nothing", nothing)):
                began = time.perf_counter()
                for _ in range(STARTS):
                    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                took[name].append((time.perf_counter() - began) / STARTS * 1000)
    status, empty = (Sample(tuple(took[name][1:])) for name in ("ours", "nothing"))
    return [
        Row("hive status --brief", "ms", status, "python -c pass", empty, None, faster=False),
        Figure("hive status --brief, in all", "ms", status, SLOWEST),
    ]
